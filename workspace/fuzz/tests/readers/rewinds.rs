//! The record of a run's returns to earlier steps.

use moh_fuzz::Target;
use moh_run_directory::{Rewinds, RunDirectory};

use crate::{ALLOCATOR, outcome};

#[test]
fn a_mutated_record_of_rewinds_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDirectory::new(dir.path());
    let seed = "{\"number\":1,\"step\":100,\"skipped_steps\":[105,106],\"samples\":[400,449],\
                \"attempt\":1,\"initial\":false}\n{\"number\":2,\"step\":0,\"skipped_steps\":[7,9],\
                \"samples\":[0,99],\"attempt\":2,\"initial\":true}\n";
    let seeds = [seed.as_bytes().to_vec()];
    // A file of at most a megabyte, its lines and what they are parsed into.
    let target = Target { name: "rewinds", seeds: &seeds, memory: 8 << 20, allocator: &ALLOCATOR };
    target.run(|input| {
        std::fs::write(run.rewinds(), input).unwrap();
        let rewinds = Rewinds::read(&run).map_err(|error| error.to_string())?;
        for step in [0, 50, 100, u64::MAX] {
            let _ = (rewinds.due(step, 0), rewinds.taken_before(step), rewinds.num_samples());
        }
        outcome(Ok::<_, String>(()))
    });
}
