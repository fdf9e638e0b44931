//! Continuous batching: every pass computes a token of each generating sequence, and parts of the prompts of other
//! sequences. A sequence joins as soon as there is room, and leaves when it ends.
//!
//! Sequences join in the order of their arrival, but a short prompt may pass long prompts. Some places and blocks are
//! kept for short prompts, and most of a pass's room for prompts goes to the shortest. If the blocks do not suffice,
//! the sequence that joined last gives up its blocks. It is computed again later, with the same result.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use moh_kernels::Backend;
use moh_kernels::sampling::RowChoice;
use moh_model::{BatchGenerator, BatchOptions, Chunk, Error, Model, PassHeads, SequenceId};

use super::queue::{EventSender, Inbox, Submission};
use super::sequence::{Progress, Sequence};
use super::{Event, Failure, FinishReason, OF_FEW};
use crate::metrics::Metrics;

/// The most elements of prompt logits that a pass returns.
const MAX_PROMPT_LOGITS: usize = 1 << 24;
/// One in so many places is kept for short prompts.
const PLACES_KEPT: usize = 8;
/// One in so many blocks is kept for short prompts, and one in so many prompt tokens of a pass for the oldest prompt.
const RESERVE: usize = 4;
/// The time after which no sequence may pass a sequence that cannot join.
const MAX_PASSED: Duration = Duration::from_secs(30);

/// Limits of the work that is computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most sequences that are computed together; also limited by the tokens of a pass.
    pub sequences: usize,
    /// The most prompt tokens of a pass while other sequences generate: these wait for the pass.
    pub prompt_tokens: usize,
}

/// The waiting sequences that may join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// All waiting sequences.
    Open,
    /// Sequences of requests that have begun: the model is about to change, and a request is computed by a single
    /// model.
    OnlyBegun,
}

/// Computes sequences together.
pub struct Scheduler<'a, B: Backend> {
    model: &'a Model<B>,
    batch: BatchGenerator<'a, B>,
    limits: Limits,
    /// The number of the tokenizer's ids: only these are generated.
    vocab_size: usize,
    waiting: VecDeque<Submission>,
    /// Sequences that gave up their blocks, in the order in which they joined.
    preempted: VecDeque<Sequence>,
    /// Running sequences, in the order in which they joined.
    running: Vec<Sequence>,
    /// Since when the sequences at the front, which others may pass, have been unable to join.
    blocked: Option<Instant>,
    metrics: Arc<Metrics>,
}

/// The chunk of a running sequence.
struct Planned {
    /// The sequence's index in `running`.
    index: usize,
    /// The position of the chunk's first token.
    first: usize,
    chunk: Chunk,
}

impl<'a, B: Backend> Scheduler<'a, B> {
    /// Creates a scheduler, and allocates the buffers of its passes.
    pub fn new(
        model: &'a Model<B>,
        options: BatchOptions,
        limits: Limits,
        vocab_size: usize,
        metrics: Arc<Metrics>,
    ) -> Result<Self, Error> {
        let limits = Limits {
            sequences: limits.sequences.clamp(1, options.pass_tokens.max(1)),
            prompt_tokens: limits.prompt_tokens.max(1),
        };
        Ok(Scheduler {
            model,
            batch: BatchGenerator::new(model, options)?,
            limits,
            vocab_size,
            waiting: VecDeque::new(),
            preempted: VecDeque::new(),
            running: Vec::new(),
            blocked: None,
            metrics,
        })
    }

    /// Adds a waiting sequence.
    pub fn add(&mut self, submission: Submission) {
        self.waiting.push_back(submission);
    }

    /// Adds all submissions in the queue; waits `patience` for the first. Returns false if no more can come.
    pub fn take(&mut self, inbox: &Inbox, mut patience: Duration) -> bool {
        loop {
            match inbox.receiver.recv_timeout(patience) {
                Ok(submission) => self.add(submission),
                Err(error) => return error == RecvTimeoutError::Timeout,
            }
            patience = Duration::ZERO;
        }
    }

    /// Returns whether every request that has begun is finished. Other requests may wait.
    pub fn is_drained(&self) -> bool {
        let mut waiting = self.waiting.iter();
        self.running.is_empty()
            && self.preempted.is_empty()
            && !waiting.any(|waiting| waiting.has_begun.load(Ordering::Relaxed))
    }

    /// Returns whether no sequence is computed or waits.
    pub fn is_empty(&self) -> bool {
        self.is_drained() && self.waiting.is_empty()
    }

    /// Returns the waiting sequences, for another scheduler.
    pub fn into_waiting(self) -> VecDeque<Submission> {
        self.waiting
    }

    /// Computes a pass, if any sequence needs it.
    pub fn step(&mut self, admission: Admission) {
        self.drop_ended();
        self.resume_preempted();
        self.admit(admission);
        let plan = self.plan();
        if !plan.is_empty()
            && let Err(error) = self.compute(&plan)
        {
            self.fail_all(&error.to_string());
        }
        self.observe();
    }

    /// Removes sequences that are late, and sequences with clients that have left or want no more.
    fn drop_ended(&mut self) {
        let (now, metrics) = (Instant::now(), &self.metrics);
        self.waiting.retain(|waiting| {
            let keep = goes_on(&waiting.events, waiting.request.deadline, now, metrics);
            if !keep && waiting.is_first {
                waiting.release_siblings();
            }
            keep
        });
        let batch = &mut self.batch;
        let mut keep = |sequence: &Sequence| {
            let keep = goes_on(&sequence.events, sequence.request.deadline, now, metrics);
            if !keep {
                sequence.release_siblings();
                batch.remove(sequence.id);
            }
            keep
        };
        self.running.retain(&mut keep);
        self.preempted.retain(&mut keep);
    }

    /// Lets sequences that gave up their blocks join again.
    fn resume_preempted(&mut self) {
        while self.has_place()
            && let Some(sequence) = self.preempted.front()
        {
            let (prompt, share) = (sequence.request.prompt.clone(), sequence.shared_tokens());
            match self.try_join(&prompt, share, sequence.tokens_to_restart(), false) {
                Ok(None) => return,
                Ok(Some((id, _))) => {
                    self.blocked = None;
                    self.running.extend(self.preempted.pop_front().map(|mut sequence| {
                        sequence.restart(id);
                        sequence
                    }));
                }
                Err(error) => {
                    if let Some(sequence) = self.preempted.pop_front() {
                        self.fail(&sequence.events, &error.to_string());
                    }
                }
            }
        }
    }

    /// Lets waiting sequences join while there is room for their prompts. After the first prompt without room, only
    /// short prompts may join.
    fn admit(&mut self, admission: Admission) {
        let (mut next, mut is_blocked) = (0, !self.preempted.is_empty());
        while self.has_place()
            && let Some(waiting) = self.waiting.get(next)
        {
            let may_join =
                admission == Admission::Open || waiting.has_begun.load(Ordering::Relaxed);
            if !may_join || !waiting.is_ready() || self.is_many(waiting) {
                next += 1;
                continue;
            }
            let (prompt, share) = (waiting.request.prompt.clone(), waiting.request.shared_tokens());
            let joined = match self.may_pass(&prompt)
                || !(is_blocked || self.running.len() >= self.most())
            {
                true => self.try_join(&prompt, share, prompt.len() + 1, is_blocked),
                false => Ok(None),
            };
            if matches!(joined, Ok(None)) {
                is_blocked = true;
                next += 1;
                continue;
            }
            let Some(submission) = self.waiting.remove(next) else { break };
            match joined {
                Ok(None) => {}
                Ok(Some((id, shared))) => {
                    if !is_blocked {
                        self.blocked = None;
                    }
                    self.metrics.prompt_tokens.inc_by(prompt.len() as u64);
                    self.metrics.cached_tokens.inc_by(shared as u64);
                    self.running.push(Sequence::new(submission, self.vocab_size, id, shared));
                }
                Err(error) => {
                    submission.release_siblings();
                    self.fail(&submission.events, &error.to_string());
                }
            }
        }
        match is_blocked {
            true => _ = self.blocked.get_or_insert_with(Instant::now),
            false if next >= self.waiting.len() => self.blocked = None,
            false => {}
        }
    }

    /// Returns whether a prompt is short: a few passes compute it while others generate.
    fn is_short(&self, prompt: &[u32]) -> bool {
        prompt.len() <= 2 * self.limits.prompt_tokens.min(self.batch.options().pass_tokens)
    }

    /// Returns whether a prompt may pass waiting prompts: it is short, and they have not waited long.
    fn may_pass(&self, prompt: &[u32]) -> bool {
        self.is_short(prompt) && self.blocked.is_none_or(|since| since.elapsed() < MAX_PASSED)
    }

    /// Returns the number of running sequences at which long prompts no longer join. A single request may have as many.
    fn most(&self) -> usize {
        self.limits.sequences - self.limits.sequences / PLACES_KEPT
    }

    /// Returns whether a waiting sequence must wait, because its request or the sequences that generate many tokens
    /// have all the places that they may have.
    fn is_many(&self, waiting: &Submission) -> bool {
        let of_request = self.running.iter().filter(|sequence| sequence.is_of(waiting)).count();
        let many = || self.running.iter().filter(|it| it.request.generates_many()).count();
        let places = self.limits.sequences - self.limits.sequences / OF_FEW;
        of_request >= self.most() || waiting.request.generates_many() && many() >= places
    }

    /// Returns whether another sequence may be computed.
    fn has_place(&self) -> bool {
        self.running.len() < self.limits.sequences
    }

    /// Adds a sequence to the generator, if there are blocks for its first `tokens` tokens beside the blocks that
    /// running prompts still need. At most `share` tokens reuse an earlier prompt. Returns the id and the number of
    /// prompt tokens that are computed already.
    ///
    /// Short prompts have a reserve of blocks. A sequence that passes others must fit into it, together with running
    /// short prompts. A long prompt leaves it free.
    fn try_join(
        &mut self,
        prompt: &[u32],
        share: usize,
        tokens: usize,
        passes: bool,
    ) -> Result<Option<(SequenceId, usize)>, Error> {
        let promised = self.promised_blocks();
        let id = self.batch.add(prompt, share)?;
        let shared = prompt.len() - self.batch.waiting(id)?;
        let needed = self.batch.needed_blocks(id, tokens - shared)?;
        let BatchOptions { blocks, block_length, .. } = self.batch.options();
        let reserve = blocks / RESERVE;
        let of_short = self.running.iter().filter(|it| self.is_short(&it.request.prompt));
        let short_blocks: usize = of_short.map(|it| it.length().div_ceil(block_length)).sum();
        let kept = match self.is_short(prompt) {
            true => 0,
            false => reserve.saturating_sub(short_blocks),
        };
        let is_much = passes && short_blocks + needed > reserve;
        let has_blocks = promised + needed + kept <= self.batch.free_blocks();
        if (is_much || !has_blocks) && !self.running.is_empty() {
            self.batch.remove(id);
            return Ok(None);
        }
        Ok(Some((id, shared)))
    }

    /// Returns the number of blocks that the prompts of running sequences still need.
    fn promised_blocks(&self) -> usize {
        let of = |sequence: &Sequence| {
            let waiting = self.batch.waiting(sequence.id).unwrap_or(0);
            self.batch.needed_blocks(sequence.id, waiting).unwrap_or(0)
        };
        self.running.iter().map(of).sum()
    }

    /// Returns the chunks of the next pass. While blocks are missing, the sequence that joined last gives up its
    /// blocks.
    fn plan(&mut self) -> Vec<Planned> {
        loop {
            let plan = self.chunks();
            let needed = |planned: &Planned| {
                let Chunk { sequence, tokens, .. } = planned.chunk;
                self.batch.needed_blocks(sequence, tokens).unwrap_or(0)
            };
            let needed: usize = plan.iter().map(needed).sum();
            if needed <= self.batch.free_blocks() || self.running.len() < 2 {
                return plan;
            }
            if let Some(last) = self.running.pop() {
                self.batch.remove(last.id);
                self.metrics.preempted.inc();
                self.preempted.push_front(last);
            }
        }
    }

    /// Returns a token of every generating sequence, and then parts of prompts.
    fn chunks(&self) -> Vec<Planned> {
        let planned = |index: usize, tokens: usize, logits: usize| {
            let sequence = &self.running[index];
            let first = sequence.length() - self.batch.waiting(sequence.id).unwrap_or(0);
            Planned { index, first, chunk: Chunk { sequence: sequence.id, tokens, logits } }
        };
        let (decoding, mut prompts): (Vec<usize>, Vec<usize>) =
            (0..self.running.len()).partition(|&index| self.running[index].is_decoding());
        let wanted = |index: usize| usize::from(self.running[index].chooses_next());
        let token = |index: usize| planned(index, 1, wanted(index));
        let mut plan: Vec<Planned> = decoding.into_iter().map(token).collect();
        let mut room = self.batch.options().pass_tokens - plan.len();
        if !plan.is_empty() {
            room = room.min(self.limits.prompt_tokens);
        }
        let mut logits_room = (MAX_PROMPT_LOGITS / self.model.config().vocab_size.max(1)).max(1);
        // A part of the room is kept for the oldest prompt. The rest goes to prompts by length, the shortest first. In
        // its turn, the oldest prompt may use all the room that is left.
        let waits = |index: usize| self.batch.waiting(self.running[index].id).unwrap_or(0);
        let oldest = prompts.first().copied();
        let mut kept = oldest.map_or(0, |index| waits(index).min(room / RESERVE));
        let mut kept_logits = logits_room / RESERVE;
        prompts.sort_by_key(|&index| self.running[index].request.prompt.len());
        for index in prompts {
            if Some(index) == oldest {
                (kept, kept_logits) = (0, 0);
            }
            let waiting = waits(index);
            let mut tokens = waiting.min(room - kept);
            let wants_all = self.running[index].wants_prompt_logits();
            if wants_all {
                tokens = tokens.min(logits_room - kept_logits);
                logits_room -= tokens;
            }
            if tokens == 0 {
                continue;
            }
            room -= tokens;
            let logits = match () {
                () if wants_all => tokens,
                () if tokens == waiting => wanted(index),
                () => 0,
            };
            plan.push(planned(index, tokens, logits));
        }
        plan
    }

    fn compute(&mut self, plan: &[Planned]) -> Result<(), Error> {
        let chunks: Vec<Chunk> = plan.iter().map(|planned| planned.chunk).collect();
        let wants_heads = |planned: &Planned| self.running[planned.index].request.wants_heads();
        let mut heads = plan.iter().any(wants_heads).then(PassHeads::default);
        let mut requests = Vec::new();
        for Planned { index, first, chunk } in plan {
            let end = first + chunk.tokens;
            let from = end - chunk.logits;
            requests.extend(self.running[*index].requests(from, end));
        }
        let choices =
            self.batch.pass_choosing(&chunks, &requests, self.vocab_size, heads.as_mut())?;
        if let Some(heads) = heads {
            let mut row = 0;
            for Planned { index, first, chunk } in plan {
                for token in 0..chunk.tokens {
                    let of_token = || heads.of_token(row + token);
                    self.running[*index].take_heads(first + token, of_token);
                }
                row += chunk.tokens;
            }
        }
        let mut computed: Vec<Option<Vec<Option<RowChoice>>>> = vec![None; self.running.len()];
        for (planned, choices) in plan.iter().zip(choices) {
            computed[planned.index] = Some(choices);
        }
        self.advance(computed)
    }

    /// Advances every computed sequence to its next token, or to the next part of its prompt.
    fn advance(&mut self, computed: Vec<Option<Vec<Option<RowChoice>>>>) -> Result<(), Error> {
        let mut ended = Vec::new();
        for (index, choices) in computed.into_iter().enumerate() {
            let Some(choices) = choices else { continue };
            let sequence = &mut self.running[index];
            let Some(choices) = choices.into_iter().collect::<Option<Vec<RowChoice>>>() else {
                self.fail(&self.running[index].events, &Error::not_finite().to_string());
                ended.push(index);
                continue;
            };
            let is_whole = self.batch.waiting(sequence.id)? == 0;
            let next = sequence.take(choices, is_whole);
            if !is_whole {
                continue;
            }
            let reason = match sequence.advance(next) {
                Progress::PromptOnly => Some(FinishReason::Length),
                Progress::Replayed => sequence.finished(),
                Progress::Token { seconds, is_first } => {
                    self.metrics.token(seconds, is_first);
                    sequence.finished()
                }
            };
            if let Some(reason) = reason {
                self.metrics.finished(reason);
                sequence.finish(reason);
                ended.push(index);
            } else if let Some(token) = sequence.next_token() {
                self.batch.push(sequence.id, token)?;
            }
        }
        for index in ended.into_iter().rev() {
            let sequence = self.running.remove(index);
            sequence.release_siblings();
            self.batch.remove(sequence.id);
        }
        Ok(())
    }

    /// Fails every sequence after a failed pass, because the state of the device is unknown.
    fn fail_all(&mut self, reason: &str) {
        let sequences: Vec<_> = self.running.drain(..).chain(self.preempted.drain(..)).collect();
        for sequence in sequences {
            self.fail(&sequence.events, reason);
            sequence.release_siblings();
            self.batch.remove(sequence.id);
        }
    }

    fn fail(&self, events: &EventSender, reason: &str) {
        self.metrics.failed.inc();
        events.send(Event::Failed(Failure::Computation(reason.to_owned())));
    }

    fn observe(&self) {
        let blocks = self.batch.options().blocks;
        let used = (blocks - self.batch.free_blocks()) as f64 / blocks.max(1) as f64;
        let waiting = self.waiting.len() + self.preempted.len();
        self.metrics.observe(self.running.len(), waiting, used);
    }
}

/// Returns whether a sequence is still wanted and in time. Otherwise counts it, and informs its client.
fn goes_on(
    events: &EventSender,
    deadline: Option<Instant>,
    now: Instant,
    metrics: &Metrics,
) -> bool {
    if events.is_enough() {
        metrics.finished(FinishReason::Stop);
    } else if events.is_closed() {
        metrics.cancelled.inc();
    } else if deadline.is_some_and(|deadline| deadline <= now) {
        metrics.late.inc();
        events.send(Event::Failed(Failure::Late));
    } else {
        return true;
    }
    false
}
