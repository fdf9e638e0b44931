//! Generation of several sequences. A pass computes parts of prompts and generated tokens of any sequences, with keys
//! and values in blocks of one pool.

use std::collections::BTreeMap;

use moh_kernels::attention::Span;
use moh_kernels::sampling::{RowChoice, RowRequest, SampleArgs};
use moh_kernels::{AnyBuffer, Backend, for_element};

use super::heads::PassHeads;
use super::packed::PackedWeights;
use super::pool::BlockPool;
use crate::activations::Blocks;
use crate::layers::{CachedTokens, Context, LayerCache, Normed, RopeTables, Scratch, Tokens};
use crate::rope::table;
use crate::{Error, Model, PassShape, Recompute, Result, Sampler};

/// Sizes of a [`BatchGenerator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchOptions {
    /// Maximum tokens of a pass.
    pub pass_tokens: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Tokens of a block.
    pub block_length: usize,
    /// Whether linear layers get packed copies of their weights, on a device that packs weights: faster, but takes the
    /// memory of the weights again ([`BatchGenerator::packed_bytes`]).
    pub pack_weights: bool,
    /// Whether the bits of a sequence are independent of the other sequences. Packed weights always make them
    /// independent. Without packed weights the option makes passes of many tokens slower.
    pub independent: bool,
}

impl BatchOptions {
    /// Returns the sizes of a pool of `tokens` tokens in blocks of 16, and of passes of at most 512 tokens.
    pub fn for_tokens(tokens: usize) -> Self {
        const BLOCK_LENGTH: usize = 16;
        let blocks = tokens.div_ceil(BLOCK_LENGTH);
        BatchOptions {
            pass_tokens: 512,
            blocks,
            block_length: BLOCK_LENGTH,
            pack_weights: true,
            independent: true,
        }
    }
}

/// A sequence of a [`BatchGenerator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// The next tokens of a sequence that a pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub sequence: SequenceId,
    /// Number of the sequence's tokens to compute, at least one.
    pub tokens: usize,
    /// Number of these tokens with wanted logits, counted from the last token.
    pub logits: usize,
}

/// The tokens of a sequence, and the blocks of its computed tokens.
struct Sequence {
    ids: Vec<u32>,
    prompt: usize,
    /// Number of tokens with keys and values in the sequence's blocks.
    computed: usize,
    blocks: Vec<u32>,
    /// Number of blocks that the pool remembers, and the content after them.
    remembered: (usize, u64),
}

/// Generates several sequences with one model.
///
/// The results of a sequence do not depend on the others, nor on the division of its prompt into passes. On the CPU
/// they are equal to the bit, unless [`BatchOptions::independent`] is false.
pub struct BatchGenerator<'a, B: Backend> {
    model: &'a Model<B>,
    options: BatchOptions,
    packed: Option<PackedWeights<B>>,
    pool: BlockPool,
    cache: Vec<LayerCache<B>>,
    sequences: BTreeMap<SequenceId, Sequence>,
    next: u64,
    inputs: PassInputs<B>,
    stream: [AnyBuffer<B>; 2],
    blocks: Blocks<B>,
    scratch: Scratch<B>,
    normed: Normed<B>,
    /// The normed rows with wanted logits, and their logits. The buffer of logits grows with the number of rows.
    rows: AnyBuffer<B>,
    logits: AnyBuffer<B>,
    /// Cosines and sines of all positions, `[positions, D / 2]` each.
    angles: [Vec<f32>; 2],
}

/// The device's inputs for the tokens of a pass.
struct PassInputs<B: Backend> {
    ids: B::Buffer<u32>,
    /// Each token's row in the cache.
    rows: B::Buffer<u32>,
    block_table: B::Buffer<u32>,
    /// Attention's inputs for generated tokens ([`Span::generated`]).
    generated: B::Buffer<u32>,
    /// Cosines and sines of the tokens' positions.
    rope: RopeTables<B>,
}

#[derive(Default)]
struct PassTokens {
    ids: Vec<u32>,
    rows: Vec<u32>,
    block_table: Vec<u32>,
    angles: [Vec<f32>; 2],
    spans: Vec<Span>,
}

impl<'a, B: Backend> BatchGenerator<'a, B> {
    /// Allocates the buffers.
    ///
    /// # Errors
    /// Fails if the device is out of memory, if the model is a part, and if a size is 0.
    pub fn new(model: &'a Model<B>, options: BatchOptions) -> Result<Self> {
        let BatchOptions { pass_tokens, blocks, block_length, pack_weights, .. } = options;
        if !model.is_whole() {
            return Err(Error::divided());
        }
        if pass_tokens == 0 || blocks == 0 || block_length == 0 {
            let reason = format!(
                "passes of {pass_tokens} tokens and {blocks} blocks of {block_length}: none may be 0"
            );
            return Err(Error::Invalid(reason));
        }
        let (backend, config) = (&model.backend, &model.config);
        let cached = blocks * block_length * config.key_value_width();
        let zeros = |len| AnyBuffer::zeros(backend, model.element(), len);
        let layer = || Ok(LayerCache { keys: zeros(cached)?, values: zeros(cached)? });
        let width = pass_tokens * config.hidden_size;
        let shape = PassShape::evaluation(1, pass_tokens, Recompute::Block);
        let sizes = model.pass_sizes(shape)?;
        // Each token of a pass adds at most the blocks of one sequence to the table.
        let table = pass_tokens * model.positions().div_ceil(block_length).min(blocks).max(1);
        let (cos, sin) = self::table(&config.rope, config.head_dim, model.positions());
        Ok(BatchGenerator {
            model,
            options,
            packed: pack_weights.then(|| PackedWeights::new(model)).transpose()?,
            pool: BlockPool::new(blocks, block_length),
            cache: (0..config.num_hidden_layers).map(|_| layer()).collect::<Result<_>>()?,
            sequences: BTreeMap::new(),
            next: 0,
            inputs: PassInputs {
                ids: backend.allocate(pass_tokens)?,
                rows: backend.allocate(pass_tokens)?,
                block_table: backend.allocate(table)?,
                generated: backend.allocate(3 * pass_tokens)?,
                rope: RopeTables::zeros(backend, config.head_dim, pass_tokens)?,
            },
            stream: [zeros(width)?, zeros(width)?],
            blocks: Blocks::new(backend, &sizes, config.num_hidden_layers)?,
            scratch: Scratch::new(backend, &sizes)?,
            normed: Normed::new(backend, &sizes)?,
            rows: zeros(width)?,
            logits: zeros(config.vocab_size)?,
            angles: [cos, sin],
        })
    }

    /// Returns the bytes of the packed copies of a model's weights.
    pub fn packed_bytes(model: &Model<B>) -> u64 {
        super::packed::packed_bytes(model)
    }

    /// Adds a sequence with a prompt. Its first `share` tokens, except the prompt's last token, share the blocks of
    /// earlier prompts with the same beginning. Tokens of shared blocks are already computed, so that their logits
    /// cannot be wanted.
    ///
    /// # Errors
    /// Fails without tokens, for a token outside the vocabulary, and for more tokens than the model has positions.
    pub fn add(&mut self, prompt: &[u32], share: usize) -> Result<SequenceId> {
        self.check(prompt, prompt.len())?;
        let (blocks, content) = self.pool.share(&prompt[..share.min(prompt.len() - 1)]);
        let sequence = Sequence {
            ids: prompt.to_vec(),
            prompt: prompt.len(),
            computed: blocks.len() * self.options.block_length,
            remembered: (blocks.len(), content),
            blocks,
        };
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    /// Appends a generated token, which is not computed yet.
    ///
    /// # Errors
    /// Fails for an unknown sequence, for a token outside the vocabulary, and if the sequence already has all of the
    /// model's positions.
    pub fn push(&mut self, id: SequenceId, token: u32) -> Result<()> {
        self.append(id, &[token], false)
    }

    /// Appends tokens: a part of the prompt, or one generated token.
    pub(super) fn append(&mut self, id: SequenceId, tokens: &[u32], is_prompt: bool) -> Result<()> {
        self.check(tokens, self.sequence(id)?.ids.len() + tokens.len())?;
        let sequence = self.sequences.get_mut(&id).ok_or_else(unknown)?;
        sequence.ids.extend_from_slice(tokens);
        if is_prompt {
            sequence.prompt = sequence.ids.len();
        }
        Ok(())
    }

    /// Removes a sequence, if it exists, and releases its blocks.
    pub fn remove(&mut self, id: SequenceId) {
        for block in self.sequences.remove(&id).into_iter().flat_map(|sequence| sequence.blocks) {
            self.pool.release(block);
        }
    }

    /// Returns the number of tokens of a sequence that are not computed yet.
    pub fn waiting(&self, id: SequenceId) -> Result<usize> {
        let sequence = self.sequence(id)?;
        Ok(sequence.ids.len() - sequence.computed)
    }

    /// Returns the number of new blocks that a sequence needs for `tokens` more computed tokens.
    pub fn needed_blocks(&self, id: SequenceId, tokens: usize) -> Result<usize> {
        let sequence = self.sequence(id)?;
        let blocks = (sequence.computed + tokens).div_ceil(self.options.block_length);
        Ok(blocks.saturating_sub(sequence.blocks.len()))
    }

    /// Returns the number of blocks that no sequence uses.
    pub fn free_blocks(&self) -> usize {
        self.pool.free()
    }

    /// Returns the sizes of the generator.
    pub fn options(&self) -> BatchOptions {
        self.options
    }

    /// Computes the next tokens of some sequences, each named once. Returns each chunk's wanted logits, `[rows, V]`.
    ///
    /// # Errors
    /// Fails without changing anything:
    /// - for an unknown sequence, or a sequence with two chunks,
    /// - for more tokens than the sequence has to compute, or several generated tokens of a sequence,
    /// - for more tokens than a pass has, or more blocks than are free.
    pub fn pass(&mut self, chunks: &[Chunk]) -> Result<Vec<Vec<f32>>> {
        let vocabulary = self.model.config.vocab_size;
        let elements = logits_of(chunks) * vocabulary;
        let all = self.compute_pass(chunks, None, |generator| {
            Ok(generator.logits.view(0..elements).to_f32(&generator.model.backend)?)
        })?;
        let mut rest = &all[..];
        let of_chunk = |chunk: &Chunk| {
            let (own, others) = rest.split_at(chunk.logits * vocabulary);
            rest = others;
            own.to_vec()
        };
        Ok(chunks.iter().map(of_chunk).collect())
    }

    /// Computes a pass as [`Self::pass`] does, but chooses tokens below `known` by the wanted logits on the device.
    /// Each wanted row has a request. A token is `None` where the logits are not finite. If `heads` is given, records
    /// the heads that each token computed.
    ///
    /// # Errors
    /// Fails where [`Self::pass`] fails, and if the number of requests is not the number of wanted rows.
    pub fn pass_choosing(
        &mut self,
        chunks: &[Chunk],
        requests: &[RowRequest],
        known: usize,
        heads: Option<&mut PassHeads>,
    ) -> Result<Vec<Vec<Option<RowChoice>>>> {
        let vocabulary = self.model.config.vocab_size;
        let wanted = logits_of(chunks);
        if wanted != requests.len() {
            let reason = format!("{} requests of {wanted} rows of logits", requests.len());
            return Err(Error::Invalid(reason));
        }
        let choices = self.compute_pass(chunks, heads, |generator| {
            let logits = generator.logits.view(0..wanted * vocabulary);
            Ok(for_element!(T: logits.element() => generator.model.backend.sample::<T>(SampleArgs {
                vocabulary,
                known: known.min(vocabulary),
                logits: logits.typed(),
                rows: requests,
            }))?)
        })?;
        let mut choices = choices.into_iter();
        Ok(chunks.iter().map(|chunk| choices.by_ref().take(chunk.logits).collect()).collect())
    }

    /// Computes a pass and the wanted logits, which stay on the device, and returns the result of `read`. All of this
    /// is one call of [`Backend::install`].
    fn compute_pass<R: Send + Default>(
        &mut self,
        chunks: &[Chunk],
        heads: Option<&mut PassHeads>,
        read: impl FnOnce(&Self) -> Result<R> + Send,
    ) -> Result<R> {
        self.check_pass(chunks)?;
        let mut tokens = PassTokens::default();
        for chunk in chunks {
            self.place(chunk, &mut tokens)?;
        }
        if tokens.ids.is_empty() {
            return Ok(R::default());
        }
        let model = self.model;
        let found = model.backend.install(|| {
            self.upload(&tokens)?;
            self.compute(&tokens, heads)?;
            self.compute_logits(chunks, &tokens)?;
            read(self)
        })?;
        for chunk in chunks {
            self.finish(chunk)?;
        }
        Ok(found)
    }

    /// Computes all waiting tokens of a sequence, in as many passes as they need. Returns the logits after the last
    /// token, `[V]`, or nothing if no token was waiting.
    pub fn finish_waiting(&mut self, sequence: SequenceId) -> Result<Vec<f32>> {
        match self.last_chunk(sequence)? {
            Some(last) => Ok(self.pass(&[last])?.pop().unwrap_or_default()),
            None => Ok(Vec::new()),
        }
    }

    /// Computes all waiting tokens of a sequence, and chooses the next token. Fails if no token was waiting.
    pub fn next_token(&mut self, sequence: SequenceId, sampler: &mut Sampler) -> Result<u32> {
        let Some(last) = self.last_chunk(sequence)? else {
            return Err(Error::no_token("there are none"));
        };
        let request = RowRequest { token: sampler.next_token(), log_probabilities: None };
        let choices = self.pass_choosing(&[last], &[request], sampler.vocab_size(), None)?;
        let choice =
            choices.into_iter().flatten().next().flatten().ok_or_else(Error::not_finite)?;
        sampler.select(choice.token);
        Ok(choice.token)
    }

    /// Computes the waiting tokens of a sequence except the last pass, and returns the chunk of the last pass. Returns
    /// `None` if no token was waiting.
    fn last_chunk(&mut self, sequence: SequenceId) -> Result<Option<Chunk>> {
        let most = self.options.pass_tokens;
        loop {
            let tokens = self.waiting(sequence)?;
            if tokens <= most {
                let last = Chunk { sequence, tokens, logits: 1 };
                return Ok((tokens > 0).then_some(last));
            }
            self.pass(&[Chunk { sequence, tokens: most, logits: 0 }])?;
        }
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or_else(unknown)
    }

    /// Checks new tokens of a sequence with a length of `length` tokens, including them.
    fn check(&self, tokens: &[u32], length: usize) -> Result<()> {
        let positions = self.model.positions();
        if tokens.is_empty() || length > positions {
            return Err(Error::too_long(length, positions));
        }
        let vocabulary = self.model.config.vocab_size;
        match tokens.iter().find(|&&id| id as usize >= vocabulary) {
            Some(id) => Err(Error::Invalid(format!("token {id} of a vocabulary of {vocabulary}"))),
            None => Ok(()),
        }
    }

    fn check_pass(&self, chunks: &[Chunk]) -> Result<()> {
        let fail = |reason: String| Err(Error::Invalid(reason));
        let (mut tokens, mut blocks) = (0, 0);
        for (number, chunk) in chunks.iter().enumerate() {
            let Chunk { sequence: id, tokens: count, logits } = *chunk;
            let sequence = self.sequence(id)?;
            if chunks[..number].iter().any(|other| other.sequence == id) {
                return fail("a pass has a sequence twice".into());
            }
            let waiting = sequence.ids.len() - sequence.computed;
            if count == 0 || count > waiting {
                return fail(format!("{count} tokens of a sequence with {waiting} to compute"));
            }
            if logits > count {
                return fail(format!("logits of {logits} tokens of {count}"));
            }
            let end = sequence.computed + count;
            if end > sequence.prompt && count > 1 {
                return fail(format!(
                    "{count} tokens of a sequence with a prompt of {} end at {end}: generated tokens are \
                     computed one at a time",
                    sequence.prompt
                ));
            }
            tokens += count;
            blocks += self.needed_blocks(id, count)?;
        }
        let (most, free) = (self.options.pass_tokens, self.pool.free());
        if tokens > most {
            return fail(format!("a pass of {tokens} tokens, of which it has at most {most}"));
        }
        match blocks > free {
            true => Err(no_blocks(blocks, free)),
            false => Ok(()),
        }
    }

    /// Allocates blocks for a chunk's tokens, and adds the tokens to the pass.
    fn place(&mut self, chunk: &Chunk, pass: &mut PassTokens) -> Result<()> {
        let (block_length, half) = (self.options.block_length, self.model.config.head_dim / 2);
        let needed = self.needed_blocks(chunk.sequence, chunk.tokens)?;
        let new: Option<Vec<u32>> = (0..needed).map(|_| self.pool.allocate()).collect();
        let new = new.ok_or_else(|| no_blocks(needed, 0))?;
        let sequence = self.sequences.get_mut(&chunk.sequence).ok_or_else(unknown)?;
        sequence.blocks.extend(new);
        let positions = sequence.computed..sequence.computed + chunk.tokens;
        let first = pass.ids.len();
        pass.ids.extend_from_slice(&sequence.ids[positions.clone()]);
        for position in positions.clone() {
            let block = sequence.blocks[position / block_length] as usize;
            // The pool's number of rows fits, because its number of elements fits.
            pass.rows.push((block * block_length + position % block_length) as u32);
            for (angles, all) in pass.angles.iter_mut().zip(&self.angles) {
                angles.extend_from_slice(&all[position * half..(position + 1) * half]);
            }
        }
        pass.spans.push(Span {
            rows: first..pass.ids.len(),
            position: positions.start,
            first_block: pass.block_table.len(),
            is_prompt: positions.start < sequence.prompt,
        });
        let used = positions.end.div_ceil(block_length);
        pass.block_table.extend_from_slice(&sequence.blocks[..used]);
        Ok(())
    }

    fn upload(&mut self, tokens: &PassTokens) -> Result<()> {
        let (backend, inputs) = (&self.model.backend, &mut self.inputs);
        let PassTokens { ids, rows, block_table, angles: [cos, sin], .. } = tokens;
        backend.upload(ids, B::view_mut(&mut inputs.ids, 0..ids.len()))?;
        backend.upload(rows, B::view_mut(&mut inputs.rows, 0..rows.len()))?;
        let table = 0..block_table.len();
        backend.upload(block_table, B::view_mut(&mut inputs.block_table, table))?;
        let generated = Span::generated(&tokens.spans);
        backend.upload(&generated, B::view_mut(&mut inputs.generated, 0..generated.len()))?;
        backend.upload(cos, B::view_mut(&mut inputs.rope.cos, 0..cos.len()))?;
        Ok(backend.upload(sin, B::view_mut(&mut inputs.rope.sin, 0..sin.len()))?)
    }

    /// Computes all blocks and the final norm. If `heads` is given, records the heads of the tokens.
    fn compute(&mut self, pass: &PassTokens, mut heads: Option<&mut PassHeads>) -> Result<()> {
        let (model, n) = (self.model, pass.ids.len());
        let PassInputs { ids, rows, block_table, generated, rope } = &self.inputs;
        let tokens = tokens_of(model, n, self.options.independent);
        let cx = Context { rope, packed: self.packed.as_ref(), ..model.context(tokens) };
        let (layers, gathered) = (&model.layers, &mut self.scratch.gathered);
        layers.embedding.forward(&cx, B::view(ids, 0..n), &mut self.stream[0], gathered)?;
        for (index, (block, layer)) in layers.blocks.iter().zip(&mut self.cache).enumerate() {
            let [input, output] = &mut self.stream;
            // Nothing is saved for a backward pass: the blocks share their buffers.
            let buffers = self.blocks.buffers(0, &mut self.scratch);
            let cached = CachedTokens {
                layer,
                rows,
                block_table,
                generated,
                blocks: pass.block_table.len(),
                block_length: self.options.block_length,
                spans: &pass.spans,
            };
            block.forward(&cx, input, buffers, Some(cached), output)?;
            self.stream.swap(0, 1);
            if let Some(heads) = heads.as_deref_mut() {
                let routing = self.blocks.routings().next().flatten();
                let (of_layer, count) =
                    (model.config.layer_heads(index), model.config.num_attention_heads);
                heads.push(&model.backend, of_layer, count, routing)?;
            }
        }
        layers.final_norm.forward(&cx, &self.stream[0], &mut self.normed)?;
        Ok(())
    }

    /// Computes the wanted logits, of one chunk after another.
    fn compute_logits(&mut self, chunks: &[Chunk], pass: &PassTokens) -> Result<()> {
        let (model, width) = (self.model, self.model.config.hidden_size);
        let mut count = 0;
        for (chunk, span) in chunks.iter().zip(&pass.spans) {
            let rows = span.rows.end - chunk.logits..span.rows.end;
            if rows.is_empty() {
                continue;
            }
            let source = self.normed.y.view(rows.start * width..rows.end * width);
            let place = count * width..(count + rows.len()) * width;
            self.rows.view_mut(place).copy_from(&model.backend, source)?;
            count += rows.len();
        }
        if count == 0 {
            return Ok(());
        }
        let elements = count * model.config.vocab_size;
        if self.logits.len() < elements {
            self.logits = AnyBuffer::zeros(&model.backend, model.element(), elements)?;
        }
        let tokens = tokens_of(model, count, self.options.independent);
        let cx = Context { packed: self.packed.as_ref(), ..model.context(tokens) };
        let rows = self.rows.view(0..count * width);
        model.layers.head.linear.forward(&cx, rows, None, &mut self.logits)
    }

    /// Counts a chunk's tokens as computed, and remembers the whole blocks of its prompt.
    fn finish(&mut self, chunk: &Chunk) -> Result<()> {
        let block_length = self.options.block_length;
        let sequence = self.sequences.get_mut(&chunk.sequence).ok_or_else(unknown)?;
        sequence.computed += chunk.tokens;
        let whole = sequence.computed.min(sequence.prompt) / block_length;
        let (remembered, content) = &mut sequence.remembered;
        while *remembered < whole {
            let tokens = *remembered * block_length..(*remembered + 1) * block_length;
            let block = sequence.blocks[*remembered];
            *content = self.pool.remember(block, *content, &sequence.ids[tokens]);
            *remembered += 1;
        }
        Ok(())
    }
}

/// Returns `count` tokens, for layers of all heads.
fn tokens_of<'t, B: Backend>(model: &Model<B>, count: usize, independent: bool) -> Tokens<'t, B> {
    let shape = model.parallel.part().tensor.qkv_shape(&model.config, 1, count);
    Tokens { independent, ..Tokens::whole(shape) }
}

fn logits_of(chunks: &[Chunk]) -> usize {
    chunks.iter().map(|chunk| chunk.logits).sum()
}

fn unknown() -> Error {
    Error::invalid("there is no such sequence")
}

/// Returns the error of a pool with too few free blocks for the tokens of a pass.
fn no_blocks(needed: usize, free: usize) -> Error {
    Error::Invalid(format!(
        "the cache of keys and values has {free} free blocks, and the next tokens need {needed}: remove \
         sequences, or make it larger"
    ))
}
