//! An HTTP/1.1 server of texts for this machine alone. It answers one request per connection, reads only a
//! request's head, and closes a connection after [`PATIENCE`].

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes and headers of the longest head.
const MAX_HEAD_BYTES: usize = 8 << 10;
const MAX_HEADERS: usize = 64;

/// Connections answered at once; browsers open some ahead of need, and leave them silent.
const MAX_CONNECTIONS: usize = 32;

/// The time for a request to arrive, and for each part of an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of a body that are passed over after the answer: without this, a client that is still sending would see
/// a broken connection instead of the answer.
const MAX_PASSED_OVER: usize = 64 << 10;

/// The time between two attempts to accept, after one has failed.
const PAUSE: Duration = Duration::from_millis(100);

/// What is answered.
pub(crate) struct Answer {
    /// The status code.
    pub status: u16,
    /// The media type of the text.
    pub kind: &'static str,
    /// The text.
    pub text: String,
}

impl Answer {
    /// An answer in plain text.
    pub(crate) fn plain(status: u16, text: impl Into<String>) -> Self {
        Answer { status, kind: "text/plain", text: text.into() }
    }
}

/// Answers requests for the hosts `hosts` by `page`, from a path without its query, until the program ends.
pub(crate) fn serve(
    listener: &TcpListener,
    hosts: Vec<String>,
    page: impl Fn(&str) -> Answer + Send + Sync + 'static,
) {
    let page = Arc::new(page);
    let hosts: Arc<[String]> = hosts.into();
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Of one connection, or of too many open files.
            std::thread::sleep(PAUSE);
            continue;
        };
        // Each thread holds one more reference.
        if Arc::strong_count(&page) > MAX_CONNECTIONS {
            continue;
        }
        let (page, hosts) = (Arc::clone(&page), Arc::clone(&hosts));
        // Without a thread, the connection is closed, and the client may ask again.
        let _ = std::thread::Builder::new().spawn(move || {
            // A client that has left is no concern of the others.
            let _ = answer(stream, &hosts, &*page);
        });
    }
}

fn answer(
    mut stream: TcpStream,
    hosts: &[String],
    page: &impl Fn(&str) -> Answer,
) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let head = read_head(deadline, |timeout, buffer| {
        stream.set_read_timeout(Some(timeout))?;
        stream.read(buffer)
    })?;
    let (answer, with_text) = match Request::parse(&head) {
        None => (Answer::plain(400, "This is no HTTP request.\n"), true),
        Some(request) => (respond(&request, hosts, page), request.method != "HEAD"),
    };
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(answer.head().as_bytes())?;
    if with_text {
        stream.write_all(answer.text.as_bytes())?;
    }
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(PAUSE))?;
    io::copy(&mut stream.take(MAX_PASSED_OVER as u64), &mut io::sink())?;
    Ok(())
}

/// The bytes up to the end of a head, of at most [`MAX_HEAD_BYTES`]; a longer or an incomplete one is cut off.
fn read_head(
    deadline: Instant,
    mut read: impl FnMut(Duration, &mut [u8]) -> io::Result<usize>,
) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while head.len() < MAX_HEAD_BYTES && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        match read(left, &mut buffer) {
            Ok(0) => break,
            Ok(count) => head.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(head)
}

/// What a request asks for.
#[derive(Debug, PartialEq)]
struct Request {
    method: String,
    /// The path without its query.
    path: String,
    host: Option<String>,
}

impl Request {
    /// Reads a head; `None` if it is not whole or not in the format.
    fn parse(head: &[u8]) -> Option<Self> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        if !request.parse(head).ok()?.is_complete() {
            return None;
        }
        let host = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case("host"));
        let host = host.and_then(|host| std::str::from_utf8(host.value).ok());
        let path = request.path?;
        Some(Request {
            method: request.method?.to_owned(),
            path: path.split_once('?').map_or(path, |(path, _)| path).to_owned(),
            host: host.map(str::to_owned),
        })
    }
}

/// The answer to a request. One for another host comes from a page of another site, whose name was made to lead
/// here.
fn respond(request: &Request, hosts: &[String], page: &impl Fn(&str) -> Answer) -> Answer {
    let is_addressed = request
        .host
        .as_ref()
        .is_some_and(|host| hosts.iter().any(|own| own.eq_ignore_ascii_case(host)));
    match request.method.as_str() {
        _ if !is_addressed => {
            Answer::plain(421, format!("This server answers as {} only.\n", hosts.join(" and ")))
        }
        "GET" | "HEAD" => page(&request.path),
        _ => Answer::plain(405, "Only GET and HEAD.\n"),
    }
}

impl Answer {
    fn head(&self) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            421 => "Misdirected Request",
            _ => "Internal Server Error",
        };
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nAllow: GET, HEAD\r\n\
             Connection: close\r\n\r\n",
            self.status,
            self.kind,
            self.text.len()
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    fn request(text: &str) -> Option<Request> {
        Request::parse(text.as_bytes())
    }

    #[test]
    fn a_request_is_read_from_its_head() {
        let read =
            request("GET /page?a=1 HTTP/1.1\r\nhost: here:1\r\nContent-Length: 9\r\n\r\n").unwrap();
        assert_eq!(
            (&*read.method, &*read.path, read.host.as_deref()),
            ("GET", "/page", Some("here:1"))
        );
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1));
        for text in [
            "",
            "GET",
            "GET / HTTP/1.1\r\nHost: a\r\n",
            "\0\0\r\n\r\n",
            "GET / HTTP/9\r\n\r\n",
            &many,
        ] {
            assert_eq!(request(text), None, "{text}");
        }
    }

    #[test]
    fn a_head_ends_at_its_empty_line_at_its_limit_or_with_the_time() {
        let soon = || Instant::now() + Duration::from_secs(60);
        let mut parts = [&b"GET / HTTP/1.1\r\n"[..], b"\r", b"\n", b"body"].into_iter();
        let head = read_head(soon(), |_, buffer| parts.next().unwrap().read(buffer));
        assert_eq!(head.unwrap(), b"GET / HTTP/1.1\r\n\r\n");
        let endless = |_, buffer: &mut [u8]| {
            buffer.fill(b'a');
            Ok(buffer.len())
        };
        assert_eq!(read_head(soon(), endless).unwrap().len(), MAX_HEAD_BYTES);
        let late = read_head(Instant::now(), endless).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
    }
}
