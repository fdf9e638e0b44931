//! Parsing of the assembler's report by the build (build/ptxas.rs).

#[path = "../../build/ptxas.rs"]
mod report;

use report::{Kernel, faults, kernels, table};

const REPORT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'hopper_backward_d128' for 'sm_90a'
ptxas info    : Function properties for hopper_backward_d128
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 8 barriers, 16 bytes smem
ptxas info    : Compile time = 812.5 ms
ptxas info    : Compiling entry function 'add_f32' for 'sm_90a'
ptxas info    : Function properties for add_f32
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers
";

fn kernel(name: &str, registers: u32, spills: (u32, u32), shared_bytes: u32) -> Kernel {
    let (spill_stores, spill_loads) = spills;
    let (name, architecture) = (name.into(), "sm_90a".into());
    Kernel { name, architecture, registers, spill_stores, spill_loads, shared_bytes }
}

#[test]
fn a_report_gives_what_each_kernel_takes() {
    let found = kernels(REPORT);
    let expected =
        [kernel("hopper_backward_d128", 168, (0, 0), 16), kernel("add_f32", 26, (12, 20), 0)];
    assert_eq!(found, expected);
    assert_eq!(faults(REPORT, &found), [""; 0]);
    let rows =
        "| add_f32 | sm_90a | 26 | 20 | 0 |\n| hopper_backward_d128 | sm_90a | 168 | 0 | 16 |\n";
    assert!(table(&found).ends_with(rows));
}

#[test]
fn serialised_products_ignored_registers_and_spills_are_faults() {
    let spilled = REPORT.replace("0 bytes spill stores, 0 bytes", "8 bytes spill stores, 4 bytes");
    let found = faults(&spilled, &kernels(&spilled));
    assert_eq!(found, ["hopper_backward_d128 (sm_90a) spills: 8 bytes stored, 4 loaded"]);
    for note in [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are \
         serialized due to non wgmma instructions in the function 'hopper_forward_d64'",
        "ptxas warning : (C7508) setmaxnreg ignored to maintain minimum register requirements",
    ] {
        assert_eq!(faults(note, &kernels(note)), [note]);
    }
}

#[test]
fn a_report_of_nothing_has_no_kernels() {
    for text in ["", "\n\n", "Compiling entry function", "' registers"] {
        assert!(kernels(text).iter().all(|kernel| kernel.name.is_empty()), "{text}");
    }
}
