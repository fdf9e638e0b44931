//! Shows the progress of long work on standard error. On a terminal it is a bar. Otherwise, and on a dumb terminal, it
//! is a line about every ten seconds, so that log files stay readable.

use std::ffi::OsStr;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, HumanDuration, ProgressBar, ProgressStyle};

use crate::exit::stderr_line;

/// The time between two lines without a terminal.
pub const LINE_EVERY: Duration = Duration::from_secs(10);

/// The progress of a piece of work. Dropping it removes the bar.
#[derive(Debug)]
pub struct Bar {
    label: String,
    unit: Unit,
    total: u64,
    detail: String,
    /// The progress at the first update, which is work that was done before.
    first: Option<u64>,
    /// `None` without a terminal.
    bar: Option<ProgressBar>,
    started: Instant,
    printed: Instant,
}

/// Returns a share of bytes, as in `1.00 KiB of 2.00 KiB`.
pub fn of_bytes(done: u64, total: u64) -> String {
    format!("{} of {}", HumanBytes(done), HumanBytes(total))
}

/// Returns a rate of items: `7/s`, or `12.3 s each` below one per second.
pub fn rate_of_items(per_second: f64) -> String {
    match per_second {
        rate if rate > 0.0 && rate < 1.0 => format!("{:.1} s each", 1.0 / rate),
        rate => format!("{}/s", HumanCount(rate as u64)),
    }
}

/// Returns the time of `left` more items at this rate, as `, 2m left`; empty if it is unknown.
pub fn time_left(left: u64, per_second: f64) -> String {
    let time = Duration::try_from_secs_f64(left as f64 / per_second);
    time.map_or(String::new(), |time| format!(", {:#} left", HumanDuration(time)))
}

/// Returns whether standard error is a terminal that can redraw a line. On other terminals indicatif shows nothing.
pub fn draws_bars() -> bool {
    stderr().is_terminal() && redraws(std::env::var_os("TERM").as_deref())
}

fn redraws(term: Option<&OsStr>) -> bool {
    term.is_none_or(|term| term != "dumb")
}

#[derive(Clone, Copy, Debug)]
enum Unit {
    Bytes,
    Count,
}

impl Bar {
    /// Creates a progress in bytes. A `total` of 0 means unknown; [`Bar::update`] can set it.
    pub fn bytes(label: &str, total: u64) -> Self {
        Self::new(label, total, Unit::Bytes)
    }

    /// Creates a progress in items.
    pub fn count(label: &str, total: u64) -> Self {
        Self::new(label, total, Unit::Count)
    }

    fn new(label: &str, total: u64, unit: Unit) -> Self {
        let started = Instant::now();
        let bar = draws_bars().then(|| {
            let template = match unit {
                Unit::Bytes => {
                    "{prefix} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec}{msg}, {eta}"
                }
                Unit::Count => "{prefix} [{bar:40}] {human_pos}/{human_len} {per_sec}{msg}, {eta}",
            };
            let bar = ProgressBar::new(total).with_prefix(label.to_owned());
            // An invalid template falls back to indicatif's default style.
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar())
                    .progress_chars("=> "),
            );
            bar
        });
        let (label, detail) = (label.to_owned(), String::new());
        Self { label, unit, total, detail, first: None, bar, started, printed: started }
    }

    /// Sets the progress and the total.
    pub fn update(&mut self, done: u64, total: u64) {
        self.total = total;
        if self.first.is_none() {
            self.first = Some(done);
            if let Some(bar) = &self.bar {
                bar.set_position(done);
                bar.reset_eta();
            }
        }
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

    /// Sets the text after the rate, such as another rate. It may be empty.
    pub fn describe(&mut self, detail: impl FnOnce(Duration) -> String) {
        let is_shown = self.bar.is_some() || self.printed.elapsed() >= LINE_EVERY;
        if is_shown {
            self.detail = match detail(self.started.elapsed()) {
                detail if detail.is_empty() => detail,
                detail => format!(", {detail}"),
            };
            if let Some(bar) = &self.bar {
                bar.set_message(self.detail.clone());
            }
        }
    }

    /// Sets the progress.
    pub fn set(&mut self, done: u64) {
        self.update(done, self.total);
    }

    fn line(&self, done: u64) -> String {
        let shown = |number: u64| match self.unit {
            Unit::Bytes => HumanBytes(number).to_string(),
            Unit::Count => HumanCount(number).to_string(),
        };
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        let per_second = done.saturating_sub(self.first.unwrap_or(0)) as f64 / seconds;
        let rate = match self.unit {
            Unit::Bytes => format!("{}/s", HumanBytes(per_second as u64)),
            Unit::Count => rate_of_items(per_second),
        };
        let (label, detail) = (&self.label, &self.detail);
        let Some(percent) = done.saturating_mul(100).checked_div(self.total) else {
            return format!("{label}: {}, {rate}{detail}", shown(done));
        };
        let left = time_left(self.total.saturating_sub(done), per_second);
        let (done, total) = (shown(done), shown(self.total));
        format!("{label}: {done} of {total} ({percent}%), {rate}{detail}{left}")
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
        assert_eq!(line, "stories: 0, 0/s");
        // First no item is done, and then a few.
        let mut bar = Bar::count("layers", 32);
        assert_eq!(bar.line(0), "layers: 0 of 32 (0%), 0/s");
        bar.started = Instant::now() - Duration::from_secs(60);
        assert_eq!(bar.line(8), "layers: 8 of 32 (25%), 7.5 s each, 3m left");
        let mut bar = Bar::bytes("reading", 4096);
        bar.update(1024, 4096);
        bar.detail = ", 7 tokens/s".to_owned();
        bar.started = Instant::now() - Duration::from_secs(4);
        let line = bar.line(3072);
        // 2 KiB in 4 seconds: work done before does not count.
        assert!(
            line.ends_with("(75%), 511 B/s, 7 tokens/s, 2s left")
                || line.contains("512 B/s, 7 tokens/s, 2s left"),
            "{line}"
        );
    }
}
