//! `routing.jsonl`: how tokens use the routed heads, one JSON object for each evaluation, validation
//! set and layer that routes.
//!
//! A line names the step that it belongs to, so `cut_back` needs no count of lines.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use moh_model::router::LayerRouting;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::run_log::json_lines::Lines;

/// The routing of one layer over one validation set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoutingLine {
    /// Steps done, over all stages.
    pub step: u64,
    /// The event before the evaluation.
    pub moment: RoutingMoment,
    /// Name of the stage. `None` for the loaded model.
    pub stage: Option<String>,
    /// Name of the validation set.
    pub validation: String,
    /// The layer, from 0.
    pub layer: usize,
    /// Number of tokens.
    pub tokens: u64,
    /// Mean entropy of a token's gates, in nats.
    pub entropy: f64,
    /// Shared heads of the layer.
    pub shared_heads: usize,
    /// Which heads are shared, in ascending order. Empty if the first heads are shared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_head_ids: Vec<usize>,
    /// Number of tokens that selected each routed head. Routed heads are the heads that are not shared, ascending.
    pub selected: Vec<u64>,
}

/// The event before an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingMoment {
    /// Loading the model.
    Loaded,
    /// A conversion at the beginning of a stage.
    Converted,
    /// A step.
    Step,
}

/// The evaluation of a group of lines.
#[derive(Debug, Clone, Copy)]
pub struct RoutingOf<'a> {
    /// Steps done, over all stages.
    pub step: u64,
    /// The event before the evaluation.
    pub moment: RoutingMoment,
    /// Name of the stage. `None` for the loaded model.
    pub stage: Option<&'a str>,
    /// Name of the validation set.
    pub validation: &'a str,
}

impl RoutingLine {
    /// Returns the line of a layer in the evaluation `of`.
    pub fn new(of: RoutingOf<'_>, layer: &LayerRouting) -> Self {
        let shared = layer.shared_heads;
        RoutingLine {
            step: of.step,
            moment: of.moment,
            stage: of.stage.map(str::to_owned),
            validation: of.validation.to_owned(),
            layer: layer.layer,
            tokens: layer.tokens,
            entropy: layer.mean_entropy(),
            shared_heads: shared.len(),
            shared_head_ids: match shared.leading() == shared.len() {
                true => Vec::new(),
                false => shared.heads().collect(),
            },
            selected: layer.selected.clone(),
        }
    }

    /// Returns the number of tokens that selected each head of the layer, or `None` for a shared head.
    ///
    /// A line that another program wrote may name shared heads that the layer lacks. Such heads are
    /// ignored.
    pub fn heads(&self) -> impl Iterator<Item = Option<u64>> {
        let first = if self.shared_head_ids.is_empty() { self.shared_heads } else { 0 };
        let is_shared =
            move |head| head < first || self.shared_head_ids.binary_search(&head).is_ok();
        let mut selected = self.selected.iter().copied();
        (0..self.shared_heads.saturating_add(self.selected.len()))
            .map(move |head| if is_shared(head) { None } else { selected.next() })
    }
}

/// Appends to `routing.jsonl`, which appears with its first line.
#[derive(Debug)]
pub struct RoutingWriter {
    path: PathBuf,
    file: Option<File>,
}

impl RoutingWriter {
    /// Creates a writer for the file at `path`. Opens no file yet.
    pub fn append_to(path: &Path) -> Self {
        RoutingWriter { path: path.to_path_buf(), file: None }
    }

    /// Appends lines and syncs them, since checkpoints do not wait for this file.
    pub fn write(&mut self, lines: &[RoutingLine]) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let io = |error| moh_files::io(&self.path)(error);
        let mut text = Vec::new();
        for line in lines {
            serde_json::to_writer(&mut text, line).map_err(|error| io(error.into()))?;
            text.push(b'\n');
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let mut options = OpenOptions::new();
                let opened = options.create(true).append(true).open(&self.path).map_err(io)?;
                none.insert(opened)
            }
        };
        Ok(file.write_all(&text).and_then(|()| file.sync_data()).map_err(io)?)
    }
}

/// Reads all complete lines of the file at `path`. Empty if it is missing.
pub fn read(path: &Path) -> Result<Vec<RoutingLine>> {
    Lines::open(path)?.map_or(Ok(Vec::new()), Lines::parse)
}

/// Removes the lines that a run writes again when it resumes after step `step`. The other lines stay byte for byte.
/// The run writes again the lines of later steps and of a conversion after the step. Unless `is_evaluated`, it also
/// writes the lines of the step itself again (for step 0, of the loaded model). The replacement is atomic.
pub fn cut_back(path: &Path, step: u64, is_evaluated: bool) -> Result<()> {
    let io = |error| moh_files::io(path)(error);
    let Some(mut lines) = Lines::open(path)? else { return Ok(()) };
    let mut out = moh_files::PendingFile::create(path).map_err(io)?;
    while let Some(text) = lines.next()? {
        let line = serde_json::from_slice::<RoutingLine>(text).map_err(|error| error.to_string());
        let keep = line.map(|line| {
            let is_there = is_evaluated && line.moment != RoutingMoment::Converted;
            line.step < step || line.step == step && is_there
        });
        match keep {
            Ok(true) => out.write_all(text).map_err(io)?,
            Ok(false) => {}
            Err(reason) => return Err(lines.refuse(reason)),
        }
    }
    Ok(out.replace().map_err(io)?)
}

#[cfg(test)]
mod tests {
    use moh_kernels::router::SharedHeads;
    use moh_testkit::assert_refused;

    use super::*;

    fn line(step: u64, moment: RoutingMoment, layer: usize) -> RoutingLine {
        let (stage, validation) = (Some("moh"), "text");
        let mut routing = LayerRouting::new(layer, SharedHeads::first(2), 5);
        (routing.tokens, routing.selected) = (100, vec![100, 40, 60]);
        RoutingLine::new(RoutingOf { step, moment, stage, validation }, &routing)
    }

    /// Writes the lines of two layers for each of these steps.
    fn write(path: &Path, steps: impl IntoIterator<Item = (u64, RoutingMoment)>) {
        let mut writer = RoutingWriter::append_to(path);
        for (step, moment) in steps {
            writer.write(&[line(step, moment, 0), line(step, moment, 1)]).unwrap();
        }
    }

    #[test]
    fn a_line_has_the_documented_fields_in_their_order() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("routing.jsonl");
        assert_eq!(read(&path).unwrap(), []);
        write(&path, [(7, RoutingMoment::Step)]);
        let text = std::fs::read_to_string(&path).unwrap();
        let first = "{\"step\":7,\"moment\":\"step\",\"stage\":\"moh\",\"validation\":\"text\",\
                     \"layer\":0,\"tokens\":100,\"entropy\":0.0,\"shared_heads\":2,\
                     \"selected\":[100,40,60]}";
        assert_eq!(text.lines().next(), Some(first));
        let expected = [0, 1].map(|layer| line(7, RoutingMoment::Step, layer));
        assert_eq!(read(&path).unwrap(), expected);
    }

    #[test]
    fn a_line_names_shared_heads_that_are_not_the_first() {
        let shared = SharedHeads::from_heads([1, 3]).unwrap();
        let mut routing = LayerRouting::new(0, shared, 5);
        routing.selected = vec![7, 8, 9];
        let of =
            RoutingOf { step: 1, moment: RoutingMoment::Step, stage: None, validation: "text" };
        let line = RoutingLine::new(of, &routing);
        let text = serde_json::to_string(&line).unwrap();
        assert!(
            text.contains(r#""shared_heads":2,"shared_head_ids":[1,3],"selected":[7,8,9]"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<RoutingLine>(&text).unwrap(), line);
        let heads: Vec<_> = line.heads().collect();
        assert_eq!(heads, [Some(7), None, Some(8), None, Some(9)]);
    }

    #[test]
    fn cutting_back_and_appending_gives_the_uninterrupted_file() {
        use RoutingMoment::{Converted, Loaded, Step};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("routing.jsonl");
        let all = [(0, Loaded), (2, Step), (4, Step), (4, Converted), (5, Step), (6, Step)];
        write(&path, all);
        let whole = std::fs::read(&path).unwrap();
        // `next` is the index of the first line that a run writes after resuming from a checkpoint of `step`.
        for (step, next) in [(0, 0), (0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 5), (6, 6)] {
            std::fs::write(&path, [whole.as_slice(), b"{\"step\":9"].concat()).unwrap();
            // The loaded model is evaluated once more, or not.
            cut_back(&path, step, next > 0).unwrap();
            write(&path, all.into_iter().skip(next));
            assert_eq!(std::fs::read(&path).unwrap(), whole, "step {step}");
        }
    }

    #[test]
    fn hostile_lines_are_named_by_number_and_change_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("routing.jsonl");
        let long = "x".repeat(1 << 20);
        let nested = "[".repeat(10_000);
        for hostile in [long.as_str(), &nested, "null", "", "\u{0}", "{\"step\":1}"] {
            let _ = std::fs::remove_file(&path);
            write(&path, [(1, RoutingMoment::Step)]);
            let mut text = std::fs::read(&path).unwrap();
            text.extend_from_slice(hostile.as_bytes());
            text.push(b'\n');
            std::fs::write(&path, &text).unwrap();
            assert_refused(read(&path), "routing.jsonl:3: ");
            assert_refused(cut_back(&path, 1, true), "routing.jsonl:3: ");
            assert_eq!(std::fs::read(&path).unwrap(), text);
        }
    }
}
