//! Cases of the operators on rows: all except attention, RoPE and routers.

use super::{Case, Sizes, Work, ids, random_elements, upload};
use crate::adamw::{AdamW, AdamWUpdate};
use crate::cross_entropy::{CrossEntropyArgs, HeadGradients, HeadShape, HeadTeacher};
use crate::embedding::{EmbeddingBackward, EmbeddingForward};
use crate::key_value_cache::KeyValueAppend;
use crate::linear::{Accumulation, LinearBackwardInput, LinearBackwardWeight, LinearForward};
use crate::ranks::VocabularyRows;
use crate::rms_norm::{RmsNormBackward, RmsNormForward};
use crate::sampling::{RowRequest, RowSampling, RowToken, SampleArgs};
use crate::{Backend, DType, Element, QkvShape};

/// Linear layers in addition to the model's own: a layer of a very small model, and the projection to a
/// vocabulary, which does not fit a cache.
const SMALL_LAYER: [usize; 2] = [64, 344];
const LARGE_LAYER: [usize; 2] = [2048, 32_000];

const STEP: AdamW = AdamW {
    learning_rate: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    clip_norm: 1.0,
    grad_norm: 1.0,
    step: 10,
};

pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    let Sizes { tokens, width, mlp, vocabulary, attention } = sizes;
    let (elements, parameters) = (tokens * width, vocabulary * width);
    let rows = VocabularyRows::all(vocabulary);
    let mut cases = vec![
        case!("embedding_forward", Work::moved::<T>(2 * elements), |backend| [
            read ids = ids(backend, tokens, vocabulary),
            read table = random_elements::<B, T>(backend, parameters),
            write out = random_elements::<B, T>(backend, elements),
        ] backend.embedding_forward(EmbeddingForward { width, rows, ids, table, out })),
        case!("embedding_backward", Work::moved::<T>(2 * elements), |backend| [
            read ids = ids(backend, tokens, vocabulary),
            read d_out = random_elements::<B, T>(backend, elements),
            write d_table = random_elements::<B, f32>(backend, parameters),
        ] backend.embedding_backward(EmbeddingBackward { width, rows, ids, d_out, d_table })),
        case!("rms_norm_forward", Work::moved::<T>(2 * elements), |backend| [
            read x = random_elements::<B, T>(backend, elements),
            read weight = random_elements::<B, T>(backend, width),
            write y = random_elements::<B, T>(backend, elements),
            write inv_rms = backend.allocate::<f32>(tokens),
        ] backend.rms_norm_forward(RmsNormForward { eps: 1e-5, x, weight, y, inv_rms })),
        case!("rms_norm_backward", Work::moved::<T>(4 * elements), |backend| [
            read x = random_elements::<B, T>(backend, elements),
            read weight = random_elements::<B, T>(backend, width),
            read inv_rms = upload(backend, &vec![0.5f32; tokens]),
            read d_y = random_elements::<B, T>(backend, elements),
            write d_x = backend.allocate::<T>(elements),
            write d_weight = backend.allocate::<f32>(width),
        ] backend.rms_norm_backward(RmsNormBackward { x, weight, inv_rms, d_y, d_x, d_weight })),
    ];
    let layers = [sizes.gate_up(), [mlp, width], SMALL_LAYER];
    cases.extend(layers.into_iter().flat_map(|layer| linear::<B, T>(sizes, layer)));
    let shape = QkvShape { batch: 1, length: tokens, ..attention };
    let cached = tokens * shape.kv_heads * shape.head_dim;
    let converted = parameters * (size_of::<f32>() + size_of::<T>());
    let with_remainder = T::DTYPE == DType::BF16;
    let remainder = if with_remainder { 2 * size_of::<i16>() } else { 0 };
    let updated = parameters * (5 * size_of::<f32>() + 2 * size_of::<T>() + remainder);
    cases.extend([
        linear_generation::<B, T>(1, sizes.gate_up()),
        linear_generation::<B, T>(1, LARGE_LAYER),
        linear_generation::<B, T>(8, sizes.gate_up()),
        linear_generation::<B, T>(32, sizes.gate_up()),
        linear_generation::<B, T>(512, sizes.gate_up()),
        case!("swiglu_forward", Work::moved::<T>(3 * tokens * mlp), |backend| [
            read gate_up = random_elements::<B, T>(backend, tokens * 2 * mlp),
            write out = backend.allocate::<T>(tokens * mlp),
        ] backend.swiglu_forward(mlp, gate_up, out)),
        case!("swiglu_backward", Work::moved::<T>(6 * tokens * mlp), |backend| [
            write gate_up = random_elements::<B, T>(backend, tokens * 2 * mlp),
            write out = random_elements::<B, T>(backend, tokens * mlp),
        ] backend.swiglu_backward::<T>(mlp, gate_up, out)),
        cross_entropy::<B, T>(sizes, "cross_entropy_forward", false, false),
        cross_entropy::<B, T>(sizes, "cross_entropy_forward_backward", true, false),
        cross_entropy::<B, T>(sizes, "cross_entropy_with_teacher", true, true),
        sample::<B, T>(sizes, "sample likeliest", 0.0),
        sample::<B, T>(sizes, "sample top-p", 1.0),
        case!("key_value_append", Work::moved::<T>(4 * cached), |backend| [
            read qkv = random_elements::<B, T>(backend, tokens * shape.row()),
            read rows = upload(backend, &(0..tokens as u32).collect::<Vec<_>>()),
            write keys = backend.allocate::<T>(cached),
            write values = backend.allocate::<T>(cached),
        ] backend.key_value_append(KeyValueAppend {
            shape: &shape, rows, block_length: 1, qkv, keys, values,
        })),
        // From f32 to the case's type.
        case!("convert", Work::Bytes(converted as u64), |backend| [
            read x = random_elements::<B, f32>(backend, parameters),
            write y = backend.allocate::<T>(parameters),
        ] backend.convert::<f32, T>(x, y)),
        case!("add", Work::moved::<T>(3 * elements), |backend| [
            read x = random_elements::<B, T>(backend, elements),
            read y = random_elements::<B, T>(backend, elements),
            write out = backend.allocate::<T>(elements),
        ] backend.add::<T>(x, y, out)),
        case!("squared_norm", Work::moved::<T>(parameters), |backend| [
            read x = random_elements::<B, T>(backend, parameters),
            write out = backend.allocate::<f64>(1),
        ] backend.squared_norms::<T>(&[x], out)),
        case!("adamw", Work::Bytes(updated as u64), |backend| [
            write weights = random_elements::<B, T>(backend, parameters),
            read gradients = random_elements::<B, f32>(backend, parameters),
            write remainder = upload(backend, &vec![0i16; if with_remainder { parameters } else { 0 }]),
            write first_moment = random_elements::<B, f32>(backend, parameters),
            write second_moment = upload(backend, &vec![1f32; parameters]),
        ] backend.adamw(AdamWUpdate {
            step: &STEP, gradients, weights, remainder: with_remainder.then_some(remainder),
            first_moment, second_moment,
        })),
    ]);
    cases
}

/// Returns the tokens of a pass of several sequences.
fn sample<B: Backend, T: Element>(
    Sizes { vocabulary, .. }: Sizes,
    name: &'static str,
    temperature: f64,
) -> Case<B> {
    const ROWS: usize = 8;
    let row = move || {
        let sampling = RowSampling {
            temperature,
            min_p: 0.0,
            top_k: 0,
            top_p: 0.9,
            random: 0.5,
            changes: Vec::new(),
        };
        RowRequest { token: RowToken::Sampled(sampling), log_probabilities: None }
    };
    case!(name, Work::moved::<T>(ROWS * vocabulary), |backend| [
        read logits = random_elements::<B, T>(backend, ROWS * vocabulary),
    ] {
        let rows = [(); ROWS].map(|()| row());
        let args = SampleArgs { vocabulary, known: vocabulary, logits, rows: &rows };
        backend.sample(args).map(drop)
    })
}

/// Returns both passes of a linear layer with these inputs and outputs.
fn linear<B: Backend, T: Element>(
    Sizes { tokens, .. }: Sizes,
    [inputs, outputs]: [usize; 2],
) -> [Case<B>; 3] {
    let work = Work::matmuls(1, tokens, inputs, outputs);
    let name = |pass: &str| format!("linear_{pass} {inputs} to {outputs}");
    let forward = linear_forward::<B, T>(name("forward"), work, tokens, [inputs, outputs]);
    let input = case!(name("backward_input"), work, |backend| [
        read d_y = random_elements::<B, T>(backend, tokens * outputs),
        read weight = random_elements::<B, T>(backend, outputs * inputs),
        write d_x = backend.allocate::<T>(tokens * inputs),
    ] backend.linear_backward_input(LinearBackwardInput {
        inputs, d_y, weight, d_x, accumulation: Accumulation::Overwrite,
    }));
    let weight = case!(name("backward_weight"), work, |backend| [
        read x = random_elements::<B, T>(backend, tokens * inputs),
        read d_y = random_elements::<B, T>(backend, tokens * outputs),
        write d_weight = backend.allocate::<f32>(outputs * inputs),
    ] backend.linear_backward_weight(LinearBackwardWeight {
        inputs, x, d_y, d_weight, accumulation: Accumulation::Add,
    }));
    [forward, input, weight]
}

fn linear_forward<B: Backend, T: Element>(
    name: String,
    work: Work,
    tokens: usize,
    [inputs, outputs]: [usize; 2],
) -> Case<B> {
    case!(name, work, |backend| [
        read x = random_elements::<B, T>(backend, tokens * inputs),
        read weight = random_elements::<B, T>(backend, outputs * inputs),
        write y = backend.allocate::<T>(tokens * outputs),
    ] backend.linear_forward(LinearForward::new(inputs, x, weight, y)))
}

/// Returns a layer on tokens of several sequences, as in generation. The weight is packed if the device packs
/// weights.
fn linear_generation<B: Backend, T: Element>(
    tokens: usize,
    [inputs, outputs]: [usize; 2],
) -> Case<B> {
    let name = match tokens {
        1 => format!("linear_forward of a token, {inputs} to {outputs}"),
        _ => format!("linear_forward of {tokens} independent tokens, {inputs} to {outputs}"),
    };
    let work = match tokens {
        1 => Work::moved::<T>(inputs * outputs),
        _ => Work::matmuls(1, tokens, inputs, outputs),
    };
    case!(name, work, |backend| [
        read x = random_elements::<B, T>(backend, tokens * inputs),
        read weight = random_elements::<B, T>(backend, outputs * inputs),
        read packed = packed_weight::<B, T>(backend, inputs, outputs),
        write y = backend.allocate::<T>(tokens * outputs),
    ] backend.linear_forward(LinearForward {
        inputs,
        x,
        weight,
        residual: None,
        y,
        independent: true,
        packed: (backend.packed_len::<T>(inputs, outputs) > 0).then_some(packed),
    }))
}

/// Returns a random packed weight; an empty buffer if the device does not pack weights.
fn packed_weight<B: Backend, T: Element>(
    backend: &B,
    inputs: usize,
    outputs: usize,
) -> crate::error::Result<B::Buffer<u32>> {
    let weight = random_elements::<B, T>(backend, inputs * outputs)?;
    let len = backend.packed_len::<T>(inputs, outputs);
    let mut packed = backend.allocate::<u32>(len)?;
    if len > 0 {
        backend.pack_weight::<T>(inputs, B::whole(&weight), B::whole_mut(&mut packed))?;
    }
    Ok(packed)
}

/// Returns a case of the output head. A teacher has the same width.
fn cross_entropy<B: Backend, T: Element>(
    Sizes { tokens, width, vocabulary, .. }: Sizes,
    name: &str,
    with_gradients: bool,
    with_teacher: bool,
) -> Case<B> {
    let heads = 1 + usize::from(with_teacher);
    let matmuls = heads + if with_gradients { 2 } else { 0 };
    let shape = HeadShape::whole(tokens, width, vocabulary).with_teacher(with_teacher);
    let other_width = if with_teacher { width } else { 0 };
    case!(name, Work::matmuls(matmuls, tokens, width, vocabulary), |backend| [
        read x = random_elements::<B, T>(backend, tokens * width),
        read weight = random_elements::<B, T>(backend, vocabulary * width),
        read other_x = random_elements::<B, T>(backend, tokens * other_width),
        read other_weight = random_elements::<B, T>(backend, vocabulary * other_width),
        read targets = ids(backend, tokens, vocabulary),
        write scratch = backend.allocate::<f32>(backend.cross_entropy_scratch(&shape)),
        write loss = backend.allocate::<f64>(heads),
        write d_x = backend.allocate::<T>(tokens * width),
        write d_weight = backend.allocate::<f32>(vocabulary * width),
    ] backend.cross_entropy(CrossEntropyArgs {
        shape, x, weight, targets, scratch, loss,
        teacher: with_teacher.then_some(HeadTeacher {
            width, x: other_x, weight: other_weight, rows: vocabulary, temperature: 1.0, scale: 1.0,
        }),
        gradients: with_gradients.then_some(HeadGradients {
            scale: 1.0, d_x, d_weight: Some(d_weight), accumulation: Accumulation::Add,
        }),
        ranks: None,
    }))
}
