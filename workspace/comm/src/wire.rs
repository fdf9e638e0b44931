//! Messages between rank 0 and another rank: a length, then JSON. They serve the rendezvous and the
//! monitoring. Tensors are never sent this way.
//!
//! Input may come from any sender: lengths are limited, sockets never block, and invalid bytes close
//! the connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::Fault;

pub(crate) const PROTOCOL: u32 = 2;
/// Maximum bytes of a message: a report of thousands of ranks, or a hello with a recipe of a
/// megabyte. Quoting in TOML and again in JSON may make the recipe four times as long.
pub(crate) const MAX_MESSAGE_BYTES: usize = 8 << 20;
/// Bytes that the buffer of a connection keeps allocated between messages.
const KEPT_BYTES: usize = 64 << 10;
/// How often a thread polls its connections.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The first message of another rank to rank 0.
    Hello(Hello),
    /// Rank 0's answer once all ranks have joined, with its payload.
    Welcome {
        who: String,
        payload: Vec<u8>,
    },
    /// Rank 0's refusal of a rank.
    Refused(Refusal),
    Alive,
    /// The sender has ended without an error. Rank 0 sends it when all ranks have ended.
    Goodbye,
    /// An operation of the sender has exceeded its limit.
    Stuck {
        operation: String,
    },
    /// Rank 0 asks for the receiver's operation.
    Ask,
    /// The answer to [`Message::Ask`].
    Doing {
        text: String,
    },
    /// The sender ends with an error.
    Failed {
        reason: String,
    },
    /// Rank 0 sends the fault that ends the job.
    Fault(Fault),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    pub job: String,
    pub rank: usize,
    pub size: usize,
    /// Host and process.
    pub place: String,
    pub fingerprint: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// Another job uses the address, and may end soon.
    OtherJob,
    /// This process cannot have the rank that it claims.
    Rank(String),
    /// The job cannot start.
    Fault(Fault),
}

#[derive(Debug)]
pub(crate) enum Received {
    Nothing,
    Message(Message),
    /// The connection can no longer be used.
    Lost(String),
}

pub(crate) struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    pub last_received: Instant,
}

/// Removes the first message from received bytes and returns it, if it is complete.
fn decode(input: &mut Vec<u8>) -> Result<Option<Message>, String> {
    let Some((length, rest)) = input.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err("received an invalid message".into());
    }
    let Some(bytes) = rest.get(..length) else { return Ok(None) };
    let message = serde_json::from_slice(bytes);
    input.drain(..4 + length);
    input.shrink_to(KEPT_BYTES);
    message.map(Some).map_err(|_| "received an invalid message".into())
}

/// Decodes bytes as the rendezvous decodes an unknown peer's, for tests with hostile input.
#[doc(hidden)]
pub fn check_messages(bytes: &[u8]) -> Result<(), String> {
    let mut input = bytes.to_vec();
    while decode(&mut input)?.is_some() {}
    Ok(())
}

impl Connection {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (input, output) = (Vec::new(), Vec::new());
        Ok(Connection { stream, input, output, last_received: Instant::now() })
    }

    pub(crate) fn receive(&mut self) -> Received {
        loop {
            match decode(&mut self.input) {
                Ok(Some(message)) => {
                    self.last_received = Instant::now();
                    return Received::Message(message);
                }
                Ok(None) => {}
                Err(reason) => return Received::Lost(reason),
            }
            let mut bytes = [0; 16 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Received::Lost("the connection was closed".into()),
                Ok(count) => self.input.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Received::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Received::Lost(format!("the connection was lost: {error}")),
            }
        }
    }

    /// Queues a message and sends as much of the queue as the socket accepts.
    pub(crate) fn send(&mut self, message: &Message) {
        // A queued message also serves as a heartbeat.
        if *message == Message::Alive && !self.output.is_empty() {
            return;
        }
        // Messages are plain data with string keys, which JSON can represent.
        let Ok(bytes) = serde_json::to_vec(message) else { return };
        self.output.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.output.extend_from_slice(&bytes);
        self.flush();
    }

    /// Sends as much of the queue as the socket accepts. Returns whether the queue is empty. If the connection is
    /// broken, [`Connection::receive`] reports it.
    pub(crate) fn flush(&mut self) -> bool {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return true,
                Ok(count) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.output.clear(),
            }
        }
        true
    }
}

/// Closes connections gracefully: flushes them, and waits at most `timeout` until the peers have closed
/// theirs.
pub(crate) fn close_all(mut connections: Vec<Connection>, timeout: Duration) {
    let end = Instant::now() + timeout;
    while !connections.is_empty() && Instant::now() < end {
        connections.retain_mut(|connection| {
            if connection.flush() {
                // If it fails, the peer is gone.
                let _ = connection.stream.shutdown(Shutdown::Write);
            }
            loop {
                match connection.receive() {
                    Received::Nothing => return true,
                    Received::Message(_) => {}
                    Received::Lost(_) => return false,
                }
            }
        });
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Returns a connection, and the raw socket of its peer.
    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Connection::new(listener.accept().unwrap().0).unwrap(), other)
    }

    fn receive(connection: &mut Connection) -> Received {
        loop {
            match connection.receive() {
                Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
                received => return received,
            }
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (mut here, other) = pair();
        let mut there = Connection::new(other).unwrap();
        let long = Message::Doing { text: "x".repeat(200_000) };
        for message in [&Message::Ask, &long, &Message::Goodbye] {
            there.send(message);
        }
        for expected in [Message::Ask, long, Message::Goodbye] {
            there.flush();
            let message = loop {
                there.flush();
                match here.receive() {
                    Received::Nothing => {}
                    Received::Message(message) => break message,
                    Received::Lost(reason) => panic!("{reason}"),
                }
            };
            assert_eq!(message, expected);
        }
        drop(there);
        assert!(matches!(receive(&mut here), Received::Lost(_)));
    }

    #[test]
    fn bytes_that_are_no_message_close_the_connection() {
        for bytes in
            [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x03\0\0\0[[[", b"\xff\xff\xff\xff", b"\0\0\0\0"]
        {
            let (mut here, mut other) = pair();
            other.write_all(bytes).unwrap();
            let received = receive(&mut here);
            assert!(
                matches!(&received, Received::Lost(why) if why == "received an invalid message"),
                "{received:?}"
            );
        }
    }

    #[test]
    fn half_a_message_is_nothing_yet() {
        let (mut here, mut other) = pair();
        other.write_all(b"\x07\0\0\0\"Ali").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(matches!(here.receive(), Received::Nothing));
        other.write_all(b"ve\"").unwrap();
        assert!(matches!(receive(&mut here), Received::Message(Message::Alive)));
    }
}
