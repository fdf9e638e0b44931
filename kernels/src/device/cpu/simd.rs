//! Loops compiled for the instructions of the machine that runs them.
//!
//! The build targets any machine of its architecture (SSE2 on x86-64). Expressions in
//! [`vectorized!`] are also compiled for AVX2 and AVX-512, and the best variant is chosen at run
//! time.

/// Evaluates an expression compiled for the machine's best vector instructions.
///
/// This applies only to inlined code: functions called by the expression must be
/// `#[inline(always)]`. The choice costs an atomic load, so the expression should be a loop over
/// hundreds of elements, not one step of a loop. Multiplication and addition are rounded separately,
/// and sums keep the order of the source, so results have the same bits on every machine.
///
/// It is a macro because the compiler inlines a closure into the variants for sure only if the closure is
/// `#[inline(always)]` and can be called only once. An adapter from `FnOnce` to another closure would be a function of
/// its own, compiled for the oldest machine.
macro_rules! vectorized {
    ($body:expr) => {
        vectorized!(pulp::Arch::new(), $body)
    };
    ($arch:expr, $body:expr) => {{
        let once = $crate::simd::Once;
        $arch.dispatch(
            #[inline(always)]
            || {
                let _consumed = once;
                $body
            },
        )
    }};
}

/// A value that a closure consumes, so that the closure can be called only once.
pub(crate) struct Once;

pub(crate) use vectorized;

#[cfg(test)]
pub(crate) mod tests {
    use pulp::Arch;

    /// Returns the sets of vector instructions, starting with scalar code.
    pub(crate) fn kinds() -> Vec<Arch> {
        let mut kinds = vec![Arch::Scalar, Arch::new()];
        #[cfg(target_arch = "x86_64")]
        kinds.extend(pulp::x86::V3::try_new().map(Arch::V3));
        kinds
    }

    #[test]
    fn an_expression_borrows_and_returns() {
        let x: Vec<f32> = (0..100).map(|i| i as f32).collect();
        let mut doubled = vec![0f32; 100];
        let last = vectorized!({
            for (slot, &value) in doubled.iter_mut().zip(&x) {
                *slot = 2.0 * value;
            }
            doubled[99]
        });
        assert_eq!((doubled[1], last), (2.0, 198.0));
    }
}
