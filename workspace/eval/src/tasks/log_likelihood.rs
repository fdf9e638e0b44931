//! The log-likelihood of continuations, in batches of similar length.
//!
//! Requests are sorted by length, longest first, and padded on the right, which no token of a
//! causal model sees. Requests of equal input, such as choices of one token, share a row of the
//! batch. The head computes the rows of continuations only.

use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::{Backend, Element};
use moh_model::{Activations, Model, PassShape, Recompute, StepSums};
use rayon::prelude::*;

use super::Request;
use crate::Error;

/// Maximum tokens of a pass; longer requests are computed one at a time.
const BATCH_TOKENS: usize = 4096;
/// Lengths are rounded up to a multiple of this, so that few different buffers are allocated.
const LENGTH_STEP: usize = 16;
/// Maximum logits on the host at once.
const MAX_LOGITS: usize = 1 << 25;

/// How likely a continuation is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogLikelihood {
    /// The sum of its tokens' log-probabilities, in nats.
    pub sum: f64,
    /// Whether each of its tokens is the most likely one.
    pub is_greedy: bool,
}

impl LogLikelihood {
    /// Of no token.
    const CERTAIN: LogLikelihood = LogLikelihood { sum: 0.0, is_greedy: true };
}

/// The log-likelihoods of the continuations of `requests`, in their order. `progress` receives the
/// number of requests done and their total.
///
/// # Errors
/// Fails if a request is longer than the model's positions, or if the device fails or is out of
/// memory.
pub fn log_likelihoods<B: Backend + Clone, T: Element>(
    model: &mut Model<B, T>,
    requests: &[Request],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<LogLikelihood>, Error> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    let input = |&index: &usize| requests[index].input();
    order.par_sort_by(|a, b| input(b).len().cmp(&input(a).len()).then(input(a).cmp(input(b))));
    let groups: Vec<Group<'_>> = order
        .chunk_by(|a, b| input(a) == input(b))
        .map(|members| Group { requests, members })
        .collect();

    let mut found = vec![LogLikelihood::CERTAIN; requests.len()];
    let mut done = 0;
    let mut pass: Option<Pass<B, T>> = None;
    let mut rest = groups.as_slice();
    while let Some(longest) = rest.first() {
        let length = longest.input().len();
        if length > model.positions() {
            let positions = model.positions();
            return Err(moh_model::Error::TooLong { tokens: length, positions }.into());
        }
        let length = length.next_multiple_of(LENGTH_STEP).min(model.positions());
        let batch = (BATCH_TOKENS / length).clamp(1, rest.len());
        let (now, later) = rest.split_at(batch);
        rest = later;
        let pass = match &mut pass {
            Some(pass) if pass.fits(batch, length) => pass,
            pass => {
                // The old buffers are free before the new ones are allocated.
                *pass = None;
                pass.insert(Pass::new(model, batch, length)?)
            }
        };
        pass.run(model, now, &mut found)?;
        done += now.iter().map(|group| group.members.len() as u64).sum::<u64>();
        progress(done, requests.len() as u64);
    }
    Ok(found)
}

/// Requests of equal input; at least one.
struct Group<'a> {
    requests: &'a [Request],
    members: &'a [usize],
}

impl Group<'_> {
    fn input(&self) -> &[u32] {
        self.requests[self.members[0]].input()
    }

    /// Tokens at the end of the input whose logits any request needs.
    fn scored(&self) -> usize {
        let continuations = self.members.iter().map(|&index| self.requests[index].continuation);
        continuations.max().unwrap_or(0)
    }
}

/// A row of logits: of the token `back` tokens before the end of a group's input.
#[derive(Clone, Copy)]
struct Row {
    group: usize,
    back: usize,
    /// The token's place in the pass.
    place: usize,
}

/// The buffers of passes of one shape.
struct Pass<B: Backend, T: Element> {
    activations: Activations<B, T>,
    sums: StepSums<B>,
    batch: usize,
    length: usize,
}

impl<B: Backend + Clone, T: Element> Pass<B, T> {
    fn new(model: &Model<B, T>, batch: usize, length: usize) -> Result<Self, Error> {
        let shape = PassShape {
            batch,
            length,
            recompute: Recompute::Block,
            training: false,
            document_mask: false,
        };
        let activations = Activations::new(model, shape)?;
        Ok(Pass { activations, sums: StepSums::new(model.backend())?, batch, length })
    }

    fn fits(&self, batch: usize, length: usize) -> bool {
        (self.batch, self.length) == (batch, length)
    }

    /// Adds the log-likelihoods of the groups' requests to `found`.
    fn run(
        &mut self,
        model: &mut Model<B, T>,
        groups: &[Group<'_>],
        found: &mut [LogLikelihood],
    ) -> Result<(), Error> {
        let mut ids = vec![0u32; self.batch * self.length];
        let mut rows = Vec::new();
        for (number, (group, ids)) in groups.iter().zip(ids.chunks_mut(self.length)).enumerate() {
            let input = group.input();
            ids[..input.len()].copy_from_slice(input);
            let end = number * self.length + input.len();
            let row = |back| Row { group: number, back, place: end - 1 - back };
            rows.extend((0..group.scored()).map(row));
        }
        let targets = vec![IGNORED; ids.len()];
        let backend = model.backend().clone();
        let Pass { activations, sums, .. } = self;
        activations.upload(&backend, &ids, &targets, &[])?;
        backend.install(|| model.forward(activations, sums))?;
        let vocab_size = model.config().vocab_size;
        for rows in rows.chunks((MAX_LOGITS / vocab_size).max(1)) {
            let places: Vec<_> = rows.iter().map(|row| row.place..row.place + 1).collect();
            let logits = backend.install(|| model.logits_of_rows(activations, &places))?;
            add(groups, rows, &logits, found);
        }
        Ok(())
    }
}

/// Adds the log-probabilities of the tokens after `rows`, whose logits are `[rows, V]`, to those of
/// their requests.
fn add(groups: &[Group<'_>], rows: &[Row], logits: &[f32], found: &mut [LogLikelihood]) {
    let width = logits.len() / rows.len();
    let summaries: Vec<Summary> = logits.par_chunks(width).map(Summary::new).collect();
    for ((row, logits), summary) in rows.iter().zip(logits.chunks(width)).zip(summaries) {
        let group = &groups[row.group];
        for &index in group.members {
            let Request { tokens, continuation } = &group.requests[index];
            if row.back >= *continuation {
                continue;
            }
            // Inside: a request has more tokens than its continuation, and all ids were checked.
            let target = tokens[tokens.len() - 1 - row.back] as usize;
            found[index].sum += f64::from(logits[target]) - summary.log_sum_exp;
            found[index].is_greedy &= summary.largest == target;
        }
    }
}

/// What all targets of a row have in common.
struct Summary {
    log_sum_exp: f64,
    /// The first of the largest logits.
    largest: usize,
}

impl Summary {
    fn new(logits: &[f32]) -> Self {
        let mut largest = 0;
        for (index, &logit) in logits.iter().enumerate() {
            if logit > logits[largest] {
                largest = index;
            }
        }
        let max = logits[largest];
        let sum: f64 = logits.iter().map(|&logit| f64::from((logit - max).exp())).sum();
        Summary { log_sum_exp: f64::from(max) + sum.ln(), largest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moh_kernels::Cpu;
    use moh_model::{
        Architecture, HeadCounts, ModelConfig, MohConfig, RopeConfig, RouterKind, initial,
    };

    const VOCABULARY: usize = 61;

    fn model(moh: bool) -> Model<Cpu, f32> {
        let one = |count: usize| HeadCounts::from(count);
        let moh = moh.then(|| MohConfig {
            router: RouterKind::QueryNorm,
            shared_heads: 3.into(),
            routed_top_k: one(2),
        });
        let config = ModelConfig {
            architecture: Architecture::Llama,
            vocab_size: VOCABULARY,
            hidden_size: 48,
            intermediate_size: 80,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            num_key_value_heads: 2,
            head_dim: 6,
            max_position_embeddings: 100,
            rms_norm_eps: 1e-5,
            rope: RopeConfig { theta: 1e4, scaling: None },
            tie_word_embeddings: false,
            initializer_range: 0.02,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            moh,
        };
        Model::new::<Error>(Cpu, config, 100, |segment, values| {
            initial::initialize(3, 0.2, &segment.name, &[values.len(), 1], values);
            if segment.shape().len() == 1 {
                values.iter_mut().for_each(|value| *value += 1.0);
            }
            Ok(())
        })
        .unwrap()
    }

    fn request(number: usize, length: usize, continuation: usize) -> Request {
        let ids = (0..length).map(|i| ((i * 37 + i * i + number * 11) % VOCABULARY) as u32);
        Request { tokens: ids.collect(), continuation }
    }

    /// The log-likelihood of one request from all logits of a batch of its own.
    fn alone(model: &mut Model<Cpu, f32>, request: &Request) -> LogLikelihood {
        let logits = model.run(&[request.input().to_vec()]).unwrap().logits;
        let mut found = LogLikelihood::CERTAIN;
        let rows: Vec<&[f32]> = logits.chunks(VOCABULARY).collect();
        let first = request.input().len() - request.continuation;
        for (row, &id) in rows[first..].iter().zip(&request.tokens[first + 1..]) {
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            found.sum += f64::from(row[id as usize]) - sum.ln();
            found.is_greedy &= row.iter().all(|&logit| logit <= row[id as usize]);
        }
        found
    }

    #[test]
    fn requests_in_batches_are_as_likely_as_alone() {
        for moh in [false, true] {
            let mut model = model(moh);
            // Lengths around the step and up to the model's positions, and batches of several.
            let mut requests: Vec<Request> = (0..120)
                .map(|number| {
                    request(number, 2 + number * 5 % 99, 1 + number % (1 + number * 5 % 99))
                })
                .collect();
            requests.push(request(0, 101, 100));
            // Equal inputs whose last tokens and borders differ.
            for last in 0..VOCABULARY as u32 {
                let mut shared = request(1, 20, 1 + 2 * (last as usize % 2));
                shared.tokens[19] = last;
                requests.push(shared);
            }
            let mut steps = Vec::new();
            let mut progress = |done, total| steps.push((done, total));
            let found = log_likelihoods(&mut model, &requests, &mut progress).unwrap();
            assert_eq!(steps.last(), Some(&(182, 182)));
            assert!(steps.len() > 1 && steps.is_sorted());
            for (request, found) in requests.iter().zip(&found) {
                let expected = alone(&mut model, request);
                assert!((found.sum - expected.sum).abs() < 1e-4, "{found:?} {expected:?}");
                assert_eq!(found.is_greedy, expected.is_greedy);
            }
            // The same for every last token alone, of which exactly one is the most likely.
            for (last, shared) in requests[121..].iter_mut().enumerate() {
                shared.continuation = 1;
                assert_eq!(shared.tokens[19], last as u32);
            }
            let found = log_likelihoods(&mut model, &requests[121..], &mut |_, _| {}).unwrap();
            let total: f64 = found.iter().map(|found| found.sum.exp()).sum();
            assert!((total - 1.0).abs() < 1e-4, "{total}");
            assert_eq!(found.iter().filter(|found| found.is_greedy).count(), 1);
        }
    }

    #[test]
    fn a_request_beyond_the_positions_is_refused() {
        let requests = [request(0, 102, 1)];
        let error = log_likelihoods(&mut model(false), &requests, &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("a sequence of 101 tokens"), "{error}");
        assert!(log_likelihoods(&mut model(false), &[], &mut |_, _| {}).unwrap().is_empty());
    }

    #[test]
    fn rows_outside_a_pass_have_no_logits() {
        let model = model(false);
        let pass = Pass::new(&model, 2, 16).unwrap();
        assert_eq!(model.logits_of_rows(&pass.activations, &[0..1, 30..32]).unwrap().len(), 3 * 61);
        for rows in [31..33, 4..4] {
            assert!(model.logits_of_rows(&pass.activations, &[0..1, rows]).is_err());
        }
    }

    #[test]
    fn the_first_of_equal_logits_is_the_largest() {
        let summary = Summary::new(&[1.0, 2.0, 2.0]);
        assert_eq!(summary.largest, 1);
        assert!((summary.log_sum_exp - (1f64.exp() + 2.0 * 2f64.exp()).ln()).abs() < 1e-6);
    }
}
