//! A GPU's time in a step by kernel, and its idle time.

use std::collections::HashMap;

use moh_kernels::gpu_activity::Activity;
use moh_program::table::aligned;
use serde_json::{Value, json};

/// The most rows of the table in text. JSON has all rows.
const MAX_ROWS: usize = 25;
/// The most characters of a kernel's name in text: names in libraries have hundreds.
const MAX_CHARACTERS: usize = 72;

/// The kernels, copies and fills of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTimes {
    /// Nanoseconds from the first start to the last end.
    elapsed: u64,
    /// Nanoseconds of this time in which any work ran.
    busy: u64,
    /// The kernels, by falling time.
    kernels: Vec<Kernel>,
}

#[derive(Debug, Clone, PartialEq)]
struct Kernel {
    name: String,
    launches: usize,
    nanoseconds: u64,
}

impl KernelTimes {
    /// Sums up activities. They are in the order of their starts.
    pub fn new(activities: &[Activity]) -> Self {
        let start = activities.first().map_or(0, |first| first.start);
        let (mut until, mut busy) = (start, 0);
        let mut kernels: HashMap<&str, (usize, u64)> = HashMap::new();
        for Activity { name, start, end, .. } in activities {
            // Work of several streams may overlap.
            busy += end.saturating_sub(until.max(*start));
            until = until.max(*end);
            let (launches, nanoseconds) = kernels.entry(name).or_default();
            *launches += 1;
            *nanoseconds += end.saturating_sub(*start);
        }
        let kernels = kernels.into_iter().map(|(name, (launches, nanoseconds))| Kernel {
            name: name.into(),
            launches,
            nanoseconds,
        });
        let mut kernels: Vec<_> = kernels.collect();
        kernels.sort_by(|a, b| b.nanoseconds.cmp(&a.nanoseconds).then(a.name.cmp(&b.name)));
        KernelTimes { elapsed: until - start, busy, kernels }
    }

    fn launches(&self) -> usize {
        self.kernels.iter().map(|kernel| kernel.launches).sum()
    }

    pub fn json(&self) -> Value {
        let seconds = |nanoseconds: u64| nanoseconds as f64 * 1e-9;
        let kernels = self.kernels.iter().map(|kernel| {
            let Kernel { name, launches, nanoseconds } = kernel;
            json!({"name": name, "launches": launches, "seconds": seconds(*nanoseconds)})
        });
        json!({
            "elapsed_seconds": seconds(self.elapsed),
            "idle_seconds": seconds(self.elapsed - self.busy),
            "launches": self.launches(),
            "kernels": kernels.collect::<Vec<_>>(),
        })
    }

    pub fn text(&self) -> String {
        let milliseconds = |nanoseconds: u64| format!("{:.2}", nanoseconds as f64 * 1e-6);
        let share = |nanoseconds: u64| {
            format!("{:.1}%", 100.0 * nanoseconds as f64 / self.elapsed.max(1) as f64)
        };
        let row = |name: &str, launches: String, nanoseconds: u64| {
            let name = name.chars().take(MAX_CHARACTERS).collect();
            [name, launches, milliseconds(nanoseconds), share(nanoseconds)]
        };
        let (shown, rest) = self.kernels.split_at(self.kernels.len().min(MAX_ROWS));
        let of_kernel =
            |kernel: &Kernel| row(&kernel.name, kernel.launches.to_string(), kernel.nanoseconds);
        let mut rows: Vec<_> = shown.iter().map(of_kernel).collect();
        if !rest.is_empty() {
            let launches: usize = rest.iter().map(|kernel| kernel.launches).sum();
            let nanoseconds = rest.iter().map(|kernel| kernel.nanoseconds).sum();
            rows.push(row(&format!("{} others", rest.len()), launches.to_string(), nanoseconds));
        }
        rows.push(row("idle", String::new(), self.elapsed - self.busy));
        rows.push(row("step", self.launches().to_string(), self.elapsed));
        aligned(["kernel", "launches", "ms", "share"], &rows, &[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(name: &str, start: u64, end: u64) -> Activity {
        Activity { name: name.into(), stream: 0, start, end }
    }

    #[test]
    fn overlapping_work_counts_once_and_gaps_are_idle() {
        let activities = [
            activity("matmul", 100, 300),
            activity("adamw", 150, 250),
            activity("adamw", 280, 340),
            activity("matmul", 400, 500),
        ];
        let times = KernelTimes::new(&activities);
        assert_eq!((times.elapsed, times.busy, times.launches()), (400, 340, 4));
        let kernels: Vec<_> = times
            .kernels
            .iter()
            .map(|kernel| (kernel.name.as_str(), kernel.launches, kernel.nanoseconds))
            .collect();
        assert_eq!(kernels, [("matmul", 2, 300), ("adamw", 2, 160)]);
        let text = times.text();
        let idle = text.lines().find(|line| line.starts_with("idle")).unwrap_or_default();
        assert_eq!(
            idle.split_whitespace().collect::<Vec<_>>(),
            ["idle", "0.00", "15.0%"],
            "{text}"
        );
    }

    #[test]
    fn no_work_takes_no_time() {
        let times = KernelTimes::new(&[]);
        assert_eq!((times.elapsed, times.busy, times.launches()), (0, 0, 0));
    }
}
