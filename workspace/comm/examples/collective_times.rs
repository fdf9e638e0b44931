//! Times of the collectives between CPUs, for 16 MB of f32:
//!
//! ```text
//! cargo build --release -p moh-comm --features mpi --example collective_times
//! mpirun -n 2 target/release/examples/collective_times
//! ```

use std::process::ExitCode;
use std::time::Instant;

use moh_comm::{Buffers, Group, Launch, Reduce, Result, World, WorldOptions};
use moh_kernels::Cpu;

const BYTES: usize = 16_000_000;
const ROUNDS: usize = 30;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let launch = Launch::from_environment(std::env::args().nth(1).as_deref())?;
    let world = World::connect(&launch, Buffers::Host, WorldOptions::default())?;
    let group = world.group();
    let len = (BYTES / size_of::<f32>()).next_multiple_of(group.size());
    let mut numbers = vec![1.0f32; len];
    let mut small = [1.0f64; 4];
    for (name, operation) in [
        ("all_reduce", (|g, n, _| g.all_reduce::<Cpu, f32>(n, Reduce::Max)) as Operation),
        ("reduce_scatter", |g, n, _| g.reduce_scatter::<Cpu, f32>(n, Reduce::Sum)),
        ("all_gather", |g, n, _| g.all_gather::<Cpu, f32>(n)),
        ("broadcast", |g, n, _| g.broadcast::<Cpu, f32>(n, 0)),
        ("all_reduce of 4 f64", |g, _, s| g.all_reduce::<Cpu, f64>(s, Reduce::Max)),
        ("barrier", |g, _, _| g.barrier()),
    ] {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            group.barrier()?;
            let start = Instant::now();
            operation(group, &mut numbers, &mut small)?;
            times.push(start.elapsed());
        }
        times.sort();
        if world.rank() == 0 {
            let (median, least) = (times[ROUNDS / 2], times[0]);
            println!("{name}: median {median:.2?}, least {least:.2?}, {} ranks", world.size());
        }
    }
    world.close()
}

type Operation = fn(&Group, &mut [f32], &mut [f64; 4]) -> Result<()>;
