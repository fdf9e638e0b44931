//! A map of shares: labelled rows, such as layers, and numbered columns, such as heads.

use maud::{Markup, html};

use super::{at, cells, shorten, width};

const WIDTH: f64 = 400.0;

/// Pixels for row labels, at least, and above the columns.
pub(super) const LEFT: f64 = 34.0;
const TOP: f64 = 20.0;

const LABEL: usize = 12;

/// The colours of viridis at 0, 0.1, .. 1: evenly lighter, and distinct for the colour-blind.
const VIRIDIS: [u32; 11] = [
    0x440154, 0x482475, 0x414487, 0x355f8d, 0x2a788e, 0x21918c, 0x22a884, 0x44bf70, 0x7ad151,
    0xbddf26, 0xfde725,
];

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cell {
    /// A share from 0 to 1.
    Share(f64),
    /// Always active.
    Shared,
    Absent,
}

#[derive(Debug, Clone, PartialEq)]
pub struct HeatRow {
    pub label: String,
    pub cells: Vec<Cell>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct HeatMap {
    pub title: String,
    /// The map in words, for readers who do not see it.
    pub description: String,
    /// Names of the rows and columns.
    pub axes: String,
    /// The rows, from the top.
    pub rows: Vec<HeatRow>,
}

/// A rectangle of a drawing, in pixels from its upper left corner.
#[derive(Clone, Copy)]
pub(super) struct Rectangle {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl HeatMap {
    pub fn draw(&self) -> Markup {
        let columns = self.rows.iter().map(|row| row.cells.len()).max().unwrap_or(0).max(1);
        let labels: Vec<String> = self.rows.iter().map(|row| shorten(&row.label, LABEL)).collect();
        let left = labels.iter().map(|label| width(label) + 12.0).fold(LEFT, f64::max);
        let wide = (WIDTH - left - 6.0) / columns as f64;
        let high = (wide * 0.6).clamp(9.0, 24.0);
        let bottom = TOP + high * self.rows.len() as f64;
        let with_text = wide >= 28.0 && high >= 14.0;
        // Large cells are one pixel apart, small cells adjoin.
        let has_gaps = wide >= 8.0;
        let x = |column: usize| left + wide * column as f64;
        let y = |row: usize| TOP + high * row as f64;
        html! {
            svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" width=(at(WIDTH))
                height=(at(bottom + 18.0)) viewBox={ "0 0 " (at(WIDTH)) " " (at(bottom + 18.0)) } {
                title { (self.title) }
                desc { (self.description) }
                @for column in (0..columns).step_by(every(wide, width("00") + 6.0)) {
                    text class="quiet" x=(at(x(column) + wide / 2.0)) y=(at(TOP - 6.0)) text-anchor="middle" {
                        (column)
                    }
                }
                @for (place, label) in labels.iter().enumerate().step_by(every(high, 13.0)) {
                    text class="quiet" x=(at(left - 7.0)) y=(at(y(place) + high / 2.0 + 4.0)) text-anchor="end" {
                        (label)
                    }
                }
                @if has_gaps {
                    @for (place, row) in self.rows.iter().enumerate() {
                        @for (column, cell) in row.cells.iter().enumerate() {
                            @let (x, y, width, height) = (x(column), y(place), wide - 1.0, high - 1.0);
                            (cell.draw(Rectangle { x, y, width, height }, with_text))
                        }
                    }
                } @else {
                    @let (width, height) = (wide * columns as f64, bottom - TOP);
                    (cells::draw(&self.rows, Rectangle { x: left, y: TOP, width, height }))
                }
                text class="quiet" x=(at(WIDTH - 6.0)) y=(at(bottom + 14.0)) text-anchor="end" { (self.axes) }
            }
        }
    }
}

impl Cell {
    fn draw(&self, Rectangle { x, y, width, height }: Rectangle, with_text: bool) -> Markup {
        let share = match *self {
            Cell::Share(share) => share,
            Cell::Shared => {
                return html! { rect class="shared" x=(at(x)) y=(at(y)) width=(at(width)) height=(at(height)) {} };
            }
            Cell::Absent => return html! {},
        };
        let ink = if share < 0.55 { "#ffffff" } else { "#000000" };
        html! {
            rect fill=(viridis(share)) x=(at(x)) y=(at(y)) width=(at(width)) height=(at(height)) {}
            @if with_text {
                text class="cell" style={ "fill:" (ink) } text-anchor="middle"
                    x=(at(x + width / 2.0)) y=(at(y + height / 2.0 + 4.0)) { (format!("{:.0}", 100.0 * share)) }
            }
        }
    }
}

/// Returns a legend of the colours.
pub fn color_bar() -> Markup {
    html! {
        svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" width="400" height="40" viewBox="0 0 400 40" {
            title { "Colours of the shares from 0% to 100%" }
            @for step in 0..50u32 {
                @let share = f64::from(step) / 49.0;
                rect fill=(viridis(share)) x=(at(LEFT + 4.4 * f64::from(step))) y="2" width="5" height="12" {}
            }
            @for (share, anchor) in [(0.0, "start"), (50.0, "middle"), (100.0, "end")] {
                text class="quiet" x=(at(LEFT + 2.2 * share)) y="29" text-anchor=(anchor) { (share) "%" }
            }
            rect class="shared" x="286" y="2" width="24" height="12" {}
            text class="quiet" x="316" y="12" { "shared head" }
        }
    }
}

/// Returns the number of cells of `size` pixels that a label of `label` pixels covers.
pub(super) fn every(size: f64, label: f64) -> usize {
    (label / size).ceil().max(1.0) as usize
}

pub(super) fn viridis(share: f64) -> String {
    let place = share.clamp(0.0, 1.0) * (VIRIDIS.len() - 1) as f64;
    let index = (place as usize).min(VIRIDIS.len() - 2);
    let part = place - index as f64;
    let mix = |shift: usize| {
        let channel = |color: u32| f64::from(color >> shift & 0xff);
        let [from, to] = [VIRIDIS[index], VIRIDIS[index + 1]].map(channel);
        (from + part * (to - from)).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", mix(16), mix(8), mix(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_reach_from_one_end_to_the_other() {
        let shown = [-1.0, 0.0, 0.05, 1.0, 7.0].map(viridis);
        assert_eq!(shown, ["#440154", "#440154", "#461365", "#fde725", "#fde725"]);
        assert_eq!(viridis(f64::NAN).len(), 7);
    }

    #[test]
    fn large_cells_have_numbers_and_small_ones_none() {
        let map = |heads: usize| HeatMap {
            title: "load".to_owned(),
            description: "load of <heads>".to_owned(),
            axes: "rows: layers".to_owned(),
            rows: vec![HeatRow { label: "3".to_owned(), cells: vec![Cell::Share(0.25); heads] }; 2],
        };
        let few = map(4).draw().into_string();
        assert_eq!(few.matches(">25</text>").count(), 8, "{few}");
        assert!(few.contains("load of &lt;heads&gt;"));
        let many = map(64).draw().into_string();
        assert_eq!((many.matches(">25</text>").count(), many.matches("h64").count()), (0, 2));
        assert!(HeatMap { rows: vec![], ..map(1) }.draw().into_string().ends_with("</svg>"));
    }
}
