//! Ranges of a chart's axes, their ticks, and the format of numbers.

/// Values beyond this are not drawn, because their differences could exceed f64.
const LARGEST: f64 = 1e100;

/// The least number of values from which a range may leave out the highest values.
const MANY: usize = 20;

/// A range leaves out values further above its low end than this many times the distance of the third quartile. At most
/// one in [`MANY`] values is left out.
const FENCE: f64 = 4.0;

/// The same limit for values that should be seen.
const WIDE_FENCE: f64 = 20.0;

/// An interval of values. `low` is less than `high`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
}

impl Range {
    /// Returns the place of a value, 0 at the low end and 1 at the high end.
    pub fn place(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    pub fn contains(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// Returns the range of an axis that shows all values.
    pub fn of_all(values: impl IntoIterator<Item = f64>, from_zero: bool) -> Self {
        let values: Vec<f64> = values.into_iter().filter(|&value| is_drawable(value)).collect();
        let Some(lowest) = values.iter().copied().reduce(f64::min) else {
            return Range { low: 0.0, high: 1.0 };
        };
        let low = if from_zero { lowest.min(0.0) } else { lowest };
        let high = values.into_iter().fold(low, f64::max);
        let room = (high - low) * 0.06;
        Range::spread(if from_zero { low } else { low - room }, high + room, from_zero)
    }

    /// Returns the range from `low` to `high`. If they are nearly the same, the range is wider, from zero only upwards.
    fn spread(low: f64, high: f64, from_zero: bool) -> Self {
        let least = (high.abs().max(low.abs()) * 1e-6).max(1e-30);
        let room = least.max(high.abs() * 0.1);
        match high - low < least {
            true if from_zero => Range { low, high: low + room },
            true => Range { low: low - room, high: high + room },
            false => Range { low, high },
        }
    }
}

/// Returns whether a chart can show a value.
pub fn is_drawable(value: f64) -> bool {
    value.abs() < LARGEST
}

/// Returns the range of an axis, without a few values far above the others, such as the first steps of a new model or a
/// failed step. They would leave no room for the rest. The weight of a value is the width that it has across the chart.
/// Values of `seen` do not count as others. They are left out only if the others would shrink to a line.
pub fn weighted_range(
    values: impl IntoIterator<Item = (f64, f64)>,
    seen: &[f64],
    from_zero: bool,
) -> Range {
    let mut values: Vec<(f64, f64)> =
        values.into_iter().filter(|&(value, _)| is_drawable(value)).collect();
    values.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let all = || values.iter().map(|&(value, _)| value);
    let total: f64 = values.iter().map(|&(_, weight)| weight).sum();
    let lowest = all().next().filter(|_| values.len() >= MANY && total > 0.0);
    let Some(lowest) = lowest else {
        return Range::of_all(all().chain(seen.iter().copied()), from_zero);
    };
    let low = if from_zero { lowest.min(0.0) } else { lowest };
    let most = first_beyond(values.iter(), total * 0.75);
    // At most this share of the weights, from the highest values on, is left out.
    let nearly_all = first_beyond(values.iter().rev(), total / MANY as f64);
    // If the values have no spread, every difference is shown.
    let limit = |fence| if most > low { low + fence * (most - low) } else { f64::INFINITY };
    let fence = limit(FENCE).max(nearly_all);
    let near = all().filter(|&value| value <= fence);
    let seen = seen.iter().copied().filter(|&value| value <= limit(WIDE_FENCE));
    Range::of_all(near.chain(seen), from_zero)
}

/// Returns the first value at which the sum of the weights exceeds `limit`, or the last value.
fn first_beyond<'a>(values: impl Iterator<Item = &'a (f64, f64)>, limit: f64) -> f64 {
    let (mut sum, mut last) = (0.0, f64::NAN);
    for &(value, weight) in values {
        (sum, last) = (sum + weight, value);
        if sum > limit {
            break;
        }
    }
    last
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    pub value: f64,
    pub label: String,
}

/// Returns about `most` ticks within `range`, ascending, at multiples of 1, 2 or 5 times a power of ten, and at least
/// `least` apart.
pub fn ticks(range: Range, most: usize, least: f64) -> Vec<Tick> {
    let rough = ((range.high - range.low) / most.max(1) as f64).max(least);
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let is_enough = |step: &f64| *step >= rough * 0.75 && *step >= least;
    let step = steps.into_iter().find(is_enough).unwrap_or(10.0 * power);
    let first = (range.low / step).ceil();
    let values: Vec<f64> = (0..=2 * most.max(1))
        .map(|index| (first + index as f64) * step)
        .take_while(|&value| value <= range.high)
        .collect();
    let largest = values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    values
        .into_iter()
        .map(|value| Tick { value, label: tick_label(value, step, largest) })
        .collect()
}

/// Returns the label of a tick. All ticks of an axis, up to the absolute value `largest`, have the same unit and
/// decimals.
fn tick_label(value: f64, step: f64, largest: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let (unit, suffix) = unit_of(largest);
    let step = step / unit;
    let is_small = largest < 1e-3 && step < 1e-4;
    if is_small || largest >= 1e15 {
        return scientific(value);
    }
    let decimals = (-step.log10() - 1e-9).ceil().max(0.0) as usize;
    format!("{:.decimals$}{suffix}", value / unit)
}

/// Returns the unit in which numbers up to `largest` are short, and its suffix: B is 10^9, as in "8B parameters".
fn unit_of(largest: f64) -> (f64, &'static str) {
    match largest {
        l if l >= 1e15 => (1.0, ""),
        l if l >= 1e12 => (1e12, " T"),
        l if l >= 1e9 => (1e9, " B"),
        l if l >= 1e6 => (1e6, " M"),
        l if l >= 1e4 => (1e3, " k"),
        _ => (1.0, ""),
    }
}

/// Returns a number in scientific notation without needless digits: `1.5e-5`.
fn scientific(value: f64) -> String {
    let text = format!("{value:.3e}");
    match text.split_once('e') {
        Some((digits, power)) if digits.contains('.') => {
            format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text,
    }
}

/// Returns a number without needless digits: `1.5 M`.
pub fn round(value: f64) -> String {
    let (unit, suffix) = unit_of(value.abs());
    match (value / unit).abs() {
        0.0 => "0".to_owned(),
        a if suffix.is_empty() && !(1e-3..1e15).contains(&a) => scientific(value),
        _ => {
            let text = format!("{:.6}", value / unit);
            format!("{}{suffix}", text.trim_end_matches('0').trim_end_matches('.'))
        }
    }
}

/// Returns a number in running text: four significant digits with a unit, such as `1.147 M`; `-` if it is not finite.
pub fn short(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    let (unit, suffix) = unit_of(value.abs());
    let scaled = value / unit;
    match scaled.abs() {
        0.0 => "0".to_owned(),
        a if suffix.is_empty() && !(1e-3..1e15).contains(&a) => scientific(value),
        a if suffix.is_empty() && value.fract() == 0.0 && a < 1e4 => format!("{value:.0}"),
        a => {
            let decimals = (3.0 - a.log10().floor()).clamp(0.0, 6.0) as usize;
            format!("{scaled:.decimals$}{suffix}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the range of values of the same weight.
    fn value_range(values: impl IntoIterator<Item = f64>, seen: &[f64], from_zero: bool) -> Range {
        weighted_range(values.into_iter().map(|value| (value, 1.0)), seen, from_zero)
    }

    fn labels(low: f64, high: f64, most: usize) -> Vec<String> {
        ticks(Range { low, high }, most, 0.0).into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_are_round_and_written_alike() {
        assert_eq!(labels(0.0, 1_800_000.0, 5), ["0", "0.5 M", "1.0 M", "1.5 M"]);
        assert_eq!(labels(0.41, 0.57, 4), ["0.45", "0.50", "0.55"]);
        assert_eq!(labels(0.0, 6.1e-5, 2), ["0", "5e-5"]);
        assert_eq!(labels(0.0, 6.1e-5, 4), ["0", "2e-5", "4e-5", "6e-5"]);
        assert_eq!(labels(0.0, 3e-3, 3), ["0", "0.001", "0.002", "0.003"]);
        assert_eq!(labels(0.0, 4e11, 4), ["0", "100 B", "200 B", "300 B", "400 B"]);
        assert_eq!(labels(1.0001, 1.0003, 2), ["1.0001", "1.0002", "1.0003"]);
        assert_eq!(labels(-1.5, 1.5, 3), ["-1", "0", "1"]);
        assert_eq!(labels(0.0, 6e20, 3), ["0", "2e20", "4e20", "6e20"]);
    }

    #[test]
    fn ticks_of_layers_are_whole() {
        let ticks = ticks(Range { low: -0.5, high: 2.5 }, 8, 1.0);
        assert!(ticks.iter().map(|tick| tick.value).eq([0.0, 1.0, 2.0]), "{ticks:?}");
    }

    #[test]
    fn few_values_far_above_the_others_are_left_out() {
        let all = value_range([vec![2.0; 95], vec![4.0]].concat(), &[], false);
        assert!(all.low < 2.0 && all.high > 4.0, "without a spread there is no fence: {all:?}");
        let values: Vec<f64> = (0..100).map(|n| 1.0 + f64::from(n) / 100.0).collect();
        let with = |value: f64, seen: &[f64]| {
            value_range(values.iter().copied().chain([value]), seen, false).high
        };
        assert!((1.99..2.2).contains(&with(7.0, &[])), "{}", with(7.0, &[]));
        assert!(with(2.5, &[]) > 2.5);
        assert!(with(7.0, &[7.0]) > 7.0);
        assert!(with(70.0, &[70.0]) < 2.2);
        // Values that are far above in a tenth of the steps are shown.
        let tenth = value_range(values.iter().copied().chain([50.0; 10]), &[], false).high;
        assert!(tenth > 50.0, "{tenth}");
        // Among few values, no value is left out.
        assert!(value_range([1.0, 1.1, 9.0], &[], false).high > 9.0);
    }

    #[test]
    fn every_input_gives_a_range() {
        for values in [
            vec![],
            vec![f64::NAN],
            vec![0.0],
            vec![5.0],
            vec![-3.0, -3.0],
            vec![f64::MAX, f64::MIN, f64::INFINITY],
            vec![1e99, -1e99],
            vec![1e-300; 50],
        ] {
            for from_zero in [false, true] {
                let range = value_range(values.iter().copied(), &values, from_zero);
                assert!(
                    range.low < range.high && (range.high - range.low).is_finite(),
                    "{values:?}"
                );
                let ticks = ticks(range, 5, 0.0);
                assert!(ticks.len() <= 11, "{values:?}: {ticks:?}");
                assert!(ticks.iter().all(|tick| !tick.label.is_empty()));
            }
        }
        let one = value_range([5.0], &[], true);
        assert!(one.low == 0.0 && one.high > 5.0, "{one:?}");
    }

    #[test]
    fn numbers_in_text_are_short() {
        let shown =
            [0.0, 7.0, 0.43404, 1_146_880.0, 11_293.4, 4e11, 3.2e-5, 1e300, f64::NAN].map(short);
        let expected =
            ["0", "7", "0.4340", "1.147 M", "11.29 k", "400.0 B", "3.2e-5", "1e300", "-"];
        assert_eq!(shown, expected);
    }
}
