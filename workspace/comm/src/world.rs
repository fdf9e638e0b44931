//! All processes of a job: how they find each other, and how they end.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::{Engine, Member, threads};
use crate::error::{Error, Fault, Result};
use crate::group::Group;
use crate::launch::Launch;
use crate::liveness::{Limits, Link};
use crate::rendezvous;
use crate::watchdog::Health;

/// How long the other processes get to say why the job ends before this one takes them down.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How long the ranks wait for each other at the start, unless told otherwise.
pub const RENDEZVOUS_LIMIT: Duration = Duration::from_secs(300);
/// How long an operation may last, unless told otherwise.
pub const OPERATION_LIMIT: Duration = Duration::from_secs(600);

/// Where the buffers lie that the ranks exchange, which decides what moves them.
#[derive(Debug, Clone)]
pub enum Buffers {
    /// In the host's memory: MPI, feature `mpi`. mpirun keeps each process on one core unless it is
    /// told `--bind-to none`.
    Host,
    /// On this GPU, one for each rank: NCCL, feature `nccl`.
    #[cfg(feature = "cuda")]
    Gpu(moh_kernels::Cuda),
}

/// How processes find each other and watch over each other.
#[derive(Clone)]
pub struct Options {
    /// What must be the same on all ranks, such as the program's version and the recipe; of several
    /// lines, the first that differs is shown.
    pub fingerprint: String,
    /// How long the ranks wait for each other at the start: [`RENDEZVOUS_LIMIT`].
    pub rendezvous_limit: Duration,
    /// How long an operation may last: [`OPERATION_LIMIT`].
    pub operation_limit: Duration,
    /// How long a process may give no sign of life: 45 seconds.
    pub silence_limit: Duration,
    /// Called once, on a thread of its own, when another rank's end or a stuck operation has ended
    /// the job. Operations that wait return the fault as well, but a program may be anywhere, or
    /// wait for a GPU: this function should print the fault and end the process.
    pub on_fault: Arc<dyn Fn(&Fault) + Send + Sync>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            fingerprint: String::new(),
            rendezvous_limit: RENDEZVOUS_LIMIT,
            operation_limit: OPERATION_LIMIT,
            silence_limit: Duration::from_secs(45),
            on_fault: Arc::new(|_| ()),
        }
    }
}

/// This process among all of the job.
///
/// It must end by [`World::close`]. One that is dropped otherwise, by an early return or a panic,
/// is a rank that failed: the others end with an error that names it.
pub struct World {
    group: Group,
    /// None in a world of one process, or of threads.
    link: Option<Link>,
    local_rank: usize,
    closed: bool,
}

impl World {
    /// A world of this process alone.
    pub fn single() -> Self {
        let health = Arc::new(Health::new(Options::default().on_fault));
        World { group: Group::alone("world", health), link: None, local_rank: 0, closed: false }
    }

    /// As many worlds as `size`, for threads that play the ranks of a job; a thread that drops its
    /// world, or panics, makes the others' operations fail.
    ///
    /// # Panics
    /// If `size` is 0.
    pub fn threads(size: usize) -> Vec<Self> {
        assert!(size > 0, "a world has at least one rank");
        let health = |_| Arc::new(Health::new(Options::default().on_fault));
        let healths: Vec<Arc<Health>> = (0..size).map(health).collect();
        let members = threads::group(healths.iter().cloned());
        let worlds = members.into_iter().zip(healths).enumerate();
        let world = |(rank, (member, health))| World {
            group: Group::new("world", member, health),
            link: None,
            local_rank: rank,
            closed: false,
        };
        worlds.map(world).collect()
    }

    /// Meets the other processes of the job, and connects the engine for these buffers. A job of
    /// one process opens no port.
    ///
    /// # Errors
    /// [`Error::Fault`] naming the ranks that do not arrive in time, or the one that was started
    /// with another fingerprint; [`Error::Rendezvous`] where rank 0 is not found, or its port is
    /// taken; [`Error::NoEngine`] in a build without the engine; whatever the engine reports.
    pub fn connect(launch: &Launch, buffers: Buffers, options: Options) -> Result<Self> {
        match buffers {
            #[cfg(feature = "mpi")]
            Buffers::Host => Self::connect_with(
                launch,
                options,
                || Ok(Vec::new()),
                |launch, _, health| crate::engine::mpi::world(launch, health),
            ),
            #[cfg(not(feature = "mpi"))]
            Buffers::Host => Self::without_engine(launch, options, "MPI", "mpi"),
            #[cfg(feature = "nccl")]
            Buffers::Gpu(cuda) => Self::connect_with(
                launch,
                options,
                crate::engine::nccl::unique_id,
                |launch, id, health| crate::engine::nccl::world(launch, id, cuda, health),
            ),
            #[cfg(all(feature = "cuda", not(feature = "nccl")))]
            Buffers::Gpu(_) => Self::without_engine(launch, options, "NCCL", "nccl"),
        }
    }

    /// In a build without the engine there can be one process.
    #[cfg(any(not(feature = "mpi"), all(feature = "cuda", not(feature = "nccl"))))]
    fn without_engine(
        launch: &Launch,
        options: Options,
        engine: &str,
        feature: &str,
    ) -> Result<Self> {
        let no_engine = || {
            Error::NoEngine(format!(
                "{} processes were started, and this program was built without {engine}: build it \
                 with --features {feature}, or start one process",
                launch.size
            ))
        };
        if launch.size > 1 {
            return Err(no_engine());
        }
        Self::connect_with(launch, options, || Ok(Vec::new()), |_, _, _| Err(no_engine()))
    }

    /// Meets the other processes; rank 0's payload goes to all of them, and to `engine`.
    pub(crate) fn connect_with(
        launch: &Launch,
        options: Options,
        payload: impl FnOnce() -> Result<Vec<u8>>,
        engine: impl FnOnce(&Launch, &[u8], Arc<Health>) -> Result<Arc<dyn Engine>>,
    ) -> Result<Self> {
        let Options { fingerprint, rendezvous_limit, operation_limit, silence_limit, on_fault } =
            options;
        let health = Arc::new(Health::new(on_fault));
        let Launch { rank, size, local_rank, .. } = *launch;
        if size == 1 {
            let group = Group::alone("world", health);
            return Ok(World { group, link: None, local_rank, closed: false });
        }
        let address = launch.rendezvous.as_ref().ok_or_else(|| {
            Error::Launch(format!("{size} ranks have no address to meet at: give one"))
        })?;
        let me = rendezvous::hello(launch, &fingerprint);
        let (peers, payload) = if rank == 0 {
            let payload = payload()?;
            (rendezvous::host(address, &me, rendezvous_limit, payload.clone())?, payload)
        } else {
            let (peer, payload) = rendezvous::join(address, &me, rendezvous_limit)?;
            (vec![peer], payload)
        };
        let limits = Limits { operation: operation_limit, silence: silence_limit };
        let link = Link::start(rank, &me.place, peers, Arc::clone(&health), limits)?;
        match engine(launch, &payload, Arc::clone(&health)) {
            Ok(engine) => {
                let group = Group::new("world", Member { engine, rank, size }, health);
                Ok(World { group, link: Some(link), local_rank, closed: false })
            }
            Err(error) => {
                link.fail(&error.to_string());
                Err(error)
            }
        }
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// This process's number among those of its machine.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Ends well: waits until every rank has come to its end. The caller has dropped the groups that
    /// it split off, or drops them soon.
    ///
    /// # Errors
    /// [`Error::Fault`] where another rank failed before its end.
    pub fn close(mut self) -> Result<()> {
        self.group.finish()?;
        self.closed = true;
        self.link.as_ref().map_or(Ok(()), Link::close)
    }

    /// Ends this process with `code` because of an error that the other ranks are told, and the
    /// whole job with it where its engine can.
    pub fn abort(mut self, reason: &str, code: i32) -> ! {
        self.closed = true;
        if let Some(link) = &self.link {
            link.fail(reason);
            std::thread::sleep(LAST_WORDS);
        }
        match self.group.engine() {
            Some(engine) => engine.abort(code),
            None => std::process::exit(code),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let (false, Some(link)) = (self.closed, &self.link) {
            let panicked = std::thread::panicking();
            link.fail(if panicked { "it panicked" } else { "it ended before its work was done" });
        }
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("World").field(&self.group).finish()
    }
}

#[cfg(test)]
#[path = "world_tests.rs"]
mod tests;
