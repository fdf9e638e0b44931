//! Every operation on groups of threads.

use moh_comm::World;

fn every_operation_is_right_on(size: usize) {
    let ranks: Vec<_> = World::threads(size)
        .into_iter()
        .map(|world| {
            std::thread::spawn(move || {
                crate::collectives::check(world.group());
                world.close().unwrap();
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
}

#[test]
fn every_operation_is_right_on_1_thread() {
    every_operation_is_right_on(1);
}

#[test]
fn every_operation_is_right_on_2_threads() {
    every_operation_is_right_on(2);
}

#[test]
fn every_operation_is_right_on_3_threads() {
    every_operation_is_right_on(3);
}

#[test]
fn every_operation_is_right_on_4_threads() {
    every_operation_is_right_on(4);
}

#[test]
fn every_operation_is_right_on_6_threads() {
    every_operation_is_right_on(6);
}

#[test]
fn every_operation_is_right_on_8_threads() {
    every_operation_is_right_on(8);
}
