//! `moh-serve`: serves a model over HTTP with OpenAI's API.

mod arguments;
mod run;

use std::process::ExitCode;

use moh_program::{exit, options};

fn main() -> ExitCode {
    exit::run(|| {
        let arguments = moh_program::arguments::parse::<arguments::Arguments>();
        moh_kernels::Cpu.return_freed_memory();
        let job = run::Serve::prepare(&arguments)?;
        let device = options::open_device(arguments.device)?;
        let device = if arguments.deterministic { device.with_batch_invariance() } else { device };
        device.run(job)
    })
}
