//! Monitors the processes of a job over the connections of the rendezvous.
//!
//! Every process has one monitoring thread. Rank 0's thread listens to all other ranks. If a connection
//! closes without a goodbye or is silent for too long, its rank is dead. An operation that exceeds its limit
//! is stuck. Rank 0 forwards the fault, so every process reports the same fault.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Fault, Result};
use crate::rendezvous::{Peer, who};
use crate::watchdog::Health;
use crate::wire::{Connection, Message, POLL_INTERVAL, Received, close_all};

/// How long rank 0 waits for the other ranks to report their operations.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
const HEARTBEATS_PER_LIMIT: u32 = 6;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub operation: Duration,
    pub silence: Duration,
}

/// This process's end of the connections.
pub(crate) struct Link {
    control: Arc<Control>,
    health: Arc<Health>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Control {
    requests: Mutex<Requests>,
    changed: Condvar,
}

#[derive(Default)]
struct Requests {
    goodbye: bool,
    failed: Option<String>,
}

impl Control {
    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    /// Starts monitoring. `peers` are all other ranks on rank 0, and rank 0 on other ranks.
    pub(crate) fn start(
        rank: usize,
        place: &str,
        peers: Vec<Peer>,
        health: Arc<Health>,
        limits: Limits,
    ) -> Result<Self> {
        let control = Arc::new(Control::default());
        let monitored = |mut peer: Peer| {
            // The wait for the other ranks may have exceeded the silence limit.
            peer.connection.last_received = Instant::now();
            Monitored { peer, said_goodbye: false }
        };
        let peers = peers.into_iter().map(monitored).collect();
        let monitor = Monitor {
            rank,
            who: who(rank, place),
            peers,
            health: Arc::clone(&health),
            control: Arc::clone(&control),
            limits,
            last_heartbeat: Instant::now(),
            reported_stuck: false,
            sent_goodbye: false,
            inquiry: None,
        };
        let thread = std::thread::Builder::new().name("moh-liveness".into());
        let thread = thread
            .spawn(move || monitor.run())
            .map_err(|error| Error::engine("liveness", "starting a thread", error))?;
        Ok(Link { control, health, thread: Mutex::new(Some(thread)) })
    }

    /// Says goodbye and waits for the goodbyes of all ranks.
    pub(crate) fn close(&self) -> Result<()> {
        self.control.requests().goodbye = true;
        self.end();
        self.health.check()
    }

    /// Reports to all ranks that this rank ends with an error.
    pub(crate) fn fail(&self, reason: &str) {
        self.control.requests().failed = Some(reason.to_owned());
        self.end();
    }

    fn end(&self) {
        self.control.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // If the caller's `on_fault` drops the last link, this thread is the monitoring thread itself.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic in the caller's `on_fault` ended the thread. The fault is recorded.
            let _ = thread.join();
        }
    }
}

struct Monitored {
    peer: Peer,
    said_goodbye: bool,
}

/// Rank 0's inquiry to all ranks about a stuck operation.
struct Inquiry {
    who: String,
    operation: String,
    /// The current operation of each rank, by rank.
    answers: BTreeMap<usize, String>,
    deadline: Instant,
}

struct Monitor {
    rank: usize,
    who: String,
    peers: Vec<Monitored>,
    health: Arc<Health>,
    control: Arc<Control>,
    limits: Limits,
    last_heartbeat: Instant,
    reported_stuck: bool,
    sent_goodbye: bool,
    inquiry: Option<Inquiry>,
}

impl Monitor {
    fn run(mut self) {
        let fault = loop {
            let (goodbye, failed) = self.take_requests();
            if let Some(reason) = failed {
                self.end_with_error(reason);
                break None;
            }
            if goodbye && !self.sent_goodbye {
                self.sent_goodbye = true;
                if self.rank != 0 {
                    self.send_to_all(&Message::Goodbye);
                }
            }
            let fault = self.receive().or_else(|| self.look_for_stuck_operations());
            if fault.is_some() {
                break fault;
            }
            if self.sent_goodbye && self.peers.iter().all(|monitored| monitored.said_goodbye) {
                if self.rank == 0 {
                    self.send_to_all(&Message::Goodbye);
                }
                self.close();
                break None;
            }
            self.send_heartbeat();
        };
        if let Some(fault) = fault {
            if self.rank == 0 {
                self.send_to_all(&Message::Fault(fault.clone()));
                self.close();
            }
            // The closed connection informs the others that this process has received the fault.
            self.peers.clear();
            self.health.report(fault);
        }
    }

    /// Waits for a request of the process, for at most a poll interval.
    fn take_requests(&self) -> (bool, Option<String>) {
        let mut requests = self.control.requests();
        if requests.failed.is_none() && (!requests.goodbye || self.sent_goodbye) {
            let waited = self.control.changed.wait_timeout(requests, POLL_INTERVAL);
            requests = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        (requests.goodbye, requests.failed.take())
    }

    /// Receives from all peers. Peers that die at the same time are reported together.
    fn receive(&mut self) -> Option<Fault> {
        let mut lost: Vec<(String, String)> = Vec::new();
        let mut stuck = None;
        for monitored in &mut self.peers {
            if monitored.said_goodbye {
                continue;
            }
            let Monitored { peer, said_goodbye } = monitored;
            let received = loop {
                match peer.connection.receive() {
                    Received::Message(Message::Goodbye) => *said_goodbye = true,
                    Received::Message(Message::Ask) => {
                        let text = self.health.describe();
                        peer.connection.send(&Message::Doing { text });
                    }
                    Received::Message(Message::Doing { text }) => {
                        if let Some(inquiry) = &mut self.inquiry {
                            inquiry.answers.insert(peer.rank, text);
                        }
                    }
                    Received::Message(Message::Stuck { operation }) => {
                        stuck = Some((peer.who(), operation));
                    }
                    Received::Message(_) if *said_goodbye => {}
                    received @ (Received::Message(Message::Failed { .. } | Message::Fault(_))
                    | Received::Nothing
                    | Received::Lost(_)) => break received,
                    Received::Message(_) => {}
                }
            };
            match received {
                Received::Message(Message::Fault(fault)) if self.rank != 0 => return Some(fault),
                Received::Message(Message::Failed { reason }) => {
                    return Some(Fault::Failed { who: peer.who(), reason });
                }
                Received::Lost(reason) if !*said_goodbye => lost.push((peer.who(), reason)),
                Received::Nothing if !*said_goodbye => {
                    let silence = peer.connection.last_received.elapsed();
                    if silence > self.limits.silence {
                        lost.push((peer.who(), format!("no sign of life for {silence:.0?}")));
                    }
                }
                _ => {}
            }
        }
        if let Some((who, operation)) = stuck {
            self.inquire(who, operation);
        }
        let (_, reason) = lost.first()?;
        let reason = reason.clone();
        let who: Vec<String> = lost.into_iter().map(|(who, _)| who).collect();
        Some(Fault::lost(&who.join(" and "), &reason))
    }

    /// Reports an operation of this process that exceeds its limit. On rank 0, returns the fault
    /// once all ranks have reported their operations or the deadline has passed.
    fn look_for_stuck_operations(&mut self) -> Option<Fault> {
        if !self.reported_stuck
            && let Some((operation, lasted)) = self.health.longest_running()
            && lasted > self.limits.operation
        {
            self.reported_stuck = true;
            let operation = format!("{operation} since {lasted:.0?}");
            if self.rank == 0 {
                self.inquire(self.who.clone(), operation);
            } else {
                self.send_to_all(&Message::Stuck { operation });
            }
        }
        let inquiry = self.inquiry.as_ref()?;
        let asked = self.peers.iter().filter(|monitored| !monitored.said_goodbye);
        let answered = asked.clone().all(|asked| inquiry.answers.contains_key(&asked.peer.rank));
        if !answered && Instant::now() < inquiry.deadline {
            return None;
        }
        let mut report = vec![format!("{} is {}", self.who, self.health.describe())];
        report.extend(self.peers.iter().map(|Monitored { peer, said_goodbye }| {
            let answer = inquiry.answers.get(&peer.rank).map(String::as_str);
            let nothing = if *said_goodbye { "at its end" } else { "silent" };
            format!("{} is {}", peer.who(), answer.unwrap_or(nothing))
        }));
        Some(Fault::Ranks(format!(
            "{} waits in {}; {}: look first at a rank that is not in the same operation",
            inquiry.who,
            inquiry.operation,
            report.join("; ")
        )))
    }

    /// Asks all ranks for their operations, unless they were asked before. Only rank 0 calls it.
    fn inquire(&mut self, who: String, operation: String) {
        if self.inquiry.is_none() {
            let (answers, deadline) = (BTreeMap::new(), Instant::now() + REPORT_TIMEOUT);
            self.inquiry = Some(Inquiry { who, operation, answers, deadline });
            self.send_to_all(&Message::Ask);
        }
    }

    fn end_with_error(&mut self, reason: String) {
        let message = if self.rank == 0 {
            Message::Fault(Fault::Failed { who: self.who.clone(), reason })
        } else {
            Message::Failed { reason }
        };
        self.send_to_all(&message);
        self.close();
    }

    fn send_heartbeat(&mut self) {
        if self.last_heartbeat.elapsed() > self.limits.silence / HEARTBEATS_PER_LIMIT {
            self.last_heartbeat = Instant::now();
            self.send_to_all(&Message::Alive);
        }
        for monitored in &mut self.peers {
            monitored.peer.connection.flush();
        }
    }

    fn send_to_all(&mut self, message: &Message) {
        for monitored in &mut self.peers {
            monitored.peer.connection.send(message);
        }
    }

    fn close(&mut self) {
        let connections: Vec<Connection> =
            self.peers.drain(..).map(|monitored| monitored.peer.connection).collect();
        close_all(connections, CLOSE_TIMEOUT);
    }
}

#[cfg(test)]
#[path = "liveness_tests.rs"]
mod tests;
