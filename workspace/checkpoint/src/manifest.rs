//! The manifest of a checkpoint: the state of the run, and the rank that has written each tensor. A
//! reader looks up the parts that it needs here, and reads no other parts.

use std::collections::BTreeSet;

use crate::run_log::{Evaluation, StageCalibration, StepMetrics};
use moh_step::TensorKind;
use moh_step::guard::GuardState;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::StageExtension;

/// The format version that this program writes and reads.
pub(super) const FORMAT: u32 = 4;

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub format: u32,
    /// The state of the run.
    pub state: RunState,
    /// The model's `config.json`.
    pub config: Map<String, Value>,
    /// The names of all tensors, sorted.
    pub tensors: Vec<String>,
    /// The parts of all ranks, in rank order.
    pub parts: Vec<PartFile>,
}

/// The file that lists a rank's shards of tensors ([`RankPart`](super::RankPart)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartFile {
    /// The name of the file in the checkpoint's directory.
    pub file: String,
    /// blake3 of the file.
    pub blake3: String,
    /// The tensors in the part: start and end of ranges of the manifest's names, ascending.
    pub tensors: Vec<[usize; 2]>,
}

impl PartFile {
    /// Returns whether the part has a shard of the manifest's tensor `index`.
    pub(super) fn has_tensor(&self, index: usize) -> bool {
        self.tensors.iter().any(|&[start, end]| (start..end).contains(&index))
    }
}

impl Manifest {
    /// Describes the parts, each with its file, its hash and the names of its tensors.
    pub(super) fn new(
        state: RunState,
        config: Map<String, Value>,
        parts: Vec<(String, String, Vec<String>)>,
    ) -> Self {
        let names: BTreeSet<&String> = parts.iter().flat_map(|(_, _, names)| names).collect();
        let tensors: Vec<String> = names.into_iter().cloned().collect();
        let parts = parts.into_iter().map(|(file, blake3, names)| {
            let mut indices: Vec<usize> =
                names.iter().filter_map(|name| tensors.binary_search(name).ok()).collect();
            indices.sort_unstable();
            PartFile { file, blake3, tensors: ranges(&indices) }
        });
        let parts = parts.collect();
        Manifest { format: FORMAT, state, config, tensors, parts }
    }
}

fn ranges(numbers: &[usize]) -> Vec<[usize; 2]> {
    let mut ranges: Vec<[usize; 2]> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some([_, end]) if *end >= number => *end = number + 1,
            _ => ranges.push([number, number + 1]),
        }
    }
    ranges
}

/// The state of a run: everything that resuming needs except the tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Steps done, over all stages.
    pub step: u64,
    /// The stage of the next step, from 0. The number of stages when all are done.
    pub stage: usize,
    /// Steps done within that stage.
    pub stage_step: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Number of the next sample. It continues across stages.
    pub sample: u64,
    /// The evaluations so far, except evaluations of single steps.
    pub evaluations: Vec<Evaluation>,
    /// The calibrations of conversions so far.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calibrations: Vec<StageCalibration>,
    /// The state that decides whether the next step is applied.
    #[serde(default)]
    pub guard: GuardState,
    /// Optimiser steps that the moments contain, counted since the moments were zero.
    pub moment_steps: u64,
    /// The stages that have become longer, in the order of the steps.
    pub growth: Vec<StageExtension>,
    /// The measurements of the last step, if the run was stopped in the evaluation after it. The
    /// evaluation and the step's line of metrics are then missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unevaluated: Option<Box<StepMetrics>>,
}

impl RunState {
    /// Returns the number of steps that have a line of metrics.
    pub fn recorded_steps(&self) -> u64 {
        self.step - u64::from(self.unevaluated.is_some() && self.step > 0)
    }
}

/// Returns the file of rank `rank` of `size` for its shard of the tensors of a kind.
pub(super) fn tensor_file(kind: TensorKind, rank: usize, size: usize) -> String {
    let name = match kind {
        TensorKind::Weight => "weights",
        TensorKind::FirstMoment => "first_moment",
        TensorKind::SecondMoment => "second_moment",
    };
    rank_file_name(name, "safetensors", rank, size)
}

/// Returns the name of a file that each of `size` ranks has.
pub(super) fn rank_file_name(name: &str, extension: &str, rank: usize, size: usize) -> String {
    match size {
        1 => format!("{name}.{extension}"),
        _ => format!("{name}-{:05}-of-{size:05}.{extension}", rank + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_names_its_tensors_by_ranges() {
        let part = |names: &[&str]| {
            let names = names.iter().map(ToString::to_string).collect();
            ("f".to_owned(), "h".to_owned(), names)
        };
        let parts = vec![part(&["d", "a", "b"]), part(&["c"]), part(&[])];
        let manifest = Manifest::new(RunState::default(), Map::new(), parts);
        assert_eq!(manifest.tensors, ["a", "b", "c", "d"]);
        let ranges: Vec<_> = manifest.parts.iter().map(|part| part.tensors.clone()).collect();
        assert_eq!(ranges, [vec![[0, 2], [3, 4]], vec![[2, 3]], vec![]]);
        let has = |index| manifest.parts[0].has_tensor(index);
        assert_eq!([has(0), has(1), has(2), has(3), has(4)], [true, true, false, true, false]);
    }
}
