//! Mixture-of-Head models as a library: open a directory, run the model, list the heads that each token
//! used, generate.
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # std::env::set_current_dir(&folder)?;
//! # let fields = serde_json::json!({
//! #     "model_type": "moh_llama", "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64,
//! #     "num_hidden_layers": 2, "num_attention_heads": 4, "moh_shared_heads": 1,
//! #     "moh_routed_top_k": 1, "moh_router": "query-norm",
//! # });
//! # let file = moh::ConfigFile::from_value(fields, "config.json".as_ref())?;
//! # let out = std::path::Path::new("runs/quickstart/export");
//! # std::fs::create_dir_all("runs/quickstart")?;
//! # moh::write_random_model(out, &file, moh::DType::F32, u64::MAX, 1)?;
//! use moh::{Cpu, ElementType, Generator, Sampler, Sampling, StoredModel};
//!
//! let stored = StoredModel::open("runs/quickstart/export".as_ref())?;
//! // At most 256 positions, which are the tokens of a sequence.
//! let mut model = stored.load(Cpu, ElementType::F32, 256)?;
//!
//! let output = model.run(&[vec![17, 42, 99]])?;
//! println!("heads of the last token in layer 1: {:?}", output.active_heads(1, 0, 2));
//!
//! let mut sampler = Sampler::new(1, Sampling::default(), output.vocab_size);
//! // At most 256 positions, of these tokens and the tokens generated after them.
//! let logits = Generator::new(&model, 256)?.extend(&[17, 42, 99])?;
//! println!("next token: {}", sampler.sample(&logits)?);
//! # assert_eq!(output.active_heads(1, 0, 2).len(), 2);
//! # std::env::set_current_dir("/")?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate has no code of its own. It re-exports names of `moh_model` (configuration, passes
//! with gradients, generation), `moh_hf` (files) and `moh_kernels` (operators on CPUs and,
//! with feature `cuda`, on NVIDIA GPUs: `Cuda`). Feature `tokenizer` adds `TextTokenizer`, which
//! needs minutes to build.

pub use moh_hf::{ConfigFile, StoredModel, write_random_model};
#[cfg(feature = "cuda")]
pub use moh_kernels::Cuda;
pub use moh_kernels::{Backend, Cpu, DType, ElementType};
pub use moh_model::{
    BatchGenerator, BatchOptions, Chunk, Generator, HeadCounts, LayerHeads, Model, ModelConfig,
    ModelOutput, MohConfig, PassHeads, Sampler, Sampling, SequenceId,
};
#[cfg(feature = "tokenizer")]
pub use moh_text::TextTokenizer;
