//! Timelines of selected steps: the timed spans of a step ([`moh_kernels::span`]), in a file that
//! Perfetto and chrome://tracing open (`docs/formats.md`).

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moh_comm::Group;
use moh_kernels::Backend;
use moh_kernels::span::{self, Label, Listening, Sink};
use serde_json::{Value, json};

use crate::{Error, RunDirectory};

/// Steps to trace, counted over all stages from 1: a list of steps and ranges, such as `3,10-12`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSteps {
    ranges: Vec<RangeInclusive<u64>>,
}

impl TraceSteps {
    /// No step.
    pub const NONE: TraceSteps = TraceSteps { ranges: Vec::new() };

    /// Whether a step is selected.
    pub fn contains(&self, step: u64) -> bool {
        self.ranges.iter().any(|range| range.contains(&step))
    }

    /// The last selected step; 0 if there is none.
    pub fn last(&self) -> u64 {
        self.ranges.iter().map(|range| *range.end()).max().unwrap_or(0)
    }
}

impl FromStr for TraceSteps {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let ranges = text.split(',').map(range).collect::<Result<_, _>>()?;
        Ok(TraceSteps { ranges })
    }
}

/// A step or a range of steps.
fn range(text: &str) -> Result<RangeInclusive<u64>, Error> {
    let refuse = |reason| Error::TraceSteps { text: text.to_owned(), reason };
    let number = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| digits).ok_or_else(|| refuse("expected steps, as in 3,10-12"))
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (number(first.trim())?, number(last.trim())?);
    match () {
        () if first == 0 => Err(refuse("steps count from 1")),
        () if last < first => Err(refuse("the range ends before it begins")),
        () => Ok(first..=last),
    }
}

/// A step being recorded by the thread that created this.
pub(crate) struct StepTrace<B: Backend> {
    step: u64,
    recorder: Arc<Recorder<B>>,
    _listening: Listening,
}

impl<B: Backend> StepTrace<B> {
    pub(crate) fn new(step: u64, backend: B) -> Self {
        let recorder =
            Arc::new(Recorder { backend, start: Instant::now(), spans: Mutex::default() });
        let _listening = span::listen(recorder.clone());
        StepTrace { step, recorder, _listening }
    }

    /// Writes the recorded spans into the run directory, each rank into its own file.
    pub(crate) fn write(self, run: &RunDirectory, group: &Group) -> Result<(), Error> {
        let rank = group.rank();
        let path = run.trace(self.step, (group.size() > 1).then_some(rank));
        let text = events(&self.recorder.locked().all, rank);
        moh_files::write(&path, text.as_bytes()).map_err(Error::io(&path))
    }
}

/// Times spans; the device is synchronised at the start and the end of each.
struct Recorder<B: Backend> {
    backend: B,
    start: Instant,
    spans: Mutex<Spans>,
}

#[derive(Default)]
struct Spans {
    /// In the order of their starts.
    all: Vec<Timed>,
    /// The open spans, innermost last.
    open: Vec<usize>,
}

/// A span and its times since the start of the step.
struct Timed {
    label: Label,
    begins: Duration,
    ends: Option<Duration>,
}

impl<B: Backend> Recorder<B> {
    fn now(&self) -> Duration {
        // The next operator reports a device error too, to a caller that can handle it.
        let _ = self.backend.synchronize();
        self.start.elapsed()
    }

    /// Consistent whenever a thread can panic.
    fn locked(&self) -> MutexGuard<'_, Spans> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Sink for Recorder<B> {
    fn enter(&self, label: Label) {
        let begins = self.now();
        let Spans { all, open } = &mut *self.locked();
        open.push(all.len());
        all.push(Timed { label, begins, ends: None });
    }

    fn exit(&self) {
        let now = self.now();
        let Spans { all, open } = &mut *self.locked();
        if let Some(index) = open.pop() {
            all[index].ends = Some(now);
        }
    }
}

/// The finished spans in the JSON array format of trace events, one per line.
fn events(spans: &[Timed], rank: usize) -> String {
    let of = |span: &Timed| {
        let duration = span.ends?.saturating_sub(span.begins);
        Some(json!({
            "name": span.label.to_string(), "cat": "step", "ph": "X",
            "ts": microseconds(span.begins), "dur": microseconds(duration),
            "pid": rank, "tid": 0,
        }))
    };
    let named = json!({
        "name": "process_name", "ph": "M", "pid": rank, "tid": 0,
        "args": { "name": format!("rank {rank}") },
    });
    let lines = std::iter::once(named).chain(spans.iter().filter_map(of));
    let lines: Vec<String> = lines.map(|event: Value| event.to_string()).collect();
    format!("[\n{}\n]\n", lines.join(",\n"))
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(text: &str) -> TraceSteps {
        text.parse().unwrap()
    }

    #[test]
    fn steps_are_a_list_of_numbers_and_ranges() {
        let chosen = steps("3, 10-12,7-7");
        let found: Vec<u64> = (0..20).filter(|&step| chosen.contains(step)).collect();
        assert_eq!(found, [3, 7, 10, 11, 12]);
        assert_eq!((chosen.last(), TraceSteps::NONE.last()), (12, 0));
        assert!(steps("1-18446744073709551615").contains(u64::MAX));
        assert!(!TraceSteps::NONE.contains(1));
    }

    #[test]
    fn what_is_no_list_of_steps_is_refused() {
        let nonsense = "expected steps, as in 3,10-12";
        for (text, part, reason) in [
            ("0", "0", "steps count from 1"),
            ("2,0-3", "0-3", "steps count from 1"),
            ("12-10", "12-10", "the range ends before it begins"),
            ("", "", nonsense),
            ("3,", "", nonsense),
            ("+3", "+3", nonsense),
            ("-3", "-3", nonsense),
            ("3-", "3-", nonsense),
            ("1-2-3", "1-2-3", nonsense),
            ("all", "all", nonsense),
            ("18446744073709551616", "18446744073709551616", nonsense),
        ] {
            let error = text.parse::<TraceSteps>().unwrap_err().to_string();
            assert_eq!(error, format!("{part:?}: {reason}"), "{text}");
        }
    }

    #[test]
    fn a_span_that_has_not_ended_is_left_out() {
        let label = |name| Label { name, number: None };
        let at = Duration::from_nanos;
        let spans = [
            Timed { label: label("step"), begins: at(0), ends: None },
            Timed { label: label("data"), begins: at(1500), ends: Some(at(4001)) },
        ];
        let events: Vec<Value> = serde_json::from_str(&events(&spans, 2)).unwrap();
        assert_eq!(events.len(), 2);
        assert_eq!(events[0]["args"]["name"], "rank 2");
        let expected = json!({
            "name": "data", "cat": "step", "ph": "X", "ts": 1.5, "dur": 2.501, "pid": 2, "tid": 0,
        });
        assert_eq!(events[1], expected);
    }
}
