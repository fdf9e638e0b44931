//! A hub on the loopback interface, with the API that tests use: a commit for each revision, listings in pages, and
//! files in ranges.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const ID: &str = "org/tiny";

/// The behaviour of a server.
#[derive(Default)]
pub struct Behaviour {
    pub files: HashMap<String, Vec<u8>>,
    /// Whether the repository is a dataset.
    pub is_dataset: bool,
    /// The commit of every revision, [`COMMIT`] by default.
    pub commit: Option<String>,
    /// Status and error code of every response.
    pub refuse: Option<(u16, &'static str)>,
    /// The same, only for files.
    pub refuse_files: Option<(u16, &'static str)>,
    /// The login that files require.
    pub token: Option<&'static str>,
    /// Bytes of large files sent before connections start to break.
    pub breaks_after: Option<usize>,
    /// The number of connections that break in the middle of a large file.
    pub breaks: usize,
    /// Whether large files never arrive.
    pub stalls: bool,
    pub ignores_ranges: bool,
    /// Names in a page of a listing. By default all names.
    pub page: Option<usize>,
    /// Method and path of each request, and `START-` if it requests the bytes from there on.
    pub log: Vec<String>,
}

pub struct Server {
    pub endpoint: String,
    pub behaviour: Arc<Mutex<Behaviour>>,
}

impl Server {
    pub fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let behaviour = Arc::new(Mutex::new(behaviour));
        let (shared, own) = (Arc::clone(&behaviour), endpoint.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shared, own) = (Arc::clone(&shared), own.clone());
                std::thread::spawn(move || answer(stream, &shared, &own));
            }
        });
        Server { endpoint, behaviour }
    }

    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.behaviour.lock().unwrap().log)
    }

    /// Changes the server's behaviour for later requests.
    pub fn set(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }
}

/// Returns whether connections break and stall in this file.
fn is_large(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".jsonl")
}

fn answer(mut stream: TcpStream, behaviour: &Mutex<Behaviour>, endpoint: &str) -> Option<()> {
    let lines = BufReader::new(stream.try_clone().ok()?).lines().map_while(Result::ok);
    let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let mut request = lines.first()?.split(' ');
    let (method, path) = (request.next()?.to_string(), request.next()?.to_string());
    let header = |wanted: &str| {
        let headers = lines.iter().filter_map(|line| line.split_once(": "));
        let mut found = headers.filter(|(name, _)| name.eq_ignore_ascii_case(wanted));
        found.next().map(|(_, value)| value)
    };
    let range = match header("range") {
        Some(range) => Some(range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()?),
        None => None,
    };
    let mut behaviour = behaviour.lock().unwrap();
    behaviour.log.push(match range {
        Some(start) => format!("{method} {path} {start}-"),
        None => format!("{method} {path}"),
    });
    let login = header("authorization").and_then(|login| login.strip_prefix("Bearer "));
    let (status, headers, body) = behaviour.respond(&path, range, login, endpoint);
    let mut sent = body.len();
    let is_file = is_large(&path) && path.contains("/resolve/") && method == "GET";
    if is_file && let Some(left) = &mut behaviour.breaks_after {
        sent = sent.min(*left);
        *left -= sent;
    }
    if is_file && behaviour.breaks > 0 {
        behaviour.breaks -= 1;
        sent /= 2;
    }
    if is_file && behaviour.stalls {
        drop(behaviour);
        std::thread::sleep(Duration::from_secs(600));
        return None;
    }
    drop(behaviour);
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    if method != "HEAD" {
        stream.write_all(&body[..sent]).ok()?;
    }
    stream.flush().ok()
}

/// Returns the hub's content address of a file.
pub fn address_of(bytes: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

type Answer = (u16, String, Vec<u8>);

impl Behaviour {
    fn respond(
        &self,
        path: &str,
        range: Option<usize>,
        login: Option<&str>,
        endpoint: &str,
    ) -> Answer {
        let refused = |(status, code)| (status, format!("X-Error-Code: {code}\r\n"), Vec::new());
        if let Some(refusal) = self.refuse {
            return refused(refusal);
        }
        let (kind, start) =
            if self.is_dataset { ("datasets", "datasets/") } else { ("models", "") };
        let commit = self.commit.as_deref().unwrap_or(COMMIT);
        if path.starts_with(&format!("/api/{kind}/{ID}/revision/")) {
            let body = json!({"id": ID, "_id": "1", "sha": commit}).to_string();
            return (200, "Content-Type: application/json\r\n".to_string(), body.into_bytes());
        }
        if let Some(rest) = path.strip_prefix(&format!("/api/{kind}/{ID}/tree/{commit}")) {
            return self.list(rest, path, endpoint);
        }
        let file = path
            .strip_prefix(&format!("/{start}{ID}/resolve/{commit}/"))
            .and_then(|name| self.files.get(name));
        match file {
            None => (404, "X-Error-Code: RevisionNotFound\r\n".to_string(), Vec::new()),
            Some(bytes) => {
                let gated =
                    (self.token.is_some() && login != self.token).then_some((401, "GatedRepo"));
                if let Some(refusal) = self.refuse_files.or(gated) {
                    return refused(refusal);
                }
                let headers = format!("ETag: \"x\"\r\nX-Repo-Commit: {commit}\r\n");
                match range.filter(|_| !self.ignores_ranges) {
                    Some(start) => (206, headers, bytes[start..].to_vec()),
                    None => (200, headers, bytes.clone()),
                }
            }
        }
    }

    /// Returns a page of the files and folders in `rest`, `[/FOLDER][?QUERY]`.
    fn list(&self, rest: &str, path: &str, endpoint: &str) -> Answer {
        let (folder, query) = rest.split_once('?').unwrap_or((rest, ""));
        let folder = folder.trim_start_matches('/');
        let start = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let is_deep = query.contains("recursive=true");
        let mut entries: Vec<serde_json::Value> = Vec::new();
        let mut names: Vec<_> = self.files.keys().collect();
        names.sort();
        for name in names {
            let Some(inner) = name.strip_prefix(&start) else { continue };
            if let Some((first, _)) = inner.split_once('/')
                && !is_deep
                && first != ".."
            {
                let path = format!("{start}{first}");
                let entry = json!({"type": "directory", "oid": "0", "size": 0, "path": path});
                if !entries.contains(&entry) {
                    entries.push(entry);
                }
                continue;
            }
            let bytes = &self.files[name];
            let mut entry = json!({
                "type": "file", "oid": address_of(bytes), "size": bytes.len(), "path": name,
            });
            if is_large(name) {
                // This is the hash of the pointer.
                entry["oid"] = "0".into();
                entry["lfs"] = json!({ "oid": address_of(bytes) });
            }
            entries.push(entry);
        }
        if entries.is_empty() && !folder.is_empty() {
            return (404, "X-Error-Code: EntryNotFound\r\n".to_string(), Vec::new());
        }
        let mut headers = "Content-Type: application/json\r\n".to_string();
        if let Some(page) = self.page {
            let number: usize =
                query.split_once("cursor=").map_or(0, |(_, number)| number.parse().unwrap());
            entries = entries.split_off((number * page).min(entries.len()));
            if entries.len() > page {
                entries.truncate(page);
                let (path, _) = path.split_once('?').unwrap_or((path, ""));
                let deep = if is_deep { "recursive=true&" } else { "" };
                let next = format!("{endpoint}{path}?{deep}cursor={}", number + 1);
                headers = format!("{headers}Link: <{next}>; rel=\"next\"\r\n");
            }
        }
        (200, headers, serde_json::Value::Array(entries).to_string().into_bytes())
    }
}
