//! A plot of a run: curves over steps, with the starts of stages, as SVG.

use std::path::Path;

use anyhow::Context as _;
use plotters::prelude::*;
use plotters::style::FontTransform;

const SIZE: (u32, u32) = (960, 480);
/// Pixels from a mark's line to its label.
const LABEL_OFFSET: (i32, i32) = (6, 2);
const COLORS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(214, 39, 40), RGBColor(44, 160, 44), RGBColor(148, 103, 189)];

/// One curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Label in the legend.
    pub label: String,
    /// (step, value), in order.
    pub points: Vec<(f64, f64)>,
    /// Whether to draw each point as a dot: for curves of few points.
    pub dots: bool,
}

/// A vertical line with a label.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Its step.
    pub step: f64,
    /// Its label.
    pub label: String,
}

/// A plot of curves over steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// Its title.
    pub title: String,
    /// Label of the vertical axis.
    pub unit: String,
    /// The curves.
    pub curves: Vec<Curve>,
    /// The starts of the stages.
    pub marks: Vec<Mark>,
}

impl Curve {
    /// The highest finite value.
    fn highest(&self) -> Option<f64> {
        self.points.iter().map(|point| point.1).filter(|value| value.is_finite()).reduce(f64::max)
    }

    /// The label in the legend, which names a highest value above the axis.
    fn shown_label(&self, top: f64) -> String {
        match self.highest() {
            Some(highest) if highest > top => {
                format!("{}, above the axis up to {highest:.2}", self.label)
            }
            _ => self.label.clone(),
        }
    }
}

impl Plot {
    /// Writes the SVG; without any finite point it has only axes.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut svg = String::new();
        let file = || path.display().to_string();
        self.draw(&mut svg).map_err(anyhow::Error::msg).with_context(file)?;
        std::fs::write(path, svg).with_context(file)
    }

    /// Ranges of the axes: all steps, and all values except the highest 10% of curves without dots,
    /// which are the first steps of a new model.
    fn ranges(&self) -> (std::ops::Range<f64>, std::ops::Range<f64>) {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let mut values: Vec<f64> =
            points().map(|point| point.1).filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let last = points().map(|point| point.0).fold(1.0, f64::max);
        let (Some(&low), Some(&most)) = (values.first(), values.get(values.len() * 90 / 100))
        else {
            return (0.0..last, 0.0..1.0);
        };
        let dotted = self.curves.iter().filter(|curve| curve.dots);
        let high = dotted.filter_map(Curve::highest).fold(most, f64::max);
        let room = ((high - low) * 0.08).max(1e-3);
        (0.0..last, low - room..high + room)
    }

    fn draw(&self, svg: &mut String) -> Result<(), String> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| error.to_string();
        root.fill(&WHITE).map_err(|error| failed(&error))?;
        let (steps, values) = self.ranges();
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .margin_right(28)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(steps, values.clone())
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .x_desc("step")
            .x_label_formatter(&|step| format!("{step:.0}"))
            .y_desc(&self.unit)
            .light_line_style(WHITE)
            .label_style(("sans-serif", 13))
            .draw()
            .map_err(|error| failed(&error))?;
        for mark in &self.marks {
            let line = [(mark.step, values.start), (mark.step, values.end)];
            chart
                .draw_series(LineSeries::new(line, BLACK.mix(0.4)))
                .map_err(|error| failed(&error))?;
            let style = ("sans-serif", 13).into_font().transform(FontTransform::None);
            let place = (mark.step, values.end);
            chart
                .draw_series([
                    // Beside the line, and so beside the axis at step 0.
                    EmptyElement::at(place) + Text::new(mark.label.clone(), LABEL_OFFSET, style),
                ])
                .map_err(|error| failed(&error))?;
        }
        for (curve, color) in self.curves.iter().zip(COLORS.iter().cycle()) {
            let finite = curve.points.iter().filter(|point| point.1.is_finite());
            let clipped = finite.map(|&(x, y)| (x, y.clamp(values.start, values.end)));
            let width = if curve.dots { 3 } else { 1 };
            chart
                .draw_series(LineSeries::new(clipped.clone(), color.stroke_width(width)))
                .map_err(|error| failed(&error))?
                .label(curve.shown_label(values.end))
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], color.stroke_width(3))
                });
            if curve.dots {
                let dots = clipped.map(|point| Circle::new(point, 4, color.filled()));
                chart.draw_series(dots).map_err(|error| failed(&error))?;
            }
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 14))
            .position(SeriesLabelPosition::UpperRight)
            .draw()
            .map_err(|error| failed(&error))?;
        root.present().map_err(|error| failed(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_finite_are_left_out() {
        let draw = |points: Vec<(f64, f64)>| {
            let curve = Curve { label: "training".into(), points, dots: true };
            let plot = Plot {
                title: "Loss".into(),
                unit: "nats".into(),
                curves: vec![curve],
                marks: Vec::new(),
            };
            let mut svg = String::new();
            plot.draw(&mut svg).unwrap();
            svg
        };
        let finite = draw(vec![(1.0, 2.0), (3.0, 1.0)]);
        assert_eq!(draw(vec![(1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0)]), finite);
    }

    #[test]
    fn a_plot_names_its_curves_and_marks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.svg");
        let plot = Plot {
            title: "run".into(),
            unit: "loss".into(),
            curves: vec![Curve {
                label: "validation".into(),
                points: vec![(1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0)],
                dots: true,
            }],
            marks: vec![Mark { step: 2.0, label: "moh".into() }],
        };
        plot.write(&path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.contains("validation") && svg.contains("moh") && svg.ends_with("</svg>\n"));
        let empty = Plot { curves: vec![], marks: vec![], ..plot };
        empty.write(&path).unwrap();
    }

    #[test]
    fn values_above_the_axis_are_named_and_dots_are_inside() {
        let line = |values: &[f64]| (0..).map(f64::from).zip(values.iter().copied()).collect();
        let training: Vec<(f64, f64)> = line(&[&[9.5][..], &[3.0; 19]].concat());
        let plot = Plot {
            title: "run".into(),
            unit: "loss".into(),
            curves: vec![
                Curve { label: "training".into(), points: training, dots: false },
                Curve { label: "validation".into(), points: vec![(0.0, 4.97)], dots: true },
            ],
            marks: vec![Mark { step: 0.0, label: "adapt".into() }],
        };
        let (_, values) = plot.ranges();
        assert!(values.contains(&4.97) && !values.contains(&9.5), "{values:?}");
        let mut svg = String::new();
        plot.draw(&mut svg).unwrap();
        assert!(svg.contains("training, above the axis up to 9.50"), "{svg}");
        // The label begins right of the axis, which is 12 + 56 pixels from the edge.
        let at = svg.lines().position(|line| line.contains("adapt")).unwrap();
        let text = svg.lines().nth(at - 1).unwrap();
        let x = text.split("x=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(x.parse::<i32>().unwrap(), 68 + LABEL_OFFSET.0, "{text}");
    }
}
