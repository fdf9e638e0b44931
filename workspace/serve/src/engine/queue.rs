//! The bounded queue between the clients' tasks and the engine's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{Event, OF_FEW, Request};

/// The events of a sequence. They are dropped to give it up.
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

    /// Ends the sequence, whose client has all that it wants.
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
        // Whoever has left is found by `is_closed`.
        let _ = self.sender.send(event);
    }

    /// Returns whether nobody listens any more.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Returns whether the client ended the sequence with all that it wants.
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
    /// Whether the first of the sequences with this prompt has computed it.
    pub(super) prompt_done: Arc<AtomicBool>,
    pub(super) is_first: bool,
    /// Whether a sequence that was submitted together with this one is computed, or was: they have it in common.
    pub(super) has_begun: Arc<AtomicBool>,
    place: Counted,
}

/// One of what a number counts, until it is dropped.
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
    /// Submits requests, all or none. Those of a group have the same prompt: the first one computes it, and the others
    /// share what it has left.
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
                // Without an engine the events end at once.
                let _ = self.sender.send(Submission {
                    request,
                    events,
                    arrived,
                    prompt_done: Arc::clone(&prompt_done),
                    is_first: number == 0,
                    has_begun: Arc::clone(&has_begun),
                    // Counted above, with the others.
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
    /// Lets the others with the same prompt join.
    pub(super) fn release_siblings(&self) {
        self.prompt_done.store(true, Ordering::Relaxed);
    }

    /// Returns whether the first sequence with its prompt has left what it would compute.
    pub(super) fn is_ready(&self) -> bool {
        self.is_first || self.prompt_done.load(Ordering::Relaxed)
    }

    /// What is computed; its place in the queue is free.
    pub(super) fn admit(self) -> (Request, EventSender) {
        self.has_begun.store(true, Ordering::Relaxed);
        drop(self.place);
        (self.request, self.events)
    }
}
