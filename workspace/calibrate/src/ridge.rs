//! Ridge least squares in f64: the best linear map from inputs to targets.
//!
//! With inputs F `[N, n]` and targets Y `[N, m]`, |Y - F W^T|^2 + lambda |W - W0|^2 is least for W = W0 + (Y - F
//! W0^T)^T F (F^T F + lambda I)^-1. This needs only the products F^T F, Y^T F and |Y|^2, which are sums over tokens.
//!
//! The order of computation of every element depends only on the sizes, so that the bits do not depend on the number of
//! threads.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use crate::{Error, Result};

/// Columns of a block of the factor.
const BLOCK: usize = 64;
/// Number of rows that a thread computes at a time.
const ROWS: usize = 64;

/// The sums over tokens that a least-squares fit needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Products {
    /// F^T F, `[n, n]`.
    pub gram: Array2<f64>,
    /// Y^T F, `[m, n]`.
    pub cross: Array2<f64>,
    /// |Y|^2.
    pub target: f64,
}

/// The ridges that [`Products::best_ridge`] compares, from the largest on. A ridge that is too small increases the
/// error.
const RIDGES: [f64; 5] = [10.0, 1.0, 0.1, 0.01, 0.001];

impl Products {
    pub fn zeros(n: usize, m: usize) -> Self {
        Products { gram: Array2::zeros((n, n)), cross: Array2::zeros((m, n)), target: 0.0 }
    }

    /// Returns |Y - F W^T|^2 / |Y|^2 for the map W, `[m, n]`; 0 if Y is zero.
    pub fn error(&self, weight: ArrayView2<'_, f64>) -> f64 {
        // |Y|^2 - 2 <W, Y^T F> + <W, W F^T F>, by rows of W.
        let rows = weight.axis_chunks_iter(Axis(0), ROWS);
        let rows = rows.zip(self.cross.axis_chunks_iter(Axis(0), ROWS)).collect::<Vec<_>>();
        let sums: Vec<f64> = rows
            .into_par_iter()
            .map(|(weight, cross)| {
                let mut change = weight.dot(&self.gram);
                change.scaled_add(-2.0, &cross);
                weight.iter().zip(&change).map(|(w, c)| w * c).sum()
            })
            .collect();
        let residual = self.target + sums.iter().sum::<f64>();
        if self.target > 0.0 { residual.max(0.0) / self.target } else { 0.0 }
    }

    /// Returns the sums over the tokens of both products.
    pub fn and(mut self, other: &Products) -> Self {
        self.gram += &other.gram;
        self.cross += &other.cross;
        self.target += other.target;
        self
    }

    /// Fails if a product is not finite.
    pub fn check(&self) -> Result<()> {
        let is_finite = |values: &Array2<f64>| values.iter().all(|value| value.is_finite());
        match is_finite(&self.gram) && is_finite(&self.cross) && self.target.is_finite() {
            true => Ok(()),
            false => Err(Error::NOT_FINITE),
        }
    }

    /// Returns the ridge with the least error of the fit on `others`, tokens that are not fitted to. Compares ridges
    /// from the largest on, until the error grows.
    pub fn best_ridge(&self, start: ArrayView2<'_, f64>, others: &Products) -> Result<f64> {
        let (mut least, mut best) = (f64::INFINITY, RIDGES[0]);
        for ridge in RIDGES {
            let error = others.error(self.fit(start, ridge)?.view());
            if error >= least {
                break;
            }
            (least, best) = (error, ridge);
        }
        Ok(best)
    }

    /// Returns the fit W, `[m, n]`, nearest to W0, `start` `[m, n]`; lambda is `ridge` times the mean of the diagonal
    /// of F^T F.
    ///
    /// # Errors
    /// Fails if a product is not finite, and if F^T F + lambda I is not positive definite.
    pub fn fit(&self, start: ArrayView2<'_, f64>, ridge: f64) -> Result<Array2<f64>> {
        let factor = self.factor(ridge)?;
        let mut weight = self.cross.clone();
        self.rows(&mut weight, start, |mut rows, start| {
            solve_forwards(factor.view(), rows.view_mut());
            solve_backwards(factor.view(), rows.view_mut());
            rows += &start;
        });
        Ok(weight)
    }

    /// Returns (|Y - F W^T|^2 + lambda |W - W0|^2) / |Y|^2 for the W of [`Self::fit`]; 0 if Y is zero. Does not compute
    /// W, which saves half of the work.
    pub fn least(&self, start: ArrayView2<'_, f64>, ridge: f64) -> Result<f64> {
        let factor = self.factor(ridge)?;
        let mut weight = self.cross.clone();
        // The numerator is |Y - F W0^T|^2 - |Z|^2 with Z = B L^-T, and |Y - F W0^T|^2 = |Y|^2 - <W0, Y^T F + B>.
        let gains = self.rows(&mut weight, start, |mut rows, start| {
            let of_start: f64 = rows.iter().zip(&start).map(|(b, w)| b * w).sum();
            solve_forwards(factor.view(), rows.view_mut());
            of_start + rows.iter().map(|z| z * z).sum::<f64>()
        });
        let of_start: f64 = start.iter().zip(&self.cross).map(|(w, c)| w * c).sum();
        let least = self.target - of_start - gains.iter().sum::<f64>();
        Ok(if self.target > 0.0 { least.max(0.0) / self.target } else { 0.0 })
    }

    /// Returns the Cholesky factor of F^T F + lambda I, in the lower triangle.
    fn factor(&self, ridge: f64) -> Result<Array2<f64>> {
        self.check()?;
        let mut factor = self.gram.clone();
        let lambda = ridge * factor.diag().mean().unwrap_or(0.0);
        factor.diag_mut().iter_mut().for_each(|diagonal| *diagonal += lambda);
        cholesky(factor.view_mut())?;
        Ok(factor)
    }

    /// Changes `cross` from Y^T F to B = Y^T F - W0 F^T F. Calls `with` with some rows of B and W0 at a time.
    fn rows<R: Send>(
        &self,
        cross: &mut Array2<f64>,
        start: ArrayView2<'_, f64>,
        with: impl Fn(ArrayViewMut2<'_, f64>, ArrayView2<'_, f64>) -> R + Sync,
    ) -> Vec<R> {
        let rows = cross.axis_chunks_iter_mut(Axis(0), ROWS);
        let rows: Vec<_> = rows.zip(start.axis_chunks_iter(Axis(0), ROWS)).collect();
        let of_rows = |(mut rows, start): (ArrayViewMut2<'_, f64>, ArrayView2<'_, f64>)| {
            general_mat_mul(-1.0, &start, &self.gram, 1.0, &mut rows);
            with(rows, start)
        };
        rows.into_par_iter().map(of_rows).collect()
    }
}

/// Replaces the lower triangle of a symmetric matrix by its Cholesky factor L, by blocks of columns.
fn cholesky(mut a: ArrayViewMut2<'_, f64>) -> Result<()> {
    let n = a.nrows();
    for first in (0..n).step_by(BLOCK) {
        let end = (first + BLOCK).min(n);
        let (mut rows, mut below) = a.view_mut().split_at(Axis(0), end);
        let mut diagonal = rows.slice_mut(s![first.., first..end]);
        factor_block(diagonal.view_mut())?;
        let chunks: Vec<_> = below.axis_chunks_iter_mut(Axis(0), ROWS).collect();
        chunks.into_par_iter().for_each(|mut rows| {
            substitute(diagonal.view(), rows.slice_mut(s![.., first..end]));
        });
        let panel = below.slice(s![.., first..end]).to_owned();
        let chunks: Vec<_> = below.axis_chunks_iter_mut(Axis(0), ROWS).enumerate().collect();
        chunks.into_par_iter().for_each(|(chunk, mut rows)| {
            let (start, stop) = (chunk * ROWS, chunk * ROWS + rows.nrows());
            let mut lower = rows.slice_mut(s![.., end..end + stop]);
            let (left, right) = (panel.slice(s![start..stop, ..]), panel.slice(s![..stop, ..]));
            general_mat_mul(-1.0, &left, &right.t(), 1.0, &mut lower);
        });
    }
    Ok(())
}

/// Replaces the lower triangle of a block by its Cholesky factor.
fn factor_block(mut a: ArrayViewMut2<'_, f64>) -> Result<()> {
    let mut columns = columns_of(a.view());
    for j in 0..a.nrows() {
        let factors = columns.slice(s![..j, j]).to_owned();
        subtract(&mut columns, j, 0, factors.view());
        let root = columns[[j, j]].sqrt();
        // The root of a negative number is NaN.
        if root.is_nan() || root == 0.0 {
            return Err(Error::SINGULAR);
        }
        columns.row_mut(j).mapv_inplace(|x| x / root);
        a[[j, j]] = root;
        a.slice_mut(s![j + 1.., j]).assign(&columns.slice(s![j, j + 1..]));
    }
    Ok(())
}

/// Replaces the rows of a block B by X with X L^T = B.
fn substitute(factor: ArrayView2<'_, f64>, mut rows: ArrayViewMut2<'_, f64>) {
    let mut columns = columns_of(rows.view());
    for j in 0..factor.nrows() {
        subtract(&mut columns, j, 0, factor.slice(s![j, ..j]));
        columns.row_mut(j).mapv_inplace(|x| x / factor[[j, j]]);
    }
    rows.assign(&columns.t());
}

/// Replaces the rows of a block B by X with X L = B.
fn substitute_backwards(factor: ArrayView2<'_, f64>, mut rows: ArrayViewMut2<'_, f64>) {
    let mut columns = columns_of(rows.view());
    for j in (0..factor.nrows()).rev() {
        subtract(&mut columns, j, j + 1, factor.slice(s![j + 1.., j]));
        columns.row_mut(j).mapv_inplace(|x| x / factor[[j, j]]);
    }
    rows.assign(&columns.t());
}

/// Returns a copy of the transpose. Its rows are contiguous, so that a step of a solve computes all rows of the matrix at
/// a time.
fn columns_of(matrix: ArrayView2<'_, f64>) -> Array2<f64> {
    matrix.t().as_standard_layout().into_owned()
}

/// Subtracts from column `j` the sum of the columns from `first` on, each multiplied by its factor.
fn subtract(columns: &mut Array2<f64>, j: usize, first: usize, factors: ArrayView1<'_, f64>) {
    let mut sum = Array1::zeros(columns.ncols());
    for (column, &factor) in columns.rows().into_iter().skip(first).zip(factors) {
        sum.scaled_add(factor, &column);
    }
    columns.row_mut(j).zip_mut_with(&sum, |x, sum| *x -= sum);
}

/// Replaces rows B by X with X L^T = B.
fn solve_forwards(factor: ArrayView2<'_, f64>, mut rows: ArrayViewMut2<'_, f64>) {
    let n = factor.nrows();
    for first in (0..n).step_by(BLOCK) {
        let end = (first + BLOCK).min(n);
        let (mut known, mut rest) = rows.view_mut().split_at(Axis(1), end);
        let mut known = known.slice_mut(s![.., first..]);
        let diagonal = factor.slice(s![first..end, first..end]);
        substitute(diagonal, known.view_mut());
        let below = factor.slice(s![end.., first..end]);
        general_mat_mul(-1.0, &known, &below.t(), 1.0, &mut rest);
    }
}

/// Replaces rows B by X with X L = B.
fn solve_backwards(factor: ArrayView2<'_, f64>, mut rows: ArrayViewMut2<'_, f64>) {
    let n = factor.nrows();
    for first in (0..n).step_by(BLOCK).rev() {
        let end = (first + BLOCK).min(n);
        let (mut rest, mut known) = rows.view_mut().split_at(Axis(1), first);
        let mut known = known.slice_mut(s![.., ..end - first]);
        let diagonal = factor.slice(s![first..end, first..end]);
        substitute_backwards(diagonal, known.view_mut());
        let before = factor.slice(s![first..end, ..first]);
        general_mat_mul(-1.0, &known, &before, 1.0, &mut rest);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn random(rng: &mut StdRng, rows: usize, columns: usize) -> Array2<f64> {
        Array2::from_shape_fn((rows, columns), |_| rng.random_range(-1.0..1.0))
    }

    fn products(inputs: &Array2<f64>, targets: &Array2<f64>) -> Products {
        Products {
            gram: inputs.t().dot(inputs),
            cross: targets.t().dot(inputs),
            target: targets.iter().map(|y| y * y).sum(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_fit_has_the_gradient_zero(
            n in 1usize..150, m in 1usize..80, more in 0usize..40, seed: u64,
        ) {
            let mut rng = StdRng::seed_from_u64(seed);
            let (inputs, targets) = (random(&mut rng, n + more, n), random(&mut rng, n + more, m));
            let start = random(&mut rng, m, n);
            let products = products(&inputs, &targets);
            let fit = products.fit(start.view(), 1e-2).unwrap();
            // The gradient of half of |Y - F W^T|^2 + lambda |W - W0|^2, with respect to W.
            let lambda = 1e-2 * products.gram.diag().mean().unwrap();
            let gradient = fit.dot(&products.gram) - &products.cross + (&fit - &start) * lambda;
            let largest = gradient.iter().fold(0f64, |most, value| most.max(value.abs()));
            prop_assert!(largest < 1e-8 * (n + more) as f64, "{largest}");
            let residual = &targets - &inputs.dot(&fit.t());
            let expected = residual.iter().map(|r| r * r).sum::<f64>() / products.target;
            let error = products.error(fit.view());
            prop_assert!((error - expected).abs() < 1e-9, "{error} {expected}");
            let change = &fit - &start;
            let penalty = lambda * change.iter().map(|c| c * c).sum::<f64>();
            let least = products.least(start.view(), 1e-2).unwrap();
            let expected = expected + penalty / products.target;
            prop_assert!((least - expected).abs() < 1e-9, "{least} {expected}");
        }
    }

    #[test]
    fn an_exact_map_is_found_and_kept() {
        let mut rng = StdRng::seed_from_u64(3);
        let (inputs, map) = (random(&mut rng, 300, 70), random(&mut rng, 20, 70));
        let products = products(&inputs, &inputs.dot(&map.t()));
        let found = products.fit(Array2::zeros((20, 70)).view(), 1e-12).unwrap();
        assert!(products.error(found.view()) < 1e-12);
        assert!((&found - &map).iter().all(|d| d.abs() < 1e-6));
        // A large ridge keeps the start.
        let start = random(&mut rng, 20, 70);
        let kept = products.fit(start.view(), 1e9).unwrap();
        assert!((&kept - &start).iter().all(|d| d.abs() < 1e-6));
    }

    #[test]
    fn the_best_ridge_has_the_least_error_of_other_tokens() {
        let mut rng = StdRng::seed_from_u64(6);
        let (start, map) = (random(&mut rng, 30, 60), random(&mut rng, 30, 60));
        let mut tokens = |tokens: usize, noise: f64| {
            let inputs = random(&mut rng, tokens, 60);
            let noise = random(&mut rng, tokens, 30) * noise;
            products(&inputs, &(inputs.dot(&(&start + &map * 0.1).t()) + noise))
        };
        let others = tokens(500, 1.0);
        let mut chosen = Vec::new();
        for fitted in [tokens(80, 4.0), tokens(80, 1.0), tokens(4000, 0.1)] {
            let best = fitted.best_ridge(start.view(), &others).unwrap();
            let error = |ridge| others.error(fitted.fit(start.view(), ridge).unwrap().view());
            assert!(RIDGES.iter().all(|&ridge| error(best) <= error(ridge)), "{best}");
            chosen.push(best);
        }
        // Noise needs a larger ridge.
        assert!(chosen[0] > chosen[2] && chosen.is_sorted_by(|a, b| a >= b), "{chosen:?}");
    }

    #[test]
    fn sums_over_both_are_those_of_all_tokens() {
        let mut rng = StdRng::seed_from_u64(7);
        let (inputs, targets) = (random(&mut rng, 50, 4), random(&mut rng, 50, 3));
        let rows = |matrix: &Array2<f64>, rows| matrix.slice(s![rows, ..]).to_owned();
        let part =
            |from: usize, to: usize| products(&rows(&inputs, from..to), &rows(&targets, from..to));
        let both = part(0, 20).and(&part(20, 50));
        let all = products(&inputs, &targets);
        assert!((&both.gram - &all.gram).iter().all(|d| d.abs() < 1e-12));
        assert!((&both.cross - &all.cross).iter().all(|d| d.abs() < 1e-12));
        assert!((both.target - all.target).abs() < 1e-12);
    }

    #[test]
    fn the_bits_do_not_depend_on_the_threads() {
        let mut rng = StdRng::seed_from_u64(4);
        let products = products(&random(&mut rng, 400, 200), &random(&mut rng, 400, 150));
        let start = random(&mut rng, 150, 200);
        let fit = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| products.fit(start.view(), 1e-3).unwrap())
        };
        assert_eq!(fit(1), fit(3));
    }

    #[test]
    fn products_that_have_no_fit_are_refused() {
        let mut rng = StdRng::seed_from_u64(5);
        let start = Array2::zeros((2, 3));
        let good = products(&random(&mut rng, 9, 3), &random(&mut rng, 9, 2));
        for place in 0..3 {
            let mut bad = good.clone();
            match place {
                0 => bad.gram[[1, 2]] = f64::NAN,
                1 => bad.cross[[0, 0]] = f64::INFINITY,
                _ => bad.target = f64::NAN,
            }
            let message = bad.fit(start.view(), 1e-3).unwrap_err().to_string();
            assert!(message.contains("a value that is not finite"), "{message}");
        }
        let zero = Products::zeros(3, 2);
        let message = zero.fit(start.view(), 1e-3).unwrap_err().to_string();
        assert!(message.contains("the output projection has no fit"), "{message}");
    }
}
