//! A server as a process, and a short client.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use moh_testkit::launcher::wait_until;
use moh_testkit::programs::{edit_config, program, workplace, write_moh, write_tokenizer};

/// Longer than any answer of the tests needs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a directory with a dense model in `source` and a Mixture-of-Head model in `moh`. Their tokenizer has only
/// words.
pub fn prepared() -> tempfile::TempDir {
    let dir = workplace();
    edit_config(dir.path(), |config| config["eos_token_id"] = json!(null));
    write_tokenizer(&dir.path().join("source"), "w0");
    write_moh(&dir.path().join("source"), &dir.path().join("moh"), 4, 2);
    dir
}

/// Returns a directory as `prepared` does, and a server of its model `moh`.
pub fn served(options: &[&str]) -> (tempfile::TempDir, Server) {
    let dir = prepared();
    let server = Server::start(dir.path(), options);
    (dir, server)
}

/// A server. Dropping it ends the process.
pub struct Server {
    child: Child,
    pub port: u16,
}

impl Server {
    /// Starts a server of the model `moh` in `dir`.
    pub fn start(dir: &Path, options: &[&str]) -> Self {
        Self::of("moh", dir, options)
    }

    /// Starts a server of a model.
    pub fn of(model: &str, dir: &Path, options: &[&str]) -> Self {
        let mut command = moh_serve(dir, &["--model", model]);
        command.args(options).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim_end().trim_end_matches('/').rsplit(':').next().unwrap();
        Server { port: port.parse().unwrap_or_else(|_| panic!("{line}")), child }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request as it is, and reads the answer to its end.
    pub fn raw(&self, request: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A server may answer before it has read all.
        let _ = stream.write_all(request);
        Answer::read(stream)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.raw(format!("GET {path} HTTP/1.1\r\n{}\r\n", self.headers()).as_bytes())
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.raw(&self.request(path, body.to_string().as_bytes()))
    }

    /// Asks for a completion, and does not read its answer.
    pub fn begin(&self, body: &Value) -> TcpStream {
        let mut stream = self.connect();
        let request = self.request("/v1/completions", body.to_string().as_bytes());
        stream.write_all(&request).unwrap();
        stream
    }

    pub fn request(&self, path: &str, body: &[u8]) -> Vec<u8> {
        let headers = format!("{}Content-Length: {}\r\n", self.headers(), body.len());
        [format!("POST {path} HTTP/1.1\r\n{headers}\r\n").as_bytes(), body].concat()
    }

    pub fn headers(&self) -> String {
        format!("Host: localhost:{}\r\nConnection: close\r\n", self.port)
    }

    /// Returns the answer of `/v1/completions` to a good request.
    pub fn completion(&self, body: &Value) -> Value {
        let answer = self.post("/v1/completions", body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
        answer.json()
    }

    /// Returns the texts of the answer's choices.
    pub fn texts(&self, body: &Value) -> Vec<String> {
        let choices = self.completion(body)["choices"].as_array().unwrap().clone();
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the value of a metric in `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
    }

    pub fn wait_for(&self, name: &str, value: f64) {
        self.wait_until(name, |found| found == value);
    }

    /// Waits until `is_reached` is true of a metric.
    pub fn wait_until(&self, name: &str, is_reached: impl Fn(f64) -> bool) {
        wait_until(PATIENCE, name, || is_reached(self.metric(name)));
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    pub fn exit_code(&mut self) -> Option<i32> {
        wait_until(PATIENCE, "the server's end", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn moh_serve(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = program(env!("CARGO_BIN_EXE_moh-serve"), dir);
    command.args(arguments).args(["--port", "0"]);
    command
}

/// An answer of a server.
pub struct Answer {
    pub status: u16,
    pub head: String,
    body: Vec<u8>,
}

impl Answer {
    pub fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        // If the server resets the connection, reads the bytes before.
        let _ = stream.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|part| part == b"\r\n\r\n").unwrap_or(bytes.len());
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let body = bytes.split_off((end + 4).min(bytes.len()));
        let is_chunked = head.contains("transfer-encoding: chunked");
        Answer { status, head, body: if is_chunked { whole(&body) } else { body } }
    }

    /// Returns the rest of an answer that was begun, unparsed.
    pub fn read_rest(mut stream: TcpStream) -> String {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    pub fn error(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap().to_owned()
    }

    /// Returns the events of a stream. The stream must be whole.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        let mut events: Vec<_> = text.split_terminator("\n\n").collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        let json = |event: &str| serde_json::from_str(event.strip_prefix("data: ").unwrap());
        events.into_iter().map(|event| json(event).unwrap()).collect()
    }
}

/// Returns a body without the lengths of its chunks.
fn whole(mut body: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    while let Some(end) = body.windows(2).position(|part| part == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        let rest = &body[end + 2..];
        found.extend_from_slice(&rest[..length.min(rest.len())]);
        body = rest.get(length + 2..).unwrap_or_default();
    }
    found
}
