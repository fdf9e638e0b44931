//! `moh-serve`: serves a model over HTTP with OpenAI's API.

mod arguments;
mod run;

use std::process::ExitCode;

use moh_program::{exit, models};

fn main() -> ExitCode {
    exit::run(|| {
        let arguments = moh_program::arguments::parse::<arguments::Arguments>();
        let job = run::Serve::prepare(&arguments)?;
        models::open(arguments.device)?.compute(arguments.dtype, job)
    })
}
