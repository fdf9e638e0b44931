//! What the ranks of a run tell each other beside tensors: a few numbers, some text, whether all is
//! well.

use moh_comm::{Group, Reduce};
use moh_kernels::{Backend, Memory, Scalar};

use crate::Error;

/// Numbers of one message.
const NUMBERS: usize = 4;
/// Tag of messages of text.
const TEXT: u32 = 1;

/// The ranks of a run.
pub struct Ranks<B: Backend> {
    backend: B,
    group: Group,
    numbers: B::Buffer<f64>,
}

/// Where numbers are exchanged.
pub(crate) fn numbers<M: Memory>(memory: &M) -> Result<M::Buffer<f64>, Error> {
    Ok(memory.allocate(NUMBERS)?)
}

impl<B: Backend> Ranks<B> {
    /// The ranks of `group`, whose buffers `backend` holds.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(backend: B, group: Group) -> Result<Self, Error> {
        let numbers = numbers(&backend)?;
        Ok(Ranks { backend, group, numbers })
    }

    /// All of them.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Whether this is the rank that writes what there is one of.
    pub fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// The sums of the ranks' numbers.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn sum<const N: usize>(&mut self, numbers: [f64; N]) -> Result<[f64; N], Error> {
        self.reduce(numbers, Reduce::Sum)
    }

    /// The largest of the ranks' numbers, each for itself.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn largest<const N: usize>(&mut self, numbers: [f64; N]) -> Result<[f64; N], Error> {
        self.reduce(numbers, Reduce::Max)
    }

    fn reduce<const N: usize>(
        &mut self,
        mut numbers: [f64; N],
        reduce: Reduce,
    ) -> Result<[f64; N], Error> {
        const { assert!(N <= NUMBERS, "more numbers than one message holds") };
        if self.group.size() > 1 {
            let part = B::view_mut(&mut self.numbers, 0..N);
            self.backend.upload(&numbers, part)?;
            self.group.all_reduce::<B, f64>(B::view_mut(&mut self.numbers, 0..N), reduce)?;
            self.backend.download(B::view(&self.numbers, 0..N), &mut numbers)?;
        }
        Ok(numbers)
    }

    /// Whether any rank says so.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn any(&mut self, flag: bool) -> Result<bool, Error> {
        Ok(self.largest([f64::from(u8::from(flag))])?[0] > 0.0)
    }

    /// Every rank's result if all are well. If some are not, the first of those returns its error,
    /// and the others [`Error::OtherRank`], so that all end together and one tells why.
    ///
    /// # Errors
    /// As said.
    pub fn agree<R>(&mut self, result: Result<R, Error>) -> Result<R, Error> {
        let rank = self.group.rank() as f64;
        // The largest of -rank, and the failing rank nearest to 0 is the largest.
        let mine = if result.is_ok() { f64::NEG_INFINITY } else { -rank };
        let [first] = self.largest([mine])?;
        if first == f64::NEG_INFINITY {
            return result;
        }
        match result {
            Err(error) if -first == rank => Err(error),
            _ => Err(Error::OtherRank { rank: -first as usize }),
        }
    }

    /// The first rank's result on all ranks, where it is a number; it alone runs `work`.
    ///
    /// # Errors
    /// What `work` reports, on the other ranks [`Error::OtherRank`].
    pub fn first(&mut self, work: impl FnOnce() -> Result<f64, Error>) -> Result<f64, Error> {
        let mut numbers = [0.0];
        self.first_does(|| {
            numbers = [work()?];
            Ok(())
        })?;
        if self.group.size() > 1 {
            self.backend.upload(&numbers, B::view_mut(&mut self.numbers, 0..1))?;
            self.group.broadcast::<B, f64>(B::view_mut(&mut self.numbers, 0..1), 0)?;
            self.backend.download(B::view(&self.numbers, 0..1), &mut numbers)?;
        }
        Ok(numbers[0])
    }

    /// The first rank alone runs `work`; the others wait for it.
    ///
    /// # Errors
    /// As [`Self::first`].
    pub fn first_does(&mut self, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let done = if self.is_first() { work() } else { Ok(()) };
        self.agree(done)
    }

    /// Every rank's text, in the order of the ranks, on the first rank; nothing on the others.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn gather(&mut self, text: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        let mut texts = Vec::new();
        if self.is_first() {
            texts.push(text);
            for rank in 1..self.group.size() {
                let mut length = [0f64];
                self.receive(rank, &mut length)?;
                // A text's own length, which f64 holds exactly.
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

    fn send<S: Scalar>(&self, numbers: &[S]) -> Result<(), Error> {
        let mut buffer = self.backend.allocate(numbers.len())?;
        let whole = 0..numbers.len();
        self.backend.upload(numbers, B::view_mut(&mut buffer, whole.clone()))?;
        Ok(self.group.send::<B, S>(B::view(&buffer, whole), 0, TEXT)?)
    }

    fn receive<S: Scalar>(&self, from: usize, numbers: &mut [S]) -> Result<(), Error> {
        let mut buffer = self.backend.allocate(numbers.len())?;
        let whole = 0..numbers.len();
        self.group.recv::<B, S>(B::view_mut(&mut buffer, whole.clone()), from, TEXT)?;
        Ok(self.backend.download(B::view(&buffer, whole), numbers)?)
    }
}

#[cfg(test)]
mod tests {
    use moh_comm::World;
    use moh_kernels::Cpu;

    use super::*;

    /// What every rank of `size` threads returns.
    fn on_ranks<R: Send + 'static>(
        size: usize,
        work: impl Fn(&mut Ranks<Cpu>) -> R + Clone + Send + 'static,
    ) -> Vec<R> {
        let threads: Vec<_> = World::threads(size)
            .into_iter()
            .map(|world| {
                let work = work.clone();
                std::thread::spawn(move || {
                    let found = work(&mut Ranks::new(Cpu, world.group().clone()).unwrap());
                    world.close().unwrap();
                    found
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn the_first_rank_that_fails_tells_why() {
        let found = on_ranks(4, |ranks| {
            let rank = ranks.group().rank();
            let result = if rank == 1 || rank == 3 {
                Err(Error::Locked { path: rank.to_string().into() })
            } else {
                Ok(rank)
            };
            match ranks.agree(result) {
                Err(Error::Locked { path }) => format!("locked {}", path.display()),
                Err(Error::OtherRank { rank }) => format!("because of {rank}"),
                other => format!("{other:?}"),
            }
        });
        assert_eq!(found, ["because of 1", "locked 1", "because of 1", "because of 1"]);
        assert_eq!(on_ranks(3, |ranks| ranks.agree(Ok(7)).unwrap()), [7; 3]);
    }

    #[test]
    fn numbers_and_texts_are_exchanged() {
        let found = on_ranks(3, |ranks| {
            let rank = ranks.group().rank();
            let sum = ranks.sum([rank as f64, 1.0]).unwrap();
            let texts = ranks.gather(vec![b'a' + rank as u8; rank]).unwrap();
            let first = ranks.first(|| Ok(5.5)).unwrap();
            (sum, texts, first, ranks.any(rank == 2).unwrap(), ranks.any(false).unwrap())
        });
        let gathered = vec![b"".to_vec(), b"b".to_vec(), b"cc".to_vec()];
        for (rank, (sum, texts, first, any, none)) in found.into_iter().enumerate() {
            assert_eq!((sum, first, any, none), ([3.0, 3.0], 5.5, true, false));
            assert_eq!(texts, if rank == 0 { gathered.clone() } else { Vec::new() });
        }
    }
}
