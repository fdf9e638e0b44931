//! The training data of a stage: the run's `[data]`, with the replacements of the stage's own `data` table.

use std::path::Path;

use moh_data::{Order, Source};
use serde::{Deserialize, Serialize};

use crate::validate::stage_key;
use crate::{Recipe, Stage};

/// `[stage.data]`: the data that a stage reads in place of the run's `[data]`. Omitted keys have the run's values. The
/// validation sets are the run's in all stages.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StageDataOptions {
    /// Tokens of one training sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence_length: Option<usize>,
    /// Order of the sequences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<Order>,
    /// Whether attention is limited to the token's own document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document_mask: Option<bool>,
    /// The token files and their weights, instead of all of the run's sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sources: Option<Vec<Source>>,
}

/// The training data of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageData<'a> {
    /// Tokens of one training sequence.
    pub sequence_length: usize,
    /// Order of the sequences.
    pub order: Order,
    /// Whether attention is limited to the token's own document.
    pub document_mask: bool,
    /// The token files and their weights in the mixture.
    pub sources: &'a [Source],
}

impl StageData<'_> {
    /// Returns whether both have the same samples, so that one stage continues the other's samples.
    pub fn has_samples_of(&self, other: &Self) -> bool {
        self.visits_windows_of(other) && self.sources == other.sources
    }

    /// Returns whether both divide a file into the same windows, and visit the windows in the same order.
    pub fn visits_windows_of(&self, other: &Self) -> bool {
        (self.sequence_length, self.order) == (other.sequence_length, other.order)
    }
}

impl Stage {
    /// Returns the full key of the stage's `sequence_length`, `order` or `sources`: the stage's own key, or the run's.
    pub fn data_key(&self, key: &str) -> String {
        let own = self.data.as_ref().is_some_and(|own| match key {
            "sequence_length" => own.sequence_length.is_some(),
            "order" => own.order.is_some(),
            _ => own.sources.is_some(),
        });
        let key = format!("data.{key}");
        if own { stage_key(self, &key) } else { key }
    }
}

impl Recipe {
    /// Returns the training data of `stage`.
    pub fn stage_data<'a>(&'a self, stage: &'a Stage) -> StageData<'a> {
        let (run, own) = (&self.data, stage.data.as_ref());
        StageData {
            sequence_length: own.and_then(|own| own.sequence_length).unwrap_or(run.sequence_length),
            order: own.and_then(|own| own.order).unwrap_or(run.order),
            document_mask: own.and_then(|own| own.document_mask).unwrap_or(run.document_mask),
            sources: own.and_then(|own| own.sources.as_deref()).unwrap_or(&run.sources),
        }
    }

    /// Returns the tokens of the longest sequence, of training or validation.
    pub fn longest_sequence(&self) -> usize {
        let lengths = self.stages.iter().map(|stage| self.stage_data(stage).sequence_length);
        lengths.fold(self.data.sequence_length, usize::max)
    }

    /// Returns the samples of one optimiser step of `stage`.
    pub fn batch_sequences(&self, stage: &Stage) -> u64 {
        stage.batch_tokens / (self.stage_data(stage).sequence_length as u64).max(1)
    }

    /// Returns the samples of all steps of `stage`.
    pub fn num_samples(&self, stage: &Stage) -> u64 {
        stage.num_steps().saturating_mul(self.batch_sequences(stage))
    }

    /// Returns the numbers of each stage's token files. Equal paths have equal numbers, except repeats within a
    /// mixture. The run's sources are numbered by index. Later stages do not change the numbers of earlier stages.
    pub fn file_numbers<'a>(&'a self) -> Vec<Vec<u64>> {
        // The path, and the number of earlier sources of the mixture with the same path: a repeat is another file.
        let mut known: Vec<(&Path, usize)> = Vec::new();
        let mut numbers = |sources: &'a [Source]| {
            let mut numbers = Vec::new();
            for (index, source) in sources.iter().enumerate() {
                let before = sources[..index].iter().filter(|before| before.path == source.path);
                let file = (source.path.as_path(), before.count());
                let found = known.iter().position(|known| *known == file);
                let number = found.unwrap_or(known.len());
                if found.is_none() {
                    known.push(file);
                }
                numbers.push(number as u64);
            }
            numbers
        };
        numbers(&self.data.sources);
        self.stages.iter().map(|stage| numbers(self.stage_data(stage).sources)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{SMALL_RECIPE, parse, refuses, refuses_text, with};

    const OWN: &str = "learning_rate = { max = 2e-5, min = 1e-6, warmup_steps = 2 }\n[stage.data]\n\
                       sequence_length = 64\norder = \"sequential\"\n[[stage.data.sources]]\n\
                       path = \"data/c\"\n[[stage.data.sources]]\npath = \"data/a\"\n";

    /// Returns the small recipe with data of its own in the second stage.
    fn own() -> String {
        let (before, _) = SMALL_RECIPE.rsplit_once("learning_rate").unwrap();
        format!("{before}{OWN}")
    }

    #[test]
    fn a_stage_reads_its_own_data_and_the_rest_is_the_runs() {
        let recipe = parse(&own(), &[]).unwrap();
        let [adapt, moh] = &recipe.stages[..] else { panic!("two stages") };
        let data = recipe.stage_data(adapt);
        assert_eq!((data.sequence_length, data.order), (32, Order::Shuffled));
        assert_eq!(data.sources, recipe.data.sources);
        let data = recipe.stage_data(moh);
        assert_eq!((data.sequence_length, data.order), (64, Order::Sequential));
        assert!(!data.document_mask && data.sources.len() == 2);
        assert_eq!(recipe.longest_sequence(), 64);
        assert_eq!([adapt, moh].map(|stage| recipe.batch_sequences(stage)), [4, 2]);
        assert_eq!(recipe.file_numbers(), [vec![0], vec![1, 0]]);
        let [run, own] = [adapt, moh].map(|stage| stage.data_key("sources"));
        assert_eq!((&*run, &*own), ("data.sources", "stage.moh.data.sources"));
        assert_eq!(moh.data_key("sequence_length"), "stage.moh.data.sequence_length");
        // A new model supports the longest sequence.
        let new = recipe.model.new.as_ref().unwrap();
        assert_eq!(new.max_position_embeddings, Some(64));
        let again = parse(&recipe.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(again, recipe);
    }

    #[test]
    fn a_file_that_a_mixture_repeats_is_another_one() {
        let repeated = "data.sources=[{path=\"a\"},{path=\"b\"},{path=\"a\"}]";
        let own = "stage.moh.data.sources=[{path=\"c\"},{path=\"a\"},{path=\"a\"},{path=\"a\"}]";
        assert_eq!(with(&[repeated, own]).file_numbers(), [vec![0, 1, 2], vec![3, 0, 2, 4]]);
    }

    #[test]
    fn the_same_data_are_those_of_the_run() {
        let recipe = with(&["stage.moh.data={sources=[{path=\"data/a\"}], document_mask=true}"]);
        let [adapt, moh] = [0, 1].map(|index| recipe.stage_data(&recipe.stages[index]));
        assert!(moh.has_samples_of(&adapt));
        for other in [
            "sequence_length=64",
            "order=sequential",
            "sources=[{path=\"data/a\", weight=2}]",
            "sources=[{path=\"data/b\"}]",
        ] {
            let recipe = with(&[&format!("stage.moh.data.{other}")]);
            let [adapt, moh] = [0, 1].map(|index| recipe.stage_data(&recipe.stages[index]));
            assert!(!moh.has_samples_of(&adapt), "{other}");
            assert_eq!(moh.visits_windows_of(&adapt), other.starts_with("sources"), "{other}");
        }
    }

    #[test]
    fn faults_name_the_key_of_the_stage_and_its_line() {
        let first = own().lines().count() - 6;
        for (right, wrong, offset, expected) in [
            ("length = 64", "length = 1", 1, "sequence_length = 1: must be from 2 to"),
            ("length = 64", "lenght = 64", 1, "sequence_lenght: unknown key, did you mean"),
            ("sequential", "random", 2, "order: must be \"shuffled\" or \"sequential\""),
            ("path = \"data/c\"", "path = \"\"", 4, "sources.0.path: must be a path"),
            ("path = \"data/c\"", "path = 7", 4, "sources.0.path: must be a text"),
            ("\"data/c\"", "\"data/c\"\nweight = 2", 5, "sources.0.weight = 2: must be 1 with"),
        ] {
            let text = own().replace(right, wrong);
            let place = format!("line {}: stage.moh.data.{expected}", first + offset);
            refuses_text(&text, &[], &place);
        }
        let text = own().replace("length = 64", "length = 128");
        let place = format!("line {}: stage.moh.data.sequence_length = 128: the model", first + 1);
        let short = ["model.new.max_position_embeddings=100", "stage.moh.batch_tokens=256"];
        let error = refuses_text(&text, &short, &place);
        assert!(error.lines().count() == 1, "{error}");
    }

    #[test]
    fn overrides_set_the_data_of_a_stage() {
        let recipe = with(&["stage.moh.data.sequence_length=16", "stage.moh.batch_tokens=64"]);
        assert_eq!(recipe.stage_data(&recipe.stages[1]).sequence_length, 16);
        assert_eq!(recipe.data.sequence_length, 32);
        for (key, expected) in [
            (
                "data.sequence_length=24",
                "batch_tokens = 128: must be a multiple of sequence_length x",
            ),
            ("data.sources=[]", "data.sources: must name at least one token file"),
            (
                "data.sources=[{path=\"a\", weight=0}]",
                "data.sources.0.weight = 0: must be a finite",
            ),
            ("data.validation.path=a", "data.validation: unknown key"),
        ] {
            refuses(&[&format!("stage.moh.{key}")], &format!("stage.moh.{expected}"));
        }
        let weighted = "data.sources=[{path=\"a\", weight=2}]";
        let expected = "--set: stage.moh.data.order = \"sequential\": reads each file once, but";
        refuses(&[weighted, "stage.moh.data.order=sequential"], expected);
    }
}
