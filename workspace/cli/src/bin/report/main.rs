//! `moh-report`: a page that shows one run, or compares several.

mod curves;
mod figure;
mod guard;
mod http;
mod losses;
mod numbers;
mod overview;
mod page;
mod recipes;
mod routing;
mod speed;
mod watch;

use std::io::{Read as _, Write as _, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context as _, bail};
use clap::Parser;
use moh_cli::exit::{self, Usage};
use moh_cli::run_log::RunLog;

/// The page's name in the directory of a single run.
const PAGE: &str = "report.html";

/// Bytes at the start of a page in which it says that it is one.
const HEAD_BYTES: u64 = 1024;

/// Write a page that shows a run, or compares several
///
/// The page is one HTML file that needs no network: losses by tokens, balance loss, learning rate, gradient
/// norm, speed, how tokens use the heads, the table of losses, and the recipe. The run may be unfinished; it is
/// read, never locked or changed.
#[derive(Parser)]
#[command(
    name = "moh-report",
    version,
    arg_required_else_help = true,
    after_help = "Examples:\n  \
        moh-report runs/quickstart\n  \
        moh-report runs/quickstart runs/quickstart-half --out compared.html\n  \
        moh-report --watch runs/quickstart"
)]
struct Arguments {
    /// Run directories: run.dir of their recipes
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// The page [default: report.html in the directory of a single run]
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    out: Option<PathBuf>,
    /// Replace FILE even if it is not a page of this program
    #[arg(long, conflicts_with = "watch")]
    force: bool,
    /// Serve the page on this machine alone, read anew at each request, until Ctrl-C
    #[arg(long)]
    watch: bool,
    /// Port of --watch; 0 for any that is free
    #[arg(long, value_name = "N", requires = "watch", default_value_t = 8321)]
    port: u16,
}

fn main() -> ExitCode {
    exit::run(|| {
        let arguments = Arguments::parse();
        match arguments.watch {
            true => watch::serve(arguments.runs, arguments.port),
            false => write(&arguments),
        }
    })
}

/// Writes the page to its file.
fn write(arguments: &Arguments) -> anyhow::Result<()> {
    let out = match (&arguments.out, &arguments.runs[..]) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.join(PAGE),
        (None, _) => {
            let text = "--out is missing: name the file for the page of several runs".to_owned();
            return Err(Usage(text).into());
        }
    };
    refuse_other_files(&out, arguments.force)?;
    let logs = arguments.runs.iter().map(|run| RunLog::read(run)).collect::<Result<_, _>>()?;
    let page = page::page(&curves::named(logs), SystemTime::now(), None);
    moh_files::write(&out, page.as_bytes())
        .with_context(|| format!("{}: cannot be written", out.display()))?;
    writeln!(stdout(), "{}", out.display())?;
    Ok(())
}

/// Refuses to replace what is no file, and without `force` what this program has not written.
fn refuse_other_files(path: &Path, force: bool) -> anyhow::Result<()> {
    let shown = path.display();
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| shown.to_string()),
        Ok(data) if !data.is_file() => bail!("{shown}: is not a file: name another one with --out"),
        Ok(_) if force => return Ok(()),
        Ok(_) => {}
    }
    let mut start = Vec::new();
    let file = std::fs::File::open(path).with_context(|| shown.to_string())?;
    file.take(HEAD_BYTES).read_to_end(&mut start).with_context(|| shown.to_string())?;
    if !page::is_page(&start) {
        bail!(
            "{shown}: is not a page of moh-report: name another file with --out, or give --force to replace it"
        );
    }
    Ok(())
}
