//! The log-likelihood of continuations.
//!
//! Requests whose inputs begin alike, such as the choices of a question or questions after the same examples, share the
//! keys and values of the blocks of their beginning. The head computes the rows of continuations only, and the device
//! their log-probabilities.

use moh_kernels::sampling::{RowChoice, RowRequest, RowToken};
use moh_kernels::{Backend, Element};
use moh_model::{BatchGenerator, BatchOptions, Chunk, Model, SequenceId};

use super::Request;
use super::queue::Queue;
use crate::Error;

/// Maximum tokens of a pass.
const PASS_TOKENS: usize = 4096;
/// Maximum logits of a pass.
const MAX_LOGITS: usize = 1 << 25;

/// How likely a continuation is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogLikelihood {
    /// The sum of its tokens' log-probabilities, in nats; NaN if logits are not finite.
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
pub fn log_likelihoods<B: Backend, T: Element>(
    model: &Model<B, T>,
    requests: &[Request],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<LogLikelihood>, Error> {
    let Some(longest) = requests.iter().map(|request| request.input().len()).max() else {
        return Ok(Vec::new());
    };
    let positions = model.positions();
    if longest > positions {
        return Err(moh_model::Error::TooLong { tokens: longest, positions }.into());
    }
    let options = options(requests, longest);
    let mut queue = Queue::new(requests, options.block_length);
    let mut scorer = Scorer {
        generator: BatchGenerator::new(model, options)?,
        vocabulary: model.config().vocab_size,
        requests,
        found: vec![LogLikelihood::CERTAIN; requests.len()],
    };
    let mut done = 0;
    while done < requests.len() {
        let batch = scorer.batch(&mut queue)?;
        scorer.score(&batch)?;
        done += batch.len();
        progress(done as u64, requests.len() as u64);
    }
    Ok(scorer.found)
}

/// Passes of all tokens where these are few. The pool has room for a pass or the longest request, and as much again for
/// beginnings that later requests share.
fn options(requests: &[Request], longest: usize) -> BatchOptions {
    let lengths = requests.iter().map(|request| request.input().len());
    let pass_tokens = PASS_TOKENS.min(lengths.fold(0, usize::saturating_add));
    BatchOptions {
        pass_tokens,
        pack_weights: false,
        independent: false,
        ..BatchOptions::for_tokens(2 * pass_tokens.max(longest))
    }
}

/// A request that is computed.
struct Running {
    request: usize,
    sequence: SequenceId,
}

struct Scorer<'a, B: Backend, T: Element> {
    generator: BatchGenerator<'a, B, T>,
    vocabulary: usize,
    requests: &'a [Request],
    found: Vec<LogLikelihood>,
}

impl<B: Backend, T: Element> Scorer<'_, B, T> {
    /// The next requests: as many as a pass and the pool have room for, and at least one.
    fn batch(&mut self, queue: &mut Queue<'_>) -> Result<Vec<Running>, Error> {
        let (generator, mut batch) = (&mut self.generator, Vec::new());
        let (mut tokens, mut blocks) = (0, 0);
        queue.take(|index| {
            let request = &self.requests[index];
            let sequence = generator.add(request.input(), request.unscored())?;
            let waiting = generator.waiting(sequence)?;
            tokens += waiting;
            blocks += generator.needed_blocks(sequence, waiting)?;
            let fits =
                tokens <= generator.options().pass_tokens && blocks <= generator.free_blocks();
            if !fits && !batch.is_empty() {
                generator.remove(sequence);
                return Ok(false);
            }
            batch.push(Running { request: index, sequence });
            Ok(true)
        })?;
        Ok(batch)
    }

    /// Computes a batch in as many passes as it needs.
    fn score(&mut self, batch: &[Running]) -> Result<(), Error> {
        loop {
            let (chunks, scored) = self.pass(batch)?;
            if chunks.is_empty() {
                break;
            }
            let rows: Vec<RowRequest> = scored.iter().map(Scored::row).collect();
            let choices = self.generator.pass_choosing(&chunks, &rows, self.vocabulary, None)?;
            for (scored, choice) in scored.iter().zip(choices.into_iter().flatten()) {
                scored.add(choice, &mut self.found[scored.request]);
            }
        }
        for running in batch {
            self.generator.remove(running.sequence);
        }
        Ok(())
    }

    /// The next pass of a batch: its chunks, and the tokens whose log-probabilities are wanted.
    fn pass(&self, batch: &[Running]) -> Result<(Vec<Chunk>, Vec<Scored>), Error> {
        let (mut chunks, mut scored) = (Vec::new(), Vec::new());
        let mut room = self.generator.options().pass_tokens;
        let most_rows = (MAX_LOGITS / self.vocabulary).max(1);
        for &Running { request, sequence } in batch {
            let Request { tokens: all, continuation } = &self.requests[request];
            let waiting = self.generator.waiting(sequence)?;
            let unscored = waiting.saturating_sub(*continuation);
            let tokens = waiting.min(room).min(unscored + most_rows - scored.len());
            if tokens == 0 {
                continue;
            }
            room -= tokens;
            let logits = tokens.saturating_sub(unscored);
            chunks.push(Chunk { sequence, tokens, logits });
            // The chunk's last token predicts that before the ones that still wait.
            let end = all.len() - (waiting - tokens);
            scored.extend(all[end - logits..end].iter().map(|&token| Scored { request, token }));
        }
        Ok((chunks, scored))
    }
}

/// A token of a continuation.
struct Scored {
    request: usize,
    token: u32,
}

impl Scored {
    fn row(&self) -> RowRequest {
        RowRequest { token: RowToken::Given(self.token), log_probabilities: Some(1) }
    }

    /// Logits that are not finite have the log-probability NaN.
    fn add(&self, choice: Option<RowChoice>, found: &mut LogLikelihood) {
        let probabilities = choice.and_then(|choice| choice.log_probabilities);
        let likeliest = probabilities.iter().flat_map(|found| &found.most_likely).next();
        found.is_greedy &= likeliest.is_some_and(|&(token, _)| token == self.token);
        found.sum += probabilities.map_or(f64::NAN, |found| found.of_token);
    }
}

#[cfg(test)]
mod tests {
    use moh_kernels::Cpu;
    use moh_model::{
        Architecture, HeadCounts, ModelConfig, MohConfig, RopeConfig, RouterKind, initial,
    };

    use super::*;

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
            let found = log_likelihoods(&model, &requests, &mut progress).unwrap();
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
            let found = log_likelihoods(&model, &requests[121..], &mut |_, _| {}).unwrap();
            let total: f64 = found.iter().map(|found| found.sum.exp()).sum();
            assert!((total - 1.0).abs() < 1e-4, "{total}");
            assert_eq!(found.iter().filter(|found| found.is_greedy).count(), 1);
        }
    }

    #[test]
    fn a_request_beyond_the_positions_is_refused() {
        let requests = [request(0, 102, 1)];
        let error = log_likelihoods(&model(false), &requests, &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("a sequence of 101 tokens"), "{error}");
        assert!(log_likelihoods(&model(false), &[], &mut |_, _| {}).unwrap().is_empty());
    }
}
