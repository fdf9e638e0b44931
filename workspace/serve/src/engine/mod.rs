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

/// One in so many places, in the engine and in the queue, is kept for sequences that generate few tokens.
const OF_FEW: usize = 16;
