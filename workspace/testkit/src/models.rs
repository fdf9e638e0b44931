//! A tiny Llama with an attention that any test may change, and micro-batches for it.

use std::collections::HashMap;
use std::path::Path;

use moh_hf::ConfigFile;
use moh_kernels::adamw::{AdamW, AdamWUpdate};
use moh_kernels::{Backend, Cpu, ElementType, for_element};
use moh_model::{
    Activations, Architecture, AuxiliaryLosses, Error, FlatBuffers, HeadCounts, LossConfig, Model,
    ModelConfig, ModelLayout, MohConfig, PassShape, Recompute, RopeConfig, RouterKind, Segment,
    SharedHeadSets, StepSums, Sums, initial,
};

pub const VOCABULARY: u32 = 61;

/// Returns a configuration of two layers with eight heads and two key/value heads.
pub fn config(head_dim: usize, tied: bool, moh: Option<MohConfig>) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: VOCABULARY as usize,
        hidden_size: 48,
        intermediate_size: 80,
        num_hidden_layers: 2,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: None },
        tie_word_embeddings: tied,
        initializer_range: 0.02,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        moh,
    }
}

/// Three shared heads of eight, and two of the other heads for each token.
pub const MOH: MohConfig = MohConfig {
    router: RouterKind::QueryNorm,
    shared_heads: SharedHeadSets::First(HeadCounts::All(3)),
    routed_top_k: HeadCounts::All(2),
};

/// Returns the shared and selected heads of each layer, or of all layers.
pub fn moh(router: RouterKind, shared: &[usize], top_k: &[usize]) -> MohConfig {
    let counts = |counts: &[usize]| match counts {
        [count] => HeadCounts::All(*count),
        counts => counts.iter().copied().collect(),
    };
    MohConfig { router, shared_heads: counts(shared).into(), routed_top_k: counts(top_k) }
}

pub const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Norms, Recompute::Block];

/// Draws random matrices, and norms around 1.
pub fn draw(seed: u64, deviation: f64, segment: &Segment, values: &mut [f32]) {
    initial::initialize(seed, deviation, &segment.name, &[values.len(), 1], values);
    if segment.shape().len() == 1 {
        values.iter_mut().for_each(|value| *value += 1.0);
    }
}

/// Fills a tensor with the weights that most tests use.
pub fn fill(segment: &Segment, values: &mut [f32]) -> Result<(), Error> {
    draw(3, 0.2, segment, values);
    Ok(())
}

/// Tensors by name.
pub type Weights = HashMap<String, Vec<f32>>;

/// Returns weights large enough for attention and MLP to matter. Norms differ from 1.
pub fn weights(config: &ModelConfig) -> Weights {
    let layout = ModelLayout::new(config);
    let tensors = layout.segments().map(|(_, segment)| {
        let mut values = vec![0f32; segment.whole_len()];
        draw(3, 0.3, segment, &mut values);
        (segment.name.clone(), values)
    });
    tensors.collect()
}

/// Returns a model with these weights, for 32 positions.
pub fn model_of(config: ModelConfig, weights: &Weights) -> Model<Cpu> {
    Model::new::<Error>(Cpu, ElementType::F32, config, 32, |segment, values| {
        values.copy_from_slice(&weights[&segment.name]);
        Ok(())
    })
    .unwrap()
}

/// Returns a model with the weights of [`fill`].
pub fn model<B: Backend>(backend: B, element: ElementType, config: ModelConfig) -> Model<B> {
    Model::new::<Error>(backend, element, config, 64, fill).unwrap()
}

/// Uploads the micro-batch `number`, in documents of 23 tokens and the rest of each sequence.
pub fn upload<B: Backend>(backend: &B, activations: &mut Activations<B>, number: u32) {
    let (tokens, length) = (activations.shape().tokens() as u32, activations.shape().length as u32);
    let ids: Vec<u32> = (0..tokens).map(|i| (i * 37 + i * i + number) % VOCABULARY).collect();
    let targets: Vec<u32> = ids.iter().map(|id| (id * 7 + 3) % VOCABULARY).collect();
    let starts: Vec<u32> = (0..tokens).map(|i| if i % length < 23 { 0 } else { 23 }).collect();
    activations.upload(backend, &ids, &targets, &starts).unwrap();
}

/// A training pass over the micro-batches of [`upload`].
pub const SHAPE: PassShape = PassShape {
    batch: 2,
    length: 40,
    recompute: Recompute::None,
    training: true,
    document_mask: true,
};
/// Runs a training pass over the first micro-batch. Returns the gradients and sums.
pub fn pass<B: Backend + Clone>(
    model: &mut Model<B>,
    shape: PassShape,
) -> (Activations<B>, FlatBuffers<B>, Sums) {
    let backend = model.backend().clone();
    let mut activations = Activations::new(model, shape).unwrap();
    upload(&backend, &mut activations, 0);
    let mut gradients = FlatBuffers::zeros(&backend, ElementType::F32, model.layout()).unwrap();
    let mut sums = StepSums::new(&backend).unwrap();
    model.forward_backward(&mut activations, &mut gradients, SCALE, &mut sums).unwrap();
    let sums = sums.take(&backend).unwrap();
    (activations, gradients, sums)
}

/// The factors of a step with a single such micro-batch.
pub const SCALE: LossConfig = LossConfig {
    cross_entropy: 1.0 / 80.0,
    auxiliary: AuxiliaryLosses::all(0.1),
    straight_through: true,
};
pub const ADAMW: AdamW = AdamW {
    learning_rate: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    clip_norm: 1.0,
    grad_norm: 1.0,
    step: 1,
};

/// Updates all weights by AdamW, with the norm of `gradients`. `moments` are the first and the
/// second moments.
pub fn update<B: Backend + Clone>(
    model: &mut Model<B>,
    step: &AdamW,
    gradients: &FlatBuffers<B>,
    moments: &mut [FlatBuffers<B>; 2],
    sums: &mut StepSums<B>,
) {
    let backend = model.backend().clone();
    let segments = model.layout().segments();
    for (flat, segment) in segments {
        let part = gradients.view(flat, segment.range.clone());
        for_element!(G: part.element() => {
            backend.squared_norms::<G>(&[part.typed()], sums.squared_norm_mut())
        })
        .unwrap();
    }
    let squared_norm = sums.read(&backend).unwrap().squared_norm;
    let step = &AdamW { grad_norm: squared_norm.sqrt(), ..*step };
    let [first, second] = moments;
    for flat in 0..model.layout().flats.len() {
        let all = 0..model.layout().flats[flat].len;
        let gradients = gradients.view(flat, all.clone());
        let weights = model.weights_mut().view_mut(flat, all.clone());
        let first_moment = first.view_mut(flat, all.clone());
        let (weight, gradient) = (weights.element(), gradients.element());
        for_element!(T: weight, G: gradient, M: first_moment.element() => {
            backend.adamw::<T, G, M>(AdamWUpdate {
                step,
                gradients: gradients.typed(),
                weights: weights.typed(),
                remainder: None,
                first_moment: first_moment.typed(),
                second_moment: second.view_mut(flat, all).typed(),
            })
        })
        .unwrap();
    }
}

/// Returns a dense Llama of two blocks, two heads of width 4 and sequences of 8 tokens.
pub fn tiny_model(kv_heads: usize, vocab_size: usize, tied: bool) -> ModelConfig {
    let fields = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": kv_heads, "vocab_size": vocab_size,
        "max_position_embeddings": 8, "tie_word_embeddings": tied,
    });
    ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
}
