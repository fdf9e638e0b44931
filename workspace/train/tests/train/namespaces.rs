//! `moh-train` on two hosts, which are network namespaces joined by one cable: three ranks of
//! mpirun, two on one host and one on the other.

#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::PROGRAM;
use crate::support::job::{
    Job, arguments, assert_alike, losses, prepared, process_of, wait_for_steps,
};
use moh_testkit::launcher::wait_until;
use moh_testkit::programs::{isolate, program, success};

/// The time within which every rank detects that a host is disconnected.
const BOUND: Duration = Duration::from_secs(60);

/// The replacement of ssh that mpirun calls: HOST, and the words of a command.
const AGENT: &str = r#"#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"#;

/// Two hosts and their cable. Dropping this ends the hosts and all their processes.
struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// Creates the hosts; `label` distinguishes the tests of this process.
    fn new(label: &str) -> Self {
        let name = |host| format!("moh{}{label}{host}", std::process::id());
        let hosts = Hosts { names: ["a", "b"].map(name) };
        let [a, b] = &hosts.names;
        let steps = [
            format!("ip netns add {a}"),
            format!("ip netns add {b}"),
            format!("ip link add eth0 netns {a} type veth peer name eth0 netns {b}"),
            format!("ip -n {a} addr add 10.213.0.1/24 dev eth0"),
            format!("ip -n {b} addr add 10.213.0.2/24 dev eth0"),
            format!("ip -n {a} link set lo up"),
            format!("ip -n {b} link set lo up"),
            format!("ip -n {a} link set eth0 up"),
            format!("ip -n {b} link set eth0 up"),
            format!("ip netns exec {a} unshare --uts hostname {a}"),
        ];
        for step in steps {
            run(&step).unwrap_or_else(|error| panic!("{step}: {error}"));
        }
        hosts
    }

    /// Returns mpirun on the first host, with `count` ranks on each host.
    fn mpirun(&self, dir: &Path, count: [usize; 2], overrides: &[&str]) -> Command {
        let agent = dir.join("agent");
        fs::write(&agent, AGENT).unwrap();
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
        let [a, b] = &self.names;
        let places = [a, b].into_iter().zip(count).filter(|(_, count)| *count > 0);
        let places: Vec<String> = places.map(|(host, n)| format!("{host}:{n}")).collect();

        let mut command = Command::new("ip");
        isolate(&mut command, dir);
        command.args(["netns", "exec", a, "unshare", "--uts"]);
        command.args(["sh", "-c", r#"hostname "$0"; exec "$@""#, a]);
        command.args(["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
        command.args(["--mca", "plm_rsh_agent", agent.to_str().unwrap()]);
        // By default ranks on hosts of one machine communicate through its memory.
        command.args(["--mca", "btl", "tcp,self", "--host", &places.join(",")]);
        // mpirun gets no output from a disconnected host either.
        command.args(["sh", "-c", r#"exec "$0" "$@" 2>errors$OMPI_COMM_WORLD_RANK"#, PROGRAM]);
        command.args(arguments(overrides)).args(["--rendezvous", "10.213.0.1:29500"]);
        // A killed mpirun leaves files behind.
        command
            .env("RAYON_NUM_THREADS", "1")
            .env("TMPDIR", dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// Returns the bytes that the first host has received over the cable.
    fn received(&self) -> u64 {
        let path = "/sys/class/net/eth0/statistics/rx_bytes";
        run(&format!("ip netns exec {} cat {path}", self.names[0])).unwrap().parse().unwrap()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // A failure means that no process was left.
            let processes = run(&format!("ip netns pids {name}")).unwrap_or_default();
            for process in processes.split_whitespace() {
                let _ = run(&format!("kill -KILL {process}"));
            }
            let _ = run(&format!("ip netns del {name}"));
        }
    }
}

/// Runs a command; returns its output, or the reason of its failure.
fn run(command: &str) -> Result<String, String> {
    let mut words = command.split(' ');
    let done = Command::new(words.next().unwrap()).args(words).output();
    let done = done.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

fn errors(dir: &Path, rank: usize) -> String {
    fs::read_to_string(dir.join(format!("errors{rank}"))).unwrap_or_default()
}

fn losses_alone(dir: &Path) -> Vec<f64> {
    let mut command = program(PROGRAM, dir);
    success(command.args(arguments(&["run.dir=alone"])).env("RAYON_NUM_THREADS", "1"));
    losses(&dir.join("alone"))
}

#[test]
#[ignore = "needs the feature mpi, mpirun and the right to create network namespaces"]
fn processes_on_two_hosts_end_as_one_alone() {
    let dir = prepared();
    let dir = dir.path();
    let hosts = Hosts::new("x");
    let status = hosts.mpirun(dir, [2, 1], &[]).status().unwrap();
    assert!(status.success(), "{}", errors(dir, 0));
    assert_alike(&losses(&dir.join("run")), &losses_alone(dir));
    // The 80 steps exchange about 50 kB each.
    assert!(hosts.received() > 1 << 20, "{} bytes", hosts.received());
}

#[test]
#[ignore = "needs the feature mpi, mpirun and the right to create network namespaces"]
fn a_host_that_is_cut_off_is_named_and_the_rest_continues() {
    let dir = prepared();
    let dir = dir.path();
    let hosts = Hosts::new("y");
    let job = Job::start(&mut hosts.mpirun(dir, [2, 1], &[]), dir);
    wait_for_steps(&dir.join("run"), 12);
    run(&format!("ip -n {} link set eth0 down", hosts.names[1])).unwrap();
    let ended = || (0..3).all(|rank| process_of(dir, rank).is_none());
    wait_until(BOUND, "the end of all ranks", ended);
    // mpirun itself waits for a lost host.
    drop(job);
    for (rank, lost) in [(0, 2), (1, 2), (2, 0)] {
        let host = &hosts.names[usize::from(lost == 2)];
        let expected = format!("error: rank {rank}: rank {lost} ({host}, process ");
        let text = errors(dir, rank);
        assert!(text.contains(&expected) && text.contains(" died: no sign of life"), "{text}");
    }

    let status = hosts.mpirun(dir, [2, 0], &[]).status().unwrap();
    assert!(status.success(), "{}", errors(dir, 0));
    assert!(errors(dir, 0).contains("continuing after step "), "{}", errors(dir, 0));
    assert_alike(&losses(&dir.join("run")), &losses_alone(dir));
}
