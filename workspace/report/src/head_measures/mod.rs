//! Measures of a model's heads: their loads, the distance and entropy of their attention, their similarity, and the
//! rank of their outputs. They are computed by layer and head, on one or more texts. `docs/formats.md` defines the
//! figures.
//!
//! All figures are computed from the queries, keys and outputs of the model's own pass, with the heads that it selects.
//! They are computed in f64 and in an order that does not depend on the number of threads.

mod document;
mod features;
mod pairs;
mod patterns;
mod sentence;
mod served;
mod walk;

use std::ops::ControlFlow;

use moh_kernels::Backend;
use moh_model::ModelConfig;
use moh_model::router::entropy;
use serde::{Deserialize, Serialize};

use features::FeatureSums;
use patterns::{PatternSums, Window};
use served::ServedTokens;
use walk::{LayerPass, walk};

pub use document::{HeadDocument, Sentence, SentenceToken};
pub use features::RANK_SHARE;
pub use sentence::{SentenceLayer, sentence};
pub use served::ServedToken;
pub use walk::Source;

/// An error of measuring heads. Its message is a sentence with the fault, its place, and a remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// The model could not be read or run.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// A text or a sentence cannot be measured.
    #[error("{0}")]
    Invalid(String),
}

/// A text for measuring heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadText {
    /// Its name in the report.
    pub name: String,
    /// Whole windows of tokens.
    pub ids: Vec<u32>,
}

/// The texts of a report, in order, and its layers.
pub type HeadReport = (Vec<TextReport>, Vec<LayerReport>);

/// A text of a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextReport {
    /// Its name.
    pub name: String,
    /// Tokens that were measured.
    pub tokens: usize,
}

/// Measures of the heads of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The layer, from 0.
    pub layer: usize,
    /// Mean entropy of the gates of each text's tokens, in nats; `None` if the layer routes no heads.
    pub gate_entropy: Option<Vec<f64>>,
    /// Mean similarity of attention patterns, over all pairs of heads that some token computes; `None` without such a
    /// pair.
    pub pattern_similarity: Option<f64>,
    /// Mean similarity of outputs, over the same pairs.
    pub output_similarity: Option<f64>,
    /// Similarity of patterns of each head with each; `None` if no token computes both.
    pub pattern_similarities: Vec<Vec<Option<f64>>>,
    /// Similarity of outputs of each head with each, likewise.
    pub output_similarities: Vec<Vec<Option<f64>>>,
    /// Each head, in order.
    pub heads: Vec<OneHead>,
}

/// Measures of a head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OneHead {
    /// The head, from 0.
    pub head: usize,
    /// Whether every token computes it.
    pub shared: bool,
    /// Share of each text's tokens that compute it.
    pub load: Vec<f64>,
    /// Rank of its outputs.
    pub feature_rank: usize,
    /// Mean distance of attention, in tokens; `None` if no token computes the head.
    pub distance: Option<f64>,
    /// Mean entropy of the rows of attention, in nats.
    pub entropy: Option<f64>,
    /// The tokens that compute a routed head most often.
    pub tokens: Vec<ServedToken>,
}

/// Measures the heads of the model that `config` describes, on a single device, on texts of whole windows of `length`
/// tokens. `weights` writes each tensor by its name. `progress` receives the number of finished layers and of all
/// layers. If it returns `ControlFlow::Break`, returns `Ok(None)`.
///
/// # Errors
/// Fails if `weights` fails, if a text is not of whole windows, or if the device fails.
pub fn measure_heads<B: Backend + Clone, E: From<Error> + From<moh_model::Error>>(
    backend: &B,
    config: &ModelConfig,
    texts: &[HeadText],
    length: usize,
    weights: Source<'_, E>,
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Option<HeadReport>, E> {
    for text in texts {
        if length == 0 || text.ids.is_empty() || !text.ids.len().is_multiple_of(length) {
            let HeadText { name, ids } = text;
            let reason = format!("{name} has {} tokens: not whole windows of {length}", ids.len());
            return Err(Error::Invalid(reason).into());
        }
    }
    let ids: Vec<u32> = texts.iter().flat_map(|text| &text.ids).copied().collect();
    let windows =
        |(index, text): (usize, &HeadText)| std::iter::repeat_n(index, text.ids.len() / length);
    let text_of: Vec<usize> = texts.iter().enumerate().flat_map(windows).collect();
    let job = Job { config, texts, length, ids: &ids, text_of: &text_of };
    let mut layers: Vec<LayerSums> = Vec::new();
    let mut on_pass = |layer: usize, pass: LayerPass| {
        if layers.len() == layer {
            layers.push(LayerSums::new(config, texts.len()));
        }
        job.add(&mut layers[layer], &pass);
    };
    if !walk(backend, config, &ids, length, weights, &mut on_pass, progress)? {
        return Ok(None);
    }
    let text = |text: &HeadText| TextReport { name: text.name.clone(), tokens: text.ids.len() };
    let layers = layers.iter().enumerate().map(|(layer, sums)| job.report(layer, sums));
    Ok(Some((texts.iter().map(text).collect(), layers.collect())))
}

/// Returns the mean of values; `None` without values.
pub fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.into_iter().collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The sums of a layer over all tokens so far.
struct LayerSums {
    patterns: PatternSums,
    features: FeatureSums,
    served: ServedTokens,
    /// Tokens of each text that compute each head, `[texts, H]`.
    computed: Vec<u64>,
    /// Sums of the entropies of the gates of each text's tokens, if the layer routes.
    gate_entropy: Option<Vec<f64>>,
}

impl LayerSums {
    fn new(config: &ModelConfig, texts: usize) -> Self {
        let heads = config.num_attention_heads;
        LayerSums {
            patterns: PatternSums::new(heads),
            features: FeatureSums::new(heads, config.head_dim),
            served: ServedTokens::new(heads),
            computed: vec![0; texts * heads],
            gate_entropy: None,
        }
    }
}

struct Job<'a> {
    config: &'a ModelConfig,
    texts: &'a [HeadText],
    length: usize,
    ids: &'a [u32],
    /// The text of each window.
    text_of: &'a [usize],
}

impl Job<'_> {
    /// Adds a layer's results on some windows.
    fn add(&self, sums: &mut LayerSums, pass: &LayerPass) {
        let ModelConfig {
            num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim, ..
        } = *self.config;
        sums.features.add(&pass.outputs, &pass.active, heads);
        let queries = pass.queries.chunks_exact(self.length * heads * head_dim);
        let keys = pass.keys.chunks_exact(self.length * kv_heads * head_dim);
        let active = pass.active.chunks_exact(self.length * heads);
        for (((queries, keys), active), window) in
            queries.zip(keys).zip(active).zip(pass.windows.clone())
        {
            sums.patterns.add(Window { queries, keys, active, heads, kv_heads, head_dim });
            let computed = &mut sums.computed[self.text_of[window] * heads..][..heads];
            let ids = &self.ids[window * self.length..][..self.length];
            for (active, &id) in active.chunks_exact(heads).zip(ids) {
                let of_heads = computed.iter_mut().zip(active);
                of_heads.for_each(|(sum, &active)| *sum += u64::from(active));
                sums.served.add(id, active);
            }
        }
        if let Some(gates) = &pass.gates {
            let entropies = sums.gate_entropy.get_or_insert_with(|| vec![0.0; self.texts.len()]);
            for (gates, window) in gates.chunks_exact(self.length * heads).zip(pass.windows.clone())
            {
                entropies[self.text_of[window]] +=
                    gates.chunks_exact(heads).map(entropy).sum::<f64>();
            }
        }
    }

    fn report(&self, layer: usize, sums: &LayerSums) -> LayerReport {
        let LayerSums { patterns, features, served, computed, gate_entropy } = sums;
        let heads = self.config.num_attention_heads;
        let tokens: Vec<f64> = self.texts.iter().map(|text| text.ids.len() as f64).collect();
        let by_text = |sums: &mut dyn Iterator<Item = f64>| -> Vec<f64> {
            sums.zip(&tokens).map(|(sum, tokens)| sum / tokens).collect()
        };
        let mean = |sums: &[f64], head: usize| {
            (patterns.rows[head] > 0.0).then(|| sums[head] / patterns.rows[head])
        };
        let (shared, ranks) = (self.config.layer_heads(layer).shared, features.ranks());
        let head = |head: usize| OneHead {
            head,
            shared: shared.contains(head),
            load: by_text(&mut computed.chunks_exact(heads).map(|of_text| of_text[head] as f64)),
            feature_rank: ranks[head],
            distance: mean(&patterns.distance, head),
            entropy: mean(&patterns.entropy, head),
            tokens: if shared.contains(head) { Vec::new() } else { served.most(head) },
        };
        LayerReport {
            layer,
            gate_entropy: gate_entropy.as_ref().map(|sums| by_text(&mut sums.iter().copied())),
            pattern_similarity: patterns.similarity.mean_of_all(),
            output_similarity: features.similarity.mean_of_all(),
            pattern_similarities: patterns.similarity.matrix(),
            output_similarities: features.similarity.matrix(),
            heads: (0..heads).map(head).collect(),
        }
    }
}
