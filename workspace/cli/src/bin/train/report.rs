//! The end of a run: its losses, its files and the next commands.

use std::io::{Write as _, stdout};
use std::path::Path;

use moh_cli::exit;
use moh_cli::summary_table::{draw, invocation, table};
use moh_data::TokenFile;
use moh_train::recipe::ValidationSet;
use moh_train::{Recipe, RunDirectory, Summary};

/// Prints the end of a run: losses, output files and next commands.
pub(crate) fn report(
    path: &Path,
    recipe: &Recipe,
    run: &RunDirectory,
    summary: &Summary,
) -> anyhow::Result<()> {
    let mut out = stdout();
    let losses = table(summary);
    if !losses.is_empty() {
        writeln!(out, "{losses}")?;
    }
    let mut files = vec![("model", run.export()), ("metrics", run.metrics())];
    match draw(run) {
        Ok(picture) => files.push(("picture", picture)),
        // The run is finished, whatever is wrong with the files that a picture is made of.
        Err(error) => exit::stderr_line(format_args!("warning: no picture: {error:#}")),
    }
    for (what, path) in files {
        writeln!(out, "{what:<8} {}", path.display())?;
    }
    let export = run.export();
    writeln!(out, "\nTry next:")?;
    for command in next_commands(path, recipe, &export, summary) {
        writeln!(out, "  {command}")?;
    }
    Ok(())
}

/// A comment for the shell if moh-eval reads more windows of the validation data than the run did.
fn other_windows(recipe: &Recipe, validation: &ValidationSet) -> String {
    let sequences = recipe.stages.first().map_or(1, |stage| stage.micro_batch);
    let read = (validation.batches as u64).saturating_mul(sequences as u64);
    let windows = TokenFile::open(&validation.path)
        .map_or(0, |file| file.num_tokens() / recipe.data.sequence_length.max(1) as u64);
    if windows > read {
        format!("  # all {windows} windows; the table's losses are of the first {read}")
    } else {
        String::new()
    }
}

/// Commands that use the run's output.
fn next_commands(path: &Path, recipe: &Recipe, export: &Path, summary: &Summary) -> Vec<String> {
    let mut commands = Vec::new();
    if export.join("tokenizer.json").is_file() {
        let generate = invocation("moh-generate");
        commands.push(format!("{generate} --model {} --prompt \"One day\"", export.display()));
    }
    if let Some(validation) = recipe.data.validation.first() {
        commands.push(format!(
            "{} loss --model {} --data {} --sequence-length {}{}",
            invocation("moh-eval"),
            export.display(),
            validation.path.display(),
            recipe.data.sequence_length,
            other_windows(recipe, validation),
        ));
    }
    commands.push(format!("{} {}", invocation("moh-report"), recipe.run.dir.display()));
    let routed = recipe.stages.iter().find(|stage| stage.moh.is_some());
    if let Some(stage) = routed.filter(|_| summary.heads.is_multiple_of(4)) {
        commands.push(format!(
            "{} --recipe {} --set run.dir={}-half --set stage.{name}.moh.shared_heads={quarter} \
             --set stage.{name}.moh.routed_top_k={quarter}",
            invocation("moh-train"),
            path.display(),
            recipe.run.dir.display(),
            name = stage.name,
            quarter = summary.heads / 4,
        ));
    }
    commands
}
