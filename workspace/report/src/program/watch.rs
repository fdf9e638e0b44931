//! `--watch`: serves the page to this machine alone. Every request reads the run again, and nothing of it is
//! locked or changed.

use std::io::{ErrorKind, Write as _, stdout};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail};
use moh_program::exit::stderr_line;
use moh_report::{Runs, Watch};

use crate::http::{self, Answer};

const SCRIPT: &str = include_str!("watch.js");

/// The shortest time between refreshes.
const EVERY: Duration = Duration::from_secs(5);

/// A page refreshes after this many times what reading the run has taken, so that a long run is not read all the
/// time.
const PATIENCE: u32 = 20;

/// Serves the page of `runs` until SIGINT or SIGTERM.
///
/// # Errors
/// Fails if one of them is not a run, or if the port is not free.
pub(crate) fn serve(runs: Vec<PathBuf>, port: u16) -> anyhow::Result<()> {
    for remark in Runs::read(&runs)?.remarks {
        stderr_line(format_args!("warning: {remark}"));
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
    writeln!(stdout(), "http://127.0.0.1:{port}/")?;
    stdout().flush()?;
    std::thread::Builder::new().spawn(move || {
        http::serve(&listener, names(port), move |path| match path {
            "/" => answer(&runs),
            "/watch.js" => Answer { status: 200, kind: "text/javascript", text: SCRIPT.to_owned() },
            _ => Answer::plain(404, "There is only /.\n"),
        });
    })?;
    signals.wait();
    Ok(())
}

/// What clients call this server: browsers leave out the port that the scheme implies.
fn names(port: u16) -> Vec<String> {
    let of = |host: &str| match port {
        80 => vec![format!("{host}:80"), host.to_owned()],
        _ => vec![format!("{host}:{port}")],
    };
    ["127.0.0.1", "localhost"].into_iter().flat_map(of).collect()
}

/// The page of the runs as they are now.
fn answer(runs: &[PathBuf]) -> Answer {
    let start = Instant::now();
    let runs = Runs::read(runs);
    // The page says when to ask again, so that this time is needed before it is drawn.
    let watch = Watch { every: EVERY.max(start.elapsed() * PATIENCE) };
    let (status, text) = match runs {
        Ok(runs) => (200, moh_report::page(&runs, SystemTime::now(), Some(watch))),
        Err(error) => (500, moh_report::error_page(&format!("{error:#}"), watch)),
    };
    Answer { status, kind: "text/html", text }
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
