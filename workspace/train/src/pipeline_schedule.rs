//! The order in which a stage of a pipeline takes forward and backward passes.
//!
//! One forward, one backward: a stage goes ahead by some forward passes and then alternates, so that it
//! keeps few micro-batches (PipeDream-Flush; arXiv 2104.04473, section 2.2.1). With virtual stages it has
//! several chunks of blocks and takes them in turns of as many micro-batches as there are stages, which
//! divides the time that the pipeline takes to fill and to drain (section 2.2.2). A last turn may be of
//! fewer micro-batches.

use std::ops::Range;

/// A pass of one micro-batch through one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pass {
    /// Whether it is a forward pass.
    pub forward: bool,
    /// The chunk of the stage's blocks.
    pub chunk: usize,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
}

/// Where a stage stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stage {
    /// Its number.
    pub number: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Chunks of each stage.
    pub chunks: usize,
}

impl Stage {
    /// The passes of a step of `micro_batches` micro-batches, in order.
    pub fn passes(&self, micro_batches: usize) -> Vec<Pass> {
        let forward = self.turns(micro_batches, true);
        let backward = self.turns(micro_batches, false);
        let ahead = self.ahead().min(forward.len());
        let mut passes: Vec<Pass> = forward[..ahead].to_vec();
        for (at, backward) in backward.into_iter().enumerate() {
            passes.extend(forward.get(ahead + at));
            passes.push(backward);
        }
        passes
    }

    /// Forward passes before the first backward pass.
    fn ahead(&self) -> usize {
        let after = self.stages - 1 - self.number;
        match self.chunks {
            1 => after,
            chunks => 2 * after + (chunks - 1) * self.stages,
        }
    }

    /// All passes in one direction.
    fn turns(&self, micro_batches: usize, forward: bool) -> Vec<Pass> {
        let groups = (0..micro_batches).step_by(self.stages);
        let group = |start: usize| start..micro_batches.min(start + self.stages);
        groups.flat_map(|start| self.turns_of(group(start), forward)).collect()
    }

    /// Those of some micro-batches, which take one chunk after the other.
    fn turns_of(&self, group: Range<usize>, forward: bool) -> impl Iterator<Item = Pass> {
        let last = self.chunks - 1;
        (0..self.chunks).flat_map(move |turn| {
            let chunk = if forward { turn } else { last - turn };
            group.clone().map(move |micro_batch| Pass { forward, chunk, micro_batch })
        })
    }

    /// For each chunk, how many micro-batches it keeps at the same time at the most; 1 without any.
    pub fn under_way(&self, passes: &[Pass]) -> Vec<usize> {
        let mut now = vec![0usize; self.chunks];
        let mut most = vec![1; self.chunks];
        for pass in passes {
            let count = &mut now[pass.chunk];
            match pass.forward {
                true => *count += 1,
                false => *count -= 1,
            }
            most[pass.chunk] = most[pass.chunk].max(*count);
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(number: usize, stages: usize, chunks: usize) -> Stage {
        Stage { number, stages, chunks }
    }

    /// Passes as letters and micro-batches, chunks by case and prime.
    fn text(passes: &[Pass]) -> String {
        let letter = |pass: &Pass| {
            let name = if pass.forward { "F" } else { "B" };
            format!("{name}{}{}", pass.micro_batch, "'".repeat(pass.chunk))
        };
        passes.iter().map(letter).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_stage_goes_ahead_by_the_stages_after_it() {
        assert_eq!(text(&stage(0, 3, 1).passes(4)), "F0 F1 F2 B0 F3 B1 B2 B3");
        assert_eq!(text(&stage(2, 3, 1).passes(2)), "F0 B0 F1 B1");
        assert_eq!(text(&stage(0, 3, 1).passes(1)), "F0 B0");
        assert!(stage(1, 3, 1).passes(0).is_empty());
        let passes = stage(0, 3, 1).passes(9);
        assert_eq!(stage(0, 3, 1).under_way(&passes), [3]);
    }

    #[test]
    fn virtual_stages_take_turns_of_as_many_micro_batches_as_stages() {
        let passes = stage(1, 2, 2).passes(4);
        assert_eq!(text(&passes), "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3");
        assert_eq!(stage(1, 2, 2).under_way(&passes), [3, 1]);
    }

    /// How long all stages take when every pass takes as long; none where they wait for each other
    /// forever.
    fn time(stages: usize, chunks: usize, micro_batches: usize) -> Option<usize> {
        let orders: Vec<Vec<Pass>> =
            (0..stages).map(|number| stage(number, stages, chunks).passes(micro_batches)).collect();
        let mut done: Vec<(usize, Pass)> = Vec::new();
        let mut next = vec![0; stages];
        for now in 0.. {
            let mut started = Vec::new();
            for number in 0..stages {
                let Some(&pass) = orders[number].get(next[number]) else { continue };
                let place = pass.chunk * stages + number;
                let needs = match pass.forward {
                    true => place.checked_sub(1),
                    false => Some(place + 1).filter(|&place| place < chunks * stages),
                };
                let ready = needs.is_none_or(|place| {
                    let from = Pass { chunk: place / stages, ..pass };
                    done.contains(&(place % stages, from))
                });
                if ready {
                    started.push((number, pass));
                }
            }
            for &(number, _) in &started {
                next[number] += 1;
            }
            if started.is_empty() {
                let finished = next.iter().zip(&orders).all(|(&next, order)| next == order.len());
                return finished.then_some(now);
            }
            done.extend(started);
        }
        None
    }

    #[test]
    fn no_stages_wait_for_each_other_forever() {
        for stages in 2..6 {
            for chunks in 1..4 {
                for micro_batches in 0..14 {
                    let time = time(stages, chunks, micro_batches);
                    assert!(time.is_some(), "{stages} x {chunks}, {micro_batches} micro-batches");
                }
            }
        }
    }

    #[test]
    fn virtual_stages_divide_the_time_that_a_pipeline_waits() {
        // Each stage is busy for 2 m v passes; without virtual stages it waits for 2 (p - 1).
        assert_eq!(time(4, 1, 8), Some(2 * 8 + 2 * 3));
        assert_eq!(time(4, 2, 8), Some(2 * 8 * 2 + 2 * 3));
        assert_eq!(time(4, 3, 8), Some(2 * 8 * 3 + 2 * 3));
    }

    #[test]
    fn every_pass_is_taken_once_and_forward_first() {
        for (stages, chunks, micro_batches) in [(3, 1, 7), (3, 2, 7), (4, 3, 2), (2, 2, 5)] {
            for number in 0..stages {
                let passes = stage(number, stages, chunks).passes(micro_batches);
                assert_eq!(passes.len(), 2 * chunks * micro_batches);
                for (at, pass) in passes.iter().enumerate() {
                    assert_eq!(passes.iter().filter(|other| *other == pass).count(), 1);
                    let forward = Pass { forward: true, ..*pass };
                    assert!(passes[..=at].contains(&forward));
                }
            }
        }
    }
}
