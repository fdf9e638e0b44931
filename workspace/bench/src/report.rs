//! The output of a measurement: JSON, or a table.

use std::io::{Write as _, stdout};

use serde_json::Value;

/// Prints `json` if `as_json`, or else `text`.
pub fn print(as_json: bool, json: &Value, text: &str) -> anyhow::Result<()> {
    if as_json {
        writeln!(stdout(), "{json:#}")?;
    } else {
        writeln!(stdout(), "{}", text.trim_end())?;
    }
    Ok(())
}

/// Rows under a header: the first column left-aligned, the others right-aligned.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let rows: Vec<[&str; N]> = std::iter::once(header)
        .chain(rows.iter().map(|row| std::array::from_fn(|column| row[column].as_str())))
        .collect();
    let widths: [usize; N] = std::array::from_fn(|column| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
    });
    let mut text = String::new();
    for row in rows {
        let cells =
            row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["dense", "1.25"], ["a", "10"]].map(|row| row.map(str::to_owned));
        assert_eq!(table(["heads", "ms"], &rows), "heads    ms\ndense  1.25\na        10\n");
    }
}
