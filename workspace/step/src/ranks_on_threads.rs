//! [`Ranks`] that threads play, for unit tests.

use moh_kernels::Cpu;
use moh_step::Ranks;

use crate::on_ranks::on_ranks;

/// The results of `work` on each of `size` ranks, each a thread.
pub fn ranks_on_threads<R: Send>(
    size: usize,
    work: impl Fn(&mut Ranks<Cpu>) -> R + Sync,
) -> Vec<R> {
    on_ranks(size, |world| work(&mut Ranks::new(Cpu, world.group().clone()).unwrap()))
}
