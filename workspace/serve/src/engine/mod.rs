//! The engine computes the sequences of all clients together, on a thread of its own. The rest of the server talks
//! to it through a [`Handle`].

mod queue;
mod request;
mod scheduler;
mod sequence;

pub use queue::{Events, Handle, Inbox, QueueFull, Submission, queue};
pub use request::{
    ComputedPrompt, Event, Failure, FinishReason, GeneratedToken, Request, TokenHeads,
};
pub use scheduler::{Admission, Limits, Scheduler};

/// The share of the places, and of the queue, that is kept for sequences that generate few tokens: one of so many.
const OF_FEW: usize = 16;
