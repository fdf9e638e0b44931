//! The start of a trainer: from the newest valid checkpoint, or from the recipe's initial model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moh_checkpoint::run_directory::growth::{self, Extensions};
use moh_checkpoint::run_directory::metrics_resume;
use moh_checkpoint::run_log::{MetricsWriter, RoutingWriter, TensorBoard};
use moh_checkpoint::{RunDirectory, RunState, StoredCheckpoint};
use moh_comm::RankLayout;
use moh_kernels::Backend;
use moh_model::{Model, ModelConfig, ModelParallel, MohConfig, Segment, Shard};
use moh_recipe::{ParallelOptions, Recipe};
use moh_step::{OptimizerState, Ranks, StepGroups};

use super::saving::Saving;
use super::{Inputs, Trainer};
use crate::run_data::RunData;
use crate::{Error, Event, ModelSource, Result};

impl<'a, 'e, B: Backend + Clone> Trainer<'a, 'e, B> {
    /// Loads the requested or the newest valid checkpoint, or else the recipe's initial model.
    pub(super) fn start(
        backend: B,
        mut ranks: Ranks<B>,
        inputs: Inputs<'a>,
        data: RunData,
        events: &'e mut dyn FnMut(Event<'_>),
    ) -> Result<Self> {
        let Inputs { recipe, run, .. } = inputs;
        let Loaded { state, extensions, parallel, groups, attention, model, optimizer } = loop {
            if let Some(loaded) = load(&backend, &mut ranks, &inputs, events)? {
                break loaded;
            }
        };
        settle(&inputs, &extensions, &mut ranks, events)?;
        let writers = ranks.on_rank0(|| open_writers(run, recipe, &state, events))?;
        let (metrics, board, routing) = match writers {
            Some((metrics, board, routing)) => (Some(metrics), board, Some(routing)),
            None => (None, None, None),
        };
        // A state with steps is a checkpoint's.
        let last_good = (state.step > 0).then_some(state.step);
        let saving = Saving::new(&inputs, &model, &optimizer, last_good);
        let saving = ranks.agree(saving)?;
        Ok(Trainer {
            saving,
            metrics,
            inputs,
            ranks,
            groups,
            parallel,
            events,
            attention,
            model,
            optimizer,
            data,
            board,
            routing,
            part_times: Arc::default(),
            background: Arc::default(),
            state,
        })
    }
}

/// A model with its optimiser's state, and its position in the run.
struct Loaded<B: Backend> {
    state: RunState,
    /// The first rank's growth, which is not recorded yet.
    extensions: Extensions,
    parallel: ParallelOptions,
    groups: StepGroups,
    /// The attention with which the weights were written.
    attention: Option<MohConfig>,
    model: Model<B>,
    optimizer: OptimizerState<B>,
}

/// Loads the requested or the newest checkpoint, or the initial model if the run has no checkpoint. Returns `None` on
/// all ranks if the checkpoint was damaged, and has been set aside.
fn load<B: Backend + Clone>(
    backend: &B,
    ranks: &mut Ranks<B>,
    inputs: &Inputs<'_>,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Option<Loaded<B>>> {
    let Inputs { recipe, source, run, .. } = *inputs;
    let mut damaged = |path: &Path, error: &moh_checkpoint::Error| {
        events(Event::DamagedCheckpoint { path, error });
    };
    let stored = match inputs.resume_step {
        Some(step) => Some(moh_checkpoint::of_step(run, ranks, step)?),
        None => moh_checkpoint::newest(run, ranks, &mut damaged)?,
    };
    // After damage to the last checkpoint, no checkpoint may be left.
    ranks.on_rank0(|| check_resumable(run))?;
    let mut state =
        (stored.as_ref()).map_or_else(RunState::default, |stored| stored.manifest().state.clone());
    // At the same step, the state in memory may have an evaluation that the checkpoint lacks.
    let left = inputs.left.as_ref().filter(|left| left.state.step == state.step);
    if let Some(left) = left {
        state.clone_from(&left.state);
    }
    let extensions = plan_growth(inputs, &mut state, ranks)?;
    growth::reopen(&mut state, recipe);
    // The hash of a manifest does not prove who wrote it.
    if stored.is_some() {
        let checked = state.check(recipe);
        checked.map_err(|reason| moh_files::unusable(&run.checkpoint(state.step), reason))?;
    }
    let attention = attention_before(run, source, stored.as_ref())?;
    let mut config = ModelConfig { moh: attention.clone(), ..source.config.clone() };
    let mut added = Vec::new();
    if let Some(moh) = left.and_then(|left| left.gets_matrices.as_ref()) {
        added = config.added_tensors(Some(moh))?;
        config.moh = Some(moh.clone());
    }
    let stage = recipe.stages.get(state.stage).or(recipe.stages.last());
    let parallel = stage.map_or_else(ParallelOptions::default, |stage| stage.parallel);
    let divided = divide(ranks, parallel, &config);
    let (groups, place) = ranks.agree(divided)?;
    let data = groups.data.clone();
    let loaded = |state, model, optimizer| Loaded {
        state,
        extensions,
        parallel,
        groups,
        attention,
        model,
        optimizer,
    };
    // Each data rank reads its shard, of this run's checkpoint or of another run's.
    let shard = Shard::from_group(&data);
    let Some(stored) = stored else {
        let created = initial_model(backend.clone(), recipe, config, place, shard, source);
        let (mut model, optimizer) = ranks.agree(created)?;
        if source.is_checkpoint() {
            moh_checkpoint::gather_weights(&mut model, &data)?;
        }
        state.moment_steps = source.moment_steps();
        return Ok(Some(loaded(state, model, optimizer)));
    };
    let (mut model, mut optimizer) = zeros_of_part(backend.clone(), recipe, config, place, shard)?;
    let stored = stored.read_by(Shard::from_group(ranks.group()));
    let read = moh_checkpoint::load(&stored, &mut model, &mut optimizer, &added);
    if moh_checkpoint::quarantine_if_damaged(run, ranks, state.step, read, &mut damaged)?.is_none()
    {
        return Ok(None);
    }
    moh_checkpoint::gather_weights(&mut model, &data)?;
    events(Event::Resumed { step: state.step });
    Ok(Some(loaded(state, model, optimizer)))
}

/// Returns the initial model of a run, or a part of it, and the optimiser's state in its shard. Of another run's
/// weights, only the shard is loaded: the data ranks gather the rest.
pub(crate) fn initial_model<B: Backend + Clone>(
    backend: B,
    recipe: &Recipe,
    config: ModelConfig,
    place: ModelParallel,
    shard: Shard,
    source: &ModelSource,
) -> Result<(Model<B>, OptimizerState<B>)> {
    let (length, element) = (recipe.longest_sequence(), recipe.run.dtype);
    if !source.is_checkpoint() {
        let fill = |segment: &Segment, values: &mut [f32]| source.fill(segment, values);
        let model = Model::of_part(backend, element, config, length, place, shard.size, fill)?;
        let optimizer = OptimizerState::new(&model, recipe.precision.moments, shard)?;
        return Ok((model, optimizer));
    }
    let (mut model, mut optimizer) = zeros_of_part(backend, recipe, config, place, shard)?;
    optimizer.fill(&mut model, |kind, segment, range, values| {
        source.fill_part(kind, segment, range, values)
    })?;
    Ok((model, optimizer))
}

/// Returns a part of a model with weights of zeros, and the optimiser's state in its shard.
pub(crate) fn zeros_of_part<B: Backend + Clone>(
    backend: B,
    recipe: &Recipe,
    config: ModelConfig,
    place: ModelParallel,
    shard: Shard,
) -> Result<(Model<B>, OptimizerState<B>)> {
    let (length, element) = (recipe.longest_sequence(), recipe.run.dtype);
    let model = Model::zeros_of_part(backend, element, config, length, place, shard.size)?;
    let optimizer = OptimizerState::new(&model, recipe.precision.moments, shard)?;
    Ok((model, optimizer))
}

/// Adds the stages that have become longer to the state. The first rank reads and returns them.
fn plan_growth<B: Backend>(
    inputs: &Inputs<'_>,
    state: &mut RunState,
    ranks: &mut Ranks<B>,
) -> Result<Extensions> {
    let json = |error: serde_json::Error| moh_files::io(inputs.run.root())(error.into());
    let planned = ranks.on_rank0::<_, Error>(|| {
        let extensions = Extensions::plan(inputs.run, inputs.recipe, state)?;
        let text = serde_json::to_vec(&extensions.growth).map_err(json)?;
        Ok((extensions, text))
    })?;
    let (extensions, text) = planned.unzip();
    let text = ranks.first_that_has(text)?.unwrap_or_default();
    state.growth = serde_json::from_slice(&text).map_err(json)?;
    Ok(extensions.unwrap_or_default())
}

/// Moves checkpoints after the requested step aside, and records the stages that become longer here.
fn settle<B: Backend>(
    inputs: &Inputs<'_>,
    extensions: &Extensions,
    ranks: &mut Ranks<B>,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    let Inputs { run, recipe, resume_step, .. } = *inputs;
    let done = ranks.on_rank0::<_, Error>(|| {
        // First, so that the run counts as unfinished wherever this function is interrupted.
        run.remove_summary()?;
        let set_aside = |step| moh_checkpoint::set_aside_later(run, step);
        let aside = resume_step.map_or(Ok(Vec::new()), set_aside)?;
        Ok((aside, extensions.store(run, recipe)?))
    })?;
    let (aside, edited) = done.unwrap_or_default();
    warn_of_edited(run, edited, events);
    for path in &aside {
        events(Event::LaterCheckpoint { path });
    }
    for extension in &extensions.requested {
        events(Event::StageExtended { extension });
    }
    Ok(())
}

/// Returns this rank's groups and its part of the model.
fn divide<B: Backend>(
    ranks: &Ranks<B>,
    parallel: ParallelOptions,
    config: &ModelConfig,
) -> Result<(StepGroups, ModelParallel)> {
    let all = ranks.group().clone();
    let layout = RankLayout::new(all.size(), parallel.tensor, parallel.pipeline)?;
    let groups = layout.groups(&all)?;
    let virtual_stages = parallel.virtual_stages;
    let parallel = ModelParallel::new(config, groups.pipeline, virtual_stages, groups.tensor)?;
    Ok((StepGroups { all, data: groups.data }, parallel))
}

/// The first rank's logs.
type Writers = (MetricsWriter, Option<TensorBoard>, RoutingWriter);

/// Opens the first rank's logs, truncated to the state's step, and warns of lost parts.
fn open_writers(
    run: &RunDirectory,
    recipe: &Recipe,
    state: &RunState,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Writers> {
    let steps = state.recorded_steps();
    let metrics = metrics_resume::resume(run, recipe, steps)?;
    let routing = metrics_resume::resume_routing(run, state)?;
    let board = (recipe.log.tensorboard)
        .then(|| TensorBoard::create(&run.tensorboard(), steps))
        .transpose()?;
    let writer = MetricsWriter::append_to(&run.metrics())?;
    for text in metrics.iter().chain(&routing) {
        events(Event::Warning { text });
    }
    Ok((writer, board, RoutingWriter::append_to(&run.routing())))
}

/// Returns the attention of the model in a checkpoint of the run, or of the initial model. Before the current stage's
/// first step, this is the previous stage's attention. The recipe does not have the heads of a calibration.
pub(crate) fn attention_before(
    run: &RunDirectory,
    source: &ModelSource,
    stored: Option<&StoredCheckpoint>,
) -> Result<Option<MohConfig>> {
    let Some(stored) = stored else { return Ok(source.config.moh.clone()) };
    let path = run.checkpoint(stored.manifest().state.step);
    let moh = moh_checkpoint::run_directory::config_file(stored, &path)?.config.moh;
    moh.as_ref().map_or(Ok(()), |moh| source.config.check_moh(moh))?;
    Ok(moh)
}

/// Rejects a run that has completed checkpoints, but has no checkpoint left.
pub(crate) fn check_resumable(run: &RunDirectory) -> Result<()> {
    if run.has_completed_work()? && run.checkpoint_steps()?.is_empty() {
        let reason = format!(
            "the run has completed checkpoints, and none of them is left to resume from: put one back into {}, or \
             give --begin-anew, which moves the run's files aside and begins again",
            run.checkpoints().display()
        );
        return Err(moh_files::unusable(run.root(), reason).into());
    }
    Ok(())
}

/// Warns that a user has edited the run's recipe, with the new path of the edited file.
pub(crate) fn warn_of_edited(
    run: &RunDirectory,
    aside: Option<PathBuf>,
    events: &mut dyn FnMut(Event<'_>),
) {
    if let Some(aside) = aside {
        let text = format!(
            "{} was edited, and is kept as {}: in its place is the resolved recipe",
            run.recipe().display(),
            aside.display()
        );
        events(Event::Warning { text: &text });
    }
}
