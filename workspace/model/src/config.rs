//! The shape of a model, dense or Mixture-of-Head: the typed form of Hugging Face's `config.json`,
//! which crate `moh-hf` reads and writes.

use crate::Error;

/// Shape and constants of a model, as `config.json` gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// What its blocks are.
    pub architecture: Architecture,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head: even, and independent of `hidden_size`.
    pub head_dim: usize,
    /// The context length the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of freshly initialised matrices.
    pub initializer_range: f64,
    /// First token of a text, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text; empty where the model has none.
    pub eos_token_ids: Vec<u32>,
    /// Mixture-of-Head attention; `None` for a dense Llama.
    pub moh: Option<MohConfig>,
}

/// What the blocks of a model are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3.
    Llama,
    /// Qwen3: a Llama with norms of queries and keys.
    Qwen3,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 2] = [Architecture::Llama, Architecture::Qwen3];

    /// Whether queries and keys are normed, each head for itself, before RoPE.
    pub fn norms_queries_and_keys(self) -> bool {
        match self {
            Architecture::Llama => false,
            Architecture::Qwen3 => true,
        }
    }
}

/// Rotary position embedding: `theta`, and Llama 3's scaling where the model has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric sequence of wavelengths.
    pub theta: f64,
    /// `rope_type = "llama3"`.
    pub scaling: Option<Llama3Scaling>,
}

/// The frequency scaling of Llama 3.1 and later (`rope_type = "llama3"`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Division of the low frequencies.
    pub factor: f64,
    /// Wavelengths above `original / low_freq_factor` are divided by `factor`.
    pub low_freq_factor: f64,
    /// Wavelengths below `original / high_freq_factor` stay as they are.
    pub high_freq_factor: f64,
    /// Context length before scaling, in tokens.
    pub original_max_position_embeddings: usize,
}

/// How the router scores heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterKind {
    /// Norm of the query before RoPE; no parameters (`"query-norm"`).
    QueryNorm,
}

impl RouterKind {
    /// The router's name in `config.json` and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            RouterKind::QueryNorm => "query-norm",
        }
    }

    /// The router of that name, where there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        [RouterKind::QueryNorm].into_iter().find(|router| router.name() == name)
    }
}

/// Mixture-of-Head attention (arXiv 2410.11842): the first `shared_heads` heads serve every token,
/// and each token chooses `routed_top_k` of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MohConfig {
    /// `moh_router`.
    pub router: RouterKind,
    /// `moh_shared_heads`.
    pub shared_heads: usize,
    /// `moh_routed_top_k`: routed heads active per token.
    pub routed_top_k: usize,
}

impl MohConfig {
    /// The configuration with `active` x `heads` heads per token, of which `shared` (half of them
    /// when not given) are always on: routed top-k = round(active x heads) - shared.
    ///
    /// # Errors
    /// When `active` is not within 0..=1 or asks for fewer heads than are shared.
    pub fn from_active(heads: usize, shared: Option<usize>, active: f64) -> Result<Self, Error> {
        let shared_heads = shared.unwrap_or(heads / 2);
        let refuse = |reason: String| Err(Error::Moh { reason });
        if !(0.0..=1.0).contains(&active) {
            return refuse(format!("active = {active}: must be a share of the heads, 0 to 1"));
        }
        let count = (active * heads as f64).round() as usize;
        if count < shared_heads {
            return refuse(format!(
                "active = {active} of {heads} heads is {count}, fewer than the {shared_heads} shared heads"
            ));
        }
        let moh = MohConfig {
            router: RouterKind::QueryNorm,
            shared_heads,
            routed_top_k: count - shared_heads,
        };
        moh.validate(heads)?;
        Ok(moh)
    }

    /// Checks the counts against the number of query heads.
    ///
    /// # Errors
    /// More shared or active heads than heads, or exactly one routed head (its norm has no
    /// standard deviation).
    pub fn validate(&self, heads: usize) -> Result<(), Error> {
        let MohConfig { shared_heads, routed_top_k, .. } = *self;
        let refuse = |reason: String| Err(Error::Moh { reason });
        if shared_heads > heads {
            return refuse(format!("shared_heads = {shared_heads}: the model has {heads} heads"));
        }
        let routed = heads - shared_heads;
        if routed == 1 {
            return refuse(format!(
                "shared_heads = {shared_heads} of {heads} leaves one routed head, whose norm has \
                 no standard deviation: route none or at least two"
            ));
        }
        if routed_top_k > routed {
            return refuse(format!(
                "routed_top_k = {routed_top_k}: must be at most the {routed} routed heads"
            ));
        }
        Ok(())
    }

    /// Heads that a token computes: shared and chosen.
    pub fn active_heads(&self) -> usize {
        self.shared_heads + self.routed_top_k
    }
}

impl ModelConfig {
    /// Query heads that read one key/value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Query heads that a token computes: all of a dense model's.
    pub fn active_heads(&self) -> usize {
        self.moh.map_or(self.num_attention_heads, |moh| moh.active_heads())
    }
}
