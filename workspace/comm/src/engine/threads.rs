//! Ranks that are threads of a single process, for tests. They exchange data through slots in shared
//! memory, one per rank.
//!
//! In an exchange, every rank fills its slot, all ranks meet at a barrier, and every rank reads the slots that
//! it needs. Two sets of slots alternate, so a single barrier per exchange is enough: a rank that
//! reaches the next barrier has finished reading the last exchange. When a rank is dropped or panics, the
//! barriers and receives that wait for it fail.

use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use moh_kernels::{DType, Location, LocationMut, Region, RegionMut};

use super::scratch::Scratch;
use super::{Engine, Member, Ticket};
use crate::error::{Error, Result};
use crate::reduce::{Reduce, reduce};
use crate::watchdog::Health;

/// How often a waiting thread checks whether the job has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) struct Threads {
    shared: Arc<SharedState>,
    rank: usize,
    health: Arc<Health>,
    /// The number of this rank's exchanges so far, locked during each exchange.
    exchanges: Mutex<u64>,
}

pub(crate) struct SharedState {
    size: usize,
    barrier: Mutex<Barrier>,
    released: Condvar,
    slots: [Vec<RwLock<Slot>>; 2],
    mailbox: Mutex<Mailbox>,
    posted: Condvar,
    /// The states of unfinished splits, by exchange and colour.
    pending_splits: Mutex<HashMap<(u64, u32), PendingSplit>>,
}

struct PendingSplit {
    shared: Arc<SharedState>,
    /// Ranks that have not joined yet.
    missing: usize,
}

#[derive(Default)]
struct Barrier {
    /// Ranks that have arrived at the current barrier.
    arrived: usize,
    number: u64,
    /// The first rank that left the group.
    left: Option<usize>,
}

#[derive(Default)]
struct Slot {
    call: Option<Call>,
    bytes: Scratch,
}

/// The arguments that must agree on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Call {
    operation: &'static str,
    dtype: DType,
    len: usize,
    reduce: Option<Reduce>,
    root: Option<usize>,
}

#[derive(Default)]
struct Mailbox {
    /// By receiver, sender and tag.
    messages: HashMap<(usize, usize, u32), VecDeque<Scratch>>,
    free: Vec<Scratch>,
    left: Vec<usize>,
}

/// Locks a mutex and ignores poisoning. Each change is a single step, so a panic elsewhere leaves the values
/// consistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedState {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        let slots = || (0..size).map(|_| RwLock::default()).collect();
        Arc::new(SharedState {
            size,
            barrier: Mutex::default(),
            released: Condvar::new(),
            slots: [slots(), slots()],
            mailbox: Mutex::default(),
            posted: Condvar::new(),
            pending_splits: Mutex::default(),
        })
    }
}

/// Returns one member per health record.
pub(crate) fn group(healths: impl ExactSizeIterator<Item = Arc<Health>>) -> Vec<Member> {
    let shared = SharedState::new(healths.len());
    let size = healths.len();
    let member = |(rank, health)| Member {
        engine: Arc::new(Threads::new(Arc::clone(&shared), rank, health)),
        rank,
        size,
    };
    healths.enumerate().map(member).collect()
}

fn failed(operation: &'static str, reason: impl Display) -> Error {
    Error::engine("threads", operation, reason)
}

fn not_host_memory(operation: &'static str) -> Error {
    failed(operation, "the buffer is in GPU memory: groups of threads transfer host memory only")
}

/// Returns the call without a reduction or a root, and the elements in host memory.
fn call<'a>(operation: &'static str, region: RegionMut<'a>) -> Result<(Call, &'a mut [u8])> {
    let RegionMut { dtype, len, location: LocationMut::Host(elements) } = region else {
        return Err(not_host_memory(operation));
    };
    Ok((Call { operation, dtype, len, reduce: None, root: None }, elements))
}

fn left(rank: usize) -> Error {
    Error::Call(format!("rank {rank} left the group while other ranks waited for it"))
}

/// The contributions of all ranks to an exchange.
struct Gathered<'a> {
    slots: Vec<RwLockReadGuard<'a, Slot>>,
    /// The number of the exchange. Its lock keeps a rank's exchanges in sequence.
    number: MutexGuard<'a, u64>,
}

impl Gathered<'_> {
    fn contribution(&self, rank: usize) -> &[u8] {
        self.slots[rank].bytes.bytes()
    }
}

impl Threads {
    pub(crate) fn new(shared: Arc<SharedState>, rank: usize, health: Arc<Health>) -> Self {
        Threads { shared, rank, health, exchanges: Mutex::default() }
    }

    /// Passes `contribution` to all ranks. The contributions of all ranks can be read until the result is
    /// dropped.
    fn exchange(&self, call: Call, contribution: &[u8]) -> Result<Gathered<'_>> {
        let mut number = locked(&self.exchanges);
        let slots = &self.shared.slots[(*number % 2) as usize];
        {
            let mut slot = slots[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            slot.call = Some(call);
            slot.bytes.fill(contribution);
        }
        self.wait_for_all()?;
        let slots: Vec<_> =
            slots.iter().map(|slot| slot.read().unwrap_or_else(PoisonError::into_inner)).collect();
        *number += 1;
        for (rank, slot) in slots.iter().enumerate() {
            if slot.call != Some(call) {
                let reason = format!(
                    "rank {rank} calls {}, rank {} calls {}: all ranks of a group must call the \
                     same operations in the same order",
                    describe(slot.call.as_ref()),
                    self.rank,
                    describe(Some(&call))
                );
                return Err(failed(call.operation, reason));
            }
        }
        Ok(Gathered { slots, number })
    }

    fn wait_for_all(&self) -> Result<()> {
        let shared = &*self.shared;
        let mut barrier = locked(&shared.barrier);
        let number = barrier.number;
        barrier.arrived += 1;
        if barrier.arrived == shared.size {
            barrier.arrived = 0;
            barrier.number += 1;
            shared.released.notify_all();
            return Ok(());
        }
        loop {
            // A completed barrier counts, even if a rank has left in the meantime.
            if barrier.number != number {
                return Ok(());
            }
            self.health.check()?;
            if let Some(rank) = barrier.left {
                return Err(left(rank));
            }
            let waited = shared.released.wait_timeout(barrier, POLL_INTERVAL);
            barrier = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn describe(call: Option<&Call>) -> String {
    let Some(Call { operation, dtype, len, reduce, root }) = call else { return "nothing".into() };
    let reduce = reduce.map_or(String::new(), |reduce| format!(" ({reduce:?})"));
    let root = root.map_or(String::new(), |root| format!(" from rank {root}"));
    format!("{operation}{reduce}{root} of {len} {dtype:?}")
}

impl Engine for Threads {
    fn all_reduce(&self, region: RegionMut<'_>, how: Reduce) -> Result<Ticket> {
        let (call, out) = call("all_reduce", region)?;
        let gathered = self.exchange(Call { reduce: Some(how), ..call }, out)?;
        reduce(call.dtype, how, out, self.shared.size, |rank| Some(gathered.contribution(rank)));
        Ok(None)
    }

    fn reduce_scatter(&self, whole: RegionMut<'_>, how: Reduce) -> Result<Ticket> {
        let (call, out) = call("reduce_scatter", whole)?;
        let size = self.shared.size;
        let own = out.len() / size * self.rank..out.len() / size * (self.rank + 1);
        let gathered = self.exchange(Call { reduce: Some(how), ..call }, out)?;
        reduce(call.dtype, how, &mut out[own.clone()], size, |rank| {
            Some(&gathered.contribution(rank)[own.clone()])
        });
        Ok(None)
    }

    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket> {
        let (call, out) = call("all_gather", whole)?;
        let chunk = out.len() / self.shared.size;
        let gathered = self.exchange(call, &out[chunk * self.rank..chunk * (self.rank + 1)])?;
        for rank in 0..self.shared.size {
            out[chunk * rank..chunk * (rank + 1)].copy_from_slice(gathered.contribution(rank));
        }
        Ok(None)
    }

    fn broadcast(&self, region: RegionMut<'_>, root: usize) -> Result<Ticket> {
        let (call, out) = call("broadcast", region)?;
        let contribution: &[u8] = if root == self.rank { out } else { &[] };
        let gathered = self.exchange(Call { root: Some(root), ..call }, contribution)?;
        out.copy_from_slice(gathered.contribution(root));
        Ok(None)
    }

    fn send(&self, region: Region<'_>, to: usize, tag: u32) -> Result<Ticket> {
        let Location::Host(bytes) = region.location else { return Err(not_host_memory("send")) };
        self.health.check()?;
        let mut mailbox = locked(&self.shared.mailbox);
        let mut message = mailbox.free.pop().unwrap_or_default();
        message.fill(bytes);
        mailbox.messages.entry((to, self.rank, tag)).or_default().push_back(message);
        self.shared.posted.notify_all();
        Ok(None)
    }

    fn recv(&self, region: RegionMut<'_>, from: usize, tag: u32) -> Result<Ticket> {
        let LocationMut::Host(out) = region.location else { return Err(not_host_memory("recv")) };
        let mut mailbox = locked(&self.shared.mailbox);
        loop {
            let messages = mailbox.messages.get_mut(&(self.rank, from, tag));
            if let Some(message) = messages.and_then(VecDeque::pop_front) {
                let sent = message.bytes();
                if sent.len() != out.len() {
                    let (sent, expected) = (sent.len(), out.len());
                    let reason = format!(
                        "rank {from} sent {sent} bytes with tag {tag}, expected {expected}"
                    );
                    return Err(failed("recv", reason));
                }
                out.copy_from_slice(sent);
                mailbox.free.push(message);
                return Ok(None);
            }
            self.health.check()?;
            if mailbox.left.contains(&from) {
                return Err(left(from));
            }
            let waited = self.shared.posted.wait_timeout(mailbox, POLL_INTERVAL);
            mailbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn barrier(&self) -> Result<()> {
        let call =
            Call { operation: "barrier", dtype: DType::U8, len: 0, reduce: None, root: None };
        self.exchange(call, &[]).map(|_| ())
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>> {
        let call = Call { operation: "split", dtype: DType::U32, len: 3, reduce: None, root: None };
        let contribution = [u32::from(color.is_some()), color.unwrap_or(0), key];
        let gathered = self.exchange(call, bytemuck::bytes_of(&contribution))?;
        let of = |rank| bytemuck::pod_read_unaligned(gathered.contribution(rank));
        let requests: Vec<[u32; 3]> = (0..self.shared.size).map(of).collect();
        let number = *gathered.number;
        drop(gathered);
        let Some(color) = color else { return Ok(None) };
        let own = (0..).zip(&requests).filter(|(_, request)| request[..2] == [1, color]);
        let mut members: Vec<(u32, usize)> =
            own.map(|(rank, request)| (request[2], rank)).collect();
        members.sort_unstable();
        let size = members.len();
        // This rank contributed its own colour to the exchange.
        let rank = members.iter().position(|&(_, rank)| rank == self.rank).unwrap_or(0);
        let mut pending_splits = locked(&self.shared.pending_splits);
        let new = || PendingSplit { shared: SharedState::new(size), missing: size };
        let pending = pending_splits.entry((number, color)).or_insert_with(new);
        pending.missing -= 1;
        let (shared, complete) = (Arc::clone(&pending.shared), pending.missing == 0);
        if complete {
            pending_splits.remove(&(number, color));
        }
        let engine = Threads::new(shared, rank, Arc::clone(&self.health));
        Ok(Some(Member { engine: Arc::new(engine), rank, size }))
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut barrier = locked(&self.shared.barrier);
        barrier.left.get_or_insert(self.rank);
        self.shared.released.notify_all();
        drop(barrier);
        locked(&self.shared.mailbox).left.push(self.rank);
        self.shared.posted.notify_all();
    }
}
