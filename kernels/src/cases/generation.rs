//! Cases of attention in generation: each of eight sequences has a new token after 16,384 others, which
//! reads the keys and values of the groups that it selects.

use super::{Case, Sizes, Work, random_elements, upload};
use crate::attention::{Selection, SequenceAttention, Span};
use crate::backend::Backend;
use crate::error::Result;
use crate::rope::QkvShape;
use crate::scalar::Element;

const SEQUENCES: usize = 8;
/// Tokens of a sequence, with the new one.
const CONTEXT: usize = 16_384;
const BLOCK_LENGTH: usize = 16;

/// The model's heads; a small model's have a key/value head each.
fn shape(sizes: Sizes) -> QkvShape {
    let own = sizes.attention;
    let kv_heads = if sizes == Sizes::SMALL { own.heads } else { own.kv_heads };
    QkvShape { batch: 1, length: SEQUENCES, kv_heads, ..own }
}

pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    let shape = shape(sizes);
    let case = |active: usize| {
        let groups = shape.kv_heads * active / 100;
        let read = 2 * SEQUENCES * CONTEXT * groups * shape.head_dim;
        let name = format!(
            "attention_of_sequences {}_groups_of_{}, {active}% active",
            shape.kv_heads, shape.head_dim
        );
        Case::new(name, Work::moved::<T>(read), move |b: &B| {
            let mut case = Generation::<B, T>::new(b, shape, groups)?;
            Ok(move |backend: &B| case.run(backend))
        })
    };
    [100, 75, 50].map(case).into()
}

/// Random queries, keys and values.
struct Generation<B: Backend, T: Element> {
    shape: QkvShape,
    spans: Vec<Span>,
    selected: B::Buffer<u8>,
    qkv: B::Buffer<T>,
    keys: B::Buffer<T>,
    values: B::Buffer<T>,
    block_table: B::Buffer<u32>,
    generated: B::Buffer<u32>,
    out: B::Buffer<T>,
    log_sum_exp: B::Buffer<f32>,
}

impl<B: Backend, T: Element> Generation<B, T> {
    fn new(backend: &B, shape: QkvShape, groups: usize) -> Result<Self> {
        let QkvShape { heads, kv_heads, head_dim, .. } = shape;
        let blocks = CONTEXT / BLOCK_LENGTH;
        let span = |number| Span {
            rows: number..number + 1,
            position: CONTEXT - 1,
            first_block: number * blocks,
            is_prompt: false,
        };
        let spans: Vec<Span> = (0..SEQUENCES).map(span).collect();
        let pool = SEQUENCES * CONTEXT * kv_heads * head_dim;
        // A sequence's blocks are not beside each other.
        let block = |index: usize| (index % blocks * SEQUENCES + index / blocks) as u32;
        // Other groups for each sequence.
        let selects = |index: usize| {
            let (sequence, group) = (index / heads, index % heads * kv_heads / heads);
            u8::from((group + sequence) % kv_heads < groups)
        };
        Ok(Generation {
            shape,
            selected: upload(backend, &(0..SEQUENCES * heads).map(selects).collect::<Vec<u8>>())?,
            qkv: random_elements::<B, T>(backend, shape.tokens() * shape.row())?,
            keys: random_elements::<B, T>(backend, pool)?,
            values: random_elements::<B, T>(backend, pool)?,
            block_table: upload(
                backend,
                &(0..SEQUENCES * blocks).map(block).collect::<Vec<u32>>(),
            )?,
            generated: upload(backend, &Span::generated(&spans))?,
            out: backend.allocate(SEQUENCES * heads * head_dim)?,
            log_sum_exp: backend.allocate(SEQUENCES * heads)?,
            spans,
        })
    }

    fn run(&mut self, backend: &B) -> Result<()> {
        backend.attention_of_sequences(SequenceAttention {
            shape: &self.shape,
            sequences: &self.spans,
            selection: Some(Selection {
                shared_heads: 0,
                routed: B::whole(&self.selected),
                weights: None,
            }),
            qkv: B::whole(&self.qkv),
            keys: B::whole(&self.keys),
            values: B::whole(&self.values),
            block_table: B::whole(&self.block_table),
            generated: B::whole(&self.generated),
            block_length: BLOCK_LENGTH,
            out: B::whole_mut(&mut self.out),
            log_sum_exp: B::whole_mut(&mut self.log_sum_exp),
        })
    }
}
