//! Every operation on groups of threads.

use moh_comm::World;

#[test]
fn every_operation_is_right_on_threads() {
    for size in [1, 2, 3, 4, 6, 8] {
        std::thread::scope(|scope| {
            for world in World::threads(size) {
                scope.spawn(move || {
                    crate::collectives::check(world.group());
                    world.close().unwrap();
                });
            }
        });
    }
}
