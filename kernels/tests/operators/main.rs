//! Every operator, on every device of the build, against the plain mathematics in f64: one module
//! per operator, in one program, so that it can be copied to a machine with a GPU.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod reference;

mod adamw;
mod attention;
mod attention_of_sequences;
mod attention_paths;
mod attention_stress;
mod cases;
mod convert;
mod cross_entropy;
mod embedding;
mod key_value_append;
mod lengths;
mod linear;
mod logits;
mod parameters;
mod ptxas;
mod qk_norm;
mod rms_norm;
mod rope;
mod router;
mod sampling;
mod swiglu;
mod tensor_parallel;
mod threads;
