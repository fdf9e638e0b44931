//! Ranks that are threads of one process, for tests: what is exchanged goes through slots that all
//! threads can read, one for each rank.
//!
//! An exchange: every rank fills its slot, all meet, every rank reads what it needs. Two sets of
//! slots take turns, so that one meeting is enough: whoever comes to the next meeting has read
//! what the last one gave. A rank that is gone, by its end or by a panic, makes meetings and
//! receptions that wait for it fail.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use moh_kernels::{DType, Location, LocationMut, Region, RegionMut};

use super::scratch::Scratch;
use super::{Engine, Member, Ticket};
use crate::error::{Error, Result};
use crate::reduce::{Reduce, reduce};
use crate::watchdog::Health;

/// How often a thread that waits looks whether the job has ended.
const LOOK: Duration = Duration::from_millis(20);

/// One thread's end of a group.
pub(crate) struct Threads {
    room: Arc<Room>,
    rank: usize,
    health: Arc<Health>,
    /// The exchanges of this rank so far; held during each.
    exchanges: Mutex<u64>,
}

/// What the threads of a group share.
pub(crate) struct Room {
    size: usize,
    meeting: Mutex<Meeting>,
    met: Condvar,
    slots: [Vec<RwLock<Slot>>; 2],
    post: Mutex<Post>,
    posted: Condvar,
    /// Rooms of groups that are being split off, by exchange and colour.
    annexes: Mutex<HashMap<(u64, u32), Annex>>,
}

struct Annex {
    room: Arc<Room>,
    /// Ranks that have yet to enter.
    missing: usize,
}

#[derive(Default)]
struct Meeting {
    arrived: usize,
    number: u64,
    left: Option<usize>,
}

/// What a rank brings to an exchange.
#[derive(Default)]
struct Slot {
    call: Option<Call>,
    bytes: Scratch,
}

/// What must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Call {
    operation: &'static str,
    dtype: DType,
    len: usize,
    reduce: Option<Reduce>,
    root: Option<usize>,
}

#[derive(Default)]
struct Post {
    /// By receiver, sender and tag.
    letters: HashMap<(usize, usize, u32), VecDeque<Scratch>>,
    free: Vec<Scratch>,
    left: Vec<usize>,
}

/// A panic elsewhere leaves the locked values sound: each change is one step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Room {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        let slots = || (0..size).map(|_| RwLock::default()).collect();
        Arc::new(Room {
            size,
            meeting: Mutex::default(),
            met: Condvar::new(),
            slots: [slots(), slots()],
            post: Mutex::default(),
            posted: Condvar::new(),
            annexes: Mutex::default(),
        })
    }
}

/// The ends of a group of as many threads as there are records of health.
pub(crate) fn group(healths: impl ExactSizeIterator<Item = Arc<Health>>) -> Vec<Member> {
    let room = Room::new(healths.len());
    let size = healths.len();
    let member = |(rank, health)| Member {
        engine: Arc::new(Threads::new(Arc::clone(&room), rank, health)),
        rank,
        size,
    };
    healths.enumerate().map(member).collect()
}

fn on_the_host(operation: &'static str) -> Error {
    Error::Engine {
        engine: "threads",
        operation,
        reason: "the buffer is a GPU's: groups of threads move the host's memory alone".into(),
    }
}

/// What all ranks brought to an exchange.
struct Gathered<'a> {
    slots: Vec<RwLockReadGuard<'a, Slot>>,
    /// The number of the exchange, held so that a rank's exchanges come one after the other.
    number: MutexGuard<'a, u64>,
}

impl Gathered<'_> {
    fn of(&self, rank: usize) -> &[u8] {
        self.slots[rank].bytes.bytes()
    }
}

impl Threads {
    pub(crate) fn new(room: Arc<Room>, rank: usize, health: Arc<Health>) -> Self {
        Threads { room, rank, health, exchanges: Mutex::default() }
    }

    /// Brings `brought` to all ranks; what they have brought can be read until the result is dropped.
    fn exchange(&self, call: Call, brought: &[u8]) -> Result<Gathered<'_>> {
        let mut number = locked(&self.exchanges);
        let slots = &self.room.slots[(*number % 2) as usize];
        {
            let mut slot = slots[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            slot.call = Some(call);
            slot.bytes.fill(brought);
        }
        self.meet()?;
        let slots: Vec<_> =
            slots.iter().map(|slot| slot.read().unwrap_or_else(PoisonError::into_inner)).collect();
        *number += 1;
        for (rank, slot) in slots.iter().enumerate() {
            if slot.call != Some(call) {
                return Err(Error::Engine {
                    engine: "threads",
                    operation: call.operation,
                    reason: format!(
                        "rank {rank} calls {}, rank {} calls {}: all ranks of a group must call the \
                         same operations in the same order",
                        described(slot.call.as_ref()),
                        self.rank,
                        described(Some(&call))
                    ),
                });
            }
        }
        Ok(Gathered { slots, number })
    }

    /// Waits for all ranks.
    fn meet(&self) -> Result<()> {
        let room = &*self.room;
        let mut meeting = locked(&room.meeting);
        let number = meeting.number;
        meeting.arrived += 1;
        if meeting.arrived == room.size {
            meeting.arrived = 0;
            meeting.number += 1;
            room.met.notify_all();
            return Ok(());
        }
        loop {
            // A meeting that has taken place counts, whoever has left since.
            if meeting.number != number {
                return Ok(());
            }
            self.health.check()?;
            if let Some(rank) = meeting.left {
                return Err(Error::Left { rank });
            }
            let waited = room.met.wait_timeout(meeting, LOOK);
            meeting = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn described(call: Option<&Call>) -> String {
    let Some(Call { operation, dtype, len, reduce, root }) = call else { return "nothing".into() };
    let reduce = reduce.map_or(String::new(), |reduce| format!(" ({reduce:?})"));
    let root = root.map_or(String::new(), |root| format!(" from rank {root}"));
    format!("{operation}{reduce}{root} of {len} {dtype:?}")
}

impl Engine for Threads {
    fn all_reduce(&self, part: RegionMut<'_>, how: Reduce) -> Result<Ticket> {
        let RegionMut { dtype, len, location: LocationMut::Host(out) } = part else {
            return Err(on_the_host("all_reduce"));
        };
        let call = Call { operation: "all_reduce", dtype, len, reduce: Some(how), root: None };
        let gathered = self.exchange(call, out)?;
        reduce(dtype, how, out, self.room.size, |rank| Some(gathered.of(rank)));
        Ok(None)
    }

    fn reduce_scatter(&self, whole: RegionMut<'_>, how: Reduce) -> Result<Ticket> {
        let RegionMut { dtype, len, location: LocationMut::Host(out) } = whole else {
            return Err(on_the_host("reduce_scatter"));
        };
        let call = Call { operation: "reduce_scatter", dtype, len, reduce: Some(how), root: None };
        let size = self.room.size;
        let own = out.len() / size * self.rank..out.len() / size * (self.rank + 1);
        let gathered = self.exchange(call, out)?;
        reduce(dtype, how, &mut out[own.clone()], size, |rank| {
            Some(&gathered.of(rank)[own.clone()])
        });
        Ok(None)
    }

    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket> {
        let RegionMut { dtype, len, location: LocationMut::Host(out) } = whole else {
            return Err(on_the_host("all_gather"));
        };
        let call = Call { operation: "all_gather", dtype, len, reduce: None, root: None };
        let part = out.len() / self.room.size;
        let gathered = self.exchange(call, &out[part * self.rank..part * (self.rank + 1)])?;
        for rank in 0..self.room.size {
            out[part * rank..part * (rank + 1)].copy_from_slice(gathered.of(rank));
        }
        Ok(None)
    }

    fn broadcast(&self, part: RegionMut<'_>, root: usize) -> Result<Ticket> {
        let RegionMut { dtype, len, location: LocationMut::Host(out) } = part else {
            return Err(on_the_host("broadcast"));
        };
        let call = Call { operation: "broadcast", dtype, len, reduce: None, root: Some(root) };
        let brought: &[u8] = if root == self.rank { out } else { &[] };
        let gathered = self.exchange(call, brought)?;
        out.copy_from_slice(gathered.of(root));
        Ok(None)
    }

    fn send(&self, part: Region<'_>, to: usize, tag: u32) -> Result<Ticket> {
        let Location::Host(bytes) = part.location else { return Err(on_the_host("send")) };
        self.health.check()?;
        let mut post = locked(&self.room.post);
        let mut letter = post.free.pop().unwrap_or_default();
        letter.fill(bytes);
        post.letters.entry((to, self.rank, tag)).or_default().push_back(letter);
        self.room.posted.notify_all();
        Ok(None)
    }

    fn recv(&self, part: RegionMut<'_>, from: usize, tag: u32) -> Result<Ticket> {
        let LocationMut::Host(out) = part.location else { return Err(on_the_host("recv")) };
        let mut post = locked(&self.room.post);
        loop {
            let letters = post.letters.get_mut(&(self.rank, from, tag));
            if let Some(letter) = letters.and_then(VecDeque::pop_front) {
                let sent = letter.bytes();
                if sent.len() != out.len() {
                    return Err(Error::Engine {
                        engine: "threads",
                        operation: "recv",
                        reason: format!(
                            "rank {from} sent {} bytes with tag {tag}, {} were expected",
                            sent.len(),
                            out.len()
                        ),
                    });
                }
                out.copy_from_slice(sent);
                post.free.push(letter);
                return Ok(None);
            }
            self.health.check()?;
            if post.left.contains(&from) {
                return Err(Error::Left { rank: from });
            }
            let waited = self.room.posted.wait_timeout(post, LOOK);
            post = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn barrier(&self) -> Result<()> {
        let call =
            Call { operation: "barrier", dtype: DType::U8, len: 0, reduce: None, root: None };
        self.exchange(call, &[]).map(|_| ())
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>> {
        let call = Call { operation: "split", dtype: DType::U32, len: 3, reduce: None, root: None };
        let brought = [u32::from(color.is_some()), color.unwrap_or(0), key];
        let gathered = self.exchange(call, bytemuck::bytes_of(&brought))?;
        let of = |rank| bytemuck::pod_read_unaligned(gathered.of(rank));
        let asked: Vec<[u32; 3]> = (0..self.room.size).map(of).collect();
        let number = *gathered.number;
        drop(gathered);
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<(u32, usize)> = Vec::new();
        for (rank, &[has_color, its_color, key]) in asked.iter().enumerate() {
            if has_color == 1 && its_color == color {
                members.push((key, rank));
            }
        }
        members.sort_unstable();
        let size = members.len();
        // This rank brought its own colour to the exchange.
        let rank = members.iter().position(|&(_, rank)| rank == self.rank).unwrap_or(0);
        let mut annexes = locked(&self.room.annexes);
        let new = || Annex { room: Room::new(size), missing: size };
        let annex = annexes.entry((number, color)).or_insert_with(new);
        annex.missing -= 1;
        let (room, complete) = (Arc::clone(&annex.room), annex.missing == 0);
        if complete {
            annexes.remove(&(number, color));
        }
        let engine = Threads::new(room, rank, Arc::clone(&self.health));
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
        let mut meeting = locked(&self.room.meeting);
        meeting.left.get_or_insert(self.rank);
        self.room.met.notify_all();
        drop(meeting);
        locked(&self.room.post).left.push(self.rank);
        self.room.posted.notify_all();
    }
}
