//! Reads the newest checkpoint of a run, for any layout of ranks. Prints the state of the run and, for each tensor,
//! the root mean squares of its weights and of its recent gradients, which AdamW's second moment estimates.
//!
//!     cargo run --release -p moh-checkpoint --example read_checkpoint -- runs/quickstart

use moh_checkpoint::{RunDirectory, StoredCheckpoint};
use moh_step::TensorKind;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run = std::env::args().nth(1).unwrap_or_else(|| "runs/quickstart".to_owned());
    let run = RunDirectory::new(run);
    let steps = run.checkpoint_steps()?;
    let Some(&newest) = steps.last() else {
        return Err(format!("{}: has no checkpoint", run.root().display()).into());
    };
    let checkpoint = StoredCheckpoint::of_step(&run, newest)?;
    let state = &checkpoint.manifest().state;
    println!("checkpoints: {steps:?}");
    println!("step {}, {} tokens, next sample {}", state.step, state.tokens, state.sample);

    println!("{:<52} {:<14} {:>10} {:>10}", "tensor", "shape", "weights", "gradients");
    for name in &checkpoint.manifest().tensors {
        let shape = checkpoint.shape(name)?;
        let mut values = vec![0.0f32; shape.iter().product()];
        // The exact weights in f32, also of a model that is trained in bf16.
        checkpoint.read_f32(TensorKind::Weight, name, &mut values)?;
        let squares: f32 = values.iter().map(|value| value * value).sum();
        let weights = (squares / values.len() as f32).sqrt();
        checkpoint.read_f32(TensorKind::SecondMoment, name, &mut values)?;
        let gradients = (values.iter().sum::<f32>() / values.len() as f32).sqrt();
        println!("{name:<52} {:<14} {weights:>10.2e} {gradients:>10.2e}", format!("{shape:?}"));
    }
    Ok(())
}
