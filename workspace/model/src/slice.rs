//! A slice of a tensor: some indices of each dimension.

use std::ops::Range;

/// Some indices of each dimension of a tensor. Its elements are the tensor's elements at these
/// indices, in the tensor's order.
///
/// ```
/// use moh_model::slice::{SliceRun, Slice};
///
/// // Columns 2 and 3 of a matrix `[3, 4]`, as a rank of tensor parallelism holds them.
/// let slice = Slice::along(vec![3, 4], 1, vec![2..4]);
/// assert_eq!(slice.extents(), [3, 2]);
/// // The second row of the slice is at elements 6 and 7 of the matrix.
/// assert_eq!(slice.runs(2..4), [SliceRun { local: 2, whole: 6, len: 2 }]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    shape: Vec<usize>,
    /// Consecutive ranges for each dimension.
    indices: Vec<Vec<Range<usize>>>,
}

/// Elements that are contiguous in both the slice and the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceRun {
    /// Offset of the first element in the slice.
    pub local: usize,
    /// Offset of the first element in the tensor.
    pub whole: usize,
    /// Number of elements.
    pub len: usize,
}

impl Slice {
    /// Returns the slice that is the whole tensor.
    pub fn whole(shape: Vec<usize>) -> Self {
        let every = |&extent: &usize| std::iter::once(0..extent).collect();
        let indices = shape.iter().map(every).collect();
        Slice { shape, indices }
    }

    /// Returns the slice of a tensor at some indices of one dimension.
    pub fn along(shape: Vec<usize>, dimension: usize, ranges: Vec<Range<usize>>) -> Self {
        let mut slice = Self::whole(shape);
        slice.indices[dimension] = ranges;
        slice
    }

    /// Returns the slice at these indices; `None` if they are not ascending ranges within the shape, or if
    /// the shape's number of elements overflows.
    pub fn new(shape: Vec<usize>, indices: Vec<Vec<Range<usize>>>) -> Option<Self> {
        let follow = |(ranges, &extent): (&Vec<Range<usize>>, &usize)| {
            let end = ranges.iter().try_fold(0, |end, range| {
                (range.start >= end && range.start <= range.end).then_some(range.end)
            });
            end.is_some_and(|end| end <= extent)
        };
        let counted = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
        let fit = shape.len() == indices.len() && indices.iter().zip(&shape).all(follow);
        (fit && counted.is_some()).then_some(Slice { shape, indices })
    }

    /// Returns the shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the indices: ascending ranges for each dimension.
    pub fn indices(&self) -> &[Vec<Range<usize>>] {
        &self.indices
    }

    /// Returns the shape of the slice.
    pub fn extents(&self) -> Vec<usize> {
        self.indices.iter().map(|ranges| ranges.iter().map(Range::len).sum()).collect()
    }

    /// Returns the number of elements of the slice.
    pub fn len(&self) -> usize {
        self.extents().iter().product()
    }

    /// Returns whether the slice is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the slice is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.extents() == self.shape
    }

    /// Returns the runs of the slice's elements `range`, in order.
    pub fn runs(&self, range: Range<usize>) -> Vec<SliceRun> {
        let Some((columns, rows)) = self.indices.split_last() else { return Vec::new() };
        let extent = self.shape[rows.len()];
        let width: usize = columns.iter().map(Range::len).sum();
        let mut runs = Vec::new();
        let mut local = range.start;
        while width > 0 && local < range.end {
            let (row, mut skipped) = (row(rows, &self.shape, local / width), local % width);
            for columns in columns {
                let from = skipped.min(columns.len());
                skipped -= from;
                let len = (columns.len() - from).min(range.end - local);
                if len > 0 {
                    let whole = row * extent + columns.start + from;
                    push(&mut runs, SliceRun { local, whole, len });
                    local += len;
                }
            }
        }
        runs
    }
}

/// Elements, contiguous in both, that ranges of two slices of one tensor have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common {
    /// Offset of the first element in the first slice.
    pub ours: usize,
    /// Offset of the first element in the second slice.
    pub theirs: usize,
    /// Number of elements.
    pub len: usize,
}

/// Returns the elements that two lists of runs of slices of one tensor have in common, in order.
pub fn common(ours: &[SliceRun], theirs: &[SliceRun]) -> Vec<Common> {
    let (mut ours, mut theirs) = (ours.iter().peekable(), theirs.iter().peekable());
    let mut found = Vec::new();
    while let (Some(a), Some(b)) = (ours.peek(), theirs.peek()) {
        let (a_end, b_end) = (a.whole + a.len, b.whole + b.len);
        let start = a.whole.max(b.whole);
        let end = a_end.min(b_end);
        if start < end {
            let (ours, theirs) = (a.local + start - a.whole, b.local + start - b.whole);
            found.push(Common { ours, theirs, len: end - start });
        }
        // Runs are ascending: the run that ends first has nothing in common with later runs.
        match a_end <= b_end {
            true => ours.next(),
            false => theirs.next(),
        };
    }
    found
}

/// Appends a run, merging it with the last run if they are contiguous.
fn push(runs: &mut Vec<SliceRun>, run: SliceRun) {
    match runs.last_mut() {
        Some(last) if last.whole + last.len == run.whole => last.len += run.len,
        _ => runs.push(run),
    }
}

/// Returns the tensor's row for row `row` of the slice, with all dimensions except the last flattened.
fn row(dimensions: &[Vec<Range<usize>>], shape: &[usize], mut row: usize) -> usize {
    let (mut found, mut stride) = (0, 1);
    for (ranges, &extent) in dimensions.iter().zip(shape).rev() {
        let count: usize = ranges.iter().map(Range::len).sum();
        found += index(ranges, row % count.max(1)) * stride;
        row /= count.max(1);
        stride *= extent;
    }
    found
}

/// Returns the index at position `number` of the ranges.
fn index(ranges: &[Range<usize>], mut number: usize) -> usize {
    for range in ranges {
        if number < range.len() {
            return range.start + number;
        }
        number -= range.len();
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns elements with their positions as values.
    fn values(shape: &[usize]) -> Vec<usize> {
        (0..shape.iter().product()).collect()
    }

    /// Returns the slice's elements `range`, read from the whole tensor.
    fn extract(slice: &Slice, range: Range<usize>, whole: &[usize]) -> Vec<usize> {
        let runs = slice.runs(range);
        runs.iter().flat_map(|run| &whole[run.whole..run.whole + run.len]).copied().collect()
    }

    #[test]
    fn rows_and_columns_are_taken() {
        let whole = values(&[4, 6]);
        let rows = Slice::along(vec![4, 6], 0, vec![0..1, 2..4]);
        assert_eq!(rows.extents(), [3, 6]);
        let run = |local, whole, len| SliceRun { local, whole, len };
        assert_eq!(rows.runs(0..18), [run(0, 0, 6), run(6, 12, 12)]);
        let columns = Slice::along(vec![4, 6], 1, vec![1..2, 4..6]);
        assert_eq!(extract(&columns, 0..12, &whole), [1, 4, 5, 7, 10, 11, 13, 16, 17, 19, 22, 23]);
        assert_eq!(extract(&columns, 4..8, &whole), [10, 11, 13, 16]);
    }

    #[test]
    fn the_whole_tensor_is_one_run() {
        let slice = Slice::whole(vec![2, 3, 4]);
        assert!(slice.is_whole());
        assert_eq!(slice.runs(5..17), [SliceRun { local: 5, whole: 5, len: 12 }]);
        assert_eq!(extract(&Slice::whole(vec![3]), 1..3, &[7, 8, 9]), [8, 9]);
    }

    #[test]
    fn parts_of_three_dimensions_find_their_place() {
        let slice = Slice::new(vec![2, 3, 4], vec![vec![1..2], vec![0..1, 2..3], vec![1..3]]);
        let found = extract(&slice.unwrap(), 0..4, &values(&[2, 3, 4]));
        assert_eq!(found, [13, 14, 21, 22]);
    }

    #[test]
    fn indices_that_make_no_sense_are_refused() {
        let refused = |shape: &[usize], indices: &[&[[usize; 2]]]| {
            let ranges = |ranges: &&[[usize; 2]]| ranges.iter().map(|r| r[0]..r[1]).collect();
            Slice::new(shape.to_vec(), indices.iter().map(ranges).collect()).is_none()
        };
        assert!(refused(&[3, 4], &[&[[0, 3]], &[[0, 5]]]));
        assert!(refused(&[3, 4], &[&[[0, 3]]]));
        assert!(refused(&[3], &[&[[0, 2], [1, 3]]]));
        assert!(refused(&[3], &[&[[2, 1]]]));
        assert!(refused(&[usize::MAX, 3], &[&[[0, 1]], &[[0, 1]]]));
        assert!(!refused(&[3, 4], &[&[], &[[0, 1], [3, 4]]]));
    }

    /// Returns the positions of the elements of a range of a slice in the tensor.
    fn positions(slice: &Slice, range: Range<usize>) -> Vec<usize> {
        extract(slice, range, &values(slice.shape()))
    }

    #[test]
    fn common_elements_are_those_at_the_same_positions_of_the_tensor() {
        let shape = vec![4, 6];
        let slices = [
            Slice::whole(shape.clone()),
            Slice::along(shape.clone(), 0, vec![1..2, 2..3]),
            Slice::along(shape.clone(), 1, vec![1..2, 4..6]),
            Slice::new(shape, vec![vec![0..1, 3..4], vec![0..5]]).unwrap(),
        ];
        for (ours, theirs) in slices.iter().flat_map(|a| slices.iter().map(move |b| (a, b))) {
            for (from, to) in [(0, ours.len()), (2, 7), (5, 5), (3, ours.len() - 1)] {
                let (our_range, their_range) = (from..to, theirs.len() / 4..theirs.len());
                let (ours_at, theirs_at) =
                    (positions(ours, 0..ours.len()), positions(theirs, 0..theirs.len()));
                let runs = (ours.runs(our_range.clone()), theirs.runs(their_range.clone()));
                let mut found = Vec::new();
                for Common { ours, theirs, len } in common(&runs.0, &runs.1) {
                    for i in 0..len {
                        assert_eq!(ours_at[ours + i], theirs_at[theirs + i]);
                        assert!(our_range.contains(&(ours + i)));
                        assert!(their_range.contains(&(theirs + i)));
                        found.push(ours_at[ours + i]);
                    }
                }
                let their_positions = &theirs_at[their_range];
                let expected: Vec<usize> = (ours_at[our_range].iter().copied())
                    .filter(|position| their_positions.contains(position))
                    .collect();
                assert_eq!(found, expected, "{ours:?} {theirs:?}");
            }
        }
    }
}
