//! Plans of published runs on H100: Llama 3 8B in bf16 at 8192 tokens. The table is in
//! `docs/plan.md`.

use std::path::{Path, PathBuf};

use moh_plan::{Hardware, Plan};
use moh_recipe::Recipe;

/// Largest accepted difference of a prediction from the published rate.
const TOLERANCE: f64 = 0.15;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Predicted tokens/s of each GPU, for steps of `sequences` sequences on `gpus` data ranks.
fn predicted(profile: &str, gpus: usize, sequences: usize, micro_batch: usize) -> f64 {
    let config = root().join("recipes/llama3-8b/config.json");
    let text = format!(
        "[run]\ndir = \"run\"\nseed = 1\ndevice = \"cuda\"\ndtype = \"bf16\"\n\
         [model]\nfrom = \"meta-llama/Meta-Llama-3-8B\"\nconfig = {config:?}\n\
         [data]\nsequence_length = 8192\nsources = [{{ path = \"train\" }}]\n\
         [[stage]]\nname = \"dense\"\nattention = \"dense\"\ntokens = 1e9\n\
         batch_tokens = {}\nmicro_batch = {micro_batch}\n\
         learning_rate = {{ max = 1e-4, min = 1e-5, warmup_steps = 0 }}\n",
        8192 * sequences
    );
    let path = Path::new("published.toml");
    let mut recipe = Recipe::parse(&text, path, &[]).unwrap();
    let model = recipe.model_config(path).unwrap().unwrap();
    recipe.resolve(path, &model).unwrap();
    let hardware = Hardware::load(&root().join("recipes/hardware").join(profile)).unwrap();
    let plan = Plan::new(&recipe, &model).unwrap();
    let plan = plan.on_ranks(&recipe, path, &model, gpus, Some(hardware)).unwrap();
    plan.cluster.unwrap().stages[0].speed.unwrap().tokens_per_second / gpus as f64
}

#[track_caller]
fn close(predicted: f64, published: f64) {
    let ratio = predicted / published;
    println!("{predicted:.0} of {published:.0}: {ratio:.3}");
    assert!((ratio - 1.0).abs() <= TOLERANCE, "{predicted:.0} of {published:.0}: {ratio:.3}");
}

/// NeMo 24.09 in bf16, global batch 128 on 8 GPUs and 2048 on 128, micro-batch 1: 81,222 and
/// 1,280,704 tokens/s (github.com/NVIDIA/dgxc-benchmarking, llama3.1/README_8b.md, commit 143b90d).
#[test]
fn the_plan_is_near_nemos_published_rates() {
    close(predicted("h100-sxm.toml", 8, 128, 1), 81_222.0 / 8.0);
    close(predicted("h100-sxm.toml", 128, 2048, 1), 1_280_704.0 / 128.0);
}

/// torchtitan with torch.compile, two sequences a GPU: 6,667 tokens/s a GPU on 8 GPUs, from which the
/// profile's rate of products comes, and 6,514 on 128 (github.com/pytorch/torchtitan,
/// benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf).
#[test]
fn the_plan_is_near_torchtitans_published_rates() {
    close(predicted("h100-96g-500w.toml", 8, 16, 2), 6667.0);
    close(predicted("h100-96g-500w.toml", 128, 256, 2), 6514.0);
}
