//! All processes of a job: their start, their groups and their end.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::{Engine, Member, threads};
use crate::liveness::{Limits, Link};
use crate::watchdog::Health;
use crate::{Error, Fault, Group, Launch, Result, rendezvous};

/// How long the other processes may take to report the fault before the engine ends the job.
const ABORT_GRACE: Duration = Duration::from_millis(500);

/// Default of [`WorldOptions::rendezvous_limit`].
pub const RENDEZVOUS_LIMIT: Duration = Duration::from_secs(300);
/// Default of [`WorldOptions::operation_limit`].
pub const OPERATION_LIMIT: Duration = Duration::from_secs(600);

/// The memory of the exchanged buffers, which selects the engine.
#[derive(Debug, Clone)]
pub enum Buffers {
    /// Host memory: MPI, feature `mpi`. By default mpirun binds each process to a core.
    /// `--bind-to none` removes this restriction.
    Host,
    /// This GPU, one per rank: NCCL, feature `nccl`.
    #[cfg(feature = "cuda")]
    Gpu(moh_kernels::Cuda),
}

/// Options of [`World::connect`].
#[derive(Clone)]
pub struct WorldOptions {
    /// Text that must be the same on all ranks, such as the program's version and the recipe. A
    /// mismatch shows the first line that differs.
    pub fingerprint: String,
    /// How long the ranks wait for each other at the start. The default is [`RENDEZVOUS_LIMIT`].
    pub rendezvous_limit: Duration,
    /// How long an operation may take. The default is [`OPERATION_LIMIT`].
    pub operation_limit: Duration,
    /// How long a process may be silent. The default is 45 seconds.
    pub silence_limit: Duration,
    /// Called once, on a separate thread, when another rank or a stuck operation has ended the job.
    /// Waiting operations also return the fault, but the program may be elsewhere, or wait for a
    /// GPU. So the function should print the fault and exit the process.
    pub on_fault: Arc<dyn Fn(&Fault) + Send + Sync>,
}

impl Default for WorldOptions {
    fn default() -> Self {
        WorldOptions {
            fingerprint: String::new(),
            rendezvous_limit: RENDEZVOUS_LIMIT,
            operation_limit: OPERATION_LIMIT,
            silence_limit: Duration::from_secs(45),
            on_fault: Arc::new(|_| ()),
        }
    }
}

/// This process as a rank of the job.
///
/// It must end by [`World::close`]. If it is dropped without that, by an early return or a panic, it counts as
/// a failure: the other ranks end with an error that names this rank.
pub struct World {
    group: Group,
    /// `None` in a world of a single process, or of threads.
    link: Option<Link>,
    closed: bool,
}

impl World {
    /// Creates a world of a single process.
    pub fn single() -> Self {
        let health = Arc::new(Health::new(WorldOptions::default().on_fault));
        Self::of(Group::single("world", health), None)
    }

    fn of(group: Group, link: Option<Link>) -> Self {
        World { group, link, closed: false }
    }

    /// Creates `size` worlds, for threads as the ranks of a job. When a thread drops its world or panics,
    /// the other ranks' operations fail.
    ///
    /// # Panics
    /// Panics if `size` is 0.
    pub fn threads(size: usize) -> Vec<Self> {
        assert!(size > 0, "a world has at least one rank");
        let health = |_| Arc::new(Health::new(WorldOptions::default().on_fault));
        let healths: Vec<Arc<Health>> = (0..size).map(health).collect();
        let members = threads::group(healths.iter().cloned());
        let worlds = members.into_iter().zip(healths);
        let world = |(member, health)| Self::of(Group::new("world", member, health), None);
        worlds.map(world).collect()
    }

    /// Connects to the other processes of the job, and starts the engine for these buffers. A job
    /// of a single process opens no port.
    ///
    /// # Errors
    /// Fails with [`Error::Fault`] if ranks do not arrive in time, or if a rank has another fingerprint.
    /// Fails also if rank 0 is not found, if its port is in use, in a build without the engine, and if the
    /// engine fails.
    pub fn connect(launch: &Launch, buffers: Buffers, options: WorldOptions) -> Result<Self> {
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

    /// Starts a single process. Fails if there are several: the build has no engine for them.
    #[cfg(any(not(feature = "mpi"), all(feature = "cuda", not(feature = "nccl"))))]
    fn without_engine(
        launch: &Launch,
        options: WorldOptions,
        engine: &str,
        feature: &str,
    ) -> Result<Self> {
        let no_engine = || {
            Error::Call(format!(
                "{} say that this is one of {} processes, but this program was built without {engine}: \
                 build it with --features {feature}, or unset these variables to start one process",
                launch.launcher.variables(),
                launch.size
            ))
        };
        if launch.size > 1 {
            return Err(no_engine());
        }
        Self::connect_with(launch, options, || Ok(Vec::new()), |_, _, _| Err(no_engine()))
    }

    /// Connects to the other processes. Rank 0's payload is sent to all of them, and passed to
    /// `engine`.
    pub(crate) fn connect_with(
        launch: &Launch,
        options: WorldOptions,
        payload: impl FnOnce() -> Result<Vec<u8>>,
        engine: impl FnOnce(&Launch, &[u8], Arc<Health>) -> Result<Arc<dyn Engine>>,
    ) -> Result<Self> {
        let WorldOptions {
            fingerprint,
            rendezvous_limit,
            operation_limit,
            silence_limit,
            on_fault,
        } = options;
        let health = Arc::new(Health::new(on_fault));
        let Launch { rank, size, .. } = *launch;
        if size == 1 {
            return Ok(Self::of(Group::single("world", health), None));
        }
        let address = launch.rendezvous.as_ref().ok_or_else(|| {
            Error::Call(format!("{size} ranks have no address to meet at: give one"))
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
                Ok(Self::of(group, Some(link)))
            }
            Err(error) => {
                link.fail(&error.to_string());
                Err(error)
            }
        }
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Ends the job without an error: waits until every rank has called it. The caller has dropped
    /// the groups that it split off, or drops them soon.
    ///
    /// # Errors
    /// Fails with [`Error::Fault`] if another rank failed before its end.
    pub fn close(mut self) -> Result<()> {
        self.group.finish()?;
        self.closed = true;
        self.link.as_ref().map_or(Ok(()), Link::close)
    }

    /// Reports an error to the other ranks and ends this process with `code`, and the whole job if
    /// its engine can.
    pub fn abort(mut self, reason: &str, code: i32) -> ! {
        self.closed = true;
        if let Some(link) = &self.link {
            link.fail(reason);
            std::thread::sleep(ABORT_GRACE);
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
