//! In which steps the rows of a row group are read, so that what they hold is bounded: the pages of a column are
//! anything from a kilobyte to two gigabytes, and its rows too. Known are the sizes of all pages.

/// Maximum rows that are read at once.
const MAX_BATCH_ROWS: u64 = 1 << 13;
/// How much larger than others batches of the same reader may be than they have to be.
const UNEVENNESS: u64 = 16;
/// The part of the limit for the values of a batch of an encoding that repeats parts of values.
const EXPANDED_PART: u64 = 16;

/// The pages of a column in a row group.
#[derive(Debug, Default)]
pub(super) struct Column {
    /// Bytes of the dictionary.
    pub(super) dictionary: u64,
    pub(super) pages: Vec<Page>,
    /// Whether a value may take more bytes than it has in its page.
    pub(super) expands: bool,
}

/// A page with values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) rows: u64,
    /// Bytes of its values.
    pub(super) unpacked: u64,
    /// Bytes that are held while it is unpacked.
    pub(super) packed: u64,
}

/// Rows that one reader reads. Its last page stays in memory until it has the next one, or is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first row in the group.
    pub(super) first: u64,
    pub(super) rows: u64,
    /// Rows that are read at once.
    pub(super) batch_rows: u64,
    /// Bytes that are held at most.
    pub(super) held: u64,
}

/// The runs of a row group with `rows` in `columns`, in batches of about `batch_bytes`.
///
/// # Errors
/// Fails with the bytes that would be held, if they are more than `limit`.
pub(super) fn runs(
    columns: &[Column],
    rows: u64,
    batch_bytes: u64,
    limit: u64,
) -> Result<Vec<Run>, u64> {
    let total = |column: &Column| column.pages.iter().map(|page| page.unpacked).sum::<u64>();
    let Some(largest) = (0..columns.len()).max_by_key(|&index| total(&columns[index])) else {
        return Ok(Vec::new());
    };
    let expanded = (limit / EXPANDED_PART).max(batch_bytes);
    // Of the others, which are small beside the largest as a rule, the most that a row and a step may take.
    let (mut others, mut others_row) = (0u64, 0u64);
    for (index, column) in columns.iter().enumerate() {
        if index != largest {
            let mut before = 0;
            let mut most = 0;
            for page in &column.pages {
                most = most.max(before + page.alone(column, expanded));
                before = page.unpacked;
                others_row = others_row.max(page.row_bytes());
            }
            others = others.saturating_add(column.dictionary + most);
        }
    }
    let column = &columns[largest];
    let mut runs: Vec<Run> = Vec::new();
    let (mut first, mut before, mut largest_batch) = (0, 0, 0);
    for page in &column.pages {
        let held = others.saturating_add(column.dictionary + page.alone(column, expanded));
        if held > limit {
            return Err(held);
        }
        let rows_of = |bytes: u64, row: u64| (bytes / row.max(1)).clamp(1, MAX_BATCH_ROWS);
        let batch_rows = match column.expands {
            true => rows_of(expanded, page.unpacked + others_row),
            false => rows_of(batch_bytes, page.row_bytes() + others_row),
        };
        match runs.last_mut() {
            Some(run)
                if held + before <= limit
                    && largest_batch / batch_rows < UNEVENNESS
                    && batch_rows / run.batch_rows < UNEVENNESS =>
            {
                run.rows += page.rows;
                run.batch_rows = run.batch_rows.min(batch_rows);
                run.held = run.held.max(held + before);
                largest_batch = largest_batch.max(batch_rows);
            }
            _ => {
                runs.push(Run { first, rows: page.rows, batch_rows, held });
                largest_batch = batch_rows;
            }
        }
        first += page.rows;
        before = page.unpacked;
    }
    // A damaged group may have other rows in its pages than it says.
    for run in &mut runs {
        run.rows = run.rows.min(rows.saturating_sub(run.first));
    }
    Ok(runs)
}

impl Run {
    /// What is left of it after the first `rows` of the group.
    pub(super) fn after(self, rows: u64) -> Option<Self> {
        let end = self.first + self.rows;
        let first = self.first.max(rows);
        (first < end).then(|| Self { first, rows: end - first, ..self })
    }
}

impl Page {
    /// Bytes of a row, about.
    fn row_bytes(&self) -> u64 {
        self.unpacked / self.rows.max(1)
    }

    /// Bytes that are held for it, without the page before.
    fn alone(&self, column: &Column, expanded: u64) -> u64 {
        let values = if column.expands { self.unpacked.max(expanded) } else { 0 };
        self.unpacked.saturating_add(self.packed).saturating_add(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(pages: &[(u64, u64)]) -> Column {
        let page = |&(rows, unpacked)| Page { rows, unpacked, packed: unpacked / 2 };
        Column { dictionary: 10, pages: pages.iter().map(page).collect(), expands: false }
    }

    fn run(first: u64, rows: u64, batch_rows: u64, held: u64) -> Run {
        Run { first, rows, batch_rows, held }
    }

    #[test]
    fn equal_pages_are_one_run() {
        let pages = column(&[(100, 1000); 20]);
        let expected = run(0, 2000, 50, 10 + 1000 + 1000 + 500);
        assert_eq!(runs(&[pages], 2000, 500, 10_000).unwrap(), [expected]);
        assert_eq!(runs(&[], 0, 500, 10_000).unwrap(), []);
    }

    #[test]
    fn a_run_ends_where_two_pages_are_too_large_together_or_the_rows_differ() {
        let large = column(&[(1, 6000), (1, 6000)]);
        let expected = [run(0, 1, 1, 9010), run(1, 1, 1, 9010)];
        assert_eq!(runs(&[large], 2, 500, 10_000).unwrap(), expected);
        let uneven = column(&[(100, 100), (1, 100)]);
        let expected = [run(0, 100, 500, 160), run(100, 1, 5, 160)];
        assert_eq!(runs(&[uneven], 101, 500, 10_000).unwrap(), expected);
    }

    #[test]
    fn what_is_larger_than_the_limit_is_an_error_in_any_column() {
        assert_eq!(runs(&[column(&[(1, 1000)])], 1, 500, 1000), Err(10 + 1000 + 500));
        let columns = || [column(&[(1, 1000)]), column(&[(1, 100)])];
        assert_eq!(runs(&columns(), 1, 500, 1000), Err(10 + 1500 + 10 + 150));
        assert!(runs(&columns(), 1, 500, 2000).is_ok());
    }

    #[test]
    fn an_encoding_that_repeats_parts_of_values_has_small_batches() {
        let pages = Column { expands: true, ..column(&[(1000, 100)]) };
        assert_eq!(runs(&[pages], 1000, 500, 16_000).unwrap()[0].batch_rows, 10);
    }

    #[test]
    fn pages_with_more_rows_than_the_group_are_not_read_to_the_end() {
        let found = runs(&[column(&[(100, 100), (1, 100)])], 50, 500, 10_000).unwrap();
        assert_eq!(found.iter().map(|run| run.rows).collect::<Vec<_>>(), [50, 0]);
    }
}
