//! Requests to the engine, and its answers.

use std::sync::Arc;
use std::time::Instant;

use moh_model::{LogProbabilities, Sampling};

/// A sequence to compute.
#[derive(Debug, Clone)]
pub struct Request {
    /// The tokens of the prompt, at least one, all in the vocabulary.
    pub prompt: Arc<[u32]>,
    /// The most tokens to generate. With 0, only the prompt is computed.
    pub max_tokens: usize,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// The seed of the sampling.
    pub seed: u64,
    /// Tokens after which generation ends.
    pub end_tokens: Vec<u32>,
    /// The number of most likely tokens to return for each generated token.
    pub logprobs: Option<usize>,
    /// The number of most likely tokens to return for each token of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Whether to return the heads that generated tokens compute.
    pub heads: bool,
    /// Whether to return the heads that the prompt's tokens compute.
    pub prompt_heads: bool,
    /// Whether each token is sent when it is generated; otherwise all are sent at the end.
    pub streams: bool,
    /// When the request is cancelled.
    pub deadline: Option<Instant>,
}

/// The most tokens of a sequence that generates few tokens.
const FEW_TOKENS: usize = 64;

impl Request {
    /// Returns whether the sequence may be computed for long. Sequences that generate few tokens have places of their
    /// own.
    pub(super) fn generates_many(&self) -> bool {
        self.max_tokens > FEW_TOKENS
    }

    /// Returns how many prompt tokens may reuse keys and values of an earlier prompt: 0 if log-probabilities or heads
    /// of each token are wanted.
    pub(super) fn shared_tokens(&self) -> usize {
        match self.prompt_logprobs.is_some() || self.prompt_heads {
            true => 0,
            false => self.prompt.len(),
        }
    }

    /// Returns whether the heads of any token are wanted.
    pub(super) fn wants_heads(&self) -> bool {
        self.heads || self.prompt_heads
    }
}

/// The results of a sequence, in order: its prompt, its tokens, its end.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The prompt is computed.
    Prompt(ComputedPrompt),
    /// A token is generated.
    Token(GeneratedToken),
    /// The sequence has ended.
    Finished(FinishReason),
    /// The sequence cannot be computed. No event follows.
    Failed(Failure),
}

/// The prompt of a sequence.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ComputedPrompt {
    /// The number of first tokens with keys and values from an earlier prompt.
    pub cached_tokens: usize,
    /// The log-probabilities of each token except the first, if wanted.
    pub logprobs: Vec<LogProbabilities>,
    /// The heads that its tokens computed, if wanted.
    pub heads: Vec<TokenHeads>,
}

/// A generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// The token.
    pub id: u32,
    /// The log-probabilities, if wanted.
    pub logprobs: Option<LogProbabilities>,
    /// The heads that the token before it computed, if wanted. A token is computed when the next token is generated.
    pub heads: Vec<TokenHeads>,
    /// Whether the token ends the generation. Such a token is not text.
    pub is_end: bool,
}

/// The heads that a token of a sequence computed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TokenHeads {
    /// Its position in the sequence, from 0.
    pub position: usize,
    /// The query heads of each layer, in ascending order.
    pub layers: Vec<Vec<usize>>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// At a token that ends the generation.
    Stop,
    /// After the requested number of tokens.
    Length,
}

impl FinishReason {
    /// Returns the name in OpenAI's API.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Why a sequence cannot be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Its deadline has passed.
    Late,
    /// The device or the sampling failed.
    Computation(String),
}
