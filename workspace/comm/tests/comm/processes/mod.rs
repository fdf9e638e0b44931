//! Every operation, and every end of a job, in processes started by mpirun. Each rank runs
//! `rank_of_mpirun` of this test binary.

use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use moh_comm::{Buffers, Launch, World, WorldOptions};
use moh_kernels::Cpu;

use crate::collectives;
use moh_testkit::launcher::Launcher;

const ROLE: &str = "MOH_COMM_TEST_ROLE";

/// The file by which a rank reports to another, outside of MPI, that a message has arrived.
const ARRIVED: &str = "MOH_COMM_TEST_ARRIVED";

/// Runs the tests below in each process.
#[test]
fn rank_of_mpirun() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let launch = Launch::from_environment(None).unwrap();
    let different = role == "different" && launch.rank == 1;
    let options = WorldOptions {
        fingerprint: if different { "recipe B" } else { "recipe A" }.into(),
        operation_limit: Duration::from_secs(if role == "hangs" { 1 } else { 120 }),
        on_fault: Arc::new(|fault| {
            eprintln!("on_fault: {fault}");
            // Other ranks print their fault before mpirun ends them.
            std::thread::sleep(Duration::from_millis(500));
            std::process::exit(3);
        }),
        ..WorldOptions::default()
    };
    let world = match World::connect(&launch, Buffers::Host, options) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("refused: {error}");
            std::process::exit(4);
        }
    };
    let group = world.group();
    let last = world.rank() + 1 == world.size();
    match role.as_str() {
        "works" => collectives::check(group),
        "aborts" if last => world.abort("out of patience", 5),
        "dies" if last => {
            let kill = format!("kill -9 {}", std::process::id());
            Command::new("sh").args(["-c", &kill]).status().unwrap();
        }
        "leaves" if last => {
            drop(world);
            std::process::exit(6);
        }
        "hangs" if last => group.recv::<Cpu, f32>(&mut [0.0], 0, 0).unwrap(),
        "computes" => {
            let arrived = std::path::PathBuf::from(std::env::var_os(ARRIVED).unwrap());
            let mut elements = vec![1.0; 4_000_000];
            if last {
                group.recv::<Cpu, f32>(&mut elements, 0, 0).unwrap();
                std::fs::write(arrived, []).unwrap();
            } else {
                group.send::<Cpu, f32>(&elements, 1, 0).unwrap();
                // Computes, and makes no MPI call, until the other rank has the message.
                let start = Instant::now();
                while !arrived.exists() {
                    assert!(start.elapsed() < Duration::from_secs(60), "it did not arrive");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        "truncates" => {
            if last {
                group.send::<Cpu, f32>(&[1.0, 2.0], 0, 0).unwrap();
                group.send::<Cpu, f32>(&[1.0], 0, 1).unwrap();
            } else {
                let long = group.recv::<Cpu, f32>(&mut [0.0], 1, 0).unwrap_err();
                let short = group.recv::<Cpu, f32>(&mut [0.0; 2], 1, 1).unwrap_err();
                eprintln!("long: {long}\nshort: {short}");
            }
        }
        _ => group.barrier().unwrap(),
    }
    world.close().unwrap();
}

fn mpirun(size: usize, role: &str) -> Output {
    mpirun_with(|_| (), size, role)
}

fn mpirun_with(settings: impl FnOnce(&mut Command), size: usize, role: &str) -> Output {
    let mut command = Command::new("mpirun");
    settings(&mut command);
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()]);
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::rank_of_mpirun", "--nocapture"]).env(ROLE, role);
    output(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

fn output(mpirun: Child) -> Output {
    let mut launcher = Launcher::new(mpirun.id());
    let (ended, end) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while end.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                launcher.check();
            }
        });
        let output = mpirun.wait_with_output().unwrap();
        drop(ended);
        output
    })
}

#[test]
fn every_operation_is_right_on_processes() {
    for size in [1, 2, 3, 4, 6] {
        let output = mpirun(size, "works");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Runs a job that its last rank ends. Returns the other ranks' output.
fn ends(role: &str, size: usize) -> String {
    let start = Instant::now();
    let output = mpirun(size, role);
    assert!(!output.status.success(), "{output:?}");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_rank_that_ends_ends_the_job_and_is_named() {
    for (role, size, expected) in [
        ("aborts", 3, ["on_fault: rank 2 (", "failed: out of patience"]),
        ("leaves", 3, ["on_fault: rank 2 (", "before its work was done"]),
        (
            "hangs",
            2,
            ["is in barrier no. 1 of group world since", "is in recv no. 1 of group world since"],
        ),
        ("different", 3, ["refused: rank 1 (", "was started with `recipe B`"]),
    ] {
        let said = ends(role, size);
        assert!(expected.iter().all(|part| said.contains(part)), "{role}: {said}");
    }
    // mpirun may be faster than the liveness thread, and also names the rank.
    let said = ends("dies", 2);
    assert!(said.contains("on_fault: rank 1 (") || said.contains("process rank 1"), "{said}");
}

#[test]
fn a_message_arrives_while_its_sender_computes() {
    let directory = tempfile::tempdir().unwrap();
    let settings = |command: &mut Command| {
        // As between machines: the receiver cannot read the message from the sender's memory.
        command.args(["--mca", "btl_vader_single_copy_mechanism", "none"]);
        command.env(ARRIVED, directory.path().join("arrived"));
    };
    let output = mpirun_with(settings, 2, "computes");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn errors_of_mpi_are_errors() {
    let output = mpirun(2, "truncates");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("long: MPI: MPI_Irecv failed: MPI_ERR_TRUNCATE"), "{said}");
    assert!(
        said.contains("short: MPI: recv failed: rank 1 sent 4 bytes with tag 1, expected 8"),
        "{said}"
    );
}

#[test]
fn ranks_that_mpi_does_not_know_are_refused() {
    // Started as torchrun does, without MPI.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: &str| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::rank_of_mpirun", "--nocapture"])
            .envs([(ROLE, "works"), ("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks = [rank("0"), rank("1")];
    let said = ranks.map(|rank| {
        let output = rank.wait_with_output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    });
    let expected = "MPI says rank 0 of 1, the launcher's variables say rank";
    assert!(said.iter().any(|said| said.contains(expected)), "{said:?}");
}
