//! The results of a finished run, and comparisons of two runs.

use std::fs;
use std::path::Path;

use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::Recipe;
use safetensors::SafeTensors;
use serde_json::Value;

/// The results of a finished run, without times.
#[derive(Debug, PartialEq)]
pub struct Results {
    pub weights: Vec<u8>,
    pub config: String,
    pub summary: String,
    pub metrics: Vec<Value>,
}

impl Results {
    pub fn of(recipe: &Recipe) -> Self {
        Results::of_run(&recipe.run.dir)
    }

    pub fn of_run(root: &Path) -> Self {
        let run = RunDirectory::new(root);
        Results {
            weights: fs::read(run.export().join("model.safetensors")).unwrap(),
            config: fs::read_to_string(run.export().join("config.json")).unwrap(),
            summary: fs::read_to_string(run.summary()).unwrap(),
            metrics: metrics_of(root),
        }
    }
}

/// Returns the lines of a run's metrics, without the speeds.
pub fn metrics_of(root: &Path) -> Vec<Value> {
    let text = fs::read_to_string(RunDirectory::new(root).metrics()).unwrap();
    assert!(text.ends_with('\n'));
    let line = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        for field in ["tokens_per_second", "speed"] {
            value.as_object_mut().unwrap().remove(field).unwrap();
        }
        value
    };
    text.lines().map(line).collect()
}

/// Returns the relative L2 difference of two exports.
fn difference(found: &[u8], expected: &[u8]) -> f64 {
    let (found, expected) =
        (SafeTensors::deserialize(found).unwrap(), SafeTensors::deserialize(expected).unwrap());
    let (mut squares, mut all) = (0.0, 0.0);
    for (name, tensor) in expected.tensors() {
        let values = |bytes: &[u8]| -> Vec<f64> {
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()).into())
                .collect()
        };
        let found = values(found.tensor(&name).unwrap().data());
        for (a, b) in found.into_iter().zip(values(tensor.data())) {
            squares += (a - b).powi(2);
            all += b.powi(2);
        }
    }
    (squares / all).sqrt()
}

/// Checks that losses are within 1e-4 where attention is dense and 1e-3 where rounding may choose another head.
pub fn assert_alike(found: &Results, expected: &Results, what: &str) {
    assert_eq!(found.metrics.len(), expected.metrics.len(), "{what}");
    for (line, reference) in found.metrics.iter().zip(&expected.metrics) {
        let tolerance = if reference["balance_loss"].is_null() { 1e-4 } else { 1e-3 };
        let losses = "loss validation_loss balance_loss distillation_loss";
        for key in losses.split(' ').chain(["grad_norm"]) {
            let Some(expected) = reference[key].as_f64() else {
                assert!(line[key].is_null(), "{what}: {line}");
                continue;
            };
            let found = line[key].as_f64().unwrap();
            // With a teacher, losses start at 0.
            let error = ((found - expected) / expected.abs().max(0.01)).abs();
            assert!(error < tolerance, "{what}: {key} {found}, not {expected}: {line}");
        }
        for key in ["stage", "step", "tokens", "learning_rate"] {
            assert_eq!(line[key], reference[key], "{what}");
        }
    }
    let error = difference(&found.weights, &expected.weights);
    assert!(error < 1e-3, "{what}: weights differ by {error:.1e}");
    assert_eq!(found.config, expected.config, "{what}");
}
