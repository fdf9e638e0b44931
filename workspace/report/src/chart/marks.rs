//! Vertical lines with labels above the plot, in as many rows as the labels need.

use maud::{Markup, html};

use super::{at, shorten, width};

const ROW: f64 = 16.0;

/// The most rows of labels. Marks with further labels show only their lines.
const MAX_ROWS: usize = 4;

/// The most marks. Further marks are omitted.
pub(super) const MAX_MARKS: usize = 60;

/// Pixels between a line and its label, or between two labels.
const GAP: f64 = 5.0;

#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// The mark's place on the horizontal axis.
    pub at: f64,
    pub label: String,
}

/// A label with its place.
pub(super) struct Placed {
    /// The horizontal place that the label names.
    pub x: f64,
    pub label: String,
    /// The left end of the label.
    pub start: f64,
    /// The label's row, upwards from 0.
    pub row: usize,
}

/// Finds a row for each label, so that labels do not overlap. A label is right of its place, or left of it if it would
/// exceed the chart.
pub(super) fn place_labels(
    labels: impl IntoIterator<Item = (f64, String)>,
    left: f64,
    right: f64,
) -> Vec<Placed> {
    let mut rows: [Vec<(f64, f64)>; MAX_ROWS] = Default::default();
    let most = ((right - left) * 0.7 / width("m")) as usize;
    let mut found = Vec::new();
    for (x, label) in labels {
        let label = shorten(&label, most);
        let long = width(&label);
        let fits = x + GAP + long <= right;
        let start = if fits { x + GAP } else { (x - GAP - long).max(left) };
        let end = start + long + GAP;
        let is_free =
            |row: &Vec<(f64, f64)>| row.iter().all(|taken| end <= taken.0 || taken.1 <= start);
        let row = rows.iter().position(is_free).unwrap_or(MAX_ROWS);
        if let Some(taken) = rows.get_mut(row) {
            taken.push((start, end));
        }
        found.push(Placed { x, label, start, row });
    }
    found
}

pub(super) fn height(labels: &[Placed]) -> f64 {
    let rows = labels.iter().map(|label| label.row + 1).max().unwrap_or(0).min(MAX_ROWS);
    rows as f64 * ROW
}

/// Returns the base line of a label; `None` if it has no row. The rows begin above `top`.
pub(super) fn base_line(label: &Placed, top: f64) -> Option<f64> {
    (label.row < MAX_ROWS).then_some(top - ROW * label.row as f64 - 5.0)
}

/// Draws labels in rows that begin above `top`, and lines from them down to `bottom`.
pub(super) fn draw(labels: &[Placed], top: f64, bottom: f64) -> Markup {
    html! {
        @for place in labels {
            @let base = base_line(place, top);
            path class="mark"
                d={ "M" (at(place.x)) " " (at(base.map_or(top, |base| base - 8.0))) "V" (at(bottom)) } {}
            @if let Some(base) = base {
                text class="quiet" x=(at(place.start)) y=(at(base)) { (place.label) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cover_neither_each_other_nor_the_axis() {
        let labels = [(50.0, "adapt"), (55.0, "moh: 6 of 8 heads"), (545.0, "longer")];
        let found = place_labels(labels.map(|(x, label)| (x, label.to_owned())), 50.0, 560.0);
        let rows: Vec<usize> = found.iter().map(|mark| mark.row).collect();
        assert_eq!(rows, [0, 1, 0]);
        assert_eq!(found[0].start, 55.0);
        assert!(found[2].start + width("longer") < found[2].x, "left of a line at the right edge");
        assert_eq!(height(&found), 2.0 * ROW);
        assert_eq!(height(&place_labels([], 0.0, 1.0)), 0.0);
    }

    #[test]
    fn many_marks_keep_their_lines_and_a_few_rows_of_labels() {
        let labels = (0..60).map(|x| (f64::from(x), "stage".to_owned()));
        let found = place_labels(labels, 0.0, 500.0);
        assert_eq!((found.len(), found[0].row), (60, 0));
        assert_eq!(height(&found), MAX_ROWS as f64 * ROW);
        assert_eq!(
            found.iter().filter_map(|label| base_line(label, 0.0)).count(),
            found.iter().filter(|label| label.row < MAX_ROWS).count()
        );
    }
}
