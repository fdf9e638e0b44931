//! A checkpoint that is being written in the background: first the parts of all ranks, then the manifest,
//! which the first rank writes and which makes the checkpoint complete.
//!
//! The background threads use no collectives. The ranks agree on the progress at the ends of steps,
//! where they exchange a few flags anyway, so that all of them know at the same step that a checkpoint
//! is complete or has failed. A single rank needs no agreement and completes its checkpoint at once.

use std::path::PathBuf;
use std::time::Duration;

use moh_kernels::Backend;
use moh_step::Ranks;

use super::background::Background;
use crate::{Error, Result};

/// A rank's part of a checkpoint: its manifest entries, as text.
type EncodedPart = Vec<u8>;
/// Writes a rank's part.
pub type WritePart = Box<dyn FnOnce() -> Result<EncodedPart> + Send>;
/// Completes a checkpoint of these parts. Returns a sentence for each later failure.
pub type CompleteCheckpoint = Box<dyn FnOnce(&[EncodedPart]) -> Result<Vec<String>, Cause> + Send>;
/// The reason why a checkpoint could not be written or completed.
type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The result of a rank's thread.
#[derive(Debug)]
enum Done {
    Part(EncodedPart),
    /// The checkpoint is complete, with a sentence for each later failure.
    Complete(Vec<String>),
}

/// The state of a rank's thread.
#[derive(Debug)]
enum Work {
    Running(Background<Result<Done, Cause>>),
    Ended(Result<Done, Cause>),
}

/// A rank's flags for the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThreadFlags {
    /// The rank's thread is at work.
    pub running: bool,
    /// The rank's thread has failed.
    pub failed: bool,
}

/// The end of a checkpoint in flight, the same on all ranks.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// It is complete. On the first rank with a sentence for each later failure.
    Complete(Vec<String>),
    /// It has failed. On the first rank with the cause.
    Failed(String),
}

/// A checkpoint in flight. Dropping it waits for this rank's thread.
pub struct Flight {
    /// The directory, for messages.
    path: PathBuf,
    work: Work,
    /// Dropped after the thread has ended: it owns the incomplete directory.
    complete: Option<CompleteCheckpoint>,
}

impl Flight {
    /// Starts to write this rank's part of the checkpoint at `path`. `complete` is `Some` on the first
    /// of `size` ranks, and completes the checkpoint when all parts are written.
    pub fn start(
        path: PathBuf,
        size: usize,
        write_part: WritePart,
        mut complete: Option<CompleteCheckpoint>,
    ) -> Self {
        let alone = complete.take_if(|_| size == 1);
        let work = start(&path, move || {
            let part = write_part()?;
            match alone {
                Some(complete) => complete(&[part]).map(Done::Complete),
                None => Ok(Done::Part(part)),
            }
        });
        Flight { path, work, complete }
    }

    /// Waits at most `limit` for this rank's thread, and returns this rank's flags.
    pub fn wait(&mut self, limit: Duration) -> ThreadFlags {
        if let Work::Running(background) = &mut self.work
            && let Some(result) = background.wait(limit)
        {
            self.work = Work::Ended(result.unwrap_or_else(|_| {
                let reason = "the thread that wrote it panicked".to_owned();
                Err(Error::from(moh_files::unusable(&self.path, reason)).into())
            }));
        }
        ThreadFlags {
            running: matches!(self.work, Work::Running(_)),
            failed: matches!(self.work, Work::Ended(Err(_))),
        }
    }

    /// Advances the flight as the ranks have agreed. `any` has the flags that are set on any rank after every
    /// rank has called [`Self::wait`]. Returns `None` if the checkpoint stays in flight.
    ///
    /// # Errors
    /// Fails if another rank has failed for a reason other than its checkpoint.
    pub fn advance<B: Backend>(
        &mut self,
        any: ThreadFlags,
        ranks: &mut Ranks<B>,
    ) -> Result<Option<End>> {
        if any.running {
            return Ok(None);
        }
        if any.failed {
            let cause = match &self.work {
                Work::Ended(Err(error)) => error.to_string(),
                _ => String::new(),
            };
            let causes = ranks.gather(cause.into_bytes())?;
            return Ok(Some(End::Failed(first_cause(&causes))));
        }
        match &mut self.work {
            Work::Ended(Ok(Done::Part(part))) => {
                let parts = ranks.gather(std::mem::take(part))?;
                self.work = match self.complete.take() {
                    Some(complete) => {
                        start(&self.path, move || complete(&parts).map(Done::Complete))
                    }
                    // The first rank completes it.
                    None => Work::Ended(Ok(Done::Complete(Vec::new()))),
                };
                Ok(None)
            }
            Work::Ended(Ok(Done::Complete(warnings))) => {
                Ok(Some(End::Complete(std::mem::take(warnings))))
            }
            // With such a state, `any` has a flag that returns above.
            Work::Running(_) | Work::Ended(Err(_)) => Ok(None),
        }
    }
}

/// Starts a thread of a rank. A thread that cannot be started has failed.
fn start(
    path: &std::path::Path,
    work: impl FnOnce() -> Result<Done, Cause> + Send + 'static,
) -> Work {
    match Background::start("checkpoint", work) {
        Ok(background) => Work::Running(background),
        Err(error) => Work::Ended(Err(moh_files::io(path)(error).into())),
    }
}

/// Returns the first rank's cause that is not empty. Returns an empty text where the causes were not gathered.
fn first_cause(causes: &[Vec<u8>]) -> String {
    let found = causes.iter().enumerate().find(|(_, cause)| !cause.is_empty());
    found.map_or_else(String::new, |(rank, cause)| {
        let cause = String::from_utf8_lossy(cause);
        if causes.len() > 1 { format!("rank {rank}: {cause}") } else { cause.into_owned() }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use moh_comm::World;
    use moh_kernels::Cpu;

    use super::*;
    use moh_testkit::ranks::ranks_on_threads;

    const LIMIT: Duration = Duration::from_millis(20);

    /// Follows a flight to its end on each of `size` ranks, which are threads.
    fn on_ranks<R: Send>(
        size: usize,
        start: impl Fn(usize) -> (Flight, R) + Sync,
    ) -> Vec<(End, R)> {
        ranks_on_threads(size, |ranks| {
            let (mut flight, more) = start(ranks.group().rank());
            let end = loop {
                let ThreadFlags { running, failed } = flight.wait(LIMIT);
                let [running, failed] = ranks.any_of([running, failed]).unwrap();
                if let Some(end) = flight.advance(ThreadFlags { running, failed }, ranks).unwrap() {
                    break end;
                }
            };
            (end, more)
        })
    }

    fn failure(text: &str) -> Error {
        moh_files::unusable("disk".as_ref(), text).into()
    }

    /// Returns a flight on rank `rank` of `size`, and a receiver of the parts that the first rank's completion gets.
    fn flight(
        rank: usize,
        size: usize,
        part: Result<EncodedPart>,
        complete: Result<Vec<String>>,
    ) -> (Flight, mpsc::Receiver<Vec<EncodedPart>>) {
        let (given, received) = mpsc::channel();
        let complete: CompleteCheckpoint = Box::new(move |parts| {
            given.send(parts.to_vec()).unwrap();
            complete.map_err(Cause::from)
        });
        let complete = (rank == 0).then_some(complete);
        (Flight::start("step-1".into(), size, Box::new(move || part), complete), received)
    }

    #[test]
    fn the_first_rank_completes_what_all_have_written() {
        for size in [1, 3] {
            let ended = on_ranks(size, move |rank| {
                flight(rank, size, Ok(vec![rank as u8]), Ok(vec!["old ones stay".into()]))
            });
            let parts: Vec<EncodedPart> = (0..size).map(|rank| vec![rank as u8]).collect();
            assert_eq!(ended[0].1.try_recv().unwrap(), parts);
            assert_eq!(ended[0].0, End::Complete(vec!["old ones stay".into()]));
            assert!(ended[1..].iter().all(|(end, _)| *end == End::Complete(Vec::new())));
        }
    }

    #[test]
    fn a_part_that_fails_fails_the_checkpoint_on_all_ranks() {
        let ended = on_ranks(3, |rank| {
            let part = if rank == 2 { Err(failure("full")) } else { Ok(Vec::new()) };
            flight(rank, 3, part, Ok(Vec::new()))
        });
        assert!(ended[0].1.try_recv().is_err(), "completed without a part");
        assert_eq!(ended[0].0, End::Failed("rank 2: disk: full".into()));
        assert!(ended.iter().all(|(end, _)| matches!(end, End::Failed(_))));
        let alone = on_ranks(1, |_| flight(0, 1, Err(failure("full")), Ok(Vec::new())));
        assert_eq!(alone[0].0, End::Failed("disk: full".into()));
    }

    #[test]
    fn a_completion_that_fails_fails_the_checkpoint_on_all_ranks() {
        for size in [1, 2] {
            let ended = on_ranks(size, move |rank| {
                flight(rank, size, Ok(Vec::new()), Err(failure("lost")))
            });
            assert!(matches!(&ended[0].0, End::Failed(cause) if cause.ends_with("disk: lost")));
            assert!(ended.iter().all(|(end, _)| matches!(end, End::Failed(_))));
        }
    }

    #[test]
    fn a_thread_that_panics_fails_the_checkpoint() {
        let ended = on_ranks(2, |rank| {
            let write: WritePart =
                Box::new(move || if rank == 1 { panic!("on purpose") } else { Ok(Vec::new()) });
            (Flight::start("step-1".into(), 2, write, None), ())
        });
        let cause = "rank 1: step-1: the thread that wrote it panicked";
        assert_eq!(ended[0].0, End::Failed(cause.into()));
    }

    #[test]
    fn a_checkpoint_stays_in_flight_until_the_slowest_rank_has_written() {
        let (release, gate) = mpsc::channel::<()>();
        let mut ranks = Ranks::new(Cpu, World::single().group().clone()).unwrap();
        let write: WritePart = Box::new(move || {
            gate.recv().unwrap();
            Ok(Vec::new())
        });
        let complete: CompleteCheckpoint = Box::new(|_| Ok(Vec::new()));
        let mut flight = Flight::start("step-1".into(), 1, write, Some(complete));
        let flags = flight.wait(Duration::ZERO);
        assert_eq!(flags, ThreadFlags { running: true, failed: false });
        assert_eq!(flight.advance(flags, &mut ranks).unwrap(), None);
        // Another rank is still at work.
        release.send(()).unwrap();
        while flight.wait(LIMIT).running {}
        let other = ThreadFlags { running: true, failed: false };
        assert_eq!(flight.advance(other, &mut ranks).unwrap(), None);
        let end = flight.advance(ThreadFlags::default(), &mut ranks).unwrap();
        assert_eq!(end, Some(End::Complete(Vec::new())));
    }
}
