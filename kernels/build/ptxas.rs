//! The report of the assembler `ptxas -v` on each kernel, and the faults in it that fail the build.

use std::fmt::Write as _;

/// Codes of notes on kernels that do not run as written: registers are not moved between warpgroups
/// (C7508), matrix instructions are serialised (C7510 to C7515, C7519).
const CODES: [&str; 8] = ["C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "C7519"];
/// The prefix of kernels that must not spill.
const TUNED: &str = "hopper_";

/// The resources of a kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    pub name: String,
    pub architecture: String,
    /// Registers per thread at the kernel's start.
    pub registers: u32,
    /// Bytes of spilled registers per thread, stored to memory and loaded from it.
    pub spill_stores: u32,
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared_bytes: u32,
}

/// Returns the kernels of a report, in its order.
pub fn kernels(report: &str) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for line in report.lines() {
        if line.contains("Compiling entry function") {
            let mut quoted = line.split('\'').skip(1).step_by(2).map(str::to_owned);
            let (name, architecture) = (quoted.next(), quoted.next());
            kernels.push(Kernel {
                name: name.unwrap_or_default(),
                architecture: architecture.unwrap_or_default(),
                ..Kernel::default()
            });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        let set = |number: &mut u32, unit| *number = before(line, unit).unwrap_or(*number);
        set(&mut kernel.registers, " registers");
        set(&mut kernel.spill_stores, " bytes spill stores");
        set(&mut kernel.spill_loads, " bytes spill loads");
        set(&mut kernel.shared_bytes, " bytes smem");
    }
    kernels
}

fn before(line: &str, unit: &str) -> Option<u32> {
    let text = &line[..line.find(unit)?];
    text.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Returns the faults in a report, one line each.
pub fn faults(report: &str, kernels: &[Kernel]) -> Vec<String> {
    let noted = report.lines().filter(|line| CODES.iter().any(|code| line.contains(code)));
    let spills = kernels.iter().filter(|kernel| kernel.name.starts_with(TUNED));
    let spills = spills.filter(|kernel| kernel.spill_stores + kernel.spill_loads > 0);
    let spills = spills.map(|kernel| {
        let Kernel { name, architecture, spill_stores, spill_loads, .. } = kernel;
        format!("{name} ({architecture}) spills: {spill_stores} bytes stored, {spill_loads} loaded")
    });
    noted.map(|line| line.trim().to_owned()).chain(spills).collect()
}

/// Returns a table in Markdown.
pub fn table(kernels: &[Kernel]) -> String {
    let mut sorted: Vec<&Kernel> = kernels.iter().collect();
    sorted.sort_by_key(|kernel| (&kernel.architecture, &kernel.name));
    let mut text = String::from(
        "| kernel | architecture | registers | bytes spilled | static shared bytes |\n|---|---|---|---|---|\n",
    );
    for Kernel { name, architecture, registers, spill_stores, spill_loads, shared_bytes } in sorted
    {
        let spilled = spill_stores.max(spill_loads);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {name} | {architecture} | {registers} | {spilled} | {shared_bytes} |"
        );
    }
    text
}
