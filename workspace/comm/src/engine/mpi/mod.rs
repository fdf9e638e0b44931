//! MPI between processes, for the host's memory.
//!
//! Reductions exchange chunks and sum them here, in rank order, since MPI's own reductions may use any
//! order. A chunk is exchanged in pieces, so that received data stays in cache until it is summed
//! and needs little memory.

mod library;

use std::ffi::c_int;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use moh_kernels::{DType, Location, LocationMut, Region, RegionMut};
use mpi::ffi;

use self::library::{Library, failed};
use super::scratch::Scratch;
use super::{Engine, Member, Ticket};
use crate::reduce::reduce;
use crate::watchdog::Health;
use crate::{Launch, Reduce, Result};

/// Bytes that a rank receives at a time in a reduction.
const PIECE_BYTES: usize = 4 << 20;
/// Maximum bytes of an all-reduce in which every rank reduces all elements, with a single exchange instead of
/// two.
const MAX_SMALL_BYTES: usize = 16 << 10;
/// Maximum bytes of a message. MPI counts in C's int.
const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// Alignment of the received pieces in scratch memory, in elements.
const PIECE_ALIGNMENT: usize = 8;

struct Communicator {
    raw: ffi::MPI_Comm,
    /// Whether a split created the communicator, so that it must be freed.
    owned: bool,
    rank: usize,
    size: usize,
    work: Mutex<Work>,
    library: Arc<Library>,
}

/// Buffers of the exchanges, reused from call to call.
#[derive(Default)]
struct Work {
    send: Ranges,
    receive: Ranges,
    received: Scratch,
}

/// Counts and offsets by rank, in elements.
#[derive(Default)]
struct Ranges {
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

// SAFETY: the communicator's handle may be used by any thread, one at a time; every call goes
// through the library's lock.
#[allow(unsafe_code)]
unsafe impl Send for Communicator {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Communicator {}

/// Initialises MPI, and checks its ranks against the launcher's.
pub(crate) fn world(launch: &Launch, health: Arc<Health>) -> Result<Arc<dyn Engine>> {
    let library = Library::start(health)?;
    let (rank, size) = library.rank_and_size();
    if (rank, size) != (launch.rank, launch.size) {
        let reason = format!(
            "MPI says rank {rank} of {size}, the launcher's variables say rank {} of {}: start the \
             program by mpirun, or by srun --mpi=pmix",
            launch.rank, launch.size
        );
        return Err(failed("MPI_Init", reason));
    }
    let raw = library.world();
    Ok(Arc::new(Communicator::new(raw, false, rank, size, Arc::new(library))))
}

impl Ranges {
    fn set(&mut self, ranks: usize, range: impl Fn(usize) -> Range<usize>) {
        self.counts.clear();
        self.starts.clear();
        for range in (0..ranks).map(range) {
            // Callers have checked that all values fit C's int.
            self.counts.push(range.len() as c_int);
            self.starts.push(if range.is_empty() { 0 } else { range.start as c_int });
        }
    }
}

/// Returns a rank's chunk of `len` elements, divided as evenly as possible.
fn chunk_of(len: usize, size: usize, rank: usize) -> Range<usize> {
    let (quotient, remainder) = (len / size, len % size);
    let start = rank * quotient + rank.min(remainder);
    start..start + quotient + usize::from(rank < remainder)
}

fn datatype(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the bindings, set before the program starts.
    #[allow(unsafe_code)]
    unsafe {
        match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::I16 => ffi::RSMPI_INT16_T,
            // MPI has no 16-bit floats. It only moves these bytes.
            DType::F16 | DType::BF16 => ffi::RSMPI_UINT16_T,
            DType::U8 => ffi::RSMPI_UINT8_T,
        }
    }
}

/// Returns the host bytes of a region. Fails if its length does not fit C's int.
fn host<'a>(
    operation: &'static str,
    region: RegionMut<'a>,
) -> Result<(DType, usize, &'a mut [u8])> {
    let RegionMut { dtype, len, location } = region;
    match location {
        LocationMut::Device(_) => Err(failed(operation, ON_A_GPU)),
        LocationMut::Host(_) if c_int::try_from(len).is_err() => Err(failed(
            operation,
            format!("{len} elements exceed MPI's count: pass at most {}", c_int::MAX),
        )),
        LocationMut::Host(bytes) => Ok((dtype, len, bytes)),
    }
}

const ON_A_GPU: &str = "the buffer is in GPU memory: connect with Buffers::Gpu to use NCCL";

impl Communicator {
    fn new(
        raw: ffi::MPI_Comm,
        owned: bool,
        rank: usize,
        size: usize,
        library: Arc<Library>,
    ) -> Self {
        Communicator { raw, owned, rank, size, work: Mutex::default(), library }
    }

    /// Sends to every other rank the elements at its range of `send` in `from`, and receives from it into its range
    /// of `receive` in `to`. Both ranges are empty for this rank itself.
    ///
    /// # Safety
    /// The ranges of `send` lie within the elements at `from`, and the ranges of `receive` within the
    /// elements at `to`. Until this function returns, nothing else accesses the received elements. No two ranges of
    /// `receive` overlap.
    #[allow(unsafe_code)]
    unsafe fn exchange(
        &self,
        dtype: DType,
        from: *const u8,
        send: &Ranges,
        to: *mut u8,
        receive: &Ranges,
    ) -> Result<()> {
        let dtype = datatype(dtype);
        // SAFETY: the caller's promise; the ranges outlive the operation, for which `complete`
        // waits.
        self.library.complete("MPI_Ialltoallv", |request| unsafe {
            ffi::MPI_Ialltoallv(
                from.cast(),
                send.counts.as_ptr(),
                send.starts.as_ptr(),
                dtype,
                to.cast(),
                receive.counts.as_ptr(),
                receive.starts.as_ptr(),
                dtype,
                self.raw,
                request,
            )
        })?;
        Ok(())
    }

    /// Reduces all ranks' chunks with this rank's number into this rank's chunk of `bytes`.
    fn reduce_own_chunk(
        &self,
        dtype: DType,
        how: Reduce,
        bytes: &mut [u8],
        chunk: impl Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        let &Communicator { rank: me, size, .. } = self;
        let width = dtype.bytes();
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let Work { send, receive, received } = &mut *work;
        let others = size - 1;
        let largest = (0..size).map(|rank| chunk(rank).len()).max().unwrap_or(0);
        let piece = (PIECE_BYTES / width / others)
            .clamp(1, largest.max(1))
            .next_multiple_of(PIECE_ALIGNMENT);
        for start in (0..largest).step_by(piece) {
            let piece_of = |rank: usize| {
                let Range { start: first, end } = chunk(rank);
                (first + start).min(end)..(first + start + piece).min(end)
            };
            let own = piece_of(me);
            // The other ranks' pieces are consecutive. This rank has no slot.
            let slot = |rank: usize| (rank - usize::from(rank > me)) * piece;
            send.set(size, |rank| if rank == me { 0..0 } else { piece_of(rank) });
            receive.set(size, |rank| match rank {
                _ if rank == me => 0..0,
                _ => slot(rank)..slot(rank) + own.len(),
            });
            let received = received.of_len(others * piece * width);
            // SAFETY: pieces lie within the chunks, which divide `bytes`; the slots lie within
            // `received` and are `piece` elements apart, the maximum length of one.
            #[allow(unsafe_code)]
            unsafe {
                self.exchange(dtype, bytes.as_ptr(), send, received.as_mut_ptr(), receive)?;
            }
            let received = &*received;
            let out = &mut bytes[own.start * width..own.end * width];
            let length = out.len();
            reduce(dtype, how, out, size, |rank| {
                (rank != me).then(|| &received[slot(rank) * width..][..length])
            });
        }
        Ok(())
    }

    /// Copies every rank's chunk to all ranks.
    fn gather_chunks(
        &self,
        dtype: DType,
        bytes: &mut [u8],
        chunk: impl Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        let me = self.rank;
        if bytes.is_empty() {
            return Ok(());
        }
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let Work { send, receive, .. } = &mut *work;
        let own = chunk(me);
        // Open MPI interprets equal addresses as "in place", so the send and the receive address must
        // differ. Sends count from this rank's chunk. Receives count from the start of the buffer or, on
        // rank 0, from the end of its chunk.
        let origin = if me == 0 { own.end } else { 0 };
        send.set(self.size, |rank| if rank == me { 0..0 } else { 0..own.len() });
        receive.set(self.size, |rank| {
            let Range { start, end } = chunk(rank);
            if rank == me { 0..0 } else { start - origin..end - origin }
        });
        let (width, bytes) = (dtype.bytes(), bytes.as_mut_ptr());
        // SAFETY: the chunks divide `bytes` in rank order; this rank's is read, the others are
        // written, and for rank 0 they all start at or after `origin`.
        #[allow(unsafe_code)]
        unsafe {
            let (from, to) = (bytes.add(own.start * width), bytes.add(origin * width));
            self.exchange(dtype, from, send, to, receive)
        }
    }

    /// Lets every rank reduce all elements.
    fn reduce_small(&self, dtype: DType, how: Reduce, len: usize, bytes: &mut [u8]) -> Result<()> {
        let &Communicator { rank: me, size, .. } = self;
        let width = dtype.bytes();
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let Work { send, receive, received } = &mut *work;
        let stride = len.next_multiple_of(PIECE_ALIGNMENT);
        let slot = |rank: usize| rank * stride;
        let unless_me = |rank: usize, range| if rank == me { 0..0 } else { range };
        send.set(size, |rank| unless_me(rank, 0..len));
        receive.set(size, |rank| unless_me(rank, slot(rank)..slot(rank) + len));
        let received = received.of_len(size * stride * width);
        // SAFETY: all of `bytes` is sent; the slots lie within `received` and are at least `len`
        // elements apart.
        #[allow(unsafe_code)]
        unsafe {
            self.exchange(dtype, bytes.as_ptr(), send, received.as_mut_ptr(), receive)?;
        }
        let (received, length) = (&*received, bytes.len());
        reduce(dtype, how, bytes, size, |rank| {
            (rank != me).then(|| &received[slot(rank) * width..][..length])
        });
        Ok(())
    }

    fn tag(&self, operation: &'static str, tag: u32) -> Result<c_int> {
        let refuse = |_| failed(operation, format!("tag {tag}: expected one below 2^31"));
        c_int::try_from(tag).map_err(refuse)
    }
}

impl Engine for Communicator {
    fn all_reduce(&self, region: RegionMut<'_>, how: Reduce) -> Result<Ticket> {
        let (dtype, len, bytes) = host("all_reduce", region)?;
        if len == 0 {
            return Ok(None);
        }
        if bytes.len() <= MAX_SMALL_BYTES {
            self.reduce_small(dtype, how, len, bytes)?;
            return Ok(None);
        }
        let chunk = |rank| chunk_of(len, self.size, rank);
        self.reduce_own_chunk(dtype, how, bytes, chunk)?;
        self.gather_chunks(dtype, bytes, chunk)?;
        Ok(None)
    }

    fn reduce_scatter(&self, whole: RegionMut<'_>, how: Reduce) -> Result<Ticket> {
        let (dtype, len, bytes) = host("reduce_scatter", whole)?;
        self.reduce_own_chunk(dtype, how, bytes, |rank| chunk_of(len, self.size, rank))?;
        Ok(None)
    }

    fn all_gather(&self, whole: RegionMut<'_>) -> Result<Ticket> {
        let (dtype, len, bytes) = host("all_gather", whole)?;
        self.gather_chunks(dtype, bytes, |rank| chunk_of(len, self.size, rank))?;
        Ok(None)
    }

    fn broadcast(&self, region: RegionMut<'_>, root: usize) -> Result<Ticket> {
        let (_, _, bytes) = host("broadcast", region)?;
        for bytes in bytes.chunks_mut(MAX_MESSAGE_BYTES) {
            let count = bytes.len() as c_int;
            let start = bytes.as_mut_ptr();
            // SAFETY: `count` bytes from `start` are borrowed until `complete` returns.
            #[allow(unsafe_code)]
            self.library.complete("MPI_Ibcast", |request| unsafe {
                let (bytes, root) = (ffi::RSMPI_UINT8_T, root as c_int);
                ffi::MPI_Ibcast(start.cast(), count, bytes, root, self.raw, request)
            })?;
        }
        Ok(None)
    }

    fn send(&self, region: Region<'_>, to: usize, tag: u32) -> Result<Ticket> {
        let Location::Host(bytes) = region.location else { return Err(failed("send", ON_A_GPU)) };
        let tag = self.tag("send", tag)?;
        for bytes in messages(bytes) {
            // SAFETY: `post` keeps its copy of the bytes until the message is sent.
            #[allow(unsafe_code)]
            self.library.post(bytes, |copy, request| unsafe {
                let (count, to) = (copy.len() as c_int, to as c_int);
                let bytes = ffi::RSMPI_UINT8_T;
                ffi::MPI_Isend(copy.as_ptr().cast(), count, bytes, to, tag, self.raw, request)
            })?;
        }
        Ok(None)
    }

    fn reserve_sends(&self, messages: usize, bytes: usize) -> Result<()> {
        // Longer messages are sent in pieces.
        let pieces = bytes.div_ceil(MAX_MESSAGE_BYTES);
        self.library.reserve_sends(messages.saturating_mul(pieces), bytes.min(MAX_MESSAGE_BYTES));
        Ok(())
    }

    fn recv(&self, region: RegionMut<'_>, from: usize, tag: u32) -> Result<Ticket> {
        let LocationMut::Host(bytes) = region.location else {
            return Err(failed("recv", ON_A_GPU));
        };
        let tag_number = self.tag("recv", tag)?;
        let (mut rest, mut first) = (bytes, true);
        while first || !rest.is_empty() {
            first = false;
            let (bytes, others) = rest.split_at_mut(rest.len().min(MAX_MESSAGE_BYTES));
            rest = others;
            let (count, start) = (bytes.len() as c_int, bytes.as_mut_ptr());
            // SAFETY: `count` bytes from `start` are borrowed until `complete` returns.
            #[allow(unsafe_code)]
            let status = self.library.complete("MPI_Irecv", |request| unsafe {
                let (bytes, from) = (ffi::RSMPI_UINT8_T, from as c_int);
                ffi::MPI_Irecv(start.cast(), count, bytes, from, tag_number, self.raw, request)
            })?;
            let mut received = 0;
            // SAFETY: the status belongs to the message, and counts in its datatype.
            #[allow(unsafe_code)]
            self.library.call("MPI_Get_count", || unsafe {
                ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut received)
            })?;
            if received != count {
                let reason =
                    format!("rank {from} sent {received} bytes with tag {tag}, expected {count}");
                return Err(failed("recv", reason));
            }
        }
        Ok(None)
    }

    fn barrier(&self) -> Result<()> {
        // SAFETY: a barrier has no buffers.
        #[allow(unsafe_code)]
        self.library
            .complete("MPI_Ibarrier", |request| unsafe { ffi::MPI_Ibarrier(self.raw, request) })?;
        Ok(())
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Member>> {
        self.library.health.check()?;
        // SAFETY: constants of the bindings, set before the program starts.
        #[allow(unsafe_code)]
        let (mut raw, none) = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_UNDEFINED) };
        // `Group::split` has checked that both are within C's int.
        let color_number = color.map_or(none, |color| color as c_int);
        // SAFETY: `raw` lives through the call.
        #[allow(unsafe_code)]
        self.library.call("MPI_Comm_split", || unsafe {
            ffi::MPI_Comm_split(self.raw, color_number, key as c_int, &mut raw)
        })?;
        if color.is_none() {
            return Ok(None);
        }
        let library = Arc::clone(&self.library);
        library.return_errors(raw)?;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator is new, and the integers outlive the calls.
        #[allow(unsafe_code)]
        unsafe {
            library.call("MPI_Comm_rank", || ffi::MPI_Comm_rank(raw, &mut rank))?;
            library.call("MPI_Comm_size", || ffi::MPI_Comm_size(raw, &mut size))?;
        }
        let (rank, size) = (rank as usize, size as usize);
        let engine = Arc::new(Communicator::new(raw, true, rank, size, library));
        Ok(Some(Member { engine, rank, size }))
    }

    fn finish(&self) -> Result<()> {
        self.library.wait_for_sends()?;
        // A message may be sent only while its receiver calls MPI.
        self.barrier()?;
        self.library.finish();
        Ok(())
    }

    fn abort(&self, code: i32) -> ! {
        self.library.abort(code)
    }
}

/// Splits bytes into messages. No bytes are an empty message.
fn messages(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let none = bytes.is_empty().then_some(bytes);
    none.into_iter().chain(bytes.chunks(MAX_MESSAGE_BYTES))
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.owned && self.library.health.fault().is_none() {
            // SAFETY: this value owns the communicator, and no operation runs on it any more. Drop
            // cannot report errors.
            #[allow(unsafe_code)]
            let _ =
                self.library.call("MPI_Comm_free", || unsafe { ffi::MPI_Comm_free(&mut self.raw) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_divide_any_length_in_order() {
        for (len, size) in [(0, 3), (1, 3), (7, 3), (9, 3), (10, 4), (5, 8)] {
            let chunks: Vec<_> = (0..size).map(|rank| chunk_of(len, size, rank)).collect();
            assert_eq!((chunks[0].start, chunks[size - 1].end), (0, len));
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(chunks.iter().all(|chunk| chunk.len().abs_diff(len / size) <= 1));
        }
    }
}
