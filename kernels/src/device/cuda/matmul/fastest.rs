//! Selects the fastest of a plan's algorithms on this GPU.

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::result::event;
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream};

use super::plan::Plan;
use super::{Library, Matmul};

/// Timed repetitions of an algorithm, after an untimed one.
const TIMED: usize = 3;
/// The scale of a matmul that accumulates into its own output while algorithms are timed. It is
/// negligible relative to the result that follows; with a scale of 0 the library could skip the work.
const NOTHING: f32 = 1e-30;

/// Two events on a stream.
struct Stopwatch {
    stream: CUstream,
    start: CUevent,
    end: CUevent,
}

impl Stopwatch {
    /// Creates the events; `None` if the driver has no events left.
    fn new(stream: CUstream) -> Option<Self> {
        let event = || event::create(CUevent_flags::CU_EVENT_DEFAULT).ok();
        let start = event()?;
        let Some(end) = event() else {
            destroy(start);
            return None;
        };
        Some(Stopwatch { stream, start, end })
    }

    /// Returns the milliseconds of the work that `work` enqueues on the stream; `None` if it fails.
    fn time(&self, work: impl FnOnce() -> Option<()>) -> Option<f32> {
        // SAFETY: the events and the stream are valid.
        #[allow(unsafe_code)]
        unsafe {
            event::record(self.start, self.stream).ok()?;
            work()?;
            event::record(self.end, self.stream).ok()?;
            event::synchronize(self.end).ok()?;
            event::elapsed(self.start, self.end).ok()
        }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        destroy(self.start);
        destroy(self.end);
    }
}

fn destroy(event: CUevent) {
    // SAFETY: `Stopwatch::new` created the event. A destructor cannot report errors.
    #[allow(unsafe_code)]
    let _ = unsafe { event::destroy(event) };
}

impl Plan {
    /// Times every algorithm on the operands of `matmul`. The output is overwritten; an accumulated
    /// output changes by a negligible amount. A failing algorithm is not selected.
    pub(super) fn put_first_the_fastest(
        &mut self,
        library: &Library,
        matmul: &Matmul,
        stream: CUstream,
    ) {
        let Some(stopwatch) = Stopwatch::new(stream) else { return };
        let in_place = matmul.addend == Some(matmul.out.address);
        let scale = if in_place { NOTHING } else { 1.0 };
        let time = |algorithm: &cublasLtMatmulAlgo_t| {
            let run = || library.multiply(self, algorithm, matmul, scale, stream).ok();
            run()?;
            stopwatch.time(|| (0..TIMED).try_for_each(|_| run()))
        };
        let times: Vec<f32> =
            self.algorithms.iter().map(|found| time(found).unwrap_or(f32::INFINITY)).collect();
        let fastest = (0..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b]));
        self.algorithms.swap(0, fastest.unwrap_or(0));
    }
}
