//! Starts checkpoints, follows the checkpoint in flight, and waits for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use moh_checkpoint::run_log::MetricsWriter;
use moh_checkpoint::{CompleteCheckpoint, End, Flight, Snapshot, ThreadFlags, WritePart};
use moh_kernels::{Backend, span};
use moh_model::Model;
use moh_step::OptimizerState;

use super::save_clock::{Due, SaveClock};
use super::{Inputs, Trainer};
use crate::{Error, Event, Result};

/// The time between two exchanges of the ranks that wait for a checkpoint. Each exchange stays far below the time limit
/// of an operation, however long the checkpoint takes.
const EXCHANGE_EVERY: Duration = Duration::from_secs(1);

/// The checkpoints of a run in progress. At most one is in flight.
pub(super) struct Saving {
    /// The copy of the state. The thread of the checkpoint in flight shares it.
    snapshot: Arc<Snapshot>,
    flight: Option<(u64, Flight)>,
    /// Step of the newest complete checkpoint.
    last_good: Option<u64>,
    /// The failure of the last checkpoint, until its warning is sent.
    failure: Option<Failure>,
    clock: SaveClock,
}

/// The decisions of all ranks at the end of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Agreed {
    /// The run stops: a rank was asked to stop, or the first rank's time is up.
    pub stop: bool,
    /// A checkpoint is due by the first rank's clock.
    pub save: bool,
}

/// A checkpoint that could not be written. All ranks know of the failure.
#[derive(Debug)]
struct Failure {
    step: u64,
    /// Empty except on the first rank.
    cause: String,
}

impl Saving {
    /// Allocates the host's buffers for the state of `model` and `optimizer`; `last_good` is the step of
    /// the checkpoint that the run resumes from.
    pub(super) fn new<B: Backend>(
        inputs: &Inputs<'_>,
        model: &Model<B>,
        optimizer: &OptimizerState<B>,
        last_good: Option<u64>,
    ) -> Result<Self> {
        let (layout, shard, recipe) = (model.layout(), optimizer.shard(), inputs.recipe);
        let snapshot = Snapshot::new(layout, shard, model.element(), recipe.precision.moments)?;
        Ok(Saving {
            snapshot: Arc::new(snapshot),
            flight: None,
            last_good,
            failure: None,
            clock: SaveClock::new(&recipe.checkpoint, inputs.time_limit, Instant::now()),
        })
    }

    pub(super) fn step_begins(&mut self) {
        self.clock.step_begins(Instant::now());
    }

    fn fails(&mut self, step: u64, cause: String) {
        self.clock.save_fails(Instant::now());
        self.failure = Some(Failure { step, cause });
    }
}

impl<B: Backend + Clone> Trainer<'_, '_, B> {
    /// Exchanges the decisions of all ranks at the end of a step, and follows the checkpoint in flight.
    pub(super) fn agree_after_step(&mut self) -> Result<Agreed> {
        let due = self.saving.clock.step_ends(Instant::now());
        let agreed = self.exchange(Duration::ZERO, due)?;
        self.warn_of_failure("in a minute, or when the next checkpoint is due");
        Ok(agreed)
    }

    /// Copies the state and starts to write its checkpoint. The weights must be complete. First waits for the
    /// checkpoint in flight, so that the same checkpoints are written at any speed. Fails if the run directory was
    /// moved or removed. A checkpoint that cannot be written causes a warning later.
    pub(super) fn save(&mut self) -> Result<()> {
        let _span = span::enter("checkpoint");
        self.wait_for_checkpoint()?;
        self.warn_of_failure("now");
        self.ranks.on_rank0::<_, Error>(|| Ok(self.inputs.run.check_mark()?))?;
        self.warn_of_removed_metrics();
        self.saving.clock.save_begins(Instant::now());
        let (step, run) = (self.state.step, self.inputs.run);
        // The other ranks write into the directory that the first rank creates.
        let begun = if self.ranks.is_first() { self.begin().map(Some) } else { Ok(None) };
        if self.ranks.any(begun.is_err())? {
            self.saving.fails(step, begun.err().map_or_else(String::new, |e| e.to_string()));
            return Ok(());
        }
        let write_part = self.copy_state()?;
        let size = self.ranks.group().size();
        // No rank has an error here.
        let complete = begun.ok().flatten();
        let flight = Flight::start(run.checkpoint(step), size, write_part, complete);
        self.saving.flight = Some((step, flight));
        Ok(())
    }

    fn warn_of_removed_metrics(&mut self) {
        let Some(writer) = self.metrics.as_mut() else { return };
        if writer.finds_removed() {
            let text = format!(
                "{}: was removed while the run writes it, so the lines of its steps are lost: a run that resumes \
                 begins it again",
                writer.path().display()
            );
            (self.events)(Event::Warning { text: &text });
        }
    }

    /// Creates the directory of a checkpoint, on the first rank; returns the function that completes it.
    fn begin(&mut self) -> Result<CompleteCheckpoint> {
        let Inputs { run, recipe, source, .. } = self.inputs;
        let (run, retention, state) = (run.clone(), recipe.checkpoint, self.state.clone());
        let config = source.fields(recipe, &state, self.model.config(), None);
        let sync_metrics = self.metrics.as_mut().map(MetricsWriter::sync_later).transpose()?;
        let pending = moh_checkpoint::begin(&run, state.step)?;
        // While steps are not applied, older checkpoints stay: a run that diverges may resume from one of them.
        let prunes = self.state.guard.in_a_row == 0;
        let background = Arc::clone(&self.background);
        Ok(Box::new(move |parts| {
            let _listening = span::listen(background);
            let _span = span::enter("complete checkpoint");
            // Resuming from the checkpoint of step n requires n lines of metrics.
            sync_metrics.map_or(Ok(()), |sync| sync())?;
            moh_checkpoint::publish(&run, pending, state, config, parts)?;
            let pruned = if prunes { moh_checkpoint::prune(&run, &retention) } else { Ok(()) };
            let failed = [run.mark(), pruned].into_iter().filter_map(Result::err);
            Ok(failed.map(|error| error.to_string()).collect())
        }))
    }

    /// Copies the state to the host; returns the function that writes this rank's part of the checkpoint.
    fn copy_state(&mut self) -> Result<WritePart> {
        let _span = span::enter("copy");
        // A thread that had the snapshot has ended with its flight.
        let snapshot = Arc::get_mut(&mut self.saving.snapshot).expect("no checkpoint is in flight");
        snapshot.copy(&self.model, &self.optimizer)?;
        let (run, step) = (self.inputs.run.clone(), self.state.step);
        let (rank, size) = (self.ranks.group().rank(), self.ranks.group().size());
        let snapshot = Arc::clone(&self.saving.snapshot);
        let background = Arc::clone(&self.background);
        Ok(Box::new(move || {
            let _listening = span::listen(background);
            let _span = span::enter("write checkpoint");
            moh_checkpoint::write_part(&run, step, rank, size, &snapshot)
        }))
    }

    /// Waits for the checkpoint in flight. If the last step has no checkpoint, writes one. A failed write is retried
    /// once.
    pub(super) fn finish_saving(&mut self) -> Result<()> {
        self.wait_for_checkpoint()?;
        if !self.is_saved() {
            self.save()?;
            self.wait_for_checkpoint()?;
        }
        match self.saving.failure.take() {
            Some(Failure { step, cause }) if self.ranks.is_first() => {
                let reason = format!(
                    "the checkpoint could not be written: {cause}; {}: make room or repair the file system, and run \
                     the same command again, or, if the run has diverged, start another one from that checkpoint with a \
                     lower learning_rate.max",
                    self.last_good()
                );
                Err(moh_files::unusable(&self.inputs.run.checkpoint(step), reason).into())
            }
            Some(_) => Err(moh_step::Error::OtherRank { rank: 0 }.into()),
            None => Ok(()),
        }
    }

    /// Returns a clause that says which checkpoint is the newest complete one.
    pub(super) fn last_good(&self) -> String {
        match self.saving.last_good {
            Some(step) => format!("the last good checkpoint is of step {step}"),
            None => "there is no good checkpoint yet".to_owned(),
        }
    }

    /// Returns whether the newest complete checkpoint is of the last step, or there is no step yet.
    pub(super) fn is_saved(&self) -> bool {
        self.saving.last_good.unwrap_or(0) == self.state.step
    }

    pub(super) fn wait_for_checkpoint(&mut self) -> Result<()> {
        while self.saving.flight.is_some() {
            self.exchange(EXCHANGE_EVERY, Due::default())?;
        }
        Ok(())
    }

    /// Waits at most `limit` for this rank's part of a checkpoint in flight, exchanges flags with the other ranks and
    /// follows the checkpoint. Only the first rank's `due` counts.
    fn exchange(&mut self, limit: Duration, due: Due) -> Result<Agreed> {
        let flight = self.saving.flight.as_mut();
        let ThreadFlags { running, failed } =
            flight.map_or_else(ThreadFlags::default, |(_, flight)| flight.wait(limit));
        let stop = self.inputs.stop.load(Ordering::Relaxed) || (self.ranks.is_first() && due.stop);
        let save = self.ranks.is_first() && due.checkpoint;
        let [stop, save, running, failed] = self.ranks.any_of([stop, save, running, failed])?;
        if let Some((step, flight)) = &mut self.saving.flight
            && let Some(end) = flight.advance(ThreadFlags { running, failed }, &mut self.ranks)?
        {
            let step = *step;
            self.saving.flight = None;
            self.checkpoint_ends(step, end);
        }
        Ok(Agreed { stop, save })
    }

    fn checkpoint_ends(&mut self, step: u64, end: End) {
        match end {
            End::Failed(cause) => self.saving.fails(step, cause),
            End::Complete(warnings) => {
                self.saving.last_good = Some(step);
                let seconds = self.saving.clock.save_completes(Instant::now()).as_secs_f64();
                let path = &self.inputs.run.checkpoint(step);
                (self.events)(Event::Checkpoint { path, step, seconds });
                for text in &warnings {
                    let text = format!("{text}: the checkpoint of step {step} is complete");
                    (self.events)(Event::Warning { text: &text });
                }
            }
        }
    }

    /// Warns of a checkpoint that has failed, and says when the next attempt follows.
    pub(super) fn warn_of_failure(&mut self, again: &str) {
        let Some(Failure { step, cause }) = self.saving.failure.take() else { return };
        let newest = self.last_good();
        let text = format!(
            "the checkpoint of step {step} could not be written: {cause}; {newest}, and another \
             one is tried {again}"
        );
        (self.events)(Event::Warning { text: &text });
    }
}
