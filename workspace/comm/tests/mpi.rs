//! Groups of processes, where the feature `mpi` is on.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

#[cfg(feature = "mpi")]
mod collectives;
#[cfg(feature = "mpi")]
#[path = "support/launcher.rs"]
mod launcher;
#[cfg(feature = "mpi")]
mod processes;

#[cfg(not(feature = "mpi"))]
#[test]
fn without_mpi_there_are_no_groups_of_processes() {
    println!("skipped: built without --features mpi");
}
