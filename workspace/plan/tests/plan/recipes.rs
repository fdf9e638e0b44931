//! The recipes of the repository load, and their plans give the documented numbers. Plans of published runs on H100, of
//! Llama 3 8B in bf16 at 8192 tokens, are near the published numbers (`docs/plan.md`).

use std::path::{Path, PathBuf};

use moh_kernels::Purpose;
use moh_plan::{Hardware, Plan, Rate};
use moh_recipe::Recipe;

/// Largest accepted difference of a prediction from a published rate.
const TOLERANCE: f64 = 0.15;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_papers_mixture_can_be_copied_into_a_recipe_or_a_stage() {
    let text = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let (recipe, mixture) = (text("recipes/moh-llama3-8b.toml"), text("recipes/data/table-b.toml"));
    let own = "[[data.sources]]\npath = \"data/train\"\nweight = 1.0\n";
    let path = Path::new("recipe.toml");
    let all = Recipe::parse(&recipe.replace(own, &mixture), path, &[]).unwrap();
    assert_eq!(all.data.sources.len(), 7);
    let percent: f64 = all.data.sources.iter().map(|source| source.weight).sum();
    assert!((99.99..100.01).contains(&percent), "{percent}");
    let of_stage = mixture.replace("[[data.sources]]", "[[stage.data.sources]]");
    let next = "[precision]";
    let one = recipe.replace(next, &format!("{of_stage}\n{next}"));
    let one = Recipe::parse(&one, path, &[]).unwrap();
    assert_eq!(one.stage_data(&one.stages[0]).sources, one.data.sources);
    assert_eq!(one.stage_data(&one.stages[1]).sources, all.data.sources);
}

#[test]
fn the_papers_models_from_scratch_have_its_numbers_of_parameters() {
    // 186 M and 881 M, and the active heads of their variants, as the commands at the top of the files have them.
    for (name, parameters, heads) in
        [("llm-s", 185_617_152, [(6, 3), (3, 3)]), ("llm-b", 880_879_104, [(8, 4), (4, 4)])]
    {
        let path = root().join(format!("recipes/paper/{name}.toml"));
        let plan = |overrides: &[String]| {
            let mut recipe = Recipe::load(&path, overrides).unwrap();
            let model = recipe.model_config(&path).unwrap().unwrap();
            recipe.resolve(&path, &model).unwrap();
            Plan::new(&recipe, &model).unwrap()
        };
        let dense = plan(&[]);
        assert_eq!(dense.parameters.1, parameters);
        assert_eq!(dense.stages[0].steps, 23_842);
        let text = std::fs::read_to_string(&path).unwrap();
        for (shared, top_k) in heads {
            let moh = format!(
                "model.new.moh={{ router = \"two-stage\", shared_heads = {shared}, routed_top_k = {top_k} }}"
            );
            assert!(text.contains(&format!("stage.pretrain.attention=moh,{moh}")), "{name}: {moh}");
            let sparse = plan(&["stage.pretrain.attention=moh".to_owned(), moh]);
            assert_eq!(sparse.stages[0].active_heads, (shared + top_k).into());
            // The router's matrices: a row for each head, and two.
            let config = Recipe::load(&path, &[]).unwrap().model_config(&path).unwrap().unwrap();
            let rows = config.num_hidden_layers * (config.num_attention_heads + 2);
            let router = (rows * config.hidden_size) as u64;
            assert_eq!(sparse.parameters.1, parameters + router);
        }
    }
}

#[test]
fn the_papers_recipe_has_the_papers_plan() {
    let path = root().join("recipes/moh-llama3-8b.toml");
    // Paths in a recipe are relative to the current directory, which is the crate's in a test.
    let config = root().join("recipes/llama3-8b/config.json");
    let overrides = [format!("model.config={}", config.display())];
    let mut recipe = Recipe::load(&path, &overrides).unwrap();
    let model = recipe.model_config(&path).unwrap().unwrap();
    recipe.resolve(&path, &model).unwrap();
    let plan = Plan::new(&recipe, &model).unwrap().with_device_tflops(Rate::assumed(600.0));
    assert_eq!(plan.vocabulary, (128_256, 160_896));
    assert_eq!(plan.parameters, (8_030_261_248, 8_297_648_128));

    let [adapt, moh] = plan.stages.as_slice() else {
        panic!("{} stages", plan.stages.len());
    };
    assert_eq!((adapt.steps, moh.steps), (17_882, 5_961));
    assert_eq!(adapt.tokens, 17_882 * 16_777_216);
    assert_eq!(adapt.samples, 17_882 * 2048);
    assert_eq!(adapt.micro_batches, 2048);
    assert_eq!(adapt.moh, None);
    assert_eq!((moh.moh.is_some(), moh.active_heads.clone()), (true, 24.into()));
    assert_eq!(recipe.num_steps(), 23_843);

    // Attention is 14.1% of a dense step at 8192 tokens, and MoH saves a quarter of it.
    assert_eq!(adapt.training_flops, adapt.dense_training_flops);
    let saved = 1.0 - moh.training_flops / moh.dense_training_flops;
    assert!((0.034..0.036).contains(&saved), "{saved}");

    // bf16 weights, their remainders, f32 gradients, bf16 moments: 12 bytes a parameter.
    use Purpose::{Gradients, Moments, Remainders, Weights};
    let state = [Weights, Remainders, Gradients, Moments].map(|of| adapt.memory.bytes(of));
    assert_eq!(state.iter().sum::<u64>(), 12 * 8_297_648_128);
    // 94,336 bytes saved per token and block, 61,460 once: 23.4 GiB.
    let saved = 8192 * (32 * 94_336 + 61_460);
    assert_eq!(adapt.memory.bytes(Purpose::Activations), saved);
    // For each routed head, the values of each token, and the number of tokens that selected it.
    let routings = 32 * (8192 * (16 * (8 + 4 + 1) + 8) + 16 * 4);
    assert_eq!(moh.memory.bytes(Purpose::Activations), saved + routings);
    assert_eq!(adapt.memory.bytes(Purpose::Logits), 1024 * 160_896 * 4);

    let schedule = recipe.stages[0].schedule();
    assert_eq!(schedule.learning_rate(50), 6e-5);
    assert_eq!(schedule.learning_rate(17_882), 6e-6);
    let text = plan.to_string();
    for expected in [
        "8,030,261,248",
        "128,256 -> 160,896",
        "8,297,648,128",
        "24 of 32 heads",
        "17,882",
        "5,961",
        "53.3",
        "121.53 GiB",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
}

#[test]
fn every_recipe_of_the_repository_loads() {
    for entry in std::fs::read_dir(root().join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            Recipe::load(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

/// Returns the predicted tokens/s of each GPU, for steps of `sequences` sequences on `gpus` data ranks.
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
