//! Tests of `world.rs`: whole jobs, of threads and of real processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Instant;

use moh_kernels::{AnyBuffer, Cpu, Region, RegionMut};

use super::*;
use crate::engine::Ticket;
use crate::engine::threads::{SharedState, Threads};
use crate::rendezvous::tests::{free_address, launch};
use crate::{Address, Reduce};

fn on_threads<R: Send + 'static>(
    worlds: Vec<World>,
    body: impl Fn(World) -> R + Clone + Send + 'static,
) -> Vec<std::thread::Result<R>> {
    let threads = worlds.into_iter().map(|world| {
        let body = body.clone();
        std::thread::spawn(move || body(world))
    });
    join_all(threads.collect())
}

fn join_all<R>(threads: Vec<JoinHandle<R>>) -> Vec<std::thread::Result<R>> {
    threads.into_iter().map(JoinHandle::join).collect()
}

#[test]
fn a_thread_that_panics_fails_the_operations_of_the_others() {
    let results = on_threads(World::threads(3), |world| {
        let mut elements = vec![1.0f32; 5];
        world.group().all_reduce::<Cpu, f32>(&mut elements, Reduce::Sum)?;
        assert!(world.rank() != 1, "rank 1 panics here");
        world.group().all_reduce::<Cpu, f32>(&mut elements, Reduce::Sum)
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Err(_) => assert_eq!(rank, 1),
            // Rank 2 may report that rank 1 has left, or that rank 0 has, which reported rank 1.
            Ok(result) => {
                let message = result.unwrap_err().to_string();
                assert!(message.contains("left the group while other ranks waited"), "{message}");
            }
        }
    }
}

#[test]
fn a_receiver_learns_that_its_sender_has_left_but_gets_what_was_sent() {
    let results = on_threads(World::threads(2), |world| {
        let group = world.group();
        if world.rank() == 0 {
            return group.send::<Cpu, u8>(&[7], 1, 3).map(|()| 7);
        }
        let mut element = [0u8];
        group.recv::<Cpu, u8>(&mut element, 0, 3)?;
        let left = group.recv::<Cpu, u8>(&mut [0], 0, 3).unwrap_err();
        assert_eq!(left.to_string(), "rank 0 left the group while other ranks waited for it");
        Ok(element[0])
    });
    assert!(results.into_iter().all(|result| result.unwrap() == Ok(7)));
}

#[test]
fn ranks_in_different_operations_all_get_an_error() {
    let results = on_threads(World::threads(2), |world| {
        let mut elements = vec![0.0f32; 4 + world.rank()];
        world.group().all_reduce::<Cpu, f32>(&mut elements, Reduce::Sum)
    });
    for result in results {
        let error = result.unwrap().unwrap_err().to_string();
        assert!(error.contains("all_reduce (Sum) of 5 F32"), "{error}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_on_the_spot() {
    let results = on_threads(World::threads(2), |world| {
        let group = world.group();
        let mut three = [0.0f32; 3];
        let odd = group.all_gather::<Cpu, f32>(&mut three).unwrap_err().to_string();
        let expected = "all_gather of group world: 3 elements cannot be divided among 2 ranks: pad the buffer \
                        to a multiple";
        assert_eq!(odd, expected);
        let beyond = group.broadcast::<Cpu, f32>(&mut three, 2).unwrap_err().to_string();
        assert_eq!(beyond, "broadcast of group world: there is no rank 2: the last rank is 1");
        let own = group.send::<Cpu, f32>(&three, world.rank(), 0).unwrap_err().to_string();
        assert!(own.ends_with("is this rank itself"), "{own}");
        group.barrier()
    });
    assert!(results.into_iter().all(|result| result.unwrap() == Ok(())));
}

#[test]
fn a_world_of_one_does_nothing() {
    let options = WorldOptions::default();
    let world = World::connect(&Launch::single(), Buffers::Host, options).unwrap();
    let mut elements = vec![1.5f32; 3];
    let group = world.group();
    group.all_reduce::<Cpu, f32>(&mut elements, Reduce::Sum).unwrap();
    group.all_gather::<Cpu, f32>(&mut elements).unwrap();
    group.barrier().unwrap();
    let elements = AnyBuffer::<Cpu>::F32(elements);
    let pending = group.start_reduce_scatter(elements, Reduce::Sum).unwrap();
    assert_eq!(pending.wait().unwrap().into_typed::<f32>(), [1.5; 3]);
    assert_eq!(group.split("half", Some(0), 0).unwrap().unwrap().size(), 1);
    assert!(group.split("none", None, 0).unwrap().is_none());
    world.close().unwrap();
}

#[cfg(not(feature = "mpi"))]
#[test]
fn several_processes_need_an_engine() {
    let launch = launch(0, 2, &free_address());
    let error = World::connect(&launch, Buffers::Host, WorldOptions::default()).unwrap_err();
    assert!(error.to_string().contains("built without MPI"), "{error}");
}

/// Returns the ranks of a job connected by sockets. The elements are exchanged in memory.
fn connected(
    size: usize,
    options: WorldOptions,
    body: impl Fn(Result<World>) + Clone + Send + 'static,
) -> Vec<std::thread::Result<()>> {
    let (address, shared) = (free_address(), SharedState::new(size));
    let threads = (0..size).map(|rank| {
        let (launch, shared) = (launch(rank, size, &address), Arc::clone(&shared));
        let (options, body) = (options.clone(), body.clone());
        std::thread::spawn(move || {
            let engine = |launch: &Launch, payload: &[u8], health| -> Result<Arc<dyn Engine>> {
                assert_eq!(payload, b"all know");
                Ok(Arc::new(Threads::new(shared, launch.rank, health)))
            };
            let payload = || Ok(b"all know".to_vec());
            body(World::connect_with(&launch, options, payload, engine));
        })
    });
    join_all(threads.collect())
}

#[test]
fn a_job_starts_works_and_ends() {
    let results = connected(4, WorldOptions::default(), |world| {
        let world = world.unwrap();
        let mut elements = vec![world.rank() as f32];
        world.group().all_reduce::<Cpu, f32>(&mut elements, Reduce::Sum).unwrap();
        assert_eq!(elements, [6.0]);
        world.close().unwrap();
    });
    assert!(results.iter().all(std::thread::Result::is_ok));
}

#[test]
fn a_world_that_is_dropped_early_ends_the_job_and_is_named() {
    for panics in [false, true] {
        let results = connected(3, WorldOptions::default(), move |world| {
            let world = world.unwrap();
            if world.rank() == 2 {
                assert!(!panics, "rank 2 panics here");
                return;
            }
            // There is nothing to wait for, but the fault still arrives.
            let start = Instant::now();
            let error = loop {
                if let Err(error) = world.group().send::<Cpu, u8>(&[0], 1 - world.rank(), 0) {
                    break error.to_string();
                }
                assert!(start.elapsed() < Duration::from_secs(10));
                std::thread::sleep(Duration::from_millis(5));
            };
            let why = if panics { "it panicked" } else { "it ended before its work was done" };
            assert!(error.starts_with("rank 2 (") && error.ends_with(why), "{error}");
        });
        let failed: Vec<bool> = results.iter().map(|result| result.is_err()).collect();
        assert_eq!(failed, [false, false, panics]);
    }
}

#[test]
fn a_hang_in_a_collective_ends_the_job_with_a_report() {
    let (sender, faults) = channel();
    let sender = std::sync::Mutex::new(sender);
    let options = WorldOptions {
        operation_limit: Duration::from_millis(300),
        on_fault: Arc::new(move |fault| sender.lock().unwrap().send(fault.clone()).unwrap()),
        ..WorldOptions::default()
    };
    // A rank that drops its world after the fault must not be the first lost rank for the others.
    let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
    let results = connected(3, options, move |world| {
        let world = world.unwrap();
        let group = world.group();
        group.barrier().unwrap();
        let error = if world.rank() == 1 {
            group.recv::<Cpu, u8>(&mut [0], 0, 0).unwrap_err()
        } else {
            group.barrier().unwrap_err()
        };
        let error = error.to_string();
        assert!(error.contains("is in barrier no. 2 of group world since"), "{error}");
        assert!(error.contains("is in recv no. 2 of group world since"), "{error}");
        kept.lock().unwrap().push(world);
    });
    assert!(results.iter().all(std::thread::Result::is_ok));
    let is_stuck = |fault: &Fault| fault.to_string().contains(" waits in ");
    assert_eq!(faults.try_iter().filter(is_stuck).count(), 3);
}

/// An engine with operations that wait forever, unless the job ends.
struct Waiting(Arc<Health>);

impl Waiting {
    fn wait<R>(&self) -> Result<R> {
        loop {
            self.0.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Engine for Waiting {
    fn all_reduce(&self, _: RegionMut<'_>, _: Reduce) -> Result<Ticket> {
        self.wait()
    }
    fn reduce_scatter(&self, _: RegionMut<'_>, _: Reduce) -> Result<Ticket> {
        self.wait()
    }
    fn all_gather(&self, _: RegionMut<'_>) -> Result<Ticket> {
        self.wait()
    }
    fn broadcast(&self, _: RegionMut<'_>, _: usize) -> Result<Ticket> {
        self.wait()
    }
    fn send(&self, _: Region<'_>, _: usize, _: u32) -> Result<Ticket> {
        self.wait()
    }
    fn recv(&self, _: RegionMut<'_>, _: usize, _: u32) -> Result<Ticket> {
        self.wait()
    }
    fn barrier(&self) -> Result<()> {
        self.wait()
    }
    fn split(&self, _: Option<u32>, _: u32) -> Result<Option<Member>> {
        self.wait()
    }
    fn finish(&self) -> Result<()> {
        Ok(())
    }
    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}

const CHILD: &str = "MOH_COMM_TEST_CHILD";

/// Runs a rank of the tests below, in a process of this test binary.
#[test]
fn child_process() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let [rank, size, port, role] = child.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    let address = Address { host: "127.0.0.1".into(), port: port.parse().unwrap() };
    let launch = launch(rank.parse().unwrap(), size.parse().unwrap(), &address);
    let options = WorldOptions {
        on_fault: Arc::new(|fault| {
            println!("on_fault: {fault}");
            std::process::exit(3);
        }),
        ..WorldOptions::default()
    };
    let engine = |_: &Launch, _: &[u8], health| Ok(Arc::new(Waiting(health)) as Arc<dyn Engine>);
    let world = World::connect_with(&launch, options, || Ok(Vec::new()), engine).unwrap();
    println!("ready");
    if role == "aborts" {
        world.abort("out of patience", 5);
    }
    println!("error: {}", world.group().barrier().unwrap_err());
    std::process::exit(4);
}

struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

fn process(rank: usize, size: usize, address: &Address, role: &str) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "world::tests::child_process", "--nocapture"]);
    command.env(CHILD, format!("{rank} {size} {} {role}", address.port));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    Process { child, lines }
}

impl Process {
    /// Returns the rest of the first line with this prefix.
    fn line(&mut self, start: &str) -> String {
        let mut all = Vec::new();
        for line in &mut self.lines {
            let line = line.unwrap();
            if let Some((_, rest)) = line.split_once(start) {
                return rest.to_owned();
            }
            all.push(line);
        }
        panic!("no line with {start:?} among {all:?}");
    }
}

fn processes(roles: &[&str]) -> Vec<Process> {
    let (address, size) = (free_address(), roles.len());
    roles.iter().enumerate().map(|(rank, role)| process(rank, size, &address, role)).collect()
}

#[test]
fn a_process_that_is_killed_is_named_by_all_others_within_seconds() {
    for killed in [2, 0] {
        let mut ranks = processes(&["waits"; 4]);
        for rank in &mut ranks {
            rank.line("ready");
        }
        let start = Instant::now();
        let mut victim = ranks.remove(killed);
        // SIGKILL.
        victim.child.kill().unwrap();
        victim.child.wait().unwrap();
        for rank in &mut ranks {
            let fault = rank.line("on_fault: ");
            let process = format!("process {}", victim.child.id());
            assert!(fault.starts_with(&format!("rank {killed} (")), "{fault}");
            assert!(fault.contains(&process), "{fault}");
            assert_eq!(rank.child.wait().unwrap().code(), Some(3));
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}

#[test]
fn a_process_that_aborts_is_named_with_its_reason() {
    let mut ranks = processes(&["waits", "aborts", "waits"]);
    assert_eq!(ranks.remove(1).child.wait().unwrap().code(), Some(5));
    for rank in &mut ranks {
        let fault = rank.line("on_fault: ");
        assert!(fault.starts_with("rank 1 (") && fault.ends_with("out of patience"), "{fault}");
        assert_eq!(rank.child.wait().unwrap().code(), Some(3));
    }
}
