//! Thins a curve to what the pixels of a chart can show. Each column of pixels keeps its first, lowest,
//! highest and last point, so that no spike is lost.

use super::scale::{Range, is_drawable};

/// Points that a line connects.
pub type Segment = Vec<(f64, f64)>;

/// The points of one column.
#[derive(Default)]
struct Column {
    /// Which column; `None` before the first point.
    number: Option<usize>,
    /// The points that are kept: first, lowest, highest, last, each with its position in the curve.
    kept: Option<[(usize, (f64, f64)); 4]>,
}

impl Column {
    fn add(&mut self, at: usize, point: (f64, f64)) {
        let new = (at, point);
        match &mut self.kept {
            None => self.kept = Some([new; 4]),
            Some([_, lowest, highest, last]) => {
                if point.1 < lowest.1.1 {
                    *lowest = new;
                }
                if point.1 > highest.1.1 {
                    *highest = new;
                }
                *last = new;
            }
        }
    }

    /// Moves the points into the last of `segments`. A column that had values but none that can be drawn
    /// begins a new segment.
    fn flush(&mut self, segments: &mut Vec<Segment>) {
        if self.number.is_none() {
            return;
        }
        match self.kept.take() {
            None => segments.push(Segment::new()),
            Some(mut kept) => {
                kept.sort_unstable_by_key(|(at, _)| *at);
                let mut before = None;
                let points = kept.into_iter().filter(|(at, _)| before.replace(*at) != Some(*at));
                let points = points.map(|(_, point)| point);
                match segments.last_mut() {
                    Some(segment) => segment.extend(points),
                    None => segments.push(points.collect()),
                }
            }
        }
    }
}

/// The points of a curve, in order, for a chart that shows `range` on `columns` pixels: at most four for
/// each column. Values that are not finite interrupt the line.
pub fn thin(
    points: impl IntoIterator<Item = (f64, f64)>,
    range: Range,
    columns: usize,
) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut column = Column::default();
    for (at, (x, y)) in points.into_iter().enumerate() {
        if !is_drawable(x) {
            continue;
        }
        // A cast of a negative number gives 0.
        let number = (range.place(x) * columns as f64) as usize;
        if column.number != Some(number) {
            column.flush(&mut segments);
            column.number = Some(number);
        }
        if is_drawable(y) {
            column.add(at, (x, y));
        }
    }
    column.flush(&mut segments);
    segments.retain(|segment| !segment.is_empty());
    segments
}

/// Means of `count` neighbours each: fewer points without noise.
pub fn means(points: &[(f64, f64)], count: usize) -> Vec<(f64, f64)> {
    points
        .chunks(count.max(1))
        .map(|chunk| {
            let finite: Vec<_> = chunk.iter().filter(|point| is_drawable(point.1)).collect();
            let number = finite.len() as f64;
            let sum =
                finite.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
            match finite.is_empty() {
                true => (chunk[0].0, f64::NAN),
                false => (sum.0 / number, sum.1 / number),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Range = Range { low: 0.0, high: 100.0 };

    #[test]
    fn a_short_curve_is_kept_whole() {
        let points = [(1.0, 5.0), (20.0, 4.0), (90.0, 3.0)];
        assert_eq!(thin(points, RANGE, 10), [points]);
        assert_eq!(thin([], RANGE, 10), Vec::<Segment>::new());
    }

    #[test]
    fn a_long_curve_keeps_every_spike() {
        let points = (0..1_000_000).map(|n| {
            let y = match n {
                123_456 => 99.0,
                654_321 => -99.0,
                _ => f64::from(n % 7),
            };
            (f64::from(n) / 1e4, y)
        });
        let segments = thin(points, RANGE, 300);
        let [segment] = &segments[..] else { panic!("{} segments", segments.len()) };
        assert!((600..=1204).contains(&segment.len()), "{}", segment.len());
        assert!(segment.contains(&(12.3456, 99.0)) && segment.contains(&(65.4321, -99.0)));
        assert!(segment.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(segment.first(), Some(&(0.0, 0.0)));
        assert_eq!(segment.last().map(|point| point.0), Some(99.9999));
    }

    #[test]
    fn a_value_that_is_missing_interrupts_the_line() {
        let points = [(1.0, 1.0), (30.0, f64::NAN), (60.0, 2.0), (90.0, 3.0)];
        assert_eq!(thin(points, RANGE, 10), [vec![(1.0, 1.0)], vec![(60.0, 2.0), (90.0, 3.0)]]);
        assert_eq!(thin(points.map(|point| (point.0, f64::NAN)), RANGE, 10), Vec::<Segment>::new());
        // In a column with other values nobody would see the gap.
        let dense = [(1.0, 1.0), (1.1, f64::INFINITY), (1.2, 2.0)];
        assert_eq!(thin(dense, RANGE, 10), [vec![(1.0, 1.0), (1.2, 2.0)]]);
    }

    #[test]
    fn means_pass_over_missing_values() {
        let points = [(1.0, 2.0), (2.0, f64::NAN), (3.0, f64::NAN), (4.0, f64::NAN), (5.0, 7.0)];
        let [first, gap, last] = means(&points, 2)[..] else { panic!() };
        assert_eq!((first, last), ((1.0, 2.0), (5.0, 7.0)));
        assert!(gap.1.is_nan());
    }
}
