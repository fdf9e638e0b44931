//! Requests to the hub. Endpoint, login and URLs come from crate hf-hub; this adds time-outs,
//! retries, byte ranges and explanations of the hub's errors.

use std::io::Read;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use ureq::config::AutoHeaderValue;
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};

use crate::cache::{is_contained, is_content_address};
use crate::hub::no_directory;
use crate::{Error, environment};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum silence within a response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Delays before the retries of a transient failure.
const RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(400)];
/// Maximum bytes of a page of a repository's description.
const MAX_JSON_BYTES: u64 = 64 << 20;
/// Maximum files and folders of a listing.
const MAX_ENTRIES: usize = 4_000_000;
/// Maximum pages of a listing, which have a thousand names each.
const MAX_PAGES: usize = 4_000;
/// Bytes that are read at a time.
const READ_BYTES: usize = 1 << 16;

/// A file of a repository on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its path in the repository, with `/` between folders; it stays within any directory it is joined to.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Content address: the blob's name in the cache.
    pub blob: String,
}

/// Files and folders in a folder of a repository.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The files, in the hub's order.
    pub files: Vec<RemoteFile>,
    /// The paths of the folders.
    pub folders: Vec<String>,
}

/// The object of a refused request.
#[derive(Debug)]
pub(crate) enum Asked {
    Revision,
    List,
    File(String),
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The hub refused.
    Status { status: StatusCode, code: String, url: String, asked: Asked },
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

/// One repository on the hub.
pub(crate) struct Client {
    api: Api,
    kind: RepoType,
    id: String,
    revision: String,
    endpoint: String,
}

#[derive(Deserialize)]
struct Info {
    sha: Option<String>,
}

/// A file or a directory; only a file's `oid` is its content's hash.
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

/// A large file: the hash of its content; its `oid` is the pointer's.
#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "sha256")]
    oid: Option<String>,
}

impl Client {
    /// Creates a client for the repository `id` at `endpoint`, with the environment's login.
    ///
    /// # Errors
    /// Fails if the endpoint is not a URL.
    pub(crate) fn new(
        kind: RepoType,
        id: &str,
        revision: &str,
        endpoint: &str,
        cache: PathBuf,
    ) -> Result<Self, Error> {
        let is_address = |uri: Uri| uri.scheme().is_some() && uri.host().is_some();
        let reason = || format!("{endpoint} is not the URL of a hub like https://huggingface.co");
        if !endpoint.parse().is_ok_and(is_address) {
            return Err(Error::hub(id, reason()));
        }
        let endpoint = endpoint.trim_end_matches('/').to_string();
        let api = ApiBuilder::from_cache(Cache::new(cache))
            .with_endpoint(endpoint.clone())
            .with_token(environment::token())
            .with_user_agent("moh-hub", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| Error::hub(id, error.to_string()))?;
        Ok(Client { api, kind, id: id.to_string(), revision: revision.to_string(), endpoint })
    }

    /// The revision's current commit; empty if the hub names none.
    pub(crate) fn commit(&self) -> Result<String, Failure> {
        let url = format!("{}/revision/{}", self.api_url(), encode(&self.revision));
        let mut answer = self.get(&url, None, Asked::Revision)?;
        Ok(self.json::<Info>(&mut answer, &url)?.sha.unwrap_or_default())
    }

    /// What is in a folder of the repository, `""` for its top, and with `is_deep` in the folders below.
    pub(crate) fn list(
        &self,
        commit: &str,
        folder: &str,
        is_deep: bool,
    ) -> Result<Listing, Failure> {
        let mut found = Listing::default();
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
            let mut answer = self.get(&url, None, Asked::List)?;
            next = next_page(&answer);
            add_page(&mut found, &self.body(&mut answer)?).map_err(|reason| {
                Error::hub(&self.id, format!("the hub's listing at {url} {reason}"))
            })?;
        }
        let reason = format!("the hub's listing has more than {MAX_PAGES} pages: name a folder");
        Err(Error::hub(&self.id, reason).into())
    }

    /// Reads a range of a file's bytes. A server or mirror without range support sends the whole file, of which
    /// the rest is left out.
    pub(crate) fn read(
        &self,
        commit: &str,
        file: &RemoteFile,
        range: Range<u64>,
        stop: &AtomicBool,
    ) -> Result<Vec<u8>, Failure> {
        let repo = Repo::with_revision(self.id.clone(), self.kind, commit.to_string());
        let url = self.api.repo(repo).url(&encode_path(&file.name));
        let is_whole = range == (0..file.size);
        let asked = Asked::File(file.name.clone());
        let mut answer = self.get(&url, Some(range.clone()).filter(|_| !is_whole), asked)?;
        let mut before = if answer.status() == StatusCode::OK { range.start } else { 0 };
        let wanted = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let mut body = answer.body_mut().as_reader();
        let (mut bytes, mut buffer) = (Vec::new(), vec![0; READ_BYTES]);
        // Up to the end of the response, so that its connection serves again, unless it is longer.
        while bytes.len() <= wanted {
            if stop.load(Ordering::Relaxed) {
                return Err(Failure::Stopped);
            }
            let count = body.read(&mut buffer).map_err(|_| Failure::Broken)?;
            if count == 0 {
                break;
            }
            let left_out = usize::try_from(before).map_or(count, |before| before.min(count));
            before -= left_out as u64;
            bytes.extend_from_slice(&buffer[left_out..count]);
        }
        bytes.truncate(wanted);
        Ok(bytes)
    }

    fn api_url(&self) -> String {
        format!("{}/api/{}s/{}", self.endpoint, self.noun(), self.id)
    }

    /// What the repository holds.
    fn noun(&self) -> &'static str {
        match self.kind {
            RepoType::Dataset => "dataset",
            _ => "model",
        }
    }

    /// The repository's page, for people.
    pub(crate) fn page(&self) -> String {
        match self.kind {
            RepoType::Dataset => format!("{}/datasets/{}", self.endpoint, self.id),
            _ => format!("{}/{}", self.endpoint, self.id),
        }
    }

    /// The response to a request, if it is a success.
    fn get(
        &self,
        url: &str,
        range: Option<Range<u64>>,
        asked: Asked,
    ) -> Result<Response<ureq::Body>, Failure> {
        let mut delays = RETRY_DELAYS.into_iter();
        let answer = loop {
            let answer = self.call(url, range.clone());
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
        Err(Failure::Status { status: answer.status(), code, url: url.to_string(), asked })
    }

    /// One attempt of a request, by hf-hub's agent and with its login.
    fn call(
        &self,
        url: &str,
        range: Option<Range<u64>>,
    ) -> Result<Response<ureq::Body>, ureq::Error> {
        let mut request = self.api.model(self.id.clone()).info_request().uri(url);
        if let Some(Range { start, end }) = range {
            request = request.header("Range", format!("bytes={start}-{}", end - 1));
        }
        let roots = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::PlatformVerifier)
            .build();
        request
            .config()
            .http_status_as_error(false)
            // A range of compressed bytes would be a different one.
            .accept_encoding(AutoHeaderValue::None)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .tls_config(roots)
            .build()
            .call()
    }

    /// A description as bytes.
    fn body(&self, answer: &mut Response<ureq::Body>) -> Result<Vec<u8>, Failure> {
        let body = answer.body_mut().with_config().limit(MAX_JSON_BYTES);
        body.read_to_vec().map_err(|_| Failure::Broken)
    }

    fn json<T: DeserializeOwned>(
        &self,
        answer: &mut Response<ureq::Body>,
        url: &str,
    ) -> Result<T, Failure> {
        serde_json::from_slice(&self.body(answer)?).map_err(|error| {
            Error::hub(&self.id, format!("the hub's response to {url} is invalid: {error}")).into()
        })
    }
}

/// Adds a page of a listing to those before.
///
/// # Errors
/// Says what is wrong with it: no JSON, a name that leaves the directory, or too many of them.
pub(crate) fn add_page(found: &mut Listing, page: &[u8]) -> Result<(), String> {
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
        match entry.kind.as_str() {
            "file" => {
                found.files.push(RemoteFile { name: entry.path, size: entry.size, blob });
            }
            "directory" => found.folders.push(entry.path),
            _ => {}
        }
    }
    match found.files.len() + found.folders.len() > MAX_ENTRIES {
        true => Err(format!("has more than {MAX_ENTRIES} names: name a folder of the repository")),
        false => Ok(()),
    }
}

/// Whether a retry may succeed.
fn is_passing(error: &ureq::Error) -> bool {
    use ureq::Error::{ConnectionFailed, HostNotFound, Io, Timeout};
    matches!(error, Io(_) | Timeout(_) | HostNotFound | ConnectionFailed)
}

fn header(answer: &Response<ureq::Body>, name: &str) -> Option<String> {
    Some(answer.headers().get(name)?.to_str().ok()?.to_string())
}

/// The URL of the list's next page, from the header `Link: <...>; rel="next"`.
fn next_page(answer: &Response<ureq::Body>) -> Option<String> {
    let links = header(answer, "Link")?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    Some(rest.split_once('>')?.0.to_string())
}

/// Percent-encodes a text as one component of a URL.
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

/// Percent-encodes a path in a repository.
fn encode_path(path: &str) -> String {
    path.split('/').map(encode).collect::<Vec<_>>().join("/")
}

impl Client {
    /// One sentence: a failure and its remedy.
    pub(crate) fn explain(&self, failure: Failure) -> Error {
        let Self { endpoint, revision, .. } = self;
        let (noun, page) = (self.noun(), self.page());
        // A model may be meant to be a directory, a dataset is named as one of the hub.
        let (local, check) = match self.kind {
            RepoType::Dataset => (String::new(), ""),
            _ => (format!("{}, and ", no_directory()), "the path, "),
        };
        let reason = match failure {
            Failure::Other(error) => return error,
            Failure::Stopped => return Error::Stopped,
            Failure::NoAnswer => format!(
                "{local}no response from {endpoint}: check {check}the network, or set \
                 HF_HUB_OFFLINE=1 to use the cache"
            ),
            Failure::Broken => format!(
                "the connection to {endpoint} was lost: run the same command again to resume \
                     the download"
            ),
            Failure::Status { status, code, url, asked } => {
                let code = code.as_str();
                match (status.as_u16(), asked) {
                    (401, _) if code == "GatedRepo" => format!(
                        "the {noun} is gated (401): accept its terms at {page}, then set HF_TOKEN \
                         to a token of your account or run `hf auth login`"
                    ),
                    (401, _) => format!(
                        "{local}the hub requires a login (401): check the name; for a private or \
                         gated {noun} request access at {page} and set HF_TOKEN or run \
                         `hf auth login`"
                    ),
                    (403, _) => format!(
                        "the hub denies access (403): request it at {page}, and check that the \
                         token in HF_TOKEN may read gated {noun}s"
                    ),
                    (404, Asked::Revision) if code == "RepoNotFound" => {
                        format!("{local}no such {noun} on the hub (404), see {page}")
                    }
                    (404, Asked::Revision) => format!(
                        "{local}no such {noun} on the hub, or it has no revision {revision} (404), \
                         see {page}"
                    ),
                    (404, Asked::File(name)) => {
                        format!("{name} is listed but missing on the hub (404), see {page}")
                    }
                    (429, _) => "the hub limits the request rate (429): try again in a few minutes"
                        .to_string(),
                    (_, _) => format!("the hub responds {status} to {url}"),
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
