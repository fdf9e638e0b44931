//! Means over the pairs of a layer's heads.

/// Sums of a quantity of two heads, over tokens that compute both.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pairs {
    heads: usize,
    /// `[heads, heads]`; the first head is the lower.
    sums: Vec<f64>,
    counts: Vec<f64>,
}

impl Pairs {
    pub fn new(heads: usize) -> Self {
        Pairs { heads, sums: vec![0.0; heads * heads], counts: vec![0.0; heads * heads] }
    }

    /// Adds a token's value for two heads.
    pub fn add(&mut self, low: usize, high: usize, value: f64) {
        self.sums[low * self.heads + high] += value;
        self.counts[low * self.heads + high] += 1.0;
    }

    pub fn merge(&mut self, other: &Self) {
        add(&mut self.sums, &other.sums);
        add(&mut self.counts, &other.counts);
    }

    /// Returns the mean of two different heads; `None` if no token computes both.
    pub fn mean(&self, head: usize, other: usize) -> Option<f64> {
        let at = head.min(other) * self.heads + head.max(other);
        (self.counts[at] > 0.0).then(|| self.sums[at] / self.counts[at])
    }

    /// Returns the mean over all pairs that some token computes; `None` if no token computes a pair.
    pub fn mean_of_all(&self) -> Option<f64> {
        let pairs =
            (0..self.heads).flat_map(|low| (low + 1..self.heads).map(move |high| (low, high)));
        super::mean(pairs.filter_map(|(low, high)| self.mean(low, high)))
    }

    /// Returns the means of all heads with all heads, 1 for a head with itself.
    pub fn matrix(&self) -> Vec<Vec<Option<f64>>> {
        let value = |head, other| if head == other { Some(1.0) } else { self.mean(head, other) };
        (0..self.heads)
            .map(|head| (0..self.heads).map(|other| value(head, other)).collect())
            .collect()
    }
}

/// Adds the elements of `from` to `to`.
pub(super) fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_of_the_tokens_of_a_pair_and_then_of_the_pairs() {
        let mut pairs = Pairs::new(3);
        pairs.add(0, 1, 1.0);
        pairs.add(0, 1, 0.0);
        pairs.add(1, 2, 1.0);
        let mut all = Pairs::new(3);
        all.merge(&pairs);
        assert_eq!((all.mean(1, 0), all.mean(2, 1), all.mean(0, 2)), (Some(0.5), Some(1.0), None));
        assert_eq!(all.mean_of_all(), Some(0.75));
        assert_eq!(all.matrix()[1], [Some(0.5), Some(1.0), Some(1.0)]);
        assert_eq!(Pairs::new(1).mean_of_all(), None);
    }
}
