//! `moh-train --plan`: the requirements of a recipe.

use std::io::{Write as _, stdout};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use indicatif::{HumanCount, HumanDuration};
use moh_checkpoint::run_directory::local_model_config;
use moh_hf::ConfigFile;
use moh_model::ModelConfig;
use moh_plan::{Hardware, Plan, StagePlan, Suggestions};
use moh_program::exit;
use moh_program::table::aligned;
use moh_recipe::Recipe;
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
            if let Some(tflops) = arguments.device_tflops {
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
    let time = |flops: f64| {
        let seconds = arguments.device_tflops.map(|tflops| flops / (tflops * 1e12))?;
        Some(HumanDuration(Duration::try_from_secs_f64(seconds).ok()?).to_string())
    };
    let row = |name: &str, stages: &str, (steps, tokens, flops): (u64, u64, f64)| {
        let counts = [HumanCount(steps).to_string(), HumanCount(tokens).to_string()];
        let cells = [name.to_owned(), stages.to_owned()].into_iter().chain(counts);
        cells.chain([format!("{flops:.2e}")]).chain(time(flops)).collect::<Vec<_>>()
    };
    let mut header = vec!["run", "stages", "steps", "tokens", "FLOPs"];
    header.extend(arguments.device_tflops.map(|_| "time"));
    let mut lines = Vec::new();
    let (mut sum, mut alone) = ((0, 0, 0.0), (0, 0, 0.0));
    for run in comparison.runs() {
        let mut recipe = run.recipe.clone();
        let config = resolve(&mut recipe, path)?;
        let plan = Plan::new(&recipe, &config)?;
        let add = |(steps, tokens, flops): (u64, u64, f64), stage: &StagePlan| {
            (steps + stage.steps, tokens + stage.tokens, flops + stage.total_flops())
        };
        let own = plan.stages.get(run.num_shared..).unwrap_or_default();
        let stages: Vec<&str> = own.iter().map(|stage| stage.name.as_str()).collect();
        lines.push(row(&run.name, &stages.join(", "), own.iter().fold((0, 0, 0.0), add)));
        sum = own.iter().fold(sum, add);
        if run.variant.is_some() {
            alone = plan.stages.iter().fold(alone, add);
        }
    }
    lines.push(row("all runs", "", sum));
    lines.push(row("without sharing", "", alone));
    write!(stdout(), "{}", aligned(header, lines, &[0]))?;
    Ok(())
}

/// Refuses a rate that is not a positive number.
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

/// The shape of the recipe's model, of a hub id by its `config.json` in the cache.
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
