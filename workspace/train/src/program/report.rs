//! The end of a run: its losses, its files and the next commands.

use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};

use crate::summary_table::table;
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::Summary;
use moh_data::TokenFile;
use moh_model::HeadCounts;
use moh_recipe::{DeviceKind, MohOptions, Recipe};

use crate::command_line::CommandLine;

/// Prints the end of a run: losses, output files and next commands.
pub(crate) fn report(recipe: &Recipe, run: &RunDirectory, summary: &Summary) -> anyhow::Result<()> {
    let mut out = stdout();
    let losses = table(summary);
    if !losses.is_empty() {
        writeln!(out, "{losses}")?;
    }
    for (what, path) in [("model", run.export()), ("metrics", run.metrics())] {
        writeln!(out, "{what:<8} {}", path.display())?;
    }
    writeln!(out, "\nTry next:")?;
    for command in next_commands(recipe, run, summary) {
        writeln!(out, "  {command}")?;
    }
    if let Some(remark) = other_windows(recipe) {
        writeln!(out, "\n{remark}")?;
    }
    Ok(())
}

/// Returns a remark if moh-eval reads more windows of the validation data than the run did.
fn other_windows(recipe: &Recipe) -> Option<String> {
    let validation = recipe.data.validation.first()?;
    let sequences = recipe.stages.first().map_or(1, |stage| stage.micro_batch);
    let read = (validation.batches as u64).saturating_mul(sequences as u64);
    let windows = TokenFile::open(&validation.path)
        .map_or(0, |file| file.num_tokens() / recipe.data.sequence_length.max(1) as u64);
    (windows > read).then(|| {
        format!("moh-eval reads all {windows} windows; the table's losses are of the first {read}")
    })
}

/// Returns commands that use the run's output. They work in this program's working directory, to which the recipe's
/// relative paths refer.
fn next_commands(recipe: &Recipe, run: &RunDirectory, summary: &Summary) -> Vec<String> {
    let export = run.export();
    let on_model = |command: CommandLine| {
        let command = command.path_option("--model", &export);
        // The element type of the run's computation.
        let dtype = recipe.run.dtype.name();
        let command = if dtype == "f32" { command } else { command.option("--dtype", dtype) };
        match recipe.run.device {
            DeviceKind::Cpu => command,
            DeviceKind::Cuda => command.option("--device", "cuda"),
        }
    };
    let mut commands = Vec::new();
    if export.join("tokenizer.json").is_file() {
        let generate = on_model(CommandLine::new("moh-generate"));
        commands.push(generate.option("--prompt", "One day").to_string());
    }
    if let Some(validation) = recipe.data.validation.first() {
        let loss = on_model(CommandLine::new("moh-eval").word("loss"))
            .path_option("--data", &validation.path)
            .option("--sequence-length", recipe.data.sequence_length.to_string());
        commands.push(loss.to_string());
    }
    commands.push(CommandLine::new("moh-report").path(run.root()).to_string());
    commands.extend(half_of_the_heads(recipe, run, summary.heads).map(|half| half.to_string()));
    commands
}

/// Returns the command of the same run with a quarter of its heads shared and a quarter routed. Returns `None` if the
/// run had these numbers, or if the number of heads is not a multiple of 4. The command uses the run's own recipe,
/// which has every override.
fn half_of_the_heads(recipe: &Recipe, run: &RunDirectory, heads: usize) -> Option<CommandLine> {
    if !heads.is_multiple_of(4) {
        return None;
    }
    let quarter = heads / 4;
    let has_half = |moh: &MohOptions| {
        let counts = [&moh.shared_heads, &moh.routed_top_k];
        let is_half = |counts: &Option<HeadCounts>| {
            counts.as_ref().and_then(HeadCounts::uniform) == Some(quarter)
        };
        // Numbers of shared heads cannot be given together with the heads themselves.
        moh.shared_head_ids.is_some() || counts.into_iter().all(is_half)
    };
    let routed = recipe.stages.iter().filter_map(|stage| Some((&stage.name, stage.moh.as_ref()?)));
    let others: Vec<_> = routed.filter(|(_, moh)| !has_half(moh)).map(|(name, _)| name).collect();
    let first = CommandLine::new("moh-train")
        .path_option("--recipe", &run.recipe())
        .option("--set", format!("run.dir={}", beside(run.root(), "-half").display()));
    let set_half = |command: CommandLine, stage: &&String| {
        command
            .option("--set", format!("stage.{stage}.moh.shared_heads={quarter}"))
            .option("--set", format!("stage.{stage}.moh.routed_top_k={quarter}"))
    };
    (!others.is_empty()).then(|| others.iter().fold(first, set_half))
}

/// Returns the path of `directory` with `ending` added to its name.
fn beside(directory: &Path, ending: &str) -> PathBuf {
    // `.` and `..` are not names.
    let named = match directory.file_name() {
        Some(_) => directory.to_owned(),
        None => directory.canonicalize().unwrap_or_else(|_| directory.to_owned()),
    };
    let mut name = named.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    named.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_beside_another_has_a_name_of_its_own() {
        for (directory, expected) in
            [("runs/a", "runs/a-half"), ("runs/a/", "runs/a-half"), ("a b/c.d", "a b/c.d-half")]
        {
            assert_eq!(beside(Path::new(directory), "-half"), Path::new(expected));
        }
        let here = std::env::current_dir().unwrap();
        let name = format!("{}-half", here.file_name().unwrap().to_str().unwrap());
        assert_eq!(beside(Path::new("."), "-half"), here.with_file_name(name));
    }
}
