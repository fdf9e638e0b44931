//! Safetensors files and their index.

use moh_hf::WeightFiles;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::{outcome, run_on_file, target};

/// Returns a file with two tensors.
fn weights() -> Vec<u8> {
    let bytes: Vec<u8> = (0..24).collect();
    let view =
        |dtype, shape: &[usize], bytes| TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    let tensors = [
        ("model.norm.weight", view(Dtype::BF16, &[4], &bytes[..8])),
        ("model.embed_tokens.weight", view(Dtype::F32, &[2, 3], &bytes)),
    ];
    safetensors::serialize(tensors, None).unwrap()
}

fn read_all(dir: &std::path::Path) -> Result<(), String> {
    let files = WeightFiles::open(dir).map_err(|error| error.to_string())?;
    let mut values = [0f32; 6];
    outcome(files.read_f32("model.embed_tokens.weight", &mut values))
}

#[test]
fn mutated_safetensors_are_read_or_refused() {
    // The header is parsed into a tree.
    let seeds = &[weights()];
    let target = target("safetensors", seeds, 32);
    run_on_file(target, "model.safetensors", |path| read_all(path.parent().unwrap()));
}

#[test]
fn a_mutated_index_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model-00001-of-00001.safetensors"), weights()).unwrap();
    let index = br#"{"metadata": {"total_size": 32}, "weight_map": {
        "model.embed_tokens.weight": "model-00001-of-00001.safetensors",
        "model.norm.weight": "model-00001-of-00001.safetensors"}}"#;
    let seeds = &[index.to_vec()];
    target("safetensors-index", seeds, 32).run(|input| {
        std::fs::write(dir.path().join("model.safetensors.index.json"), input).unwrap();
        read_all(dir.path())
    });
}
