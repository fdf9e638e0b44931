//! Evaluations on the validation data.

use moh_data::Windows;
use moh_eval::{EvaluationText, Evaluator, Sums};
use moh_kernels::{Backend, Element, span};
use moh_model::parameters::Shard;

use super::Trainer;
use crate::checkpoint::{Evaluation, Moment};
use crate::event::Event;
use crate::metrics::Validation;
use crate::{Error, Recipe};

impl<B: Backend + Clone, T: Element, G: Element, M: Element> Trainer<'_, '_, B, T, G, M> {
    pub(super) fn record(&mut self, evaluation: Evaluation) {
        let heads = self.model.config().num_attention_heads;
        (self.events)(Event::Evaluated { evaluation: &evaluation, heads });
        self.state.evaluations.push(evaluation);
    }

    pub(super) fn evaluator(&self, batch: usize) -> Result<Option<Evaluator<B, T>>, Error> {
        let length = self.inputs.recipe.data.sequence_length;
        let plan = |_: &Windows| Evaluator::new(&self.model, batch, length);
        Ok(self.data.validation.as_ref().map(plan).transpose()?)
    }

    /// Whether the validation loss is evaluated after this step.
    pub(super) fn validation_is_due(&self, last: bool) -> bool {
        let validation = self.inputs.recipe.data.validation.as_ref();
        let every = validation.map_or(0, |validation| validation.every_steps);
        last || (every > 0 && self.state.step.is_multiple_of(every))
    }

    /// The validation loss, if the recipe asks for one.
    pub(super) fn validate(
        &mut self,
        evaluator: &mut Option<Evaluator<B, T>>,
    ) -> Result<Option<Validation>, Error> {
        let (Some(evaluator), Some(windows)) = (evaluator, &self.data.validation) else {
            return Ok(None);
        };
        let _span = span::enter("evaluation");
        let count = validation_windows(self.inputs.recipe);
        let events = &mut self.events;
        let mut progress = |done, total| events(Event::Evaluating { done, total });
        let tokenizer = self.data.tokenizer.as_ref();
        let shard = Shard::of(&self.groups.data);
        let text = EvaluationText { windows, count, tokenizer };
        let sums = evaluator.evaluate_share(&mut self.model, text, shard, None, &mut progress)?;
        // Counts of tokens and bytes, which f64 represents exactly.
        let [cross_entropy, tokens, bytes] =
            self.ranks.sum([sums.cross_entropy, sums.tokens as f64, sums.bytes as f64])?;
        let found = Sums { cross_entropy, tokens: tokens as u64, bytes: bytes as u64 }.loss();
        if !found.loss.is_finite() {
            let text = format!(
                "the validation loss after step {} is {}, and is recorded as null",
                self.state.step, found.loss
            );
            (self.events)(Event::Warning { text: &text });
        }
        Ok(Some(Validation { loss: found.loss, bits_per_byte: found.bits_per_byte }))
    }

    pub(super) fn evaluate_moment(&mut self, moment: Moment, batch: usize) -> Result<(), Error> {
        let mut evaluator = self.evaluator(batch)?;
        if let Some(Validation { loss, bits_per_byte }) = self.validate(&mut evaluator)? {
            self.record(Evaluation { moment, step: self.state.step, loss, bits_per_byte });
        }
        Ok(())
    }
}

/// The windows of one evaluation.
fn validation_windows(recipe: &Recipe) -> u64 {
    let batches = recipe.data.validation.as_ref().map_or(0, |validation| validation.batches);
    let sequences = recipe.stages.first().map_or(1, |stage| stage.micro_batch);
    (batches as u64).saturating_mul(sequences as u64)
}
