//! `moh-train --plan`: the requirements of a recipe.

use std::io::{Write as _, stdout};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use indicatif::{HumanCount, HumanDuration};
use moh_checkpoint::run_directory::local_model_config;
use moh_hf::ConfigFile;
use moh_kernels::linear::{Linear as _, LinearForward};
use moh_kernels::{Cpu, Element, for_element};
use moh_model::ModelConfig;
use moh_plan::{Basis, Hardware, Plan, Rate, StagePlan, Suggestions};
use moh_program::exit;
use moh_program::table::aligned;
use moh_recipe::{DeviceKind, Recipe};
use moh_train::Comparison;

use crate::{Arguments, model_location};

pub(crate) fn plan(arguments: &Arguments, path: &Path, mut recipe: Recipe) -> anyhow::Result<()> {
    check_rate(arguments)?;
    let config = resolve(&mut recipe, path)?;
    let hardware = arguments.hardware.as_deref().map(Hardware::load).transpose()?;
    match (arguments.ranks, hardware) {
        (Some(ranks), Some(hardware)) if arguments.suggest => {
            let found = Suggestions::new(&recipe, &config, ranks.get(), hardware);
            write!(stdout(), "{found}")?;
        }
        (ranks, hardware) => {
            let mut plan = Plan::new(&recipe, &config)?.with_sources(&recipe)?;
            if let Some(tflops) = rate(arguments, &recipe, &config)? {
                plan = plan.with_device_tflops(tflops);
            }
            if let Some(ranks) = ranks {
                plan = plan.on_ranks(&recipe, path, &config, ranks.get(), hardware)?;
            }
            write!(stdout(), "{plan}")?;
        }
    }
    Ok(())
}

/// Prints the runs of a comparison of variants of the recipe in the file `path`.
pub(crate) fn plan_comparison(
    arguments: &Arguments,
    path: &Path,
    comparison: &Comparison,
) -> anyhow::Result<()> {
    check_rate(arguments)?;
    let time = |flops: f64, tflops: Rate| {
        let seconds = Duration::try_from_secs_f64(flops / (tflops.value * 1e12)).ok()?;
        Some(HumanDuration(seconds).to_string())
    };
    let row = |name: &str, stages: &str, (steps, tokens, flops): (u64, u64, f64), tflops| {
        let counts = [HumanCount(steps).to_string(), HumanCount(tokens).to_string()];
        let cells = [name.to_owned(), stages.to_owned()].into_iter().chain(counts);
        let time = Option::and_then(tflops, |tflops| time(flops, tflops));
        cells.chain([format!("{flops:.2e}")]).chain(time).collect::<Vec<_>>()
    };
    let (mut lines, mut tflops) = (Vec::new(), None);
    let (mut sum, mut alone) = ((0, 0, 0.0), (0, 0, 0.0));
    for run in comparison.runs() {
        let mut recipe = run.recipe.clone();
        let config = resolve(&mut recipe, path)?;
        let plan = Plan::new(&recipe, &config)?;
        if tflops.is_none() {
            tflops = rate(arguments, &recipe, &config)?;
        }
        let add = |(steps, tokens, flops): (u64, u64, f64), stage: &StagePlan| {
            (steps + stage.steps, tokens + stage.tokens, flops + stage.total_flops())
        };
        let own = plan.stages.get(run.num_shared..).unwrap_or_default();
        let stages: Vec<&str> = own.iter().map(|stage| stage.name.as_str()).collect();
        lines.push(row(&run.name, &stages.join(", "), own.iter().fold((0, 0, 0.0), add), tflops));
        sum = own.iter().fold(sum, add);
        if run.variant.is_some() {
            alone = plan.stages.iter().fold(alone, add);
        }
    }
    lines.push(row("all runs", "", sum, tflops));
    lines.push(row("without sharing", "", alone, tflops));
    let mut header = vec!["run", "stages", "steps", "tokens", "FLOPs"];
    header.extend(tflops.map(|_| "time"));
    write!(stdout(), "{}", aligned(header, lines, &[0]))?;
    Ok(())
}

/// Returns the rate for a plan's times: the given rate, or else this machine's measured rate for a CPU recipe and one
/// process.
fn rate(
    arguments: &Arguments,
    recipe: &Recipe,
    config: &ModelConfig,
) -> anyhow::Result<Option<Rate>> {
    if let Some(tflops) = arguments.device_tflops {
        return Ok(Some(Rate::assumed(tflops)));
    }
    if recipe.run.device != DeviceKind::Cpu || arguments.ranks.is_some() {
        return Ok(None);
    }
    let value = for_element!(T: recipe.run.dtype => product_tflops::<T>(config))?;
    Ok(Some(Rate { value, basis: Basis::Measured }))
}

/// Returns the TFLOP/s of this processor's fastest matrix product within a fifth of a second. The products have the
/// shape of the model's MLP, with wide dimensions cut.
fn product_tflops<T: Element>(config: &ModelConfig) -> anyhow::Result<f64> {
    const TOKENS: usize = 1024;
    const WIDEST: usize = 2048;
    const MEASURED: Duration = Duration::from_millis(200);
    let inputs = config.hidden_size.clamp(1, WIDEST);
    let outputs = config.intermediate_size.clamp(1, WIDEST);
    let ones = |len| vec![T::from_f32(1.0); len];
    let (x, weight, mut y) =
        (ones(TOKENS * inputs), ones(outputs * inputs), ones(TOKENS * outputs));
    let (begun, mut least) = (Instant::now(), f64::INFINITY);
    while begun.elapsed() < MEASURED {
        let started = Instant::now();
        Cpu.linear_forward(LinearForward::new(inputs, &x[..], &weight[..], &mut y[..]))?;
        least = least.min(started.elapsed().as_secs_f64());
    }
    let flops = 2.0 * (TOKENS * inputs * outputs) as f64;
    Ok(flops / least.max(1e-9) / 1e12)
}

/// Rejects a rate that is not a positive number.
fn check_rate(arguments: &Arguments) -> anyhow::Result<()> {
    match arguments.device_tflops {
        Some(tflops) if !(tflops > 0.0 && tflops.is_finite()) => {
            Err(exit::Usage(format!("--device-tflops {tflops}: must be above 0")).into())
        }
        _ => Ok(()),
    }
}

/// Fills in the keys that depend on the model, and returns its shape.
fn resolve(recipe: &mut Recipe, path: &Path) -> anyhow::Result<ModelConfig> {
    let config = model_config(recipe, path)?;
    recipe.resolve(path, &config)?;
    Ok(config)
}

/// Returns the shape of the recipe's model. For a hub id, reads its `config.json` in the cache.
fn model_config(recipe: &Recipe, path: &Path) -> anyhow::Result<ModelConfig> {
    if let Some(config) = local_model_config(recipe, path)? {
        return Ok(config);
    }
    let remedy = || {
        format!(
            "{}: model.config: name a config.json on this machine, or download that of model.from",
            path.display()
        )
    };
    let from = recipe.model.from.as_deref().with_context(remedy)?;
    let directory = model_location::find_config(from, recipe.model.revision.as_deref());
    let directory = directory.with_context(remedy)?;
    Ok(ConfigFile::read(&directory)?.config)
}
