//! `metrics.jsonl`: one JSON object per step.
//!
//! A line is complete once its newline is written. Text after the last newline is the remainder of an
//! interrupted write. [`cut_back`] truncates the file to a checkpoint's step, so a resumed run writes the
//! same file as an uninterrupted run. Values that are not finite are written as null.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use moh_model::{AuxiliaryLoss, AuxiliaryLosses};
use moh_step::guard::SkipReason;
use moh_step::{BlockNorms, finite_or_nan};
use serde::{Deserialize, Serialize};

use crate::run_log::json_lines::Lines;
use crate::run_log::speed::Speed;
use crate::{Error, Result};

/// The measurements of one step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(into = "Line", try_from = "Line")]
pub struct StepMetrics {
    /// Name of the stage.
    pub stage: String,
    /// Step within the stage, from 1.
    pub step: u64,
    /// Tokens trained on since the start of the run.
    pub tokens: u64,
    /// Mean cross-entropy of the step, in nats.
    pub loss: f64,
    /// Targets of the step that are trained on, if masks exclude some. `None` if all are trained on.
    pub targets: Option<u64>,
    /// The auxiliary losses, unweighted. `None` where the model has no such loss.
    pub auxiliary: AuxiliaryLosses<Option<f64>>,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Speed of the step.
    pub tokens_per_second: f64,
    /// The evaluation of the recipe's first validation set after the step, if there was one.
    pub validation: Option<Validation>,
    /// Set if the step was not applied.
    pub skipped: Option<SkippedStep>,
    /// The evaluations of all sets that were due after the step, by name.
    pub validation_sets: BTreeMap<String, Validation>,
    /// Norms by block, on the steps for which the recipe requests them.
    pub block_norms: Option<BlockNorms>,
    /// Times and memory. `None` in files of earlier versions.
    pub speed: Option<Speed>,
}

/// A step that was not applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SkippedStep {
    /// The reason why it was not applied.
    pub reason: SkipReason,
    /// The step's first and last sample.
    pub samples: [u64; 2],
}

/// An evaluation on held-out text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Validation {
    /// Mean cross-entropy, in nats per token.
    #[serde(deserialize_with = "finite_or_nan")]
    pub loss: f64,
    /// The loss in bits per byte of the decoded targets. `None` without a tokenizer.
    pub bits_per_byte: Option<f64>,
}

/// The fields of a line, in order.
#[derive(Clone, Serialize, Deserialize)]
struct Line {
    stage: String,
    step: u64,
    tokens: u64,
    loss: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    targets: Option<u64>,
    /// The auxiliary losses by name. Unknown fields are also read into this map, and [`losses`] rejects them.
    #[serde(flatten)]
    auxiliary: BTreeMap<String, Option<f64>>,
    learning_rate: Option<f64>,
    grad_norm: Option<f64>,
    tokens_per_second: Option<f64>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    validation_loss: Option<Option<f64>>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    validation_bits_per_byte: Option<Option<f64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    skipped: Option<SkipReason>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    samples: Option<[u64; 2]>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    validation: BTreeMap<String, Validation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    norms: Option<BlockNorms>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    speed: Option<Speed>,
}

/// Returns a field that is present, null or not.
fn present<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// Returns the losses by name. A balance loss that a step does not have is null, other such losses are omitted.
fn named(losses: AuxiliaryLosses<Option<f64>>) -> BTreeMap<String, Option<f64>> {
    let is_written = |(loss, value): &(AuxiliaryLoss, Option<f64>)| {
        value.is_some() || *loss == AuxiliaryLoss::Balance
    };
    let written = losses.iter().filter(is_written);
    written.map(|(loss, value)| (loss.name().to_owned(), value)).collect()
}

/// Returns the losses of a line. Any other name is an unknown field, and fails.
fn losses(named: &BTreeMap<String, Option<f64>>) -> Result<AuxiliaryLosses<Option<f64>>, String> {
    let is_known = |name: &&String| AuxiliaryLoss::ALL.iter().any(|loss| loss.name() == *name);
    match named.keys().find(|name| !is_known(name)) {
        Some(name) => Err(format!("unknown field `{name}`")),
        None => Ok(AuxiliaryLosses::new(|loss| named.get(loss.name()).copied().flatten())),
    }
}

impl From<StepMetrics> for Line {
    fn from(metrics: StepMetrics) -> Self {
        let validation = metrics.validation;
        Line {
            stage: metrics.stage,
            step: metrics.step,
            tokens: metrics.tokens,
            loss: Some(metrics.loss),
            targets: metrics.targets,
            auxiliary: named(metrics.auxiliary),
            learning_rate: Some(metrics.learning_rate),
            grad_norm: Some(metrics.grad_norm),
            tokens_per_second: Some(metrics.tokens_per_second),
            validation_loss: validation.map(|validation| Some(validation.loss)),
            validation_bits_per_byte: validation.map(|validation| validation.bits_per_byte),
            skipped: metrics.skipped.map(|skipped| skipped.reason),
            samples: metrics.skipped.map(|skipped| skipped.samples),
            validation: metrics.validation_sets,
            norms: metrics.block_norms,
            speed: metrics.speed,
        }
    }
}

impl TryFrom<Line> for StepMetrics {
    type Error = String;

    fn try_from(line: Line) -> Result<Self, Self::Error> {
        let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
        let validation = match (line.validation_loss, line.validation_bits_per_byte) {
            (None, None) => None,
            (Some(loss), Some(bits_per_byte)) => {
                Some(Validation { loss: number(loss), bits_per_byte })
            }
            _ => {
                let expected = "both validation_loss and validation_bits_per_byte, or neither";
                return Err(format!("expected {expected}"));
            }
        };
        let skipped = match (line.skipped, line.samples) {
            (None, None) => None,
            (Some(reason), Some(samples)) => Some(SkippedStep { reason, samples }),
            _ => return Err("expected both skipped and samples, or neither".to_owned()),
        };
        Ok(StepMetrics {
            stage: line.stage,
            step: line.step,
            tokens: line.tokens,
            loss: number(line.loss),
            targets: line.targets,
            auxiliary: losses(&line.auxiliary)?,
            learning_rate: number(line.learning_rate),
            grad_norm: number(line.grad_norm),
            tokens_per_second: number(line.tokens_per_second),
            validation,
            skipped,
            validation_sets: line.validation,
            block_norms: line.norms,
            speed: line.speed,
        })
    }
}

/// Appends to a metrics file. Lines that cannot be written are kept and written with a later line.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
    /// Bytes of the file up to its last complete line.
    len: u64,
    /// Whether the file may have a part of a line after its last complete line.
    is_torn: bool,
    unwritten: Vec<u8>,
    is_known_removed: bool,
}

impl MetricsWriter {
    /// Opens the file at `path` for appending, and creates it if it is missing. To resume, truncate
    /// the file first with [`cut_back`].
    pub fn append_to(path: &Path) -> Result<Self> {
        let file =
            OpenOptions::new().create(true).append(true).open(path).map_err(moh_files::io(path))?;
        let len = file.metadata().map_err(moh_files::io(path))?.len();
        let path = path.to_path_buf();
        let (is_torn, is_known_removed) = (false, false);
        Ok(MetricsWriter { path, file, len, is_torn, unwritten: Vec::new(), is_known_removed })
    }

    /// Appends the line of one step, in a single write. If the write fails, the line is kept and written with the
    /// next line.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        let io = moh_files::io(&self.path);
        self.unwritten.extend(serde_json::to_vec(metrics).map_err(|error| io(error.into()))?);
        self.unwritten.push(b'\n');
        self.flush()
    }

    /// Returns whether there are lines that could not be written yet.
    pub fn is_behind(&self) -> bool {
        !self.unwritten.is_empty()
    }

    /// Returns whether this call is the first to find that the file was removed: further lines would be lost.
    pub fn finds_removed(&mut self) -> bool {
        let is_removed = self.path.try_exists().is_ok_and(|exists| !exists);
        is_removed && !std::mem::replace(&mut self.is_known_removed, true)
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the lines that could not be written before.
    pub fn flush(&mut self) -> Result<()> {
        let mut append = || {
            if std::mem::replace(&mut self.is_torn, true) {
                self.file.set_len(self.len)?;
            }
            self.file.write_all(&self.unwritten)
        };
        append().map_err(moh_files::io(&self.path))?;
        self.is_torn = false;
        self.len += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }

    /// Writes all lines. Returns a function that syncs them to disk, for another thread. Resuming from a checkpoint
    /// of step N requires N lines, so sync before completing a checkpoint.
    pub fn sync_later(&mut self) -> Result<impl FnOnce() -> Result<()> + Send + use<>> {
        self.flush()?;
        let file = self.file.try_clone().map_err(moh_files::io(&self.path))?;
        let path = self.path.clone();
        Ok(move || Ok(file.sync_data().map_err(moh_files::io(&path))?))
    }
}

/// Reads all complete lines of the file at `path`. An incomplete last line is skipped.
pub fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    match Lines::open(path)? {
        Some(lines) => lines.parse(),
        None => Err(moh_files::io(path)(std::io::ErrorKind::NotFound.into()).into()),
    }
}

/// Passes each complete line of the file at `path` to `visit`, without keeping all lines in memory. A missing
/// file has no lines.
pub fn for_each(path: &Path, visit: impl FnMut(StepMetrics)) -> Result<()> {
    Lines::open(path)?.map_or(Ok(()), |lines| lines.for_each(visit))
}

/// Returns the first line of the file at `path`. Returns `None` if the file is missing or empty, or if the line is
/// not in the format of [`MetricsWriter`].
pub fn first(path: &Path) -> Result<Option<StepMetrics>> {
    let Some(mut lines) = Lines::open(path)? else { return Ok(None) };
    match lines.next() {
        Ok(line) => Ok(line.and_then(|line| serde_json::from_slice(line).ok())),
        Err(Error::Lines(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Truncates the file at `path` to its first `steps_kept` complete lines, byte for byte, also dropping an
/// incomplete line. The replacement is atomic: an interruption leaves the old or the new file. A missing file
/// counts as empty.
///
/// # Errors
/// Fails if the file has fewer complete lines, or cannot be read or replaced.
pub fn cut_back(path: &Path, steps_kept: u64) -> Result<()> {
    let io = |error| moh_files::io(path)(error);
    let short = |found| {
        Err(Error::Lines(format!(
            "{}: has {found} complete lines, but the checkpoint is of step {steps_kept}: restore the file, or resume \
             from an earlier checkpoint",
            path.display()
        )))
    };
    let Some(mut lines) = Lines::open(path)? else {
        return if steps_kept == 0 { Ok(()) } else { short(0) };
    };
    let mut out = moh_files::PendingFile::create(path).map_err(io)?;
    for found in 0..steps_kept {
        match lines.next()? {
            Some(line) => out.write_all(line).map_err(io)?,
            None => return short(found),
        }
    }
    Ok(out.replace().map_err(io)?)
}

#[cfg(test)]
mod tests {
    use moh_step::Norms;
    use moh_testkit::assert_refused;

    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            stage: "moh".to_string(),
            step,
            tokens: step * 1024,
            loss: 2.5,
            auxiliary: AuxiliaryLosses::all(Some(0.5)),
            learning_rate: 3e-5,
            grad_norm: 1.25,
            tokens_per_second: 1e4,
            ..StepMetrics::default()
        }
    }

    fn write(path: &Path, steps: std::ops::RangeInclusive<u64>) {
        let mut writer = MetricsWriter::append_to(path).unwrap();
        for number in steps {
            writer.write(&step(number)).unwrap();
        }
        writer.sync_later().unwrap()().unwrap();
    }

    #[test]
    fn a_line_has_the_documented_fields_in_their_order() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::append_to(&path).unwrap();
        writer.write(&step(1)).unwrap();
        let dense = StepMetrics {
            auxiliary: AuxiliaryLosses::default(),
            loss: f64::NAN,
            validation: Some(Validation { loss: 2.0, bits_per_byte: None }),
            targets: Some(77),
            ..step(2)
        };
        writer.write(&dense).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\"stage\":\"moh\",\"step\":1,\"tokens\":1024,\"loss\":2.5,\
             \"balance_loss\":0.5,\"distillation_loss\":0.5,\"learning_rate\":0.00003,\"grad_norm\":1.25,\
             \"tokens_per_second\":10000.0}\n\
             {\"stage\":\"moh\",\"step\":2,\"tokens\":2048,\"loss\":null,\"targets\":77,\"balance_loss\":null,\
             \"learning_rate\":0.00003,\"grad_norm\":1.25,\"tokens_per_second\":10000.0,\
             \"validation_loss\":2.0,\"validation_bits_per_byte\":null}\n"
        );
        let read = read(&path).unwrap();
        assert_eq!(read[0], step(1));
        assert!(read[1].loss.is_nan());
        assert_eq!((read[1].validation, read[1].targets), (dense.validation, Some(77)));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn lines_that_could_not_be_written_are_written_later() {
        let directory = tempfile::tempdir().unwrap();
        let (path, whole) =
            (directory.path().join("metrics.jsonl"), directory.path().join("whole"));
        let mut writer = MetricsWriter::append_to(&path).unwrap();
        writer.write(&step(1)).unwrap();
        let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let mut disk = std::mem::replace(&mut writer.file, full);
        for number in 2..=3 {
            let error = writer.write(&step(number)).unwrap_err().to_string();
            assert!(error.starts_with(path.to_str().unwrap()), "{error}");
            assert!(writer.is_behind() && writer.sync_later().is_err());
        }
        // A part of a line was written before the disk was full.
        disk.write_all(b"{\"stage\"").unwrap();
        writer.file = disk;
        writer.write(&step(4)).unwrap();
        assert!(!writer.is_behind());
        write(&whole, 1..=4);
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&whole).unwrap());
    }

    #[test]
    fn a_step_that_was_not_applied_says_why_and_names_its_samples() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let reason = SkipReason::GradNormNotFinite;
        let skipped = Some(SkippedStep { reason, samples: [64, 95] });
        let written = StepMetrics { grad_norm: f64::NAN, skipped, ..step(3) };
        MetricsWriter::append_to(&path).unwrap().write(&written).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let end = "\"grad_norm\":null,\"tokens_per_second\":10000.0,\
                   \"skipped\":\"gradient norm is not finite\",\"samples\":[64,95]}\n";
        assert!(text.ends_with(end), "{text}");
        assert_eq!(read(&path).unwrap()[0].skipped, skipped);
    }

    #[test]
    fn sets_norms_and_speed_follow_as_objects() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::append_to(&path).unwrap();
        let first = Validation { loss: 2.0, bits_per_byte: Some(1.5) };
        let code = Validation { loss: f64::NAN, bits_per_byte: None };
        let of = |embedding: f64, block: f64| Norms {
            embedding,
            blocks: vec![block, block],
            final_norm: 0.5,
            head: None,
        };
        let speed = Speed { seconds: 0.5, forward: 0.25, tflops: 0.125, ..Speed::default() };
        let written = StepMetrics {
            validation: Some(first),
            validation_sets: [("code", code), ("text", first)].map(|(n, v)| (n.into(), v)).into(),
            block_norms: Some(BlockNorms { gradient: of(1.0, 2.0), weight: of(3.0, 4.0) }),
            speed: Some(speed),
            ..step(1)
        };
        writer.write(&written).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let expected = "\"validation_loss\":2.0,\"validation_bits_per_byte\":1.5,\
             \"validation\":{\"code\":{\"loss\":null,\"bits_per_byte\":null},\
             \"text\":{\"loss\":2.0,\"bits_per_byte\":1.5}},\
             \"norms\":{\"gradient\":{\"embedding\":1.0,\"blocks\":[2.0,2.0],\"final_norm\":0.5},\
             \"weight\":{\"embedding\":3.0,\"blocks\":[4.0,4.0],\"final_norm\":0.5}},\
             \"speed\":{\"seconds\":0.5,\"data\":0.0,\"forward\":0.25,\"backward\":0.0,\
             \"exchange\":0.0,\"gradient_norm\":0.0,\"optimizer\":0.0,\"evaluation\":0.0,\
             \"checkpoint\":0.0,\"tflops\":0.125}}\n";
        assert!(text.ends_with(expected), "{text}");
        let read = read(&path).unwrap().remove(0);
        assert!(read.validation_sets["code"].loss.is_nan());
        assert_eq!((read.block_norms, read.speed), (written.block_norms, written.speed));
    }

    #[test]
    fn cutting_back_and_appending_gives_the_uninterrupted_file() {
        let directory = tempfile::tempdir().unwrap();
        let whole = directory.path().join("whole.jsonl");
        write(&whole, 1..=9);
        let path = directory.path().join("metrics.jsonl");
        for (kept, torn) in [(0, ""), (4, "{\"stage\":\"mo"), (6, "\n"), (7, "{}")] {
            let _ = std::fs::remove_file(&path);
            write(&path, 1..=7);
            let mut text = std::fs::read(&path).unwrap();
            text.extend_from_slice(torn.as_bytes());
            std::fs::write(&path, text).unwrap();
            cut_back(&path, kept).unwrap();
            write(&path, kept + 1..=9);
            assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&whole).unwrap());
        }
        let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 2, "no temporary file stays");
    }

    #[test]
    fn fewer_complete_lines_than_steps_are_an_error_and_change_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        cut_back(&path, 0).unwrap();
        assert!(!path.exists());
        assert_refused(cut_back(&path, 1), "has 0 complete lines, but");

        write(&path, 1..=3);
        let mut text = std::fs::read(&path).unwrap();
        text.pop();
        std::fs::write(&path, &text).unwrap();
        let short = "has 2 complete lines, but the checkpoint is of step 3";
        assert_refused(cut_back(&path, 3), short);
        assert_eq!(std::fs::read(&path).unwrap(), text);
        assert_eq!(read(&path).unwrap().len(), 2);
    }

    #[test]
    fn hostile_lines_are_named_by_number() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let long = format!("{}\n", "x".repeat(1 << 20));
        let nested = format!("{}\n", "[".repeat(10_000));
        let half = "{\"stage\":\"a\",\"step\":1,\"tokens\":1,\"loss\":1,\"balance_loss\":null,\
                    \"learning_rate\":1,\"grad_norm\":1,\"tokens_per_second\":1,\
                    \"validation_loss\":1}\n";
        let why = half.replace("validation_loss\":1", "samples\":[1,2]");
        let negative = half.replace("\"step\":1", "\"step\":-1");
        let texts = [&long, &nested, half, &why, &negative, "null\n", "\n", "\u{0}\n"];
        for hostile in texts.map(str::as_bytes).into_iter().chain([&b"\xff\xfe\n"[..]]) {
            let _ = std::fs::remove_file(&path);
            write(&path, 1..=2);
            let mut text = std::fs::read(&path).unwrap();
            text.extend_from_slice(hostile);
            std::fs::write(&path, text).unwrap();
            assert_refused(read(&path), "metrics.jsonl:3: ");
            cut_back(&path, 2).unwrap();
            assert_eq!(read(&path).unwrap(), [step(1), step(2)]);
        }
    }
}
