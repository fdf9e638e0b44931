//! The trait that every communication engine implements.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod scratch;
pub(crate) mod threads;

use std::sync::Arc;

use moh_kernels::{Region, RegionMut};

use crate::watchdog::Outstanding;
use crate::{Reduce, Result};

/// The remaining work of an operation after its call has returned. `None` if the operation is done. The
/// operation's memory must stay valid until it is done.
pub(crate) type Ticket = Option<Arc<dyn Outstanding>>;

/// A group's communication backend, with the operations of [`crate::Group`]. All ranks call the same operations in
/// the same order, with regions of the same length and type. [`crate::Group`] has checked that ranks are in the
/// group and, where required, that lengths are multiples of its size.
pub(crate) trait Engine: Send + Sync {
    fn all_reduce(&self, region: RegionMut<'_>, reduce: Reduce) -> Result<Ticket>;
    fn reduce_scatter(&self, whole: RegionMut<'_>, reduce: Reduce) -> Result<Ticket>;
    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket>;
    fn broadcast(&self, region: RegionMut<'_>, root: usize) -> Result<Ticket>;

    /// Sends the `region`, which may be reused once the call, or the operation of its ticket, is done.
    fn send(&self, region: Region<'_>, to: usize, tag: u32) -> Result<Ticket>;

    /// Allocates memory for sends in advance. Existing memory counts. Other engines allocate memory when they send.
    fn reserve_sends(&self, _messages: usize, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// Receives into the `region`. An engine may ignore tags.
    fn recv(&self, region: RegionMut<'_>, from: usize, tag: u32) -> Result<Ticket>;

    fn barrier(&self) -> Result<()>;
    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>>;

    /// Waits until all messages are sent, before the job ends.
    fn finish(&self) -> Result<()>;

    /// Ends the processes of the whole job, or at least this one.
    fn abort(&self, code: i32) -> !;
}

pub(crate) struct Member {
    pub engine: Arc<dyn Engine>,
    pub rank: usize,
    pub size: usize,
}
