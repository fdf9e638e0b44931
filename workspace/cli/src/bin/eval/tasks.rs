//! `moh-eval tasks`: scores in benchmark tasks.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moh_device::{Compute, DeviceName};
use moh_eval::tasks::{Encoder, ExampleOutcome, Request, Scores, TaskFile, log_likelihoods};
use moh_files::PendingFile;
use moh_hf::{ConfigFile, SpecialTokens};
use moh_kernels::{Backend, Element, ElementType};
use moh_program::arguments::at_least;
use moh_program::models;
use moh_program::progress::Bar;
use moh_program::{counted, exit};
use serde_json::{Value, json};

use crate::make_room;

#[derive(clap::Args)]
pub(crate) struct TasksArguments {
    /// Task files: JSON lines, one example each
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Directory of the model, or its id on the hub
    #[arg(long)]
    model: String,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    revision: Option<String>,
    /// Maximum tokens that the model reads of an example, whose context loses its beginning; the model's
    /// context length if omitted
    #[arg(long, value_name = "TOKENS", value_parser = at_least::<usize>(0))]
    max_length: Option<usize>,
    /// Only the first examples of each file
    #[arg(long, value_name = "EXAMPLES", value_parser = at_least::<usize>(0))]
    limit: Option<usize>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Write a line of JSON for each example: log-likelihoods, what the model predicts, whether it is right
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace --out if it exists
    #[arg(long, requires = "out")]
    force: bool,
    /// Element type of the computation
    #[arg(long, value_parser = models::element_types(), default_value = "f32")]
    dtype: ElementType,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
}

impl TasksArguments {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        if self.limit == Some(0) {
            return Err(exit::Usage("--limit 0: must be at least 1".to_owned()).into());
        }
        exit::remove_temporary_files_on_signals()?;
        models::open(self.device)?.compute(self.dtype, Tasks(self))
    }

    /// The requested length, or the model's context length; longer ones are refused.
    fn max_length(&self, context: usize) -> anyhow::Result<usize> {
        let length = self.max_length.unwrap_or(context);
        if !(1..=context).contains(&length) {
            let message = format!(
                "--max-length {length}: must be 1 to {context}, the model's context length"
            );
            return Err(exit::Usage(message).into());
        }
        Ok(length)
    }
}

struct Tasks<'a>(&'a TasksArguments);

impl Compute for Tasks<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output {
        let TasksArguments { files, out, force, .. } = self.0;
        let directory = models::locate(&self.0.model, self.0.revision.as_deref())?;
        // Files and encodings are checked before the model takes time and memory.
        let read = |path: &PathBuf| TaskFile::read(path, self.0.limit);
        let files: Vec<TaskFile> = files.iter().map(read).collect::<Result<_, _>>()?;
        let requests = requests(&directory, &files, self.0)?;
        let out = out.as_deref().map(|path| Lines::create(path, *force)).transpose()?;
        let longest = requests.iter().map(|request| request.input().len()).max().unwrap_or(1);
        let model = models::load::<B, T>(backend, &directory, longest)?;

        let mut bar = Bar::count("scoring", requests.len() as u64);
        let mut progress = |done, total| bar.update(done, total);
        let found = log_likelihoods(&model, &requests, &mut progress)?;
        drop(bar);
        let mut rest = found.as_slice();
        let mut outcomes = Vec::new();
        for file in &files {
            let choices = file.examples.iter().map(|example| example.choices.len()).sum();
            let (of_file, later) = rest.split_at(choices);
            rest = later;
            outcomes.push((file, ExampleOutcome::of_file(file, of_file)?));
        }
        if let Some(out) = out {
            out.write(&outcomes)?;
        }
        print(self.0, &outcomes)
    }
}

/// The requests of the examples of `files` to the model in `directory`.
fn requests(
    directory: &Path,
    files: &[TaskFile],
    arguments: &TasksArguments,
) -> anyhow::Result<Vec<Request>> {
    let config = ConfigFile::read(directory)?.config;
    let max_length = arguments.max_length(config.max_position_embeddings)?;
    let tokenizer = models::required_tokenizer(directory)?;
    let special = SpecialTokens::read(directory)?;
    let named = special.bos.or(special.eos).or(config.bos_token_id);
    let beginning = named.or(config.eos_token_ids.first().copied());
    let encoder = Encoder::new(&tokenizer, beginning, max_length, config.vocab_size)?;
    Ok(encoder.requests(files)?)
}

/// The file of `--out`.
struct Lines {
    file: PendingFile,
    force: bool,
}

impl Lines {
    /// Starts the file, so that no model is run in vain for a name that cannot be written.
    fn create(path: &Path, force: bool) -> anyhow::Result<Self> {
        make_room(path, force)?;
        let file = PendingFile::create(path).with_context(|| path.display().to_string())?;
        Ok(Lines { file, force })
    }

    fn write(mut self, outcomes: &[(&TaskFile, Vec<ExampleOutcome>)]) -> anyhow::Result<()> {
        let path = self.file.path().display().to_string();
        let write = || {
            for (file, outcomes) in outcomes {
                let name = file.path.to_string_lossy();
                for (example, outcome) in file.examples.iter().zip(outcomes) {
                    writeln!(self.file, "{}", outcome.to_json(&name, example.line))?;
                }
            }
            match self.force {
                true => self.file.replace(),
                false => self.file.publish(),
            }
        };
        write().context(path)
    }
}

/// The name of a task: its file's, without the extension.
fn name(file: &TaskFile) -> String {
    file.path.with_extension("").display().to_string()
}

/// Prints the scores as a table, or as JSON.
fn print(
    arguments: &TasksArguments,
    outcomes: &[(&TaskFile, Vec<ExampleOutcome>)],
) -> anyhow::Result<()> {
    let mut out = stdout();
    if arguments.json {
        let tasks: Vec<Value> = outcomes.iter().map(|(file, found)| to_json(file, found)).collect();
        let dtype = arguments.dtype.name();
        let report = json!({"model": arguments.model, "dtype": dtype, "tasks": tasks});
        return Ok(writeln!(out, "{report:#}")?);
    }
    let names: Vec<String> = outcomes.iter().map(|(file, _)| name(file)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max(4);
    writeln!(out, "{:<width$}  {:<15} {:>10} {:>9}", "task", "metric", "value", "stderr")?;
    for ((_, outcomes), name) in outcomes.iter().zip(&names) {
        let mut shown = name.as_str();
        for (metric, estimate) in Scores::new(outcomes).0 {
            let stderr = estimate.stderr.map_or("-".to_owned(), |stderr| format!("{stderr:.4}"));
            let value = estimate.value;
            writeln!(out, "{shown:<width$}  {metric:<15} {value:>10.4} {stderr:>9}")?;
            shown = "";
        }
        let examples = counted(outcomes.len() as u64, "example");
        writeln!(out, "{:<width$}  ({examples})", "")?;
    }
    Ok(())
}

fn to_json(file: &TaskFile, outcomes: &[ExampleOutcome]) -> Value {
    let mut fields = serde_json::Map::new();
    fields.insert("task".to_owned(), name(file).into());
    fields.insert("kind".to_owned(), file.kind.name().into());
    fields.insert("examples".to_owned(), outcomes.len().into());
    fields.extend(Scores::new(outcomes).to_json());
    Value::Object(fields)
}
