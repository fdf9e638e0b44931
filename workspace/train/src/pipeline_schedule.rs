//! The order in which a stage of a pipeline takes forward and backward passes.
//!
//! One forward, one backward: a stage goes ahead by some forward passes and then alternates, so that it
//! keeps few micro-batches (PipeDream-Flush; arXiv 2104.04473, section 2.2.1). With virtual stages it has
//! several chunks of blocks and takes them in turns of as many micro-batches as there are stages, which
//! divides the time that the pipeline takes to fill and to drain (section 2.2.2). Where they are no
//! multiple of the stages some turns are of a few more, so that any number keeps the stages busy.

use std::ops::Range;

use moh_model::Slots;

/// A pass of one micro-batch through one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pass {
    /// Whether it is a forward pass.
    pub forward: bool,
    /// The chunk of the stage's blocks.
    pub chunk: usize,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// Where what it keeps is between its two passes: the first slot that is free.
    pub slot: usize,
    /// Where the micro-batch's tokens are from its first pass to its last one: the first slot that is
    /// free.
    pub tokens: usize,
}

/// A pass's slot among those that are taken, each by a key from the forward pass to the backward pass.
fn assign<K: PartialEq>(taken: &mut Vec<Option<K>>, key: K, forward: bool) -> usize {
    let key = Some(key);
    let wanted = if forward { &None } else { &key };
    let found = taken.iter().position(|slot| slot == wanted);
    let slot = found.unwrap_or(taken.len());
    if found.is_none() {
        taken.push(None);
    }
    taken[slot] = key.filter(|_| forward);
    slot
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
        let ahead = self.ahead(micro_batches).min(forward.len());
        let mut passes: Vec<Pass> = forward[..ahead].to_vec();
        for (at, backward) in backward.into_iter().enumerate() {
            passes.extend(forward.get(ahead + at));
            passes.push(backward);
        }
        self.assign_slots(&mut passes);
        passes
    }

    fn assign_slots(&self, passes: &mut [Pass]) {
        let (mut kept, mut tokens) = (Vec::new(), Vec::new());
        for pass in passes {
            pass.slot = assign(&mut kept, (pass.chunk, pass.micro_batch), pass.forward);
            // The passes of a micro-batch begin and end with the first chunk.
            pass.tokens = match pass.chunk {
                0 => assign(&mut tokens, pass.micro_batch, pass.forward),
                _ => tokens.iter().position(|&slot| slot == Some(pass.micro_batch)).unwrap_or(0),
            };
        }
    }

    /// Forward passes before the first backward pass.
    fn ahead(&self, micro_batches: usize) -> usize {
        let after = self.stages - 1 - self.number;
        match self.chunks {
            1 => after,
            chunks => (chunks - 1)
                .saturating_mul(self.largest_turn(micro_batches))
                .saturating_add(2 * after),
        }
    }

    fn largest_turn(&self, micro_batches: usize) -> usize {
        micro_batches.div_ceil(self.rounds(micro_batches))
    }

    /// Room for the passes of a step; for one at least.
    pub fn slots(&self, micro_batches: usize) -> Slots {
        let passes = self.under_way(micro_batches);
        let tokens = match self.chunks {
            1 => passes,
            // Those of a round, and of the next one's first turn.
            _ => self.largest_turn(micro_batches).saturating_mul(2).min(micro_batches),
        };
        Slots { micro_batches: tokens.max(1), passes: passes.max(1) }
    }

    /// Passes that wait for their backward passes at a time, at the most.
    pub fn under_way(&self, micro_batches: usize) -> usize {
        let all = micro_batches.saturating_mul(self.chunks);
        self.ahead(micro_batches).saturating_add(1).min(all)
    }

    /// Messages to other stages that are not received yet, at the most.
    ///
    /// The output of a pass is received before its backward pass, so those not received are of passes under
    /// way here; and a gradient that is not received is of a pass under way at the stage before.
    pub fn messages(&self, micro_batches: usize) -> usize {
        let before = (self.number + self.stages - 1) % self.stages;
        let there = Stage { number: before, ..*self }.under_way(micro_batches);
        match (self.stages, self.chunks) {
            (1, _) => 0,
            // A micro-batch whose output is not received is under way at the stage before as well, and
            // sends no gradient yet.
            (_, 1) if self.number > 0 => there,
            (_, 1) => self.under_way(micro_batches),
            _ => self.under_way(micro_batches).saturating_add(there),
        }
    }

    /// Rounds in which every chunk has a turn, of at least as many micro-batches as there are stages: with
    /// fewer, stages would wait for each other.
    fn rounds(&self, micro_batches: usize) -> usize {
        (micro_batches / self.stages).max(1)
    }

    /// All passes in one direction.
    fn turns(&self, micro_batches: usize, forward: bool) -> Vec<Pass> {
        let count = self.rounds(micro_batches);
        let start = |round: usize| round * micro_batches / count;
        let rounds = (0..count).map(|round| start(round)..start(round + 1));
        rounds.flat_map(|round| self.turns_of(round, forward)).collect()
    }

    /// Those of some micro-batches, which take one chunk after the other.
    fn turns_of(&self, round: Range<usize>, forward: bool) -> impl Iterator<Item = Pass> {
        let last = self.chunks - 1;
        (0..self.chunks).flat_map(move |turn| {
            let chunk = if forward { turn } else { last - turn };
            round.clone().map(move |micro_batch| Pass {
                forward,
                chunk,
                micro_batch,
                slot: 0,
                tokens: 0,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(number: usize, stages: usize, chunks: usize) -> Stage {
        Stage { number, stages, chunks }
    }

    /// Slots that the passes of a step take.
    fn slots(passes: &[Pass]) -> usize {
        passes.iter().map(|pass| pass.slot + 1).max().unwrap_or(0)
    }

    /// Slots that the tokens of a step's micro-batches take.
    fn token_slots(passes: &[Pass]) -> usize {
        passes.iter().map(|pass| pass.tokens + 1).max().unwrap_or(0)
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
        assert_eq!(slots(&passes), 3);
        assert_eq!(stage(0, 3, 1).slots(0), Slots { micro_batches: 1, passes: 1 });
    }

    #[test]
    fn virtual_stages_take_turns_of_as_many_micro_batches_as_stages() {
        let passes = stage(1, 2, 2).passes(4);
        assert_eq!(text(&passes), "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3");
        assert_eq!(slots(&passes), 3);
        // As many as the passes that a stage goes ahead by, and one more.
        let passes = stage(0, 8, 4).passes(64);
        assert_eq!(slots(&passes), 2 * 7 + 3 * 8 + 1);
        // Two turns of eight micro-batches.
        assert_eq!(token_slots(&passes), 16);
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
                let own = |(by, done): &(usize, Pass)| {
                    *by == number && {
                        done.forward
                            && (done.chunk, done.micro_batch) == (pass.chunk, pass.micro_batch)
                    }
                };
                let kept = pass.forward || done.iter().any(own);
                let ready = kept
                    && needs.is_none_or(|place| {
                        let from = |(number, done): &(usize, Pass)| {
                            (*number, done.chunk) == (place % stages, place / stages)
                                && (done.forward, done.micro_batch)
                                    == (pass.forward, pass.micro_batch)
                        };
                        done.iter().any(from)
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
    fn a_pipeline_waits_for_no_longer_than_it_takes_to_fill_and_drain() {
        for stages in 2..6 {
            for chunks in 1..4 {
                for micro_batches in stages..14 {
                    // A stage is busy for 2 m v passes, and waits for 2 (p - 1) whatever the chunks.
                    let least = 2 * micro_batches * chunks + 2 * (stages - 1);
                    assert_eq!(time(stages, chunks, micro_batches), Some(least));
                }
            }
        }
    }

    #[test]
    fn there_is_room_for_every_pass_and_its_tokens() {
        for (stages, chunks) in [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (2, 3), (4, 3), (5, 4)] {
            for (number, micro_batches) in (0..stages).flat_map(|n| (1..24).map(move |m| (n, m))) {
                let stage = stage(number, stages, chunks);
                let (passes, room) = (stage.passes(micro_batches), stage.slots(micro_batches));
                assert_eq!(slots(&passes), room.passes);
                let tokens = token_slots(&passes);
                assert!(tokens <= room.micro_batches && room.micro_batches <= micro_batches);
                // Two stages of a pipeline with virtual stages leave the most room.
                assert!(chunks > 1 || tokens == room.micro_batches);
            }
        }
    }

    #[test]
    fn messages_are_no_more_than_passes_under_way() {
        let messages = |stages, chunks, micro_batches| {
            let of = |number| stage(number, stages, chunks).messages(micro_batches);
            (0..stages).map(of).collect::<Vec<_>>()
        };
        assert_eq!(messages(1, 1, 9), [0]);
        assert_eq!(messages(4, 1, 9), [4, 4, 3, 2]);
        assert_eq!(messages(4, 1, 2), [2, 2, 2, 2]);
        assert_eq!(messages(4, 1, 0), [0; 4]);
        // 5 passes under way on the first stage and 3 on the other.
        assert_eq!(messages(2, 2, 4), [8, 8]);
    }

    #[test]
    fn every_pass_is_taken_once_and_forward_first() {
        for (stages, chunks, micro_batches) in [(3, 1, 7), (3, 2, 7), (4, 3, 2), (2, 2, 5)] {
            for number in 0..stages {
                let stage = stage(number, stages, chunks);
                let passes = stage.passes(micro_batches);
                assert_eq!(passes.len(), 2 * chunks * micro_batches);
                assert_eq!(slots(&passes), stage.under_way(micro_batches));
                for (at, pass) in passes.iter().enumerate() {
                    assert_eq!(passes.iter().filter(|other| *other == pass).count(), 1);
                    let forward = Pass { forward: true, ..*pass };
                    let start = passes.iter().position(|other| *other == forward).unwrap();
                    assert!(start <= at);
                    // Nothing else takes its slot in between, and no other micro-batch that of its tokens.
                    let others = &passes[start + usize::from(start < at)..at];
                    assert!(pass.forward || others.iter().all(|other| { other.slot != pass.slot }));
                    assert!(others.iter().all(|other| {
                        (other.tokens == pass.tokens) == (other.micro_batch == pass.micro_batch)
                    }));
                }
            }
        }
    }
}
