//! `moh-report`: writes a page that shows a run, or compares several.

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use moh_program::arguments;
use moh_program::exit::{self, Usage, stderr_line};
use moh_report::PAGE;
use signal_hook::consts::{SIGINT, SIGTERM};

/// The time between two looks for a signal.
const LOOK: Duration = Duration::from_millis(50);

/// Write a page that shows a run, or compares several, or shows what heads do
///
/// The page is one HTML file that needs no network: losses by tokens, balance loss, learning rate, gradient
/// norm, speed, how tokens use the heads, the table of losses, and the recipe. Beside the page of one run its losses are
/// drawn to run.svg. The run may be unfinished; its other files are read, never locked or changed. Of files that
/// `moh-eval heads --json` has written, a page shows the loads by text, how alike heads are, and the heads of a
/// sentence.
#[derive(Parser)]
#[command(
    name = "moh-report",
    version,
    arg_required_else_help = true,
    after_help = "Examples:\n  \
        moh-report runs/quickstart\n  \
        moh-report runs/quickstart runs/quickstart-half --out compared.html\n  \
        moh-report runs\n  \
        moh-report --watch runs/quickstart\n  \
        moh-report dense-heads.json moh-heads.json --out heads.html"
)]
struct Arguments {
    /// Run directories (run.dir of their recipes), or directories that hold some; or files of
    /// `moh-eval heads --json`
    #[arg(value_name = "RUN|FILE", required = true)]
    runs: Vec<PathBuf>,
    /// The page [default: report.html in RUN, or FILE with the extension html, if there is one]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace FILE even if it is not a page of this program
    #[arg(long)]
    force: bool,
    /// Write the page again every few seconds, which an open page follows, until all runs have finished or Ctrl-C
    #[arg(long)]
    watch: bool,
}

fn main() -> ExitCode {
    exit::run(|| write(&arguments::parse::<Arguments>()))
}

fn write(arguments: &Arguments) -> anyhow::Result<()> {
    let files = arguments.runs.iter().filter(|path| path.is_file()).count();
    if files > 0 && files < arguments.runs.len() {
        let text = "runs and files of `moh-eval heads --json` have no page together: name one kind";
        return Err(Usage(text.to_owned()).into());
    }
    let out = match (&arguments.out, &arguments.runs[..]) {
        (Some(out), _) => out.clone(),
        (None, [file]) if files > 0 => file.with_extension("html"),
        (None, [run]) => run.join(PAGE),
        (None, _) => {
            let text =
                "--out is missing: name the file for the page of several runs or files".to_owned();
            return Err(Usage(text).into());
        }
    };
    if files > 0 && !arguments.watch {
        moh_report::write_heads(&arguments.runs, &out, arguments.force)?;
        return Ok(writeln!(stdout(), "{}", out.display())?);
    }
    let is_stopped = Arc::new(AtomicBool::new(false));
    if arguments.watch {
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&is_stopped))?;
        }
    }
    let write =
        |is_watched| moh_report::write_watched(&arguments.runs, &out, arguments.force, is_watched);
    let (remarks, mut refresh) = write(arguments.watch)?;
    for remark in remarks {
        stderr_line(format_args!("warning: {remark}"));
    }
    let mut shown = stdout();
    writeln!(shown, "{}", out.display())?;
    while let Some(time) = refresh {
        let start = Instant::now();
        while start.elapsed() < time && !is_stopped.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
        }
        // A browser does not reload the last page.
        refresh = write(!is_stopped.load(Ordering::Relaxed))?.1;
    }
    if let (None, [run]) = (&arguments.out, &arguments.runs[..])
        && let Some(picture) = moh_report::draw(run)?
    {
        writeln!(shown, "{}", picture.display())?;
    }
    Ok(())
}
