//! Runs in which some samples have gradients that are not finite, or far too large, but ordinary losses. Each of these
//! samples starts with a token of its own that has a zero embedding. The token attends to itself alone, so the residual
//! stream stays zero in all blocks. The backward pass of every norm then divides its gradient by the root of
//! `rms_norm_eps`.

use std::collections::BTreeMap;
use std::path::Path;

use moh_data::{Order, Source, TrainingData};
use moh_hf::ConfigFile;
use moh_kernels::{Cpu, ElementType};
use moh_model::{Model, Segment};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::{TestRun, write_tokens_with};

/// Sequences of a step of the small recipe.
pub const SEQUENCES: u64 = 8;
/// Tokens of a sequence of the small recipe.
const LENGTH: usize = 8;
/// Documents of 600 sequences.
const DOCUMENTS: u64 = 800;

/// The fault of the chosen samples.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    NotFinite,
    /// Their gradients are thousands of times larger than other gradients.
    Spike,
    /// Nothing: all else is as with [`Fault::NotFinite`].
    Absent,
}

/// Returns a directory with the token files of the small recipe, in which these samples have a fault, and a model.
pub fn test_run(samples: &[u64], fault: Fault) -> TestRun {
    let place = TestRun::new();
    let (text, vocab_size) = (place.path("text"), 64 + samples.len());
    let mut firsts = BTreeMap::new();
    write_tokens_with(&text, 1, DOCUMENTS, &firsts);
    let source = Source { path: text.clone(), weight: 1.0 };
    let data = TrainingData::open(&[source], LENGTH, Order::Shuffled, 1, vocab_size).unwrap();
    for (&sample, token) in samples.iter().zip(64..) {
        assert!(sample < data.num_windows(0), "the text is read once");
        firsts.insert(data.locate(sample).1, token);
    }
    write_tokens_with(&text, 1, DOCUMENTS, &firsts);
    write_model(&place.path("model"), vocab_size, fault);
    place
}

/// Writes the model of the small recipe, with a larger vocabulary.
fn write_model(directory: &Path, vocab_size: usize, fault: Fault) {
    let eps = if fault == Fault::Spike { 1e-8 } else { 1e-36 };
    let fields = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": vocab_size, "max_position_embeddings": LENGTH, "rms_norm_eps": eps,
    });
    std::fs::create_dir(directory).unwrap();
    std::fs::write(directory.join("config.json"), fields.to_string()).unwrap();
    let config = ConfigFile::read(directory).unwrap().config;
    let mut tensors = BTreeMap::new();
    let fill = |segment: &Segment, values: &mut [f32]| {
        moh_model::initial::initialize(1, 0.1, &segment.name, segment.shape(), values);
        if segment.name == "model.embed_tokens.weight" && fault != Fault::Absent {
            values[64 * 16..].fill(0.0);
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.insert(segment.name.clone(), (segment.shape().to_vec(), bytes));
        Ok::<_, moh_model::Error>(())
    };
    Model::new(Cpu, ElementType::F32, config, LENGTH, fill).unwrap();
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &directory.join("model.safetensors")).unwrap();
}

/// Returns one sample of each of these steps.
pub fn one_of<const N: usize>(steps: [u64; N]) -> [u64; N] {
    steps.map(|step| (step - 1) * SEQUENCES + step % SEQUENCES)
}
