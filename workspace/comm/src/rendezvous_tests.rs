//! Tests of `rendezvous.rs`. Ranks are threads, and connections are real.

use std::io::{Read, Write};
use std::thread::JoinHandle;

use super::*;
use crate::launch::Launcher;

const LIMIT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(1500);

pub(crate) fn free_address() -> Address {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Address { host: "127.0.0.1".into(), port }
}

pub(crate) fn launch(rank: usize, size: usize, address: &Address) -> Launch {
    Launch {
        rank,
        size,
        local_rank: rank,
        launcher: Launcher::Torchrun,
        rendezvous: Some(address.clone()),
        job: "job".into(),
    }
}

fn me(rank: usize, size: usize, fingerprint: &str) -> Hello {
    hello(&launch(rank, size, &free_address()), fingerprint)
}

fn host_thread(address: &Address, me: Hello, limit: Duration) -> JoinHandle<Result<Vec<Peer>>> {
    let address = address.clone();
    std::thread::spawn(move || host(&address, &me, limit, b"payload".to_vec()))
}

fn join_thread(address: &Address, me: Hello) -> JoinHandle<Result<(Peer, Vec<u8>)>> {
    let address = address.clone();
    std::thread::spawn(move || join(&address, &me, LIMIT))
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error was expected").to_string()
}

#[test]
fn all_ranks_meet_and_get_the_payload() {
    let address = free_address();
    // Rank 0 comes last: the others retry.
    let others: Vec<_> = (1..4).map(|rank| join_thread(&address, me(rank, 4, "same"))).collect();
    std::thread::sleep(Duration::from_millis(200));
    let peers = host_thread(&address, me(0, 4, "same"), LIMIT).join().unwrap().unwrap();
    assert_eq!(peers.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [1, 2, 3]);
    for other in others {
        let (peer, payload) = other.join().unwrap().unwrap();
        assert_eq!((peer.rank, &payload[..]), (0, &b"payload"[..]));
    }
}

/// The longest recipe is a megabyte of characters that JSON writes as two each.
#[test]
fn ranks_with_the_longest_recipe_meet() {
    let address = free_address();
    let recipe = "\"".repeat(1 << 20);
    let host = host_thread(&address, me(0, 2, &recipe), LIMIT);
    join_thread(&address, me(1, 2, &recipe)).join().unwrap().unwrap();
    assert_eq!(host.join().unwrap().unwrap().len(), 1);
}

#[test]
fn a_rank_of_another_job_is_refused_and_the_start_goes_on() {
    let address = free_address();
    let host = host_thread(&address, me(0, 2, "ours"), LIMIT);
    // Its recipe and its number of ranks also differ, which would end the start of its own job.
    let stray = Hello { job: "torchrun none".into(), ..me(1, 5, "theirs") };
    let error = message(join(&address, &stray, SHORT));
    assert!(error.contains("rank 0 of another job uses this address"), "{error}");
    join_thread(&address, me(1, 2, "ours")).join().unwrap().unwrap();
    host.join().unwrap().unwrap();
}

#[test]
fn ranks_that_do_not_come_are_named_on_every_rank() {
    let address = free_address();
    let host = host_thread(&address, me(0, 5, ""), SHORT);
    let other = join_thread(&address, me(2, 5, ""));
    let expected = format!(
        "ranks 1, 3, 4 of 5 did not reach the rendezvous at {address} within 1 s: check that \
             their processes have started, and that no firewall blocks the port"
    );
    assert_eq!(message(host.join().unwrap()), expected);
    assert_eq!(message(other.join().unwrap()), expected);
}

#[test]
fn a_rank_without_rank_0_says_where_it_looked() {
    let address = free_address();
    let error = message(join(&address, &me(1, 2, ""), SHORT));
    let expected = format!("rendezvous at {address}: rank 1 found no rank 0 within 1 s:");
    assert!(error.starts_with(&expected), "{error}");
    let nowhere = Address { host: "no.such.host.invalid".into(), port: 1 };
    let error = message(join(&nowhere, &me(1, 2, ""), SHORT));
    assert!(error.contains("no such host"), "{error}");
}

#[test]
fn another_fingerprint_is_refused_on_every_rank_naming_the_one() {
    let address = free_address();
    let host = host_thread(&address, me(0, 3, "moh 0.1\nlayers = 4\nseed = 1"), LIMIT);
    let same = join_thread(&address, me(1, 3, "moh 0.1\nlayers = 4\nseed = 1"));
    let other = join_thread(&address, me(2, 3, "moh 0.1\nlayers = 5\nseed = 1"));
    let joined = [same, other].map(|rank| message(rank.join().unwrap()));
    for error in [&message(host.join().unwrap()), &joined[0], &joined[1]] {
        let expected = "was started with `layers = 5`, rank 0 with `layers = 4`: start every rank with the \
                        same program and the same recipe";
        assert!(error.starts_with("rank 2 (") && error.ends_with(expected), "{error}");
    }
}

#[test]
fn another_number_of_ranks_is_refused() {
    let address = free_address();
    let host = host_thread(&address, me(0, 2, ""), LIMIT);
    let other = join_thread(&address, me(1, 4, ""));
    for error in [message(host.join().unwrap()), message(other.join().unwrap())] {
        assert!(error.contains("was started with `4 ranks`, rank 0 with `2 ranks`"), "{error}");
    }
}

#[test]
fn unknown_peers_neither_crash_nor_delay_the_rendezvous() {
    let address = free_address();
    let start = Instant::now();
    let host = host_thread(&address, me(0, 2, ""), LIMIT);
    let connect = || loop {
        if let Ok(stream) = TcpStream::connect((address.host.as_str(), address.port)) {
            return stream;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let silent: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    let mut loud = Vec::new();
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &[0xff; 4096],
        &[0; 4096],
        b"\x10\0\0\0{\"Hello\":{\"rank\"",
        b"\x09\0\0\0\"Goodbye\"",
    ] {
        let mut stream = connect();
        let _ = stream.write_all(bytes);
        loud.push(stream);
    }
    // Ranks of another job, and a duplicate rank.
    for hello in [
        Hello { job: "another".into(), ..me(1, 2, "") },
        Hello { rank: 7, ..me(1, 2, "") },
        Hello { rank: 0, ..me(1, 2, "") },
        Hello { protocol: 99, ..me(1, 2, "") },
    ] {
        let mut connection = Connection::new(connect()).unwrap();
        connection.send(&Message::Hello(hello));
        let received = loop {
            match connection.receive() {
                Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
                received => break received,
            }
        };
        assert!(matches!(received, Received::Message(Message::Refused(_))), "{received:?}");
    }
    let (peer, _) = join_thread(&address, me(1, 2, "")).join().unwrap().unwrap();
    assert_eq!((peer.rank, host.join().unwrap().unwrap().len()), (0, 1));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    drop((silent, loud));
}

#[test]
fn a_rank_that_is_there_twice_is_refused_the_second_time() {
    let address = free_address();
    let host = host_thread(&address, me(0, 3, ""), LIMIT);
    let mut twice = vec![join_thread(&address, me(1, 3, "")), join_thread(&address, me(1, 3, ""))];
    let refused = loop {
        if let Some(at) = twice.iter().position(JoinHandle::is_finished) {
            break twice.remove(at);
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    let error = message(refused.join().unwrap());
    assert!(error.contains("rank 1 (") && error.contains("has already joined"), "{error}");
    join_thread(&address, me(2, 3, "")).join().unwrap().unwrap();
    twice.remove(0).join().unwrap().unwrap();
    host.join().unwrap().unwrap();
}

#[test]
fn a_rank_that_dies_before_the_start_is_named() {
    let address = free_address();
    let host = host_thread(&address, me(0, 4, ""), LIMIT);
    let other = join_thread(&address, me(2, 4, ""));
    let connection = loop {
        match connect(&address, &me(1, 4, "")) {
            Ok(connection) => break connection,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    std::thread::sleep(Duration::from_secs(1));
    drop(connection);
    for error in [message(host.join().unwrap()), message(other.join().unwrap())] {
        assert!(error.starts_with("rank 1 (") && error.contains("died"), "{error}");
    }
}

#[test]
fn something_else_on_the_port_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
    let error = message(host(&address, &me(0, 2, ""), SHORT, Vec::new()));
    assert!(error.contains("cannot listen on port") && error.contains("--rendezvous"), "{error}");
    let answers = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
        }
    });
    let error = message(join(&address, &me(1, 2, ""), Duration::from_millis(50)));
    assert!(error.contains("received an invalid message"), "{error}");
    drop(TcpStream::connect((address.host.as_str(), address.port)));
    answers.join().unwrap();
}
