//! Measures every rank before a long job: the speed of its matmuls, and of its network from the
//! previous rank. One slow rank slows all of them.

use std::path::Path;
use std::time::Instant;

use moh_comm::{Group, Reduce, World, host_name};
use moh_device::{Compute, OpenDevice};
use moh_kernels::linear::LinearForward;
use moh_kernels::{Backend, Element, ElementType};
use moh_step::Ranks;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Seconds of measurement of the matmuls, after one to warm up.
const SECONDS: f64 = 1.0;
/// Elements of a message, f32: 64 MiB.
const MESSAGE: usize = 16 << 20;
/// Messages; the fastest counts.
const MESSAGES: usize = 5;
/// A rank below this fraction of the median is slow.
const SLOW: f64 = 0.8;
/// Tag of the messages.
const TAG: u32 = 2;

/// The measurements of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankSpeed {
    /// The rank.
    pub rank: usize,
    /// Its machine's host name.
    pub host: String,
    /// FLOP/s of its matmuls, while all ranks compute.
    pub matmul: f64,
    /// Bytes per second received from the previous rank, while all ranks send; `None` on one rank.
    pub receives: Option<f64>,
}

/// The speeds of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Preflight {
    /// In rank order.
    pub ranks: Vec<RankSpeed>,
    /// Bus bandwidth of an `all_reduce` over all ranks in bytes per second: each moves 2 (n - 1) /
    /// n of the buffer; `None` on one rank.
    pub all_reduce: Option<f64>,
}

impl Preflight {
    /// The slow ranks, with the slow measurement and its fraction of the median.
    pub fn slow(&self) -> Vec<(usize, &'static str, f64)> {
        let matmul: Vec<f64> = self.ranks.iter().map(|rank| rank.matmul).collect();
        let receives: Vec<f64> = self.ranks.iter().filter_map(|rank| rank.receives).collect();
        let mut slow = Vec::new();
        for (what, speeds) in [("matmul", matmul), ("receiving", receives)] {
            let mut sorted = speeds.clone();
            sorted.sort_by(f64::total_cmp);
            let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
            let shares = speeds.iter().map(|speed| speed / median).enumerate();
            slow.extend(
                shares.filter(|&(_, share)| share < SLOW).map(|(rank, share)| (rank, what, share)),
            );
        }
        slow
    }
}

/// Measures all ranks, which call it together; the first gets the result.
///
/// # Errors
/// Fails if a device or a rank does.
pub fn preflight(
    dtype: ElementType,
    device: OpenDevice,
    world: &World,
) -> Result<Option<Preflight>, Error> {
    // Matrices that saturate the device.
    let size = match &device {
        OpenDevice::Cpu => 1024,
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(_) => 8192,
    };
    device.compute(dtype, Measurement { size, group: world.group() })
}

struct Measurement<'a> {
    size: usize,
    group: &'a Group,
}

impl Compute for Measurement<'_> {
    type Output = Result<Option<Preflight>, Error>;

    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output {
        measure::<B, T>(backend, self.size, self.group)
    }
}

fn measure<B: Backend + Clone, T: Element>(
    backend: B,
    size: usize,
    group: &Group,
) -> Result<Option<Preflight>, Error> {
    let mut ranks = Ranks::new(backend.clone(), group.clone())?;
    group.barrier()?;
    let matmul = matmul::<B, T>(&backend, size);
    let matmul = ranks.agree(matmul.map_err(Error::from))?;
    let (receives, all_reduce) = if group.size() > 1 {
        (Some(receives(&backend, group)?), Some(all_reduce(&backend, group)?))
    } else {
        (None, None)
    };
    let own = RankSpeed { rank: group.rank(), host: host_name(), matmul, receives };
    let unreadable = moh_files::io(Path::new("a rank's speed"));
    let text = serde_json::to_vec(&own).map_err(|error| unreadable(error.into()))?;
    let mut found = Vec::new();
    for text in ranks.gather(text)? {
        found.push(serde_json::from_slice(&text).map_err(|error| unreadable(error.into()))?);
    }
    Ok(ranks.is_first().then_some(Preflight { ranks: found, all_reduce }))
}

/// FLOP/s of `size` x `size` matmuls.
fn matmul<B: Backend, T: Element>(backend: &B, size: usize) -> moh_kernels::Result<f64> {
    let count = size * size;
    let elements: Vec<T> =
        (0..count).map(|index| T::from_f32((index % 251) as f32 / 251.0 - 0.5)).collect();
    let (mut x, mut y) = (backend.allocate(count)?, backend.allocate(count)?);
    backend.upload(&elements, B::view_mut(&mut x, 0..count))?;
    let mut product = || {
        let (x, y) = (B::view(&x, 0..count), B::view_mut(&mut y, 0..count));
        backend.linear_forward(LinearForward::new(size, x, x, y))?;
        backend.synchronize()
    };
    product()?;
    let (start, mut products) = (Instant::now(), 0);
    while start.elapsed().as_secs_f64() < SECONDS {
        product()?;
        products += 1;
    }
    let operations = 2.0 * (size as f64).powi(3) * f64::from(products);
    Ok(operations / start.elapsed().as_secs_f64())
}

/// Bytes per second from the previous rank in a ring.
fn receives<B: Backend>(backend: &B, group: &Group) -> Result<f64, Error> {
    let (rank, size) = (group.rank(), group.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let sent = backend.allocate::<f32>(MESSAGE)?;
    let mut received = backend.allocate::<f32>(MESSAGE)?;
    fastest(backend, group, || {
        group.send::<B, f32>(B::view(&sent, 0..MESSAGE), next, TAG)?;
        group.recv::<B, f32>(B::view_mut(&mut received, 0..MESSAGE), previous, TAG)
    })
    .map(|seconds| (MESSAGE * size_of::<f32>()) as f64 / seconds)
}

/// Bytes per second that a rank moves in an `all_reduce`.
fn all_reduce<B: Backend>(backend: &B, group: &Group) -> Result<f64, Error> {
    let mut elements = backend.allocate::<f32>(MESSAGE)?;
    let seconds = fastest(backend, group, || {
        group.all_reduce::<B, f32>(B::view_mut(&mut elements, 0..MESSAGE), Reduce::Sum)
    })?;
    let moved = 2.0 * (group.size() - 1) as f64 / group.size() as f64;
    Ok(moved * (MESSAGE * size_of::<f32>()) as f64 / seconds)
}

/// Seconds of the fastest message; all ranks start each one together.
fn fastest<B: Backend>(
    backend: &B,
    group: &Group,
    mut message: impl FnMut() -> moh_comm::Result<()>,
) -> Result<f64, Error> {
    let mut fastest = f64::INFINITY;
    for _ in 0..MESSAGES {
        group.barrier()?;
        let start = Instant::now();
        message()?;
        backend.synchronize()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::on_ranks::on_ranks;

    fn speed(rank: usize, matmul: f64, receives: f64) -> RankSpeed {
        RankSpeed { rank, host: "h".into(), matmul, receives: Some(receives) }
    }

    #[test]
    fn a_rank_far_below_the_median_is_slow() {
        let ranks =
            vec![speed(0, 9.0, 5.0), speed(1, 10.0, 5.0), speed(2, 5.0, 5.0), speed(3, 10.0, 1.0)];
        let found = Preflight { ranks, all_reduce: None };
        assert_eq!(found.slow(), [(2, "matmul", 0.5), (3, "receiving", 0.2)]);
    }

    #[test]
    fn every_rank_is_measured() {
        let measure = |world: &World| preflight(ElementType::F32, OpenDevice::Cpu, world).unwrap();
        let found = on_ranks(3, measure);
        assert!(found[1].is_none() && found[2].is_none());
        let found = found[0].clone().unwrap();
        assert_eq!(found.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(found.ranks.iter().all(|rank| rank.matmul > 0.0 && rank.receives > Some(0.0)));
        assert!(found.all_reduce > Some(0.0));
    }
}
