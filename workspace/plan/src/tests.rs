//! Tests of plans as a whole.

use std::path::Path;

use moh_comm::Coordinates;
use moh_kernels::Purpose;

use super::*;

use moh_testkit::SMALL_RECIPE;

fn read(text: &str, overrides: &[&str]) -> (Recipe, ModelConfig) {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let path = Path::new("recipe.toml");
    let recipe = Recipe::parse(text, path, &overrides).unwrap();
    let model = recipe.model_config(path).unwrap().unwrap();
    (recipe, model)
}

fn grown(text: &str, overrides: &[&str]) -> (Recipe, ModelConfig) {
    let (recipe, model) = read(text, overrides);
    let grown = grow_vocabulary(&recipe, &model);
    (recipe, grown)
}

pub(crate) fn small(overrides: &[&str]) -> (Recipe, ModelConfig) {
    grown(SMALL_RECIPE, overrides)
}

/// Returns the recipe of the paper's run and its model, the vocabulary grown.
pub(crate) fn llama3_8b(overrides: &[&str]) -> (Recipe, ModelConfig) {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/llama3-8b/config.json");
    let config = format!("model.config={config}");
    let overrides: Vec<&str> = [config.as_str()].into_iter().chain(overrides.to_vec()).collect();
    grown(include_str!("../../../recipes/moh-llama3-8b.toml"), &overrides)
}

/// Returns the bytes of weights and the optimiser's state.
fn state(memory: &RankMemory) -> u64 {
    use Purpose::{Gradients, Moments, Remainders, RoundedGradients, Weights};
    let purposes = [Weights, Remainders, Gradients, RoundedGradients, Moments];
    purposes.map(|purpose| memory.bytes(purpose)).iter().sum()
}

fn plan(overrides: &[&str]) -> Plan {
    let (recipe, model) = read(SMALL_RECIPE, overrides);
    Plan::new(&recipe, &model).unwrap()
}

/// Returns the memory of the fullest of `ranks` ranks in each stage of the 8B recipe.
fn on_ranks(overrides: &[&str], ranks: usize) -> Vec<RankMemory> {
    let (recipe, model) = llama3_8b(overrides);
    let path = Path::new("recipe.toml");
    let plan = Plan::new(&recipe, &model).unwrap();
    let plan = plan.on_ranks(&recipe, path, &model, ranks, None).unwrap();
    plan.cluster.unwrap().stages.into_iter().map(|stage| stage.memory).collect()
}

#[test]
fn a_teacher_takes_its_weights_and_a_forward_pass() {
    let name = |teacher: &str| format!("stage.moh.distill={{ teacher = \"{teacher}\" }}");
    let (alone, taught) = (plan(&[]), plan(&[&name("another")]));
    let [before, after] = [&alone, &taught].map(|plan| plan.stages[1].clone());
    assert_eq!(taught.stages[0], alone.stages[0]);
    assert_eq!((before.teacher, after.teacher.as_deref()), (None, Some("another")));
    assert_eq!(before.memory.bytes(Purpose::Teacher), 0);
    assert!(after.memory.bytes(Purpose::Teacher) > 4 * taught.parameters.1);
    assert!(after.memory.bytes(Purpose::Logits) > before.memory.bytes(Purpose::Logits));
    // Dense.
    let forward = alone.stages[0].forward_flops;
    assert_eq!(after.training_flops - before.training_flops, forward);
    assert_eq!(after.forward_flops, before.forward_flops);
    let text = taught.to_string();
    let row = |label: &str| text.lines().find(|line| line.trim().starts_with(label)).unwrap();
    assert!(row("teacher ").ends_with("another"), "{text}");
    assert!(row("teacher, with its passes").ends_with('B'), "{text}");
    assert!(!alone.to_string().contains("teacher"));
}

#[test]
fn state_bytes_follow_the_dtypes() {
    let f32 = plan(&[]);
    let memory = f32.stages[0].memory;
    let parameters = f32.parameters.1;
    assert_eq!(f32.parameters.0, parameters);
    assert_eq!(memory.bytes(Purpose::Weights), 4 * parameters);
    assert_eq!(memory.bytes(Purpose::Remainders), 0);
    assert_eq!(state(&memory), 16 * parameters);
    assert_eq!(f32.disk.checkpoint, 12 * parameters);
    let bf16 = plan(&["run.dtype=bf16", "precision.gradients=bf16", "precision.moments=bf16"]);
    let memory = bf16.stages[0].memory;
    assert_eq!(memory.bytes(Purpose::Weights), 2 * parameters);
    assert_eq!(state(&memory), (2 + 2 + 2 + 4) * parameters);
    assert_eq!(bf16.disk.checkpoint, 8 * parameters);
    assert_eq!(bf16.disk.export, 2 * parameters);
}

#[test]
fn activation_bytes_are_those_of_the_tables() {
    // c = 64, q = 64, kv = 32, i = 172, h = 8, r = 4, 5 blocks, f32; 2 sequences of 32 tokens.
    let dense_block = 4 * ((64 + 64) + 64 + 64 + 344) + 8 * 4;
    let moh_block = dense_block + 4 * (8 + 4 + 1) + 8;
    let (norms, wide, stream) = (4 * 2 * 64 + 8, 4 * 172, 4 * 64);
    // The residual stream after the last block, the final norm, token and target.
    let ends = stream + (stream + 4) + 8;
    let saved = |plan: Plan| {
        let stages = plan.stages.into_iter();
        stages.map(|stage| stage.memory.bytes(Purpose::Activations)).collect::<Vec<_>>()
    };
    // A routing counts the tokens of its 4 heads.
    let expected = |routings: u64, blocks: fn(u64, u64) -> u64| {
        let of = |block| 64 * (5 * stream + blocks(block, norms) + wide + ends);
        vec![of(dense_block), of(moh_block) + routings * 4 * 4]
    };
    let none = expected(5, |block, norms| 5 * (block + norms));
    assert_eq!(saved(plan(&["memory.recompute=none"])), none);
    let cheap = expected(5, |block, norms| 5 * block + norms);
    assert_eq!(saved(plan(&["memory.recompute=cheap"])), cheap);
    let block = expected(1, |block, norms| block + norms);
    assert_eq!(saved(plan(&["memory.recompute=block"])), block);
    let memory = plan(&[]).stages[0].memory;
    assert_eq!(memory.bytes(Purpose::ActivationGradients), 64 * (4 * 2 * 64 + 4 * 8));
    // For each token: logits, the gradient of its input, and three numbers of its softmax.
    assert_eq!(memory.bytes(Purpose::Logits), 64 * (512 + 64 + 3) * 4);
    // The validation loss keeps the same values as whole recomputation, and has sums of its own.
    assert_eq!(memory.bytes(Purpose::Evaluation), block[0] + memory.bytes(Purpose::Logits) + 4 * 8);
    assert_eq!(memory.bytes(Purpose::Gathered), 0);
}

#[test]
fn layers_with_other_heads_are_planned_one_by_one() {
    // Of the five layers, three have 4 shared heads and 2 of 4 routed, one is dense, and one has 0 shared and 3 of 8
    // routed.
    let counts =
        ["stage.moh.moh.shared_heads=[4,8,4,0,4]", "stage.moh.moh.routed_top_k=[2,0,2,3,2]"];
    let (mixed, equal) = (plan(&counts).stages.remove(1), plan(&[]).stages.remove(1));
    assert_eq!(mixed.active_heads.to_string(), "3-8");
    // (3 x 6 + 8 + 3) of the 5 x 6 heads in all.
    let linear = equal.dense_training_flops - dense_attention();
    let attention = |stage: &StagePlan| stage.training_flops - linear;
    let share = attention(&mixed) / attention(&equal);
    assert!((share - 29.0 / 30.0).abs() < 1e-9, "{share}");
    // Every layer has room for the most routed heads, 8 instead of 4: 13 bytes each for 64 tokens, and a count.
    let saved = |stage: &StagePlan| stage.memory.bytes(Purpose::Activations);
    assert_eq!(saved(&mixed) - saved(&equal), 5 * 4 * (64 * 13 + 4));
    assert!(plan(&counts).to_string().contains("3-8 of 8 heads"));
}

/// Returns the training FLOPs per token of the attention core of the small recipe's model with all heads.
fn dense_attention() -> f64 {
    let (recipe, model) = small(&[]);
    3.5 * model.flops_per_token(recipe.data.sequence_length).attention
}

#[test]
fn data_ranks_divide_the_state_of_the_optimiser_alone() {
    // 8,297,648,128 parameters on 8 data ranks of one device each.
    let parallel = ["stage.moh.parallel.pipeline=1", "stage.adapt.parallel.tensor=1"];
    let memory = on_ranks(&parallel, 8)[0];
    assert_eq!(memory.bytes(Purpose::Weights), 2 * 8_297_648_128);
    assert_eq!(memory.bytes(Purpose::Gradients), 4 * 8_297_648_128);
    assert_eq!(memory.bytes(Purpose::Remainders), 8_297_648_128 / 8 * 2);
    assert_eq!(memory.bytes(Purpose::Moments), 8_297_648_128 / 8 * 4);
    assert_eq!(memory.bytes(Purpose::RoundedGradients), 0);
    let rounded = [&parallel[..], &["precision.reduce=bf16"]].concat();
    let rounded = on_ranks(&rounded, 8)[0].bytes(Purpose::RoundedGradients);
    assert_eq!(rounded, 2 * 8_297_648_128);
}

#[test]
fn tensor_ranks_keep_a_share_of_activations_and_one_gathered_buffer() {
    let memory = on_ranks(&["stage.moh.parallel.pipeline=1"], 2)[0];
    // Two ranks with half of everything, in bf16: c = 4096, q = 4096, kv = 1024, i = 14,336, h = 32.
    let stream = 4096;
    let block = (2048 + 2 * 512) * 2 + 2048 * 2 + 64 + stream + 2 * 7168 * 2;
    let norms = 2 * stream + 4;
    let wide = 7168 * 2;
    let per_token = 33 * stream + 32 * block + norms + wide + stream + 2 + 8;
    assert_eq!(memory.bytes(Purpose::Activations), 8192 * per_token);
    // The stream's gradient on half the tokens, a branch's on all.
    assert_eq!(memory.bytes(Purpose::ActivationGradients), 8192 * (4096 + 8192 + 64));
    assert_eq!(memory.bytes(Purpose::Gathered), 8192 * 8192);
    // 1024 tokens of half of 160,896 logits in f32, and the sums of 2048 tokens of logits in bf16.
    assert_eq!(memory.bytes(Purpose::Logits), 1024 * 80_448 * 4 + 2048 * 3 * 8);
    assert_eq!(
        memory.bytes(Purpose::Weights),
        2 * (32 * (109_051_904 + 8192) + 2 * 329_515_008 + 4096)
    );
}

#[test]
fn the_first_stage_of_a_pipeline_holds_most() {
    // 32 blocks and a head of three: 5 on the first stages, and 8 micro-batches in flight there.
    let memory = on_ranks(&[], 8)[1];
    assert_eq!((memory.pipeline_rank, memory.in_flight), (0, 8));
    assert_eq!(memory.bytes(Purpose::Logits), 0);
    assert_eq!(memory.bytes(Purpose::Weights), 2 * (5 * (218_103_808 + 8192) + 659_030_016));
    // Stream after the last block: 6; 16 routed heads have 13 bytes each and 8 for all.
    let block = (4096 + 2048) * 2 + 4096 * 2 + 128 + 8192 + 2 * 14_336 * 2 + 16 * 13 + 8;
    let per_token = 6 * 8192 + 5 * block + (2 * 8192 + 8) + 4;
    let shared = 14_336 * 2;
    let counts = 8 * 5 * 16 * 4;
    assert_eq!(memory.bytes(Purpose::Activations), 8192 * (8 * per_token + shared) + counts);
}

#[test]
fn a_stage_goes_ahead_by_those_after_it() {
    let (recipe, model) = llama3_8b(&[]);
    let in_flight = |data, virtual_stages| {
        let layout = Layout { tensor: 1, data, pipeline: 8, virtual_stages };
        let in_flight = |pipeline| {
            let place = Coordinates { tensor: 0, data: 0, pipeline };
            RankMemory::of_rank(&recipe, &recipe.stages[1], &model, layout, place)
                .unwrap()
                .in_flight
        };
        (0..8).map(in_flight).collect::<Vec<_>>()
    };
    // 2048 micro-batches in a step.
    assert_eq!(in_flight(8, 1), [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(in_flight(512, 1), [4, 4, 4, 4, 4, 3, 2, 1]);
    // 2 x 7 + (4 - 1) x 8 ahead on the first rank, 24 on the last.
    assert_eq!(in_flight(8, 4), [39, 37, 35, 33, 31, 29, 27, 25]);
    // Groups of 4 micro-batches, at most all of them.
    assert_eq!(in_flight(512, 4), [16, 16, 16, 16, 16, 16, 15, 13]);
}

#[test]
fn ranks_that_make_no_whole_models_are_refused() {
    let (recipe, model) = llama3_8b(&[]);
    let refused = |ranks| {
        let plan = Plan::new(&recipe, &model).unwrap();
        let path = Path::new("x.toml");
        plan.on_ranks(&recipe, path, &model, ranks, None).unwrap_err().to_string()
    };
    let message = refused(63);
    assert!(
        message.starts_with("x.toml: stage.adapt.parallel: --ranks 63 is not a multiple"),
        "{message}"
    );
    assert!(message.contains("2 x 1: use --ranks 62, or --suggest"), "{message}");
    assert!(refused(0).contains("use --ranks 2"));
    assert!(refused(60).contains(
        "stage.moh.parallel: --ranks 60 is not a multiple of tensor x pipeline = 1 x 8: use --ranks 56"
    ));
}

#[test]
fn a_calibration_is_shown_of_the_stage_that_has_it() {
    assert!(!plan(&[]).to_string().contains("Calibration"));
    let calibrated =
        plan(&["stage.moh.moh.calibration={}"]).with_device_tflops(Rate::assumed(1.0)).to_string();
    let (_, shown) = calibrated.split_once("Calibration before a stage's first step").unwrap();
    let line = |label: &str| {
        let line = shown.lines().find(|line| line.trim_start().starts_with(label)).unwrap();
        line.split_whitespace().rev().take(2).collect::<Vec<_>>()
    };
    assert_eq!(line("tokens"), ["65,536", "none"]);
    assert!(!shown.contains("time, with fits more"));
    let measured = Rate { value: 1.0, basis: Basis::Measured };
    let calibrated = plan(&["stage.moh.moh.calibration={}"]).with_device_tflops(measured);
    assert!(calibrated.to_string().contains("time, with fits more"));
}

#[test]
fn padding_grows_the_vocabulary() {
    let plan = plan(&["model.pad_vocab_to=1000"]);
    assert_eq!(plan.vocabulary, (512, 1000));
    assert_eq!(plan.parameters.1 - plan.parameters.0, 2 * 488 * 64);
}

#[test]
fn huge_numbers_saturate_and_print() {
    let huge = [
        "model.vocab_size=9e15",
        "stage.adapt.micro_batch=2147483648",
        "stage.adapt.batch_tokens=137438953472",
        "stage.adapt.tokens=9e15",
        "stage.moh.moh.calibration={ tokens = 9e15 }",
    ];
    let text = plan(&huge).with_device_tflops(Rate::assumed(1e-9)).to_string();
    assert!(text.contains("years") || text.contains("days"));
    let (recipe, model) = small(&huge);
    let slow = "name = \"slow\"\n[device]\nmemory_bytes = 1e15\nreserved_bytes = 0\n\
        matmul_bf16_tflops = 1e-12\nmatmul_f32_tflops = 1e-12\nattention_share = 1e-3\n\
        memory_gb_per_s = 1e-12\n[node]\nranks = 1\nfilesystem_write_gb_per_s = 1e-12\n[network]\n\
        within_node_gb_per_s = 1e-12\nbetween_nodes_gb_per_s = 1e-12\nlatency_us = 1e12\n\
        data_overlap = 0\n";
    let slow = Hardware::parse(slow, Path::new("slow.toml")).unwrap();
    let path = Path::new("recipe.toml");
    for ranks in [1, usize::MAX] {
        let plan = Plan::new(&recipe, &model).unwrap();
        let plan = plan.on_ranks(&recipe, path, &model, ranks, Some(slow.clone())).unwrap();
        assert!(!plan.to_string().contains("NaN"));
        Suggestions::new(&recipe, &model, ranks, slow.clone()).to_string();
    }
}
