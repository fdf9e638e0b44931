//! Benchmark cases: every operator, forward and backward, on any [`Backend`]. The benchmarks and
//! `moh-bench operators` run the same list; nothing else needs the feature `cases`.
//!
//! On the CPU the cases have the shapes of a small Llama ([`Sizes::SMALL`]). Attention also has two other
//! shapes:
//! eight sequences of 256 tokens with heads of 8; one sequence of 512 tokens with 32 query and 8
//! key/value heads of 128. On a GPU the cases have the shapes of LLaMA-3-8B ([`Sizes::LLAMA_8B`]). Attention in
//! generation has contexts of 16,384 tokens.

/// Builds a case that creates buffers and runs an operator on them. `read` and `write` pass a view of a buffer; `own`
/// passes a mutable reference to a value that is not a buffer.
macro_rules! case {
    ($name:expr, $work:expr, |$backend:ident| [
        $($access:ident $buffer:ident = $new:expr),+ $(,)?
    ] $run:expr) => {
        Case::new($name, $work, move |$backend: &B| {
            $(#[allow(unused_mut)] let mut $buffer = $new?;)+
            Ok(move |$backend: &B| {
                $(let $buffer = case!(@$access $buffer);)+
                $run
            })
        })
    };
    (@read $buffer:ident) => { B::whole(&$buffer) };
    (@write $buffer:ident) => { B::whole_mut(&mut $buffer) };
    (@own $buffer:ident) => { &mut $buffer };
}

mod attention;
mod generation;
mod logits;
mod rows;

pub use attention::AttentionCase;

use crate::{Backend, Element, QkvShape, Result, Scalar};

/// Sizes of the measured model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Width of the MLP.
    pub mlp: usize,
    /// Rows of the vocabulary.
    pub vocabulary: usize,
    /// Heads, and the sequences of a micro-batch.
    pub attention: QkvShape,
}

impl Sizes {
    /// A small Llama: 2048 tokens of width 512.
    pub const SMALL: Self = Sizes {
        tokens: 2048,
        width: 512,
        mlp: 1408,
        vocabulary: 8192,
        attention: QkvShape { batch: 4, length: 512, heads: 8, kv_heads: 4, head_dim: 64 },
    };
    /// LLaMA-3-8B on a sequence of 8192 tokens.
    pub const LLAMA_8B: Self = Sizes {
        tokens: 8192,
        width: 4096,
        mlp: 14_336,
        vocabulary: 128_256,
        attention: QkvShape { batch: 1, length: 8192, heads: 32, kv_heads: 8, head_dim: 128 },
    };

    /// Returns the inputs and outputs of the gate and up projections.
    fn gate_up(&self) -> [usize; 2] {
        [self.width, 2 * self.mlp]
    }
}

/// One operator at one shape.
pub struct Case<B: Backend> {
    /// Operator and pass; for attention also the heads and the share of active heads.
    pub name: String,
    /// The work of one run.
    pub work: Work,
    prepare: Box<Prepare<B>>,
}

type Prepare<B> = dyn Fn(&B) -> Result<Run<B>>;

/// Runs a case once. The device may still be computing after the call returns.
pub type Run<B> = Box<dyn FnMut(&B) -> Result<()> + Send>;

/// The work of one run of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Floating-point operations, a multiply-add counted as two.
    Operations(u64),
    /// Bytes read and written, for operators limited by memory bandwidth.
    Bytes(u64),
}

impl Work {
    /// Returns the work of moving `count` elements of type `S`, each read or written once.
    fn moved<S>(count: usize) -> Self {
        Work::Bytes((count * size_of::<S>()) as u64)
    }

    /// Returns the work of `count` matmuls of `rows x inputs x outputs` multiply-adds each.
    fn matmuls(count: usize, rows: usize, inputs: usize, outputs: usize) -> Self {
        Work::Operations((2 * count * rows * inputs * outputs) as u64)
    }
}

impl<B: Backend> Case<B> {
    /// Allocates and fills the operator's buffers.
    pub fn prepare(&self, backend: &B) -> Result<Run<B>> {
        (self.prepare)(backend)
    }

    fn new<R: FnMut(&B) -> Result<()> + Send + 'static>(
        name: impl Into<String>,
        work: Work,
        prepare: impl Fn(&B) -> Result<R> + 'static,
    ) -> Self {
        let prepare = move |backend: &B| Ok(Box::new(prepare(backend)?) as Run<B>);
        Case { name: name.into(), work, prepare: Box::new(prepare) }
    }
}

/// Returns every case, with weights and activations of type `T`. Gradients and moments are f32.
pub fn all<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    let mut cases = rows::cases::<B, T>(sizes);
    cases.extend(attention::cases::<B, T>(sizes));
    cases.extend(generation::cases::<B, T>(sizes));
    cases.extend(logits::cases::<B, T>(sizes));
    cases
}

/// Returns a buffer of pseudorandom elements between -1 and 1.
fn random_elements<B: Backend, T: Element>(backend: &B, len: usize) -> Result<B::Buffer<T>> {
    // Long buffers repeat a period: generating all elements would take longer than the measurement.
    const PERIOD: usize = (1 << 20) + 1;
    let unit = |index: u64| (scramble(index) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let period: Vec<T> =
        (0..len.min(PERIOD) as u64).map(|index| T::from_f32(unit(index))).collect();
    let mut buffer = backend.allocate(len)?;
    for start in (0..len).step_by(PERIOD) {
        let end = len.min(start + PERIOD);
        backend.upload(&period[..end - start], B::view_mut::<T>(&mut buffer, start..end))?;
    }
    Ok(buffer)
}

/// Returns a buffer of pseudorandom ids below `end`.
fn ids<B: Backend>(backend: &B, len: usize, end: usize) -> Result<B::Buffer<u32>> {
    let id = |index| (scramble(index) % end as u64) as u32;
    upload(backend, &(0..len as u64).map(id).collect::<Vec<u32>>())
}

fn upload<B: Backend, S: Scalar>(backend: &B, values: &[S]) -> Result<B::Buffer<S>> {
    let mut buffer = backend.allocate(values.len())?;
    backend.upload(values, B::whole_mut(&mut buffer))?;
    Ok(buffer)
}

/// Applies the mixing steps of SplitMix (Steele et al. 2014).
fn scramble(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
