//! Continuous batching: every pass computes a token of each sequence that generates, and parts of the prompts of
//! others. A sequence joins as soon as there is room, and leaves when it ends.
//!
//! Sequences are computed in the order of their arrival. When the blocks do not suffice, the sequence that joined last
//! gives up its own and is computed again later, with the same result.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use moh_kernels::{Backend, Element};
use moh_model::{BatchGenerator, BatchOptions, Chunk, Error, Model, WantedLogits};
use rayon::prelude::*;

use super::queue::{Inbox, Received, Submission};
use super::sequence::{Progress, Sequence};
use super::{Event, Failure, FinishReason};
use crate::metrics::Metrics;

/// Elements of the logits of a prompt's tokens that a pass returns at most.
const MAX_PROMPT_LOGITS: usize = 1 << 24;

/// How much is computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that are computed at the same time.
    pub sequences: usize,
    /// Tokens of prompts that a pass computes while other sequences generate: they wait for it.
    pub prompt_tokens: usize,
}

/// Computes sequences together.
pub struct Scheduler<'a, B: Backend, T: Element> {
    model: &'a Model<B, T>,
    batch: BatchGenerator<'a, B, T>,
    limits: Limits,
    /// Ids of the tokenizer, which are generated.
    vocab_size: usize,
    waiting: VecDeque<Submission>,
    /// Sequences that gave up their blocks, the one that joined first at the front.
    preempted: VecDeque<Sequence>,
    /// By when they joined.
    running: Vec<Sequence>,
    metrics: Arc<Metrics>,
}

impl<'a, B: Backend, T: Element> Scheduler<'a, B, T> {
    /// Allocates the buffers.
    ///
    /// # Errors
    /// Fails if the device is out of memory, and for sizes of 0.
    pub fn new(
        model: &'a Model<B, T>,
        options: BatchOptions,
        limits: Limits,
        vocab_size: usize,
        metrics: Arc<Metrics>,
    ) -> Result<Self, Error> {
        let limits = Limits {
            sequences: limits.sequences.clamp(1, options.pass_tokens.max(1)),
            prompt_tokens: limits.prompt_tokens.max(1),
        };
        let (waiting, preempted, running) = (VecDeque::new(), VecDeque::new(), Vec::new());
        let batch = BatchGenerator::new(model, options)?;
        Ok(Scheduler { model, batch, limits, vocab_size, waiting, preempted, running, metrics })
    }

    /// Adds a sequence that waits.
    pub fn add(&mut self, submission: Submission) {
        self.waiting.push_back(submission);
    }

    /// Takes all that the queue has; false if there will be nothing more.
    pub fn take(&mut self, inbox: &Inbox, mut patience: std::time::Duration) -> bool {
        loop {
            match inbox.receive(patience) {
                Received::One(submission) => self.add(*submission),
                Received::None => return true,
                Received::Closed => return false,
            }
            patience = std::time::Duration::ZERO;
        }
    }

    /// Whether no sequence is computed; some may wait.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.preempted.is_empty()
    }

    /// Whether no sequence is computed or waits.
    pub fn is_empty(&self) -> bool {
        self.is_idle() && self.waiting.is_empty()
    }

    /// The sequences that wait, which another scheduler may have.
    pub fn into_waiting(self) -> VecDeque<Submission> {
        self.waiting
    }

    /// Computes a pass, if there is anything to compute; with `admit` sequences may join before it.
    pub fn step(&mut self, admit: bool) {
        self.drop_ended();
        if admit {
            self.admit();
        }
        let chunks = self.plan();
        if !chunks.is_empty()
            && let Err(error) = self.compute(&chunks)
        {
            self.fail_all(&error.to_string());
        }
        self.observe();
    }

    /// Removes the sequences whose clients have left, and those that are late.
    fn drop_ended(&mut self) {
        let now = Instant::now();
        let is_late = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        self.waiting.retain(|waiting| {
            let late = is_late(waiting.request.deadline);
            if late {
                let _ = waiting.events.send(Event::Failed(Failure::Late));
            }
            let keep = !late && !waiting.events.is_closed();
            if !keep && waiting.is_first {
                waiting.prompt_done.store(true, Ordering::Relaxed);
            }
            keep
        });
        let (batch, metrics) = (&mut self.batch, &self.metrics);
        let mut keep = |sequence: &Sequence| {
            let late = is_late(sequence.request.deadline);
            if late {
                sequence.send(Event::Failed(Failure::Late));
                metrics.late.inc();
            } else if sequence.is_abandoned() {
                metrics.cancelled.inc();
            } else {
                return true;
            }
            sequence.release_siblings();
            batch.remove(sequence.id);
            false
        };
        self.running.retain(&mut keep);
        self.preempted.retain(&mut keep);
    }

    /// Lets sequences join while there is room for their prompts.
    fn admit(&mut self) {
        let mut free = self.batch.free_blocks().saturating_sub(self.promised_blocks());
        while self.running.len() < self.limits.sequences
            && let Some(sequence) = self.preempted.front()
        {
            let tokens = sequence.tokens_to_restart();
            if self.blocks_of(tokens) > free && !self.running.is_empty() {
                return;
            }
            let Some(mut sequence) = self.preempted.pop_front() else { return };
            let share = !sequence.wants_whole_prompt();
            match self.batch.add(&sequence.request.prompt, share) {
                Ok(id) => {
                    sequence.restart(id);
                    free = free.saturating_sub(self.blocks_of(tokens));
                    self.running.push(sequence);
                }
                Err(error) => sequence.send(failed(&error.to_string())),
            }
        }
        let mut next = 0;
        while self.running.len() < self.limits.sequences
            && self.preempted.is_empty()
            && let Some(waiting) = self.waiting.get(next)
        {
            if !waiting.is_first && !waiting.prompt_done.load(Ordering::Relaxed) {
                next += 1;
                continue;
            }
            let tokens = waiting.request.prompt.len() + 1;
            if self.blocks_of(tokens) > free && !self.running.is_empty() {
                return;
            }
            free = free.saturating_sub(self.blocks_of(tokens));
            if let Some(submission) = self.waiting.remove(next) {
                self.begin(submission);
            }
        }
    }

    fn begin(&mut self, submission: Submission) {
        let request = &submission.request;
        let share = !request.wants_whole_prompt();
        match self.batch.add(&request.prompt, share) {
            Ok(id) => {
                let shared = self.shared_tokens(id, &request.prompt);
                self.metrics.prompt_tokens.inc_by(request.prompt.len() as u64);
                self.metrics.cached_tokens.inc_by(shared as u64);
                self.running.push(Sequence::new(submission, self.vocab_size, id, shared));
            }
            Err(error) => {
                let _ = submission.events.send(failed(&error.to_string()));
            }
        }
    }

    /// Tokens of a new sequence's prompt that are computed already.
    fn shared_tokens(&self, id: moh_model::SequenceId, prompt: &[u32]) -> usize {
        prompt.len() - self.batch.waiting(id).unwrap_or(prompt.len())
    }

    fn blocks_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.batch.options().block_length)
    }

    /// Blocks that the prompts of the running sequences still need.
    fn promised_blocks(&self) -> usize {
        let of = |sequence: &Sequence| {
            let waiting = self.batch.waiting(sequence.id).unwrap_or(0);
            self.batch.needed_blocks(sequence.id, waiting).unwrap_or(0)
        };
        self.running.iter().map(of).sum()
    }

    /// The chunks of the next pass. Sequences that joined last give up their blocks until the others' suffice.
    fn plan(&mut self) -> Vec<Chunk> {
        loop {
            let chunks = self.chunks();
            let needed =
                |chunk: &Chunk| self.batch.needed_blocks(chunk.sequence, chunk.tokens).unwrap_or(0);
            let needed: usize = chunks.iter().map(needed).sum();
            if needed <= self.batch.free_blocks() || self.running.len() < 2 {
                return chunks;
            }
            if let Some(last) = self.running.pop() {
                self.batch.remove(last.id);
                self.metrics.preempted.inc();
                self.preempted.push_front(last);
            }
        }
    }

    /// A token of every sequence that generates, and then parts of prompts.
    fn chunks(&self) -> Vec<Chunk> {
        let decoding = self.running.iter().filter(|sequence| sequence.is_decoding());
        let mut chunks: Vec<Chunk> = decoding
            .map(|sequence| Chunk { sequence: sequence.id, tokens: 1, logits: WantedLogits::Last })
            .collect();
        let mut room = self.batch.options().pass_tokens - chunks.len();
        if !chunks.is_empty() {
            room = room.min(self.limits.prompt_tokens);
        }
        let mut logits_room = MAX_PROMPT_LOGITS / self.model.config().vocab_size.max(1);
        for sequence in self.running.iter().filter(|sequence| !sequence.is_decoding()) {
            let waiting = self.batch.waiting(sequence.id).unwrap_or(0);
            let mut tokens = waiting.min(room);
            let wants_all = sequence.wants_prompt_logits();
            if wants_all {
                tokens = tokens.min(logits_room);
                logits_room -= tokens;
            }
            if tokens == 0 {
                continue;
            }
            room -= tokens;
            let logits = match () {
                () if wants_all => WantedLogits::All,
                () if tokens == waiting => WantedLogits::Last,
                () => WantedLogits::None,
            };
            chunks.push(Chunk { sequence: sequence.id, tokens, logits });
        }
        chunks
    }

    fn compute(&mut self, chunks: &[Chunk]) -> Result<(), Error> {
        let of = |chunk: &Chunk, running: &[Sequence]| {
            running.iter().position(|sequence| sequence.id == chunk.sequence)
        };
        let indices: Vec<_> = chunks.iter().filter_map(|chunk| of(chunk, &self.running)).collect();
        // Positions of the chunks' first tokens, before the pass.
        let firsts: Vec<usize> = indices
            .iter()
            .map(|&index| {
                let sequence = &self.running[index];
                sequence.length() - self.batch.waiting(sequence.id).unwrap_or(0)
            })
            .collect();
        let wants_heads = indices.iter().any(|&index| self.running[index].request.wants_heads());
        let logits = if wants_heads {
            let (logits, heads) = self.batch.pass_with_heads(chunks)?;
            let mut row = 0;
            for ((chunk, &index), &first) in chunks.iter().zip(&indices).zip(&firsts) {
                for token in 0..chunk.tokens {
                    self.running[index].take_heads(first + token, || heads.of_token(row + token));
                }
                row += chunk.tokens;
            }
            logits
        } else {
            self.batch.pass(chunks)?
        };
        let mut results: Vec<Option<(usize, Vec<f32>)>> = vec![None; self.running.len()];
        for ((&index, first), logits) in indices.iter().zip(firsts).zip(logits) {
            results[index] = Some((first, logits));
        }
        self.advance(results)
    }

    /// Every sequence with logits goes on: its next token, or the next part of its prompt.
    fn advance(&mut self, results: Vec<Option<(usize, Vec<f32>)>>) -> Result<(), Error> {
        let vocabulary = self.model.config().vocab_size;
        let batch = &self.batch;
        let one = |(sequence, result): (&mut Sequence, Option<(usize, Vec<f32>)>)| {
            let Some((first, logits)) = result.filter(|(_, logits)| !logits.is_empty()) else {
                return Ok(None);
            };
            if !sequence.is_decoding() && sequence.wants_prompt_logits() {
                sequence.take_prompt_logits(first, &logits, vocabulary);
            }
            if batch.waiting(sequence.id).unwrap_or(0) > 0 {
                return Ok(None);
            }
            sequence.advance(&logits[logits.len() - vocabulary..]).map(Some)
        };
        let running = &mut self.running;
        let progress: Vec<Result<Option<Progress>, Error>> =
            self.model.backend().install(|| running.par_iter_mut().zip(results).map(one).collect());
        let mut ended = Vec::new();
        for (index, progress) in progress.into_iter().enumerate() {
            let end = match progress {
                Ok(None) => None,
                Ok(Some(progress)) => self.go_on(index, &progress)?,
                Err(error) => Some(failed(&error.to_string())),
            };
            if let Some(event) = end {
                self.running[index].send(event);
                ended.push(index);
            }
        }
        for index in ended.into_iter().rev() {
            let sequence = self.running.remove(index);
            sequence.release_siblings();
            self.batch.remove(sequence.id);
        }
        Ok(())
    }

    /// Counts what a sequence did, and gives the generator its next token, or the event of its end.
    fn go_on(&mut self, index: usize, progress: &Progress) -> Result<Option<Event>, Error> {
        let sequence = &mut self.running[index];
        match *progress {
            Progress::PromptOnly => {
                self.metrics.finished(FinishReason::Length);
                return Ok(Some(Event::Finished(FinishReason::Length)));
            }
            Progress::Token { seconds, is_first } => self.metrics.token(seconds, is_first),
            Progress::Replayed => {}
        }
        if let Some(reason) = sequence.finished() {
            self.metrics.finished(reason);
            return Ok(Some(Event::Finished(reason)));
        }
        if let Some(token) = sequence.next_token() {
            self.batch.push(sequence.id, token)?;
        }
        Ok(None)
    }

    /// A pass has failed: nobody knows what the device has computed.
    fn fail_all(&mut self, reason: &str) {
        for sequence in self.running.drain(..).chain(self.preempted.drain(..)) {
            sequence.send(failed(reason));
            sequence.release_siblings();
            self.batch.remove(sequence.id);
        }
    }

    fn observe(&self) {
        let blocks = self.batch.options().blocks;
        let used = (blocks - self.batch.free_blocks()) as f64 / blocks.max(1) as f64;
        let waiting = self.waiting.len() + self.preempted.len();
        self.metrics.observe(self.running.len(), waiting, used);
    }
}

fn failed(reason: &str) -> Event {
    Event::Failed(Failure::Computation(reason.to_owned()))
}
