//! The order of a pipeline stage's forward and backward passes.
//!
//! One forward, one backward (1F1B): a stage runs some warm-up forward passes and then alternates, so that few
//! micro-batches have saved activations (PipeDream-Flush; arXiv 2104.04473, section 2.2.1). With virtual stages a stage
//! has several chunks of layers. It runs each chunk for as many micro-batches as there are stages before it moves to
//! the next chunk. This divides the pipeline bubble by the number of chunks (section 2.2.2). If the micro-batches are
//! not a multiple of the stages, some of these groups are larger, so that any number keeps the stages busy.

use std::ops::Range;

use moh_model::Slots;

/// A pass of one micro-batch through one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPass {
    /// Whether this is a forward pass.
    pub forward: bool,
    /// The chunk of the stage's layers.
    pub chunk: usize,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// The slot of the pass's saved activations from the forward to the backward pass: the first free slot.
    pub slot: usize,
    /// The slot of the micro-batch's tokens from its first to its last pass: the first free slot.
    pub tokens: usize,
}

/// Assigns a slot to a pass: a forward pass gets the first free slot, a backward pass frees the slot of its key.
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

/// A stage's position in the pipeline.
///
/// ```
/// use moh_step::pipeline_schedule::PipelineStage;
///
/// // The first of two stages runs one forward pass ahead, then one backward pass for each forward pass.
/// let stage = PipelineStage { number: 0, stages: 2, chunks: 1 };
/// let passes = stage.passes(3);
/// let order: String = passes.iter().map(|pass| if pass.forward { 'F' } else { 'B' }).collect();
/// assert_eq!(order, "FFBFBB");
/// assert_eq!(stage.in_flight(3), 2);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineStage {
    /// The stage's number.
    pub number: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Chunks of each stage.
    pub chunks: usize,
}

impl PipelineStage {
    /// Returns the passes of a step of `micro_batches` micro-batches, in order.
    pub fn passes(&self, micro_batches: usize) -> Vec<ChunkPass> {
        let forward = self.passes_in_direction(micro_batches, true);
        let backward = self.passes_in_direction(micro_batches, false);
        let ahead = self.ahead(micro_batches).min(forward.len());
        let mut passes: Vec<ChunkPass> = forward[..ahead].to_vec();
        for (i, backward) in backward.into_iter().enumerate() {
            passes.extend(forward.get(ahead + i));
            passes.push(backward);
        }
        self.assign_slots(&mut passes);
        passes
    }

    fn assign_slots(&self, passes: &mut [ChunkPass]) {
        let (mut activations, mut tokens) = (Vec::new(), Vec::new());
        for pass in passes {
            pass.slot = assign(&mut activations, (pass.chunk, pass.micro_batch), pass.forward);
            // A micro-batch's first and last pass are through the first chunk.
            pass.tokens = match pass.chunk {
                0 => assign(&mut tokens, pass.micro_batch, pass.forward),
                _ => tokens.iter().position(|&slot| slot == Some(pass.micro_batch)).unwrap_or(0),
            };
        }
    }

    /// Returns the number of warm-up forward passes before the first backward pass.
    fn ahead(&self, micro_batches: usize) -> usize {
        let after = self.stages - 1 - self.number;
        match self.chunks {
            1 => after,
            chunks => (chunks - 1)
                .saturating_mul(self.largest_group(micro_batches))
                .saturating_add(2 * after),
        }
    }

    fn largest_group(&self, micro_batches: usize) -> usize {
        micro_batches.div_ceil(self.rounds(micro_batches))
    }

    /// Returns the slots for the passes of a step, at least one of each.
    pub fn slots(&self, micro_batches: usize) -> Slots {
        let passes = self.in_flight(micro_batches);
        let tokens = match self.chunks {
            1 => passes,
            // The micro-batches of a round, and of the next round's first group.
            _ => self.largest_group(micro_batches).saturating_mul(2).min(micro_batches),
        };
        Slots { micro_batches: tokens.max(1), passes: passes.max(1) }
    }

    /// Returns the maximum number of passes in flight, from their forward to their backward pass.
    pub fn in_flight(&self, micro_batches: usize) -> usize {
        let all = micro_batches.saturating_mul(self.chunks);
        self.ahead(micro_batches).saturating_add(1).min(all)
    }

    /// Returns the maximum number of messages to other stages in flight.
    ///
    /// The output of a pass is received before its backward pass. So each output in flight belongs to a pass in flight
    /// on this stage. Each gradient in flight belongs to a pass in flight on the stage before.
    pub fn messages(&self, micro_batches: usize) -> usize {
        let before = (self.number + self.stages - 1) % self.stages;
        let there = PipelineStage { number: before, ..*self }.in_flight(micro_batches);
        match (self.stages, self.chunks) {
            (1, _) => 0,
            // A micro-batch with its output in flight is also in flight on the stage before, which has not been sent
            // its gradient.
            (_, 1) if self.number > 0 => there,
            (_, 1) => self.in_flight(micro_batches),
            _ => self.in_flight(micro_batches).saturating_add(there),
        }
    }

    /// Returns the maximum number of a teacher's outputs in flight in addition to `messages`. Each output
    /// belongs to a pass in flight on this stage. The pass's own output is received after the teacher's.
    pub fn teacher_messages(&self, micro_batches: usize) -> usize {
        let sends = self.stages > 1 && (self.chunks > 1 || self.number + 1 < self.stages);
        if sends { self.in_flight(micro_batches) } else { 0 }
    }

    /// Returns the number of rounds of all chunks. Each round has at least as many micro-batches as there are stages:
    /// with fewer, stages would wait for each other.
    fn rounds(&self, micro_batches: usize) -> usize {
        (micro_batches / self.stages).max(1)
    }

    fn passes_in_direction(&self, micro_batches: usize, forward: bool) -> Vec<ChunkPass> {
        let count = self.rounds(micro_batches);
        let start = |round: usize| round * micro_batches / count;
        let rounds = (0..count).map(|round| start(round)..start(round + 1));
        rounds.flat_map(|round| self.round_passes(round, forward)).collect()
    }

    fn round_passes(&self, round: Range<usize>, forward: bool) -> impl Iterator<Item = ChunkPass> {
        let last = self.chunks - 1;
        (0..self.chunks).flat_map(move |index| {
            let chunk = if forward { index } else { last - index };
            round.clone().map(move |micro_batch| ChunkPass {
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

    fn stage(number: usize, stages: usize, chunks: usize) -> PipelineStage {
        PipelineStage { number, stages, chunks }
    }

    fn slots(passes: &[ChunkPass]) -> usize {
        passes.iter().map(|pass| pass.slot + 1).max().unwrap_or(0)
    }

    /// Returns the number of slots for the tokens of a step's micro-batches.
    fn token_slots(passes: &[ChunkPass]) -> usize {
        passes.iter().map(|pass| pass.tokens + 1).max().unwrap_or(0)
    }

    /// Returns passes as letters and micro-batches, with a prime per chunk.
    fn text(passes: &[ChunkPass]) -> String {
        let letter = |pass: &ChunkPass| {
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
        // The warm-up passes of the stage, and one more pass.
        let passes = stage(0, 8, 4).passes(64);
        assert_eq!(slots(&passes), 2 * 7 + 3 * 8 + 1);
        // Two groups of eight micro-batches.
        assert_eq!(token_slots(&passes), 16);
    }

    /// Returns the duration of a step in passes of equal length; `None` if stages wait for each other
    /// forever.
    fn time(stages: usize, chunks: usize, micro_batches: usize) -> Option<usize> {
        let orders: Vec<Vec<ChunkPass>> =
            (0..stages).map(|number| stage(number, stages, chunks).passes(micro_batches)).collect();
        let mut done: Vec<(usize, ChunkPass)> = Vec::new();
        let mut next = vec![0; stages];
        for now in 0.. {
            let mut started = Vec::new();
            for number in 0..stages {
                let Some(&pass) = orders[number].get(next[number]) else { continue };
                let position = pass.chunk * stages + number;
                let needs = match pass.forward {
                    true => position.checked_sub(1),
                    false => Some(position + 1).filter(|&position| position < chunks * stages),
                };
                let own = |(by, done): &(usize, ChunkPass)| {
                    *by == number && {
                        done.forward
                            && (done.chunk, done.micro_batch) == (pass.chunk, pass.micro_batch)
                    }
                };
                let has_activations = pass.forward || done.iter().any(own);
                let ready = has_activations
                    && needs.is_none_or(|position| {
                        let from = |(number, done): &(usize, ChunkPass)| {
                            (*number, done.chunk) == (position % stages, position / stages)
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
    fn a_pipeline_waits_for_no_longer_than_it_takes_to_fill_and_drain() {
        for stages in 2..6 {
            for chunks in 1..4 {
                for micro_batches in 0..14 {
                    let time = time(stages, chunks, micro_batches);
                    assert!(time.is_some(), "{stages} x {chunks}, {micro_batches} micro-batches");
                    // A stage is busy for 2 m v passes, and waits for 2 (p - 1), for any number of
                    // chunks.
                    let least = 2 * micro_batches * chunks + 2 * (stages - 1);
                    assert!(micro_batches < stages || time == Some(least), "{time:?}, not {least}");
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
                // With virtual stages some slots may stay free, most of them with two stages.
                assert!(chunks > 1 || tokens == room.micro_batches);
            }
        }
    }

    #[test]
    fn messages_are_no_more_than_passes_in_flight() {
        let messages = |stages, chunks, micro_batches| {
            let of = |number| stage(number, stages, chunks).messages(micro_batches);
            (0..stages).map(of).collect::<Vec<_>>()
        };
        assert_eq!(messages(1, 1, 9), [0]);
        assert_eq!(messages(4, 1, 9), [4, 4, 3, 2]);
        assert_eq!(messages(4, 1, 2), [2, 2, 2, 2]);
        assert_eq!(messages(4, 1, 0), [0; 4]);
        // 5 passes are in flight on the first stage, and 3 on the other stage.
        assert_eq!(messages(2, 2, 4), [8, 8]);
        let of_teacher = |stages, chunks| {
            let of = |number| stage(number, stages, chunks).teacher_messages(9);
            (0..stages).map(of).collect::<Vec<_>>()
        };
        assert_eq!(of_teacher(1, 1), [0]);
        assert_eq!(of_teacher(4, 1), [4, 3, 2, 0]);
        assert_eq!(of_teacher(2, 2), [6, 4]);
    }

    #[test]
    fn every_pass_is_taken_once_and_forward_first() {
        for (stages, chunks, micro_batches) in [(3, 1, 7), (3, 2, 7), (4, 3, 2), (2, 2, 5)] {
            for number in 0..stages {
                let stage = stage(number, stages, chunks);
                let passes = stage.passes(micro_batches);
                assert_eq!(passes.len(), 2 * chunks * micro_batches);
                assert_eq!(slots(&passes), stage.in_flight(micro_batches));
                for (i, pass) in passes.iter().enumerate() {
                    assert_eq!(passes.iter().filter(|other| *other == pass).count(), 1);
                    let forward = ChunkPass { forward: true, ..*pass };
                    let start = passes.iter().position(|other| *other == forward).unwrap();
                    assert!(start <= i);
                    // Until its backward pass, no other pass has its slot, and no other micro-batch has its tokens'
                    // slot.
                    let others = &passes[start + usize::from(start < i)..i];
                    assert!(pass.forward || others.iter().all(|other| { other.slot != pass.slot }));
                    assert!(others.iter().all(|other| {
                        (other.tokens == pass.tokens) == (other.micro_batch == pass.micro_batch)
                    }));
                }
            }
        }
    }
}
