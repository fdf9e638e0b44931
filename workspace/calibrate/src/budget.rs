//! How many heads each layer gets of a number of active heads for all layers together.

/// The numbers of units, heads or groups of them, that the layers get: `costs[l][n - 1]` is what layer l
/// costs with n of them, at least one. The sum of the costs is the least one for the sum of the units,
/// `total`; of equal sums it is the one whose first layers have the fewest. `None` if `total` is fewer than
/// the layers or more than all units.
pub(crate) fn allocate(costs: &[Vec<f64>], total: usize) -> Option<Vec<usize>> {
    // least[l][t]: the least cost of the layers from l on with t units together.
    let mut least = vec![vec![f64::INFINITY; total + 1]; costs.len() + 1];
    least[costs.len()][0] = 0.0;
    for (layer, costs) in costs.iter().enumerate().rev() {
        for of_all in 0..=total {
            let rest = &least[layer + 1];
            let sums = (1..=costs.len().min(of_all)).map(|n| costs[n - 1] + rest[of_all - n]);
            least[layer][of_all] = sums.fold(f64::INFINITY, f64::min);
        }
    }
    let mut left = total;
    let mut units = Vec::with_capacity(costs.len());
    for (layer, costs) in costs.iter().enumerate() {
        let sum = |n: usize| costs[n - 1] + least[layer + 1][left - n];
        let number = (1..=costs.len().min(left))
            .find(|&n| sum(n) == least[layer][left] && sum(n).is_finite())?;
        left -= number;
        units.push(number);
    }
    (left == 0).then_some(units)
}

/// The costs of 1 to `last` units by those of some, of which the first is 1 and the last is `last`: in between
/// on straight lines.
pub(crate) fn between(measured: &[(usize, f64)]) -> Vec<f64> {
    let mut costs: Vec<f64> = measured.first().map(|&(_, cost)| cost).into_iter().collect();
    for pair in measured.windows(2) {
        let [(first, from), (last, to)] = [pair[0], pair[1]];
        costs.extend((first + 1..=last).map(|number| {
            let part = (number - first) as f64 / (last - first) as f64;
            from + (to - from) * part
        }));
    }
    costs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cost(costs: &[Vec<f64>], units: &[usize]) -> f64 {
        costs.iter().zip(units).map(|(costs, &n)| costs[n - 1]).sum()
    }

    /// Every allocation of `total`.
    fn all(costs: &[Vec<f64>], total: usize) -> Vec<Vec<usize>> {
        let Some((first, rest)) = costs.split_first() else {
            return if total == 0 { vec![Vec::new()] } else { Vec::new() };
        };
        (1..=first.len().min(total))
            .flat_map(|n| {
                let with = move |units: Vec<usize>| [vec![n], units].concat();
                all(rest, total - n).into_iter().map(with)
            })
            .collect()
    }

    proptest! {
        #[test]
        fn no_other_allocation_costs_less(
            // Whole numbers, so that sums are exact and many are equal.
            costs in prop::collection::vec(prop::collection::vec(0u8..9, 1..6), 1..5),
            total in 0usize..22,
        ) {
            let costs: Vec<Vec<f64>> =
                costs.into_iter().map(|of| of.into_iter().map(f64::from).collect()).collect();
            let all = all(&costs, total);
            let least = all.iter().map(|units| cost(&costs, units)).fold(f64::INFINITY, f64::min);
            // They are listed with the fewest units of the first layers first.
            let expected = all.iter().find(|units| cost(&costs, units) == least);
            prop_assert_eq!(allocate(&costs, total), expected.cloned());
        }
    }

    #[test]
    fn heads_go_where_they_save_most() {
        let costs = vec![vec![8.0, 4.0, 2.0, 0.0], vec![1.0, 0.5, 0.25, 0.0]];
        assert_eq!(allocate(&costs, 5), Some(vec![4, 1]));
        assert_eq!(allocate(&costs, 8), Some(vec![4, 4]));
        assert_eq!(allocate(&costs, 2), Some(vec![1, 1]));
        assert_eq!((allocate(&costs, 1), allocate(&costs, 9)), (None, None));
        // Equal layers: the last ones get more.
        assert_eq!(allocate(&vec![vec![2.0, 1.0, 0.0]; 3], 5), Some(vec![1, 1, 3]));
    }

    #[test]
    fn costs_that_are_no_numbers_give_no_allocation() {
        assert_eq!(allocate(&[vec![f64::NAN, 1.0], vec![1.0]], 2), None);
        assert_eq!(allocate(&[vec![f64::INFINITY], vec![1.0]], 2), None);
    }

    #[test]
    fn numbers_between_measured_ones_cost_what_is_between() {
        assert_eq!(between(&[(1, 9.0), (2, 8.0), (4, 2.0), (5, 0.0)]), [9.0, 8.0, 5.0, 2.0, 0.0]);
        assert_eq!(between(&[(1, 0.0)]), [0.0]);
    }
}
