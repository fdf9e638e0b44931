//! Curves over tokens or layers.

use maud::{Markup, PreEscaped, html};

use super::axis::Axis;
use super::marks::{self, Mark, Placed};
use super::scale::{Range, Tick, is_drawable, short, weighted_range};
use super::thin::{LineSegment, thin};
use super::{COLORS, DASHES, STYLE, at, shorten, width};

/// Curves with at most this many points show each point, with its numbers.
const MAX_DOTS: usize = 120;

/// Height of the numbers below the plot, with the axis' name.
const BELOW: f64 = 36.0;

/// Pixels on the right of a plot without labels of curves.
const LEAST_ROOM: f64 = 12.0;

/// Half the width of the arrow of a value above the plot.
const ARROW: f64 = 4.0;

/// A line that leaves the plot is drawn up to this many pixels beyond it.
const BEYOND: f64 = 1e5;

const LABEL_DISTANCE: f64 = 15.0;

/// The look of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Look {
    /// The colour, from 0; colours repeat.
    pub color: usize,
    /// The dashes, 0 for a solid line; dashes repeat.
    pub dash: usize,
    /// Whether each point has a dot, for curves with few points.
    pub dots: bool,
    /// Whether the curve is the background of another curve, without a label.
    pub faint: bool,
}

impl Look {
    /// Returns the look of curve `index`. Curves differ in colour and dashes.
    pub fn nth(index: usize) -> Self {
        Look { color: index, dash: index, ..Look::default() }
    }

    pub(crate) fn color_class(&self) -> String {
        format!("s{}", self.color % COLORS)
    }

    pub(crate) fn line_class(&self) -> String {
        let faint = if self.faint { " faint" } else { "" };
        format!("line d{}{faint}", self.dash % DASHES)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub label: String,
    /// The points, in order; values that are not finite are gaps.
    pub points: Vec<(f64, f64)>,
    pub look: Look,
}

/// The size of a drawn chart in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    pub width: f64,
    pub height: f64,
    /// Whether to leave room for labels at the ends of the curves.
    pub labels: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct LineChart {
    pub title: String,
    /// The unit of the values.
    pub unit: String,
    /// The curves in words, for readers who do not see them.
    pub description: String,
    pub across: String,
    /// Whether the horizontal axis has whole numbers from 0, such as layers.
    pub whole: bool,
    pub from_zero: bool,
    /// Whether the horizontal axis is logarithmic. Places up to 0 are at its left end.
    pub log_across: bool,
    /// Whether the vertical axis is logarithmic, starting at the least positive value.
    pub log_values: bool,
    pub lines: Vec<Line>,
    /// The marks, from left to right.
    pub marks: Vec<Mark>,
    /// Places of steps that were not applied: short lines at the bottom.
    pub skipped: Vec<f64>,
    /// Values that should be seen, even if they are far above the others.
    pub seen: Vec<f64>,
    /// Whether all values should be seen, even a few far above the others.
    pub all_seen: bool,
    /// Whether the chart compares runs. Then a single curve also has its label.
    pub compares: bool,
    /// A separate value with its label: a dashed line, which should be seen.
    pub reference: Option<(f64, String)>,
}

/// The place of the plot in the drawing, and its axes.
struct Plot {
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
    across: Axis,
    values: Axis,
}

impl Plot {
    fn contains(&self, x: f64, y: f64) -> bool {
        self.across.contains(x) && self.values.shows(y) && self.values.contains(y)
    }

    fn x(&self, value: f64) -> f64 {
        self.left + self.across.place(value) * (self.right - self.left)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - self.values.place(value) * (self.bottom - self.top)
    }
}

/// Returns the width of a point of a curve on a logarithmic axis: half of the distance to each neighbour.
fn width_on_log(points: &[(f64, f64)], index: usize) -> f64 {
    let log = |index: usize| points.get(index).map(|point| point.0.ln()).filter(|x| x.is_finite());
    let Some(here) = log(index) else { return 0.0 };
    let before = index.checked_sub(1).and_then(log).unwrap_or(here);
    let after = log(index + 1).unwrap_or(here);
    (0.5 * (after - before)).max(0.0)
}

impl LineChart {
    /// Returns whether the chart has no value to draw.
    pub fn is_empty(&self) -> bool {
        !self.lines.iter().flat_map(|line| &line.points).any(|point| is_drawable(point.1))
    }

    pub fn labelled(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| !line.look.faint)
    }

    /// Returns whether the curves need their labels. A single curve is named by the title, unless the chart compares
    /// runs.
    pub fn needs_labels(&self) -> bool {
        self.labelled().count() > usize::from(!self.compares)
    }

    pub fn draw(&self, size: Size) -> Markup {
        self.svg(size, 0.0, html! {})
    }

    /// Returns the chart as a separate file, with its title.
    pub fn to_svg(&self, size: Size) -> String {
        let heading = html! {
            style { (PreEscaped(STYLE)) }
            rect class="back" width="100%" height="100%" {}
            text class="heading" x="12" y="24" { (self.title) }
            text class="quiet" x="12" y="42" { (self.unit) }
        };
        format!("{}\n", self.svg(size, 50.0, heading).into_string())
    }

    /// Returns the SVG with `heading` in its upper `above` pixels.
    fn svg(&self, size: Size, above: f64, heading: Markup) -> Markup {
        let Size { width, height, .. } = size;
        let values = self.values();
        let across = self.range_across();
        let up = values.ticks(((height - above) / 48.0) as usize, 0.0);
        let left = up.iter().map(|tick| super::width(&tick.label)).fold(20.0, f64::max) + 14.0;
        let right = width - self.label_room(size);
        let place = |value| left + across.place(value) * (right - left);
        let shown = self.marks.iter().take(marks::MAX_MARKS);
        let labels_of_marks = shown.map(|mark| (place(mark.at), mark.label.clone()));
        let mark_labels = marks::place_labels(labels_of_marks, left, width);
        let above_values = self.above(values);
        let labels_above = above_values
            .iter()
            .map(|(_, (x, value))| (place(*x) + ARROW, format!("up to {}", short(*value))));
        let above_labels = marks::place_labels(labels_above, left, width);
        let marks_end = above + 10.0 + marks::height(&mark_labels);
        let top = marks_end + marks::height(&above_labels);
        let plot = Plot { left, top, right, bottom: height - BELOW, across, values };
        html! {
            svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img"
                viewBox={ "0 0 " (at(width)) " " (at(height)) } width=(at(width)) height=(at(height)) {
                title { (self.title) }
                desc { (self.description) }
                (heading)
                (self.axes(&plot, &up))
                (marks::draw(&mark_labels, marks_end, plot.bottom))
                (arrows(&above_values, &above_labels, plot.top))
                (self.skipped_steps(&plot))
                (self.curves(&plot))
                @if size.labels { (self.end_labels(&plot, width)) }
            }
        }
    }

    fn values(&self) -> Axis {
        let scaled = |value: f64| if self.log_values { value.log10() } else { value };
        let is_log = self.range_across().is_log();
        let lines = self.lines.iter().flat_map(|line| {
            let weights = line.points.iter().enumerate().map(move |(index, _)| match is_log {
                true => width_on_log(&line.points, index),
                false => 1.0,
            });
            line.points.iter().zip(weights).map(|(point, weight)| (scaled(point.1), weight))
        });
        let seen = self.seen.iter().copied().chain(self.reference.iter().map(|known| known.0));
        let seen: Vec<f64> = seen.map(scaled).collect();
        let from_zero = self.from_zero && !self.log_values;
        let range = match self.all_seen {
            true => Range::of_all(lines.map(|(value, _)| value).chain(seen), from_zero),
            false => weighted_range(lines, &seen, from_zero),
        };
        if self.log_values { Axis::log(range) } else { Axis::linear(range) }
    }

    fn range_across(&self) -> Axis {
        let points = self.lines.iter().flat_map(|line| &line.points).map(|point| point.0);
        let marks = self.marks.iter().map(|mark| mark.at);
        let places = || points.clone().chain(marks.clone()).filter(|&x| is_drawable(x));
        let high = places().fold(0.0, f64::max);
        if self.log_across && high > 0.0 {
            let low = places().filter(|&x| x > 0.0).fold(high, f64::min);
            return Axis::log(Range { low: low.log10(), high: high.log10() });
        }
        Axis::linear(match self.whole {
            true => Range { low: -0.5, high: high + 0.5 },
            false => Range { low: 0.0, high: if high > 0.0 { high } else { 1.0 } },
        })
    }

    /// Returns the pixels on the right for the labels of curves.
    fn label_room(&self, size: Size) -> f64 {
        let labels = self.labelled().map(|line| bold_width(&line.label));
        match size.labels && self.needs_labels() {
            true => (labels.fold(0.0, f64::max) + 18.0).min(size.width * 0.24),
            false => LEAST_ROOM,
        }
    }

    fn axes(&self, plot: &Plot, values: &[Tick]) -> Markup {
        let least = if self.whole { 1.0 } else { 0.0 };
        let across = plot.across.ticks(((plot.right - plot.left) / 76.0) as usize, least);
        html! {
            @for Tick { value, label } in values {
                @let y = plot.y(*value);
                path class="rule" d={ "M" (at(plot.left)) " " (at(y)) "H" (at(plot.right)) } {}
                text class="quiet" x=(at(plot.left - 7.0)) y=(at(y + 4.0)) text-anchor="end" { (label) }
            }
            path class="base" d={ "M" (at(plot.left)) " " (at(plot.bottom)) "H" (at(plot.right)) } {}
            @for Tick { value, label } in &across {
                @let x = plot.x(*value);
                path class="base" d={ "M" (at(x)) " " (at(plot.bottom)) "v4" } {}
                // The last label may be wider than the room right of the plot, and in some fonts wider than its
                // estimate.
                @let edge = plot.right + LEAST_ROOM - 1.0;
                @let is_last = x + 0.6 * width(label) > edge;
                @let (x, anchor) = if is_last { (edge, "end") } else { (x, "middle") };
                text class="quiet" x=(at(x)) y=(at(plot.bottom + 17.0)) text-anchor=(anchor) {
                    (label)
                }
            }
            text class="quiet" x=(at(plot.right)) y=(at(plot.bottom + 32.0)) text-anchor="end" { (self.across) }
            @if let Some((value, label)) = self.reference.as_ref().filter(|(value, _)| plot.values.contains(*value)) {
                @let y = plot.y(*value);
                path class="mark" d={ "M" (at(plot.left)) " " (at(y)) "H" (at(plot.right)) } {}
                text class="quiet" x=(at(plot.right)) y=(at(y - 4.0)) text-anchor="end" { (label) }
            }
        }
    }

    fn skipped_steps(&self, plot: &Plot) -> Markup {
        // Steps at the same pixel share a line.
        let mut places: Vec<i64> = self.skipped.iter().map(|&x| plot.x(x).round() as i64).collect();
        places.sort_unstable();
        places.dedup();
        let bottom = at(plot.bottom);
        let path: String = places.iter().map(|x| format!("M{x} {bottom}v-9")).collect();
        html! {
            @if !path.is_empty() { path class="alarm" d=(path) {} }
        }
    }

    /// Returns the curves. An SVG within the SVG cuts them off at the edges of the plot.
    fn curves(&self, plot: &Plot) -> Markup {
        let (wide, high) = (plot.right - plot.left, plot.bottom - plot.top);
        html! {
            svg x=(at(plot.left)) y=(at(plot.top)) width=(at(wide)) height=(at(high)) {
                @for line in &self.lines { (curve(line, plot)) }
            }
            @for line in &self.lines { (dots(line, plot)) }
        }
    }

    /// Returns the curves with values above the plot, each with its highest point. A faint curve replaces the curve of
    /// its means over it, which has lost the peaks.
    fn above(&self, values: Axis) -> Vec<(&Line, (f64, f64))> {
        let highest = |line: &Line| {
            let points = line.points.iter().copied().filter(|point| is_drawable(point.1));
            points.reduce(|most, point| if point.1 > most.1 { point } else { most })
        };
        let found = self.lines.iter().filter_map(|line| Some((line, highest(line)?)));
        let found: Vec<_> = found.filter(|(_, (_, value))| values.is_below(*value)).collect();
        let is_higher = |a: &(&Line, (f64, f64)), b: &(&Line, (f64, f64))| {
            let is_background = a.0.look.faint && !b.0.look.faint;
            is_background && a.0.look.color == b.0.look.color && a.1.1 >= b.1.1
        };
        let is_highest =
            |one: &&(&Line, (f64, f64))| !found.iter().any(|other| is_higher(other, one));
        let mut found: Vec<_> = found.iter().filter(is_highest).copied().collect();
        found.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
        found
    }

    /// Returns the curves' labels on the right, at the heights of the curves' ends, without overlaps.
    fn end_labels(&self, plot: &Plot, edge: f64) -> Markup {
        if !self.needs_labels() {
            return html! {};
        }
        let end = |line: &Line| {
            line.points.iter().rev().find(|point| plot.values.shows(point.1)).copied()
        };
        let ends = self.labelled().filter_map(|line| Some((plot.y(end(line)?.1), line)));
        let mut ends: Vec<(f64, &Line)> =
            ends.map(|(y, line)| (y.clamp(plot.top + 6.0, plot.bottom), line)).collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let places = apart(ends.iter().map(|end| end.0).collect(), LABEL_DISTANCE, plot.bottom);
        let most = ((edge - plot.right - 8.0) / bold_width("m")) as usize;
        html! {
            @for ((_, line), y) in ends.iter().zip(places) {
                text class={ "label " (line.look.color_class()) } x=(at(plot.right + 8.0)) y=(at(y + 4.0)) {
                    (shorten(&line.label, most))
                }
            }
        }
    }
}

/// Returns arrows and numbers for values above a plot that begins at `top`.
fn arrows(values: &[(&Line, (f64, f64))], labels: &[Placed], top: f64) -> Markup {
    html! {
        @for ((line, _), label) in values.iter().zip(labels) {
            @if let Some(base) = marks::base_line(label, top) {
                g class=(line.look.color_class()) {
                    path class="arrow" d={ "M" (at(label.x - ARROW)) " " (at(base - 8.0)) "l4 8h-8z" } {}
                    text class="label" x=(at(label.start)) y=(at(base)) { (label.label) }
                }
            }
        }
    }
}

/// Returns the approximate width of a label in bold, in pixels.
fn bold_width(text: &str) -> f64 {
    1.15 * width(text)
}

/// Moves places, ascending, so that neighbours are `distance` apart and the last is at most `bottom`. Without room,
/// places may be above the plot.
fn apart(mut places: Vec<f64>, distance: f64, bottom: f64) -> Vec<f64> {
    let mut least = f64::NEG_INFINITY;
    for place in &mut places {
        *place = place.max(least);
        least = *place + distance;
    }
    let mut most = bottom;
    for place in places.iter_mut().rev() {
        *place = place.min(most);
        most = *place - distance;
    }
    places
}

/// Returns the points of a curve that the pixels of a plot can show.
fn thinned(line: &Line, plot: &Plot) -> Vec<LineSegment> {
    let columns = (plot.right - plot.left).max(1.0) as usize;
    let shown = |&(x, y): &(f64, f64)| (x, if plot.values.shows(y) { y } else { f64::NAN });
    thin(line.points.iter().map(shown), plot.across, columns)
}

/// Returns a curve as a path, in the coordinates of the plot. A point without neighbours is a dot.
fn curve(line: &Line, plot: &Plot) -> Markup {
    let segments = thinned(line, plot);
    let place = |&(x, y): &(f64, f64)| {
        (at(plot.x(x) - plot.left), at((plot.y(y) - plot.top).clamp(-BEYOND, BEYOND)))
    };
    let mut path = String::new();
    for segment in segments.iter().filter(|segment| segment.len() > 1) {
        for (number, (x, y)) in segment.iter().map(place).enumerate() {
            let begin = if number == 0 { "M" } else { " " };
            path.extend([begin, &x, " ", &y]);
        }
    }
    html! {
        g class=(line.look.color_class()) {
            path class=(line.look.line_class()) d=(path) {}
        }
    }
}

/// Returns the points of a curve as dots that name their values, if there are not too many. If the curve has no dots,
/// returns its points without neighbours.
fn dots(line: &Line, plot: &Plot) -> Markup {
    let is_seen = |&(x, y): &(f64, f64)| plot.contains(x, y);
    let all = line.look.dots;
    let points: Vec<(f64, f64)> = match all {
        true => line.points.iter().copied().filter(is_seen).collect(),
        false => {
            let lone = thinned(line, plot).into_iter().filter(|segment| segment.len() == 1);
            lone.flatten().filter(is_seen).collect()
        }
    };
    html! {
        @if !all || points.len() <= MAX_DOTS {
            g class=(line.look.color_class()) {
                @for (x, y) in points {
                    circle class="dot" r="3.5" cx=(at(plot.x(x))) cy=(at(plot.y(y))) {
                        @if all { title { (line.label) ": " (short(y)) " at " (short(x)) } }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
