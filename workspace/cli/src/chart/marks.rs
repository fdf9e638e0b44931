//! Vertical lines with labels above the plot, in as many rows as the labels need.

use maud::{Markup, html};

use super::{at, shorten, width};

/// Height of a row of labels.
const ROW: f64 = 16.0;

/// Labels beyond this many rows are left out, as their lines are then all one sees.
const MOST_ROWS: usize = 4;

/// Marks beyond this many are left out.
const MOST_MARKS: usize = 60;

/// Pixels between a line and its label, or between two labels.
const GAP: f64 = 5.0;

/// What a vertical line marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkKind {
    /// The start of a stage.
    Stage,
    /// A place to which the run returned.
    Rewind,
}

/// A vertical line with a label.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Its place on the horizontal axis.
    pub at: f64,
    /// Its label.
    pub label: String,
    /// What it marks.
    pub kind: MarkKind,
}

/// A mark whose label has a place.
pub(super) struct Placed<'a> {
    mark: &'a Mark,
    x: f64,
    label: String,
    /// Where the label begins.
    start: f64,
    row: usize,
}

/// Finds a row for each label, so that none covers another: right of its line, or left where it would leave
/// the chart. `place` gives the pixel of a mark.
pub(super) fn placed<'a>(
    marks: &'a [Mark],
    place: impl Fn(f64) -> f64,
    (left, right): (f64, f64),
) -> Vec<Placed<'a>> {
    let mut ends: Vec<f64> = Vec::new();
    let most = ((right - left) / 2.0 / width("m")) as usize;
    let mut found = Vec::new();
    for mark in marks.iter().take(MOST_MARKS) {
        let (x, label) = (place(mark.at), shorten(&mark.label, most));
        let long = width(&label);
        let fits = x + GAP + long <= right;
        let start = if fits { x + GAP } else { (x - GAP - long).max(left) };
        let row = ends.iter().position(|&end| end <= start).unwrap_or(ends.len());
        if row < MOST_ROWS {
            let end = start + long + GAP;
            if row == ends.len() { ends.push(end) } else { ends[row] = end }
        }
        found.push(Placed { mark, x, label, start, row });
    }
    found
}

/// The height of the labels above the plot.
pub(super) fn height(marks: &[Placed<'_>]) -> f64 {
    let rows = marks.iter().map(|mark| mark.row + 1).max().unwrap_or(0).min(MOST_ROWS);
    rows as f64 * ROW
}

/// Draws the marks over a plot from `top` to `bottom`, with their labels above it.
pub(super) fn draw(marks: &[Placed<'_>], top: f64, bottom: f64) -> Markup {
    html! {
        @for Placed { mark, x, label, start, row } in marks {
            @let row_y = top - ROW * *row as f64;
            @let is_rewind = mark.kind == MarkKind::Rewind;
            path class=(if is_rewind { "mark alarm" } else { "mark" })
                d={ "M" (at(*x)) " " (at(row_y - ROW + 4.0)) "V" (at(bottom)) } {}
            @if *row < MOST_ROWS {
                text class=(if is_rewind { "alarm" } else { "quiet" })
                    x=(at(*start)) y=(at(row_y - 5.0)) { (label) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cover_neither_each_other_nor_the_axis() {
        let mark = |at, label: &str| Mark { at, label: label.to_owned(), kind: MarkKind::Stage };
        let marks = [mark(0.0, "adapt"), mark(10.0, "moh: 6 of 8 heads"), mark(990.0, "longer")];
        let found = placed(&marks, |at| 50.0 + at / 2.0, (50.0, 560.0));
        let rows: Vec<usize> = found.iter().map(|mark| mark.row).collect();
        assert_eq!(rows, [0, 1, 0]);
        assert_eq!(found[0].start, 55.0);
        assert!(found[2].start + width("longer") < found[2].x, "left of a line at the right edge");
        assert_eq!(height(&found), 2.0 * ROW);
        assert_eq!(height(&placed(&[], |at| at, (0.0, 1.0))), 0.0);
    }

    #[test]
    fn many_marks_keep_their_lines_and_a_few_rows_of_labels() {
        let mark = |at| Mark { at, label: "rewind".to_owned(), kind: MarkKind::Rewind };
        let marks: Vec<Mark> = (0..500).map(f64::from).map(mark).collect();
        let found = placed(&marks, |at| at, (0.0, 500.0));
        assert_eq!((found.len(), height(&found)), (MOST_MARKS, MOST_ROWS as f64 * ROW));
    }
}
