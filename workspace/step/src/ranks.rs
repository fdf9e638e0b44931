//! Small exchanges between the ranks of a run: a few values, text, and whether all ranks succeeded.

use moh_comm::{Group, Reduce};
use moh_kernels::{Backend, Memory, Scalar};

use crate::{Error, Result};

const MAX_VALUES: usize = 5;
const TEXT: u32 = 1;

/// The ranks of a run.
///
/// ```
/// use moh_comm::World;
/// use moh_kernels::Cpu;
/// use moh_step::{Error, Ranks};
///
/// // Two ranks as threads: one of them has failed, and both end with an error.
/// let ranks = World::threads(2).into_iter().map(|world| {
///     std::thread::spawn(move || {
///         let mut ranks = Ranks::new(Cpu, world.group().clone())?;
///         assert_eq!(ranks.sum([1.0, world.rank() as f64])?, [2.0, 1.0]);
///         ranks.agree(if ranks.is_first() { Err(Error::samples("no such file")) } else { Ok(7) })
///     })
/// });
/// let ranks: Vec<_> = ranks.collect();
/// for rank in ranks {
///     assert!(rank.join().unwrap().is_err());
/// }
/// ```
pub struct Ranks<B: Backend> {
    backend: B,
    group: Group,
    values: B::Buffer<f64>,
}

/// Returns the buffer of the exchanged values: as many f64 as one message can have.
pub fn values<M: Memory>(memory: &M) -> Result<M::Buffer<f64>> {
    Ok(memory.allocate(MAX_VALUES)?)
}

impl<B: Backend> Ranks<B> {
    /// Returns the ranks of `group`, with buffers on `backend`.
    pub fn new(backend: B, group: Group) -> Result<Self> {
        let values = values(&backend)?;
        Ok(Ranks { backend, group, values })
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns whether this rank writes the files that exist once per run.
    pub fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// Returns the sums of the values over the ranks.
    pub fn sum<const N: usize>(&mut self, values: [f64; N]) -> Result<[f64; N]> {
        self.reduce(values, Reduce::Sum)
    }

    /// Replaces the values by their sums over the ranks; each rank has as many values.
    pub fn sum_all(&mut self, values: &mut [f64]) -> Result<()> {
        if self.group.size() > 1 && !values.is_empty() {
            let mut buffer = self.backend.allocate::<f64>(values.len())?;
            self.backend.upload(values, B::whole_mut(&mut buffer))?;
            self.group.all_reduce::<B, f64>(B::whole_mut(&mut buffer), Reduce::Sum)?;
            self.backend.download(B::whole(&buffer), values)?;
        }
        Ok(())
    }

    /// Returns the elementwise maximum of the values over the ranks.
    pub fn largest<const N: usize>(&mut self, values: [f64; N]) -> Result<[f64; N]> {
        self.reduce(values, Reduce::Max)
    }

    fn reduce<const N: usize>(&mut self, mut values: [f64; N], reduce: Reduce) -> Result<[f64; N]> {
        const { assert!(N <= MAX_VALUES, "more values than one message holds") };
        if self.group.size() > 1 {
            let view = B::view_mut(&mut self.values, 0..N);
            self.backend.upload(&values, view)?;
            self.group.all_reduce::<B, f64>(B::view_mut(&mut self.values, 0..N), reduce)?;
            self.backend.download(B::view(&self.values, 0..N), &mut values)?;
        }
        Ok(values)
    }

    /// Returns for each flag whether it is set on any rank.
    pub fn any_of<const N: usize>(&mut self, flags: [bool; N]) -> Result<[bool; N]> {
        Ok(self.largest(flags.map(f64::from))?.map(|flag| flag > 0.0))
    }

    /// Returns whether the flag is set on any rank.
    pub fn any(&mut self, flag: bool) -> Result<bool> {
        let [any] = self.any_of([flag])?;
        Ok(any)
    }

    /// Returns this rank's result if all ranks succeed. Otherwise the first failed rank returns its error, and the
    /// other ranks return [`Error::OtherRank`]. So all ranks end together, and one rank reports the cause.
    pub fn agree<R, E: From<Error>>(&mut self, result: Result<R, E>) -> Result<R, E> {
        let rank = self.group.rank() as f64;
        // The maximum of -rank over the failed ranks is the rank nearest to 0.
        let mine = if result.is_ok() { f64::NEG_INFINITY } else { -rank };
        let [first] = self.largest([mine])?;
        if first == f64::NEG_INFINITY {
            return result;
        }
        match result {
            Err(error) if -first == rank => Err(error),
            _ => Err(Error::OtherRank { rank: -first as usize }.into()),
        }
    }

    /// Runs `work` only on the first rank, and returns its result, a number, on all ranks.
    pub fn rank0_computes<E: From<Error>>(
        &mut self,
        work: impl FnOnce() -> Result<f64, E>,
    ) -> Result<f64, E> {
        let mut values = [self.on_rank0(work)?.unwrap_or(0.0)];
        if self.group.size() > 1 {
            self.broadcast(&mut values, 0)?;
        }
        Ok(values[0])
    }

    /// Runs `condition` only on the first rank, and returns its result on all ranks.
    pub fn rank0_decides<E: From<Error>>(
        &mut self,
        condition: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        Ok(self.rank0_computes(|| condition().map(f64::from))? > 0.0)
    }

    /// Runs `work` only on the first rank, which gets its result. The other ranks wait.
    pub fn on_rank0<R, E: From<Error>>(
        &mut self,
        work: impl FnOnce() -> Result<R, E>,
    ) -> Result<Option<R>, E> {
        let done = self.is_first().then(work).transpose();
        self.agree(done)
    }

    /// Returns every rank's text in rank order on the first rank, and an empty list on the other ranks.
    pub fn gather(&mut self, text: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let mut texts = Vec::new();
        if self.is_first() {
            texts.push(text);
            for rank in 1..self.group.size() {
                let mut length = [0f64];
                self.receive(rank, &mut length)?;
                // The length of that rank's text, which f64 represents exactly.
                let mut text = vec![0; length[0] as usize];
                self.receive(rank, &mut text)?;
                texts.push(text);
            }
        } else {
            self.send(&[text.len() as f64])?;
            self.send(&text)?;
        }
        Ok(texts)
    }

    /// Returns the text of the first rank that has a text, on all ranks.
    pub fn first_that_has(&mut self, text: Option<Vec<u8>>) -> Result<Option<Vec<u8>>> {
        let rank = self.group.rank() as f64;
        let [first] = self.largest([if text.is_some() { -rank } else { f64::NEG_INFINITY }])?;
        if first == f64::NEG_INFINITY || self.group.size() == 1 {
            return Ok(text);
        }
        let (root, mut text) = (-first as usize, text.unwrap_or_default());
        let mut length = [text.len() as f64];
        self.broadcast(&mut length, root)?;
        // The length of the root's text, which f64 represents exactly.
        text.resize(length[0] as usize, 0);
        self.broadcast(&mut text, root)?;
        Ok(Some(text))
    }

    fn broadcast<S: Scalar>(&self, values: &mut [S], root: usize) -> Result<()> {
        let mut buffer = self.backend.allocate(values.len())?;
        self.backend.upload(values, B::whole_mut(&mut buffer))?;
        self.group.broadcast::<B, S>(B::whole_mut(&mut buffer), root)?;
        Ok(self.backend.download(B::whole(&buffer), values)?)
    }

    fn send<S: Scalar>(&self, values: &[S]) -> Result<()> {
        let mut buffer = self.backend.allocate(values.len())?;
        self.backend.upload(values, B::whole_mut(&mut buffer))?;
        Ok(self.group.send::<B, S>(B::whole(&buffer), 0, TEXT)?)
    }

    fn receive<S: Scalar>(&self, from: usize, values: &mut [S]) -> Result<()> {
        let mut buffer = self.backend.allocate(values.len())?;
        self.group.recv::<B, S>(B::whole_mut(&mut buffer), from, TEXT)?;
        Ok(self.backend.download(B::whole(&buffer), values)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moh_kernels::Cpu;

    fn on_ranks<R: Send>(size: usize, work: impl Fn(&mut Ranks<Cpu>) -> R + Sync) -> Vec<R> {
        moh_testkit::ranks::on_ranks(size, |world| {
            work(&mut Ranks::new(Cpu, world.group().clone()).unwrap())
        })
    }

    #[test]
    fn the_first_rank_that_fails_tells_why() {
        let found = on_ranks(4, |ranks| {
            let rank = ranks.group().rank();
            let failed = rank == 1 || rank == 3;
            let result = if failed { Err(Error::samples(rank.to_string())) } else { Ok(rank) };
            match ranks.agree(result) {
                Err(Error::Samples(error)) => format!("failed {error}"),
                Err(Error::OtherRank { rank }) => format!("because of {rank}"),
                other => format!("{other:?}"),
            }
        });
        assert_eq!(found, ["because of 1", "failed 1", "because of 1", "because of 1"]);
        assert_eq!(on_ranks(3, |ranks| ranks.agree::<_, Error>(Ok(7)).unwrap()), [7; 3]);
    }

    #[test]
    fn numbers_and_texts_are_exchanged() {
        let found = on_ranks(3, |ranks| {
            let rank = ranks.group().rank();
            let sum = ranks.sum([rank as f64, 1.0]).unwrap();
            let texts = ranks.gather(vec![b'a' + rank as u8; rank]).unwrap();
            let first = ranks.rank0_computes::<Error>(|| Ok(5.5)).unwrap();
            let text = |has: bool| has.then(|| vec![b'x'; rank]);
            assert_eq!(ranks.first_that_has(text(rank > 0)).unwrap(), Some(vec![b'x']));
            assert_eq!(ranks.first_that_has(text(false)).unwrap(), None);
            assert_eq!(ranks.any_of([rank == 1, false, true]).unwrap(), [true, false, true]);
            assert!(ranks.rank0_decides::<Error>(|| Ok(rank == 0)).unwrap());
            assert!(!ranks.rank0_decides::<Error>(|| Ok(rank > 0)).unwrap());
            (sum, texts, first, ranks.any(rank == 2).unwrap(), ranks.any(false).unwrap())
        });
        let gathered = vec![b"".to_vec(), b"b".to_vec(), b"cc".to_vec()];
        for (rank, (sum, texts, first, any, none)) in found.into_iter().enumerate() {
            assert_eq!((sum, first, any, none), ([3.0, 3.0], 5.5, true, false));
            assert_eq!(texts, if rank == 0 { gathered.clone() } else { Vec::new() });
        }
    }
}
