//! Every operator with its buffers in the order of its arguments, their valid lengths, and a call
//! on buffers of given lengths.

use super::{ATTENTION, HEAD, KEYS, QUERIES, ROUTER, ROW, SHAPE, TOKENS, WIDTH};
use crate::reference::{STEP, table, upload};
use half::bf16;
use moh_kernels::adamw::AdamWUpdate;
use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, KeyValues, Selection, SequenceAttention,
    Span,
};
use moh_kernels::cross_entropy::{CrossEntropyArgs, HeadGradients, HeadTeacher};
use moh_kernels::embedding::{EmbeddingBackward, EmbeddingForward};
use moh_kernels::key_value_cache::KeyValueAppend;
use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::ranks::{Heads, VocabularyRows};
use moh_kernels::rms_norm::{RmsNormBackward, RmsNormForward};
use moh_kernels::rope::{QkvShape, RopeArgs, RopeTable};
use moh_kernels::router::logits::{HeadWeights, LogitRouter, LogitsBackward, LogitsForward};
use moh_kernels::router::query_norm::{QueryNormBackward, QueryNormForward, QueryNormRouter};
use moh_kernels::router::{RouterGradient, Routing, SharedHeads};
use moh_kernels::{Accumulation, Backend, Result, Scalar, View, ViewMut};

const ROWS: VocabularyRows = VocabularyRows { vocab_size: 7, first: 0, count: 7 };
const EPS: f64 = 1e-5;

/// The valid lengths of a buffer, given the other lengths: `right`, and larger lengths with `or_more`.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    pub right: usize,
    or_more: bool,
}

impl Fit {
    pub fn admits(self, len: usize) -> bool {
        len == self.right || self.or_more && len > self.right
    }
}

/// Declares the names of the operators, [`fits`] and [`call`]. An argument is a buffer that the operator reads
/// (of zeros, or of `ones`), a buffer that it writes, or a length.
macro_rules! operators {
    ($device:ident; $($name:literal [$($access:ident $buffer:ident: $scalar:ident $fit:tt $len:expr),+]
        $call:expr;)+) => {
        pub const OPERATORS: &[&str] = &[$($name),+];

        pub fn fits<B: Backend>($device: &B, operator: &str) -> Vec<Fit> {
            match operator {
                $($name => vec![$(Fit { right: $len, or_more: stringify!($fit) == ">=" }),+],)+
                _ => unreachable!("{operator} is not in the table"),
            }
        }

        #[allow(unused_mut)]
        pub fn call<B: Backend>($device: &B, operator: &str, lengths: &[usize]) -> Result<()> {
            let mut lengths = lengths.iter().copied();
            let mut length = || lengths.next().unwrap();
            match operator {
                $($name => {
                    $(let mut $buffer = operators!(@new $access $device $scalar length());)+
                    $(let $buffer = operators!(@pass $access $buffer);)+
                    $call
                })+
                _ => unreachable!("{operator} is not in the table"),
            }
        }
    };
    (@new length $device:ident $scalar:ident $len:expr) => { $len };
    (@new ones $device:ident $scalar:ident $len:expr) => { upload::<B, $scalar>($device, &vec![1; $len]) };
    (@new $access:ident $device:ident $scalar:ident $len:expr) => { zeros::<B, $scalar>($device, $len) };
    (@pass length $buffer:ident) => { $buffer };
    (@pass write $buffer:ident) => { B::whole_mut(&mut $buffer) };
    (@pass $access:ident $buffer:ident) => { B::whole(&$buffer) };
}

operators! { device;
    "embedding_forward" [
        read ids: u32 = TOKENS, read table: f32 = 7 * WIDTH, write out: f32 = TOKENS * WIDTH
    ] device.embedding_forward::<f32>(EmbeddingForward { width: WIDTH, rows: ROWS, ids, table, out });

    "embedding_backward" [
        read ids: u32 = TOKENS, read d_out: f32 = TOKENS * WIDTH, write d_table: f32 = 7 * WIDTH
    ] device.embedding_backward::<f32, f32>(EmbeddingBackward {
        width: WIDTH, rows: ROWS, ids, d_out, d_table,
    });

    "rms_norm_forward" [
        read x: f32 = TOKENS * WIDTH, read weight: f32 = WIDTH, write y: f32 = TOKENS * WIDTH,
        write inv_rms: f32 = TOKENS
    ] device.rms_norm_forward::<f32>(RmsNormForward { eps: EPS, x, weight, y, inv_rms });

    "rms_norm_backward" [
        read x: f32 = TOKENS * WIDTH, read weight: f32 = WIDTH, read inv_rms: f32 = TOKENS,
        read d_y: f32 = TOKENS * WIDTH, write d_x: f32 = TOKENS * WIDTH, write d_weight: f32 = WIDTH
    ] device.rms_norm_backward::<f32, f32>(RmsNormBackward { x, weight, inv_rms, d_y, d_x, d_weight });

    "qk_norm_forward" [
        read qkv: f32 = TOKENS * ROW, read weight: f32 = 2 * SHAPE.head_dim,
        write normed: f32 = TOKENS * ROW
    ] device.qk_norm_forward::<f32>(QkNormForward { shape: &SHAPE, eps: EPS, qkv, weight, normed });

    "qk_norm_backward" [
        read qkv: f32 = TOKENS * ROW, read weight: f32 = 2 * SHAPE.head_dim,
        write d_qkv: f32 = TOKENS * ROW, write d_weight: f32 = 2 * SHAPE.head_dim
    ] device.qk_norm_backward::<f32, f32>(QkNormBackward {
        shape: &SHAPE, eps: EPS, qkv, weight, d_qkv, d_weight,
    });

    "linear_forward" [
        read x: f32 = TOKENS * WIDTH, read weight: f32 = 2 * WIDTH, read residual: f32 = TOKENS * 2,
        write y: f32 = TOKENS * 2
    ] device.linear_forward::<f32>(LinearForward {
        inputs: WIDTH, x, weight, residual: Some(residual), y, independent: false, packed: None,
    });

    "linear_backward_input" [
        read d_y: f32 = TOKENS * 2, read weight: f32 = 2 * WIDTH, write d_x: f32 = TOKENS * WIDTH
    ] device.linear_backward_input::<f32>(LinearBackwardInput {
        inputs: WIDTH, d_y, weight, d_x, accumulation: Accumulation::Overwrite,
    });

    "linear_backward_weight" [
        read x: f32 = TOKENS * WIDTH, read d_y: f32 = TOKENS * 2, write d_weight: f32 = 2 * WIDTH
    ] device.linear_backward_weight::<f32, f32>(LinearBackwardWeight {
        inputs: WIDTH, x, d_y, d_weight, accumulation: Accumulation::Overwrite,
    });

    "rope_forward" [read cos: f32 = 4, read sin: f32 = 4, write qkv: f32 = TOKENS * ROW]
    device.rope_forward::<f32>(rotation(cos, sin, qkv));

    "rope_backward" [read cos: f32 = 4, read sin: f32 = 4, write qkv: f32 = TOKENS * ROW]
    device.rope_backward::<f32>(rotation(cos, sin, qkv));

    "query_norm_forward" [write qkv: f32 = TOKENS * ROW, length tokens: usize >= TOKENS]
    device.query_norm_forward::<f32>(QueryNormForward {
        router: ROUTER, shape: &SHAPE, qkv, rope: None, routing: &mut room(device, tokens)?,
        all_reduce: None,
    });

    "query_norm_forward with RoPE" [
        read cos: f32 = 4, read sin: f32 = 4, write qkv: f32 = TOKENS * ROW,
        length tokens: usize >= TOKENS
    ] device.query_norm_forward::<f32>(QueryNormForward {
        router: ROUTER, shape: &SHAPE, qkv, rope: Some(RopeTable { cos, sin, first_position: 0 }),
        routing: &mut room(device, tokens)?, all_reduce: None,
    });

    "query_norm_backward" [
        read qkv: f32 = TOKENS * ROW, write d_qkv: f32 = TOKENS * ROW, length tokens: usize = TOKENS,
        read delta: f32 = TOKENS * 4
    ] device.query_norm_backward::<f32>(QueryNormBackward {
        router: ROUTER, shape: &SHAPE, qkv, d_qkv, rope: None,
        gradient: gradient(&routing(device, tokens), delta),
    });

    "query_norm_backward with RoPE" [
        read cos: f32 = 4, read sin: f32 = 4, read qkv: f32 = TOKENS * ROW,
        write d_qkv: f32 = TOKENS * ROW, length tokens: usize = TOKENS, read delta: f32 = TOKENS * 4
    ] device.query_norm_backward::<f32>(QueryNormBackward {
        router: ROUTER, shape: &SHAPE, qkv, d_qkv, rope: Some(RopeTable { cos, sin, first_position: 0 }),
        gradient: gradient(&routing(device, tokens), delta),
    });

    "logits_forward" [read logits: f32 = TOKENS * 6, length tokens: usize >= TOKENS]
    device.logits_forward::<f32>(LogitsForward {
        router: LOGIT_ROUTER, logits, tokens: TOKENS, routing: &mut logit_room(device, tokens)?, all_reduce: None,
    });

    "logits_backward" [write d_logits: f32 = 2 * 6, read delta: f32 = TOKENS * 4]
    device.logits_backward::<f32>(LogitsBackward {
        router: LOGIT_ROUTER, tokens: 1..3, d_logits, gradient: gradient(&logit_routing(device), delta),
    });

    "balance_loss" [write out: f64 = 1] device.balance_loss(&routing(device, TOKENS), 1.0, out);

    "selected" [length len: usize = TOKENS * 3]
    device.download(routing(device, TOKENS).selected(), &mut vec![0; len]);

    "gates" [length len: usize = TOKENS * 3]
    device.download(routing(device, TOKENS).gates(), &mut vec![0.0; len]);

    "attention_forward" [
        read queries: f32 >= (TOKENS - 1) * ROW + QUERIES, read keys: f32 >= (TOKENS - 1) * ROW + KEYS,
        read values: f32 >= (TOKENS - 1) * ROW + KEYS, read document_start: u32 = TOKENS,
        read routed: u8 = TOKENS * 3, read weights: f32 = TOKENS * 4, write out: f32 = TOKENS * QUERIES,
        write log_sum_exp: f32 = TOKENS * 4
    ] device.attention_forward::<f32>(AttentionForward {
        args: of_documents(document_start, selection(ROUTER.shared.len(), routed, weights)),
        queries, key_values: KeyValues::Contiguous { keys, values, row_stride: ROW }, out, log_sum_exp,
    });

    "attention_forward of all heads, weighted" [read routed: u8 = 0, read weights: f32 = TOKENS * 4] {
        let [qkv, mut out, mut sums] = [TOKENS * ROW, TOKENS * QUERIES, TOKENS * SHAPE.heads]
            .map(|len| zeros::<B, f32>(device, len));
        let selection = Some(selection(SHAPE.heads, routed, weights));
        let (keys, values) = (B::whole(&qkv), B::whole(&qkv));
        device.attention_forward::<f32>(AttentionForward {
            args: AttentionArgs { selection, ..AttentionArgs::causal(ATTENTION) },
            queries: B::whole(&qkv),
            key_values: KeyValues::Contiguous { keys, values, row_stride: ROW },
            out: B::whole_mut(&mut out),
            log_sum_exp: B::whole_mut(&mut sums),
        })
    };

    "attention_forward by block table" [
        read queries: f32 >= (TOKENS - 1) * ROW + QUERIES, read keys: f32 >= 4 * KEYS,
        read values: f32 >= 4 * KEYS, ones block_table: u32 = 2, write out: f32 = TOKENS * QUERIES,
        write log_sum_exp: f32 = TOKENS * 4
    ] device.attention_forward::<f32>(AttentionForward {
        args: AttentionArgs::causal(ATTENTION),
        // The last block in use is the second of two blocks.
        queries, key_values: KeyValues::Paged { keys, values, block_table, block_length: 2 },
        out, log_sum_exp,
    });

    "attention_of_sequences" [
        read qkv: f32 = TOKENS * ROW, read routed: u8 = TOKENS * 3, read weights: f32 = TOKENS * 4,
        read keys: f32 >= 4 * KEYS, read values: f32 >= 4 * KEYS, ones block_table: u32 >= 2 * TOKENS,
        ones generated: u32 = 3 * TOKENS, write out: f32 = TOKENS * QUERIES,
        write log_sum_exp: f32 = TOKENS * 4
    ] device.attention_of_sequences::<f32>(SequenceAttention {
        shape: &SHAPE,
        sequences: &std::array::from_fn::<_, TOKENS, _>(|row| Span {
            rows: row..row + 1, position: 2, first_block: 2 * row, is_prompt: false,
        }),
        selection: Some(selection(ROUTER.shared.len(), routed, weights)),
        score_factor: 1.0, qkv, keys, values, block_table, generated, block_length: 2, out, log_sum_exp,
    });

    "attention_backward" [
        read qkv: f32 = TOKENS * ROW, read document_start: u32 = TOKENS, read routed: u8 = TOKENS * 3,
        read weights: f32 = TOKENS * 4, read out: f32 = TOKENS * QUERIES,
        read log_sum_exp: f32 = TOKENS * 4, read d_out: f32 = TOKENS * QUERIES,
        write d_qkv: f32 = TOKENS * ROW, write delta: f32 = TOKENS * 4
    ] device.attention_backward::<f32>(AttentionBackward {
        args: of_documents(document_start, selection(ROUTER.shared.len(), routed, weights)),
        qkv, out, log_sum_exp, d_out, d_qkv, delta: Some(delta),
    });

    "key_value_append" [
        read qkv: f32 = TOKENS * ROW, read rows: u32 = TOKENS, write keys: f32 = TOKENS * KEYS,
        write values: f32 = TOKENS * KEYS
    ] device.key_value_append::<f32>(KeyValueAppend {
        shape: &SHAPE, rows, block_length: 1, qkv, keys, values,
    });

    "swiglu_forward" [read gate_up: f32 = TOKENS * 2 * WIDTH, write out: f32 = TOKENS * WIDTH]
    device.swiglu_forward::<f32>(WIDTH, gate_up, out);

    "swiglu_backward" [write gate_up: f32 = TOKENS * 2 * WIDTH, write out: f32 = TOKENS * WIDTH]
    device.swiglu_backward::<f32>(WIDTH, gate_up, out);

    "cross_entropy" [
        read x: f32 = TOKENS * WIDTH, read weight: f32 = 7 * WIDTH, read targets: u32 = TOKENS,
        write scratch: f32 >= device.cross_entropy_scratch(&HEAD), write loss: f64 = 1,
        write d_x: f32 = TOKENS * WIDTH, write d_weight: f32 = 7 * WIDTH
    ] device.cross_entropy::<f32, f32>(CrossEntropyArgs {
        shape: HEAD, x, weight, targets, scratch, loss, teacher: None,
        gradients: Some(HeadGradients {
            scale: 1.0, d_x, d_weight: Some(d_weight), accumulation: Accumulation::Overwrite,
        }),
        ranks: None,
    });

    "cross_entropy with a teacher" [
        read x: f32 = TOKENS * WIDTH, read weight: f32 = 7 * WIDTH, read targets: u32 = TOKENS,
        read other_x: f32 = TOKENS * 3, read other_weight: f32 = 7 * 3,
        write scratch: f32 >= device.cross_entropy_scratch(&HEAD.with_teacher(true)), write loss: f64 = 2,
        write d_x: f32 = TOKENS * WIDTH, write d_weight: f32 = 7 * WIDTH
    ] device.cross_entropy::<f32, f32>(CrossEntropyArgs {
        shape: HEAD.with_teacher(true), x, weight, targets, scratch, loss,
        teacher: Some(HeadTeacher {
            width: 3, x: other_x, weight: other_weight, rows: 7, temperature: 1.0, scale: 1.0,
        }),
        gradients: Some(HeadGradients {
            scale: 1.0, d_x, d_weight: Some(d_weight), accumulation: Accumulation::Overwrite,
        }),
        ranks: None,
    });

    "add" [read x: f32 = WIDTH, read y: f32 = WIDTH, write out: f32 = WIDTH]
    device.add::<f32>(x, y, out);

    "squared_norms" [read x: f32 >= 0, read y: f32 >= 0, write out: f64 = 1]
    device.squared_norms::<f32>(&[x, y], out);

    "adamw" [
        read gradients: f32 = WIDTH, write weights: bf16 = WIDTH, write remainder: i16 = WIDTH,
        write first_moment: f32 = WIDTH, write second_moment: f32 = WIDTH
    ] device.adamw::<bf16, f32, f32>(AdamWUpdate {
        step: &STEP, gradients, weights, remainder: Some(remainder), first_moment, second_moment,
    });
}

pub fn zeros<B: Backend, S: Scalar>(device: &B, len: usize) -> B::Buffer<S> {
    device.allocate(len).unwrap()
}

fn room<B: Backend>(device: &B, tokens: usize) -> Result<Routing<B>> {
    Routing::new(device, ROUTER.routing_shape(tokens, Heads::all(SHAPE.heads))?)
}

pub fn routing<B: Backend>(device: &B, tokens: usize) -> Routing<B> {
    let shape = &QkvShape { length: tokens, ..SHAPE };
    let mut routing = room(device, tokens).unwrap();
    route(device, ROUTER, shape, tokens * ROW, false, &mut routing).unwrap();
    routing
}

/// Routes queries of zeros, and also rotates them if `rotates`.
pub fn route<B: Backend>(
    device: &B,
    router: QueryNormRouter,
    shape: &QkvShape,
    len: usize,
    rotates: bool,
    routing: &mut Routing<B>,
) -> Result<()> {
    let (angles, mut qkv) = (zeros(device, TOKENS), zeros::<B, f32>(device, len));
    let rope = rotates.then(|| table(&angles, &angles));
    let (qkv, all_reduce) = (B::whole_mut::<f32>(&mut qkv), None);
    let args = QueryNormForward { router, shape, qkv, rope, routing, all_reduce };
    device.query_norm_forward(args)
}

/// A two-stage router with one shared head.
const LOGIT_ROUTER: LogitRouter =
    LogitRouter { shared: SharedHeads::first(1), top_k: 2, weights: HeadWeights::TwoStage };

fn logit_room<B: Backend>(device: &B, tokens: usize) -> Result<Routing<B>> {
    Routing::new(device, LOGIT_ROUTER.routing_shape(tokens, Heads::all(SHAPE.heads))?)
}

fn logit_routing<B: Backend>(device: &B) -> Routing<B> {
    let logits = zeros::<B, f32>(device, TOKENS * 6);
    let mut routing = logit_room(device, TOKENS).unwrap();
    let forward = LogitsForward {
        router: LOGIT_ROUTER,
        logits: B::whole::<f32>(&logits),
        tokens: TOKENS,
        routing: &mut routing,
        all_reduce: None,
    };
    device.logits_forward(forward).unwrap();
    routing
}

fn rotation<'a, B: Backend>(
    cos: View<'a, B, f32>,
    sin: View<'a, B, f32>,
    qkv: ViewMut<'a, B, f32>,
) -> RopeArgs<'a, B, f32> {
    RopeArgs { shape: &SHAPE, table: RopeTable { cos, sin, first_position: 0 }, qkv }
}

fn gradient<'a, B: Backend>(
    routing: &'a Routing<B>,
    delta: View<'a, B, f32>,
) -> RouterGradient<'a, B> {
    RouterGradient { routing, delta: Some(delta), balance_weight: 1.0, ranks: None }
}

/// Returns the heads that each token selected, and factors of their outputs.
fn selection<'a, B: Backend>(
    shared_heads: usize,
    routed: View<'a, B, u8>,
    weights: View<'a, B, f32>,
) -> Selection<'a, B> {
    Selection { shared_heads, routed, weights: Some(weights) }
}

/// Returns the arguments of causal attention of selected heads within documents.
fn of_documents<'a, B: Backend>(
    document_start: View<'a, B, u32>,
    selection: Selection<'a, B>,
) -> AttentionArgs<'a, B> {
    let (document_start, selection) = (Some(document_start), Some(selection));
    AttentionArgs { document_start, selection, ..AttentionArgs::causal(ATTENTION) }
}
