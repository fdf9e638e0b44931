//! Threads that play ranks, for unit tests.

use moh_comm::World;

/// The results of `work` on each of `size` ranks, in rank order. Operators of a rank run on one thread.
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
