//! Timelines of selected steps: the timed spans of a step ([`moh_kernels::span`]), in a file that
//! Perfetto and chrome://tracing open (`docs/formats.md`).

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moh_comm::Group;
use moh_kernels::span::{self, Label, Lane, Listening, Sink};
use moh_kernels::{Backend, Cpu};
use serde_json::{Value, json};

use crate::Result;
use crate::run_log::part_times::PartTimes;

const LANES: [&str; 2] = ["step", "background"];

/// Steps to trace, counted over all stages from 1: a list of steps and ranges, such as `3,10-12`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSteps {
    ranges: Vec<RangeInclusive<u64>>,
}

impl TraceSteps {
    /// No step.
    pub const NONE: TraceSteps = TraceSteps { ranges: Vec::new() };

    /// Returns whether a step is selected.
    pub fn contains(&self, step: u64) -> bool {
        self.ranges.iter().any(|range| range.contains(&step))
    }

    /// Returns the last selected step, or 0 if no step is selected.
    pub fn last(&self) -> u64 {
        self.ranges.iter().map(|range| *range.end()).max().unwrap_or(0)
    }
}

impl FromStr for TraceSteps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ranges = text.split(',').map(range).collect::<Result<_, _>>()?;
        Ok(TraceSteps { ranges })
    }
}

/// Parses a step or a range of steps.
fn range(text: &str) -> Result<RangeInclusive<u64>, String> {
    let refuse = |reason| format!("{text:?}: {reason}");
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

/// A recording of a step, by the thread that created it.
pub struct StepTrace<B: Backend> {
    step: u64,
    recorder: Arc<Recorder<B>>,
    /// Records the spans of a background thread. Its work runs on the host.
    background: Arc<Recorder<Cpu>>,
    lane: Arc<Lane>,
    _listening: Listening,
}

impl<B: Backend> StepTrace<B> {
    /// Records the spans of this thread, which `times` also receives, and the background thread's spans in
    /// `lane`.
    pub fn new(step: u64, backend: B, times: Option<Arc<PartTimes>>, lane: Arc<Lane>) -> Self {
        let start = Instant::now();
        let recorder = Arc::new(Recorder { backend, start, times, spans: Mutex::default() });
        let (backend, times, spans) = (Cpu, None, Mutex::default());
        let background = Arc::new(Recorder { backend, start, times, spans });
        lane.connect(Some(background.clone()));
        let _listening = span::listen(recorder.clone());
        StepTrace { step, recorder, background, lane, _listening }
    }

    /// Writes the recorded spans, each rank into its own file. `path` returns the file's path for the step and the
    /// rank. The rank is `None` if there is only one.
    pub fn write(
        self,
        path: impl FnOnce(u64, Option<usize>) -> PathBuf,
        group: &Group,
    ) -> Result<()> {
        let rank = group.rank();
        let path = path(self.step, (group.size() > 1).then_some(rank));
        self.lane.connect(None);
        let mut background = locked(&self.background.spans);
        let now = self.background.start.elapsed();
        while !background.open.is_empty() {
            background.exit(now);
        }
        let text = events(&locked(&self.recorder.spans).all, &background.all, rank);
        Ok(moh_files::write(&path, text.as_bytes()).map_err(moh_files::io(&path))?)
    }
}

impl<B: Backend> Drop for StepTrace<B> {
    fn drop(&mut self) {
        self.lane.connect(None);
    }
}

/// Times spans. The device is synchronised at the start and the end of each.
struct Recorder<B: Backend> {
    backend: B,
    start: Instant,
    /// Receives the same spans.
    times: Option<Arc<PartTimes>>,
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
}

/// Locks the spans. A poisoned lock is used, since every change is complete.
fn locked(spans: &Mutex<Spans>) -> MutexGuard<'_, Spans> {
    spans.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> Sink for Recorder<B> {
    fn enter(&self, label: Label) {
        let begins = self.now();
        locked(&self.spans).enter(label, begins);
        if let Some(times) = &self.times {
            times.enter(label);
        }
    }

    fn exit(&self) {
        let now = self.now();
        locked(&self.spans).exit(now);
        if let Some(times) = &self.times {
            times.exit();
        }
    }
}

impl Spans {
    fn enter(&mut self, label: Label, begins: Duration) {
        self.open.push(self.all.len());
        self.all.push(Timed { label, begins, ends: None });
    }

    fn exit(&mut self, now: Duration) {
        if let Some(index) = self.open.pop() {
            self.all[index].ends = Some(now);
        }
    }
}

/// Formats the finished spans of the step and of the background in the JSON array format of trace events,
/// one per line.
fn events(step: &[Timed], background: &[Timed], rank: usize) -> String {
    let of = |span: &Timed, lane: usize| {
        let duration = span.ends?.saturating_sub(span.begins);
        Some(json!({
            "name": span.label.to_string(), "cat": LANES[lane], "ph": "X",
            "ts": microseconds(span.begins), "dur": microseconds(duration),
            "pid": rank, "tid": lane,
        }))
    };
    let named = |what: &str, lane: usize, name: &str| {
        let args = json!({ "name": name });
        json!({ "name": what, "ph": "M", "pid": rank, "tid": lane, "args": args })
    };
    let mut events = vec![named("process_name", 0, &format!("rank {rank}"))];
    events.extend(step.iter().filter_map(|span| of(span, 0)));
    if !background.is_empty() {
        events
            .extend(LANES.iter().enumerate().map(|(lane, name)| named("thread_name", lane, name)));
        events.extend(background.iter().filter_map(|span| of(span, 1)));
    }
    let lines: Vec<String> = events.iter().map(Value::to_string).collect();
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
            let error = text.parse::<TraceSteps>().unwrap_err();
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
        let events: Vec<Value> = serde_json::from_str(&events(&spans, &[], 2)).unwrap();
        assert_eq!(events.len(), 2);
        assert_eq!(events[0]["args"]["name"], "rank 2");
        let expected = json!({
            "name": "data", "cat": "step", "ph": "X", "ts": 1.5, "dur": 2.501, "pid": 2, "tid": 0,
        });
        assert_eq!(events[1], expected);
    }

    #[test]
    fn background_work_has_a_lane_of_its_own_and_is_cut_at_the_end_of_the_step() {
        let dir = tempfile::tempdir().unwrap();
        let (lane, times) = (Arc::new(Lane::default()), Arc::new(PartTimes::default()));
        // Begins before the step, and ends after it.
        let writing = {
            let _listening = span::listen(lane.clone());
            span::enter("write checkpoint")
        };
        let trace = StepTrace::new(3, moh_kernels::Cpu, Some(times), lane.clone());
        drop(span::enter("forward"));
        {
            let _listening = span::listen(lane.clone());
            drop(span::enter("hash"));
        }
        let world = moh_comm::World::single();
        let path = |step, rank: Option<usize>| {
            assert_eq!((step, rank), (3, None));
            dir.path().join("trace.json")
        };
        trace.write(path, world.group()).unwrap();
        drop(writing);
        let text = std::fs::read_to_string(dir.path().join("trace.json")).unwrap();
        let events: Vec<Value> = serde_json::from_str(&text).unwrap();
        let of =
            |event: &Value| (event["name"].clone(), event["cat"].clone(), event["tid"].clone());
        let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").map(of).collect();
        let expected = [("forward", 0), ("write checkpoint", 1), ("hash", 1)];
        assert_eq!(spans, expected.map(|(name, tid)| (json!(name), json!(LANES[tid]), json!(tid))));
    }
}
