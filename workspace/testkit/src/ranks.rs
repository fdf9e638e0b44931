//! Threads that act as ranks.

use moh_comm::World;
use moh_kernels::Cpu;
use moh_step::Ranks;

/// Returns the results of `work` on each of `size` ranks, in rank order. Operators of a rank run on a single thread.
pub fn on_ranks<R: Send>(size: usize, work: impl Fn(&World) -> R + Sync) -> Vec<R> {
    let on_rank = |world: World| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let found = pool.install(|| work(&world));
        world.close().unwrap();
        found
    };
    std::thread::scope(|scope| {
        let start = |world| scope.spawn(|| on_rank(world));
        let threads: Vec<_> = World::threads(size).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the results of `work` on each of `size` ranks, which are threads.
pub fn ranks_on_threads<R: Send>(
    size: usize,
    work: impl Fn(&mut Ranks<Cpu>) -> R + Sync,
) -> Vec<R> {
    on_ranks(size, |world| work(&mut Ranks::new(Cpu, world.group().clone()).unwrap()))
}
