//! Every case that benchmarks measure runs.

use moh_kernels::cases::{self, Sizes, Work};
use moh_kernels::{Cpu, bf16};

#[test]
fn every_case_runs_twice_and_has_a_name_of_its_own() {
    let mut names = Vec::new();
    // Other element types differ only in loads and stores.
    for case in cases::all::<Cpu, bf16>(Sizes::SMALL) {
        let mut run = case.prepare(&Cpu).unwrap();
        run(&Cpu).unwrap();
        run(&Cpu).unwrap();
        let (Work::Operations(work) | Work::Bytes(work)) = case.work;
        assert!(work > 0, "{}", case.name);
        assert!(!names.contains(&case.name), "{}", case.name);
        names.push(case.name);
    }
}
