//! `moh-train replay`: repeats one step of a run, and prints all of its numbers.

use std::fmt;
use std::fmt::Write as _;
use std::io::{Write as _, stdout};
use std::path::PathBuf;

use moh_checkpoint::run_directory::{CheckpointName, RunDirectory};
use moh_program::arguments::at_least;
use moh_program::exit::stderr_line;
use moh_program::table::aligned;
use moh_train::{Replay, SampleSource, open_device};

use crate::model_location;
use crate::run_view::auxiliary_losses;

/// Repeat one step of a run, and print where its numbers come from.
///
/// Starts from the newest checkpoint before the step, takes the steps up to it, and computes the step
/// without its update. Prints its loss and gradient norm; by block the residual stream, the gradient, the
/// entropy of the gates and the loads of the heads; the gradient of each tensor; and the samples, with the
/// tokens and documents of their files. Reads the run directory and writes nothing. One process computes
/// the whole model, which must fit its device.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  moh-train replay runs/quickstart --step 202")]
pub(crate) struct Arguments {
    /// Run directory
    run: PathBuf,
    /// The step, counted over all stages
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(0))]
    step: u64,
    /// Recipe instead of the run's own
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Override a key of the recipe, such as run.device=cpu
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Replays the step and prints its tables.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let run = RunDirectory::new(&arguments.run);
    let path = arguments.recipe.clone().unwrap_or_else(|| run.recipe());
    let recipe = RunDirectory::load_recipe(&path, &arguments.overrides)?;
    let device = open_device(&recipe, &path, 0)?;
    let step = arguments.step;
    let mut needs_model = true;
    if (1..=recipe.num_steps()).contains(&step) {
        let from = moh_train::replay_from(&run, step)?;
        stderr_line(format_args!("repeating the steps {} to {step}", from + 1));
        needs_model = from == 0 || !run.keeps_model(&recipe)?;
    }
    let model = &recipe.model;
    let from = model.from.as_deref().filter(|from| CheckpointName::parse(from).is_none());
    let directory = match from.filter(|_| needs_model) {
        Some(from) => Some(model_location::find(from, model.revision.as_deref())?),
        None => None,
    };
    let found = moh_train::replay(&run, recipe, &path, directory.as_deref(), device, step)?;
    write!(stdout(), "{}", tables(&found)?)?;
    Ok(())
}

/// Formats the step, its blocks, the gradients of its tensors and the sources of its samples.
fn tables(replay: &Replay) -> Result<String, fmt::Error> {
    let mut out = String::new();
    summary(&mut out, replay)?;
    blocks(&mut out, replay)?;
    loads(&mut out, replay)?;
    gradients(&mut out, replay)?;
    samples(&mut out, &replay.samples)?;
    Ok(out)
}

fn summary(out: &mut String, replay: &Replay) -> fmt::Result {
    let Replay { step, stage, stage_step, result, limits, .. } = replay;
    let from = match replay.from {
        0 => "the initial model".to_owned(),
        from => format!("the checkpoint of step {from}"),
    };
    writeln!(out, "step {step}, step {stage_step} of stage {stage}, from {from}")?;
    writeln!(
        out,
        "loss {:.4}{}, gradient norm {:.4}, learning rate {:.2e}",
        result.loss,
        auxiliary_losses(result.auxiliary),
        result.grad_norm,
        replay.learning_rate
    )?;
    match result.skipped {
        Some(reason) => write!(out, "not applied: {reason}")?,
        None => write!(out, "applied")?,
    }
    if limits.loss.is_finite() || limits.grad_norm.is_finite() {
        write!(out, " (limits: loss {:.4}, gradient norm {:.4})", limits.loss, limits.grad_norm)?;
    }
    writeln!(out)
}

/// Writes a row for each block: the residual stream after attention and after the MLP, the gradient, and the routing.
fn blocks(out: &mut String, replay: &Replay) -> fmt::Result {
    let mut header =
        vec!["block", "rms after attention", "largest", "rms after MLP", "largest", "gradient"];
    if !replay.routing.layers.is_empty() {
        header.extend(["entropy", "of most", "load min", "load max"]);
    }
    let rows = replay.blocks.iter().enumerate().map(|(layer, block)| {
        let magnitudes = [&block.attention, &block.mlp];
        let magnitudes = magnitudes.into_iter().flat_map(|of| [of.rms(), of.largest.into()]);
        let gradients = replay.gradients.iter().filter(|tensor| tensor.block == Some(layer));
        let squares: f64 = gradients.map(|tensor| tensor.norm.powi(2)).sum();
        let numbers = magnitudes.chain([squares.sqrt()]);
        let mut row = vec![layer.to_string()];
        row.extend(numbers.map(|number| format!("{number:.3e}")));
        if let Some(routing) = replay.routing.layers.iter().find(|known| known.layer == layer) {
            let (entropy, most) = (routing.mean_entropy(), routing.max_entropy());
            let share = if most > 0.0 { entropy / most } else { 1.0 };
            let (min, max) = routing.extreme_loads();
            row.extend([entropy, share, min, max].map(|number| format!("{number:.4}")));
        }
        row
    });
    write!(out, "\n{}", aligned(header, rows, &[0]))
}

/// Writes the share of tokens that selected each routed head, in a row for each block that routes.
fn loads(out: &mut String, replay: &Replay) -> fmt::Result {
    let layers = &replay.routing.layers;
    if layers.is_empty() {
        return Ok(());
    }
    let rows = layers.iter().map(|layer| {
        let loads: Vec<String> = layer.loads().map(|load| format!("{load:.3}")).collect();
        [layer.layer.to_string(), loads.join(" ")]
    });
    write!(out, "\n{}", aligned(["block", "loads of the routed heads"], rows, &[0, 1]))
}

fn gradients(out: &mut String, replay: &Replay) -> fmt::Result {
    let gradients = replay.gradients.iter();
    let rows = gradients.map(|tensor| [tensor.name.clone(), format!("{:.3e}", tensor.norm)]);
    write!(out, "\n{}", aligned(["tensor", "gradient"], rows, &[0]))
}

fn samples(out: &mut String, samples: &[SampleSource]) -> fmt::Result {
    let rows = samples.iter().map(|SampleSource { number, path, tokens, documents }| {
        let range = |range: &std::ops::Range<u64>| {
            format!("{}-{}", range.start, range.end.saturating_sub(1))
        };
        [number.to_string(), range(tokens), range(documents), path.display().to_string()]
    });
    write!(out, "\n{}", aligned(["sample", "tokens", "documents", "file"], rows, &[0, 3]))
}

#[cfg(test)]
mod tests {
    use moh_kernels::router::SharedHeads;
    use moh_model::router::{LayerRouting, RoutingStatistics};
    use moh_model::{BlockMagnitudes, Magnitude};
    use moh_step::guard::{Limits, SkipReason};
    use moh_step::{StepResult, TensorGradient};
    use moh_train::Replay;

    use super::*;

    #[test]
    fn a_step_is_shown_by_block_tensor_and_sample() {
        let mut magnitude = Magnitude::default();
        magnitude.add([3.0, -5.0, 1.0, 1.0]);
        let block = BlockMagnitudes { attention: magnitude, mlp: Magnitude::default() };
        let gradient = |name: &str, block, norm| TensorGradient { name: name.into(), block, norm };
        let mut layer = LayerRouting::new(1, SharedHeads::first(1), 3);
        (layer.tokens, layer.selected, layer.entropy) = (4, vec![1, 3], 2 << 20);
        let replay = Replay {
            from: 6,
            step: 8,
            stage: "moh".into(),
            stage_step: 3,
            result: StepResult {
                loss: 4.5,
                targets: None,
                auxiliary: moh_model::AuxiliaryLosses::all(Some(0.25)),
                grad_norm: f64::NAN,
                skipped: Some(SkipReason::GradNormNotFinite),
            },
            learning_rate: 5e-3,
            limits: Limits { loss: 9.0, grad_norm: f64::INFINITY },
            blocks: vec![block; 2],
            gradients: vec![
                gradient("embedding", None, 1.5),
                gradient("layers.0.a", Some(0), 3.0),
                gradient("layers.0.b", Some(0), 4.0),
                gradient("layers.1.a", Some(1), f64::NAN),
            ],
            routing: RoutingStatistics { layers: vec![layer] },
            samples: vec![SampleSource {
                number: 56,
                path: "data/text".into(),
                tokens: 120..129,
                documents: 3..5,
            }],
        };
        let expected = "\
step 8, step 3 of stage moh, from the checkpoint of step 6
loss 4.5000, balance 0.2500, distillation 0.2500, gradient norm NaN, learning rate 5.00e-3
not applied: gradient norm is not finite (limits: loss 9.0000, gradient norm inf)

block  rms after attention  largest  rms after MLP  largest  gradient  entropy  of most  load min  load max
0                  3.000e0  5.000e0        0.000e0  0.000e0   5.000e0
1                  3.000e0  5.000e0        0.000e0  0.000e0       NaN   0.5000   0.7213    0.2500    0.7500

block  loads of the routed heads
1      0.250 0.750

tensor      gradient
embedding    1.500e0
layers.0.a   3.000e0
layers.0.b   4.000e0
layers.1.a       NaN

sample   tokens  documents  file
56      120-128        3-4  data/text
";
        assert_eq!(tables(&replay).unwrap(), expected);
    }
}
