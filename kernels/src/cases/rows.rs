//! Cases of the operators that work on rows: everything but attention and RoPE.

use super::{Case, Work, ids, numbers, upload, whole, whole_mut};
use crate::adamw::AdamW;
use crate::backend::Backend;
use crate::cross_entropy::{HeadGradients, HeadShape};
use crate::rope::QkvShape;
use crate::scalar::{Element, Scalar};

const TOKENS: usize = 2048;
const WIDTH: usize = 512;
const MLP: usize = 1408;
const VOCABULARY: usize = 8192;
/// Inputs and outputs of linear layers: the gate and up projections, the down projection, and the
/// gate and up projections of the smallest models.
const LAYERS: [[usize; 2]; 3] = [[WIDTH, 2 * MLP], [MLP, WIDTH], [64, 344]];
/// A vocabulary's projection, which does not fit a cache.
const LARGE_LAYER: [usize; 2] = [2048, 32_000];

pub(super) fn cases<B: Backend, T: Element>() -> Vec<Case<B>> {
    let mut cases = vec![
        embedding_forward::<B, T>(),
        embedding_backward::<B, T>(),
        rms_norm_forward::<B, T>(),
        rms_norm_backward::<B, T>(),
    ];
    cases.extend(LAYERS.into_iter().flat_map(linear::<B, T>));
    cases.extend([
        linear_one_token::<B, T>(LAYERS[0]),
        linear_one_token::<B, T>(LARGE_LAYER),
        swiglu_forward::<B, T>(),
        swiglu_backward::<B, T>(),
        cross_entropy::<B, T>("cross_entropy_forward", false),
        cross_entropy::<B, T>("cross_entropy_forward_backward", true),
        key_value_append::<B, T>(),
        squared_norm::<B, T>(),
        adamw::<B, T>(),
    ]);
    cases
}

fn embedding_forward<B: Backend, T: Element>() -> Case<B> {
    Case::new("embedding_forward", Work::moved::<T>(2 * TOKENS * WIDTH), |backend: &B| {
        let ids = ids(backend, TOKENS, VOCABULARY)?;
        let table = numbers::<B, T>(backend, VOCABULARY * WIDTH)?;
        let mut out = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        Ok(move |backend: &B| {
            let (ids, table) = (whole::<B, u32>(&ids), whole::<B, T>(&table));
            backend.embedding_forward(WIDTH, ids, table, whole_mut::<B, T>(&mut out))
        })
    })
}

fn embedding_backward<B: Backend, T: Element>() -> Case<B> {
    Case::new("embedding_backward", Work::moved::<T>(2 * TOKENS * WIDTH), |backend: &B| {
        let ids = ids(backend, TOKENS, VOCABULARY)?;
        let d_out = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        let mut d_table = numbers::<B, f32>(backend, VOCABULARY * WIDTH)?;
        Ok(move |backend: &B| {
            let (ids, d_out) = (whole::<B, u32>(&ids), whole::<B, T>(&d_out));
            backend.embedding_backward(WIDTH, ids, d_out, whole_mut::<B, f32>(&mut d_table))
        })
    })
}

fn rms_norm_forward<B: Backend, T: Element>() -> Case<B> {
    Case::new("rms_norm_forward", Work::moved::<T>(2 * TOKENS * WIDTH), |backend: &B| {
        let x = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        let weight = numbers::<B, T>(backend, WIDTH)?;
        let mut y = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        let mut inv_rms = backend.allocate::<f32>(TOKENS)?;
        Ok(move |backend: &B| {
            backend.rms_norm_forward(
                1e-5,
                whole::<B, T>(&x),
                whole::<B, T>(&weight),
                whole_mut::<B, T>(&mut y),
                whole_mut::<B, f32>(&mut inv_rms),
            )
        })
    })
}

fn rms_norm_backward<B: Backend, T: Element>() -> Case<B> {
    Case::new("rms_norm_backward", Work::moved::<T>(4 * TOKENS * WIDTH), |backend: &B| {
        let x = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        let weight = numbers::<B, T>(backend, WIDTH)?;
        let inv_rms = upload(backend, &[0.5f32; TOKENS])?;
        let d_y = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        let mut d_x = backend.allocate::<T>(TOKENS * WIDTH)?;
        let mut d_weight = backend.allocate::<f32>(WIDTH)?;
        Ok(move |backend: &B| {
            backend.rms_norm_backward(
                whole::<B, T>(&x),
                whole::<B, T>(&weight),
                whole::<B, f32>(&inv_rms),
                whole::<B, T>(&d_y),
                whole_mut::<B, T>(&mut d_x),
                whole_mut::<B, f32>(&mut d_weight),
            )
        })
    })
}

/// Both passes of a linear layer of these inputs and outputs.
fn linear<B: Backend, T: Element>([inputs, outputs]: [usize; 2]) -> [Case<B>; 3] {
    let work = Work::products(1, TOKENS, inputs, outputs);
    let name = |pass: &str| format!("linear_{pass} {inputs} to {outputs}");
    let forward = Case::new(name("forward"), work, move |backend: &B| {
        let x = numbers::<B, T>(backend, TOKENS * inputs)?;
        let weight = numbers::<B, T>(backend, outputs * inputs)?;
        let mut y = backend.allocate::<T>(TOKENS * outputs)?;
        Ok(move |backend: &B| {
            let (x, weight) = (whole::<B, T>(&x), whole::<B, T>(&weight));
            backend.linear_forward(inputs, x, weight, None, whole_mut::<B, T>(&mut y))
        })
    });
    let input = Case::new(name("backward_input"), work, move |backend: &B| {
        let d_y = numbers::<B, T>(backend, TOKENS * outputs)?;
        let weight = numbers::<B, T>(backend, outputs * inputs)?;
        let mut d_x = backend.allocate::<T>(TOKENS * inputs)?;
        Ok(move |backend: &B| {
            let (d_y, weight) = (whole::<B, T>(&d_y), whole::<B, T>(&weight));
            backend.linear_backward_input(inputs, d_y, weight, whole_mut::<B, T>(&mut d_x))
        })
    });
    let weight = Case::new(name("backward_weight"), work, move |backend: &B| {
        let x = numbers::<B, T>(backend, TOKENS * inputs)?;
        let d_y = numbers::<B, T>(backend, TOKENS * outputs)?;
        let mut d_weight = backend.allocate::<f32>(outputs * inputs)?;
        Ok(move |backend: &B| {
            let (x, d_y) = (whole::<B, T>(&x), whole::<B, T>(&d_y));
            backend.linear_backward_weight(inputs, x, d_y, whole_mut::<B, f32>(&mut d_weight))
        })
    });
    [forward, input, weight]
}

/// A layer on one token, as in generation, which reads the weight once.
fn linear_one_token<B: Backend, T: Element>([inputs, outputs]: [usize; 2]) -> Case<B> {
    let name = format!("linear_forward of a token, {inputs} to {outputs}");
    Case::new(name, Work::moved::<T>(inputs * outputs), move |backend: &B| {
        let x = numbers::<B, T>(backend, inputs)?;
        let weight = numbers::<B, T>(backend, outputs * inputs)?;
        let mut y = backend.allocate::<T>(outputs)?;
        Ok(move |backend: &B| {
            let (x, weight) = (whole::<B, T>(&x), whole::<B, T>(&weight));
            backend.linear_forward(inputs, x, weight, None, whole_mut::<B, T>(&mut y))
        })
    })
}

fn swiglu_forward<B: Backend, T: Element>() -> Case<B> {
    Case::new("swiglu_forward", Work::moved::<T>(3 * TOKENS * MLP), |backend: &B| {
        let gate_up = numbers::<B, T>(backend, TOKENS * 2 * MLP)?;
        let mut out = backend.allocate::<T>(TOKENS * MLP)?;
        Ok(move |backend: &B| {
            backend.swiglu_forward(MLP, whole::<B, T>(&gate_up), whole_mut::<B, T>(&mut out))
        })
    })
}

fn swiglu_backward<B: Backend, T: Element>() -> Case<B> {
    Case::new("swiglu_backward", Work::moved::<T>(6 * TOKENS * MLP), |backend: &B| {
        let mut gate_up = numbers::<B, T>(backend, TOKENS * 2 * MLP)?;
        let mut out = numbers::<B, T>(backend, TOKENS * MLP)?;
        Ok(move |backend: &B| {
            let gate_up = whole_mut::<B, T>(&mut gate_up);
            backend.swiglu_backward(MLP, gate_up, whole_mut::<B, T>(&mut out))
        })
    })
}

fn cross_entropy<B: Backend, T: Element>(name: &str, with_gradients: bool) -> Case<B> {
    let products = if with_gradients { 3 } else { 1 };
    let work = Work::products(products, TOKENS, WIDTH, VOCABULARY);
    Case::new(name, work, move |backend: &B| {
        let shape = HeadShape { tokens: TOKENS, width: WIDTH, vocab_size: VOCABULARY };
        let x = numbers::<B, T>(backend, TOKENS * WIDTH)?;
        let weight = numbers::<B, T>(backend, VOCABULARY * WIDTH)?;
        let targets = ids(backend, TOKENS, VOCABULARY)?;
        let mut scratch = backend.allocate::<f32>(backend.cross_entropy_scratch(&shape))?;
        let mut loss = backend.allocate::<f64>(1)?;
        let mut d_x = backend.allocate::<T>(TOKENS * WIDTH)?;
        let mut d_weight = backend.allocate::<f32>(VOCABULARY * WIDTH)?;
        Ok(move |backend: &B| {
            let gradients = with_gradients.then(|| HeadGradients {
                scale: 1.0,
                d_x: whole_mut::<B, T>(&mut d_x),
                d_weight: whole_mut::<B, f32>(&mut d_weight),
            });
            backend.cross_entropy(
                &shape,
                whole::<B, T>(&x),
                whole::<B, T>(&weight),
                whole::<B, u32>(&targets),
                whole_mut::<B, f32>(&mut scratch),
                whole_mut::<B, f64>(&mut loss),
                gradients,
            )
        })
    })
}

fn key_value_append<B: Backend, T: Element>() -> Case<B> {
    let shape = QkvShape { batch: 1, length: TOKENS, heads: 8, kv_heads: 4, head_dim: 64 };
    let width = shape.kv_heads * shape.head_dim;
    Case::new("key_value_append", Work::moved::<T>(4 * TOKENS * width), move |backend: &B| {
        let qkv = numbers::<B, T>(backend, TOKENS * shape.row())?;
        let mut keys = backend.allocate::<T>(TOKENS * width)?;
        let mut values = backend.allocate::<T>(TOKENS * width)?;
        Ok(move |backend: &B| {
            let (keys, values) = (whole_mut::<B, T>(&mut keys), whole_mut::<B, T>(&mut values));
            backend.key_value_append(&shape, 0, whole::<B, T>(&qkv), keys, values)
        })
    })
}

fn squared_norm<B: Backend, T: Element>() -> Case<B> {
    Case::new("squared_norm", Work::moved::<T>(VOCABULARY * WIDTH), |backend: &B| {
        let x = numbers::<B, T>(backend, VOCABULARY * WIDTH)?;
        let mut out = backend.allocate::<f64>(1)?;
        Ok(move |backend: &B| {
            backend.squared_norm(whole::<B, T>(&x), whole_mut::<B, f64>(&mut out))
        })
    })
}

fn adamw<B: Backend, T: Element>() -> Case<B> {
    const STEP: AdamW = AdamW {
        learning_rate: 1e-4,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        clip_norm: 1.0,
        step: 10,
    };
    const LEN: usize = VOCABULARY * WIDTH;
    // f32 weights are their own master copy; others are only written.
    let with_master = T::DTYPE != f32::DTYPE;
    let state = if with_master { 7 } else { 5 };
    let weights = if with_master { 1 } else { 2 };
    let bytes = LEN * (state * size_of::<f32>() + weights * size_of::<T>());
    Case::new("adamw", Work::Bytes(bytes as u64), move |backend: &B| {
        let mut weights = numbers::<B, T>(backend, LEN)?;
        let gradients = numbers::<B, f32>(backend, LEN)?;
        let squared_norm = upload(backend, &[1f64])?;
        let mut master = numbers::<B, f32>(backend, LEN)?;
        let mut first_moment = numbers::<B, f32>(backend, LEN)?;
        let mut second_moment = upload(backend, &vec![1f32; LEN])?;
        Ok(move |backend: &B| {
            backend.adamw(
                &STEP,
                whole::<B, f64>(&squared_norm),
                whole::<B, f32>(&gradients),
                whole_mut::<B, T>(&mut weights),
                with_master.then(|| whole_mut::<B, f32>(&mut master)),
                whole_mut::<B, f32>(&mut first_moment),
                whole_mut::<B, f32>(&mut second_moment),
            )
        })
    })
}
