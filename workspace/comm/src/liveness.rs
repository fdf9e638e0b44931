//! The watch over the processes of a job, on the connections that the rendezvous left open.
//!
//! Every process has one thread for it; rank 0's hears all others. A connection that ends without
//! a goodbye, or falls silent, is a dead rank; an operation that lasts too long is a stuck one.
//! Rank 0 tells all others, and every process reports the same fault.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Fault, Result};
use crate::rendezvous::{Peer, who};
use crate::watchdog::Health;
use crate::wire::{Connection, Heard, Message, TICK, part};

/// How long rank 0 waits for the others to say what they are doing.
const INQUIRY: Duration = Duration::from_secs(2);
/// How long last words may take.
const FAREWELL: Duration = Duration::from_secs(2);
/// Signs of life within the time after which silence is death.
const BEATS: u32 = 6;

/// How long something may last before it is a fault.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub operation: Duration,
    pub silence: Duration,
}

/// This process's end of the watch.
pub(crate) struct Link {
    control: Arc<Control>,
    health: Arc<Health>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Control {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Default)]
struct Orders {
    goodbye: bool,
    failed: Option<String>,
}

impl Control {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    /// Starts the watch; `peers` are all other ranks on rank 0, and rank 0 elsewhere.
    pub(crate) fn start(
        rank: usize,
        place: &str,
        peers: Vec<Peer>,
        health: Arc<Health>,
        limits: Limits,
    ) -> Result<Self> {
        let control = Arc::new(Control::default());
        let watched = |mut peer: Peer| {
            // It may have been waiting for others longer than it may be silent from now on.
            peer.connection.last_heard = Instant::now();
            Watched { peer, gone: false }
        };
        let peers = peers.into_iter().map(watched).collect();
        let watch = Watch {
            rank,
            who: who(rank, place),
            peers,
            health: Arc::clone(&health),
            control: Arc::clone(&control),
            limits,
            last_beat: Instant::now(),
            told_stuck: false,
            told_goodbye: false,
            inquiry: None,
        };
        let thread = std::thread::Builder::new().name("moh-liveness".into());
        let thread = thread.spawn(move || watch.run()).map_err(|error| Error::Engine {
            engine: "liveness",
            operation: "starting a thread",
            reason: error.to_string(),
        })?;
        Ok(Link { control, health, thread: Mutex::new(Some(thread)) })
    }

    /// Says goodbye and waits until all ranks have.
    ///
    /// # Errors
    /// The fault that came before.
    pub(crate) fn close(&self) -> Result<()> {
        self.control.orders().goodbye = true;
        self.end();
        self.health.check()
    }

    /// Tells all ranks that this one ends with an error.
    pub(crate) fn fail(&self, reason: &str) {
        self.control.orders().failed = Some(reason.to_owned());
        self.end();
    }

    fn end(&self) {
        self.control.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The thread itself drops the last link where its caller's function on a fault does.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic in the caller's function on a fault ended it: the fault is recorded.
            let _ = thread.join();
        }
    }
}

struct Watched {
    peer: Peer,
    /// It has said goodbye.
    gone: bool,
}

/// What rank 0 asks all when an operation is stuck.
struct Inquiry {
    who: String,
    operation: String,
    answers: BTreeMap<usize, String>,
    until: Instant,
}

struct Watch {
    rank: usize,
    who: String,
    peers: Vec<Watched>,
    health: Arc<Health>,
    control: Arc<Control>,
    limits: Limits,
    last_beat: Instant,
    told_stuck: bool,
    told_goodbye: bool,
    inquiry: Option<Inquiry>,
}

impl Watch {
    fn run(mut self) {
        let fault = loop {
            let (goodbye, failed) = self.orders();
            if let Some(reason) = failed {
                self.end_with_error(reason);
                break None;
            }
            if goodbye && !self.told_goodbye {
                self.told_goodbye = true;
                if self.rank != 0 {
                    self.say_to_all(&Message::Goodbye);
                }
            }
            let fault = self.hear().or_else(|| self.look_for_stuck_operations());
            if fault.is_some() {
                break fault;
            }
            if self.told_goodbye && self.peers.iter().all(|watched| watched.gone) {
                if self.rank == 0 {
                    self.say_to_all(&Message::Goodbye);
                }
                self.part();
                break None;
            }
            self.beat();
        };
        if let Some(fault) = fault {
            if self.rank == 0 {
                self.say_to_all(&Message::Fault(fault.clone()));
                self.part();
            }
            // Others see from the closed connection that this process has heard.
            self.peers.clear();
            self.health.report(fault);
        }
    }

    /// Waits one tick, unless there is an order.
    fn orders(&self) -> (bool, Option<String>) {
        let mut orders = self.control.orders();
        if orders.failed.is_none() && (!orders.goodbye || self.told_goodbye) {
            let waited = self.control.changed.wait_timeout(orders, TICK);
            orders = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        (orders.goodbye, orders.failed.take())
    }

    /// Hears all others; several that die at once are named together.
    fn hear(&mut self) -> Option<Fault> {
        let mut lost: Vec<(String, String)> = Vec::new();
        let mut stuck = None;
        for watched in &mut self.peers {
            if watched.gone {
                continue;
            }
            let Watched { peer, gone } = watched;
            let heard = loop {
                match peer.connection.hear() {
                    Heard::Message(Message::Goodbye) => *gone = true,
                    Heard::Message(Message::Ask) => {
                        let text = self.health.describe();
                        peer.connection.say(&Message::Doing { text });
                    }
                    Heard::Message(Message::Doing { text }) => {
                        if let Some(inquiry) = &mut self.inquiry {
                            inquiry.answers.insert(peer.rank, text);
                        }
                    }
                    Heard::Message(Message::Stuck { operation }) => {
                        stuck = Some((peer.who(), operation));
                    }
                    Heard::Message(_) if *gone => {}
                    heard @ (Heard::Message(Message::Failed { .. } | Message::Fault(_))
                    | Heard::Nothing
                    | Heard::Lost(_)) => break heard,
                    Heard::Message(_) => {}
                }
            };
            match heard {
                Heard::Message(Message::Fault(fault)) if self.rank != 0 => return Some(fault),
                Heard::Message(Message::Failed { reason }) => {
                    return Some(Fault::Failed { who: peer.who(), reason });
                }
                Heard::Lost(reason) if !*gone => lost.push((peer.who(), reason)),
                Heard::Nothing if !*gone => {
                    let silence = peer.connection.last_heard.elapsed();
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
        Some(Fault::Lost { who: who.join(" and "), reason })
    }

    fn look_for_stuck_operations(&mut self) -> Option<Fault> {
        if !self.told_stuck
            && let Some((operation, lasted)) = self.health.longest()
            && lasted > self.limits.operation
        {
            self.told_stuck = true;
            let operation = format!("{operation} since {lasted:.0?}");
            if self.rank == 0 {
                self.inquire(self.who.clone(), operation);
            } else {
                self.say_to_all(&Message::Stuck { operation });
            }
        }
        let inquiry = self.inquiry.as_ref()?;
        let asked = self.peers.iter().filter(|watched| !watched.gone);
        let answered = asked.clone().all(|w| inquiry.answers.contains_key(&w.peer.rank));
        if !answered && Instant::now() < inquiry.until {
            return None;
        }
        let mut report = vec![format!("{} is {}", self.who, self.health.describe())];
        report.extend(self.peers.iter().map(|Watched { peer, gone }| {
            let answer = inquiry.answers.get(&peer.rank).map(String::as_str);
            let nothing = if *gone { "at its end" } else { "silent" };
            format!("{} is {}", peer.who(), answer.unwrap_or(nothing))
        }));
        Some(Fault::Stuck {
            who: inquiry.who.clone(),
            operation: inquiry.operation.clone(),
            report: report.join("; "),
        })
    }

    fn inquire(&mut self, who: String, operation: String) {
        if self.inquiry.is_none() {
            let (answers, until) = (BTreeMap::new(), Instant::now() + INQUIRY);
            self.inquiry = Some(Inquiry { who, operation, answers, until });
            self.say_to_all(&Message::Ask);
        }
    }

    fn end_with_error(&mut self, reason: String) {
        let message = if self.rank == 0 {
            Message::Fault(Fault::Failed { who: self.who.clone(), reason })
        } else {
            Message::Failed { reason }
        };
        self.say_to_all(&message);
        self.part();
    }

    fn beat(&mut self) {
        if self.last_beat.elapsed() > self.limits.silence / BEATS {
            self.last_beat = Instant::now();
            self.say_to_all(&Message::Alive);
        }
        for watched in &mut self.peers {
            watched.peer.connection.flush();
        }
    }

    fn say_to_all(&mut self, message: &Message) {
        for watched in &mut self.peers {
            watched.peer.connection.say(message);
        }
    }

    fn part(&mut self) {
        let connections: Vec<Connection> =
            self.peers.drain(..).map(|watched| watched.peer.connection).collect();
        part(connections, FAREWELL);
    }
}

#[cfg(test)]
#[path = "liveness_tests.rs"]
mod tests;
