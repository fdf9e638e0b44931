//! The planned memory against the memory that a stage's buffers take from the system.

#![cfg(target_os = "linux")]

use std::process::Command;

use crate::plan_buffers::read;
use moh_comm::World;
use moh_kernels::Cpu;
use moh_model::{Model, ModelConfig, Shard};
use moh_plan::{Plan, step_config};
use moh_recipe::Recipe;
use moh_step::{Evaluator, OptimizerState, StepGroups, Stepper};

/// A larger model, with an MLP and a vocabulary of whole tiles.
const SIZES: [&str; 9] = [
    "model.new.vocab_size=2048",
    "model.new.hidden_size=256",
    "model.new.intermediate_size=688",
    "model.new.num_hidden_layers=4",
    "data.sequence_length=512",
    "data.document_mask=false",
    "stage.moh.tokens=4096",
    "stage.moh.batch_tokens=4096",
    "stage.moh.micro_batch=4",
];

/// Returns the private writable bytes of this process, whether or not they have been written to.
fn own_bytes() -> u64 {
    /// The kernel's unit.
    const PAGE: u64 = 4096;
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(5).unwrap().parse::<u64>().unwrap() * PAGE
}

/// Returns the bytes of all parts of a stage: weights, optimiser, gradients, activations, evaluation.
fn allocated(recipe: &Recipe, config: ModelConfig) -> u64 {
    // Threads have stacks of their own, so they are started first.
    rayon::broadcast(|_| ());
    let before = own_bytes();
    let step = step_config(recipe, &recipe.stages[0]);
    let (length, batch) = (step.sequence_length, step.micro_batch);
    let model =
        Model::new::<moh_model::Error>(Cpu, recipe.run.dtype, config, length, |_, _| Ok(()))
            .unwrap();
    let optimizer = OptimizerState::new(&model, recipe.precision.moments, Shard::WHOLE).unwrap();
    let group = World::single().group().clone();
    let groups = StepGroups { all: group.clone(), data: group };
    let stepper = Stepper::new(&model, step, groups).unwrap();
    let evaluator = Evaluator::new(&model, batch, length).unwrap();
    let taken = own_bytes() - before;
    // The next case must not reuse this case's memory.
    std::mem::forget((model, optimizer, stepper, evaluator));
    taken
}

/// Set in the process that measures itself.
const ALONE: &str = "MOH_TEST_ALONE";

#[test]
fn the_plan_counts_what_a_stage_allocates() {
    // The bytes are the whole process's, so it runs no other tests.
    if std::env::var_os(ALONE).is_none() {
        let name = "plan_memory::the_plan_counts_what_a_stage_allocates";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        assert!(alone.args(["--exact", name]).env(ALONE, "1").status().unwrap().success());
        return;
    }
    let cases = [
        ("none", "f32", "query-norm"),
        ("cheap", "bf16", "query-norm"),
        ("block", "f32", "query-norm"),
        ("none", "bf16", "two-stage"),
    ];
    // Threads keep their scratch: it is allocated here, and not counted afterwards.
    cases.into_iter().for_each(|case| _ = planned_and_allocated(case));
    for case in cases {
        let (planned, allocated) = planned_and_allocated(case);
        let ratio = planned as f64 / allocated as f64;
        assert!((0.985..=1.005).contains(&ratio), "{case:?}: {planned} of {allocated}");
    }
}

/// Returns the bytes of a stage with this recomputation, element type and router, which the stage adds to the model.
fn planned_and_allocated((recompute, dtype, router): (&str, &str, &str)) -> (u64, u64) {
    let case = [
        &format!("memory.recompute={recompute}"),
        &format!("run.dtype={dtype}"),
        &*format!("stage.moh.moh={{ router = \"{router}\" }}"),
    ];
    let (recipe, config) = read(&[&SIZES[..], &case].concat());
    let memory = Plan::new(&recipe, &config).unwrap().stages[0].memory;
    // No checkpoint is written here.
    let planned = memory.total() - memory.staging - memory.thread_scratch;
    let config = ModelConfig { moh: recipe.stages[0].moh_config(&config).unwrap(), ..config };
    (planned, allocated(&recipe, config))
}
