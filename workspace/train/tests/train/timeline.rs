//! The timeline of a step: nested spans, with every block of every micro-batch, and a run that ends as a run without a
//! timeline.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::support::driver::run_in;
use crate::support::results::Results;
use crate::support::{TestRun, run_of};
use moh_checkpoint::run_log::TraceSteps;
use moh_recipe::Recipe;
use moh_testkit::ranks::on_ranks;
use moh_train::{Outcome, RunOptions};
use serde_json::Value;

/// Micro-batches of a step, and blocks of the model.
const MICRO_BATCHES: usize = 2;
const BLOCKS: usize = 2;

/// Runs a recipe to its end on `ranks` threads that act as ranks.
fn train(ranks: usize, recipe: &Recipe, trace: &TraceSteps) {
    on_ranks(ranks, |world| {
        let stop = AtomicBool::new(false);
        let options = RunOptions { trace, ..RunOptions::new(&stop) };
        let done = run_in(world, recipe, options, &mut |_| {});
        assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    });
}

/// A span and the spans in it.
#[derive(Debug)]
struct Node {
    name: String,
    /// Start and end in nanoseconds.
    time: (i64, i64),
    children: Vec<Node>,
}

impl Node {
    fn names(&self) -> Vec<&str> {
        self.children.iter().map(|child| child.name.as_str()).collect()
    }

    fn child(&self, name: &str) -> &Node {
        let found: Vec<_> = self.children.iter().filter(|child| child.name == name).collect();
        assert_eq!(found.len(), 1, "{name} in {}: {:?}", self.name, self.names());
        found[0]
    }

    fn count(&self, name: &str) -> usize {
        let below: usize = self.children.iter().map(|child| child.count(name)).sum();
        below + usize::from(self.name == name)
    }
}

/// Returns the step of a timeline, with every span in its enclosing span. Fails if spans overlap.
fn read(path: &Path, rank: u64) -> Node {
    let events: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(events[0]["args"]["name"], format!("rank {rank}"));
    let mut open: Vec<Node> = Vec::new();
    for event in &events[1..] {
        assert_eq!(event["pid"], rank);
        // A checkpoint is written in the background, as early or late as its thread runs.
        if event["tid"] == 1 || event["ph"] == "M" {
            let name = event["name"].as_str().unwrap();
            let known = ["write checkpoint", "complete checkpoint", "thread_name"];
            assert!(known.contains(&name), "{event}");
            continue;
        }
        assert_eq!((&event["ph"], &event["tid"]), (&"X".into(), &0.into()));
        let nanoseconds = |key: &str| (event[key].as_f64().unwrap() * 1e3).round() as i64;
        let (begins, lasts) = (nanoseconds("ts"), nanoseconds("dur"));
        assert!(begins >= 0 && lasts >= 0);
        let name = event["name"].as_str().unwrap().to_owned();
        while open.len() > 1 && open.last().unwrap().time.1 <= begins {
            close(&mut open);
        }
        if let Some(parent) = open.last() {
            let within = parent.time.0 <= begins && begins + lasts <= parent.time.1;
            assert!(within, "{name} in {} of {:?}", parent.name, path);
        }
        open.push(Node { name, time: (begins, begins + lasts), children: Vec::new() });
    }
    while open.len() > 1 {
        close(&mut open);
    }
    open.pop().unwrap()
}

fn close(open: &mut Vec<Node>) {
    let node = open.pop().unwrap();
    open.last_mut().unwrap().children.push(node);
}

#[test]
fn a_timeline_has_every_block_of_every_micro_batch_and_changes_no_bit() {
    let reference = TestRun::new();
    train(1, &reference.recipe(&[]), &TraceSteps::NONE);
    for recompute in ["none", "cheap", "block"] {
        let place = TestRun::new();
        let recipe = place.recipe(&[&format!("memory.recompute={recompute}")]);
        train(1, &recipe, &"2,9".parse().unwrap());
        assert!(Results::of(&recipe) == Results::of(&reference.recipe(&[])), "{recompute}");
        let run = run_of(&recipe);
        assert!(!run.trace(1, None).exists() && !run.trace(3, None).exists());
        for (step, last) in [(2, "checkpoint"), (9, "evaluation")] {
            let found = read(&run.trace(step, None), 0);
            assert_eq!(found.name, format!("step {step}"));
            let mut expected = Vec::new();
            for number in 0..MICRO_BATCHES {
                expected.extend(["data".into(), format!("forward {number}")]);
                expected.push(format!("backward {number}"));
            }
            expected.extend(["gradient norm", "optimizer", last].map(str::to_owned));
            assert_eq!(found.names(), expected);
            for number in 0..MICRO_BATCHES {
                check_forward(found.child(&format!("forward {number}")));
                check_backward(found.child(&format!("backward {number}")), recompute != "none");
            }
            let evaluated = found.children.last().unwrap().count("block 0");
            assert_eq!(evaluated > 0, last == "evaluation");
        }
    }
}

fn check_forward(forward: &Node) {
    assert_eq!(forward.names(), ["embedding", "block 0", "block 1", "head"]);
    for block in 0..BLOCKS {
        let block = forward.child(&format!("block {block}"));
        assert_eq!(block.names(), ["attention", "mlp"]);
    }
}

fn check_backward(backward: &Node, recompute: bool) {
    assert_eq!(backward.names(), ["head", "block 1", "block 0", "embedding"]);
    for block in 0..BLOCKS {
        let block = backward.child(&format!("block {block}"));
        let skipped = usize::from(!recompute);
        assert_eq!(block.names(), ["recompute", "mlp", "attention"][skipped..]);
    }
}

#[test]
fn every_rank_writes_a_timeline_with_its_exchanges() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    train(2, &recipe, &"3-4".parse().unwrap());
    let run = run_of(&recipe);
    for step in [3, 4] {
        assert!(!run.trace(step, None).exists());
        for rank in 0..2 {
            let found = read(&run.trace(step, Some(rank)), rank as u64);
            // Each rank runs one of the two micro-batches.
            let [own, other] = [rank, 1 - rank].map(|number| format!("forward {number}"));
            assert_eq!((found.count(&own), found.count(&other)), (1, 0), "{found:?}");
            for exchange in ["reduce_scatter", "all_gather", "all_reduce"] {
                assert!(found.count(exchange) > 0, "{exchange}: {found:?}");
            }
        }
    }
    let left = fs::read_dir(run.root()).unwrap();
    let names = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with("trace-")).count(), 4);
}
