//! `moh-bench machine`: the processor and the machine's limits, which a figure names.

use moh_kernels::{Backend, Bf16Path};
use moh_program::processor;
use serde_json::json;

use crate::device::{Bench, DeviceArguments, Measurement};
use crate::limits::MachineLimits;

#[derive(clap::Args)]
pub struct MachineArguments {
    #[command(flatten)]
    device: DeviceArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &MachineArguments) -> anyhow::Result<()> {
    let machine = arguments.device.measure(Limits)?;
    let processor = processor::label();
    let json = json!({
        "processor": processor,
        "bf16_path": Bf16Path::in_use().to_string(),
        "machine": machine.json(),
    });
    crate::print(arguments.json, &json, &format!("{processor}: {}", machine.line()))
}

struct Limits;

impl Measurement for Limits {
    type Output = MachineLimits;

    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<MachineLimits> {
        MachineLimits::measure(bench)
    }
}
