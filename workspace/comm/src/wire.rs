//! Messages between rank 0 and another rank: a length, then JSON. Only the rendezvous and the watch
//! over the processes speak them; tensors never travel here.
//!
//! What arrives may come from anyone: lengths are limited, sockets never block, and bytes that are
//! no message close the connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::Fault;

/// The version of these messages.
pub(crate) const PROTOCOL: u32 = 1;
/// Bytes that a message of a process that has not been admitted may have.
pub(crate) const STRANGER_LIMIT: usize = 256 << 10;
/// Bytes that the others' messages may have: a report of what thousands of ranks do.
pub(crate) const MEMBER_LIMIT: usize = 4 << 20;
/// How often a thread that speaks with several processes looks after them.
pub(crate) const TICK: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Another rank's first words.
    Hello(Hello),
    /// Rank 0's answer once all are there, with what its engine wants all ranks to know.
    Welcome { who: String, payload: Vec<u8> },
    /// Rank 0's answer to a rank that cannot take part.
    Refused(Refusal),
    /// Nothing but a sign of life.
    Alive,
    /// The sender has ended well; rank 0 says it when all have.
    Goodbye,
    /// An operation of the sender's has lasted too long.
    Stuck { operation: String },
    /// Rank 0 asks what the receiver is doing.
    Ask,
    /// The answer.
    Doing { text: String },
    /// The sender ends with an error.
    Failed { reason: String },
    /// Rank 0 tells why the job ends.
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
    /// The address is in use by another job, which may end soon.
    OtherJob,
    /// This process cannot be the rank that it claims.
    Rank(String),
    /// The job cannot start.
    Fault(Fault),
}

/// What a connection gave.
#[derive(Debug)]
pub(crate) enum Heard {
    Nothing,
    Message(Message),
    /// The connection is of no use any more.
    Lost(String),
}

/// A connection that never blocks.
pub(crate) struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    limit: usize,
    pub last_heard: Instant,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, limit: usize) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (input, output) = (Vec::new(), Vec::new());
        Ok(Connection { stream, input, output, limit, last_heard: Instant::now() })
    }

    /// Allows longer messages to a process that has been admitted.
    pub(crate) fn admit(&mut self) {
        self.limit = MEMBER_LIMIT;
    }

    /// The next message, if one is there.
    pub(crate) fn hear(&mut self) -> Heard {
        loop {
            match self.decode() {
                Ok(Some(message)) => {
                    self.last_heard = Instant::now();
                    return Heard::Message(message);
                }
                Ok(None) => {}
                Err(reason) => return Heard::Lost(reason),
            }
            let mut bytes = [0; 16 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Heard::Lost("the connection was closed".into()),
                Ok(count) => self.input.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Heard::Lost(format!("the connection was lost: {error}")),
            }
        }
    }

    fn decode(&mut self) -> Result<Option<Message>, String> {
        let Some((length, rest)) = self.input.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.limit {
            return Err("what came was no message".into());
        }
        let Some(bytes) = rest.get(..length) else { return Ok(None) };
        let message = serde_json::from_slice(bytes);
        self.input.drain(..4 + length);
        message.map(Some).map_err(|_| "what came was no message".into())
    }

    /// Puts a message on its way; [`Connection::flush`] sends it.
    pub(crate) fn say(&mut self, message: &Message) {
        // Sign of life is given by what waits to be sent as well.
        if *message == Message::Alive && !self.output.is_empty() {
            return;
        }
        // Messages are plain data with string keys, which JSON can hold.
        let Ok(bytes) = serde_json::to_vec(message) else { return };
        self.output.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.output.extend_from_slice(&bytes);
        self.flush();
    }

    /// Sends what waits, as far as the other side takes it; true when nothing waits any more. A
    /// connection that is broken shows when it is heard.
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

/// Closes connections so that what was said last arrives: sends it, and waits until the other sides
/// have closed theirs, or have had the time to.
pub(crate) fn part(mut connections: Vec<Connection>, patience: Duration) {
    let end = Instant::now() + patience;
    while !connections.is_empty() && Instant::now() < end {
        connections.retain_mut(|connection| {
            if connection.flush() {
                // Where it fails, the other side is gone.
                let _ = connection.stream.shutdown(Shutdown::Write);
            }
            loop {
                match connection.hear() {
                    Heard::Nothing => return true,
                    Heard::Message(_) => {}
                    Heard::Lost(_) => return false,
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

    /// A connection, and the raw other side.
    fn pair(limit: usize) -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Connection::new(listener.accept().unwrap().0, limit).unwrap(), other)
    }

    fn hear(connection: &mut Connection) -> Heard {
        loop {
            match connection.hear() {
                Heard::Nothing => std::thread::sleep(Duration::from_millis(1)),
                heard => return heard,
            }
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (mut here, other) = pair(STRANGER_LIMIT);
        let mut there = Connection::new(other, STRANGER_LIMIT).unwrap();
        let long = Message::Doing { text: "x".repeat(200_000) };
        for message in [&Message::Ask, &long, &Message::Goodbye] {
            there.say(message);
        }
        for expected in [Message::Ask, long, Message::Goodbye] {
            there.flush();
            let message = loop {
                there.flush();
                match here.hear() {
                    Heard::Nothing => {}
                    Heard::Message(message) => break message,
                    Heard::Lost(reason) => panic!("{reason}"),
                }
            };
            assert_eq!(message, expected);
        }
        drop(there);
        assert!(matches!(hear(&mut here), Heard::Lost(_)));
    }

    #[test]
    fn bytes_that_are_no_message_close_the_connection() {
        for bytes in
            [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x03\0\0\0[[[", b"\xff\xff\xff\xff", b"\0\0\0\0"]
        {
            let (mut here, mut other) = pair(STRANGER_LIMIT);
            other.write_all(bytes).unwrap();
            let heard = hear(&mut here);
            assert!(
                matches!(&heard, Heard::Lost(why) if why == "what came was no message"),
                "{heard:?}"
            );
        }
    }

    #[test]
    fn half_a_message_is_nothing_yet() {
        let (mut here, mut other) = pair(STRANGER_LIMIT);
        other.write_all(b"\x07\0\0\0\"Ali").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(matches!(here.hear(), Heard::Nothing));
        other.write_all(b"ve\"").unwrap();
        assert!(matches!(hear(&mut here), Heard::Message(Message::Alive)));
    }
}
