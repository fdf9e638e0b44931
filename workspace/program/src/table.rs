//! Formats tables as text.

use comfy_table::{CellAlignment, Row, Table, presets};

/// Returns a header and rows as lines, with columns two spaces apart. The columns in `left` are aligned left, the
/// others right.
pub fn aligned<R: Into<Row>>(
    header: impl Into<Row>,
    rows: impl IntoIterator<Item = R>,
    left: &[usize],
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_row(header).add_rows(rows);
    for (place, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if place == 0 { 0 } else { 2 }, 0));
        column.set_cell_alignment(match left.contains(&place) {
            true => CellAlignment::Left,
            false => CellAlignment::Right,
        });
    }
    format!("{}\n", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["dense", "1.25", "x"], vec!["a", "10"], vec!["\u{6a21}\u{578b}", ""]];
        let shown = aligned(["heads", "ms", "note"], rows, &[0, 2]);
        assert_eq!(shown, "heads    ms  note\ndense  1.25  x\na        10\n\u{6a21}\u{578b}\n");
    }
}
