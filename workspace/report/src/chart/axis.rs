//! An axis of a chart, linear or logarithmic: the places of values, and its ticks.

use super::scale::{Range, Tick, is_drawable, round, ticks};

/// Digits of ticks within a power of ten, from few to many ticks.
const DIGITS: [&[f64]; 5] = [
    &[1.0],
    &[1.0, 3.0],
    &[1.0, 2.0, 5.0],
    &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
    &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
];

/// A logarithmic axis that is shorter than this, in powers of ten, has the ticks of a linear axis.
const NEARLY_LINEAR: f64 = 0.3;

/// A logarithmic axis that is shorter than this, in powers of ten, is extended to a whole power.
const LEAST_DECADES: f64 = 1e-3;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Axis {
    /// The range of the values, or of their decimal logarithms.
    range: Range,
    is_log: bool,
}

impl Axis {
    pub(super) fn linear(range: Range) -> Self {
        Axis { range, is_log: false }
    }

    /// Returns a logarithmic axis. `range` is the range of the values' decimal logarithms.
    pub(super) fn log(range: Range) -> Self {
        let is_short = range.high - range.low < LEAST_DECADES;
        let low = if is_short { range.high - 1.0 } else { range.low };
        Axis { range: Range { low, ..range }, is_log: true }
    }

    pub(super) fn is_log(&self) -> bool {
        self.is_log
    }

    fn scaled(&self, value: f64) -> f64 {
        if self.is_log { value.log10() } else { value }
    }

    /// Returns whether the axis can show a value, in its range or not. A logarithmic axis shows only positive values.
    pub(super) fn shows(&self, value: f64) -> bool {
        is_drawable(value) && is_drawable(self.scaled(value))
    }

    /// Returns the place of a value, 0 at the low end and 1 at the high end. A logarithmic axis places smaller values,
    /// and 0, at its low end.
    pub(super) fn place(&self, value: f64) -> f64 {
        let place = self.range.place(self.scaled(value));
        if self.is_log { place.max(0.0) } else { place }
    }

    pub(super) fn contains(&self, value: f64) -> bool {
        match self.is_log {
            true => is_drawable(value) && self.place(value) <= 1.0,
            false => self.range.contains(value),
        }
    }

    pub(super) fn is_below(&self, value: f64) -> bool {
        self.scaled(value) > self.range.high
    }

    /// Returns about `most` ticks. On a linear axis they are at least `least` apart.
    pub(super) fn ticks(&self, most: usize, least: f64) -> Vec<Tick> {
        let Range { low, high } = self.range;
        if !self.is_log {
            return ticks(self.range, most, least);
        }
        if high - low < NEARLY_LINEAR {
            return ticks(Range { low: 10f64.powf(low), high: 10f64.powf(high) }, most, least);
        }
        let most = most.max(2);
        let decades: Vec<i32> = (low.floor() as i32..=high.floor() as i32).collect();
        let of = |digits: &[f64]| -> Vec<f64> {
            let values = decades
                .iter()
                .flat_map(|&power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
            values.filter(|value| (low..=high).contains(&value.log10())).collect()
        };
        let found =
            DIGITS.iter().rev().map(|digits| of(digits)).find(|values| values.len() <= most);
        let values = found.unwrap_or_else(|| {
            let powers = of(DIGITS[0]);
            let every = powers.len().div_ceil(most);
            powers.into_iter().step_by(every).collect()
        });
        values.into_iter().map(|value| Tick { value, label: round(value) }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64, most: usize) -> Vec<String> {
        let axis = Axis::log(Range { low: low.log10(), high: high.log10() });
        axis.ticks(most, 0.0).into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_of_a_logarithmic_axis_are_round() {
        assert_eq!(labels(1e6, 2e9, 5), ["1 M", "10 M", "100 M", "1 B"]);
        assert_eq!(labels(1.4, 8.0, 7), ["1.5", "2", "3", "5", "7"]);
        assert_eq!(labels(0.02, 0.6, 4), ["0.03", "0.1", "0.3"]);
        assert_eq!(labels(1.40, 1.46, 3), ["1.40", "1.42", "1.44", "1.46"]);
        assert_eq!(labels(64.0, 1e15, 5), ["100", "100 k", "100 M", "100 B", "100 T"]);
        for (low, high) in [(1.0, 1.0), (1e-90, 1e90), (5.0, 5.1), (1e-12, 3e-12)] {
            assert!((1..=12).contains(&labels(low, high, 5).len()), "{:?}", labels(low, high, 5));
        }
    }

    #[test]
    fn what_has_no_logarithm_is_at_the_low_end_or_not_shown() {
        let axis = Axis::log(Range { low: 2.0, high: 4.0 });
        assert_eq!(
            [0.0, -5.0, 1.0, 1e2, 1e3, 1e4].map(|value| axis.place(value)),
            [0.0, 0.0, 0.0, 0.0, 0.5, 1.0]
        );
        assert_eq!(
            [0.0, -5.0, f64::NAN, 1.0].map(|value| axis.shows(value)),
            [false, false, false, true]
        );
        assert!(axis.contains(0.0) && axis.contains(1e4) && !axis.contains(1.1e4));
        assert!(axis.is_below(1.1e4) && !axis.is_below(1e4) && !axis.is_below(f64::NAN));
    }
}
