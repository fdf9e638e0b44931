//! The part of a model that one stage of a pipeline holds, and its neighbours.
//!
//! The first stage has the embedding, the last one the final norm and the head; each has consecutive
//! blocks. A tied head lies on both ends, whose gradients of it are added up.

use std::ops::Range;

use moh_comm::{Group, World};

use crate::{Error, ModelConfig};

/// What a stage holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its blocks.
    pub layers: Range<usize>,
    /// Whether it is the first stage, which has the embedding.
    pub first: bool,
    /// Whether it is the last stage, which has the final norm and the head.
    pub last: bool,
}

impl Part {
    /// A whole model.
    pub fn whole(config: &ModelConfig) -> Self {
        Part { layers: 0..config.num_hidden_layers, first: true, last: true }
    }

    /// The parts of `stages` stages. Blocks are dealt out so that the busiest stage has the least to
    /// do, the head counting as the blocks that have as many weights.
    ///
    /// # Errors
    /// [`Error::Pipeline`] when there are fewer blocks than stages, or no stage.
    pub fn divide(config: &ModelConfig, stages: usize) -> Result<Vec<Self>, Error> {
        let layers = config.num_hidden_layers;
        if !(1..=layers).contains(&stages) {
            return Err(Error::Pipeline { stages, layers });
        }
        let head = config.vocab_size as f64 * config.hidden_size as f64;
        let mut counts = vec![1usize; stages];
        for _ in stages..layers {
            let load = |stage: usize| {
                let head = if stage + 1 == stages { head } else { 0.0 };
                counts[stage] as f64 + head / config.block_parameters() as f64
            };
            // The first of equal ones: later stages wait longer for their first work.
            let least = (0..stages).min_by(|&a, &b| load(a).total_cmp(&load(b))).unwrap_or(0);
            counts[least] += 1;
        }
        let mut start = 0;
        let part = |(stage, count): (usize, usize)| {
            let layers = start..start + count;
            start = layers.end;
            Part { layers, first: stage == 0, last: stage + 1 == stages }
        };
        Ok(counts.into_iter().enumerate().map(part).collect())
    }
}

/// A stage of a pipeline: its part of the model and the group of all stages.
#[derive(Debug, Clone)]
pub struct Pipeline {
    part: Part,
    group: Group,
    /// The first and the last stage, on those two, where they share a tied head.
    ends: Option<Group>,
}

impl Pipeline {
    /// A pipeline of one stage.
    pub fn whole(config: &ModelConfig) -> Self {
        let group = World::single().group().clone();
        Pipeline { part: Part::whole(config), group, ends: None }
    }

    /// The stage of this rank of `group`; all its ranks call this.
    ///
    /// # Errors
    /// [`Error::Pipeline`] when there are fewer blocks than stages; when another rank has failed.
    pub fn new(config: &ModelConfig, group: Group) -> Result<Self, Error> {
        let (rank, stages) = (group.rank(), group.size());
        let part = Part::divide(config, stages)?.swap_remove(rank);
        let shares = stages > 1 && config.tie_word_embeddings;
        let is_end = part.first || part.last;
        let ends = match shares {
            true => group.split("tied head", is_end.then_some(0), rank)?,
            false => None,
        };
        Ok(Pipeline { part, group, ends })
    }

    /// What this stage holds.
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// Stages.
    pub fn stages(&self) -> usize {
        self.group.size()
    }

    /// Stages after this one.
    pub fn stages_after(&self) -> usize {
        self.group.size() - 1 - self.group.rank()
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    pub(crate) fn ends(&self) -> Option<&Group> {
        self.ends.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::ConfigFile;

    fn config(layers: usize, vocabulary: usize) -> ModelConfig {
        let fields = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": vocabulary,
            "max_position_embeddings": 64,
        });
        ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
    }

    #[test]
    fn the_busiest_stage_has_the_least_to_do() {
        let counts = |layers, vocabulary, stages| -> Vec<usize> {
            let parts = Part::divide(&config(layers, vocabulary), stages).unwrap();
            assert!(parts[0].first && parts[stages - 1].last);
            assert_eq!(parts[stages - 1].layers.end, layers);
            assert!(parts.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start));
            parts.iter().map(|part| part.layers.len()).collect()
        };
        // A head that counts as nothing, as two blocks and as many.
        assert_eq!(counts(8, 1, 4), [2, 2, 2, 2]);
        assert_eq!(counts(10, 640, 4), [3, 3, 3, 1]);
        assert_eq!(counts(9, 64_000, 3), [4, 4, 1]);
        assert_eq!(counts(5, 1, 5), [1; 5]);
    }

    #[test]
    fn more_stages_than_blocks_are_refused() {
        for stages in [0, 6] {
            let error = Part::divide(&config(5, 10), stages).unwrap_err().to_string();
            assert!(error.contains(&format!("5 layers has no pipeline of {stages}")), "{error}");
        }
    }
}
