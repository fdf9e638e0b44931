//! A map of shares over time: a row for each head or layer, a column for each evaluation.

use maud::{Markup, html};

use super::cells;
use super::heat::{HeatRow, LEFT, Rectangle, every};
use super::scale::round;
use super::{at, width};

const WIDTH: f64 = 400.0;

/// Pixels above and right of the cells.
const TOP: f64 = 4.0;
const RIGHT: f64 = 6.0;

/// Height of the numbers below the cells, with the axis' name.
const BELOW: f64 = 36.0;

#[derive(Debug, Clone, PartialEq)]
pub struct TimeMap {
    pub title: String,
    /// The map in words, for readers who do not see it.
    pub description: String,
    /// The name of the rows, such as `heads`.
    pub rows_are: &'static str,
    /// The rows, from the top, with a cell for each of `steps`.
    pub rows: Vec<HeatRow>,
    /// The steps of the columns, from the left.
    pub steps: Vec<u64>,
}

impl TimeMap {
    pub fn draw(&self) -> Markup {
        let (columns, rows) = (self.steps.len().max(1), self.rows.len().max(1));
        let wide = (WIDTH - LEFT - RIGHT) / columns as f64;
        let high = (160.0 / rows as f64).clamp(2.5, 14.0);
        let bottom = TOP + high * rows as f64;
        let height = bottom + BELOW;
        let steps: Vec<String> = self.steps.iter().map(|&step| round(step as f64)).collect();
        let room = steps.iter().map(|step| width(step)).fold(0.0, f64::max) + 12.0;
        html! {
            svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" width=(at(WIDTH)) height=(at(height))
                viewBox={ "0 0 " (at(WIDTH)) " " (at(height)) } {
                title { (self.title) }
                desc { (self.description) }
                @for (place, row) in self.rows.iter().enumerate().step_by(every(high, 13.0)) {
                    text class="quiet" x=(at(LEFT - 7.0)) y=(at(TOP + high * (place as f64 + 0.5) + 4.0))
                        text-anchor="end" { (row.label) }
                }
                @let plot = Rectangle { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: bottom - TOP };
                (cells::draw(&self.rows, plot))
                @for (column, step) in steps.iter().enumerate().step_by(every(wide, room)) {
                    @let x = LEFT + wide * (column as f64 + 0.5);
                    @let reaches = x + width(step) / 2.0 > WIDTH;
                    text class="quiet" x=(at(if reaches { WIDTH } else { x })) y=(at(bottom + 15.0))
                        text-anchor=(if reaches { "end" } else { "middle" }) { (step) }
                }
                text class="quiet" x=(at(WIDTH - RIGHT)) y=(at(bottom + 31.0)) text-anchor="end" {
                    (self.rows_are) " by step"
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::Cell;

    fn map(rows: Vec<Vec<Cell>>, steps: Vec<u64>) -> TimeMap {
        let rows = rows.into_iter().enumerate();
        TimeMap {
            title: "loads".to_owned(),
            description: "loads of <heads>".to_owned(),
            rows_are: "heads",
            rows: rows
                .map(|(number, cells)| HeatRow { label: number.to_string(), cells })
                .collect(),
            steps,
        }
    }

    #[test]
    fn every_map_is_drawn() {
        for (rows, steps) in [
            (vec![], vec![]),
            (vec![vec![Cell::Share(f64::NAN)]], vec![u64::MAX]),
            (vec![vec![]], vec![1]),
        ] {
            let shown = map(rows, steps).draw().into_string();
            assert!(!shown.contains("NaN") && shown.ends_with("</svg>"), "{shown}");
            assert!(shown.contains("loads of &lt;heads&gt;"), "{shown}");
        }
        let large = map(vec![vec![Cell::Share(0.3); 64]; 64], (0..64).collect());
        assert!(large.draw().into_string().len() < 4000);
    }
}
