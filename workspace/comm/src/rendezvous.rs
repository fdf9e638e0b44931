//! The rendezvous of all ranks at an address of rank 0's machine, before training starts. It checks
//! that all ranks are present and were started alike, and distributes rank 0's payload (NCCL's
//! unique id). The connections stay open for monitoring (`liveness.rs`).
//!
//! Rank 0 serves all connections from one non-blocking loop, so that a connection that sends
//! nothing cannot delay the ranks. There is no authentication: a process that reaches the port and knows
//! the job can claim a rank, so the port must be on a private network of the cluster.

use std::fmt::Display;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::wire::{
    Connection, Hello, Message, POLL_INTERVAL, PROTOCOL, Received, Refusal, close_all,
};
use crate::{Address, Error, Fault, Launch, Result};

/// How long a new connection may take to send its hello.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum connections without a hello, beyond the number of ranks. Further connections
/// replace the oldest.
const MAX_PENDING_CONNECTIONS: usize = 64;
/// How long rank 0 waits for further ranks after a mismatch, so that they also report the cause.
const MISMATCH_GRACE: Duration = Duration::from_secs(2);
/// How long rank 0 retries a port that an earlier job may still be releasing.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);
/// How long refused connections may take to read the refusal and close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a connected rank waits for rank 0's answer beyond the time limit. Rank 0 enforces the
/// limit, and may have started later.
const WELCOME_GRACE: Duration = Duration::from_secs(20);
/// How long a rank tries to reconnect after rank 0 closed the connection without an answer.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(40);
/// Characters of a fingerprint shown in a message.
const MAX_SHOWN_CHARS: usize = 120;

pub(crate) struct Peer {
    pub rank: usize,
    /// Host and process.
    pub place: String,
    pub connection: Connection,
}

impl Peer {
    pub(crate) fn who(&self) -> String {
        who(self.rank, &self.place)
    }
}

/// Returns a rank and its process, for messages.
pub(crate) fn who(rank: usize, place: &str) -> String {
    format!("rank {rank} ({place})")
}

pub(crate) fn place() -> String {
    format!("{}, process {}", host_name(), std::process::id())
}

/// Returns this machine's host name.
pub fn host_name() -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = kernel.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    if host.trim().is_empty() { "unknown host".to_owned() } else { host.trim().to_owned() }
}

fn failed(address: &Address, reason: impl Display) -> Error {
    Error::Call(format!("rendezvous at {address}: {reason}"))
}

/// Returns this process's first message to rank 0. Rank 0 also has such a message.
pub(crate) fn hello(launch: &Launch, fingerprint: &str) -> Hello {
    Hello {
        protocol: PROTOCOL,
        job: launch.job.clone(),
        rank: launch.rank,
        size: launch.size,
        place: place(),
        fingerprint: fingerprint.to_owned(),
    }
}

/// Waits on rank 0 for all other ranks, and sends them `payload`.
pub(crate) fn host(
    address: &Address,
    me: &Hello,
    limit: Duration,
    payload: Vec<u8>,
) -> Result<Vec<Peer>> {
    let start = Instant::now();
    let listener = listen(address, start + limit.min(BIND_TIMEOUT))?;
    let mut admission = Admission {
        me,
        peers: (1..me.size).map(|_| None).collect(),
        pending: Vec::new(),
        fault: None,
        deadline: start + limit,
    };
    loop {
        admission.accept(&listener);
        admission.read_hellos();
        admission.check_peers();
        let absent = admission.absent();
        if absent.is_empty() && admission.fault.is_none() {
            break;
        }
        if absent.is_empty() || Instant::now() >= admission.deadline {
            let missing =
                || Fault::missing(&absent, me.size, &address.to_string(), limit.as_secs());
            let fault = admission.fault.take().unwrap_or_else(missing);
            return Err(admission.refuse_all(fault));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let mut peers: Vec<Peer> = admission.peers.into_iter().flatten().collect();
    let welcome = Message::Welcome { who: me.place.clone(), payload };
    for peer in &mut peers {
        peer.connection.send(&welcome);
    }
    Ok(peers)
}

/// Rank 0's side of the rendezvous.
struct Admission<'a> {
    me: &'a Hello,
    /// The peer of rank r is at index r - 1.
    peers: Vec<Option<Peer>>,
    /// Connections without a hello yet, with their deadlines.
    pending: Vec<(Connection, Instant)>,
    fault: Option<Fault>,
    deadline: Instant,
}

impl Admission<'_> {
    fn absent(&self) -> Vec<usize> {
        let absent = |(at, peer): (usize, &Option<Peer>)| peer.is_none().then_some(at + 1);
        self.peers.iter().enumerate().filter_map(absent).collect()
    }

    fn accept(&mut self, listener: &TcpListener) {
        // An error is about one connection or is transient. The time limit ends everything else.
        while let Ok((stream, _)) = listener.accept() {
            if let Ok(connection) = Connection::new(stream) {
                self.pending.push((connection, Instant::now() + HANDSHAKE_TIMEOUT));
            }
            if self.pending.len() > self.me.size + MAX_PENDING_CONNECTIONS {
                self.pending.remove(0);
            }
        }
    }

    fn read_hellos(&mut self) {
        for (mut connection, deadline) in std::mem::take(&mut self.pending) {
            match connection.receive() {
                Received::Nothing if Instant::now() < deadline => {
                    self.pending.push((connection, deadline));
                }
                Received::Message(Message::Hello(hello)) => self.admit(connection, hello),
                _ => {}
            }
        }
    }

    fn admit(&mut self, connection: Connection, hello: Hello) {
        let refuse = |mut connection: Connection, refusal| {
            // The answer fits the socket's buffer, so a peer that does not read it causes no wait.
            connection.send(&Message::Refused(refusal));
        };
        if hello.protocol != PROTOCOL {
            let reason = format!(
                "rank 0 uses version {PROTOCOL} of the rendezvous protocol: start every rank with the same \
                 program"
            );
            return refuse(connection, Refusal::Rank(reason));
        }
        if hello.job != self.me.job {
            return refuse(connection, Refusal::OtherJob);
        }
        if hello.rank == 0 || hello.rank >= self.me.size {
            let reason = format!(
                "rank 0 was started as one of {} ranks, this is {} of {}",
                self.me.size, hello.rank, hello.size
            );
            return refuse(connection, Refusal::Rank(reason));
        }
        let peer = &mut self.peers[hello.rank - 1];
        if let Some(peer) = peer {
            let reason =
                format!("{} has already joined, {} claims the same rank", peer.who(), hello.place);
            return refuse(connection, Refusal::Rank(reason));
        }
        if self.fault.is_none()
            && let Some(fault) = difference(self.me, &hello)
        {
            self.fault = Some(fault);
            self.deadline = self.deadline.min(Instant::now() + MISMATCH_GRACE);
        }
        *peer = Some(Peer { rank: hello.rank, place: clip(&hello.place), connection });
    }

    /// Records a fault if a rank joined and then closed its connection: it will not reconnect.
    fn check_peers(&mut self) {
        for slot in &mut self.peers {
            let Some(peer) = slot else { continue };
            if let Received::Lost(reason) = peer.connection.receive() {
                let who = peer.who();
                self.fault.get_or_insert(Fault::lost(&who, &reason));
                self.deadline = self.deadline.min(Instant::now());
                *slot = None;
            }
        }
    }

    fn refuse_all(self, fault: Fault) -> Error {
        let connections = self.peers.into_iter().flatten().map(|mut peer| {
            peer.connection.send(&Message::Refused(Refusal::Fault(fault.clone())));
            peer.connection
        });
        close_all(connections.collect(), CLOSE_TIMEOUT);
        fault.into()
    }
}

/// Returns the difference between a rank's hello and rank 0's, if there is one.
fn difference(ours: &Hello, theirs: &Hello) -> Option<Fault> {
    let (mine, other) = if ours.size != theirs.size {
        (format!("{} ranks", ours.size), format!("{} ranks", theirs.size))
    } else if ours.fingerprint != theirs.fingerprint {
        // A fingerprint may have many lines, such as a recipe. Only the first difference is shown.
        let (mut mine, mut other) = (ours.fingerprint.lines(), theirs.fingerprint.lines());
        loop {
            match (mine.next(), other.next()) {
                (Some(mine), Some(other)) if mine == other => {}
                (mine, other) => break (clip(mine.unwrap_or("")), clip(other.unwrap_or(""))),
            }
        }
    } else {
        return None;
    };
    Some(Fault::Ranks(format!(
        "{} was started with `{other}`, rank 0 with `{mine}`: start every rank with the same program and the \
         same recipe",
        who(theirs.rank, &clip(&theirs.place))
    )))
}

/// Returns the start of another process's text, safe to print on a terminal.
fn clip(text: &str) -> String {
    let shown = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut shown: String = shown.take(MAX_SHOWN_CHARS).collect();
    if text.chars().nth(MAX_SHOWN_CHARS).is_some() {
        shown.push_str("...");
    }
    shown
}

fn listen(address: &Address, until: Instant) -> Result<TcpListener> {
    let port = address.port;
    // A name may resolve to another address on other machines. So only an unambiguous loopback
    // address restricts the listener to this machine.
    let loopback = address.host == "localhost"
        || address.host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let choices: Vec<SocketAddr> = if loopback {
        let resolved = (address.host.as_str(), port).to_socket_addrs();
        resolved.map_err(|error| failed(address, error))?.collect()
    } else {
        vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
    };
    loop {
        let error = match TcpListener::bind(&choices[..]) {
            Ok(listener) => {
                let prepared = listener.set_nonblocking(true).map(|()| listener);
                return prepared.map_err(|error| failed(address, error));
            }
            Err(error) => error,
        };
        if Instant::now() >= until {
            return Err(failed(
                address,
                format!(
                    "cannot listen on port {port}: {error}; choose another by --rendezvous HOST:PORT \
                     or MASTER_PORT"
                ),
            ));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Connects to rank 0 and waits for its welcome, on other ranks. Returns rank 0 and its payload.
pub(crate) fn join(address: &Address, me: &Hello, limit: Duration) -> Result<(Peer, Vec<u8>)> {
    let start = Instant::now();
    let mut deadline = start + limit;
    let mut pause = Duration::from_millis(20);
    loop {
        let reason = match connect(address, me) {
            Ok(connection) => match await_welcome(connection, limit + WELCOME_GRACE) {
                Answer::Welcome(peer, payload) => return Ok((*peer, payload)),
                Answer::Refused(Refusal::Fault(fault)) => return Err(fault.into()),
                Answer::Refused(Refusal::Rank(reason)) => return Err(failed(address, reason)),
                Answer::Refused(Refusal::OtherJob) => {
                    "rank 0 of another job uses this address: choose \
                     another port by --rendezvous HOST:PORT or MASTER_PORT"
                        .into()
                }
                Answer::None(reason) => {
                    deadline = deadline.min(Instant::now() + RECONNECT_TIMEOUT);
                    reason
                }
            },
            Err(reason) => reason,
        };
        if Instant::now() + pause >= deadline {
            let (rank, seconds) = (me.rank, start.elapsed().as_secs());
            return Err(failed(
                address,
                format!(
                    "rank {rank} found no rank 0 within {seconds} s: {reason}; check that rank 0 has \
                 started and that this is its address"
                ),
            ));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn connect(address: &Address, me: &Hello) -> std::result::Result<Connection, String> {
    let resolved = (address.host.as_str(), address.port).to_socket_addrs();
    let resolved = resolved.map_err(|error| format!("no such host: {error}"))?;
    let mut reason = "the name has no address".to_owned();
    for socket in resolved {
        match TcpStream::connect_timeout(&socket, CONNECT_TIMEOUT) {
            Ok(stream) => {
                let connection = Connection::new(stream);
                let mut connection = connection.map_err(|error| error.to_string())?;
                connection.send(&Message::Hello(me.clone()));
                return Ok(connection);
            }
            Err(error) => reason = error.to_string(),
        }
    }
    Err(reason)
}

enum Answer {
    /// Rank 0 and its payload.
    Welcome(Box<Peer>, Vec<u8>),
    Refused(Refusal),
    /// Rank 0 has not answered, for this reason.
    None(String),
}

fn await_welcome(mut connection: Connection, limit: Duration) -> Answer {
    let until = Instant::now() + limit;
    while Instant::now() < until {
        connection.flush();
        match connection.receive() {
            Received::Nothing => std::thread::sleep(POLL_INTERVAL),
            Received::Message(Message::Welcome { who, payload }) => {
                return Answer::Welcome(
                    Box::new(Peer { rank: 0, place: who, connection }),
                    payload,
                );
            }
            Received::Message(Message::Refused(refusal)) => return Answer::Refused(refusal),
            Received::Message(_) => {
                return Answer::None("the process that answered is not rank 0".into());
            }
            Received::Lost(reason) => return Answer::None(reason),
        }
    }
    Answer::None("the connection was accepted but not answered".into())
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
pub(crate) mod tests;
