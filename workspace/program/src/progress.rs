//! Progress of long work: a bar on a terminal, otherwise (and on a dumb terminal) a line about every ten
//! seconds, so that log files stay readable. All of it goes to standard error.

use std::ffi::OsStr;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};

use crate::exit::stderr_line;

/// Time between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Progress of one piece of work; dropping it ends it.
#[derive(Debug)]
pub struct Bar {
    label: String,
    unit: Unit,
    total: u64,
    /// `None` without a terminal.
    bar: Option<ProgressBar>,
    started: Instant,
    /// The time of the last line.
    printed: Instant,
}

/// Whether standard error is a terminal that can redraw a line; on others indicatif shows nothing.
pub fn draws_bars() -> bool {
    stderr().is_terminal() && redraws(std::env::var_os("TERM").as_deref())
}

/// Whether a terminal of type `term` can redraw a line.
fn redraws(term: Option<&OsStr>) -> bool {
    term.is_none_or(|term| term != "dumb")
}

#[derive(Clone, Copy, Debug)]
enum Unit {
    Bytes,
    Count,
}

impl Bar {
    /// Progress in bytes. A `total` of 0 is unknown; [`Bar::update`] can set it.
    pub fn bytes(label: &str, total: u64) -> Self {
        Self::new(label, total, Unit::Bytes)
    }

    /// Progress in items.
    pub fn count(label: &str, total: u64) -> Self {
        Self::new(label, total, Unit::Count)
    }

    fn new(label: &str, total: u64, unit: Unit) -> Self {
        let started = Instant::now();
        let bar = draws_bars().then(|| {
            let template = match unit {
                Unit::Bytes => "{prefix} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec}, {eta}",
                Unit::Count => "{prefix} [{bar:40}] {human_pos}/{human_len} {per_sec}, {eta}",
            };
            let bar = ProgressBar::new(total).with_prefix(label.to_owned());
            // An invalid template would leave indicatif's default style.
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar())
                    .progress_chars("=> "),
            );
            bar
        });
        Self { label: label.to_owned(), unit, total, bar, started, printed: started }
    }

    /// Sets the progress and the total.
    pub fn update(&mut self, done: u64, total: u64) {
        self.total = total;
        if let Some(bar) = &self.bar {
            if total == 0 {
                bar.unset_length();
            } else if bar.length() != Some(total) {
                bar.set_length(total);
            }
            bar.set_position(done);
        } else if self.printed.elapsed() >= LINE_EVERY {
            self.printed = Instant::now();
            stderr_line(format_args!("{}", self.line(done)));
        }
    }

    /// Sets the progress.
    pub fn set(&mut self, done: u64) {
        self.update(done, self.total);
    }

    /// One line of a log.
    fn line(&self, done: u64) -> String {
        let shown = |number: u64| match self.unit {
            Unit::Bytes => HumanBytes(number).to_string(),
            Unit::Count => HumanCount(number).to_string(),
        };
        // A percentage and a rate need no precision.
        let rate = (done as f64 / self.started.elapsed().as_secs_f64().max(1e-3)) as u64;
        let (label, rate) = (&self.label, shown(rate));
        match done.saturating_mul(100).checked_div(self.total) {
            Some(percent) => {
                let (done, total) = (shown(done), shown(self.total));
                format!("{label}: {done} of {total} ({percent}%), {rate}/s")
            }
            None => format!("{label}: {}, {rate}/s", shown(done)),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dumb_terminal_gets_lines() {
        assert!(!redraws(Some(OsStr::new("dumb"))));
        assert!(redraws(Some(OsStr::new("xterm-256color"))) && redraws(None));
    }

    #[test]
    fn a_line_tells_share_and_rate() {
        let bar = Bar::bytes("reading", 2048);
        let line = bar.line(1024);
        assert!(line.starts_with("reading: 1.00 KiB of 2.00 KiB (50%), "), "{line}");
        let line = Bar::count("stories", 0).line(0);
        assert!(line.starts_with("stories: 0, 0/s"), "{line}");
    }
}
