//! The first phase of a run: its recipe is resolved, and its model and data are opened.

use std::path::PathBuf;

use moh_checkpoint::run_directory::{CheckpointName, RunDirectory, branch, is_step_of};
use moh_files::units::counted;
use moh_kernels::Backend;
use moh_recipe::{ParallelOptions, Recipe, Stage};
use moh_step::Ranks;

use super::Job;
use crate::run_data::RunData;
use crate::teacher::Teachers;
use crate::{Error, ModelSource, Result};

/// A run with a resolved recipe, before its directory is locked.
pub(super) struct Resolved<'a, B: Backend> {
    pub job: &'a Job<'a>,
    pub ranks: Ranks<B>,
    pub run: RunDirectory,
    pub recipe: &'a Recipe,
    pub source: ModelSource,
    /// The data, which a finished run does not need.
    pub data: Result<RunData>,
    /// The teachers, which a finished run does not need.
    pub teachers: Result<Teachers>,
    /// The run that this run continues.
    pub parent: Option<&'a RunDirectory>,
    /// The step of the checkpoint to resume from, if not the newest.
    pub resume_step: Option<u64>,
}

impl<'a, B: Backend> Resolved<'a, B> {
    /// Resolves the recipe, the same on every rank.
    pub fn new(job: &'a Job<'a>, mut ranks: Ranks<B>, recipe: &'a mut Recipe) -> Result<Self> {
        let run = RunDirectory::new(&recipe.run.dir);
        let begin_anew = job.options.begin_anew;
        let resumes = ranks.rank0_decides::<Error>(|| {
            run.check()?;
            let resumes = !begin_anew && run.has_completed_work()?;
            if !resumes {
                job.check_inputs(&run, recipe)?;
            }
            Ok(resumes)
        })?;
        let parent = match job.options.parent {
            Some(parent) if ranks.rank0_decides(|| branch::is_free(&run))? => Some(parent),
            _ => None,
        };
        let resumed = resumes.then_some(&run).or(parent);
        resolve_origin(recipe, resumed, &mut ranks)?;
        let opened = job.open(recipe, parent);
        let (source, data, teachers) = ranks.agree(opened)?;
        // Steps start at 1. The first rank's option applies.
        let resume_step =
            ranks.rank0_computes::<Error>(|| Ok(job.options.resume_step.unwrap_or(0) as f64))?;
        let resume_step = Some(resume_step as u64).filter(|&step| step > 0);
        // Invalid data and teachers must not create a run directory.
        let is_new = !run.root().exists();
        let data = agree_if(&mut ranks, data, is_new)?;
        let teachers = agree_if(&mut ranks, teachers, is_new)?;
        Ok(Resolved { job, ranks, run, recipe, source, data, teachers, parent, resume_step })
    }
}

/// The inputs of a run.
type Opened = (ModelSource, Result<RunData>, Result<Teachers>);

/// Fails on all ranks if a rank with `matters` has an error.
fn agree_if<B: Backend, R>(
    ranks: &mut Ranks<B>,
    result: Result<R>,
    matters: bool,
) -> Result<Result<R>> {
    match ranks.any(result.is_err() && matters)? {
        true => Ok(Ok(ranks.agree(result)?)),
        false => Ok(result),
    }
}

impl Job<'_> {
    /// Fails if the directory of a new run contains an input of the run, or lies in a model that the run reads.
    fn check_inputs(&self, run: &RunDirectory, recipe: &Recipe) -> Result<()> {
        let model = &recipe.model;
        let origin = model.from.as_deref().and_then(CheckpointName::parse);
        let directories = [
            ("model.from", self.directory),
            ("model.from", origin.as_ref().map(|origin| origin.run.root())),
            ("model.tokenizer", model.tokenizer.as_deref()),
        ];
        let directories =
            directories.into_iter().filter_map(|(key, path)| Some((key.to_owned(), path?, true)));
        let sources = recipe.stages.iter().flat_map(|stage| {
            let key = stage.data_key("sources");
            let sources = recipe.stage_data(stage).sources.iter();
            sources.map(move |source| (key.clone(), &*source.path))
        });
        let named = |(key, path): (&str, _)| (key.to_owned(), path);
        let teachers = recipe.stages.iter().filter_map(|stage| {
            let name = stage.distill.as_ref().map(|distill| distill.teacher.as_str())?;
            let run = CheckpointName::parse(name).map(|name| name.run.root().to_owned());
            let path = run.unwrap_or_else(|| name.into());
            path.is_dir().then(|| (stage.teacher_key(), path))
        });
        let teachers: Vec<(String, PathBuf)> = teachers.collect();
        let directories = directories
            .chain(teachers.iter().map(|(key, path)| (key.clone(), path.as_path(), true)));
        let sets = recipe.data.validation.iter().map(|set| ("data.validation", &*set.path));
        // The run's own recipe is one of its files.
        let own = run.recipe().canonicalize().ok();
        let is_own = own.is_some_and(|own| self.path.canonicalize().is_ok_and(|path| path == own));
        let recipe = (!is_own).then_some(("--recipe", self.path));
        let files = sources.chain(sets.chain(recipe).map(named));
        let files = files.map(|(key, path)| (key, path, false));
        Ok(run.check_inputs(directories.chain(files))?)
    }

    /// Fails if the number of ranks is not a multiple of a stage's tensor x pipeline.
    fn check_parallel(&self, stage: &Stage) -> Result<()> {
        let ranks = self.group.size();
        if stage.parallel.data_ranks(ranks).is_some() {
            return Ok(());
        }
        let ParallelOptions { tensor, pipeline, .. } = stage.parallel;
        let reason = format!(
            "stage.{}.parallel = {{ tensor = {tensor}, pipeline = {pipeline} }}: {} {} started: start a multiple of \
             {}, or change the two",
            stage.name,
            counted(ranks as u64, "rank"),
            if ranks == 1 { "was" } else { "were" },
            tensor.saturating_mul(pipeline)
        );
        Err(moh_files::unusable(self.path, reason).into())
    }

    /// Opens the model, the data and the teachers. If this run or its `parent` keeps the model, opens the kept model.
    /// Errors of the data and the teachers are reported later.
    fn open(&self, recipe: &mut Recipe, parent: Option<&RunDirectory>) -> Result<Opened> {
        for stage in &recipe.stages {
            self.check_parallel(stage)?;
        }
        let run = RunDirectory::new(&recipe.run.dir);
        let keeper = match self.options.begin_anew {
            true => None,
            false => first_that_keeps_model(recipe, [&run].into_iter().chain(parent))?,
        };
        let source = match keeper {
            Some(keeper) => ModelSource::open_kept(recipe, self.path, &keeper.model())?,
            None => ModelSource::open(recipe, self.path, self.directory)?,
        };
        recipe.resolve(self.path, source.original_config())?;
        let data = RunData::open(recipe, &source);
        let teachers = Teachers::open(recipe, self.path, &source);
        Ok((source, data, teachers))
    }
}

/// Adds the step to a `model.from` that names a run without a step. It is the step of the newest good checkpoint or, in
/// a resumed run, the step with which the run started.
fn resolve_origin<B: Backend>(
    recipe: &mut Recipe,
    resumed: Option<&RunDirectory>,
    ranks: &mut Ranks<B>,
) -> Result<()> {
    let Some(from) = recipe.model.from.clone() else { return Ok(()) };
    if let Some(run) = resumed {
        ranks.agree(adopt_origin(recipe, run))?;
    } else if let Some(mut name) = CheckpointName::parse(&from) {
        name.step = Some(name.resolve(ranks)?);
        recipe.model.from = Some(name.to_string());
    }
    Ok(())
}

/// Adds the step with which `run` started to a `model.from` that names a run without a step.
pub(crate) fn adopt_origin(recipe: &mut Recipe, run: &RunDirectory) -> Result<()> {
    let stored = run.stored_recipe()?.model.from;
    let is_its_step =
        |stored: &String| recipe.model.from.as_ref().is_some_and(|from| is_step_of(stored, from));
    if stored.as_ref().is_some_and(is_its_step) {
        recipe.model.from = stored;
    }
    Ok(())
}

/// Returns the first of the runs that [keeps](RunDirectory::keeps_model) the model of `recipe`.
pub fn first_that_keeps_model<'a>(
    recipe: &Recipe,
    runs: impl IntoIterator<Item = &'a RunDirectory>,
) -> Result<Option<&'a RunDirectory>> {
    for run in runs {
        if run.keeps_model(recipe)? {
            return Ok(Some(run));
        }
    }
    Ok(None)
}
