//! Thins a curve to the points that a chart's pixels can show. Each column of pixels keeps its first, lowest, highest
//! and last point, so that no spike is lost.

use super::axis::Axis;
use super::scale::is_drawable;

/// Points that are connected by a line.
pub type LineSegment = Vec<(f64, f64)>;

/// Returns the points of a curve, in order: at most four for each of the `columns` pixels of the axis `across`. A
/// column without finite values interrupts the line.
pub(super) fn thin(
    points: impl IntoIterator<Item = (f64, f64)>,
    across: Axis,
    columns: usize,
) -> Vec<LineSegment> {
    let points: Vec<_> = points.into_iter().filter(|point| is_drawable(point.0)).collect();
    // A cast of a negative number gives 0.
    let column = |point: &(f64, f64)| (across.place(point.0) * columns as f64) as usize;
    let (mut segments, mut segment) = (Vec::new(), LineSegment::new());
    for of_column in points.chunk_by(|a, b| column(a) == column(b)) {
        let drawn: LineSegment =
            of_column.iter().copied().filter(|point| is_drawable(point.1)).collect();
        match drawn.is_empty() {
            true => segments.push(std::mem::take(&mut segment)),
            false => segment.extend(ends_and_extremes(&drawn)),
        }
    }
    segments.push(segment);
    segments.retain(|segment| !segment.is_empty());
    segments
}

/// Returns the first, lowest, highest and last point, each once and in order.
fn ends_and_extremes(points: &[(f64, f64)]) -> LineSegment {
    let most = |is_more: fn(f64, f64) -> bool| {
        let more =
            |most: usize, at: usize| if is_more(points[at].1, points[most].1) { at } else { most };
        (0..points.len()).reduce(more)
    };
    let last = points.len().checked_sub(1);
    let found = [last.map(|_| 0), most(|a, b| a < b), most(|a, b| a > b), last];
    let mut places: Vec<usize> = found.into_iter().flatten().collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|at| points[at]).collect()
}

/// A mean spans at most one in so many of the points before it. The first points thus keep their own places on a
/// logarithmic axis.
const MEAN_OF_START: usize = 10;

/// Returns means of `count` neighbours each, and of fewer at the start: fewer points without noise.
pub fn means(points: &[(f64, f64)], count: usize) -> Vec<(f64, f64)> {
    let mut means = Vec::new();
    let mut left = points;
    while let Some(first) = left.first() {
        let before = points.len() - left.len();
        let (chunk, rest) =
            left.split_at((before / MEAN_OF_START + 1).min(count.max(1)).min(left.len()));
        left = rest;
        let finite: Vec<_> = chunk.iter().filter(|point| is_drawable(point.1)).collect();
        let number = finite.len() as f64;
        let sum = finite.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        means.push(match finite.is_empty() {
            true => (first.0, f64::NAN),
            false => (sum.0 / number, sum.1 / number),
        });
    }
    means
}

#[cfg(test)]
mod tests {
    use super::super::scale::Range;
    use super::*;

    fn across() -> Axis {
        Axis::linear(Range { low: 0.0, high: 100.0 })
    }

    #[test]
    fn a_short_curve_is_kept_whole() {
        let points = [(1.0, 5.0), (20.0, 4.0), (90.0, 3.0)];
        assert_eq!(thin(points, across(), 10), [points]);
        assert_eq!(thin([], across(), 10), Vec::<LineSegment>::new());
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
        let segments = thin(points, across(), 300);
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
        assert_eq!(thin(points, across(), 10), [vec![(1.0, 1.0)], vec![(60.0, 2.0), (90.0, 3.0)]]);
        assert_eq!(
            thin(points.map(|point| (point.0, f64::NAN)), across(), 10),
            Vec::<LineSegment>::new()
        );
        // A gap within a column would be invisible.
        let dense = [(1.0, 1.0), (1.1, f64::INFINITY), (1.2, 2.0)];
        assert_eq!(thin(dense, across(), 10), [vec![(1.0, 1.0), (1.2, 2.0)]]);
    }

    #[test]
    fn means_pass_over_missing_values() {
        let gap = |n: u32| if (20..26).contains(&n) { f64::NAN } else { 7.0 };
        let points: Vec<(f64, f64)> = (0..40).map(|n| (f64::from(n), gap(n))).collect();
        let found = means(&points, 2);
        let odd: Vec<(f64, f64)> = found.iter().copied().filter(|mean| mean.1 != 7.0).collect();
        assert_eq!(odd.iter().map(|mean| mean.0).collect::<Vec<_>>(), [20.0, 22.0, 24.0]);
        assert!(odd.iter().all(|mean| mean.1.is_nan()));
    }

    #[test]
    fn means_begin_with_the_first_points_and_span_more_later() {
        let points: Vec<(f64, f64)> = (1..=1000).map(|n| (f64::from(n), f64::from(n))).collect();
        let found = means(&points, 50);
        assert_eq!(found[..10], points[..10]);
        assert_eq!(found[10], (11.5, 11.5));
        assert!(found.iter().all(|mean| mean.0 == mean.1) && found.len() < 60, "{}", found.len());
        let widest = found.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(0.0, f64::max);
        assert_eq!(widest, 50.0);
        assert_eq!(means(&points, 0), points, "no neighbours, no means");
        assert_eq!(means(&[], 5), []);
    }
}
