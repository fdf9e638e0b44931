//! Requests to the hub: the commit of a revision, the files of a repository, and the files' bytes. With time-outs,
//! retries and explanations of the hub's errors.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Error;
use crate::hub_cache::{is_contained, is_content_address};
use serde::Deserialize;
use ureq::Agent;
use ureq::config::{AutoHeaderValue, RedirectAuthHeaders};
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{RootCerts, TlsConfig};

use super::cache::{Kind, RemoteFile};
use super::environment;
use super::model::no_directory;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time without data within a response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Delays before the retries of a transient failure.
const RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(400)];
/// Maximum bytes of a page of a repository's description.
const MAX_JSON_BYTES: u64 = 64 << 20;
const MAX_FILES: usize = 4_000_000;
/// Maximum pages of a listing. A page has a thousand names.
const MAX_PAGES: usize = 4_000;
/// Bytes that are read at a time.
const READ_BYTES: usize = 1 << 16;

#[derive(Debug)]
pub(crate) enum Failure {
    /// The hub rejected a request, which may be for a file.
    Status { status: StatusCode, code: String, url: String, file: Option<String> },
    /// No connection, or a time-out.
    NoAnswer,
    /// The connection ended within the response.
    Broken,
    /// The caller stopped the download.
    Stopped,
    /// Any other error, with its remedy.
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Other(error)
    }
}

/// A single repository on the hub.
pub(crate) struct Client {
    agent: Agent,
    token: Option<String>,
    kind: Kind,
    pub(crate) id: String,
    pub(crate) revision: String,
    endpoint: String,
}

#[derive(Deserialize)]
struct Info {
    sha: Option<String>,
}

/// A file or a directory. Only a file's `oid` is the hash of its content.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    oid: String,
    #[serde(default)]
    size: u64,
    lfs: Option<Lfs>,
}

/// A large file's content hash. The entry's `oid` is the hash of the pointer.
#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "sha256")]
    oid: Option<String>,
}

impl Client {
    /// Creates a client for the repository `id` at `endpoint`, with the environment's login.
    pub(crate) fn new(kind: Kind, id: &str, revision: &str, endpoint: &str) -> Result<Self, Error> {
        let is_address = |uri: Uri| uri.scheme().is_some() && uri.host().is_some();
        let reason = || format!("{endpoint} is not the URL of a hub like https://huggingface.co");
        if !endpoint.parse().is_ok_and(is_address) {
            return Err(Error::hub(id, reason()));
        }
        let roots = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // A range of the compressed file would be another range.
            .accept_encoding(AutoHeaderValue::None)
            .user_agent(concat!("moh-hub/", env!("CARGO_PKG_VERSION")))
            // The hub redirects to its own hosts.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .tls_config(roots)
            .build();
        Ok(Client {
            agent: config.new_agent(),
            token: environment::token(),
            kind,
            id: id.to_string(),
            revision: revision.to_string(),
            endpoint: endpoint.trim_end_matches('/').to_string(),
        })
    }

    pub(crate) fn commit(&self) -> Result<String, Failure> {
        let url = format!("{}/revision/{}", self.api_url(), encode(&self.revision));
        let mut answer = self.get(&url, 0, None)?;
        let info: Info = serde_json::from_slice(&body(&mut answer)?).map_err(|error| {
            Error::hub(&self.id, format!("the hub's response to {url} is invalid: {error}"))
        })?;
        info.sha
            .filter(|commit| is_content_address(commit))
            .ok_or_else(|| Error::hub(&self.id, "the hub names no commit for the revision").into())
    }

    /// Returns the files in a folder of the repository (`""` for the top), and with `is_deep` also in the folders
    /// below. Empty if the folder does not exist.
    pub(crate) fn list(
        &self,
        commit: &str,
        folder: &str,
        is_deep: bool,
    ) -> Result<Vec<RemoteFile>, Failure> {
        let mut found = Vec::new();
        let mut url = format!("{}/tree/{}", self.api_url(), encode(commit));
        if !folder.is_empty() {
            url = format!("{url}/{}", encode_path(folder));
        }
        if is_deep {
            url.push_str("?recursive=true");
        }
        let mut next = Some(url);
        for _ in 0..MAX_PAGES {
            let Some(url) = next else { return Ok(found) };
            let mut answer = match self.get(&url, 0, None) {
                Err(Failure::Status { status, .. })
                    if status == StatusCode::NOT_FOUND && !folder.is_empty() =>
                {
                    return Ok(Vec::new());
                }
                answer => answer?,
            };
            next = next_page(&answer);
            add_page(&mut found, &body(&mut answer)?).map_err(|reason| {
                Error::hub(&self.id, format!("the hub's listing at {url} {reason}"))
            })?;
        }
        let reason = format!("the hub's listing has more than {MAX_PAGES} pages: name a folder");
        Err(Error::hub(&self.id, reason).into())
    }

    /// Passes the bytes of a file from `start` on to `take`, piece by piece.
    pub(crate) fn read(
        &self,
        commit: &str,
        file: &RemoteFile,
        start: u64,
        stop: &AtomicBool,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Failure> {
        let url = format!("{}/resolve/{commit}/{}", self.page(), encode_path(&file.name));
        let mut answer = self.get(&url, start, Some(file))?;
        // A server or mirror that does not support ranges sends the whole file.
        let mut left_out = if answer.status() == StatusCode::OK { start } else { 0 };
        let mut left = file.size - start;
        let mut body = answer.body_mut().as_reader();
        let mut buffer = vec![0; READ_BYTES];
        while left > 0 {
            if stop.load(Ordering::Relaxed) {
                return Err(Failure::Stopped);
            }
            let count = body.read(&mut buffer).map_err(|_| Failure::Broken)?;
            if count == 0 {
                return Err(Failure::Broken);
            }
            // At most the bytes that were read.
            let first = left_out.min(count as u64) as usize;
            left_out -= first as u64;
            let bytes = &buffer[first..count];
            let bytes = &bytes[..left.min(bytes.len() as u64) as usize];
            take(bytes)?;
            left -= bytes.len() as u64;
        }
        Ok(())
    }

    fn api_url(&self) -> String {
        format!("{}/api/{}s/{}", self.endpoint, self.kind.name(), self.id)
    }

    /// Returns the address of the repository's web page.
    pub(crate) fn page(&self) -> String {
        match self.kind {
            Kind::Dataset => format!("{}/datasets/{}", self.endpoint, self.id),
            Kind::Model => format!("{}/{}", self.endpoint, self.id),
        }
    }

    /// Returns the response to a request for the bytes from `start` on. Fails if the status is not a success.
    fn get(
        &self,
        url: &str,
        start: u64,
        file: Option<&RemoteFile>,
    ) -> Result<Response<ureq::Body>, Failure> {
        let mut delays = RETRY_DELAYS.into_iter();
        let answer = loop {
            let mut request = self.agent.get(url);
            if let Some(token) = &self.token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header("Range", format!("bytes={start}-"));
            }
            let answer = request.call();
            let again = match &answer {
                Ok(answer) => [408, 429, 500, 502, 503, 504].contains(&answer.status().as_u16()),
                Err(error) => is_passing(error),
            };
            match delays.next().filter(|_| again) {
                Some(delay) => std::thread::sleep(delay),
                None => break answer.map_err(|_| Failure::NoAnswer)?,
            }
        };
        if answer.status().is_success() {
            return Ok(answer);
        }
        let code = header(&answer, "X-Error-Code").unwrap_or_default();
        let (status, file) = (answer.status(), file.map(|file| file.name.clone()));
        Err(Failure::Status { status, code, url: url.to_string(), file })
    }
}

fn body(answer: &mut Response<ureq::Body>) -> Result<Vec<u8>, Failure> {
    let body = answer.body_mut().with_config().limit(MAX_JSON_BYTES);
    body.read_to_vec().map_err(|_| Failure::Broken)
}

/// Adds a page of a listing to the previous pages.
pub(crate) fn add_page(found: &mut Vec<RemoteFile>, page: &[u8]) -> Result<(), String> {
    let entries: Vec<Entry> =
        serde_json::from_slice(page).map_err(|error| format!("is invalid: {error}"))?;
    for entry in entries {
        let blob = entry.lfs.and_then(|lfs| lfs.oid).unwrap_or(entry.oid);
        if !is_contained(&entry.path) || !is_content_address(&blob) {
            return Err(format!(
                "has {:?}, which is no file of a repository: check that HF_ENDPOINT names a hub",
                entry.path
            ));
        }
        if entry.kind == "file" {
            found.push(RemoteFile { name: entry.path, size: entry.size, blob });
        }
    }
    match found.len() > MAX_FILES {
        true => Err(format!("has more than {MAX_FILES} files: name a folder of the repository")),
        false => Ok(()),
    }
}

fn is_passing(error: &ureq::Error) -> bool {
    use ureq::Error::{ConnectionFailed, HostNotFound, Io, Timeout};
    matches!(error, Io(_) | Timeout(_) | HostNotFound | ConnectionFailed)
}

fn header(answer: &Response<ureq::Body>, name: &str) -> Option<String> {
    Some(answer.headers().get(name)?.to_str().ok()?.to_string())
}

/// Returns the URL of the list's next page, from the header `Link: <...>; rel="next"`.
fn next_page(answer: &Response<ureq::Body>) -> Option<String> {
    let links = header(answer, "Link")?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    Some(rest.split_once('>')?.0.to_string())
}

/// Encodes a text as a component of a URL, with percent signs.
fn encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => encoded.push(char::from(byte)),
            byte => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

fn encode_path(path: &str) -> String {
    path.split('/').map(encode).collect::<Vec<_>>().join("/")
}

impl Client {
    /// Returns one sentence with a failure and its remedy.
    pub(crate) fn explain(&self, failure: Failure) -> Error {
        let Self { endpoint, revision, .. } = self;
        let (noun, page) = (self.kind.name(), self.page());
        // The user may mean a directory by the name of a model. The name of a dataset is always an id on the hub.
        let (local, check) = match self.kind {
            Kind::Dataset => (String::new(), ""),
            Kind::Model => (format!("{}, and ", no_directory()), "the path, "),
        };
        let login = "set HF_TOKEN to a token of your account or run `hf auth login`";
        let reason = match failure {
            Failure::Other(error) => return error,
            Failure::Stopped => return Error::Stopped,
            Failure::NoAnswer => format!(
                "{local}no response from {endpoint}: check {check}the network, or set HF_HUB_OFFLINE=1 to use the cache"
            ),
            Failure::Broken => format!(
                "the connection to {endpoint} was lost: run the same command again to resume the download"
            ),
            Failure::Status { status, code, url, file } => {
                match (status.as_u16(), code.as_str(), file) {
                    (401, "GatedRepo", _) => {
                        format!(
                            "the {noun} is gated (401): accept its terms at {page}, then {login}"
                        )
                    }
                    (401, _, _) => format!(
                        "{local}the hub requires a login (401): check the name; for a private or gated {noun} request \
                         access at {page} and {login}"
                    ),
                    (403, _, _) => format!(
                        "the hub denies access (403): request it at {page}, and check that the token in HF_TOKEN may \
                         read gated {noun}s"
                    ),
                    (404, _, Some(file)) => {
                        format!("{file} is listed but missing on the hub (404), see {page}")
                    }
                    (404, "RepoNotFound", None) => {
                        format!("{local}no such {noun} on the hub (404), see {page}")
                    }
                    (404, _, None) => format!(
                        "{local}no such {noun} on the hub, or it has no revision {revision} (404), see {page}"
                    ),
                    (429, _, _) => {
                        "the hub limits the request rate (429): try again in a few minutes"
                            .to_string()
                    }
                    _ => format!("the hub responds {status} to {url}"),
                }
            }
        };
        Error::hub(&self.id, reason.replace('\n', " "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_addresses_are_encoded() {
        assert_eq!(encode("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(encode("chat_template a#1.jinja"), "chat_template%20a%231.jinja");
    }

    #[test]
    fn the_next_page_is_the_one_that_the_header_names() {
        let answer = |link: &str| {
            let body = ureq::Body::builder().data("");
            Response::builder().header("Link", link).body(body).unwrap()
        };
        let link = "<https://h/a?p=0>; rel=\"prev\", <https://h/a?p=2>; rel=\"next\"";
        assert_eq!(next_page(&answer(link)).as_deref(), Some("https://h/a?p=2"));
        assert_eq!(next_page(&answer("<https://h/a>; rel=\"last\"")), None);
    }
}
