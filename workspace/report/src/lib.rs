//! Writes the page of a run, or of several runs that it compares, for `moh-report`. A page is a single HTML file with
//! its style, and fetches nothing. Another page shows measures of models' heads.

mod calibration;
mod chart;
mod curves;
mod figure;
mod guard;
pub mod head_measures;
mod heads;
mod loss_chart;
mod losses;
mod numbers;
mod overview;
mod page;
mod recipes;
mod routing;
mod routing_history;
mod run_log;
mod runs;
mod speed;

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail};

pub use heads::{heads_page, write_heads};
use runs::Runs;

/// The page's name in the directory of a single run.
pub const PAGE: &str = "report.html";

/// The size of `run.svg`.
const PICTURE_SIZE: chart::Size = chart::Size { width: 960.0, height: 480.0, labels: true };

/// Bytes at the start of a page that contain its mark.
const HEAD_BYTES: u64 = 1024;

/// The shortest time between two pages of a watched run.
const REFRESH: Duration = Duration::from_secs(5);

/// The time between two pages is at least this many times the time of reading the runs.
const REFRESH_READS: u32 = 20;

/// Writes the page of the directories `runs` to the file `out`, atomically. Each directory is a run, or contains runs.
/// An earlier page is replaced, any other file only with `force`. Returns remarks on omitted runs and lines, which the
/// page also shows.
///
/// # Errors
/// Fails if a directory neither is a run nor contains runs, or if a file of a run cannot be read. Also fails if `out`
/// must not be replaced or cannot be written.
pub fn write(runs: &[PathBuf], out: &Path, force: bool) -> anyhow::Result<Vec<String>> {
    Ok(write_watched(runs, out, force, false)?.0)
}

/// Writes the page as [`write()`] does. If it `is_watched` and a run has not finished, returns a time. Browsers load
/// the page again after this time, so the caller should write it again by then.
///
/// # Errors
/// Fails as [`write()`].
pub fn write_watched(
    runs: &[PathBuf],
    out: &Path,
    force: bool,
    is_watched: bool,
) -> anyhow::Result<(Vec<String>, Option<Duration>)> {
    let start = Instant::now();
    let runs = Runs::read(runs)?;
    let refresh = REFRESH.max(start.elapsed() * REFRESH_READS);
    let goes_on = is_watched && runs.logs.iter().any(|log| !log.is_finished);
    let refresh = goes_on.then_some(refresh);
    refuse_other_files(out, force)?;
    write_page(out, &page::page(&runs, SystemTime::now(), refresh))?;
    Ok((runs.remarks, refresh))
}

/// Draws the losses of the run in a directory to its `run.svg`, and returns the file. Returns `None` for other
/// directories.
///
/// # Errors
/// Fails if a file of the run cannot be read, or the picture cannot be written.
pub fn draw(directory: &Path) -> anyhow::Result<Option<PathBuf>> {
    if !run_log::is_run(directory) {
        return Ok(None);
    }
    let log = run_log::RunLog::read(directory)?;
    let path = moh_checkpoint::run_directory::RunDirectory::new(directory).picture();
    let written =
        moh_files::write(&path, loss_chart::loss_chart(&log).to_svg(PICTURE_SIZE).as_bytes());
    written.with_context(|| path.display().to_string())?;
    Ok(Some(path))
}

fn write_page(out: &Path, page: &str) -> anyhow::Result<()> {
    moh_files::create_parents(out)
        .and_then(|()| moh_files::write(out, page.as_bytes()))
        .with_context(|| format!("{}: cannot be written", out.display()))
}

/// Refuses to replace anything but a file, and without `force` any file except a page of this program.
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
