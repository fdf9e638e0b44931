//! Cases of attention in generation: each of eight sequences has a new token after 16,383 others. The token
//! reads the keys and values of the groups that it selects.

use super::{Case, Sizes, Work, random_elements, upload};
use crate::attention::{Selection, SequenceAttention, Span};
use crate::{Backend, Element, QkvShape};

const SEQUENCES: usize = 8;
/// Tokens of a sequence, including the new token.
const CONTEXT: usize = 16_384;
const BLOCK_LENGTH: usize = 16;

/// Returns the model's heads; in a small model each query head has its own key/value head.
fn shape(sizes: Sizes) -> QkvShape {
    let own = sizes.attention;
    let kv_heads = if sizes == Sizes::SMALL { own.heads } else { own.kv_heads };
    QkvShape { batch: 1, length: SEQUENCES, kv_heads, ..own }
}

pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    [100, 75, 50].map(|active| case::<B, T>(shape(sizes), active)).into()
}

/// Returns a case of random queries, keys and values, with `active` percent of the groups selected.
fn case<B: Backend, T: Element>(shape: QkvShape, active: usize) -> Case<B> {
    let QkvShape { heads, kv_heads, head_dim, .. } = shape;
    let (blocks, groups) = (CONTEXT / BLOCK_LENGTH, kv_heads * active / 100);
    let read = 2 * SEQUENCES * CONTEXT * groups * head_dim;
    let name = format!("attention_of_sequences {kv_heads}_groups_of_{head_dim}, {active}% active");
    let span = move |number| Span {
        rows: number..number + 1,
        position: CONTEXT - 1,
        first_block: number * blocks,
        is_prompt: false,
    };
    let spans: [Span; SEQUENCES] = std::array::from_fn(span);
    let pool = SEQUENCES * CONTEXT * kv_heads * head_dim;
    // The blocks of a sequence are not adjacent.
    let block = |index: usize| (index % blocks * SEQUENCES + index / blocks) as u32;
    let table: Vec<u32> = (0..SEQUENCES * blocks).map(block).collect();
    // Each sequence selects different groups.
    let selects = |index: usize| {
        let (sequence, group) = (index / heads, index % heads * kv_heads / heads);
        u8::from((group + sequence) % kv_heads < groups)
    };
    let selected: Vec<u8> = (0..SEQUENCES * heads).map(selects).collect();
    case!(name, Work::moved::<T>(read), |backend| [
        read routed = upload(backend, &selected),
        read qkv = random_elements::<B, T>(backend, shape.tokens() * shape.row()),
        read keys = random_elements::<B, T>(backend, pool),
        read values = random_elements::<B, T>(backend, pool),
        read block_table = upload(backend, &table),
        read generated = upload(backend, &Span::generated(&spans)),
        write out = backend.allocate(SEQUENCES * heads * head_dim),
        write log_sum_exp = backend.allocate(SEQUENCES * heads),
    ] backend.attention_of_sequences::<T>(SequenceAttention {
        shape: &shape,
        sequences: &std::array::from_fn::<_, SEQUENCES, _>(span),
        selection: Some(Selection { shared_heads: 0, routed, weights: None }),
        score_factor: 1.0, qkv, keys, values, block_table, generated, block_length: BLOCK_LENGTH, out, log_sum_exp,
    }))
}
