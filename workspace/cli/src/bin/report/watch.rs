//! `--watch`: serves the page to this machine alone. Every request reads the run again, and nothing of it is
//! locked or changed.

use std::io::{ErrorKind, Write as _, stdout};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use moh_cli::run_log::RunLog;
use tiny_http::{Header, Method, Request, Response, Server};

use crate::page::{Watch, error_page};

const SCRIPT: &str = include_str!("watch.js");

/// The shortest time between refreshes.
const EVERY: Duration = Duration::from_secs(5);

/// A page refreshes after this many times what reading the run has taken, so that a long run is not read all the
/// time.
const PATIENCE: u32 = 20;

/// Threads that answer: a reader that stops reading holds up one of them.
const THREADS: usize = 2;

/// What is served.
struct Watched {
    runs: Vec<PathBuf>,
    port: u16,
}

/// Serves the page of `runs` until SIGINT or SIGTERM.
///
/// # Errors
/// Fails if one of them is not a run, or if the port is not free.
pub(crate) fn serve(runs: Vec<PathBuf>, port: u16) -> anyhow::Result<()> {
    for run in &runs {
        RunLog::read(run)?;
    }
    let listener = match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            bail!(
                "--port {port}: another program uses this port: name another one, or 0 for any that is free"
            )
        }
        bound => bound.with_context(|| format!("--port {port}: cannot be used"))?,
    };
    let port = listener.local_addr().context("--port: has no address")?.port();
    let signals = Signals::new()?;
    let server =
        Server::from_listener(listener, None).map_err(|error| anyhow!("--watch: {error}"))?;
    let (server, watched) = (Arc::new(server), Arc::new(Watched { runs, port }));
    writeln!(stdout(), "http://127.0.0.1:{port}/")?;
    stdout().flush()?;
    for _ in 0..THREADS {
        let (server, watched) = (Arc::clone(&server), Arc::clone(&watched));
        std::thread::Builder::new().spawn(move || {
            loop {
                // An error is of one connection.
                if let Ok(request) = server.recv() {
                    watched.answer(request);
                }
            }
        })?;
    }
    signals.wait();
    Ok(())
}

impl Watched {
    fn answer(&self, request: Request) {
        let path = request.url().split('?').next().unwrap_or_default().to_owned();
        let (status, kind, text) = if !self.is_addressed(&request) {
            (
                421,
                "text/plain",
                format!("This server answers at http://127.0.0.1:{}/ only.\n", self.port),
            )
        } else if !matches!(request.method(), Method::Get | Method::Head) {
            (405, "text/plain", "Only GET and HEAD.\n".to_owned())
        } else {
            match path.as_str() {
                "/" => self.page(),
                "/watch.js" => (200, "text/javascript", SCRIPT.to_owned()),
                _ => (404, "text/plain", "There is only /.\n".to_owned()),
            }
        };
        let mut response = Response::from_string(text).with_status_code(status);
        for (name, value) in [
            ("Content-Type", format!("{kind}; charset=utf-8")),
            ("Cache-Control", "no-store".to_owned()),
            ("X-Content-Type-Options", "nosniff".to_owned()),
            ("Allow", "GET, HEAD".to_owned()),
        ] {
            // Both are ASCII, which is all that a header refuses anything else for.
            if let Ok(header) = Header::from_bytes(name, value) {
                response.add_header(header);
            }
        }
        // A reader that has left is no concern of the others.
        let _ = request.respond(response);
    }

    /// Whether the request names this server: a page of another site, whose name was made to lead here, does not.
    fn is_addressed(&self, request: &Request) -> bool {
        let host = request.headers().iter().find(|header| header.field.equiv("Host"));
        host.is_some_and(|host| {
            let names = ["127.0.0.1", "localhost"].map(|name| format!("{name}:{}", self.port));
            names.iter().any(|name| host.value.as_str().eq_ignore_ascii_case(name))
                || self.port == 80 && ["127.0.0.1", "localhost"].contains(&host.value.as_str())
        })
    }

    fn page(&self) -> (u16, &'static str, String) {
        let start = Instant::now();
        // The page says when to ask again, so that time is needed before it is drawn.
        let logs: Result<Vec<RunLog>, _> = self.runs.iter().map(|run| RunLog::read(run)).collect();
        let watch = Watch { every: EVERY.max(start.elapsed() * PATIENCE) };
        let now = std::time::SystemTime::now();
        match logs {
            Ok(logs) => {
                (200, "text/html", crate::page::page(&crate::curves::named(logs), now, Some(watch)))
            }
            Err(error) => (500, "text/html", error_page(&format!("{error:#}"), watch)),
        }
    }
}

/// The signals that end the program.
struct Signals {
    #[cfg(unix)]
    signals: signal_hook::iterator::Signals,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Signals {
            #[cfg(unix)]
            signals: signal_hook::iterator::Signals::new([
                signal_hook::consts::SIGINT,
                signal_hook::consts::SIGTERM,
            ])?,
        })
    }

    /// Waits for one of them; elsewhere than on Unix the system ends the program.
    fn wait(self) {
        #[cfg(unix)]
        {
            let mut signals = self.signals;
            signals.forever().next();
        }
        #[cfg(not(unix))]
        loop {
            std::thread::park();
        }
    }
}
