//! Many cells of a map without gaps. The cells of a colour are a single path, and neighbours in a row a single stroke
//! of it, because a page has thousands of cells.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use maud::{Markup, html};

use super::at;
use super::heat::{Cell, HeatRow, Rectangle, viridis};

/// Colours of the shares from 0 to 1.
const LEVELS: usize = 41;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Color {
    Shared,
    Level(usize),
}

impl Color {
    /// Returns the colour of a cell; `None` for a cell without a head.
    fn from_cell(cell: Cell) -> Option<Self> {
        match cell {
            Cell::Absent => None,
            Cell::Shared => Some(Color::Shared),
            // A cast of NaN gives 0.
            Cell::Share(share) => {
                Some(Color::Level((share.clamp(0.0, 1.0) * (LEVELS - 1) as f64).round() as usize))
            }
        }
    }
}

pub(super) fn draw(rows: &[HeatRow], Rectangle { x, y, width, height }: Rectangle) -> Markup {
    let columns = rows.iter().map(|row| row.cells.len()).max().unwrap_or(0).max(1);
    html! {
        svg class="cells" x=(at(x)) y=(at(y)) width=(at(width)) height=(at(height))
            viewBox={ "0 0 " (columns) " " (rows.len().max(1)) } preserveAspectRatio="none" {
            @for (color, path) in paths(rows) {
                @match color {
                    Color::Shared => path class="shared" d=(path) {},
                    Color::Level(level) => {
                        path stroke=(viridis(level as f64 / (LEVELS - 1) as f64)) d=(path) {}
                    }
                }
            }
        }
    }
}

fn paths(rows: &[HeatRow]) -> BTreeMap<Color, String> {
    let mut paths = BTreeMap::<Color, String>::new();
    for (number, row) in rows.iter().enumerate() {
        let mut column = 0;
        for same in row.cells.chunk_by(|a, b| Color::from_cell(*a) == Color::from_cell(*b)) {
            if let Some(color) = same.first().and_then(|cell| Color::from_cell(*cell)) {
                // Writing to a text does not fail.
                let _ =
                    write!(paths.entry(color).or_default(), "M{column} {number}.5h{}", same.len());
            }
            column += same.len();
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_colour_are_one_stroke() {
        let [low, high] = [0.0, 1.0].map(Cell::Share);
        let rows = [
            vec![Cell::Shared; 4],
            vec![low, low, high, Cell::Share(f64::NAN)],
            vec![Cell::Absent, high, Cell::Share(7.0), high],
        ];
        let rows = rows.map(|cells| HeatRow { label: String::new(), cells });
        let shown =
            draw(&rows, Rectangle { x: 0.0, y: 0.0, width: 40.0, height: 30.0 }).into_string();
        for path in [
            "<path class=\"shared\" d=\"M0 0.5h4\">",
            "<path stroke=\"#440154\" d=\"M0 1.5h2M3 1.5h1\">",
            "<path stroke=\"#fde725\" d=\"M2 1.5h1M1 2.5h3\">",
        ] {
            assert!(shown.contains(path), "{path}: {shown}");
        }
        assert!(
            draw(&[], Rectangle { x: 0.0, y: 0.0, width: 1.0, height: 1.0 })
                .into_string()
                .ends_with("</svg>")
        );
    }
}
