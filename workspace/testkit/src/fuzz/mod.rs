//! Calls a reader with mutated input until the time is over, and fails if the reader panics or uses more
//! memory than its bound.
//!
//! An input is an input of the corpus with a few mutations. If its outcome (the reader's error
//! without numbers) is new, it joins the corpus, so that later inputs reach deeper code. `MOH_FUZZ_SECONDS`
//! is the time of each target, default 1. `MOH_FUZZ_SEED`, default 1, chooses the inputs. Choose
//! other seeds for long runs.

mod mutation;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use peak_alloc::PeakAlloc;

const MAX_CORPUS_INPUTS: usize = 2000;
const MAX_INPUT_BYTES: usize = 1 << 20;

/// How often a call that uses too much memory is measured again, and the pause before each measurement.
const MEASUREMENTS: usize = 10;
const PAUSE: Duration = Duration::from_millis(50);

/// Locked by the running target, so that the memory of a single target is measured at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A reader and its input.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The name, for messages.
    pub name: &'a str,
    /// Valid input, from which mutations start.
    pub seeds: &'a [Vec<u8>],
    /// Maximum bytes that a call may allocate in addition to the input.
    pub memory: usize,
    /// The program's global allocator.
    pub allocator: &'a PeakAlloc,
}

impl Target<'_> {
    /// Calls `read` with mutated input. `read` returns the reader's result.
    ///
    /// # Panics
    /// Panics if `read` panics, or if it allocates more than the bound. The message names a file with
    /// the input.
    pub fn run(&self, read: impl Fn(&[u8]) -> Result<(), String>) {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = setting("MOH_FUZZ_SECONDS").unwrap_or(1);
        let seed = setting("MOH_FUZZ_SEED").unwrap_or(1);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut corpus = self.seeds.to_vec();
        let mut outcomes = HashSet::new();
        for input in self.seeds {
            if let Err(reason) = read(input) {
                panic!("{}: refuses its valid input: {reason}", self.name);
            }
        }
        let (start, mut calls) = (Instant::now(), 0u64);
        while start.elapsed() < Duration::from_secs(seconds) {
            let input = mutation::mutated(&corpus, MAX_INPUT_BYTES, &mut random);
            let outcome = self.call(&read, &input, seed);
            calls += 1;
            if outcomes.insert(outcome) && corpus.len() < MAX_CORPUS_INPUTS {
                corpus.push(input);
            }
        }
        println!("{}: {calls} inputs, {} outcomes, seed {seed}", self.name, outcomes.len());
    }

    /// Calls `read`. Also returns the peak of allocated bytes during the call.
    fn measure(
        &self,
        read: &impl Fn(&[u8]) -> Result<(), String>,
        input: &[u8],
    ) -> (std::thread::Result<Result<(), String>>, usize) {
        let before = self.allocator.current_usage();
        self.allocator.reset_peak_usage();
        let outcome = catch_unwind(AssertUnwindSafe(|| read(input)));
        (outcome, self.allocator.peak_usage().saturating_sub(before))
    }

    /// Returns the outcome of a call, without its numbers.
    fn call(&self, read: &impl Fn(&[u8]) -> Result<(), String>, input: &[u8], seed: u64) -> String {
        let (mut outcome, mut peak) = self.measure(read, input);
        for _ in 0..MEASUREMENTS {
            if peak <= self.memory + input.len() {
                break;
            }
            // Other tests may have prepared their inputs at the same time, which does not repeat.
            std::thread::sleep(PAUSE);
            (outcome, peak) = self.measure(read, input);
        }
        let fail = |what: String| -> ! {
            let file = std::env::temp_dir().join(format!("moh-fuzz-{}", self.name));
            let kept = std::fs::write(&file, input).is_ok();
            let place = if kept { file.display().to_string() } else { format!("seed {seed}") };
            panic!("{}: {what}: {place}", self.name);
        };
        if peak > self.memory + input.len() {
            fail(format!("allocates {peak} bytes for {} of input", input.len()));
        }
        match outcome {
            Ok(Ok(())) => String::new(),
            Ok(Err(reason)) => reason.chars().filter(|c| !c.is_ascii_digit()).take(100).collect(),
            Err(_) => fail("panics".to_owned()),
        }
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
