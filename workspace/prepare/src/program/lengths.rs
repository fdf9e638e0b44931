//! The lengths of a token file's documents: percentiles, and a histogram that fits 80 columns.

use std::io::{self, Write};

use moh_data::{DocumentLengths, LengthBand};
use serde_json::{Value, json};

/// Columns of a terminal.
const COLUMNS: usize = 80;
/// The percentiles that are shown.
const PERCENTILES: [u8; 3] = [50, 90, 99];

/// Writes percentiles and histogram as lines of `moh-data info`; nothing without documents.
pub fn write(out: &mut impl Write, lengths: &DocumentLengths) -> io::Result<()> {
    let bands = lengths.bands();
    if bands.is_empty() {
        return Ok(());
    }
    let shown = PERCENTILES.map(|at| format!("{at}% up to {}", lengths.percentile(at)));
    writeln!(out, "lengths    {} tokens", shown.join(", "))?;
    for line in histogram(&bands) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// A line for each band: its lengths, its documents, and a bar.
fn histogram(bands: &[LengthBand]) -> Vec<String> {
    let names = bands.iter().map(|band| match band.most - band.least {
        0 => band.least.to_string(),
        _ => format!("{}-{}", band.least, band.most),
    });
    let names: Vec<String> = names.collect();
    let counts: Vec<String> = bands.iter().map(|band| band.documents.to_string()).collect();
    let widest = |texts: &[String]| texts.iter().map(String::len).max().unwrap_or(0);
    let (name_width, count_width) = (widest(&names), widest(&counts));
    // Two numbers of 64 bits and a count of documents leave some columns for the bar.
    let width = COLUMNS.saturating_sub(2 + name_width + 2 + count_width + 1).max(1);
    let most = bands.iter().map(|band| band.documents).max().unwrap_or(0).max(1);
    let lines = bands.iter().zip(names.iter().zip(&counts));
    let lines = lines.map(|(band, (name, count))| {
        // At most the width; a band with documents has a bar.
        let bar = (u128::from(band.documents) * width as u128).div_ceil(u128::from(most)) as usize;
        let line = format!("  {name:>name_width$}  {count:>count_width$} {}", "#".repeat(bar));
        line.trim_end().to_owned()
    });
    lines.collect()
}

/// The same, machine-readable.
pub fn to_json(lengths: &DocumentLengths) -> Value {
    let percentile = |at: u8| (at.to_string(), json!(lengths.percentile(at)));
    let percentiles: serde_json::Map<String, Value> =
        PERCENTILES.into_iter().map(percentile).collect();
    let bands = lengths.bands().into_iter().map(
        |LengthBand { least, most, documents }| json!({"least": least, "most": most, "documents": documents}),
    );
    let bands: Vec<Value> = bands.collect();
    json!({"longest": lengths.longest(), "percentiles": percentiles, "histogram": bands})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fit_the_terminal() {
        let band = |least, most, documents| LengthBand { least, most, documents };
        let lines = histogram(&[band(1, 1, 1), band(2, 3, 0), band(4, 7, 1000)]);
        let bar = "#".repeat(80 - 12);
        let expected = ["    1     1 #", "  2-3     0", &format!("  4-7  1000 {bar}")];
        assert_eq!(lines, expected);
        let most = u64::MAX;
        let lines = histogram(&[band(1 << 63, most, most)]);
        assert!(lines[0].len() == 80 && lines[0].ends_with(" ###############"), "{}", lines[0]);
    }
}
