//! A chart on a page: its caption, the key to its curves, and drawings for wide and narrow pages and for each choice of
//! axes.

use maud::{Markup, html};

use crate::chart::{HeatMap, Line, LineChart, Size};

const WIDE: Size = Size { width: 1180.0, height: 400.0, labels: true };

/// A chart with a third of the page's width, or with a phone's width.
const PANEL: Size = Size { width: 400.0, height: 240.0, labels: false };

/// The same for charts that a wide page shows across.
const TALL_PANEL: Size = Size { width: 400.0, height: 300.0, labels: false };

/// The choices of axes: the class of the drawings, and the name. The style shows the drawings of the chosen class.
const AXES: [(&str, &str); 3] = [
    ("linear", "linear"),
    ("log-tokens", "logarithmic tokens"),
    ("log-both", "logarithmic tokens, losses and norms"),
];

/// Returns the input that chooses the axes of all charts over tokens.
pub(super) fn axes() -> Markup {
    html! {
        fieldset class="axes" {
            legend { "Axes" }
            @for (number, (class, name)) in AXES.into_iter().enumerate() {
                label {
                    input type="radio" name="axes" id={ "axes-" (class) } checked[number == 0];
                    (name)
                }
            }
        }
    }
}

/// Returns a chart over tokens across the page, for each choice of axes. The style shows its wide or its narrow
/// drawing.
pub(super) fn wide(chart: &LineChart) -> Markup {
    let drawn = |chart: &LineChart| {
        html! {
            div class="wide" { (chart.draw(WIDE)) }
            div class="narrow" { (key(chart)) (chart.draw(TALL_PANEL)) }
        }
    };
    html! {
        figure class="across" {
            (caption(&chart.title, &chart.unit))
            @for ((class, _), log_values) in AXES.into_iter().zip([false, false, true]) {
                div class=(class) { (drawn(&with_axes(chart, class != "linear", log_values))) }
            }
        }
    }
}

/// Returns a chart over tokens beside other charts, for each choice of axes that changes it. Its values can be
/// logarithmic only with `log_values`.
pub(super) fn panel_over_tokens(chart: &LineChart, log_values: bool) -> Markup {
    let drawn = |class: &str, log_across, log_values| {
        html! { div class=(class) { (with_axes(chart, log_across, log_values).draw(PANEL)) } }
    };
    html! {
        figure {
            (caption(&chart.title, &chart.unit)) (key(chart))
            (drawn("linear", false, false))
            @if log_values {
                (drawn("log-tokens", true, false))
                (drawn("log-both", true, true))
            } @else {
                (drawn("log-tokens log-both", true, false))
            }
        }
    }
}

fn with_axes(chart: &LineChart, log_across: bool, log_values: bool) -> LineChart {
    LineChart { log_across, log_values, ..chart.clone() }
}

pub(super) fn panel(chart: &LineChart) -> Markup {
    html! { figure { (caption(&chart.title, &chart.unit)) (key(chart)) (chart.draw(PANEL)) } }
}

/// Returns a map beside other maps.
pub(super) fn map(map: &HeatMap) -> Markup {
    html! {
        figure {
            (caption(&map.title, ""))
            (map.draw())
            @if !map.description.is_empty() { p class="note" { (map.description) } }
        }
    }
}

pub(super) fn caption(title: &str, unit: &str) -> Markup {
    html! {
        figcaption {
            strong { (title) }
            @if !unit.is_empty() { " " span class="unit" { (unit) } }
        }
    }
}

/// Returns the curves' labels with a sample of each curve, if the chart needs labels.
fn key(chart: &LineChart) -> Markup {
    html! {
        @if chart.needs_labels() {
            ul class="key" {
                @for line in chart.labelled() {
                    li { (sample(line)) (line.label) }
                }
            }
        }
    }
}

pub(super) fn sample(line: &Line) -> Markup {
    html! {
        svg class={ "chart sample " (line.look.color_class()) } width="30" height="10"
            viewBox="0 0 30 10" aria-hidden="true" {
            path class=(line.look.line_class()) d="M1 5H29" {}
            @if line.look.dots { circle class="dot" cx="15" cy="5" r="3.5" {} }
        }
    }
}
