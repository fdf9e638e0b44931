//! Process groups for training on several GPUs, machines or threads.
//!
//! [`Launch`] reads this process's rank from the environment. [`World::connect`] connects to the
//! other processes, rejects processes that were started differently, and monitors all of them: if a rank
//! dies, fails or hangs, the job ends with an error that names the rank. The [`Group`] of all ranks,
//! and the groups of [`RankLayout::groups`], transfer elements between ranks, by NCCL between GPUs
//! (feature `nccl`) and by MPI between CPUs (feature `mpi`). This crate never sends tensors over
//! sockets.
//!
//! Threads can be the ranks of a job:
//!
//! ```
//! use moh_comm::{Reduce, World};
//! use moh_kernels::{AnyBuffer, Cpu};
//!
//! let ranks: Vec<_> = World::threads(3)
//!     .into_iter()
//!     .map(|world| {
//!         std::thread::spawn(move || -> moh_comm::Result<Vec<f32>> {
//!             let group = world.group();
//!             let mut elements = vec![world.rank() as f32; 6];
//!             group.all_reduce::<Cpu, f32>(&mut elements, Reduce::Sum)?;
//!             assert_eq!(elements, [3.0; 6]);
//!
//!             // ZeRO-1: rank r reduces its chunk of the gradients, and gathers all weights.
//!             let gradients = AnyBuffer::<Cpu>::F32(vec![1.0; 6]);
//!             let pending = group.start_reduce_scatter(gradients, Reduce::Sum)?;
//!             let gradients: Vec<f32> = pending.wait()?.into_typed();
//!             let own = 2 * world.rank()..2 * world.rank() + 2;
//!             let mut weights = vec![0.0f32; 6];
//!             for i in own {
//!                 weights[i] = i as f32 - gradients[i];
//!             }
//!             group.all_gather::<Cpu, f32>(&mut weights)?;
//!             world.close()?;
//!             Ok(weights)
//!         })
//!     })
//!     .collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().unwrap().unwrap(), [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]);
//! }
//! ```

mod engine;
mod error;
mod group;
mod host_list;
mod launch;
mod layout;
mod liveness;
mod reduce;
mod rendezvous;
mod watchdog;
mod wire;
mod world;

pub use error::{Error, Fault, Result};
pub use group::{Group, Pending};
pub use launch::{Address, Launch, Launcher};
pub use layout::{Coordinates, Groups, RankLayout};
pub use reduce::Reduce;
pub use rendezvous::host_name;
#[doc(hidden)]
pub use wire::check_messages;
pub use world::{Buffers, OPERATION_LIMIT, RENDEZVOUS_LIMIT, World, WorldOptions};
