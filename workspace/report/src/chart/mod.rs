//! Charts as SVG: curves ([`LineChart`]), maps of shares ([`HeatMap`]), and maps over time ([`TimeMap`]). Colours and
//! lines are classes of [`STYLE`], so that a chart follows a light and a dark page. Dashes and labels tell curves
//! apart, and not only colours.

mod axis;
mod cells;
mod heat;
mod line;
mod marks;
pub mod scale;
pub mod thin;
mod time_map;

pub use heat::{Cell, HeatMap, HeatRow, color_bar};
pub use line::{Line, LineChart, Look, Size};
pub use marks::Mark;
pub use time_map::TimeMap;

/// The style rules of charts.
pub const STYLE: &str = include_str!("chart.css");

/// Colours of curves: `s0` to `s6` of [`STYLE`].
pub const COLORS: usize = 7;

/// Dashes of curves: `d0` to `d4` of [`STYLE`].
pub const DASHES: usize = 5;

/// Returns a text of at most `most` characters. A longer text ends in an ellipsis. Control characters, which XML does
/// not allow, become replacement characters.
pub fn shorten(text: &str, most: usize) -> String {
    let is_long = text.chars().count() > most;
    let kept = if is_long { most.saturating_sub(1) } else { most };
    let mut short: String = printable(text).chars().take(kept).collect();
    if is_long {
        short.push('\u{2026}');
    }
    short
}

/// Returns a text with replacement characters for control characters, which XML does not allow and a page would hide.
pub fn printable(text: &str) -> String {
    let is_odd =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if is_odd(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Returns the approximate width of a text in a chart, in pixels.
fn width(text: &str) -> f64 {
    6.6 * text.chars().count() as f64
}

/// Returns a coordinate as text. A tenth of a pixel is finer than visible.
fn at(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_odd_texts_are_shortened() {
        assert_eq!(shorten("adapt", 5), "adapt");
        assert_eq!(shorten("adapted", 5), "adap\u{2026}");
        assert_eq!(shorten("a\u{0}b\u{202e}", 9), "a\u{fffd}b\u{fffd}");
    }

    #[test]
    fn the_style_has_every_colour_and_dash() {
        for class in
            (0..COLORS).map(|n| format!(".s{n}")).chain((1..DASHES).map(|n| format!(".d{n}")))
        {
            assert!(STYLE.contains(&format!("{class} ")), "{class}");
        }
        // The style is embedded in SVG without escapes.
        assert!(!STYLE.contains(['<', '&']));
    }
}
