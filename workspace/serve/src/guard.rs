//! Who may ask: clients with a key, or where none is needed this machine's own programs and pages.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN};
use axum::http::{StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api::ApiError;

/// Whose requests are answered.
#[derive(Debug, Clone, Default)]
pub struct Guard {
    /// Hashes of the keys, one of which is required if there are any. The time in which hashes are compared tells nothing
    /// of the keys.
    keys: Vec<blake3::Hash>,
    /// Whether a request must be addressed to this machine, and come from no other site's page.
    is_local: bool,
}

impl Guard {
    /// Requires one of these keys, if there are any. A local server without keys answers requests for its own names
    /// alone: a page of another site can neither ask it nor make a name of its own lead to it.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>, is_local: bool) -> Self {
        let keys: Vec<_> = keys.into_iter().map(|key| blake3::hash(key.as_bytes())).collect();
        let is_local = is_local && keys.is_empty();
        Guard { keys, is_local }
    }

    /// Answers a request that is not allowed, or passes it on.
    pub async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
        match guard.allows(request.uri(), request.headers()) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        }
    }

    fn allows(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_local {
            let host =
                text(headers, &HOST).map(str::to_owned).or_else(|| uri.host().map(Into::into));
            if !host.as_deref().is_some_and(is_local_name) {
                let message = "the request is for another host: ask for localhost";
                return Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, message));
            }
        }
        if self.keys.is_empty() && !is_own_page(headers) {
            let message = "pages of other sites may not ask this server";
            return Err(ApiError::new(StatusCode::FORBIDDEN, message));
        }
        let is_open = matches!(uri.path(), "/health" | "/" | "/page.js" | "/page.css");
        if self.keys.is_empty() || is_open {
            return Ok(());
        }
        let key = text(headers, &AUTHORIZATION)
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| blake3::hash(key.trim().as_bytes()));
        match key {
            Some(key) if self.keys.contains(&key) => Ok(()),
            _ => Err(ApiError::new(
                StatusCode::UNAUTHORIZED,
                "the key is missing or unknown: send the header Authorization: Bearer KEY",
            )),
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Whether a host, perhaps with a port, is this machine by a name that nobody else can give it: localhost, or a loopback
/// address.
fn is_local_name(host: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Whether a request comes from no page, or from one of the host that it asks.
fn is_own_page(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(ORIGIN) else { return true };
    let site = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    site.is_some_and(|(_, site)| {
        text(headers, &HOST).is_some_and(|host| host.eq_ignore_ascii_case(site))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(guard: &Guard, path: &str, headers: &[(HeaderName, &str)]) -> Option<u64> {
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
        let allowed = guard.allows(&path.parse().unwrap(), &headers.collect());
        allowed.err().and_then(|error| error.to_json()["error"]["code"].as_u64())
    }

    #[test]
    fn a_local_server_answers_for_its_own_names_and_pages() {
        let guard = Guard::new([], true);
        for host in ["localhost:8000", "LOCALHOST", "127.0.0.1:80", "127.0.0.2", "[::1]:9", "[::1]"]
        {
            assert_eq!(status(&guard, "/v1/models", &[(HOST, host)]), None, "{host}");
        }
        for host in
            ["example.org", "localhost.example.org:8000", "", "127.0.0.1.org", ":80", "10.0.0.1"]
        {
            assert_eq!(status(&guard, "/", &[(HOST, host)]), Some(421), "{host}");
        }
        assert_eq!(status(&guard, "/", &[]), Some(421));
        let open = Guard::new([], false);
        assert_eq!(status(&open, "/", &[(HOST, "example.org")]), None);
        for (guard, host) in [(&guard, "localhost:8000"), (&open, "example.org:8000")] {
            let own = format!("http://{host}");
            let from = |origin| status(guard, "/", &[(HOST, host), (ORIGIN, origin)]);
            assert_eq!(from(&own), None);
            assert_eq!(from("http://example.com"), Some(403));
            assert_eq!(from("null"), Some(403));
        }
    }

    #[test]
    fn a_key_is_required_where_there_is_one() {
        let guard = Guard::new(["one", "two"], true);
        let with = |value| status(&guard, "/v1/models", &[(AUTHORIZATION, value)]);
        assert_eq!(with("Bearer one"), None);
        assert_eq!(with("bearer two "), None);
        assert_eq!(with("Bearer three"), Some(401));
        assert_eq!(with("one"), Some(401));
        assert_eq!(status(&guard, "/v1/models", &[]), Some(401));
        assert_eq!(status(&guard, "/metrics", &[]), Some(401));
        assert_eq!(status(&guard, "/health", &[]), None);
        assert_eq!(status(&guard, "/", &[]), None);
    }
}
