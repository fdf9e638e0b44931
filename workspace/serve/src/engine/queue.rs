//! The bounded queue between the clients' tasks and the engine's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{Event, OF_FEW, Request};

/// The events of a sequence. Dropping them cancels the sequence.
#[derive(Debug)]
pub struct Events {
    receiver: UnboundedReceiver<Event>,
    is_enough: Arc<AtomicBool>,
}

impl Events {
    /// Returns the next event; `None` if the engine has ended.
    pub async fn next(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// Ends the sequence, because its client wants no more.
    pub fn end(&mut self) {
        self.is_enough.store(true, Ordering::Relaxed);
        self.receiver.close();
    }
}

/// The engine's side of [`Events`].
#[derive(Debug)]
pub(super) struct EventSender {
    sender: UnboundedSender<Event>,
    is_enough: Arc<AtomicBool>,
    _active: Counted,
}

impl EventSender {
    pub fn send(&self, event: Event) {
        // `is_closed` finds clients that have left.
        let _ = self.sender.send(event);
    }

    /// Returns whether the client has left.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Returns whether the client wants no more of the sequence.
    pub fn is_enough(&self) -> bool {
        self.is_enough.load(Ordering::Relaxed)
    }
}

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} sequences are waiting already, and at most {capacity} may: ask again later")]
pub struct QueueFull {
    /// Sequences that wait.
    pub waiting: usize,
    /// Sequences that may wait.
    pub capacity: usize,
}

/// Submits requests to the engine.
#[derive(Debug, Clone)]
pub struct Handle {
    sender: Sender<Submission>,
    waiting: Arc<AtomicUsize>,
    /// Sequences that wait or are computed.
    pub active: Arc<AtomicUsize>,
    /// Sequences that may wait.
    pub capacity: usize,
    is_closed: Arc<AtomicBool>,
}

/// Receives requests in the engine.
#[derive(Debug)]
pub struct Inbox {
    pub(super) receiver: Receiver<Submission>,
    is_closed: Arc<AtomicBool>,
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

/// A request on its way to the engine, or waiting there.
#[derive(Debug)]
pub struct Submission {
    pub(super) request: Request,
    pub(super) events: EventSender,
    pub(super) arrived: Instant,
    /// Whether the first sequence with this prompt has computed the prompt.
    pub(super) prompt_done: Arc<AtomicBool>,
    pub(super) is_first: bool,
    /// Whether any sequence that was submitted together with this one was ever computed. They share the flag.
    pub(super) has_begun: Arc<AtomicBool>,
    place: Counted,
}

/// Counts one in a number until it is dropped.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(number: &Arc<AtomicUsize>) -> Self {
        number.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(number))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns a queue of at most `capacity` waiting sequences.
pub fn queue(capacity: usize) -> (Handle, Inbox) {
    let (sender, receiver) = channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    let is_closed = Arc::new(AtomicBool::new(false));
    let inbox = Inbox { receiver, is_closed: Arc::clone(&is_closed) };
    (Handle { sender, waiting, active: Arc::default(), capacity, is_closed }, inbox)
}

impl Handle {
    /// Submits all requests, or fails. The requests of a group have the same prompt. The first request computes it, and
    /// the others share its keys and values.
    pub fn submit(&self, groups: Vec<Vec<Request>>) -> Result<Vec<Vec<Events>>, QueueFull> {
        let count = groups.iter().map(Vec::len).sum::<usize>();
        let generates_many = groups.iter().flatten().any(Request::generates_many);
        let capacity = self.capacity - if generates_many { self.capacity / OF_FEW } else { 0 };
        let room = |waiting: usize| waiting.checked_add(count).filter(|&sum| sum <= capacity);
        self.waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room)
            .map_err(|waiting| QueueFull { waiting, capacity })?;
        let (arrived, has_begun) = (Instant::now(), Arc::default());
        let submit = |group: Vec<Request>| {
            let prompt_done = Arc::default();
            let submit = |(number, request): (usize, Request)| {
                let (sender, receiver) = unbounded_channel();
                let is_enough: Arc<AtomicBool> = Arc::default();
                let (is_enough_too, _active) = (Arc::clone(&is_enough), Counted::new(&self.active));
                let events = EventSender { sender, is_enough: is_enough_too, _active };
                // If the engine has ended, the events end at once.
                let _ = self.sender.send(Submission {
                    request,
                    events,
                    arrived,
                    prompt_done: Arc::clone(&prompt_done),
                    is_first: number == 0,
                    has_begun: Arc::clone(&has_begun),
                    // Counted above, together with the others.
                    place: Counted(Arc::clone(&self.waiting)),
                });
                Events { receiver, is_enough }
            };
            group.into_iter().enumerate().map(submit).collect()
        };
        Ok(groups.into_iter().map(submit).collect())
    }

    /// Returns whether the engine has ended.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

impl Submission {
    /// Lets the other sequences with the same prompt join.
    pub(super) fn release_siblings(&self) {
        self.prompt_done.store(true, Ordering::Relaxed);
    }

    /// Returns whether the sequence may join: it is the first with its prompt, or that prompt is computed.
    pub(super) fn is_ready(&self) -> bool {
        self.is_first || self.prompt_done.load(Ordering::Relaxed)
    }

    /// Frees the place in the queue; returns the request and its events.
    pub(super) fn admit(self) -> (Request, EventSender) {
        self.has_begun.store(true, Ordering::Relaxed);
        drop(self.place);
        (self.request, self.events)
    }
}
