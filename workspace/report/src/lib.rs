//! The page of a run, or of several that it compares: one HTML file with its style in it, which fetches nothing.
//! `moh-report` writes it and serves it. Another page shows what the heads of models do.

mod calibration;
pub mod chart;
mod curves;
mod figure;
mod guard;
mod heads;
pub mod loss_chart;
mod losses;
mod numbers;
mod overview;
mod page;
mod recipes;
mod routing;
mod routing_history;
pub mod run_log;
mod runs;
mod speed;
pub mod summary_table;

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail};

pub use heads::{heads_page, write_heads};
pub use page::{Watch, error_page, page};
pub use runs::Runs;

/// The page's name in the directory of a single run.
pub const PAGE: &str = "report.html";

/// Bytes at the start of a page in which it says that it is one.
const HEAD_BYTES: u64 = 1024;

/// Writes the page of the directories `runs`, as [`Runs::read`] reads them, to the file `out`, as a whole. An earlier
/// page is replaced, any other file only with `force`. Returns what is left out, and why, in sentences, which the page
/// shows too.
///
/// # Errors
/// Fails as [`Runs::read`]; if `out` is not to be replaced, or cannot be written.
pub fn write(runs: &[PathBuf], out: &Path, force: bool) -> anyhow::Result<Vec<String>> {
    refuse_other_files(out, force)?;
    let runs = Runs::read(runs)?;
    let page = page(&runs, SystemTime::now(), None);
    write_page(out, &page)?;
    Ok(runs.remarks)
}

fn write_page(out: &Path, page: &str) -> anyhow::Result<()> {
    moh_files::create_parents(out)
        .and_then(|()| moh_files::write(out, page.as_bytes()))
        .with_context(|| format!("{}: cannot be written", out.display()))
}

/// Refuses to replace what is no file, and without `force` what this program has not written.
fn refuse_other_files(path: &Path, force: bool) -> anyhow::Result<()> {
    let shown = path.display();
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| shown.to_string()),
        Ok(data) if !data.is_file() => bail!("{shown}: is not a file: name another one with --out"),
        Ok(_) if force => return Ok(()),
        Ok(_) => {}
    }
    let mut start = Vec::new();
    let file = std::fs::File::open(path).with_context(|| shown.to_string())?;
    file.take(HEAD_BYTES).read_to_end(&mut start).with_context(|| shown.to_string())?;
    if !page::is_page(&start) {
        bail!(
            "{shown}: is not a page of moh-report: name another file with --out, or give --force to replace it"
        );
    }
    Ok(())
}
