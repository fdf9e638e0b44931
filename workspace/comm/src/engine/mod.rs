//! The interface of what moves the bytes.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod scratch;
pub(crate) mod threads;

use std::sync::Arc;

use moh_kernels::{Region, RegionMut};

use crate::error::Result;
use crate::reduce::Reduce;
use crate::watchdog::Outstanding;

/// What goes on when an operation's call has returned: none where it is done. The memory that the
/// operation was given must stay until then.
pub(crate) type Ticket = Option<Arc<dyn Outstanding>>;

/// A group's way to move numbers between its ranks. All ranks call the same operations in the same
/// order, with regions of the same length and type; [`crate::Group`] has checked that ranks are
/// below the size, and that lengths are multiples of it where they must be.
pub(crate) trait Engine: Send + Sync {
    /// Replaces the numbers by their reduction over the ranks.
    fn all_reduce(&self, part: RegionMut<'_>, reduce: Reduce) -> Result<Ticket>;

    /// Rank r's r-th part becomes the reduction of all ranks' r-th parts; the others are undefined.
    fn reduce_scatter(&self, whole: RegionMut<'_>, reduce: Reduce) -> Result<Ticket>;

    /// Every rank's r-th part becomes rank r's.
    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket>;

    /// Every rank's numbers become those of `root`.
    fn broadcast(&self, part: RegionMut<'_>, root: usize) -> Result<Ticket>;

    /// Sends to another rank, without waiting for it; `part` may be reused when the call, or what
    /// its ticket stands for, is done.
    fn send(&self, part: Region<'_>, to: usize, tag: u32) -> Result<Ticket>;

    /// Takes memory for `messages` messages of `bytes` bytes that are sent and have not left, of all groups
    /// of this process; what is there already counts. Engines without it take memory as they send.
    fn reserve_sends(&self, _messages: usize, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// Receives what `from` sends with this tag, in its order.
    fn recv(&self, part: RegionMut<'_>, from: usize, tag: u32) -> Result<Ticket>;

    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// Divides the group: ranks of one colour become a group, ordered by key, then by rank.
    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>>;

    /// Waits until what was sent has left, before the job ends.
    fn finish(&self) -> Result<()>;

    /// Ends the processes of the whole job, at least this one.
    fn abort(&self, code: i32) -> !;
}

/// One rank's end of an engine.
pub(crate) struct Member {
    pub engine: Arc<dyn Engine>,
    pub rank: usize,
    pub size: usize,
}
