//! Checkpoints of a run.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{PATIENCE, Server};
use moh_kernels::ElementType;
use moh_testkit::launcher::wait_until;
use moh_testkit::trained_run::{prepared, train};

fn answer(server: &Server) -> Value {
    let body = json!({ "prompt": "w1 w2 w5", "max_tokens": 8, "temperature": 0, "logprobs": 0 });
    server.completion(&body)["choices"].clone()
}

fn step(server: &Server) -> u64 {
    server.get("/v1/models").json()["data"][0]["moh"]["step"].as_u64().unwrap()
}

/// Waits until the server has the checkpoint of a step.
fn wait_for_step(server: &Server, wanted: u64) {
    wait_until(PATIENCE, &format!("step {wanted}"), || step(server) == wanted);
}

#[test]
fn a_checkpoint_is_served_as_its_export_is() {
    let dir = prepared();
    let place = dir.path();
    // Weights are f32 in a checkpoint and bf16 in the export.
    train(place, 2, |recipe| recipe.run.dtype = ElementType::BF16);
    let newest = Server::of("run", place, &[]);
    assert_eq!(step(&newest), 6);
    assert_eq!(answer(&newest), answer(&Server::of("run/export", place, &[])));
    let earlier = Server::of("run@4", place, &[]);
    assert_eq!(step(&earlier), 4);
    assert_ne!(answer(&earlier), answer(&newest));
    // The dense stage.
    assert_eq!(earlier.metric("moh_heads_computed_ratio{layer=\"0\"}"), 1.0);
    assert_eq!(newest.metric("moh_heads_computed_ratio{layer=\"0\"}"), 0.75);
}

/// Returns an answer of several choices. Some choices wait for others and for blocks.
fn choices(server: &Server) -> Value {
    let body = json!({
        "prompt": ["w1 w2 w5 w6 w7", "w8"], "max_tokens": 40, "temperature": 0.5, "seed": 1, "n": 4,
        "ignore_eos": true,
    });
    server.completion(&body)["choices"].clone()
}

#[test]
fn a_run_is_followed_to_its_next_checkpoint() {
    let dir = prepared();
    let place = dir.path();
    train(place, 1, |_| {});
    let expected = choices(&Server::of("run", place, &[]));
    // Moves the last checkpoint away, as if it were not written yet.
    let last = place.join("run/checkpoints/step-4");
    fs::rename(&last, place.join("later")).unwrap();
    let few = ["--watch-run", "--kv-cache-tokens", "64", "--block-size", "4"];
    let server = Server::of("run@3", place, &few);
    let before = choices(&server);
    assert_ne!(before, expected);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let start = Instant::now();
                while step(&server) != 4 {
                    assert!(start.elapsed() < PATIENCE, "step {}", step(&server));
                    // Each answer is of a single checkpoint.
                    let now = choices(&server);
                    assert!(now == before || now == expected, "{now}");
                }
            });
        }
        std::thread::sleep(Duration::from_millis(300));
        fs::rename(place.join("later"), &last).unwrap();
    });
    assert_eq!(choices(&server), expected);
    assert!(server.metric("moh_preemptions_total") > 0.0);
}

#[test]
fn heads_are_those_of_the_checkpoint_that_is_served() {
    let dir = prepared();
    let place = dir.path();
    train(place, 2, |_| {});
    let server = Server::of("run@4", place, &["--watch-run"]);
    let active =
        || server.get("/v1/models").json()["data"][0]["moh"]["layers"][0]["active"].clone();
    wait_for_step(&server, 6);
    assert_eq!(active(), 6);
    assert_eq!(server.metric("moh_heads_computed_ratio{layer=\"0\"}"), 0.75);
    // Without the newest checkpoints, as after the run resumes from an earlier step, the step before is served again.
    for last in ["step-5", "step-6"] {
        fs::rename(place.join("run/checkpoints").join(last), place.join(last)).unwrap();
    }
    wait_for_step(&server, 4);
    assert_eq!(active(), 8);
}
