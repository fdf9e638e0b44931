//! `moh-report`: a page that shows one run, or compares several.

mod http;
mod watch;

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use moh_program::arguments;
use moh_program::exit::{self, Usage, stderr_line};
use moh_report::PAGE;

/// Write a page that shows a run, or compares several, or shows what heads do
///
/// The page is one HTML file that needs no network: losses by tokens, balance loss, learning rate, gradient
/// norm, speed, how tokens use the heads, the table of losses, and the recipe. The run may be unfinished; it is
/// read, never locked or changed. Of files that `moh-eval heads --json` has written, a page shows the loads by text,
/// how alike heads are, and the heads of a sentence.
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
        let arguments = arguments::parse::<Arguments>();
        match arguments.watch {
            true => watch::serve(arguments.runs, arguments.port),
            false => write(&arguments),
        }
    })
}

/// Writes the page to its file.
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
    if files > 0 {
        moh_report::write_heads(&arguments.runs, &out, arguments.force)?;
        return Ok(writeln!(stdout(), "{}", out.display())?);
    }
    for remark in moh_report::write(&arguments.runs, &out, arguments.force)? {
        stderr_line(format_args!("warning: {remark}"));
    }
    writeln!(stdout(), "{}", out.display())?;
    Ok(())
}
