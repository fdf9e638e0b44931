//! Loops compiled for the instructions of the machine that runs them.
//!
//! The build targets any machine of its architecture (SSE2 on x86-64). A closure that
//! [`vectorized`] runs is compiled for AVX2 and AVX-512 too and the best one is chosen at run time.

/// Runs `body` compiled for the machine's best vector instructions.
///
/// Only what is inlined into `body` is compiled so: functions that it calls are to be
/// `#[inline(always)]`. The choice costs an atomic load, so `body` should be a loop over some
/// hundred numbers, not one step of it. Multiplication and addition stay two roundings, and sums
/// keep the order that the source gives them, so results have the same bits on every machine.
#[inline(always)]
pub(crate) fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closure_borrows_and_returns() {
        let x: Vec<f32> = (0..100).map(|i| i as f32).collect();
        let mut doubled = vec![0f32; 100];
        let last = vectorized(|| {
            for (slot, &value) in doubled.iter_mut().zip(&x) {
                *slot = 2.0 * value;
            }
            doubled[99]
        });
        assert_eq!((doubled[1], last), (2.0, 198.0));
    }
}
