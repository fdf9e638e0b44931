//! Starts a run: locks the directory, resolves and stores the recipe, and trains with the recipe's
//! element types.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use moh_comm::{Group, World};
use moh_device::{InTrainingElements, OnDevice, OpenDevice, TrainingTypes, in_training_elements};
use moh_files::HeldDirectory;
use moh_kernels::{Backend, Element};
use moh_recipe::{Parallel, Recipe, Stage, shell};
use moh_run_directory::{CheckpointName, RunDirectory, RunLock, branch, is_step_of};
use moh_run_log::{Machine, Summary, TraceSteps};
use moh_step::Ranks;

use crate::disk_space::{self, FreeSpace, free_space};
use crate::event::{Event, Outcome};
use crate::resumption::{check_resumable, warn_of_edited};
use crate::run_data::RunData;
use crate::run_inputs::{RunInputs, Settled};
use crate::source::ModelSource;
use crate::trainer::{Inputs, train};
use crate::{Error, TimeLimit};

static NO_STEPS: TraceSteps = TraceSteps::NONE;

/// How a run is started and stopped.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions<'a> {
    /// Setting it on any rank ends the run after the current step, or within the evaluation, the check of
    /// its inputs or the export that it is at, with a checkpoint if it has taken a step.
    pub stop: &'a AtomicBool,
    /// The steps of which each rank writes a timeline.
    pub trace: &'a TraceSteps,
    /// Moves the files of an earlier run in the run directory aside, and begins again.
    pub begin_anew: bool,
    /// Where the file system has no locks: takes the run directory from a process that may be alive.
    pub break_lock: bool,
    /// Resumes from the checkpoint of this step, counted over all stages, and moves what the run has
    /// written after it aside.
    pub resume_step: Option<u64>,
    /// Samples, each with a factor on the gradients of its micro-batch: for tests of steps that are not
    /// applied.
    #[doc(hidden)]
    pub gradient_faults: &'a [(u64, f32)],
    /// The run stops with a checkpoint before this limit ends, by the first rank's clock.
    pub time_limit: Option<TimeLimit>,
    /// Accepts a tokenizer of the model that is not the one of a token file, if it gives the same ids on a
    /// sample of the file. A run that resumes has been accepted before.
    pub allow_other_tokenizer: bool,
    /// Tells the free bytes of a file system: for tests.
    #[doc(hidden)]
    pub free_space: FreeSpace,
    /// The run that has trained the recipe's first stages: a run whose directory is absent or empty continues
    /// it, with its checkpoints and logs as its own.
    pub parent: Option<&'a RunDirectory>,
    /// The name of the first rank's processor, for `machine.json`; empty if it is not known.
    pub processor: &'a str,
    /// The command that started the program, for errors that name another one; if it is empty, that of the recipe
    /// alone.
    pub command: &'a str,
}

impl<'a> RunOptions<'a> {
    /// Resumes an earlier run from its newest checkpoint, traces no steps, and has no time limit.
    pub fn new(stop: &'a AtomicBool) -> Self {
        RunOptions {
            stop,
            trace: &NO_STEPS,
            begin_anew: false,
            break_lock: false,
            resume_step: None,
            gradient_faults: &[],
            time_limit: None,
            allow_other_tokenizer: false,
            free_space,
            parent: None,
            processor: "",
            command: "",
        }
    }
}

/// Runs `recipe`, or resumes it if its run directory has checkpoints. Errors name the recipe
/// `path`; `directory` is the local directory of its `[model] from`, which a run that
/// [keeps its model](RunDirectory::keeps_model) does not need. All ranks of `world` call this
/// function with the same recipe and share each step's micro-batches; the first rank writes the run
/// directory and receives the events.
///
/// # Errors
/// Fails if the recipe, the model, the data or the run directory is invalid, if the run directory has files that
/// no run has written or is moved or removed while the run trains, if the device or another rank fails, if a run
/// that has completed checkpoints has none left, if it has none of the step to resume from, or if the last
/// checkpoint cannot be written.
pub fn run(
    recipe: &mut Recipe,
    path: &Path,
    directory: Option<&Path>,
    (device, world): (OpenDevice, &World),
    options: RunOptions<'_>,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    let job = Job { path, directory, group: world.group(), options };
    device.run(Start { job: &job, recipe, events })
}

/// A run before its device is known.
struct Start<'a> {
    job: &'a Job<'a>,
    recipe: &'a mut Recipe,
    events: &'a mut dyn FnMut(Event<'_>),
}

impl OnDevice for Start<'_> {
    type Output = Result<Outcome, Error>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        self.job.run(backend, self.recipe, self.events)
    }
}

/// The inputs of a run beside its recipe.
struct Job<'a> {
    path: &'a Path,
    directory: Option<&'a Path>,
    group: &'a Group,
    options: RunOptions<'a>,
}

/// The run directory, as the first rank has locked and found it.
#[derive(Default)]
struct Held {
    /// Held until the run ends.
    lock: Option<RunLock>,
    /// Whether there is nothing left to do.
    finished: bool,
    /// Whether a checkpoint has been completed.
    resumes: bool,
    /// Whether a stage is longer than in the run's recipe.
    grows: bool,
}

impl Job<'_> {
    fn run<B: Backend + Clone>(
        &self,
        backend: B,
        recipe: &mut Recipe,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, Error> {
        let mut ranks = Ranks::new(backend.clone(), self.group.clone())?;
        let run = RunDirectory::new(&recipe.run.dir);
        let begin_anew = self.options.begin_anew;
        let resumes = ranks.first_holds::<Error>(|| {
            run.check()?;
            let resumes = !begin_anew && run.has_completed_work()?;
            if !resumes {
                self.check_inputs(&run, recipe)?;
            }
            Ok(resumes)
        })?;
        let parent = match self.options.parent {
            Some(parent) if ranks.first_holds(|| branch::is_free(&run))? => Some(parent),
            _ => None,
        };
        let resumed = resumes.then_some(&run).or(parent);
        resolve_origin(recipe, resumed, &mut ranks)?;
        let opened = self.open(recipe, parent, resumed.is_some());
        let (source, data) = ranks.agree(opened)?;
        // Steps count from 1; the first rank's option counts.
        let resume_step =
            ranks.first::<Error>(|| Ok(self.options.resume_step.unwrap_or(0) as f64))?;
        let resume_step = Some(resume_step as u64).filter(|&step| step > 0);
        // A finished run does not need its data, and invalid data must not create a run directory.
        let data = match ranks.any(data.is_err() && !run.root().exists())? {
            true => Ok(ranks.agree(data)?),
            false => data,
        };
        let mut held = Held::default();
        let finished = ranks.first_holds::<Error>(|| {
            if let Some(parent) = parent {
                branch::begin(&run, parent, recipe)?;
            }
            held = self.lock_and_check(&run, recipe, resume_step, events)?;
            Ok(held.finished)
        })?;
        let prepared = Prepared { run: &run, recipe, source: &source, held: &held, resume_step };
        if finished && let Some(summary) = Summary::read(&run.summary())? {
            return Ok(match self.check_finished(&mut ranks, data, prepared, events)? {
                Settled::Yes => Outcome::AlreadyFinished(summary),
                Settled::Stopped => Outcome::StoppedBeforeTraining,
            });
        }
        let directory = held.lock.as_ref().map(|lock| Arc::clone(lock.directory()));
        let outcome = self.train(backend, ranks, data, prepared, events);
        match (outcome, directory) {
            (Err(error), Some(directory)) => Err(explained(error, &run, &directory)),
            (outcome, _) => outcome,
        }
    }

    /// Compares the inputs of a finished run with those that it was started with, and stores its recipe. While the
    /// recipe names the same ones, the data may be gone.
    fn check_finished<B: Backend>(
        &self,
        ranks: &mut Ranks<B>,
        data: Result<RunData, Error>,
        prepared: Prepared<'_>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Settled, Error> {
        let Prepared { run, recipe, .. } = prepared;
        let names_others = ranks.first_holds::<Error>(|| {
            let stored = run.stored_recipe()?;
            Ok(stored.data != recipe.data || stored.model != recipe.model)
        })?;
        if names_others || !ranks.any(data.is_err())? {
            let data = ranks.agree(data)?;
            let compared = self.inputs(&prepared, &data).compare(ranks, events)?;
            if compared == Settled::Stopped {
                return Ok(compared);
            }
        }
        ranks.first_does::<Error>(|| {
            warn_of_edited(run, run.write_recipe(recipe)?.as_deref(), events);
            Ok(())
        })?;
        Ok(Settled::Yes)
    }

    /// What a run reads, to be compared with its record.
    fn inputs<'a>(&'a self, prepared: &Prepared<'a>, data: &'a RunData) -> RunInputs<'a> {
        RunInputs {
            run: prepared.run,
            recipe: prepared.recipe,
            source: prepared.source,
            data,
            resumes: prepared.held.resumes,
            stop: self.options.stop,
        }
    }

    /// Settles the inputs of a run that has work to do, and trains.
    fn train<B: Backend + Clone>(
        &self,
        backend: B,
        mut ranks: Ranks<B>,
        data: Result<RunData, Error>,
        prepared: Prepared<'_>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, Error> {
        let Prepared { run, recipe, source, held, resume_step } = prepared;
        let mut data = ranks.agree(data)?;
        ranks.first_does::<Error>(|| {
            let (of_run, model) = ((run, resume_step), (recipe, source));
            let (size, free_space) = (self.group.size(), self.options.free_space);
            if let Some(text) = disk_space::check(of_run, model, size, free_space)? {
                events(Event::Warning { text: &text });
            }
            Ok(())
        })?;
        let settled = self.inputs(&prepared, &data).settle(&mut ranks, events)?;
        let Some(contents) = settled else { return Ok(Outcome::StoppedBeforeTraining) };
        data.set_contents(contents);
        let mut edited = None;
        ranks.first_does::<Error>(|| {
            edited = self.prepare_directory(run, recipe, held.grows, backend.name())?;
            Ok(())
        })?;
        warn_of_edited(run, edited.as_deref(), events);
        let inputs = Inputs {
            recipe,
            source,
            run,
            held: held.lock.as_ref().map(RunLock::directory),
            stop: self.options.stop,
            trace: self.options.trace,
            gradient_faults: self.options.gradient_faults,
            time_limit: self.options.time_limit,
            resume_step,
            left: None,
        };
        let precision = &recipe.precision;
        let types = TrainingTypes {
            weights: recipe.run.dtype,
            gradients: precision.gradients,
            moments: precision.moments,
        };
        in_training_elements(types, Training { backend, ranks, inputs, data, events })
    }

    /// Locks the run directory, and compares the recipe with that of an earlier run in it. On the first
    /// rank.
    fn lock_and_check(
        &self,
        run: &RunDirectory,
        recipe: &Recipe,
        resume_step: Option<u64>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Held, Error> {
        let lock = run.lock_or_break(self.options.break_lock)?;
        if let Some(text) = lock.warning() {
            events(Event::Warning { text: &text });
        }
        run.claim(recipe)?;
        if self.options.begin_anew {
            run.begin_anew(recipe)?;
        }
        let grows = run.check_recipe(recipe, &self.command())?;
        let finished = !grows && resume_step.is_none() && run.is_finished()?;
        if !finished {
            check_resumable(run)?;
        }
        if let Some(step) = resume_step {
            moh_checkpoint::require(&run.checkpoint_directory(), step)?;
        }
        let resumes = run.has_completed_work()?;
        Ok(Held { lock: Some(lock), finished, resumes, grows })
    }

    /// The command that started the program.
    fn command(&self) -> String {
        match self.options.command {
            "" => shell::command(self.path, []),
            command => command.to_owned(),
        }
    }

    /// Fails if the directory of a new run has what the run reads, or lies in a model that it reads.
    fn check_inputs(&self, run: &RunDirectory, recipe: &Recipe) -> Result<(), Error> {
        let model = &recipe.model;
        let origin = model.from.as_deref().and_then(CheckpointName::parse);
        let directories = [
            ("model.from", self.directory),
            ("model.from", origin.as_ref().map(|origin| origin.run.root())),
            ("model.tokenizer", model.tokenizer.as_deref()),
        ];
        let directories =
            directories.into_iter().filter_map(|(key, path)| Some((key, path?, true)));
        let sources = recipe.data.sources.iter().map(|source| ("data.sources", &*source.path));
        let sets = recipe.data.validation.iter().map(|set| ("data.validation", &*set.path));
        // The run's own recipe is one of its files.
        let own = run.recipe().canonicalize().ok();
        let is_own = own.is_some_and(|own| self.path.canonicalize().is_ok_and(|path| path == own));
        let recipe = (!is_own).then_some(("--recipe", self.path));
        let files = sources.chain(sets).chain(recipe).map(|(key, path)| (key, path, false));
        Ok(run.check_inputs(directories.chain(files))?)
    }

    /// Writes what a run directory has before the first step; returns where a recipe is that a user has edited. On
    /// the first rank.
    fn prepare_directory(
        &self,
        run: &RunDirectory,
        recipe: &Recipe,
        grows: bool,
        device: String,
    ) -> Result<Option<PathBuf>, Error> {
        // The step from which a stage is longer is known once a checkpoint is open.
        let edited = if grows { None } else { run.write_recipe(recipe)? };
        let ranks = self.group.size();
        Machine::new(self.options.processor, device, ranks).write(&run.machine())?;
        run.clear_remains()?;
        Ok(edited)
    }

    /// Fails if the number of ranks is not a multiple of a stage's tensor x pipeline.
    fn check_parallel(&self, stage: &Stage) -> Result<(), Error> {
        let ranks = self.group.size();
        if stage.parallel.data_ranks(ranks).is_some() {
            return Ok(());
        }
        let Parallel { tensor, pipeline, .. } = stage.parallel;
        let (path, stage) = (self.path.to_owned(), stage.name.clone());
        Err(Error::Parallel { path, stage, tensor, pipeline, ranks })
    }

    /// Opens the model, of a run that begins where its `parent` ends as that keeps it, and the data; errors of
    /// the data are reported later. A run that `continues` itself or its parent has its tokenizer accepted.
    fn open(
        &self,
        recipe: &mut Recipe,
        parent: Option<&RunDirectory>,
        continues: bool,
    ) -> Result<(ModelSource, Result<RunData, Error>), Error> {
        for stage in &recipe.stages {
            self.check_parallel(stage)?;
        }
        let run = RunDirectory::new(&recipe.run.dir);
        let keeper = match self.options.begin_anew {
            true => None,
            false => first_that_keeps_model(recipe, [&run].into_iter().chain(parent))?,
        };
        let source = match keeper {
            Some(keeper) => ModelSource::kept(recipe, self.path, &keeper.model())?,
            None => ModelSource::open(recipe, self.path, self.directory)?,
        };
        recipe.resolve(self.path, source.original_config())?;
        let data = RunData::open(recipe, &source, continues || self.options.allow_other_tokenizer);
        Ok((source, data))
    }
}

/// A run whose directory is locked and checked.
struct Prepared<'a> {
    run: &'a RunDirectory,
    recipe: &'a Recipe,
    source: &'a ModelSource,
    held: &'a Held,
    resume_step: Option<u64>,
}

/// The cause of an error of a run whose directory may have been moved or removed.
fn explained(error: Error, run: &RunDirectory, directory: &HeldDirectory) -> Error {
    let is_explained = matches!(error, Error::RunMoved { .. } | Error::RunRemoved { .. });
    if is_explained || !directory.has_left(run.root()) {
        return error;
    }
    let path = run.root().to_owned();
    match directory.place() {
        Some(place) => Error::RunMoved { path, place, step: None },
        None => Error::RunRemoved { path },
    }
}

/// Adds the step to a `model.from` that is a run without one: that of the newest good checkpoint, or, in a
/// resumed run, the step with which it began.
fn resolve_origin<B: Backend>(
    recipe: &mut Recipe,
    resumed: Option<&RunDirectory>,
    ranks: &mut Ranks<B>,
) -> Result<(), Error> {
    let Some(from) = recipe.model.from.clone() else { return Ok(()) };
    if let Some(run) = resumed {
        ranks.agree(adopt_origin(recipe, run))?;
    } else if let Some(mut name) = CheckpointName::parse(&from) {
        name.step = Some(name.resolve(ranks)?);
        recipe.model.from = Some(name.to_string());
    }
    Ok(())
}

/// Adds the step with which `run` began to a `model.from` that is a run without one.
pub(crate) fn adopt_origin(recipe: &mut Recipe, run: &RunDirectory) -> Result<(), Error> {
    let stored = run.stored_recipe()?.model.from;
    let is_its_step =
        |stored: &String| recipe.model.from.as_ref().is_some_and(|from| is_step_of(stored, from));
    if stored.as_ref().is_some_and(is_its_step) {
        recipe.model.from = stored;
    }
    Ok(())
}

/// The first of the runs that [keeps](RunDirectory::keeps_model) the model of `recipe`.
///
/// # Errors
/// Fails if a stored recipe cannot be read.
pub fn first_that_keeps_model<'a>(
    recipe: &Recipe,
    runs: impl IntoIterator<Item = &'a RunDirectory>,
) -> Result<Option<&'a RunDirectory>, Error> {
    for run in runs {
        if run.keeps_model(recipe)? {
            return Ok(Some(run));
        }
    }
    Ok(None)
}

/// A run on its device, before its element types are known.
struct Training<'a, B: Backend> {
    backend: B,
    ranks: Ranks<B>,
    inputs: Inputs<'a>,
    data: RunData,
    events: &'a mut dyn FnMut(Event<'_>),
}

impl<B: Backend + Clone> InTrainingElements for Training<'_, B> {
    type Output = Result<Outcome, Error>;

    fn run<T: Element, G: Element, M: Element>(self) -> Self::Output {
        let Training { backend, ranks, inputs, data, events } = self;
        if let Some(text) = inputs.source.warning() {
            events(Event::Warning { text });
        }
        for text in &data.tokenizer_remarks {
            events(Event::Warning { text });
        }
        train::<B, T, G, M>(backend, ranks, inputs, data, events)
    }
}
