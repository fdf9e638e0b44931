//! Distillation: a frozen model, the teacher, runs on the same micro-batches as the trained model, the student. The
//! student's head learns the teacher's distribution over the vocabulary in addition to the targets.
//!
//! A chunk of the teacher runs just before the same chunk of the student, on the same ranks. So the teacher follows the
//! student's pipeline schedule, and its residual stream travels between the stages before the student's. The teacher
//! keeps only the input of its head, until the student's head has read it.

use moh_kernels::cross_entropy::HeadTeacher;
use moh_kernels::{Backend, Element, span};

use crate::activations::MicroBatch;
use crate::layers::Tokens;
use crate::passes::ForwardBuffers;
use crate::{Activations, Error, Model, PassShape, PassSizes, PassSlot, Result};

/// The weights and the temperature of distillation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distillation {
    /// Weight of the distillation loss.
    pub weight: f64,
    /// Weight of the cross-entropy.
    pub cross_entropy: f64,
    /// Divisor of both models' logits before the softmax of the distillation loss.
    pub temperature: f64,
}

/// A frozen model with the buffers of its passes.
pub struct Teacher<B: Backend> {
    model: Model<B>,
    activations: Activations<B>,
    rows: usize,
    temperature: f32,
}

impl<B: Backend> Teacher<B> {
    /// Creates a teacher for passes of shape `pass`. The student learns the teacher's distribution over the first
    /// `rows` rows of the vocabulary: the rows that the teacher was trained on.
    ///
    /// # Errors
    /// Fails if the device is out of memory, or if `rows` is 0 or exceeds the vocabulary.
    pub fn new(model: Model<B>, pass: PassShape, rows: usize, temperature: f64) -> Result<Self> {
        let vocabulary = model.config().vocab_size;
        if !(1..=vocabulary).contains(&rows) {
            let reason =
                format!("a teacher with {vocabulary} rows of the vocabulary has no {rows}");
            return Err(Error::Invalid(reason));
        }
        let activations = Activations::of_teacher(model.backend(), model.pass_sizes(pass)?)?;
        Ok(Teacher { model, activations, rows, temperature: temperature as f32 })
    }

    /// Returns the model.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    /// Computes the forward pass of a student's micro-batch through one chunk of this rank's part.
    fn forward_chunk(&mut self, micro_batch: &MicroBatch<B>, chunk: usize) -> Result<()> {
        let Activations { shape, passes, scratch, head, .. } = &mut self.activations;
        let (ids, tokens) = (&micro_batch.ids, micro_batch.tokens(*shape));
        let (pass, scratch) = (&mut passes[0], &mut *scratch);
        let buffers =
            ForwardBuffers { ids, tokens, pass, scratch: &mut *scratch, head: &mut *head };
        self.model.forward_frozen(buffers, chunk)?;
        if self.model.parallel().ends_with(chunk) {
            // The student's head reads all rows.
            let cx = self.model.context(Tokens::whole(*shape));
            let width = self.model.config().hidden_size;
            cx.all_gather(width, &head.normed.y, &mut scratch.gathered)?;
        }
        Ok(())
    }

    /// Returns the head, and its input in the micro-batch of the last forward pass.
    pub(crate) fn of_head<T: Element>(&self, scale: f32) -> HeadTeacher<'_, B, T> {
        let Activations { shape, scratch, head, .. } = &self.activations;
        let width = self.model.config().hidden_size;
        let input = scratch.gathered.as_ref().unwrap_or(&head.normed.y);
        HeadTeacher {
            width,
            x: input.view(0..shape.tokens() * width).typed(),
            weight: self.model.weights.get(&self.model.layers.head.linear.weight).typed(),
            rows: self.rows,
            temperature: self.temperature,
            scale,
        }
    }
}

impl<B: Backend> Model<B> {
    /// Sets the teacher of the training passes that are planned in the role of a student
    /// ([`PassRole::Student`](crate::PassRole::Student)), or removes the teacher. The teacher is divided among the
    /// ranks as this model is ([`of_frozen`](crate::model_parallel::ModelParallel::of_frozen)).
    ///
    /// # Errors
    /// Fails if the vocabularies differ.
    pub fn set_teacher(&mut self, teacher: Option<Teacher<B>>) -> Result<()> {
        let rows = self.config.vocab_size;
        if let Some(found) = teacher.as_ref().map(|teacher| teacher.model.config().vocab_size)
            && found != rows
        {
            let reason = format!(
                "a teacher with {found} rows of the vocabulary cannot teach a model with {rows}: give both the same"
            );
            return Err(Error::Invalid(reason));
        }
        self.teacher = teacher.map(Box::new);
        Ok(())
    }

    /// Returns the sizes of the teacher's passes of shape `pass`.
    pub fn teacher_sizes(&self, pass: PassShape) -> Result<PassSizes<'_>> {
        self.teacher()?.model.pass_sizes(pass)
    }

    pub(crate) fn teacher(&self) -> Result<&Teacher<B>> {
        self.teacher.as_deref().ok_or_else(no_teacher)
    }

    /// Computes the teacher's forward pass through one chunk, which precedes the model's own
    /// ([`Model::forward_chunk`]).
    ///
    /// # Errors
    /// Fails where [`Model::forward_chunk`] fails, and without a teacher.
    pub fn teach_chunk(&mut self, activations: &Activations<B>, slot: PassSlot) -> Result<()> {
        let _span = span::enter("teacher");
        let teacher = self.teacher.as_mut().ok_or_else(no_teacher)?;
        teacher.forward_chunk(&activations.micro_batches[slot.micro_batch], slot.chunk)
    }
}

fn no_teacher() -> Error {
    Error::invalid("the passes are planned with a teacher, but the model has none: set one")
}
