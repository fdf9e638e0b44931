//! The table of a comparison: a row for each variant, a column for each moment of evaluation.

use std::fmt::Write as _;

use moh_checkpoint::run_directory::KeyChange;
use moh_checkpoint::run_log::{Evaluation, EvaluationPoint};
use moh_files::units::{group_digits, percent};
use moh_program::table::aligned;
use moh_train::comparison::Results;

pub(super) struct Row<'a> {
    pub name: &'a str,
    pub changes: &'a [KeyChange],
    pub results: Results,
}

/// Returns the table and the keys that each variant changes. The losses of further validation sets are below the losses
/// of the first set.
pub(super) fn table(rows: &[Row<'_>]) -> String {
    let moments = moments(rows);
    let lines: Vec<Vec<String>> = rows.iter().flat_map(|row| of_row(row, &moments, rows)).collect();
    let mut out = aligned(header(&moments), &lines, &[0]);
    if lines.iter().flatten().any(|cell| cell.ends_with(OTHER)) {
        out.push_str("* on another text, or another number of its tokens, than the last loss of the first variant\n");
    }
    out.push('\n');
    for row in rows {
        let change = |change: &KeyChange| {
            let value = change.now.as_deref().unwrap_or("absent");
            format!("{} = {value}", change.key)
        };
        let changes: Vec<String> = row.changes.iter().map(change).collect();
        let _ = match changes.is_empty() {
            true => writeln!(out, "{}: the recipe", row.name),
            false => writeln!(out, "{}: {}", row.name, changes.join(", ")),
        };
    }
    out
}

/// Returns the names of the moments of all variants, in the order of the runs.
fn moments(rows: &[Row<'_>]) -> Vec<String> {
    let mut moments: Vec<String> = Vec::new();
    for row in rows {
        let mut next = 0;
        for evaluation in &row.results.evaluations {
            let name = name(evaluation);
            match moments.iter().position(|known| *known == name) {
                Some(place) => next = place + 1,
                None => {
                    moments.insert(next, name);
                    next += 1;
                }
            }
        }
    }
    moments
}

fn name(evaluation: &Evaluation) -> String {
    match &evaluation.moment {
        EvaluationPoint::Loaded => "loaded".to_owned(),
        EvaluationPoint::Trained { stage } => stage.clone(),
        EvaluationPoint::Converted { stage, .. } => format!("{stage}, untuned"),
    }
}

fn header(moments: &[String]) -> Vec<String> {
    let mut cells = vec!["loss".to_owned()];
    cells.extend(moments.iter().cloned());
    cells.extend(["bits per byte", "recovered", "tokens", "tokens/s"].map(str::to_owned));
    cells
}

/// Marks a loss that cannot be compared with the first variant's losses.
const OTHER: char = '*';

/// Returns the lines of a variant, one of `rows`: a line for its first validation set, and a line for each other set.
fn of_row(row: &Row<'_>, moments: &[String], rows: &[Row<'_>]) -> Vec<Vec<String>> {
    let results = &row.results;
    // A stage that was extended has several ends: the last end counts.
    let at = |moment: &String| {
        results.evaluations.iter().rev().find(|evaluation| name(evaluation) == *moment)
    };
    let optional = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let last = results.evaluations.last();
    let bits = |bits: Option<f64>| optional(bits.map(|bits| format!("{bits:.4}")));
    let first = rows.iter().find_map(|row| row.results.evaluations.last());
    let of_first =
        |e: &Evaluation| loss(e.loss, first.is_some_and(|first| !first.is_comparable(e)));
    let mut cells = vec![row.name.to_owned()];
    cells.extend(moments.iter().map(|moment| optional(at(moment).map(of_first))));
    cells.push(bits(last.and_then(|last| last.bits_per_byte)));
    cells.push(optional(results.recovered.map(percent)));
    cells.push(group_digits(results.tokens));
    // Whole tokens are precise enough for a rate.
    let rate = results.tokens_per_second.map(|rate| group_digits(rate as u64));
    cells.push(optional(rate));
    let mut lines = vec![cells];
    for set in last.iter().flat_map(|last| last.other_sets.keys()) {
        let of_set = |evaluation: &Evaluation| evaluation.other_sets.get(set).copied();
        let lasts = rows.iter().filter_map(|row| row.results.evaluations.last());
        let text = lasts.filter_map(|last| last.texts.get(set)).next();
        let is_other =
            |e: &Evaluation| text.zip(e.texts.get(set)).is_some_and(|(first, own)| first != own);
        let cell = |e: &Evaluation| Some(loss(of_set(e)?.loss, is_other(e)));
        let mut cells = vec![format!("  {set}")];
        cells.extend(moments.iter().map(|moment| optional(at(moment).and_then(cell))));
        cells.push(bits(last.and_then(of_set).and_then(|set| set.bits_per_byte)));
        lines.push(cells);
    }
    lines
}

fn loss(loss: f64, is_other: bool) -> String {
    let mark = if is_other { OTHER.to_string() } else { String::new() };
    format!("{loss:.4}{mark}")
}

#[cfg(test)]
mod tests {
    use moh_checkpoint::run_log::{EvaluatedText, Validation};

    use super::*;

    fn evaluation(moment: EvaluationPoint, loss: f64, code: Option<f64>) -> Evaluation {
        let set = |loss| ("code".to_owned(), Validation { loss, bits_per_byte: Some(loss / 2.0) });
        let other_sets = code.map(set).into_iter().collect();
        Evaluation { other_sets, ..Evaluation::new(moment, 0, loss) }
    }

    fn results(evaluations: Vec<Evaluation>) -> Results {
        let (recovered, tokens_per_second) = (Some(0.5), Some(1234.9));
        Results { steps: 9, tokens: 98_304, tokens_per_second, recovered, evaluations }
    }

    #[test]
    fn losses_of_another_text_are_marked() {
        let row = |name: &'static str, targets| {
            let mut last = evaluation(EvaluationPoint::Loaded, 3.0, Some(4.0));
            last.set = Some("text".to_owned());
            let text = |targets| EvaluatedText { content: "a".to_owned(), targets };
            last.texts = [("text".to_owned(), text(64)), ("code".to_owned(), text(targets))].into();
            Row { name, changes: &[], results: results(vec![last]) }
        };
        let same = table(&[row("a", 32), row("b", 32)]);
        assert!(!same.contains(OTHER), "{same}");
        let mut other = row("b", 16);
        let shown = table(&[row("a", 32), other]);
        assert_eq!(
            (shown.matches("3.0000*").count(), shown.matches("4.0000*").count()),
            (0, 1),
            "{shown}"
        );
        other = row("b", 32);
        for text in other.results.evaluations[0].texts.values_mut() {
            text.content = "b".to_owned();
        }
        let shown = table(&[row("a", 32), other]);
        assert_eq!(
            (shown.matches("3.0000*").count(), shown.matches("4.0000*").count()),
            (1, 1),
            "{shown}"
        );
        assert!(shown.contains("\n* on another text"), "{shown}");
    }

    #[test]
    fn a_variant_has_a_row_with_its_losses_under_their_moments() {
        let stage = || "moh".to_owned();
        let converted = EvaluationPoint::Converted { stage: stage(), active_heads: 6.into() };
        let moh = results(vec![
            evaluation(EvaluationPoint::Loaded, 3.0, Some(4.0)),
            evaluation(converted, 2.0, Some(3.0)),
            evaluation(EvaluationPoint::Trained { stage: stage() }, 1.5, Some(2.5)),
        ]);
        let dense = results(vec![
            evaluation(EvaluationPoint::Loaded, 3.0, None),
            evaluation(EvaluationPoint::Trained { stage: stage() }, 1.75, None),
            evaluation(EvaluationPoint::Trained { stage: stage() }, 1.25, None),
        ]);
        let changes = [KeyChange {
            key: "stage.moh.attention".to_owned(),
            before: Some("\"moh\"".to_owned()),
            now: Some("\"dense\"".to_owned()),
        }];
        let dense = Row { name: "dense", changes: &changes, results: dense };
        let shown = table(&[dense, Row { name: "base", changes: &[], results: moh }]);
        let lines: Vec<String> = shown
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            lines,
            [
                "loss loaded moh, untuned moh bits per byte recovered tokens tokens/s",
                "dense 3.0000 - 1.2500 - 50.0% 98,304 1,234",
                "base 3.0000 2.0000 1.5000 - 50.0% 98,304 1,234",
                "code 4.0000 3.0000 2.5000 1.2500",
                "",
                "dense: stage.moh.attention = \"dense\"",
                "base: the recipe",
            ]
        );
    }
}
