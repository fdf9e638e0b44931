//! Jobs of several ranks of `moh-train`, as processes started by mpirun.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use moh_checkpoint::run_log::metrics;
use moh_testkit::launcher::{Launcher, wait_until};
use moh_testkit::programs::{isolate, trainable};

/// Maximum ranks of a job.
const MAX_RANKS: usize = 4;

/// The recipe after its head: 80 steps of 6 micro-batches.
const RECIPE: &str = r#"

[[stage]]
name = "moh"
attention = "moh"
moh = { shared_heads = 4, routed_top_k = 2 }
tokens = 7680
batch_tokens = 96
micro_batch = 1
learning_rate = { max = 5e-3, min = 1e-3, warmup_steps = 1 }

[checkpoint]
every_steps = 5
"#;

/// Returns a directory with a model, a token file and a recipe.
pub fn prepared() -> tempfile::TempDir {
    trainable(RECIPE)
}

/// Returns mpirun with these arguments, in `dir`.
pub fn mpirun(dir: &Path, words: &[String]) -> Command {
    let mut command = Command::new("mpirun");
    isolate(&mut command, dir);
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]).args(words);
    // More threads than cores would only slow the ranks down.
    command.env("RAYON_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

/// Returns the arguments of `moh-train` for that recipe, with overrides.
pub fn arguments(overrides: &[&str]) -> Vec<String> {
    let mut words = ["--recipe", "recipe.toml"].map(str::to_owned).to_vec();
    for change in overrides {
        words.extend(["--set".to_owned(), (*change).to_owned()]);
    }
    words
}

/// A running job: mpirun and its ranks. Dropping the job kills them in any state.
pub struct Job {
    mpirun: Child,
    dir: PathBuf,
}

impl Job {
    /// Starts a job with ranks that work in `dir`.
    pub fn start(command: &mut Command, dir: &Path) -> Self {
        let mpirun = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        Job { mpirun, dir: dir.to_owned() }
    }

    /// Sends mpirun a signal.
    pub fn signal(&self, name: &str) {
        signal(self.mpirun.id(), name);
    }

    /// Waits for the end; returns the status and the output.
    pub fn end(mut self, limit: Duration) -> (ExitStatus, String) {
        let mut launcher = Launcher::new(self.mpirun.id());
        wait_until(limit, "the end of the job", || {
            launcher.check();
            self.mpirun.try_wait().unwrap().is_some()
        });
        let mut text = String::new();
        self.mpirun.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.mpirun.wait().unwrap(), text)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // A process that has ended cannot be killed.
        let _ = self.mpirun.kill();
        let _ = self.mpirun.wait();
        for process in (0..MAX_RANKS).filter_map(|rank| process_of(&self.dir, rank)) {
            let _ = Command::new("kill").args(["-KILL", &process.to_string()]).status();
        }
    }
}

/// Returns the recorded losses of a run's steps.
pub fn losses(run: &Path) -> Vec<f64> {
    let lines = metrics::read(&run.join("metrics.jsonl")).unwrap();
    lines.iter().map(|line| line.loss).collect()
}

/// Checks that losses are nearly equal: the order of sums differs between layouts, and 80 steps propagate the
/// difference.
pub fn assert_alike(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-3, "{found}, not {expected}");
    }
}

/// Waits until a run has made `steps` steps.
pub fn wait_for_steps(run: &Path, steps: usize) {
    let made = || fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count();
    wait_until(Duration::from_secs(120), &format!("{steps} steps"), || made() >= steps);
}

/// Returns the process of rank `rank` of the job in `dir`.
pub fn process_of(dir: &Path, rank: usize) -> Option<u32> {
    let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
    fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let number = path.file_name()?.to_str()?.parse().ok()?;
        let environment = fs::read(path.join("environ")).ok()?;
        let of_rank = environment.split(|&byte| byte == 0).any(|text| text == variable.as_bytes());
        (of_rank && fs::read_link(path.join("cwd")).ok()? == dir.canonicalize().unwrap())
            .then_some(number)
    })
}

/// Sends a process a signal.
pub fn signal(process: u32, name: &str) {
    let arguments = [format!("-{name}"), process.to_string()];
    assert!(Command::new("kill").args(arguments).status().unwrap().success());
}
