//! The planned memory of every rank against the buffers that it allocates, byte for byte, and steps that
//! allocate nothing.

use std::path::Path;

use moh_comm::{Coordinates, RankLayout, World};
use moh_kernels::{Cpu, Purpose};
use moh_model::{Model, ModelConfig, ModelParallel, Shard, Teacher};
use moh_plan::{Layout, Plan, RankMemory, step_config};
use moh_recipe::{Recipe, Stage, StageDataOptions};
use moh_step::guard::Limits;
use moh_step::{Evaluator, OptimizerState, Ranks, StepConfig, StepGroups, Stepper, Update};

/// Columns of the MLP and rows of the vocabulary do not divide; 7 micro-batches.
const RECIPE: &str = r#"
run = { dir = "runs/none", seed = 1, device = "cpu", dtype = "f32" }
[model.new]
vocab_size = 101
hidden_size = 32
intermediate_size = 37
num_hidden_layers = 5
num_attention_heads = 8
num_key_value_heads = 4
[data]
sequence_length = 23
document_mask = true
sources = [{ path = "none" }]
validation = { path = "none", batches = 1 }
[[stage]]
name = "moh"
attention = "moh"
tokens = 161
batch_tokens = 161
micro_batch = 1
learning_rate = { max = 1e-3, min = 1e-4, warmup_steps = 1 }
"#;

const MIXED_SHARED: &str = "stage.moh.moh.shared_heads=[8, 2, 4, 1, 8]";
const MIXED_TOP_K: &str = "stage.moh.moh.routed_top_k=[0, 3, 2, 4, 0]";
const TEACHER: &str = "stage.moh.distill={ teacher = \"another\" }";
const QWEN3: &str = "model.new.model_type=qwen3";

pub fn read(overrides: &[&str]) -> (Recipe, ModelConfig) {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let path = Path::new("recipe.toml");
    let recipe = Recipe::parse(RECIPE, path, &overrides).unwrap();
    let config = recipe.model_config(path).unwrap().unwrap();
    (recipe, config)
}

/// The bytes that a rank has allocated, or that are planned for it.
#[derive(Debug, PartialEq)]
struct Found {
    buffers: u64,
    scratch: u64,
}

fn planned(memory: &RankMemory) -> Found {
    let buffers = Purpose::ALL.map(|purpose| memory.bytes(purpose)).iter().sum();
    Found { buffers, scratch: memory.thread_scratch }
}

/// Constructs the buffers of a run on this rank in stage `index`, and runs two steps, the second with norms by block.
/// Returns the bytes allocated before the steps, on the one thread of its pool.
fn allocated(
    (recipe, index): (&Recipe, usize),
    config: &ModelConfig,
    layout: Layout,
    world: &World,
) -> Found {
    let (stage, length) = (&recipe.stages[index], recipe.data.sequence_length);
    let config = ModelConfig { moh: stage.moh_config(config).unwrap(), ..config.clone() };
    let before = Cpu.allocated();
    let all = world.group().clone();
    let _ranks = Ranks::new(Cpu, all.clone()).unwrap();
    let arranged = RankLayout::new(all.size(), layout.tensor, layout.pipeline).unwrap();
    let groups = arranged.groups(&all).unwrap();
    let virtual_stages = layout.virtual_stages;
    let parallel =
        ModelParallel::new(&config, groups.pipeline, virtual_stages, groups.tensor).unwrap();
    let model = |config: &ModelConfig, parallel: ModelParallel, data_ranks: usize| {
        Model::of_part::<moh_model::Error>(
            Cpu,
            recipe.run.dtype,
            config.clone(),
            recipe.longest_sequence(),
            parallel,
            data_ranks,
            |_, values| {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = (i % 7) as f32 / 7.0 - 0.4;
                }
                Ok(())
            },
        )
        .unwrap()
    };
    let dense = ModelConfig { moh: None, ..config.clone() };
    let frozen = parallel.of_frozen(&dense).unwrap();
    let of_teacher = |step: &StepConfig| {
        let temperature = step.distillation?.temperature;
        let teacher = model(&dense, frozen, 1);
        Some(Teacher::new(teacher, step.pass_shape(), config.vocab_size, temperature).unwrap())
    };
    let mut model = model(&config, parallel, layout.data);
    let shard = Shard::from_group(&groups.data);
    let mut optimizer = OptimizerState::new(&model, recipe.precision.moments, shard).unwrap();
    let groups = StepGroups { all, data: groups.data };
    let step = step_config(recipe, stage);
    let batch = step.micro_batch;
    model.set_teacher(of_teacher(&step)).unwrap();
    let mut stepper = Stepper::new(&model, step, groups).unwrap();
    let _evaluator = Evaluator::new(&model, batch, length).unwrap();
    let allocated =
        || Found { buffers: Cpu.allocated() - before, scratch: Cpu.thread_scratch()[0] as u64 };
    let found = allocated();
    for number in 1..=2 {
        let read = |sample: u64, window: &mut [u32], document_start: Option<&mut [u32]>| {
            for (i, id) in window.iter_mut().enumerate() {
                *id = ((sample as usize * 31 + i * 7) % 101) as u32;
            }
            if let Some(document_start) = document_start {
                document_start.fill(0);
            }
            Ok(())
        };
        let update = Update { number, learning_rate: 1e-3, limits: Limits::FINITE };
        stepper.measure_block_norms(number == 2);
        stepper.step(&mut model, &mut optimizer, read, 0, update).unwrap();
        stepper.wait_for_weights(&mut model).unwrap();
        assert_eq!(allocated(), found, "step {number}");
    }
    found
}

fn compare(layout: Layout, overrides: &[&str]) {
    let (recipe, config) = read(overrides);
    compare_stage(layout, (&recipe, 0), &config);
}

fn compare_stage(layout: Layout, (recipe, index): (&Recipe, usize), config: &ModelConfig) {
    let run = |world: World| {
        let (recipe, config) = (recipe.clone(), config.clone());
        std::thread::spawn(move || {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            pool.install(|| {
                let arranged = RankLayout::new(layout.ranks(), layout.tensor, layout.pipeline);
                let place: Coordinates = arranged.unwrap().coordinates(world.rank());
                let stage = &recipe.stages[index];
                let memory = RankMemory::of_rank(&recipe, stage, &config, layout, place).unwrap();
                let found = allocated((&recipe, index), &config, layout, &world);
                assert_eq!(found, planned(&memory), "{layout:?} {place:?}");
                world.close().unwrap();
                memory.total()
            })
        })
    };
    let threads: Vec<_> = World::threads(layout.ranks()).into_iter().map(run).collect();
    let totals = threads.into_iter().map(|thread| thread.join().unwrap());
    let fullest = totals.max().unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let plan = pool.install(|| {
        let plan = Plan::new(recipe, config).unwrap();
        let path = Path::new("recipe.toml");
        plan.on_ranks(recipe, path, config, layout.ranks(), None).unwrap()
    });
    assert_eq!(plan.cluster.unwrap().stages[index].memory.total(), fullest, "{layout:?}");
}

#[test]
fn one_rank_allocates_what_is_planned() {
    for recompute in ["none", "cheap", "block"] {
        let recompute = format!("memory.recompute={recompute}");
        compare(Layout::ALONE, &[&recompute]);
        let in_bf16 = [&recompute, "run.dtype=bf16", "precision.moments=bf16"];
        compare(Layout::ALONE, &in_bf16);
    }
    let dense = ["stage.moh.attention=dense", "data.document_mask=false"];
    compare(Layout::ALONE, &dense);
    let mixed = [MIXED_SHARED, MIXED_TOP_K];
    compare(Layout::ALONE, &mixed);
    for recompute in ["none", "cheap", "block"] {
        let recompute = format!("memory.recompute={recompute}");
        compare(Layout::ALONE, &[&recompute, QWEN3, "run.dtype=bf16"]);
    }
}

#[test]
fn stages_of_other_sequence_lengths_allocate_what_is_planned() {
    let (mut recipe, config) = read(&["stage.moh.data.sequence_length=7"]);
    let mut long = Stage { name: "long".to_owned(), ..recipe.stages[0].clone() };
    let (sequence_length, document_mask) = (Some(161), Some(false));
    long.data = Some(StageDataOptions { sequence_length, document_mask, ..Default::default() });
    recipe.stages.push(long);
    for index in [0, 1] {
        compare_stage(Layout::ALONE, (&recipe, index), &config);
    }
}

#[test]
fn every_rank_of_a_layout_allocates_what_is_planned() {
    let layout = |tensor, data, pipeline, virtual_stages| {
        let divided = [
            format!("stage.moh.parallel.tensor={tensor}"),
            format!("stage.moh.parallel.pipeline={pipeline}"),
            format!("stage.moh.parallel.virtual_stages={virtual_stages}"),
        ];
        (Layout { tensor, data, pipeline, virtual_stages }, divided)
    };
    // With three data ranks, one data rank has more micro-batches.
    for (layout, divided) in [
        layout(4, 1, 1, 1),
        layout(1, 3, 1, 1),
        layout(1, 1, 3, 1),
        layout(1, 2, 2, 2),
        layout(2, 2, 2, 1),
    ] {
        let overrides: Vec<&str> = divided.iter().map(String::as_str).collect();
        compare(layout, &overrides);
        let rounded = ["run.dtype=bf16", "precision.reduce=bf16", "memory.recompute=none"];
        compare(layout, &[&overrides[..], &rounded].concat());
        let mixed = [QWEN3, MIXED_SHARED, MIXED_TOP_K];
        compare(layout, &[&overrides[..], &mixed].concat());
        compare(layout, &[&overrides[..], &[TEACHER]].concat());
        compare(layout, &[&overrides[..], &rounded, &[TEACHER]].concat());
    }
    let tied = "model.new.tie_word_embeddings=true";
    let (layout, divided) = layout(1, 1, 2, 1);
    let overrides: Vec<&str> = divided.iter().map(String::as_str).chain([tied]).collect();
    compare(layout, &overrides);
}
