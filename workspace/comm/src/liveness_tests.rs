//! Tests of `liveness.rs`. Ranks are threads, and connections are real.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::*;
use crate::rendezvous::tests::{free_address, launch};
use crate::rendezvous::{hello, host, join};
use crate::watchdog::Operation;

const LIMITS: Limits =
    Limits { operation: Duration::from_secs(600), silence: Duration::from_secs(45) };
const LIMIT: Duration = Duration::from_secs(20);

struct Rank {
    link: Link,
    health: Arc<Health>,
    faults: Receiver<Fault>,
}

/// Returns the connections of a job of `size` ranks, rank 0's first.
fn meet(size: usize) -> Vec<Vec<Peer>> {
    let address = free_address();
    let others: Vec<_> = (1..size)
        .map(|rank| {
            let (address, me) = (address.clone(), hello(&launch(rank, size, &address), ""));
            std::thread::spawn(move || join(&address, &me, LIMIT).unwrap().0)
        })
        .collect();
    let me = hello(&launch(0, size, &address), "");
    let mut peers = vec![host(&address, &me, LIMIT, Vec::new()).unwrap()];
    peers.extend(others.into_iter().map(|other| vec![other.join().unwrap()]));
    peers
}

fn start(rank: usize, peers: Vec<Peer>, limits: Limits) -> Rank {
    let (sender, faults) = channel();
    let sender = Mutex::new(sender);
    let on_fault = move |fault: &Fault| sender.lock().unwrap().send(fault.clone()).unwrap();
    let health = Arc::new(Health::new(Arc::new(on_fault)));
    let link = Link::start(rank, "here", peers, Arc::clone(&health), limits).unwrap();
    Rank { link, health, faults }
}

fn start_all(ranks: &[usize], peers: Vec<Vec<Peer>>, limits: Limits) -> Vec<Rank> {
    ranks.iter().zip(peers).map(|(&rank, peers)| start(rank, peers, limits)).collect()
}

fn ranks(size: usize, limits: Limits) -> Vec<Rank> {
    start_all(&Vec::from_iter(0..size), meet(size), limits)
}

fn fault(rank: &Rank) -> String {
    rank.faults.recv_timeout(Duration::from_secs(10)).unwrap().to_string()
}

#[test]
fn ranks_that_say_goodbye_end_without_a_fault() {
    std::thread::scope(|scope| {
        for (at, rank) in (0..).zip(ranks(4, LIMITS)) {
            scope.spawn(move || {
                // Rank 0 is first. All ranks wait for the slowest.
                std::thread::sleep(Duration::from_millis(40) * at);
                rank.link.close().unwrap();
            });
        }
    });
}

#[test]
fn a_lost_connection_is_named_to_all() {
    let mut peers = meet(4);
    // The process of rank 2 is gone, and its connections are closed.
    drop(peers.remove(2));
    for rank in &start_all(&[0, 1, 3], peers, LIMITS) {
        let fault = fault(rank);
        assert!(fault.starts_with("rank 2 (") && fault.contains("died"), "{fault}");
        assert!(rank.link.close().is_err());
    }
}

#[test]
fn all_notice_that_rank_0_is_gone() {
    let mut peers = meet(3);
    drop(peers.remove(0));
    for rank in &start_all(&[1, 2], peers, LIMITS) {
        let fault = fault(rank);
        assert!(fault.starts_with("rank 0 (") && fault.contains("died"), "{fault}");
    }
}

#[test]
fn a_rank_that_falls_silent_is_named() {
    let limits = Limits { silence: Duration::from_millis(1500), ..LIMITS };
    let mut peers = meet(3);
    // A connection that stays open without traffic: a stopped process, or a lost machine.
    let _frozen = peers.remove(1);
    for rank in &start_all(&[0, 2], peers, limits) {
        let fault = fault(rank);
        assert!(fault.starts_with("rank 1 (") && fault.contains("no sign of life"), "{fault}");
    }
}

#[test]
fn a_long_rendezvous_is_no_silence() {
    let limits = Limits { silence: Duration::from_millis(800), ..LIMITS };
    let peers = meet(3);
    std::thread::sleep(Duration::from_millis(1000));
    let ranks = start_all(&[0, 1, 2], peers, limits);
    std::thread::sleep(Duration::from_millis(1500));
    for rank in &ranks {
        assert_eq!(rank.health.fault(), None);
    }
}

#[test]
fn a_rank_that_fails_tells_the_others_why() {
    for failing in [0, 1] {
        let mut ranks = ranks(3, LIMITS);
        ranks.remove(failing).link.fail("the disk is full");
        for rank in &ranks {
            let fault = fault(rank);
            assert!(fault.starts_with(&format!("rank {failing} (")), "{fault}");
            assert!(fault.ends_with("failed: the disk is full"), "{fault}");
        }
    }
}

#[test]
fn a_stuck_operation_is_reported_with_what_every_rank_does() {
    let limits = Limits { operation: Duration::from_millis(300), ..LIMITS };
    for stuck in [0, 2] {
        let ranks = ranks(3, limits);
        let operation = || Operation { name: "all_reduce", group: "data".into(), number: 7 };
        let waiting = ranks[stuck].health.begin(operation());
        drop(ranks[1].health.begin(Operation { number: 6, ..operation() }));
        for rank in &ranks {
            let fault = fault(rank);
            let parts = [
                &format!("rank {stuck} ("),
                "waits in all_reduce no. 7 of group data since",
                "is in no operation, the last was all_reduce no. 6 of group data",
                "is in no operation, and in none before",
            ];
            moh_testkit::programs::assert_has(&fault, &parts);
        }
        drop(waiting);
    }
}
