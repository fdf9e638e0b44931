//! NCCL between GPUs, one for each rank.
//!
//! Collectives of a group share a lane. Messages have two lanes of the world, one for messages to
//! higher ranks and one for those to lower ranks: a message that waits for its receiver holds up
//! neither collectives nor messages the other way, so that the stages of a pipeline can send
//! before they receive. A message is copied first, which lets its sender go on.

mod lane;
mod library;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::nccl::sys;
use moh_kernels::{Cuda, DType, Location, LocationMut, Memory, Region, RegionMut};

use self::lane::{Device, Event, Lane, check, failed};
use super::{Engine, Member, Ticket};
use crate::error::Result;
use crate::launch::Launch;
use crate::reduce::Reduce;
use crate::watchdog::{Health, Outstanding};

/// What all groups of this process share.
struct Shared {
    device: Arc<Device>,
    up: Lane,
    down: Lane,
    /// Copies of messages, and where their lane is done with them.
    outbox: Mutex<Vec<Letter>>,
}

struct Letter {
    copy: <Cuda as Memory>::Buffer<u8>,
    /// None where it has not been used yet.
    sent: Option<Arc<Event>>,
}

impl Letter {
    fn is_free(&self) -> bool {
        self.sent.as_ref().is_none_or(|sent| sent.is_done())
    }
}

/// One rank's end of a group.
struct Nccl {
    lane: Lane,
    rank: usize,
    /// The members' ranks in the world.
    ranks: Vec<usize>,
    shared: Arc<Shared>,
    /// What barriers reduce.
    nothing: Mutex<<Cuda as Memory>::Buffer<u32>>,
}

/// What rank 0 gives to all ranks so that they find each other.
pub(crate) fn unique_id() -> Result<Vec<u8>> {
    library::load()?;
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: the id lives through the call.
    #[allow(unsafe_code)]
    check("ncclGetUniqueId", unsafe { library::ncclGetUniqueId(&mut id) }, std::ptr::null_mut())?;
    Ok(bytemuck::cast_slice(&id.internal).to_vec())
}

/// Connects the GPUs of all ranks.
pub(crate) fn world(
    launch: &Launch,
    id: &[u8],
    cuda: Cuda,
    health: Arc<Health>,
) -> Result<Arc<dyn Engine>> {
    library::load()?;
    let internal = bytemuck::cast_slice(id).try_into();
    let internal = internal.map_err(|_| failed("start", "rank 0 sent no unique id"))?;
    let device = Device::new(cuda, health)?;
    let (rank, size) = (launch.rank, launch.size);
    let lane = Lane::world(&device, sys::ncclUniqueId { internal }, rank, size)?;
    let another = || {
        // The rank's number as the key keeps the order.
        let lane = lane.split(Some(0), rank as u32)?;
        lane.ok_or_else(|| failed("ncclCommSplit", "no communicator came of it"))
    };
    let (up, down) = (another()?, another()?);
    let shared = Arc::new(Shared { device, up, down, outbox: Mutex::default() });
    Ok(Arc::new(Nccl::new(lane, rank, (0..size).collect(), shared)?))
}

fn number_type(operation: &'static str, dtype: DType) -> Result<sys::ncclDataType_t> {
    Ok(match dtype {
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::U32 => sys::ncclDataType_t::ncclUint32,
        DType::U8 => sys::ncclDataType_t::ncclUint8,
        DType::I16 => return Err(failed(operation, "NCCL has no 16-bit integers")),
    })
}

fn reduction(reduce: Reduce) -> sys::ncclRedOp_t {
    match reduce {
        Reduce::Sum => sys::ncclRedOp_t::ncclSum,
        Reduce::Max => sys::ncclRedOp_t::ncclMax,
    }
}

/// A region of the GPU.
struct Place {
    dtype: DType,
    len: usize,
    address: u64,
}

impl Place {
    fn of(operation: &'static str, region: &RegionMut<'_>) -> Result<Self> {
        let LocationMut::Device(address) = region.location else {
            return Err(on_the_host(operation));
        };
        Ok(Place { dtype: region.dtype, len: region.len, address })
    }

    /// The address of a number.
    fn at(&self, number: usize) -> *mut c_void {
        (self.address + (number * self.dtype.bytes()) as u64) as *mut c_void
    }
}

fn on_the_host(operation: &'static str) -> crate::Error {
    failed(operation, "the buffer is in the host's memory, NCCL moves a GPU's alone")
}

fn address(region: Region<'_>) -> Option<u64> {
    match region.location {
        Location::Device(address) => Some(address),
        Location::Host(_) => None,
    }
}

impl Nccl {
    fn new(lane: Lane, rank: usize, ranks: Vec<usize>, shared: Arc<Shared>) -> Result<Self> {
        let nothing = Mutex::new(shared.device.cuda.allocate::<u32>(1)?);
        Ok(Nccl { lane, rank, ranks, shared, nothing })
    }

    /// Puts a collective on the group's lane.
    ///
    /// # Safety
    /// As for [`Lane::start`].
    #[allow(unsafe_code)]
    unsafe fn collective(
        &self,
        name: &'static str,
        operation: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<Ticket> {
        // SAFETY: the caller's promise.
        let event = unsafe { self.lane.start(name, operation)? };
        Ok(Some(event))
    }

    /// The lane of messages from one rank of the world to another.
    fn lane_of_messages(&self, from: usize, to: usize) -> &Lane {
        if from < to { &self.shared.up } else { &self.shared.down }
    }
}

impl Engine for Nccl {
    fn all_reduce(&self, part: RegionMut<'_>, reduce: Reduce) -> Result<Ticket> {
        let place = Place::of("all_reduce", &part)?;
        let (at, dtype, reduce) =
            (place.at(0), number_type("all_reduce", place.dtype)?, reduction(reduce));
        // SAFETY: the region is the caller's until the ticket is done (`Ticket`).
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclAllReduce", |communicator, stream| {
                library::ncclAllReduce(at, at, place.len, dtype, reduce, communicator, stream)
            })
        }
    }

    fn reduce_scatter(&self, whole: RegionMut<'_>, reduce: Reduce) -> Result<Ticket> {
        let place = Place::of("reduce_scatter", &whole)?;
        let part = place.len / self.ranks.len();
        let (from, to) = (place.at(0), place.at(part * self.rank));
        let (dtype, reduce) = (number_type("reduce_scatter", place.dtype)?, reduction(reduce));
        // SAFETY: as in `all_reduce`; NCCL's way in place is this rank's part as the destination.
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclReduceScatter", |communicator, stream| {
                library::ncclReduceScatter(from, to, part, dtype, reduce, communicator, stream)
            })
        }
    }

    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket> {
        let place = Place::of("all_gather", &whole)?;
        let part = place.len / self.ranks.len();
        let (from, to) = (place.at(part * self.rank), place.at(0));
        let dtype = number_type("all_gather", place.dtype)?;
        // SAFETY: as in `all_reduce`; NCCL's way in place is this rank's part as the source.
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclAllGather", |communicator, stream| {
                library::ncclAllGather(from, to, part, dtype, communicator, stream)
            })
        }
    }

    fn broadcast(&self, part: RegionMut<'_>, root: usize) -> Result<Ticket> {
        let place = Place::of("broadcast", &part)?;
        let (at, dtype, root) = (place.at(0), number_type("broadcast", place.dtype)?, root as i32);
        // SAFETY: as in `all_reduce`.
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclBroadcast", |communicator, stream| {
                library::ncclBroadcast(at, at, place.len, dtype, root, communicator, stream)
            })
        }
    }

    fn send(&self, part: Region<'_>, to: usize, _tag: u32) -> Result<Ticket> {
        let from = address(part).ok_or_else(|| on_the_host("send"))?;
        let bytes = part.len * part.dtype.bytes();
        let Shared { device, outbox, .. } = &*self.shared;
        let mut outbox = outbox.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |letter: &Letter| Cuda::len(&letter.copy) >= bytes && letter.is_free();
        let copy = match outbox.iter().position(fits) {
            Some(at) => outbox.swap_remove(at).copy,
            None => device.cuda.allocate::<u8>(bytes.max(1))?,
        };
        let copied = address(Cuda::region(Cuda::view(&copy, 0..bytes)));
        let copied = copied.ok_or_else(|| on_the_host("send"))?;
        let (rank, to) = (self.ranks[self.rank], self.ranks[to]);
        // SAFETY: both are `bytes` long; the copy stays in the outbox until it is sent, and before
        // the region changes, the operators so far and with them the copying are done.
        #[allow(unsafe_code)]
        let sent = unsafe {
            device.copy(from, copied, bytes)?;
            self.lane_of_messages(rank, to).start("ncclSend", |communicator, stream| {
                let dtype = sys::ncclDataType_t::ncclUint8;
                let copied = copied as *const c_void;
                library::ncclSend(copied, bytes, dtype, to as i32, communicator, stream)
            })?
        };
        outbox.push(Letter { copy, sent: Some(sent) });
        // The caller has nothing to wait for.
        Ok(None)
    }

    fn reserve_sends(&self, messages: usize, bytes: usize) -> Result<()> {
        let Shared { device, outbox, .. } = &*self.shared;
        let mut outbox = outbox.lock().unwrap_or_else(PoisonError::into_inner);
        let there = outbox.iter().filter(|letter| Cuda::len(&letter.copy) >= bytes).count();
        for _ in there..messages {
            let copy = device.cuda.allocate::<u8>(bytes.max(1))?;
            outbox.push(Letter { copy, sent: None });
        }
        Ok(())
    }

    fn recv(&self, part: RegionMut<'_>, from: usize, _tag: u32) -> Result<Ticket> {
        let place = Place::of("recv", &part)?;
        let (at, bytes) = (place.at(0), place.len * place.dtype.bytes());
        let (rank, from) = (self.ranks[self.rank], self.ranks[from]);
        // SAFETY: as in `all_reduce`.
        #[allow(unsafe_code)]
        let received = unsafe {
            self.lane_of_messages(from, rank).start("ncclRecv", |communicator, stream| {
                let dtype = sys::ncclDataType_t::ncclUint8;
                library::ncclRecv(at, bytes, dtype, from as i32, communicator, stream)
            })?
        };
        Ok(Some(received))
    }

    fn barrier(&self) -> Result<()> {
        let mut nothing = self.nothing.lock().unwrap_or_else(PoisonError::into_inner);
        let region = Cuda::region_mut(Cuda::view_mut(&mut nothing, 0..1));
        let place = Place::of("barrier", &region)?;
        let (at, dtype) = (place.at(0), number_type("barrier", place.dtype)?);
        // SAFETY: the number lives in this value, whose lane is finished before it is dropped.
        #[allow(unsafe_code)]
        let done = unsafe {
            self.lane.start("ncclAllReduce", |communicator, stream| {
                let max = sys::ncclRedOp_t::ncclMax;
                library::ncclAllReduce(at, at, 1, dtype, max, communicator, stream)
            })?
        };
        self.lane.await_event(&done)
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>> {
        self.shared.device.health.check()?;
        let Some(lane) = self.lane.split(color, key)? else { return Ok(None) };
        let (rank, size) = lane.rank_and_size()?;
        // The members tell each other their ranks in the world.
        let cuda = &self.shared.device.cuda;
        let mut gathered = vec![0u32; size];
        gathered[rank] = self.ranks[self.rank] as u32;
        let mut buffer = cuda.allocate::<u32>(size)?;
        cuda.upload(&gathered, Cuda::view_mut(&mut buffer, 0..size))?;
        let ranks = (0..size).collect();
        let mut group = Nccl::new(lane, rank, ranks, Arc::clone(&self.shared))?;
        let told = group.all_gather(Cuda::region_mut(Cuda::view_mut(&mut buffer, 0..size)))?;
        if let Some(told) = told {
            told.join()?;
        }
        cuda.download(Cuda::view(&buffer, 0..size), &mut gathered)?;
        group.ranks = gathered.into_iter().map(|rank| rank as usize).collect();
        Ok(Some(Member { engine: Arc::new(group), rank, size }))
    }

    fn finish(&self) -> Result<()> {
        self.shared.up.finish()?;
        self.shared.down.finish()
    }

    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine of a world of one, which groups of one do without.
    fn engine() -> Option<(Cuda, Arc<dyn Engine>)> {
        let health = Arc::new(Health::new(Arc::new(|_| ())));
        let id = unique_id().map_err(|error| println!("skipped: {error}")).ok()?;
        let cuda = Cuda::new(0).map_err(|error| println!("skipped: {error}")).ok()?;
        let engine = world(&Launch::single(), &id, cuda.clone(), health).unwrap();
        Some((cuda, engine))
    }

    fn whole(buffer: &mut <Cuda as Memory>::Buffer<f32>) -> RegionMut<'_> {
        let range = 0..Cuda::len(buffer);
        Cuda::region_mut(Cuda::view_mut(buffer, range))
    }

    #[test]
    fn one_gpu_runs_every_collective() {
        let Some((cuda, engine)) = engine() else { return };
        let half = engine.split(Some(1), 0).unwrap().unwrap();
        assert_eq!((half.rank, half.size), (0, 1));
        assert!(engine.split(None, 0).unwrap().is_none());
        let numbers: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let mut buffer = cuda.allocate::<f32>(1000).unwrap();
        for engine in [engine, half.engine] {
            cuda.upload(&numbers, Cuda::view_mut(&mut buffer, 0..1000)).unwrap();
            for ticket in [
                engine.all_reduce(whole(&mut buffer), Reduce::Sum).unwrap(),
                engine.reduce_scatter(whole(&mut buffer), Reduce::Max).unwrap(),
                engine.all_gather(whole(&mut buffer)).unwrap(),
                engine.broadcast(whole(&mut buffer), 0).unwrap(),
            ] {
                let event = ticket.unwrap();
                event.join().unwrap();
                cuda.synchronize().unwrap();
                assert!(event.is_done());
            }
            engine.barrier().unwrap();
            engine.finish().unwrap();
            let mut back = vec![0.0; 1000];
            cuda.download(Cuda::view(&buffer, 0..1000), &mut back).unwrap();
            assert_eq!(back, numbers);
        }
    }
}
