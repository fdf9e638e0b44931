//! A slice of a tensor: some indices of each dimension.

use std::ops::Range;

/// Some indices of each dimension of a tensor. Its elements are the tensor's elements at these
/// indices, in the tensor's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    shape: Vec<usize>,
    /// Consecutive ranges for each dimension.
    indices: Vec<Vec<Range<usize>>>,
}

/// Elements that are contiguous in both the slice and the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Offset of the first element in the slice.
    pub local: usize,
    /// Offset of the first element in the tensor.
    pub whole: usize,
    /// Number of elements.
    pub len: usize,
}

impl Slice {
    /// The whole tensor.
    pub fn whole(shape: Vec<usize>) -> Self {
        let every = |&extent: &usize| std::iter::once(0..extent).collect();
        let indices = shape.iter().map(every).collect();
        Slice { shape, indices }
    }

    /// The slice of a tensor at some indices of one dimension.
    pub fn along(shape: Vec<usize>, dimension: usize, ranges: Vec<Range<usize>>) -> Self {
        let mut slice = Self::whole(shape);
        slice.indices[dimension] = ranges;
        slice
    }

    /// The slice at these indices; `None` if they are not ascending ranges within the shape, or if
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

    /// Shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The indices: ascending ranges for each dimension.
    pub fn indices(&self) -> &[Vec<Range<usize>>] {
        &self.indices
    }

    /// Shape of the slice.
    pub fn extents(&self) -> Vec<usize> {
        self.indices.iter().map(|ranges| ranges.iter().map(Range::len).sum()).collect()
    }

    /// Elements of the slice.
    pub fn len(&self) -> usize {
        self.extents().iter().product()
    }

    /// Whether the slice is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.extents() == self.shape
    }

    /// The runs of the slice's elements `range`, in order.
    pub fn runs(&self, range: Range<usize>) -> Vec<Run> {
        let (rows, columns) = match self.indices.split_last() {
            Some((columns, rows)) => (rows, columns),
            None => return Vec::new(),
        };
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
                    push(&mut runs, Run { local, whole: row * extent + columns.start + from, len });
                    local += len;
                }
            }
        }
        runs
    }

    /// Copies elements of the slice, from its element `start` on, to their positions in the whole
    /// tensor.
    pub fn place<S: Copy>(&self, start: usize, values: &[S], whole: &mut [S]) {
        for Run { local, whole: at, len } in self.runs(start..start + values.len()) {
            whole[at..at + len].copy_from_slice(&values[local - start..local - start + len]);
        }
    }
}

/// Appends a run, merging it with the last one if they are contiguous.
fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.whole + last.len == run.whole => last.len += run.len,
        _ => runs.push(run),
    }
}

/// The tensor's row, with all dimensions but the last flattened, that is row `row` of the slice.
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

/// The index at position `number` of the ranges.
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

    /// Elements whose values are their positions.
    fn values(shape: &[usize]) -> Vec<usize> {
        (0..shape.iter().product()).collect()
    }

    /// The slice's elements `range`, read from the whole tensor.
    fn extract(slice: &Slice, range: Range<usize>, whole: &[usize]) -> Vec<usize> {
        let runs = slice.runs(range);
        runs.iter().flat_map(|run| &whole[run.whole..run.whole + run.len]).copied().collect()
    }

    #[test]
    fn rows_and_columns_are_taken_and_put_back() {
        let whole = values(&[4, 6]);
        let rows = Slice::along(vec![4, 6], 0, vec![0..1, 2..4]);
        assert_eq!(rows.extents(), [3, 6]);
        assert_eq!(
            rows.runs(0..18),
            [Run { local: 0, whole: 0, len: 6 }, Run { local: 6, whole: 12, len: 12 }]
        );
        let columns = Slice::along(vec![4, 6], 1, vec![1..2, 4..6]);
        assert_eq!(extract(&columns, 0..12, &whole), [1, 4, 5, 7, 10, 11, 13, 16, 17, 19, 22, 23]);
        assert_eq!(extract(&columns, 4..8, &whole), [10, 11, 13, 16]);
        let mut placed = vec![0; 24];
        columns.place(4, &[1, 2, 3, 4], &mut placed);
        assert_eq!([placed[10], placed[11], placed[13], placed[16]], [1, 2, 3, 4]);
        assert_eq!(placed.iter().sum::<usize>(), 10);
    }

    #[test]
    fn the_whole_tensor_is_one_run() {
        let slice = Slice::whole(vec![2, 3, 4]);
        assert!(slice.is_whole());
        assert_eq!(slice.runs(5..17), [Run { local: 5, whole: 5, len: 12 }]);
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
}
