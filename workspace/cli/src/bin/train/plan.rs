//! `moh-train --plan`: the requirements of a recipe.

use std::io::{Write as _, stdout};
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Context as _;
use moh_cli::exit;
use moh_hf::ConfigFile;
use moh_model::ModelConfig;
use moh_train::plan::{Hardware, Suggestions};
use moh_train::{Plan, Recipe};

use crate::Arguments;

/// Prints the plan of `recipe`, which is the file `path`.
pub(crate) fn plan(arguments: &Arguments, path: &Path, mut recipe: Recipe) -> anyhow::Result<()> {
    if let Some(tflops) = arguments.device_tflops
        && !(tflops > 0.0 && tflops.is_finite())
    {
        return Err(exit::Usage(format!("--device-tflops {tflops}: must be above 0")).into());
    }
    let config = model_config(&recipe, path)?;
    recipe.resolve(path, &config)?;
    let hardware = arguments.hardware.as_deref().map(Hardware::load).transpose()?;
    match (arguments.ranks, hardware) {
        (Some(ranks), Some(hardware)) if arguments.suggest => {
            let found = Suggestions::new(&recipe, &config, ranks.get(), hardware);
            write!(stdout(), "{found}")?;
        }
        (ranks, hardware) => {
            let plan = plan_of(arguments, &recipe, (&config, path), (ranks, hardware))?;
            write!(stdout(), "{plan}")?;
        }
    }
    Ok(())
}

/// The shape of the recipe's model, of a hub id by its `config.json` alone.
fn model_config(recipe: &Recipe, path: &Path) -> anyhow::Result<ModelConfig> {
    if let Some(config) = recipe.local_model_config(path)? {
        return Ok(config);
    }
    let remedy = || {
        format!(
            "{}: model.config: name a config.json on this machine, or let the plan fetch that of model.from",
            path.display()
        )
    };
    let from = recipe.model.from.as_deref().with_context(remedy)?;
    let directory =
        moh_hub::resolve_config(from, recipe.model.revision.as_deref()).with_context(remedy)?;
    Ok(ConfigFile::read(&directory)?.config)
}

/// The plan of the recipe's own layout.
fn plan_of(
    arguments: &Arguments,
    recipe: &Recipe,
    (config, path): (&ModelConfig, &Path),
    (ranks, hardware): (Option<NonZeroUsize>, Option<Hardware>),
) -> anyhow::Result<Plan> {
    let mut plan = Plan::new(recipe, config)?.with_sources(recipe)?;
    if let Some(tflops) = arguments.device_tflops {
        plan = plan.with_device_tflops(tflops);
    }
    if let Some(ranks) = ranks {
        plan = plan.on_ranks(recipe, (config, path), ranks.get(), hardware)?;
    }
    Ok(plan)
}
