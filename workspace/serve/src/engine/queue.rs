//! The bounded queue between the clients' tasks and the engine's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{Event, Request};

/// The events of a sequence. They are dropped to give it up.
pub type Events = UnboundedReceiver<Event>;

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} sequences are waiting already, and at most {most} may: ask again later")]
pub struct Busy {
    /// Sequences that wait.
    pub waiting: usize,
    /// Sequences that may wait.
    pub most: usize,
}

/// Submits requests to the engine.
#[derive(Debug, Clone)]
pub struct Handle {
    sender: Sender<Submission>,
    waiting: Arc<AtomicUsize>,
    most: usize,
    is_closed: Arc<AtomicBool>,
}

/// Receives requests in the engine.
#[derive(Debug)]
pub struct Inbox {
    receiver: Receiver<Submission>,
    is_closed: Arc<AtomicBool>,
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

/// What [`Inbox::receive`] has found.
#[derive(Debug)]
pub enum Received {
    /// A request.
    One(Box<Submission>),
    /// None, for now.
    None,
    /// None, and there will be none: all handles are dropped.
    Closed,
}

/// A request on its way to the engine, or waiting there.
#[derive(Debug)]
pub struct Submission {
    pub(super) request: Request,
    pub(super) events: UnboundedSender<Event>,
    pub(super) arrived: Instant,
    /// Whether the first of the sequences with this prompt has computed it.
    pub(super) prompt_done: Arc<AtomicBool>,
    pub(super) is_first: bool,
    place: Place,
}

/// A place in the queue, until it is dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A queue of at most `most` waiting sequences.
pub fn queue(most: usize) -> (Handle, Inbox) {
    let (sender, receiver) = channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    let is_closed = Arc::new(AtomicBool::new(false));
    let inbox = Inbox { receiver, is_closed: Arc::clone(&is_closed) };
    (Handle { sender, waiting, most, is_closed }, inbox)
}

impl Handle {
    /// Submits requests, all or none. Those of a group have the same prompt: the first one computes it, and the others
    /// share what it has left.
    ///
    /// # Errors
    /// Fails if the queue has less room.
    pub fn submit(&self, groups: Vec<Vec<Request>>) -> Result<Vec<Vec<Events>>, Busy> {
        let count = groups.iter().map(Vec::len).sum::<usize>();
        let most = self.most;
        let room = |waiting: usize| waiting.checked_add(count).filter(|&sum| sum <= most);
        self.waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room)
            .map_err(|waiting| Busy { waiting, most })?;
        let arrived = Instant::now();
        let submit = |group: Vec<Request>| {
            let prompt_done = Arc::new(AtomicBool::new(false));
            let one = |(number, request): (usize, Request)| {
                let (events, received) = unbounded_channel();
                let place = Place(Arc::clone(&self.waiting));
                let prompt_done = Arc::clone(&prompt_done);
                let is_first = number == 0;
                // Without an engine the events end at once.
                let _ = self.sender.send(Submission {
                    request,
                    events,
                    arrived,
                    prompt_done,
                    is_first,
                    place,
                });
                received
            };
            group.into_iter().enumerate().map(one).collect()
        };
        Ok(groups.into_iter().map(submit).collect())
    }

    /// Whether the engine has ended.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

impl Inbox {
    /// The next request, if there is one within `patience`.
    pub fn receive(&self, patience: Duration) -> Received {
        if patience.is_zero() {
            return match self.receiver.try_recv() {
                Ok(submission) => Received::One(Box::new(submission)),
                Err(TryRecvError::Empty) => Received::None,
                Err(TryRecvError::Disconnected) => Received::Closed,
            };
        }
        match self.receiver.recv_timeout(patience) {
            Ok(submission) => Received::One(Box::new(submission)),
            Err(RecvTimeoutError::Timeout) => Received::None,
            Err(RecvTimeoutError::Disconnected) => Received::Closed,
        }
    }
}

impl Submission {
    /// What is computed, and what leaves with the queue.
    pub(super) fn admit(self) -> (Request, UnboundedSender<Event>) {
        drop(self.place);
        (self.request, self.events)
    }
}
