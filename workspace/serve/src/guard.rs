//! Decides which requests are answered: requests with a key, or, if no key is needed, requests of this machine's own
//! programs and pages.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN};
use axum::http::{StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api::ApiError;

/// Decides which requests are answered.
#[derive(Debug)]
pub struct Guard {
    /// Hashes of the keys. If there are keys, a request needs a key. The time of comparing hashes reveals nothing about
    /// the keys.
    keys: Vec<blake3::Hash>,
    /// The address at which the server listens.
    address: IpAddr,
    /// Other names of this machine.
    names: Vec<String>,
}

impl Guard {
    /// Creates a guard. If there are keys, a request needs a key. A server without keys answers requests only for its
    /// own names: loopback names, its address, and `names`. A page of another site can neither ask the server nor point
    /// a name of its own at it.
    pub fn new(keys: &[String], address: IpAddr, names: &[String]) -> Self {
        let keys = keys.iter().map(|key| blake3::hash(key.as_bytes())).collect();
        Guard { keys, address, names: names.to_vec() }
    }

    /// Forwards an allowed request, and answers any other request with an error.
    pub async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
        match guard.allows(request.uri(), request.headers()) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        }
    }

    fn allows(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let hosts = headers.get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
        let hosts: Vec<_> = hosts.chain(uri.host()).collect();
        let is_for_this = !hosts.is_empty() && hosts.iter().all(|host| self.is_own(host));
        if (self.keys.is_empty() || !self.names.is_empty()) && !is_for_this {
            let message = "the request is for another host: ask for localhost or the server's address, or start it \
                           with --allowed-host and the name";
            return Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, message));
        }
        if self.keys.is_empty() && !self.is_own_page(headers) {
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

    /// Returns whether a host, perhaps with a port, is this machine by a name that no stranger can assign. Such names
    /// are localhost, loopback addresses, the server's address, and allowed names. If the server listens at all
    /// addresses, any address counts, because it can lead to no other machine.
    fn is_own(&self, host: &str) -> bool {
        let name = without_port(host);
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        match address {
            Ok(found) if found.is_loopback() || found == self.address => true,
            Ok(_) if self.address.is_unspecified() => true,
            _ => name.eq_ignore_ascii_case("localhost") || self.is_allowed(name),
        }
    }

    /// Returns whether `name` is an allowed name.
    fn is_allowed(&self, name: &str) -> bool {
        self.names.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    }

    /// Returns whether a request comes from no page, or from a page of the host that it asks. Behind a proxy, the page
    /// may also be of an allowed name.
    fn is_own_page(&self, headers: &HeaderMap) -> bool {
        let Some(origin) = headers.get(ORIGIN) else { return true };
        let site = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        site.is_some_and(|(_, site)| {
            let is_host = |host: &str| host.eq_ignore_ascii_case(site);
            self.is_allowed(without_port(site)) || text(headers, &HOST).is_some_and(is_host)
        })
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn without_port(host: &str) -> &str {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(guard: &Guard, path: &str, headers: &[(HeaderName, &str)]) -> Option<u64> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, value.parse().unwrap());
        }
        let allowed = guard.allows(&path.parse().unwrap(), &map);
        allowed.err().and_then(|error| error.to_json()["error"]["code"].as_u64())
    }

    fn guard(keys: &[&str], address: &str, names: &[&str]) -> Guard {
        let owned = |texts: &[&str]| texts.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
        Guard::new(&owned(keys), address.parse().unwrap(), &owned(names))
    }

    #[test]
    fn a_server_without_keys_answers_for_its_own_names_and_pages() {
        let local = guard(&[], "127.0.0.1", &[]);
        let named = guard(&[], "10.0.0.1", &["gpu.example.org"]);
        let open = guard(&[], "0.0.0.0", &[]);
        let both = guard(&["one"], "0.0.0.0", &["gpu.example.org"]);
        for host in ["localhost:8000", "LOCALHOST", "127.0.0.1:80", "127.0.0.2", "[::1]:9", "[::1]"]
        {
            for guard in [&local, &named, &open] {
                assert_eq!(status(guard, "/v1/models", &[(HOST, host)]), None, "{host}");
            }
        }
        for host in ["example.org", "localhost.example.org:8000", "", "127.0.0.1.org", ":80"] {
            for guard in [&local, &named, &open, &both] {
                assert_eq!(status(guard, "/", &[(HOST, host)]), Some(421), "{host}");
                assert_eq!(status(guard, "/", &[(HOST, "localhost"), (HOST, host)]), Some(421));
            }
        }
        for (guard, path, host, expected) in [
            (&local, "/", "10.0.0.1", Some(421)),
            (&local, "http://example.org/", "localhost", Some(421)),
            (&local, "http://localhost/", "localhost", None),
            (&named, "/", "10.0.0.1:8000", None),
            (&named, "/", "10.0.0.2", Some(421)),
            (&named, "/", "GPU.example.org:8000", None),
            (&open, "/", "10.0.0.2", None),
            (&both, "/", "gpu.example.org", None),
        ] {
            assert_eq!(status(guard, path, &[(HOST, host)]), expected, "{path} {host}");
        }
        assert_eq!(status(&local, "/", &[]), Some(421));
        for (guard, host) in [(&local, "localhost:8000"), (&open, "10.0.0.1:8000")] {
            let own = format!("http://{host}");
            let from = |origin| status(guard, "/", &[(HOST, host), (ORIGIN, origin)]);
            assert_eq!(from(&own), None);
            assert_eq!(from("http://example.com"), Some(403));
            assert_eq!(from("https://gpu.example.org"), Some(403));
            assert_eq!(from("null"), Some(403));
        }
        let proxied = [(HOST, "localhost:8000"), (ORIGIN, "https://gpu.example.org")];
        assert_eq!(status(&named, "/", &proxied), None);
    }

    #[test]
    fn a_key_is_required_where_there_is_one() {
        let guard = guard(&["one", "two"], "127.0.0.1", &[]);
        let with = |value| status(&guard, "/v1/models", &[(AUTHORIZATION, value)]);
        assert_eq!(with("Bearer one"), None);
        assert_eq!(with("bearer two "), None);
        assert_eq!(with("Bearer three"), Some(401));
        assert_eq!(with("one"), Some(401));
        assert_eq!(status(&guard, "/v1/models", &[(HOST, "example.org")]), Some(401));
        assert_eq!(status(&guard, "/metrics", &[]), Some(401));
        assert_eq!(status(&guard, "/health", &[]), None);
        assert_eq!(status(&guard, "/", &[]), None);
    }
}
