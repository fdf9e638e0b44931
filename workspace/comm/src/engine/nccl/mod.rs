//! NCCL between GPUs, one GPU per rank.
//!
//! All collectives of a group use a single communicator. Messages use two communicators of the world,
//! for higher and for lower ranks. So a message that waits for its receiver blocks neither
//! collectives nor messages in the other direction, and pipeline stages can send before
//! they receive. A message is copied first, so that its sender can continue.

mod communicator;
mod library;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::nccl::sys;
use moh_kernels::{Cuda, DType, Location, LocationMut, Memory, Region, RegionMut};

use self::communicator::{Device, Event, NcclCommunicator, check, failed};
use super::{Engine, Member, Ticket};
use crate::watchdog::{Health, Outstanding};
use crate::{Launch, Reduce, Result};

/// State shared by all groups of this process.
struct Shared {
    device: Arc<Device>,
    up: NcclCommunicator,
    down: NcclCommunicator,
    /// Copies of messages in flight, each with the event that ends its send.
    send_queue: Mutex<Vec<PendingSend>>,
}

struct PendingSend {
    copy: <Cuda as Memory>::Buffer<u8>,
    /// `None` if the copy has not been used yet.
    sent: Option<Arc<Event>>,
}

impl PendingSend {
    fn is_free(&self) -> bool {
        self.sent.as_ref().is_none_or(|sent| sent.is_done())
    }
}

struct Nccl {
    communicator: NcclCommunicator,
    rank: usize,
    /// The members' ranks in the world.
    ranks: Vec<usize>,
    shared: Arc<Shared>,
    barrier_buffer: Mutex<<Cuda as Memory>::Buffer<u32>>,
}

/// Returns the id with which all ranks connect. Rank 0 creates it.
pub(crate) fn unique_id() -> Result<Vec<u8>> {
    library::load()?;
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: the id lives through the call.
    #[allow(unsafe_code)]
    check("ncclGetUniqueId", unsafe { library::ncclGetUniqueId(&mut id) }, std::ptr::null_mut())?;
    Ok(bytemuck::cast_slice(&id.internal).to_vec())
}

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
    let communicator =
        NcclCommunicator::world(&device, sys::ncclUniqueId { internal }, rank, size)?;
    let duplicate = || {
        // The rank as the key keeps the order.
        let communicator = communicator.split(Some(0), rank as u32)?;
        communicator.ok_or_else(|| failed("ncclCommSplit", "it returned no communicator"))
    };
    let (up, down) = (duplicate()?, duplicate()?);
    let shared = Arc::new(Shared { device, up, down, send_queue: Mutex::default() });
    Ok(Arc::new(Nccl::new(communicator, rank, (0..size).collect(), shared)?))
}

fn data_type(operation: &'static str, dtype: DType) -> Result<sys::ncclDataType_t> {
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

struct GpuRegion {
    dtype: DType,
    len: usize,
    address: u64,
}

impl GpuRegion {
    fn new(operation: &'static str, region: &RegionMut<'_>) -> Result<Self> {
        let LocationMut::Device(address) = region.location else {
            return Err(on_the_host(operation));
        };
        Ok(GpuRegion { dtype: region.dtype, len: region.len, address })
    }

    fn at(&self, element: usize) -> *mut c_void {
        (self.address + (element * self.dtype.bytes()) as u64) as *mut c_void
    }
}

fn on_the_host(operation: &'static str) -> crate::Error {
    failed(operation, "the buffer is in host memory: NCCL transfers GPU memory only")
}

fn address(region: Region<'_>) -> Option<u64> {
    match region.location {
        Location::Device(address) => Some(address),
        Location::Host(_) => None,
    }
}

impl Nccl {
    fn new(
        communicator: NcclCommunicator,
        rank: usize,
        ranks: Vec<usize>,
        shared: Arc<Shared>,
    ) -> Result<Self> {
        let barrier_buffer = Mutex::new(shared.device.cuda.allocate::<u32>(1)?);
        Ok(Nccl { communicator, rank, ranks, shared, barrier_buffer })
    }

    /// Enqueues a collective on the group's communicator.
    ///
    /// # Safety
    /// As for [`NcclCommunicator::start`].
    #[allow(unsafe_code)]
    unsafe fn collective(
        &self,
        name: &'static str,
        operation: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<Ticket> {
        // SAFETY: the caller's promise.
        let event = unsafe { self.communicator.start(name, operation)? };
        Ok(Some(event))
    }

    /// Returns the communicator for messages from one rank of the world to another.
    fn message_communicator(&self, from: usize, to: usize) -> &NcclCommunicator {
        if from < to { &self.shared.up } else { &self.shared.down }
    }
}

impl Engine for Nccl {
    fn all_reduce(&self, region: RegionMut<'_>, reduce: Reduce) -> Result<Ticket> {
        let region = GpuRegion::new("all_reduce", &region)?;
        let (at, dtype, reduce) =
            (region.at(0), data_type("all_reduce", region.dtype)?, reduction(reduce));
        // SAFETY: the region is the caller's until the ticket is done (`Ticket`).
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclAllReduce", |communicator, stream| {
                library::ncclAllReduce(at, at, region.len, dtype, reduce, communicator, stream)
            })
        }
    }

    fn reduce_scatter(&self, whole: RegionMut<'_>, reduce: Reduce) -> Result<Ticket> {
        let region = GpuRegion::new("reduce_scatter", &whole)?;
        let chunk = region.len / self.ranks.len();
        let (from, to) = (region.at(0), region.at(chunk * self.rank));
        let (dtype, reduce) = (data_type("reduce_scatter", region.dtype)?, reduction(reduce));
        // SAFETY: as in `all_reduce`; in place, NCCL expects this rank's chunk as the destination.
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclReduceScatter", |communicator, stream| {
                library::ncclReduceScatter(from, to, chunk, dtype, reduce, communicator, stream)
            })
        }
    }

    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket> {
        let region = GpuRegion::new("all_gather", &whole)?;
        let chunk = region.len / self.ranks.len();
        let (from, to) = (region.at(chunk * self.rank), region.at(0));
        let dtype = data_type("all_gather", region.dtype)?;
        // SAFETY: as in `all_reduce`; in place, NCCL expects this rank's chunk as the source.
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclAllGather", |communicator, stream| {
                library::ncclAllGather(from, to, chunk, dtype, communicator, stream)
            })
        }
    }

    fn broadcast(&self, region: RegionMut<'_>, root: usize) -> Result<Ticket> {
        let region = GpuRegion::new("broadcast", &region)?;
        let (at, dtype, root) = (region.at(0), data_type("broadcast", region.dtype)?, root as i32);
        // SAFETY: as in `all_reduce`.
        #[allow(unsafe_code)]
        unsafe {
            self.collective("ncclBroadcast", |communicator, stream| {
                library::ncclBroadcast(at, at, region.len, dtype, root, communicator, stream)
            })
        }
    }

    fn send(&self, region: Region<'_>, to: usize, _tag: u32) -> Result<Ticket> {
        let from = address(region).ok_or_else(|| on_the_host("send"))?;
        let bytes = region.len * region.dtype.bytes();
        let Shared { device, send_queue, .. } = &*self.shared;
        let mut send_queue = send_queue.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |pending: &PendingSend| Cuda::len(&pending.copy) >= bytes && pending.is_free();
        let copy = match send_queue.iter().position(fits) {
            Some(at) => send_queue.swap_remove(at).copy,
            None => device.cuda.allocate::<u8>(bytes.max(1))?,
        };
        let copied = address(Cuda::region(Cuda::view(&copy, 0..bytes)));
        let copied = copied.ok_or_else(|| on_the_host("send"))?;
        let (rank, to) = (self.ranks[self.rank], self.ranks[to]);
        // SAFETY: both are `bytes` long. The copy stays in the send queue until it is sent. The
        // region changes only after the operators so far, which include the copy.
        #[allow(unsafe_code)]
        let sent = unsafe {
            device.copy(from, copied, bytes)?;
            self.message_communicator(rank, to).start("ncclSend", |communicator, stream| {
                let dtype = sys::ncclDataType_t::ncclUint8;
                let copied = copied as *const c_void;
                library::ncclSend(copied, bytes, dtype, to as i32, communicator, stream)
            })?
        };
        send_queue.push(PendingSend { copy, sent: Some(sent) });
        // The caller does not need to wait.
        Ok(None)
    }

    fn reserve_sends(&self, messages: usize, bytes: usize) -> Result<()> {
        let Shared { device, send_queue, .. } = &*self.shared;
        let mut send_queue = send_queue.lock().unwrap_or_else(PoisonError::into_inner);
        let there = send_queue.iter().filter(|pending| Cuda::len(&pending.copy) >= bytes).count();
        for _ in there..messages {
            let copy = device.cuda.allocate::<u8>(bytes.max(1))?;
            send_queue.push(PendingSend { copy, sent: None });
        }
        Ok(())
    }

    fn recv(&self, region: RegionMut<'_>, from: usize, _tag: u32) -> Result<Ticket> {
        let region = GpuRegion::new("recv", &region)?;
        let (at, bytes) = (region.at(0), region.len * region.dtype.bytes());
        let (rank, from) = (self.ranks[self.rank], self.ranks[from]);
        // SAFETY: as in `all_reduce`.
        #[allow(unsafe_code)]
        let received = unsafe {
            self.message_communicator(from, rank).start("ncclRecv", |communicator, stream| {
                let dtype = sys::ncclDataType_t::ncclUint8;
                library::ncclRecv(at, bytes, dtype, from as i32, communicator, stream)
            })?
        };
        Ok(Some(received))
    }

    fn barrier(&self) -> Result<()> {
        let mut barrier_buffer = self.barrier_buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let region = Cuda::region_mut(Cuda::view_mut(&mut barrier_buffer, 0..1));
        let region = GpuRegion::new("barrier", &region)?;
        let (at, dtype) = (region.at(0), data_type("barrier", region.dtype)?);
        // SAFETY: this value owns the element, and its communicator is finished before it is
        // dropped.
        #[allow(unsafe_code)]
        let done = unsafe {
            self.communicator.start("ncclAllReduce", |communicator, stream| {
                let max = sys::ncclRedOp_t::ncclMax;
                library::ncclAllReduce(at, at, 1, dtype, max, communicator, stream)
            })?
        };
        self.communicator.await_event(&done)
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>> {
        self.shared.device.health.check()?;
        let Some(communicator) = self.communicator.split(color, key)? else { return Ok(None) };
        let (rank, size) = communicator.rank_and_size()?;
        // The members exchange their ranks in the world.
        let cuda = &self.shared.device.cuda;
        let mut gathered = vec![0u32; size];
        gathered[rank] = self.ranks[self.rank] as u32;
        let mut buffer = cuda.allocate::<u32>(size)?;
        cuda.upload(&gathered, Cuda::view_mut(&mut buffer, 0..size))?;
        let ranks = (0..size).collect();
        let mut group = Nccl::new(communicator, rank, ranks, Arc::clone(&self.shared))?;
        let gathering = group.all_gather(Cuda::region_mut(Cuda::view_mut(&mut buffer, 0..size)))?;
        if let Some(gathering) = gathering {
            gathering.join()?;
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

    /// Returns the engine of a world of a single rank. Usually a group of one rank has no engine.
    fn engine() -> (Cuda, Arc<dyn Engine>) {
        let health = Arc::new(Health::new(Arc::new(|_| ())));
        let cuda = Cuda::new(0).unwrap();
        let engine = world(&Launch::single(), &unique_id().unwrap(), cuda.clone(), health).unwrap();
        (cuda, engine)
    }

    fn whole(buffer: &mut <Cuda as Memory>::Buffer<f32>) -> RegionMut<'_> {
        let range = 0..Cuda::len(buffer);
        Cuda::region_mut(Cuda::view_mut(buffer, range))
    }

    #[test]
    #[ignore = "needs a GPU and NCCL"]
    fn one_gpu_runs_every_collective() {
        let (cuda, engine) = engine();
        let half = engine.split(Some(1), 0).unwrap().unwrap();
        assert_eq!((half.rank, half.size), (0, 1));
        assert!(engine.split(None, 0).unwrap().is_none());
        let elements: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let mut buffer = cuda.allocate::<f32>(1000).unwrap();
        for engine in [engine, half.engine] {
            cuda.upload(&elements, Cuda::view_mut(&mut buffer, 0..1000)).unwrap();
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
            assert_eq!(back, elements);
        }
    }
}
