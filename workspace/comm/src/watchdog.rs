//! The operations of this process that are in flight. The liveness thread reads them, and ends the
//! job when an operation exceeds its limit.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Fault, Result};

/// An operation that continues after its call has returned.
pub(crate) trait Outstanding: Send + Sync {
    /// Returns whether it has ended.
    fn is_done(&self) -> bool;
    /// Orders later work on the device after the operation.
    fn join(&self) -> Result<()>;
}

/// The operations of a process, and the fault that ended its job.
pub(crate) struct Health {
    fault: OnceLock<Fault>,
    on_fault: Arc<dyn Fn(&Fault) + Send + Sync>,
    activity: Mutex<Activity>,
}

#[derive(Default)]
struct Activity {
    next_id: u64,
    running: Vec<Entry>,
    last: Option<Operation>,
}

/// A call of a group's operation.
#[derive(Clone)]
pub(crate) struct Operation {
    pub name: &'static str,
    pub group: Arc<str>,
    /// The number of the call within the group, from 1.
    pub number: u64,
}

struct Entry {
    id: u64,
    operation: Operation,
    since: Instant,
    outstanding: Option<Arc<dyn Outstanding>>,
}

/// A running operation. Dropping this value ends the operation, unless it continues.
pub(crate) struct Running<'a> {
    health: &'a Health,
    id: u64,
}

impl Health {
    pub(crate) fn new(on_fault: Arc<dyn Fn(&Fault) + Send + Sync>) -> Self {
        Health { fault: OnceLock::new(), on_fault, activity: Mutex::default() }
    }

    /// Returns the fault that ended the job, if the job has ended.
    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.fault.get()
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.fault().map_or(Ok(()), |fault| Err(fault.clone().into()))
    }

    /// Ends the job: waiting operations return this fault, and the caller's `on_fault` is called.
    /// Only the first fault counts.
    pub(crate) fn report(&self, fault: Fault) {
        if self.fault.set(fault).is_ok()
            && let Some(fault) = self.fault()
        {
            (self.on_fault)(fault);
        }
    }

    /// Locks the record and ignores poisoning: every change leaves the record consistent.
    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(&self, operation: Operation) -> Running<'_> {
        let mut activity = self.activity();
        let id = activity.next_id;
        activity.next_id += 1;
        activity.running.push(Entry { id, operation, since: Instant::now(), outstanding: None });
        Running { health: self, id }
    }

    pub(crate) fn longest_running(&self) -> Option<(String, Duration)> {
        let mut activity = self.activity();
        activity.remove_finished();
        let oldest = activity.running.iter().min_by_key(|entry| entry.since)?;
        Some((oldest.operation.to_string(), oldest.since.elapsed()))
    }

    /// Describes the current operation of this process, for the report of a stuck operation.
    pub(crate) fn describe(&self) -> String {
        let mut activity = self.activity();
        activity.remove_finished();
        let mut text = String::new();
        for Entry { operation, since, .. } in &activity.running {
            let separator = if text.is_empty() { "in " } else { " and in " };
            // Writing to a string does not fail.
            let _ = write!(text, "{separator}{operation} since {:.0?}", since.elapsed());
        }
        match (text.is_empty(), &activity.last) {
            (false, _) => text,
            (true, Some(last)) => format!("in no operation, the last was {last}"),
            (true, None) => "in no operation, and in none before".into(),
        }
    }
}

impl Activity {
    fn remove_finished(&mut self) {
        let Activity { running, last, .. } = self;
        running.retain(|entry| {
            let done = entry.outstanding.as_ref().is_some_and(|outstanding| outstanding.is_done());
            if done {
                *last = Some(entry.operation.clone());
            }
            !done
        });
    }
}

impl Running<'_> {
    /// Counts the operation as running until `outstanding` is done.
    pub(crate) fn continue_until(self, outstanding: Arc<dyn Outstanding>) {
        let mut activity = self.health.activity();
        if let Some(entry) = activity.running.iter_mut().find(|entry| entry.id == self.id) {
            entry.outstanding = Some(outstanding);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut activity = self.health.activity();
        let Activity { running, last, .. } = &mut *activity;
        let of_this = |entry: &Entry| entry.id == self.id && entry.outstanding.is_none();
        if let Some(at) = running.iter().position(of_this) {
            *last = Some(running.swap_remove(at).operation);
        }
        // An engine can then reuse their events before the monitoring thread checks them.
        activity.remove_finished();
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} no. {} of group {}", self.name, self.number, self.group)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn operation(number: u64) -> Operation {
        Operation { name: "all_reduce", group: "data".into(), number }
    }

    fn health() -> Health {
        Health::new(Arc::new(|_| ()))
    }

    #[test]
    fn an_operation_is_known_until_it_ends() {
        let health = health();
        assert_eq!(health.describe(), "in no operation, and in none before");
        let running = health.begin(operation(1));
        assert_eq!(health.longest_running().unwrap().0, "all_reduce no. 1 of group data");
        assert!(health.describe().starts_with("in all_reduce no. 1 of group data since "));
        drop(running);
        assert!(health.longest_running().is_none());
        assert_eq!(
            health.describe(),
            "in no operation, the last was all_reduce no. 1 of group data"
        );
    }

    #[test]
    fn an_operation_on_a_device_lasts_until_the_device_is_done() {
        struct Event(AtomicBool);
        impl Outstanding for Event {
            fn is_done(&self) -> bool {
                self.0.load(Ordering::Relaxed)
            }
            fn join(&self) -> Result<()> {
                Ok(())
            }
        }
        let (health, event) = (health(), Arc::new(Event(AtomicBool::new(false))));
        health.begin(operation(1)).continue_until(event.clone());
        assert!(health.longest_running().is_some());
        event.0.store(true, Ordering::Relaxed);
        assert!(health.longest_running().is_none());
    }

    #[test]
    fn only_the_first_fault_is_reported() {
        let reported = Arc::new(Mutex::new(Vec::new()));
        let report = {
            let reported = reported.clone();
            move |fault: &Fault| reported.lock().unwrap().push(fault.clone())
        };
        let health = Health::new(Arc::new(report));
        let lost = |who: &str| Fault::lost(who, "");
        health.check().unwrap();
        health.report(lost("rank 1"));
        health.report(lost("rank 2"));
        assert_eq!(*reported.lock().unwrap(), [lost("rank 1")]);
        assert_eq!(health.check(), Err(lost("rank 1").into()));
    }
}
