//! A group of ranks and its typed operations: the public interface over an engine.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moh_kernels::{AnyBuffer, Memory, Scalar, span};

use crate::engine::{Engine, Member, Ticket};
use crate::watchdog::{Health, Operation};
use crate::{Error, Reduce, Result};

/// A group of ranks. Clones are the same group.
///
/// All ranks call the same operations of a group in the same order, with views of the same length. On a GPU an
/// operation runs after the earlier operators and before the later operators, and the call returns at once. In a group
/// of a single rank, every operation does nothing.
///
/// # Errors Every operation fails with [`Error::Fault`] once the job has ended, and fails if ranks or lengths do not
/// fit the group.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
}

struct Inner {
    name: Arc<str>,
    rank: usize,
    size: usize,
    /// `None` in a group of a single rank.
    engine: Option<Arc<dyn Engine>>,
    health: Arc<Health>,
    operations: AtomicU64,
}

impl Group {
    pub(crate) fn new(name: &str, member: Member, health: Arc<Health>) -> Self {
        let Member { engine, rank, size } = member;
        let engine = (size > 1).then_some(engine);
        let (name, operations) = (name.into(), AtomicU64::new(0));
        Group { inner: Arc::new(Inner { name, rank, size, engine, health, operations }) }
    }

    pub(crate) fn single(name: &str, health: Arc<Health>) -> Self {
        let (name, operations) = (name.into(), AtomicU64::new(0));
        Group {
            inner: Arc::new(Inner { name, rank: 0, size: 1, engine: None, health, operations }),
        }
    }

    pub(crate) fn engine(&self) -> Option<&Arc<dyn Engine>> {
        self.inner.engine.as_ref()
    }

    /// Returns this rank's number in the group.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Returns the group's name, used in messages.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Replaces the elements by their sum or maximum over the ranks. Any length is valid. In host
    /// memory, sums are reproducible, since they are in rank order. bf16 is summed in f32 and
    /// rounded once.
    pub fn all_reduce<B: Memory, S: Scalar>(
        &self,
        view: B::ViewMut<'_, S>,
        reduce: Reduce,
    ) -> Result<()> {
        self.run("all_reduce", |engine| engine.all_reduce(B::region_mut(view), reduce))
    }

    /// Reduces in place: `whole` is divided into equal chunks, one per rank. This rank's chunk
    /// becomes the reduction of all ranks' chunks with the same index. The other chunks are undefined
    /// afterwards.
    pub fn reduce_scatter<B: Memory, S: Scalar>(
        &self,
        whole: B::ViewMut<'_, S>,
        reduce: Reduce,
    ) -> Result<()> {
        self.run("reduce_scatter", |engine| {
            let whole = B::region_mut(whole);
            self.check_chunks("reduce_scatter", whole.len)?;
            engine.reduce_scatter(whole, reduce)
        })
    }

    /// Gathers in place: `whole` is divided into equal chunks, one per rank. Every rank receives
    /// each chunk from the rank with its number.
    pub fn all_gather<B: Memory, S: Scalar>(&self, whole: B::ViewMut<'_, S>) -> Result<()> {
        self.run("all_gather", |engine| {
            let whole = B::region_mut(whole);
            self.check_chunks("all_gather", whole.len)?;
            engine.all_gather(whole)
        })
    }

    /// Copies the elements of rank `root` of the group to every rank.
    pub fn broadcast<B: Memory, S: Scalar>(
        &self,
        view: B::ViewMut<'_, S>,
        root: usize,
    ) -> Result<()> {
        self.check_rank("broadcast", root)?;
        self.run("broadcast", |engine| engine.broadcast(B::region_mut(view), root))
    }

    /// Sends to rank `to` of the group, without waiting for the receive. Tags distinguish messages
    /// between the same two ranks that are received out of order. NCCL ignores tags and matches
    /// messages only by their order. Portable tags are below 32,768.
    pub fn send<B: Memory, S: Scalar>(
        &self,
        view: B::View<'_, S>,
        to: usize,
        tag: u32,
    ) -> Result<()> {
        self.check_other("send", to)?;
        self.run("send", |engine| engine.send(B::region(view), to, tag))
    }

    /// Allocates memory for `messages` messages of `bytes` bytes each in flight, so that sends do not
    /// allocate memory. All groups of the process share it.
    pub fn reserve_sends(&self, messages: usize, bytes: usize) -> Result<()> {
        self.engine().map_or(Ok(()), |engine| engine.reserve_sends(messages, bytes))
    }

    /// Receives the next message of rank `from` of the group with this tag. Messages with the same tag
    /// arrive in the order in which they were sent.
    pub fn recv<B: Memory, S: Scalar>(
        &self,
        view: B::ViewMut<'_, S>,
        from: usize,
        tag: u32,
    ) -> Result<()> {
        self.check_other("recv", from)?;
        self.run("recv", |engine| engine.recv(B::region_mut(view), from, tag))
    }

    /// Returns when every rank has called it and, on a GPU, has completed its work so far.
    pub fn barrier(&self) -> Result<()> {
        self.run("barrier", |engine| engine.barrier().map(|()| None))
    }

    /// Starts [`Group::reduce_scatter`] of a whole buffer, overlapped with later work on the device if the
    /// engine supports it.
    pub fn start_reduce_scatter<B: Memory>(
        &self,
        mut buffer: AnyBuffer<B>,
        reduce: Reduce,
    ) -> Result<Pending<AnyBuffer<B>>> {
        let ticket = self.start("reduce_scatter", |engine| {
            self.check_chunks("reduce_scatter", buffer.len())?;
            engine.reduce_scatter(buffer.region_mut(), reduce)
        })?;
        Ok(Pending::new(buffer, ticket, "reduce_scatter"))
    }

    /// Starts [`Group::all_gather`] of a whole buffer, overlapped with later work on the device if the
    /// engine supports it.
    pub fn start_all_gather<B: Memory>(
        &self,
        mut buffer: AnyBuffer<B>,
    ) -> Result<Pending<AnyBuffer<B>>> {
        let ticket = self.start("all_gather", |engine| {
            self.check_chunks("all_gather", buffer.len())?;
            engine.all_gather(buffer.region_mut())
        })?;
        Ok(Pending::new(buffer, ticket, "all_gather"))
    }

    /// Splits the group. Every rank must call it. Ranks with the same colour form a group, ordered
    /// by key, then by rank in this group. A rank without a colour joins no group.
    ///
    /// # Errors
    /// Fails for the same reasons as every operation of a group, and if colour or key is 2^31 or more.
    pub fn split(&self, name: &str, color: Option<usize>, key: usize) -> Result<Option<Group>> {
        let checked = |value: usize| {
            // Open MPI represents colours and keys as C's int.
            let value = u32::try_from(value).ok().filter(|&value| value <= i32::MAX as u32);
            let reason = "colours and keys must be below 2^31";
            value.ok_or_else(|| self.refuse("split", reason.into()))
        };
        let (color, key) = (color.map(checked).transpose()?, checked(key)?);
        let health = || Arc::clone(&self.inner.health);
        let mut member = None;
        self.run("split", |engine| {
            member = engine.split(color, key)?;
            Ok(None)
        })?;
        Ok(match (member, self.engine(), color) {
            (Some(member), ..) => Some(Group::new(name, member, health())),
            (None, None, Some(_)) => Some(Group::single(name, health())),
            (None, ..) => None,
        })
    }

    pub(crate) fn finish(&self) -> Result<()> {
        self.run("finish", |engine| engine.finish().map(|()| None))
    }

    fn refuse(&self, operation: &'static str, reason: String) -> Error {
        Error::Call(format!("{operation} of group {}: {reason}", self.name()))
    }

    fn check_chunks(&self, operation: &'static str, len: usize) -> Result<()> {
        if len.is_multiple_of(self.size()) {
            return Ok(());
        }
        Err(self.refuse(
            operation,
            format!(
                "{len} elements cannot be divided among {} ranks: pad the buffer to a multiple",
                self.size()
            ),
        ))
    }

    fn check_rank(&self, operation: &'static str, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        let last = self.size() - 1;
        Err(self.refuse(operation, format!("there is no rank {rank}: the last rank is {last}")))
    }

    fn check_other(&self, operation: &'static str, rank: usize) -> Result<()> {
        self.check_rank(operation, rank)?;
        if rank == self.rank() {
            return Err(self.refuse(operation, format!("rank {rank} is this rank itself")));
        }
        Ok(())
    }

    /// Runs an operation. On a GPU it is ordered with the operators.
    fn run(
        &self,
        name: &'static str,
        work: impl FnOnce(&dyn Engine) -> Result<Ticket>,
    ) -> Result<()> {
        let _span = self.engine().map(|_| span::enter(name));
        match self.begin(name, work)? {
            Some(outstanding) => outstanding.join(),
            None => Ok(()),
        }
    }

    /// Starts an operation that overlaps with later work.
    fn start(
        &self,
        name: &'static str,
        work: impl FnOnce(&dyn Engine) -> Result<Ticket>,
    ) -> Result<Ticket> {
        let _span = self.engine().map(|_| span::enter(name));
        self.begin(name, work)
    }

    /// Starts an operation and records it as running until it is done.
    fn begin(
        &self,
        name: &'static str,
        work: impl FnOnce(&dyn Engine) -> Result<Ticket>,
    ) -> Result<Ticket> {
        let Some(engine) = self.engine() else { return Ok(None) };
        let health = &self.inner.health;
        health.check()?;
        let number = self.inner.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let group = Arc::clone(&self.inner.name);
        let running = health.begin(Operation { name, group, number });
        let ticket = work(&**engine)?;
        if let Some(outstanding) = &ticket {
            running.continue_until(Arc::clone(outstanding));
        }
        Ok(ticket)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({}: rank {} of {})", self.name(), self.rank(), self.size())
    }
}

/// A buffer with an operation in flight. [`Pending::wait`] returns it. Dropping it also waits.
#[must_use = "`wait` returns the buffer"]
pub struct Pending<T> {
    /// `None` once the buffer has been returned.
    buffer: Option<T>,
    ticket: Ticket,
    operation: &'static str,
}

impl<T> Pending<T> {
    pub(crate) fn new(buffer: T, ticket: Ticket, operation: &'static str) -> Self {
        Pending { buffer: Some(buffer), ticket, operation }
    }

    /// Returns the buffer with the operation's result. On a GPU the call returns at once, and later
    /// work on the device starts after the operation.
    ///
    /// # Errors
    /// Fails if the operation fails. The buffer is then lost.
    pub fn wait(mut self) -> Result<T> {
        if let Some(outstanding) = self.ticket.take() {
            let _span = span::enter(self.operation);
            outstanding.join()?;
        }
        Ok(self
            .buffer
            .take()
            .expect("`new` stores a buffer, and only `wait`, which consumes, takes it"))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(outstanding) = self.ticket.take() {
            // The device must finish with the buffer before it is dropped. Drop cannot report errors, but
            // the group's next operation reports the same error.
            let _ = outstanding.join();
        }
    }
}
