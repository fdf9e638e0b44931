//! Cases of the operators on rows: all except attention, RoPE and routers.

use super::{Case, Sizes, Work, ids, random_elements, upload};
use crate::adamw::{AdamW, AdamWUpdate};
use crate::backend::Backend;
use crate::cross_entropy::{CrossEntropyArgs, HeadGradients, HeadShape};
use crate::embedding::{EmbeddingBackward, EmbeddingForward};
use crate::key_value_cache::KeyValueAppend;
use crate::linear::{Accumulation, LinearBackwardInput, LinearBackwardWeight, LinearForward};
use crate::ranks::VocabularyRows;
use crate::rms_norm::{RmsNormBackward, RmsNormForward};
use crate::rope::QkvShape;
use crate::scalar::{DType, Element};

/// Linear layers beside the model's own: one of the smallest models, and the projection to a
/// vocabulary, which does not fit a cache.
const SMALL_LAYER: [usize; 2] = [64, 344];
const LARGE_LAYER: [usize; 2] = [2048, 32_000];

pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    let mut cases = vec![
        embedding_forward::<B, T>(sizes),
        embedding_backward::<B, T>(sizes),
        rms_norm_forward::<B, T>(sizes),
        rms_norm_backward::<B, T>(sizes),
    ];
    let layers = [sizes.gate_up(), [sizes.mlp, sizes.width], SMALL_LAYER];
    cases.extend(layers.into_iter().flat_map(|layer| linear::<B, T>(sizes, layer)));
    cases.extend([
        linear_one_token::<B, T>(sizes.gate_up()),
        linear_one_token::<B, T>(LARGE_LAYER),
        swiglu_forward::<B, T>(sizes),
        swiglu_backward::<B, T>(sizes),
        cross_entropy::<B, T>(sizes, "cross_entropy_forward", false),
        cross_entropy::<B, T>(sizes, "cross_entropy_forward_backward", true),
        key_value_append::<B, T>(sizes),
        convert::<B, T>(sizes),
        add::<B, T>(sizes),
        squared_norm::<B, T>(sizes),
        adamw::<B, T>(sizes),
    ]);
    cases
}

fn embedding_forward<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "embedding_forward",
        Work::moved::<T>(2 * sizes.tokens * sizes.width),
        move |backend: &B| {
            let ids = ids(backend, sizes.tokens, sizes.vocabulary)?;
            let table = random_elements::<B, T>(backend, sizes.vocabulary * sizes.width)?;
            let mut out = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
            Ok(move |backend: &B| {
                backend.embedding_forward(EmbeddingForward {
                    width: sizes.width,
                    rows: VocabularyRows::all(sizes.vocabulary),
                    ids: B::whole(&ids),
                    table: B::whole(&table),
                    out: B::whole_mut(&mut out),
                })
            })
        },
    )
}

fn embedding_backward<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "embedding_backward",
        Work::moved::<T>(2 * sizes.tokens * sizes.width),
        move |backend: &B| {
            let ids = ids(backend, sizes.tokens, sizes.vocabulary)?;
            let d_out = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
            let mut d_table = random_elements::<B, f32>(backend, sizes.vocabulary * sizes.width)?;
            Ok(move |backend: &B| {
                backend.embedding_backward(EmbeddingBackward {
                    width: sizes.width,
                    rows: VocabularyRows::all(sizes.vocabulary),
                    ids: B::whole(&ids),
                    d_out: B::whole(&d_out),
                    d_table: B::whole_mut(&mut d_table),
                })
            })
        },
    )
}

fn rms_norm_forward<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "rms_norm_forward",
        Work::moved::<T>(2 * sizes.tokens * sizes.width),
        move |backend: &B| {
            let x = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
            let weight = random_elements::<B, T>(backend, sizes.width)?;
            let mut y = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
            let mut inv_rms = backend.allocate::<f32>(sizes.tokens)?;
            Ok(move |backend: &B| {
                backend.rms_norm_forward(RmsNormForward {
                    eps: 1e-5,
                    x: B::whole(&x),
                    weight: B::whole(&weight),
                    y: B::whole_mut(&mut y),
                    inv_rms: B::whole_mut(&mut inv_rms),
                })
            })
        },
    )
}

fn rms_norm_backward<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "rms_norm_backward",
        Work::moved::<T>(4 * sizes.tokens * sizes.width),
        move |backend: &B| {
            let x = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
            let weight = random_elements::<B, T>(backend, sizes.width)?;
            let inv_rms = upload(backend, &vec![0.5f32; sizes.tokens])?;
            let d_y = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
            let mut d_x = backend.allocate::<T>(sizes.tokens * sizes.width)?;
            let mut d_weight = backend.allocate::<f32>(sizes.width)?;
            Ok(move |backend: &B| {
                backend.rms_norm_backward(RmsNormBackward {
                    x: B::whole(&x),
                    weight: B::whole(&weight),
                    inv_rms: B::whole(&inv_rms),
                    d_y: B::whole(&d_y),
                    d_x: B::whole_mut(&mut d_x),
                    d_weight: B::whole_mut(&mut d_weight),
                })
            })
        },
    )
}

/// Both passes of a linear layer of these inputs and outputs.
fn linear<B: Backend, T: Element>(sizes: Sizes, [inputs, outputs]: [usize; 2]) -> [Case<B>; 3] {
    let work = Work::matmuls(1, sizes.tokens, inputs, outputs);
    let name = |pass: &str| format!("linear_{pass} {inputs} to {outputs}");
    let forward = Case::new(name("forward"), work, move |backend: &B| {
        let x = random_elements::<B, T>(backend, sizes.tokens * inputs)?;
        let weight = random_elements::<B, T>(backend, outputs * inputs)?;
        let mut y = backend.allocate::<T>(sizes.tokens * outputs)?;
        Ok(move |backend: &B| {
            backend.linear_forward(LinearForward {
                inputs,
                x: B::whole(&x),
                weight: B::whole(&weight),
                residual: None,
                y: B::whole_mut(&mut y),
            })
        })
    });
    let input = Case::new(name("backward_input"), work, move |backend: &B| {
        let d_y = random_elements::<B, T>(backend, sizes.tokens * outputs)?;
        let weight = random_elements::<B, T>(backend, outputs * inputs)?;
        let mut d_x = backend.allocate::<T>(sizes.tokens * inputs)?;
        Ok(move |backend: &B| {
            backend.linear_backward_input(LinearBackwardInput {
                inputs,
                d_y: B::whole(&d_y),
                weight: B::whole(&weight),
                d_x: B::whole_mut(&mut d_x),
                accumulation: Accumulation::Overwrite,
            })
        })
    });
    let weight = Case::new(name("backward_weight"), work, move |backend: &B| {
        let x = random_elements::<B, T>(backend, sizes.tokens * inputs)?;
        let d_y = random_elements::<B, T>(backend, sizes.tokens * outputs)?;
        let mut d_weight = backend.allocate::<f32>(outputs * inputs)?;
        Ok(move |backend: &B| {
            backend.linear_backward_weight(LinearBackwardWeight {
                inputs,
                x: B::whole(&x),
                d_y: B::whole(&d_y),
                d_weight: B::whole_mut(&mut d_weight),
                accumulation: Accumulation::Add,
            })
        })
    });
    [forward, input, weight]
}

/// A layer on one token, as in generation, which reads the weight once.
fn linear_one_token<B: Backend, T: Element>([inputs, outputs]: [usize; 2]) -> Case<B> {
    let name = format!("linear_forward of a token, {inputs} to {outputs}");
    Case::new(name, Work::moved::<T>(inputs * outputs), move |backend: &B| {
        let x = random_elements::<B, T>(backend, inputs)?;
        let weight = random_elements::<B, T>(backend, outputs * inputs)?;
        let mut y = backend.allocate::<T>(outputs)?;
        Ok(move |backend: &B| {
            backend.linear_forward(LinearForward {
                inputs,
                x: B::whole(&x),
                weight: B::whole(&weight),
                residual: None,
                y: B::whole_mut(&mut y),
            })
        })
    })
}

fn swiglu_forward<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "swiglu_forward",
        Work::moved::<T>(3 * sizes.tokens * sizes.mlp),
        move |backend: &B| {
            let gate_up = random_elements::<B, T>(backend, sizes.tokens * 2 * sizes.mlp)?;
            let mut out = backend.allocate::<T>(sizes.tokens * sizes.mlp)?;
            Ok(move |backend: &B| {
                backend.swiglu_forward(sizes.mlp, B::whole(&gate_up), B::whole_mut(&mut out))
            })
        },
    )
}

fn swiglu_backward<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "swiglu_backward",
        Work::moved::<T>(6 * sizes.tokens * sizes.mlp),
        move |backend: &B| {
            let mut gate_up = random_elements::<B, T>(backend, sizes.tokens * 2 * sizes.mlp)?;
            let mut out = random_elements::<B, T>(backend, sizes.tokens * sizes.mlp)?;
            Ok(move |backend: &B| {
                let gate_up = B::whole_mut::<T>(&mut gate_up);
                backend.swiglu_backward(sizes.mlp, gate_up, B::whole_mut(&mut out))
            })
        },
    )
}

fn cross_entropy<B: Backend, T: Element>(
    sizes: Sizes,
    name: &str,
    with_gradients: bool,
) -> Case<B> {
    let matmuls = if with_gradients { 3 } else { 1 };
    let work = Work::matmuls(matmuls, sizes.tokens, sizes.width, sizes.vocabulary);
    Case::new(name, work, move |backend: &B| {
        let shape = HeadShape::whole(sizes.tokens, sizes.width, sizes.vocabulary);
        let x = random_elements::<B, T>(backend, sizes.tokens * sizes.width)?;
        let weight = random_elements::<B, T>(backend, sizes.vocabulary * sizes.width)?;
        let targets = ids(backend, sizes.tokens, sizes.vocabulary)?;
        let mut scratch = backend.allocate::<f32>(backend.cross_entropy_scratch(&shape))?;
        let mut loss = backend.allocate::<f64>(1)?;
        let mut d_x = backend.allocate::<T>(sizes.tokens * sizes.width)?;
        let mut d_weight = backend.allocate::<f32>(sizes.vocabulary * sizes.width)?;
        Ok(move |backend: &B| {
            let gradients = with_gradients.then(|| HeadGradients {
                scale: 1.0,
                d_x: B::whole_mut(&mut d_x),
                d_weight: B::whole_mut(&mut d_weight),
                accumulation: Accumulation::Add,
            });
            backend.cross_entropy(CrossEntropyArgs {
                shape,
                x: B::whole(&x),
                weight: B::whole(&weight),
                targets: B::whole(&targets),
                scratch: B::whole_mut(&mut scratch),
                loss: B::whole_mut(&mut loss),
                gradients,
                ranks: None,
            })
        })
    })
}

fn key_value_append<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    let shape = QkvShape { batch: 1, length: sizes.tokens, ..sizes.attention };
    let width = shape.kv_heads * shape.head_dim;
    Case::new("key_value_append", Work::moved::<T>(4 * sizes.tokens * width), move |backend: &B| {
        let qkv = random_elements::<B, T>(backend, sizes.tokens * shape.row())?;
        let mut keys = backend.allocate::<T>(sizes.tokens * width)?;
        let mut values = backend.allocate::<T>(sizes.tokens * width)?;
        Ok(move |backend: &B| {
            backend.key_value_append(KeyValueAppend {
                shape: &shape,
                first_position: 0,
                qkv: B::whole(&qkv),
                keys: B::whole_mut(&mut keys),
                values: B::whole_mut(&mut values),
            })
        })
    })
}

fn add<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    let count = sizes.tokens * sizes.width;
    Case::new("add", Work::moved::<T>(3 * count), move |backend: &B| {
        let x = random_elements::<B, T>(backend, count)?;
        let y = random_elements::<B, T>(backend, count)?;
        let mut out = backend.allocate::<T>(count)?;
        Ok(move |backend: &B| backend.add(B::whole(&x), B::whole(&y), B::whole_mut(&mut out)))
    })
}

/// From f32 to the case's type.
fn convert<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    let count = sizes.vocabulary * sizes.width;
    let bytes = count * (size_of::<f32>() + size_of::<T>());
    Case::new("convert", Work::Bytes(bytes as u64), move |backend: &B| {
        let x = random_elements::<B, f32>(backend, count)?;
        let mut y = backend.allocate::<T>(count)?;
        Ok(move |backend: &B| backend.convert(B::whole(&x), B::whole_mut(&mut y)))
    })
}

fn squared_norm<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
    Case::new(
        "squared_norm",
        Work::moved::<T>(sizes.vocabulary * sizes.width),
        move |backend: &B| {
            let x = random_elements::<B, T>(backend, sizes.vocabulary * sizes.width)?;
            let mut out = backend.allocate::<f64>(1)?;
            Ok(move |backend: &B| backend.squared_norms(&[B::whole(&x)], B::whole_mut(&mut out)))
        },
    )
}

fn adamw<B: Backend, T: Element>(sizes: Sizes) -> Case<B> {
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
    let len = sizes.vocabulary * sizes.width;
    let with_remainder = T::DTYPE == DType::BF16;
    let remainder = if with_remainder { 2 * size_of::<i16>() } else { 0 };
    let bytes = len * (5 * size_of::<f32>() + 2 * size_of::<T>() + remainder);
    Case::new("adamw", Work::Bytes(bytes as u64), move |backend: &B| {
        let mut weights = random_elements::<B, T>(backend, len)?;
        let gradients = random_elements::<B, f32>(backend, len)?;
        let mut remainder = upload(backend, &vec![0i16; if with_remainder { len } else { 0 }])?;
        let mut first_moment = random_elements::<B, f32>(backend, len)?;
        let mut second_moment = upload(backend, &vec![1f32; len])?;
        Ok(move |backend: &B| {
            backend.adamw(AdamWUpdate {
                step: &STEP,
                gradients: B::whole(&gradients),
                weights: B::whole_mut(&mut weights),
                remainder: with_remainder.then(|| B::whole_mut(&mut remainder)),
                first_moment: B::whole_mut(&mut first_moment),
                second_moment: B::whole_mut(&mut second_moment),
            })
        })
    })
}
