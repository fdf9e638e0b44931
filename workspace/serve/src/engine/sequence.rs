//! A sequence that the engine computes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use moh_kernels::sampling::{RowChoice, RowRequest, RowToken};
use moh_model::{Sampler, SequenceId};

use super::queue::{EventSender, Submission};
use super::{ComputedPrompt, Event, FinishReason, GeneratedToken, Request, TokenHeads};

/// A sequence that is computed, or that waits to be computed again.
pub(super) struct Sequence {
    pub request: Request,
    pub events: EventSender,
    arrived: Instant,
    prompt_done: Arc<AtomicBool>,
    /// Shared by the sequences that were submitted together.
    has_begun: Arc<AtomicBool>,
    sampler: Sampler,
    /// The sequence's id in the generator.
    pub id: SequenceId,
    generated: Vec<u32>,
    /// The number of generated tokens that the generator has. It computes them one by one, even after the sequence gave
    /// up its blocks, so that the bits stay the same.
    pushed: usize,
    /// The prompt, until its event is sent, which happens once, even if it is computed again.
    prompt: Option<ComputedPrompt>,
    heads: Vec<TokenHeads>,
    /// Tokens of a request that does not stream. They are sent at the end: each event wakes a thread, which slows the
    /// next pass.
    held: Vec<GeneratedToken>,
    /// The position after the last token with heads in `heads` or in an event.
    seen: usize,
    last_token: Option<Instant>,
}

/// The result of a sequence's logits.
pub(super) enum Progress {
    /// A new token, and the seconds since the last token or, for the first token, since the request.
    Token { seconds: f64, is_first: bool },
    /// The next token is known from before, and will be computed again.
    Replayed,
    /// The request asks only for the prompt.
    PromptOnly,
}

impl Sequence {
    /// Creates a sequence from the queue, with id `id` in the generator.
    pub fn new(
        submission: Submission,
        vocab_size: usize,
        id: SequenceId,
        shared_tokens: usize,
    ) -> Self {
        let (arrived, prompt_done) = (submission.arrived, Arc::clone(&submission.prompt_done));
        let has_begun = Arc::clone(&submission.has_begun);
        let (request, events) = submission.admit();
        let sampler = Sampler::new(request.seed, request.sampling.clone(), vocab_size);
        let prompt = ComputedPrompt { cached_tokens: shared_tokens, ..ComputedPrompt::default() };
        Sequence {
            sampler: sampler.after(&request.prompt),
            request,
            events,
            arrived,
            prompt_done,
            has_begun,
            id,
            generated: Vec::new(),
            pushed: 0,
            prompt: Some(prompt),
            heads: Vec::new(),
            held: Vec::new(),
            seen: 0,
            last_token: None,
        }
    }

    /// Restarts the sequence as `id`, after it gave up its blocks.
    pub fn restart(&mut self, id: SequenceId) {
        (self.id, self.pushed) = (id, 0);
        if let Some(prompt) = &mut self.prompt {
            prompt.logprobs.clear();
        }
    }

    /// Returns the number of tokens that must be computed before the sequence can resume.
    pub fn tokens_to_restart(&self) -> usize {
        self.request.prompt.len() + self.generated.len() + 1
    }

    /// Returns whether the sequence was submitted together with `submission`.
    pub fn is_of(&self, submission: &Submission) -> bool {
        Arc::ptr_eq(&self.has_begun, &submission.has_begun)
    }

    /// Lets the other sequences with the same prompt join.
    pub fn release_siblings(&self) {
        self.prompt_done.store(true, Ordering::Relaxed);
    }

    /// Returns whether the generator computes only generated tokens of the sequence, and no more of its prompt.
    pub fn is_decoding(&self) -> bool {
        self.pushed > 0
    }

    /// Returns the number of tokens that the generator has.
    pub fn length(&self) -> usize {
        self.request.prompt.len() + self.pushed
    }

    /// Returns how many prompt tokens may reuse keys and values of an earlier prompt.
    pub fn shared_tokens(&self) -> usize {
        match self.prompt {
            Some(_) => self.request.shared_tokens(),
            None => self.request.prompt.len(),
        }
    }

    /// Returns whether the logits after each prompt token are needed.
    pub fn wants_prompt_logits(&self) -> bool {
        self.request.prompt_logprobs.is_some() && self.prompt.is_some()
    }

    /// Stores the heads of the token at a position, if wanted and new.
    pub fn take_heads(&mut self, position: usize, layers: impl FnOnce() -> Vec<Vec<usize>>) {
        let is_wanted = match position < self.request.prompt.len() {
            true => self.request.prompt_heads,
            false => self.request.heads,
        };
        if is_wanted && position >= self.seen {
            self.seen = position + 1;
            self.heads.push(TokenHeads { position, layers: layers() });
        }
    }

    /// Returns whether the next token must be chosen: it is wanted, and not known from before.
    pub fn chooses_next(&self) -> bool {
        self.request.max_tokens > 0 && self.pushed == self.generated.len()
    }

    /// Returns the requests for the logits after the tokens from position `first` to before `end`.
    pub fn requests(&mut self, first: usize, end: usize) -> Vec<RowRequest> {
        let next = self.generated.get(self.pushed).copied();
        let (prompt, log_probabilities) = (&self.request.prompt, self.request.prompt_logprobs);
        let mut requests = Vec::with_capacity(end - first);
        for position in first + 1..=end {
            let (token, log_probabilities) = match prompt.get(position) {
                Some(&id) => (RowToken::Given(id), log_probabilities),
                None if self.chooses_next() => (self.sampler.next_token(), self.request.logprobs),
                // This token is not used.
                None => (RowToken::Given(next.unwrap_or(0)), None),
            };
            requests.push(RowRequest { token, log_probabilities });
        }
        requests
    }

    /// Stores the log-probabilities of prompt tokens. Returns the next token, if the tokens so far are computed and it
    /// must be chosen.
    pub fn take(&mut self, mut choices: Vec<RowChoice>, is_whole: bool) -> Option<RowChoice> {
        let next = if is_whole { choices.pop().filter(|_| self.chooses_next()) } else { None };
        let wants_prompt = self.wants_prompt_logits();
        if let Some(prompt) = self.prompt.as_mut().filter(|_| wants_prompt) {
            prompt
                .logprobs
                .extend(choices.into_iter().filter_map(|choice| choice.log_probabilities));
        }
        next
    }

    /// Advances the sequence after its last computed token, with the next token if it was chosen.
    pub fn advance(&mut self, next: Option<RowChoice>) -> Progress {
        if let Some(prompt) = self.prompt.take() {
            self.release_siblings();
            let heads = std::mem::take(&mut self.heads);
            self.events.send(Event::Prompt(ComputedPrompt { heads, ..prompt }));
        }
        let Some(RowChoice { token: id, log_probabilities: logprobs }) = next else {
            return match self.request.max_tokens {
                0 => Progress::PromptOnly,
                _ => Progress::Replayed,
            };
        };
        self.sampler.select(id);
        self.generated.push(id);
        let heads = std::mem::take(&mut self.heads);
        let is_end = self.request.end_tokens.contains(&id);
        let token = GeneratedToken { id, logprobs, heads, is_end };
        match self.request.streams {
            true => self.events.send(Event::Token(token)),
            false => self.held.push(token),
        }
        let (now, is_first) = (Instant::now(), self.last_token.is_none());
        let since = self.last_token.unwrap_or(self.arrived);
        self.last_token = Some(now);
        Progress::Token { seconds: (now - since).as_secs_f64(), is_first }
    }

    pub fn finish(&mut self, reason: FinishReason) {
        let held = self.held.drain(..).map(Event::Token);
        held.chain([Event::Finished(reason)]).for_each(|event| self.events.send(event));
    }

    /// Returns why the sequence has ended, if it has.
    pub fn finished(&self) -> Option<FinishReason> {
        if self.pushed + 1 < self.generated.len() {
            return None;
        }
        match self.generated.last() {
            Some(last) if self.request.end_tokens.contains(last) => Some(FinishReason::Stop),
            _ if self.generated.len() >= self.request.max_tokens => Some(FinishReason::Length),
            _ => None,
        }
    }

    pub fn next_token(&mut self) -> Option<u32> {
        let token = self.generated.get(self.pushed).copied()?;
        self.pushed += 1;
        Some(token)
    }
}
