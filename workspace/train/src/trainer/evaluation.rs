//! Evaluations on the validation data.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use moh_checkpoint::run_log::{
    Evaluation, EvaluationPoint, RoutingLine, RoutingMoment, RoutingOf, Validation,
};
use moh_kernels::{Backend, span};
use moh_model::parameters::Shard;
use moh_model::router::RoutingStatistics;
use moh_recipe::{Recipe, ValidationSet};
use moh_step::{DecodedBytes, EvaluationText, Evaluator, Loss, LossSums};

use super::stop_checks::StopChecks;
use super::{Inputs, Trainer};
use crate::event::Event;
use crate::{Error, Result};

/// The losses of the validation sets that were evaluated, by name.
pub(super) type Losses = BTreeMap<String, Validation>;

/// Whether an evaluation has been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evaluated {
    Yes,
    /// A rank was asked to stop. Nothing is recorded, and the resumed run makes the evaluation.
    Stopped,
}

impl<B: Backend + Clone> Trainer<'_, '_, B> {
    /// Records the losses at a point of the run, if there is validation data.
    pub(super) fn record(&mut self, point: EvaluationPoint, mut losses: Losses) {
        let sets = &self.inputs.recipe.data.validation;
        let Some(first) = sets.first() else { return };
        let texts = sets.iter().zip(&self.data.validation);
        let texts = texts.filter(|(set, _)| losses.contains_key(&set.name));
        let texts = texts.map(|(set, text)| (set.name.clone(), text.evaluated.clone())).collect();
        let Some(found) = losses.remove(&first.name) else { return };
        let Validation { loss, bits_per_byte } = found;
        let step = self.state.step;
        let evaluation = Evaluation {
            moment: point,
            step,
            loss,
            bits_per_byte,
            set: Some(first.name.clone()),
            other_sets: losses,
            texts,
        };
        let heads = self.model.config().num_attention_heads;
        (self.events)(Event::Evaluated { evaluation: &evaluation, heads });
        self.state.evaluations.push(evaluation);
    }

    pub(super) fn evaluator(&self, batch: usize) -> Result<Option<Evaluator<B>>> {
        let length = self.inputs.recipe.data.sequence_length;
        let wanted = !self.data.validation.is_empty();
        let evaluator = || Evaluator::new(&self.model, batch, length);
        Ok(wanted.then(evaluator).transpose()?)
    }

    /// Returns whether a set is evaluated after this step.
    pub(super) fn is_due(&self, set: &ValidationSet, last: bool) -> bool {
        last || (set.every_steps > 0 && self.state.step.is_multiple_of(set.every_steps))
    }

    /// Evaluates the validation sets that are `due`, in the recipe's order, and returns their losses. Writes their
    /// routings at this moment of `stage`, which is `None` for the loaded model. If a rank was asked to stop, returns
    /// `None` and writes nothing.
    pub(super) fn validate(
        &mut self,
        evaluator: &mut Option<Evaluator<B>>,
        due: &[bool],
        moment: RoutingMoment,
        stage: Option<&str>,
    ) -> Result<Option<Losses>> {
        let (mut losses, mut routings) = (Losses::new(), Vec::new());
        let Some(evaluator) = evaluator else { return Ok(Some(losses)) };
        let _span = span::enter("evaluation");
        let recipe = self.inputs.recipe;
        for (index, set) in recipe.data.validation.iter().enumerate() {
            if due.get(index).is_some_and(|due| *due) {
                let found = self.evaluate_set(evaluator, index, set)?;
                let Some((loss, routing)) = found else { return Ok(None) };
                routings.push((set, routing));
                losses.insert(set.name.clone(), loss);
            }
        }
        for (set, routing) in &routings {
            self.write_routing(set, moment, stage, routing);
        }
        Ok(Some(losses))
    }

    /// Returns the loss of one set, and the routing of its tokens, over all ranks; `None` if a rank was asked to stop.
    fn evaluate_set(
        &mut self,
        evaluator: &mut Evaluator<B>,
        index: usize,
        set: &ValidationSet,
    ) -> Result<Option<(Validation, RoutingStatistics)>> {
        let decoder = self.data.decoder.as_ref();
        let decoded = decoder.map(|decoder| |ids: &[u32]| Ok(decoder.decoded_bytes(ids)));
        let text = EvaluationText {
            windows: &self.data.validation[index].windows,
            count: windows(self.inputs.recipe, set),
            decoded_bytes: decoded.as_ref().map(|bytes| bytes as &DecodedBytes<'_>),
        };
        let (events, ranks, stop) = (&mut self.events, &mut self.ranks, self.inputs.stop);
        let mut checks = StopChecks::new(self.parallel.pipeline);
        let mut go_on = |done, total| {
            events(Event::Evaluating { done, total });
            checks.go_on(ranks, stop)
        };
        let shard = Shard::from_group(&self.groups.data);
        let mut routing = self.model.routing_statistics();
        let counted = (!routing.layers.is_empty()).then_some(&mut routing);
        let model = &mut self.model;
        let sums = evaluator.evaluate_share(model, text, shard, counted, &mut go_on)?;
        let Some(sums) = sums else { return Ok(None) };
        // Counts of tokens and bytes, which f64 represents exactly.
        let [cross_entropy, tokens, bytes] =
            self.ranks.sum([sums.cross_entropy, sums.tokens as f64, sums.bytes as f64])?;
        if !routing.layers.is_empty() {
            // These counts are exact in f64 too.
            let mut sums: Vec<f64> = routing.sums().into_iter().map(|sum| sum as f64).collect();
            self.ranks.sum_all(&mut sums)?;
            routing.set_sums(sums.into_iter().map(|sum| sum as u64));
        }
        self.data.validation[index].evaluated.targets = tokens as u64;
        let found = LossSums { cross_entropy, tokens: tokens as u64, bytes: bytes as u64 }.loss();
        if !found.loss.is_finite() {
            let text = format!(
                "the loss on validation set {:?} after step {} is {}, and is recorded as null",
                set.name, self.state.step, found.loss
            );
            (self.events)(Event::Warning { text: &text });
        }
        let Loss { loss, bits_per_byte, .. } = found;
        Ok(Some((Validation { loss, bits_per_byte }, routing)))
    }

    /// Rejects a model with a loss on a window of the training data that is not finite, after updates that were too
    /// large.
    pub(super) fn check_loss(&mut self) -> Result<()> {
        let Inputs { recipe, run, .. } = self.inputs;
        let windows = self.data.training_windows(recipe, self.model.config().vocab_size)?;
        let mut evaluator = Evaluator::new(&self.model, 1, windows.length())?;
        let text = EvaluationText { windows: &windows, count: 1, decoded_bytes: None };
        let shard = Shard::from_group(&self.groups.data);
        let mut go_on = |_, _| Ok::<_, Error>(ControlFlow::Continue(()));
        let sums = evaluator.evaluate_share(&mut self.model, text, shard, None, &mut go_on)?;
        let [loss] = self.ranks.sum([sums.unwrap_or_default().cross_entropy])?;
        let (path, root) = (run.checkpoint(self.state.step), run.root().display());
        self.ranks.agree(match loss.is_finite() || !self.ranks.is_first() {
            true => Ok(()),
            false => {
                let reason = format!(
                    "the model has the loss {loss}, so it is not exported: start another run from an earlier \
                     checkpoint with a lower learning_rate.max: --set model.from={root}@STEP --set run.dir=DIR"
                );
                Err(moh_files::unusable(&path, reason).into())
            }
        })
    }

    fn write_routing(
        &mut self,
        set: &ValidationSet,
        moment: RoutingMoment,
        stage: Option<&str>,
        routing: &RoutingStatistics,
    ) {
        let of = RoutingOf { step: self.state.step, moment, stage, validation: &set.name };
        let lines = routing.layers.iter().map(|layer| RoutingLine::new(of, layer));
        let lines: Vec<RoutingLine> = lines.collect();
        if let Some(writer) = &mut self.routing
            && let Err(error) = writer.write(&lines)
        {
            // A line may be torn: writing ends here, and a resumed run continues after the last good line.
            self.routing = None;
            let text = format!("{error}: routing is recorded again when the run is resumed");
            (self.events)(Event::Warning { text: &text });
        }
        // A conversion has the step of the training step before it.
        if moment == RoutingMoment::Step
            && let Some(board) = &mut self.board
            && let Err(error) = board.write_routing(self.state.step, &set.name, routing)
        {
            self.give_up_board(&error);
        }
    }

    /// Stops writing TensorBoard's curves after a failure to write them: a log does not end a run.
    pub(super) fn give_up_board(&mut self, error: &moh_checkpoint::Error) {
        // A record may be torn: writing ends here, and a resumed run starts another file.
        self.board = None;
        let text = format!("{error}: TensorBoard's curves go on when the run is resumed");
        (self.events)(Event::Warning { text: &text });
    }

    /// Evaluates all sets at a point between steps.
    pub(super) fn evaluate_at(
        &mut self,
        point: EvaluationPoint,
        batch: usize,
    ) -> Result<Evaluated> {
        let mut evaluator = self.evaluator(batch)?;
        let due = vec![true; self.data.validation.len()];
        let (moment, stage) = match &point {
            EvaluationPoint::Loaded => (RoutingMoment::Loaded, None),
            EvaluationPoint::Converted { stage, .. } => (RoutingMoment::Converted, Some(&**stage)),
            EvaluationPoint::Trained { stage } => (RoutingMoment::Step, Some(&**stage)),
        };
        let losses = self.validate(&mut evaluator, &due, moment, stage)?;
        let Some(losses) = losses else { return Ok(Evaluated::Stopped) };
        self.record(point, losses);
        Ok(Evaluated::Yes)
    }
}

/// Returns the windows of one evaluation of a set.
fn windows(recipe: &Recipe, set: &ValidationSet) -> u64 {
    let sequences = recipe.stages.first().map_or(1, |stage| stage.micro_batch);
    (set.batches as u64).saturating_mul(sequences as u64)
}
