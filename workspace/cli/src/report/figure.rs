//! A chart on a page: its caption, the chart for wide and for narrow pages, and the key to its curves.

use maud::{Markup, html};

use crate::chart::{Line, LineChart, Size};

/// A chart across the page.
const WIDE: Size = Size { width: 1180.0, height: 400.0, labels: true };

/// A chart of a third of the page, or of a phone's width.
const PANEL: Size = Size { width: 400.0, height: 240.0, labels: false };

/// The same for the charts that a wide page shows across.
const TALL_PANEL: Size = Size { width: 400.0, height: 300.0, labels: false };

/// A chart across the page: two drawings, of which the style shows the one that fits.
pub(super) fn wide(chart: &LineChart) -> Markup {
    html! {
        figure class="across" {
            (caption(chart))
            div class="wide" { (chart.draw(WIDE)) }
            div class="narrow" { (key(chart)) (chart.draw(TALL_PANEL)) }
        }
    }
}

/// A chart beside others.
pub(super) fn panel(chart: &LineChart) -> Markup {
    html! { figure { (caption(chart)) (key(chart)) (chart.draw(PANEL)) } }
}

fn caption(chart: &LineChart) -> Markup {
    html! {
        figcaption {
            strong { (chart.title) }
            @if !chart.unit.is_empty() { " " span class="unit" { (chart.unit) } }
        }
    }
}

/// The curves' labels with a piece of each, if the chart needs them.
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

/// A piece of a curve.
pub(super) fn sample(line: &Line) -> Markup {
    html! {
        svg class={ "chart sample s" (line.look.color % crate::chart::COLORS) } width="30" height="10"
            viewBox="0 0 30 10" aria-hidden="true" {
            path class={ "line d" (line.look.dash % crate::chart::DASHES) } d="M1 5H29" {}
            @if line.look.dots { circle class="dot" cx="15" cy="5" r="3.5" {} }
        }
    }
}
