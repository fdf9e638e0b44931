//! `moh-bench machine`: prints the processor and the machine's limits, for figures.

use moh_kernels::{Backend, Bf16Path};
use moh_program::processor;
use serde_json::json;

use crate::device::{Bench, DeviceArguments, Measurement};

#[derive(clap::Args)]
pub struct MachineArguments {
    #[command(flatten)]
    device: DeviceArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &MachineArguments) -> anyhow::Result<()> {
    let ((), machine) = arguments.device.measure(())?;
    let processor = processor::label();
    let json = json!({
        "processor": processor,
        "bf16_path": Bf16Path::in_use().to_string(),
        "machine": machine.json(),
    });
    crate::print(arguments.json, &json, &format!("{processor}: {}", machine.line()))
}

/// Measures only the limits.
impl Measurement for () {
    type Output = ();

    fn on<B: Backend + Clone>(self, _: &Bench<B>) -> anyhow::Result<()> {
        Ok(())
    }
}
