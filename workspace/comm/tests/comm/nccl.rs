//! Every operation between GPUs, one per process. Each rank runs `rank_on_a_gpu` of this test
//! binary. With fewer than two GPUs, or without NCCL, the test prints a note and passes.
use std::process::Command;
use std::sync::Arc;

use half::bf16;
use moh_comm::{Buffers, Group, Launch, Reduce, World, WorldOptions};
use moh_kernels::{Cuda, Memory, Scalar, Stored};

const ROLE: &str = "MOH_COMM_TEST_ROLE";
/// Elements of a rank's chunk.
const CHUNK: usize = 4099;

/// Returns a small integer, so that sums of every type are exact in any order.
fn element(rank: usize, at: usize) -> f32 {
    ((rank * 5 + at) % 7) as f32
}

struct Rank<'a> {
    cuda: &'a Cuda,
    group: &'a Group,
}

impl Rank<'_> {
    fn buffer<S: Scalar>(&self, elements: &[S]) -> <Cuda as Memory>::Buffer<S> {
        let mut buffer = self.cuda.allocate::<S>(elements.len()).unwrap();
        self.cuda.upload(elements, Cuda::view_mut(&mut buffer, 0..elements.len())).unwrap();
        buffer
    }

    fn elements<S: Scalar>(&self, buffer: &<Cuda as Memory>::Buffer<S>) -> Vec<S> {
        let mut elements = vec![S::zeroed(); Cuda::len(buffer)];
        self.cuda.download(Cuda::view(buffer, 0..elements.len()), &mut elements).unwrap();
        elements
    }

    /// Checks operations that overlap with later work on the device.
    fn check_overlapped<S: Stored>(&self, from: impl Fn(f32) -> S) {
        let (group, rank, size) = (self.group, self.group.rank(), self.group.size());
        let of = |rank| (0..CHUNK * size).map(|at| from(element(rank, at))).collect::<Vec<S>>();
        let sum = |at| from((0..size).map(|rank| element(rank, at)).sum());
        let sums: Vec<S> = (0..CHUNK * size).map(sum).collect();
        let buffer = S::any_buffer::<Cuda>(self.buffer(&of(rank)));
        let reduced = group.start_reduce_scatter(buffer, Reduce::Sum).unwrap().wait().unwrap();
        let gathered = group.start_all_gather(reduced).unwrap().wait().unwrap();
        assert_eq!(self.elements(&gathered.into_typed::<S>()), sums);
    }

    fn check<S: Scalar>(&self, from: impl Fn(f32) -> S) {
        let (group, rank, size) = (self.group, self.group.rank(), self.group.size());
        let len = CHUNK * size;
        let of = |rank| (0..len).map(|at| from(element(rank, at))).collect::<Vec<S>>();
        let sum = |at| from((0..size).map(|rank| element(rank, at)).sum());
        let sums: Vec<S> = (0..len).map(sum).collect();
        let own = CHUNK * rank..CHUNK * (rank + 1);

        let mut buffer = self.buffer(&of(rank));
        group.all_reduce::<Cuda, S>(Cuda::view_mut(&mut buffer, 0..len), Reduce::Sum).unwrap();
        assert_eq!(self.elements(&buffer), sums);

        let mut buffer = self.buffer(&of(rank));
        group.reduce_scatter::<Cuda, S>(Cuda::view_mut(&mut buffer, 0..len), Reduce::Sum).unwrap();
        assert_eq!(self.elements(&buffer)[own.clone()], sums[own]);
        group.all_gather::<Cuda, S>(Cuda::view_mut(&mut buffer, 0..len)).unwrap();
        assert_eq!(self.elements(&buffer), sums);

        for root in 0..size {
            let mut buffer = self.buffer(&of(rank));
            group.broadcast::<Cuda, S>(Cuda::view_mut(&mut buffer, 0..len), root).unwrap();
            assert_eq!(self.elements(&buffer), of(root));
        }

        // Up a pipeline and back: all ranks except the last send twice before they receive.
        let views = |buffer| Cuda::view(buffer, 0..len);
        let sent = self.buffer(&of(rank));
        if rank + 1 < size {
            group.send::<Cuda, S>(views(&sent), rank + 1, 0).unwrap();
            group.send::<Cuda, S>(views(&sent), rank + 1, 1).unwrap();
        }
        if rank > 0 {
            for tag in [0, 1] {
                let view = Cuda::view_mut(&mut buffer, 0..len);
                group.recv::<Cuda, S>(view, rank - 1, tag).unwrap();
                assert_eq!(self.elements(&buffer), of(rank - 1));
            }
            group.send::<Cuda, S>(views(&sent), rank - 1, 2).unwrap();
        }
        if rank + 1 < size {
            group.recv::<Cuda, S>(Cuda::view_mut(&mut buffer, 0..len), rank + 1, 2).unwrap();
            assert_eq!(self.elements(&buffer), of(rank + 1));
        }
        group.barrier().unwrap();
    }
}

/// Runs the operations in each process.
#[test]
fn rank_on_a_gpu() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let launch = Launch::from_environment(None).unwrap();
    let cuda = Cuda::new(launch.local_rank).unwrap();
    let options = WorldOptions {
        on_fault: Arc::new(|fault| {
            eprintln!("{fault}");
            std::process::exit(3);
        }),
        ..WorldOptions::default()
    };
    let world = World::connect(&launch, Buffers::Gpu(cuda.clone()), options).unwrap();
    let reversed = world.group().split("reversed", Some(0), world.size() - world.rank());
    let reversed = reversed.unwrap().unwrap();
    for group in [world.group(), &reversed] {
        let rank = Rank { cuda: &cuda, group };
        rank.check::<f32>(|x| x);
        rank.check::<bf16>(bf16::from_f32);
        rank.check::<f64>(f64::from);
        rank.check::<u32>(|x| x as u32);
        rank.check::<u8>(|x| x as u8);
        rank.check_overlapped::<f32>(|x| x);
        rank.check_overlapped::<bf16>(bf16::from_f32);
    }
    drop(reversed);
    world.close().unwrap();
}

#[test]
#[ignore = "needs two GPUs and NCCL"]
fn every_operation_is_right_between_gpus() {
    let num_gpus = (0..8).take_while(|&gpu| Cuda::new(gpu).is_ok()).count();
    assert!(num_gpus > 1);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: usize| {
        let (rank, size, port) = (rank.to_string(), num_gpus.to_string(), port.to_string());
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "nccl::rank_on_a_gpu", "--nocapture"])
            .envs([(ROLE, "gpu"), ("RANK", &rank), ("WORLD_SIZE", &size), ("LOCAL_RANK", &rank)])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)])
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..num_gpus).map(rank).collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
}
