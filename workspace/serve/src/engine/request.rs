//! What is asked of the engine, and what it answers.

use std::sync::Arc;
use std::time::Instant;

use moh_model::{LogProbabilities, Sampling};

/// A sequence to compute.
#[derive(Debug, Clone)]
pub struct Request {
    /// The tokens of the prompt, at least one, all in the vocabulary.
    pub prompt: Arc<[u32]>,
    /// Tokens to generate at most; with 0 the prompt alone is computed.
    pub max_tokens: usize,
    /// How they are sampled.
    pub sampling: Sampling,
    /// The seed of their sampling.
    pub seed: u64,
    /// Tokens after which generation ends.
    pub end_tokens: Vec<u32>,
    /// The number of most likely tokens that are wanted beside each generated one.
    pub logprobs: Option<usize>,
    /// The number of most likely tokens that are wanted beside each token of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Whether the heads that generated tokens compute are wanted.
    pub heads: bool,
    /// Whether the heads that the prompt's tokens compute are wanted.
    pub prompt_heads: bool,
    /// Whether each token is sent when it is generated; otherwise all are sent at the end.
    pub streams: bool,
    /// When the request is given up.
    pub deadline: Option<Instant>,
}

/// Tokens up to which a sequence generates few.
const FEW_TOKENS: usize = 64;

impl Request {
    /// Returns whether it may be computed for long, so that those that generate few tokens have places that it has not.
    pub(super) fn generates_many(&self) -> bool {
        self.max_tokens > FEW_TOKENS
    }

    /// Of how many tokens of the prompt the keys and values may be those of an earlier prompt: none if log-probabilities or
    /// heads of each token are wanted.
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

/// What the engine computes of a sequence, in order: its prompt, its tokens, its end.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The prompt is computed.
    Prompt(ComputedPrompt),
    /// A token is generated.
    Token(GeneratedToken),
    /// The sequence has ended.
    Finished(FinishReason),
    /// It cannot be computed; nothing follows.
    Failed(Failure),
}

/// The prompt of a sequence.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ComputedPrompt {
    /// Its first tokens whose keys and values an earlier prompt had left.
    pub cached_tokens: usize,
    /// For each token but the first, if wanted.
    pub logprobs: Vec<LogProbabilities>,
    /// The heads that its tokens computed, if wanted.
    pub heads: Vec<TokenHeads>,
}

/// A generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// The token.
    pub id: u32,
    /// If wanted.
    pub logprobs: Option<LogProbabilities>,
    /// The heads that the token before it computed, if wanted: a token is computed when the next one is generated.
    pub heads: Vec<TokenHeads>,
    /// Whether it ends the generation, so that it is not text.
    pub is_end: bool,
}

/// The heads that a token of a sequence computed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TokenHeads {
    /// Its position in the sequence, from 0.
    pub position: usize,
    /// For each layer the query heads, in ascending order.
    pub layers: Vec<Vec<usize>>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// At a token that ends the generation.
    Stop,
    /// With as many tokens as were asked for.
    Length,
}

impl FinishReason {
    /// As OpenAI's API has it.
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
