//! Reads this process's rank from its launcher's environment variables.
//!
//! The innermost launcher has precedence: torchrun's variables before Open MPI's before Slurm's,
//! so that torchrun inside `srun` and `mpirun` inside `sbatch` work. Incomplete or contradictory
//! variables are errors, never guesses.

use std::collections::BTreeMap;
use std::fmt;

use crate::{Error, Result, host_list};

const MAX_RANKS: usize = 65_536;
/// The default port for single-node jobs without a job id: PyTorch's default.
const DEFAULT_PORT: u16 = 29_500;
/// Ports derived from a job's number: below Linux's ports for outgoing connections.
const DERIVED_PORTS: std::ops::Range<u32> = 20_000..30_000;
/// Distance between the ports of consecutive steps of a Slurm job.
const STEP_PORT_STRIDE: u64 = 101;

/// The program that started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// No launcher of several processes.
    None,
    /// torchrun, or any launcher that sets its variables.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// Slurm's srun.
    Slurm,
}

impl Launcher {
    /// Returns the variables with the rank and the number of processes, for messages.
    #[cfg(any(not(feature = "mpi"), all(feature = "cuda", not(feature = "nccl"))))]
    pub(crate) fn variables(self) -> String {
        let Names { rank, size, .. } = match self {
            Launcher::None | Launcher::Torchrun => TORCHRUN,
            Launcher::OpenMpi => OPEN_MPI,
            Launcher::Slurm => SLURM,
        };
        format!("{rank} and {size}")
    }
}

/// The address at which the ranks of a job meet: a port on rank 0's host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A name or an IP address.
    pub host: String,
    /// A TCP port.
    pub port: u16,
}

/// This process's identity within its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The rank among all processes.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    /// The rank among the processes on this machine, which selects the GPU.
    pub local_rank: usize,
    /// The launcher.
    pub launcher: Launcher,
    /// The address at which the ranks meet. Always present if there are several ranks.
    pub rendezvous: Option<Address>,
    /// Distinguishes this job's processes from other jobs' at the same address.
    pub job: String,
}

impl Launch {
    /// Creates a single process.
    pub fn single() -> Self {
        Launch {
            rank: 0,
            size: 1,
            local_rank: 0,
            launcher: Launcher::None,
            rendezvous: None,
            job: String::new(),
        }
    }

    /// Reads this process's environment. `rendezvous`, as `HOST:PORT`, overrides the address in it.
    pub fn from_environment(rendezvous: Option<&str>) -> Result<Self> {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self::parse(&std::env::vars_os().filter_map(text).collect(), rendezvous)
    }

    /// Reads these variables. An empty variable counts as unset.
    ///
    /// # Errors
    /// Fails if variables are incomplete, contradictory or not numbers, or if several
    /// ranks have no address at which to meet.
    pub fn parse(variables: &BTreeMap<String, String>, rendezvous: Option<&str>) -> Result<Self> {
        let variables = Variables(variables);
        let given = rendezvous.map(|text| Address::parse(text, "--rendezvous")).transpose()?;
        let Some((launcher, ranks)) = variables.ranks()? else { return Ok(Self::single()) };
        let Ranks { rank, size, local_rank, .. } = ranks;
        let rendezvous = match given {
            _ if size == 1 => None,
            Some(address) => Some(address),
            None => Some(variables.rendezvous(launcher, ranks)?),
        };
        Ok(Launch { rank, size, local_rank, launcher, rendezvous, job: variables.job(launcher) })
    }
}

impl Address {
    /// Parses `HOST:PORT`. HOST may be an IPv6 address in brackets.
    fn parse(text: &str, source: &str) -> Result<Self> {
        let parts = text.rsplit_once(':').and_then(|(host, port)| {
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let ambiguous = bare.is_none() && host.contains(':');
            let port = port.parse().ok().filter(|&port| port != 0)?;
            let host = bare.unwrap_or(host);
            let sound = !host.is_empty() && !ambiguous && !host.contains(char::is_whitespace);
            sound.then(|| Address { host: host.into(), port })
        });
        parts.ok_or_else(|| {
            Error::Call(format!("{source} = {text}: expected HOST:PORT, such as node7:29500"))
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[derive(Debug, Clone, Copy)]
struct Ranks {
    rank: usize,
    size: usize,
    local_rank: usize,
    local_size: Option<usize>,
}

struct Names {
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: Option<&'static str>,
}

const TORCHRUN: Names = Names {
    launcher: "torchrun",
    rank: "RANK",
    size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_size: Some("LOCAL_WORLD_SIZE"),
};

const OPEN_MPI: Names = Names {
    launcher: "mpirun",
    rank: "OMPI_COMM_WORLD_RANK",
    size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
};

const SLURM: Names = Names {
    launcher: "srun",
    rank: "SLURM_PROCID",
    size: "SLURM_NTASKS",
    local_rank: "SLURM_LOCALID",
    local_size: None,
};

struct Variables<'a>(&'a BTreeMap<String, String>);

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let parse = |text: &str| {
            let number = text.parse().ok().filter(|&number: &usize| number <= MAX_RANKS);
            number.ok_or_else(|| {
                Error::Call(format!("{name} = {text}: expected a number up to {MAX_RANKS}"))
            })
        };
        self.text(name).map(parse).transpose()
    }

    /// Returns the innermost launcher's values, or `None` if no launcher started several processes.
    fn ranks(&self) -> Result<Option<(Launcher, Ranks)>> {
        let torchrun = self.complete(&TORCHRUN)?;
        // torchrun may start several processes inside one process of an outer launcher, and
        // renumber them. Variables set by hand must agree with the launcher in use.
        let by_hand = self.text("TORCHELASTIC_RUN_ID").is_none();
        if let (Some(inner), true) = (torchrun, by_hand) {
            if let Some(outer) = self.complete(&OPEN_MPI)? {
                let same = (inner.rank, inner.size) == (outer.rank, outer.size);
                check_agreement(same, inner, outer, &OPEN_MPI)?;
            } else if let Some(outer) = self.slurm()? {
                let same = inner.size != outer.size || inner.rank == outer.rank;
                check_agreement(same, inner, outer, &SLURM)?;
            }
        }
        Ok(if let Some(ranks) = torchrun {
            Some((Launcher::Torchrun, ranks))
        } else if let Some(ranks) = self.complete(&OPEN_MPI)? {
            Some((Launcher::OpenMpi, ranks))
        } else {
            self.slurm()?.map(|ranks| (Launcher::Slurm, ranks))
        })
    }

    /// Returns Slurm's values, if this process is a task. The shell of `salloc` has only SLURM_NTASKS, and
    /// the script of `sbatch` has a SLURM_PROCID but no step. Both are single processes.
    fn slurm(&self) -> Result<Option<Ranks>> {
        let script =
            self.text("ENVIRONMENT") == Some("BATCH") && self.text("SLURM_STEP_ID").is_none();
        if script || self.text(SLURM.rank).is_none() {
            return Ok(None);
        }
        self.complete(&SLURM)
    }

    /// Returns a launcher's values, or `None` if all of its variables are unset. Fails if only some are set.
    fn complete(&self, names: &Names) -> Result<Option<Ranks>> {
        let needed = [names.rank, names.size, names.local_rank];
        let (set, missing): (Vec<&str>, Vec<&str>) =
            needed.into_iter().partition(|name| self.text(name).is_some());
        if set.is_empty() {
            return Ok(None);
        }
        let local_size = names.local_size.map(|name| self.number(name)).transpose()?.flatten();
        let (Some(rank), Some(size), Some(local_rank)) =
            (self.number(names.rank)?, self.number(names.size)?, self.number(names.local_rank)?)
        else {
            return Err(Error::Call(format!(
                "{} set without {}: unset variables left over from another job, or start with \
                 {}, which sets all of them",
                listed(&set),
                listed(&missing),
                names.launcher
            )));
        };
        let below = |name, number, limit_name: &str, limit| match number < limit {
            true => Ok(()),
            false => Err(Error::Call(format!(
                "{name} = {number} is not below {limit_name} = {limit}: unset variables left over from \
                 another job, or start with {}",
                names.launcher
            ))),
        };
        below(names.rank, rank, names.size, size)?;
        below(names.local_rank, local_rank, names.size, size)?;
        if let (Some(name), Some(local_size)) = (names.local_size, local_size) {
            below(names.local_rank, local_rank, name, local_size)?;
            below(name, local_size, &format!("{} + 1", names.size), size + 1)?;
        }
        Ok(Some(Ranks { rank, size, local_rank, local_size }))
    }

    /// Returns the address at which the ranks meet, unless the command line has an address.
    fn rendezvous(&self, launcher: Launcher, ranks: Ranks) -> Result<Address> {
        match (self.text("MASTER_ADDR"), self.text("MASTER_PORT")) {
            (Some(host), Some(port)) => {
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let bracketed = if host.contains(':') { format!("[{host}]") } else { host.into() };
                let text = format!("{bracketed}:{port}");
                let address = Address::parse(&text, "MASTER_ADDR:MASTER_PORT")?;
                return self.after_agent_port(launcher, address);
            }
            (Some(_), None) => return Err(incomplete("MASTER_ADDR", "MASTER_PORT")),
            (None, Some(_)) => return Err(incomplete("MASTER_PORT", "MASTER_ADDR")),
            (None, None) => {}
        }
        let no_address = |why: &str| {
            Error::Call(format!(
                "{} ranks have no address to meet at, {why}: set MASTER_ADDR and MASTER_PORT, or \
                 give --rendezvous HOST:PORT with rank 0's host",
                ranks.size
            ))
        };
        match launcher {
            Launcher::OpenMpi if ranks.local_size == Some(ranks.size) => {
                let job = self.open_mpi_job();
                let port = job.map_or(DEFAULT_PORT, |job| derived_port(fnv1a(job.as_bytes())));
                Ok(Address { host: "127.0.0.1".into(), port })
            }
            Launcher::OpenMpi | Launcher::Slurm => match self.slurm_rendezvous()? {
                Some(address) => Ok(address),
                None if launcher == Launcher::Slurm => {
                    Err(no_address("SLURM_JOB_ID or SLURM_JOB_NODELIST is not set"))
                }
                None => Err(no_address("mpirun does not provide rank 0's host")),
            },
            Launcher::None | Launcher::Torchrun => {
                Err(no_address("MASTER_ADDR and MASTER_PORT are not set"))
            }
        }
    }

    /// Returns the port after torchrun's MASTER_PORT, if torchrun's agent listens on MASTER_PORT.
    fn after_agent_port(&self, launcher: Launcher, mut address: Address) -> Result<Address> {
        let agent = self.text("TORCHELASTIC_USE_AGENT_STORE");
        let listens = agent.is_some_and(|agent| agent.eq_ignore_ascii_case("true"));
        if launcher == Launcher::Torchrun && listens {
            address.port = address.port.checked_add(1).ok_or_else(|| {
                Error::Call(
                    "MASTER_PORT = 65535 is torchrun's own, and there is no port after it: choose \
                     a lower --master-port"
                        .into(),
                )
            })?;
        }
        Ok(address)
    }

    /// Returns the first host of the step or of the job, and a port derived from their numbers.
    fn slurm_rendezvous(&self) -> Result<Option<Address>> {
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        let list = lists.into_iter().find_map(|name| Some((name, self.text(name)?)));
        let (Some((name, list)), Some(job)) = (list, self.text("SLURM_JOB_ID")) else {
            return Ok(None);
        };
        let refuse = |reason| Error::Call(format!("{name} = {list}: {reason}"));
        let hosts = host_list::expand(list).map_err(refuse)?;
        let host = hosts.into_iter().next().ok_or_else(|| refuse("no host".into()))?;
        let job = job.parse::<u64>().map_err(|_| {
            Error::Call(format!("SLURM_JOB_ID = {job}: expected the number of a job"))
        })?;
        let step = self.text("SLURM_STEP_ID").and_then(|step| step.parse::<u64>().ok());
        let number = job.wrapping_add(step.unwrap_or(0).wrapping_mul(STEP_PORT_STRIDE));
        Ok(Some(Address { host, port: derived_port(number) }))
    }

    fn open_mpi_job(&self) -> Option<&str> {
        self.text("PMIX_NAMESPACE").or_else(|| self.text("OMPI_MCA_ess_base_jobid"))
    }

    fn job(&self, launcher: Launcher) -> String {
        match launcher {
            Launcher::None => String::new(),
            Launcher::Torchrun => self
                .text("TORCHELASTIC_RUN_ID")
                .map_or(String::new(), |id| format!("torchrun {id}")),
            Launcher::OpenMpi => {
                self.open_mpi_job().map_or(String::new(), |job| format!("mpirun {job}"))
            }
            Launcher::Slurm => {
                let [job, step] = ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| self.text(name));
                format!("srun {}.{}", job.unwrap_or("-"), step.unwrap_or("-"))
            }
        }
    }
}

/// Formats `A and B` or `A`.
fn listed(names: &[&str]) -> String {
    match names {
        [name] => (*name).into(),
        [names @ .., last] => format!("{} and {last}", names.join(", ")),
        [] => "nothing".into(),
    }
}

fn incomplete(set: &str, missing: &str) -> Error {
    Error::Call(format!("{set} is set without {missing}: set both, or give --rendezvous HOST:PORT"))
}

fn check_agreement(same: bool, inner: Ranks, outer: Ranks, names: &Names) -> Result<()> {
    if same {
        return Ok(());
    }
    Err(Error::Call(format!(
        "RANK = {} of WORLD_SIZE = {} contradicts {} = {} of {} = {}: unset RANK, WORLD_SIZE and \
         LOCAL_RANK to follow {}",
        inner.rank, inner.size, names.rank, outer.rank, names.size, outer.size, names.launcher
    )))
}

fn derived_port(number: u64) -> u16 {
    let ports = u64::from(DERIVED_PORTS.end - DERIVED_PORTS.start);
    // Below 30,000, so it fits.
    (u64::from(DERIVED_PORTS.start) + number % ports) as u16
}

/// Returns the FNV-1a hash: the same on every rank and in every version of the program.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
