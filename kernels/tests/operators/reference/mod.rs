//! Shared by the tests of the operators: seeded random elements, buffers on a device, and the
//! comparison of an operator's result with its reference in f64 ([`operators`]).
//!
//! All inputs are representable in bf16, so that the f32 operator, the bf16 operator and the
//! reference have the same inputs and select the same heads.

pub mod attention;
#[cfg(feature = "cuda")]
mod gpu;
pub mod operators;

#[cfg(feature = "cuda")]
pub use gpu::gpu;

use candle_core::backprop::GradStore;
use candle_core::{DType as CandleType, Device, Shape, Tensor, Var};
use half::bf16;
use moh_kernels::adamw::AdamW;
use moh_kernels::rope::RopeTable;
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};
use moh_kernels::router::{Routing, SharedHeads};
use moh_kernels::{Backend, DType, Element, Heads, QkvShape, Scalar};
use proptest::prelude::*;
use proptest::test_runner::Config;

/// Relative L2 error of results that are computed and stored in f32: some tens of roundings of
/// 6e-8 each.
pub const F32_TOLERANCE: f64 = 1e-5;
/// Relative L2 error of results that are stored in bf16: two roundings of at most 2^-9 each (a
/// gradient is added to, then rotated), on top of arithmetic in f32.
pub const BF16_TOLERANCE: f64 = 4e-3;
/// Root mean square below which a result is compared absolutely. Inputs are of order 1, so a
/// smaller gradient vanishes (one key, one head) except for its rounding.
pub const VANISHING: f64 = 1e-3;
/// Root mean square of the error that is always allowed: one rounding in f32 of terms of order 1,
/// as in a gradient with terms that cancel.
pub const ROUNDING: f64 = 1.2e-7;

/// Runs the body once for every device of this build. If the body names a type of elements, runs it once for each
/// type. A new device adds one line here.
macro_rules! on_each_device {
    ($device:ident => $body:expr) => {{
        {
            let $device = &moh_kernels::Cpu;
            $body;
        }
        #[cfg(feature = "cuda-emulator")]
        {
            let $device = &moh_kernels::Cuda::emulated();
            $body;
        }
        #[cfg(feature = "cuda")]
        if let Some($device) = &$crate::reference::gpu() {
            $body;
        }
    }};
    ($device:ident, $element:ident => $body:expr) => {{
        {
            type $element = f32;
            on_each_device!($device => $body);
        }
        type $element = half::bf16;
        on_each_device!($device => $body);
    }};
}

/// Devices for the ranks of a test.
pub trait Another {
    /// Returns another device of the same kind, which does not share scratch memory with this device.
    fn another(&self) -> Self;
}

impl Another for moh_kernels::Cpu {
    fn another(&self) -> Self {
        *self
    }
}

#[cfg(feature = "cuda-emulator")]
impl Another for moh_kernels::Cuda {
    fn another(&self) -> Self {
        #[cfg(feature = "cuda")]
        {
            use moh_kernels::Memory;
            if let Some(gpu) = gpu().filter(|gpu| gpu.name() == self.name()) {
                return gpu;
            }
        }
        Self::emulated()
    }
}

#[cfg(all(feature = "cuda", not(feature = "cuda-emulator")))]
impl Another for moh_kernels::Cuda {
    fn another(&self) -> Self {
        Self::new(0).unwrap()
    }
}

/// Returns the tolerance of results that are stored as `T`.
pub fn tolerance<T: Element>() -> f64 {
    if T::DTYPE == DType::BF16 { BF16_TOLERANCE } else { F32_TOLERANCE }
}

/// Returns a property test's configuration with `count` cases. The test writes no files beside the sources.
pub fn cases(count: u32) -> Config {
    Config { cases: count, failure_persistence: None, ..Config::default() }
}

/// Returns shapes of these sizes with up to three key/value heads.
pub fn qkv_shapes(
    batch: impl Strategy<Value = usize>,
    length: impl Strategy<Value = usize>,
    group: impl Strategy<Value = usize>,
    half: impl Strategy<Value = usize>,
) -> impl Strategy<Value = QkvShape> {
    (batch, length, 1usize..4, group, half).prop_map(|(batch, length, kv_heads, group, half)| {
        let heads = kv_heads * group;
        QkvShape { batch, length, heads, kv_heads, head_dim: 2 * half }
    })
}

/// A small random generator (splitmix64) with the same sequence for the same seed on every machine.
pub struct Random(pub u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a whole number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Returns an approximately normal element with variance 1, representable in bf16.
    pub fn element<T: Element>(&mut self) -> T {
        let uniform = |bits: u64| (bits & 0xffff) as f32 / 65536.0 - 0.5;
        let bits = self.bits();
        let sum: f32 = (0..4).map(|part| uniform(bits >> (16 * part))).sum();
        T::from_f32(bf16::from_f32(sum * 3f32.sqrt()).to_f32())
    }

    /// Returns `len` elements, each like [`Random::element`].
    pub fn elements<T: Element>(&mut self, len: usize) -> Vec<T> {
        (0..len).map(|_| self.element()).collect()
    }

    /// Returns `0..end` in a random order.
    pub fn permutation(&mut self, end: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..end as u32).collect();
        for last in (1..end).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

/// Returns cosines and sines `[positions, D/2]` of Llama's frequencies, computed in f64, stored in f32.
pub fn rope_tables(positions: usize, head_dim: usize) -> (Vec<f32>, Vec<f32>) {
    let angles = (0..positions).flat_map(|position| {
        let frequency = move |i| 1e4f64.powf(-2.0 * i as f64 / head_dim as f64);
        (0..head_dim / 2).map(move |i| position as f64 * frequency(i))
    });
    angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip()
}

/// Returns tables of the identity rotation, for tests of only the router.
pub fn no_rotation(positions: usize, head_dim: usize) -> (Vec<f32>, Vec<f32>) {
    (vec![1.0; positions * head_dim / 2], vec![0.0; positions * head_dim / 2])
}

/// The first step, with a large learning rate, so that the change of a weight is larger than the weight's rounding.
pub const STEP: AdamW = AdamW {
    learning_rate: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.1,
    clip_norm: 1.0,
    grad_norm: 1.0,
    step: 1,
};

// ---- routers ----

/// Returns the heads of a layer, all of them local.
pub fn all_heads(shape: &QkvShape) -> Heads {
    Heads { group_size: shape.heads / shape.kv_heads, ..Heads::all(shape.heads) }
}

/// Returns a router with the first `shared_heads` heads shared.
pub const fn first_shared(shared_heads: usize, top_k: usize) -> QueryNormRouter {
    let (shared, selects) = (SharedHeads::first(shared_heads), Selects::Heads);
    QueryNormRouter { shared, top_k, selects }
}

/// Returns a router with these heads shared.
pub fn shared(heads: impl IntoIterator<Item = usize>, top_k: usize) -> QueryNormRouter {
    let (shared, selects) = (SharedHeads::from_heads(heads).unwrap(), Selects::Heads);
    QueryNormRouter { shared, top_k, selects }
}

/// Returns routers of at least two heads with any shared heads: no heads, all, the first, the last, every
/// second, or a random set.
pub fn routers_of_sets(heads: usize) -> impl Strategy<Value = QueryNormRouter> {
    let random = prop::collection::vec(any::<bool>(), heads)
        .prop_map(move |marks| (0..heads).filter(|&head| marks[head]).collect());
    let sets = prop_oneof![
        Just(Vec::new()),
        Just((0..heads).collect()),
        (0..=heads).prop_map(|count| (0..count).collect()),
        Just(vec![heads - 1]),
        Just((1..heads).step_by(2).collect()),
        Just((0..heads).step_by(2).collect()),
        random,
    ];
    (sets, any::<prop::sample::Index>()).prop_map(move |(mut set, top_k): (Vec<usize>, _)| {
        // One routed head has no standard deviation.
        if heads - set.len() == 1 {
            set.pop();
        }
        let routed = heads - set.len();
        shared(set, top_k.index(routed + 1))
    })
}

// ---- buffers on a device ----

pub fn table<'a, B: Backend>(cos: &'a B::Buffer<f32>, sin: &'a B::Buffer<f32>) -> RopeTable<'a, B> {
    RopeTable { cos: B::whole(cos), sin: B::whole(sin), first_position: 0 }
}

/// Returns a buffer that contains these elements.
pub fn upload<B: Backend, S: Scalar>(device: &B, elements: &[S]) -> B::Buffer<S> {
    let mut buffer = device.allocate(elements.len()).unwrap();
    device.upload(elements, B::whole_mut(&mut buffer)).unwrap();
    buffer
}

/// Returns a buffer with contents that an operator must overwrite.
pub fn garbage<B: Backend, T: Element>(device: &B, len: usize) -> B::Buffer<T> {
    upload(device, &vec![T::from_f32(777.0); len])
}

pub fn download<B: Backend, S: Scalar>(device: &B, buffer: &B::Buffer<S>) -> Vec<S> {
    let mut elements = vec![S::zeroed(); B::len(buffer)];
    device.download(B::whole(buffer), &mut elements).unwrap();
    elements
}

/// Returns the mask of the selected heads that have a column, and the gates.
pub fn selection_and_gates<B: Backend>(device: &B, routing: &Routing<B>) -> (Vec<u8>, Vec<f32>) {
    let len = routing.tokens() * routing.columns();
    let (mut selected, mut gates) = (vec![9; len], vec![9.0; len]);
    device.download(routing.selected(), &mut selected).unwrap();
    device.download(routing.gates(), &mut gates).unwrap();
    (selected, gates)
}

// ---- tensors of the reference ----

/// Converts elements to f64, which is exact.
pub fn wide<T: Element>(elements: &[T]) -> Vec<f64> {
    elements.iter().map(|&x| f64::from(x.to_f32())).collect()
}

/// Returns a constant of the reference.
pub fn tensor<T: Element>(elements: &[T], shape: impl Into<Shape>) -> Tensor {
    Tensor::from_vec(wide(elements), shape, &Device::Cpu).unwrap()
}

pub fn var<T: Element>(elements: &[T], shape: impl Into<Shape>) -> Var {
    Var::from_tensor(&tensor(elements, shape)).unwrap()
}

/// Returns a tensor's elements in row-major order.
pub fn flat(tensor: &Tensor) -> Vec<f64> {
    assert_eq!(tensor.dtype(), CandleType::F64);
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn backward(out: &Tensor, d_out: &Tensor) -> GradStore {
    (out * d_out).unwrap().sum_all().unwrap().backward().unwrap()
}

/// Returns a variable's gradient, zeros if the output does not depend on it.
pub fn gradient(gradients: &GradStore, var: &Var) -> Vec<f64> {
    gradients.get(var).map_or_else(|| vec![0.0; var.elem_count()], flat)
}

/// Returns the elementwise sum: the expected result of an operator that accumulates.
pub fn added<T: Element>(before: &[T], gradient: &[f64]) -> Vec<f64> {
    wide(before).iter().zip(gradient).map(|(a, b)| a + b).collect()
}

pub fn columns<S: Copy>(matrix: &[S], row: usize, range: std::ops::Range<usize>) -> Vec<S> {
    matrix.chunks_exact(row).flat_map(|row| &row[range.clone()]).copied().collect()
}

/// Writes a token's keys, or values, `[G, D]`, to a cache, `[blocks, G, block_length, D]`, at place
/// `block * block_length + row`.
pub fn place<S: Copy>(
    cache: &mut [S],
    token: &[S],
    place: usize,
    block_length: usize,
    head_dim: usize,
) {
    let (block, row) = (place / block_length, place % block_length);
    let first = block * token.len() / head_dim;
    for (head, elements) in token.chunks_exact(head_dim).enumerate() {
        let start = ((first + head) * block_length + row) * head_dim;
        cache[start..start + head_dim].copy_from_slice(elements);
    }
}

// ---- comparison ----

/// Asserts that a result agrees with its reference in relative L2 norm; `--nocapture` shows the
/// errors.
#[track_caller]
pub fn assert_close<T: Element>(what: &str, actual: &[T], expected: &[f64], tolerance: f64) {
    assert_sums_close(what, actual, expected, 0.0, tolerance);
}

/// Asserts like [`assert_close`], for elements that are sums of terms that may cancel. `terms` is the root
/// mean square of such sums without cancellation. The error is relative to the larger of `terms` and the
/// reference's root mean square.
#[track_caller]
pub fn assert_sums_close<T: Element>(
    what: &str,
    actual: &[T],
    expected: &[f64],
    terms: f64,
    tolerance: f64,
) {
    assert_eq!(actual.len(), expected.len(), "{what}: lengths");
    let differences: Vec<f64> =
        wide(actual).iter().zip(expected).map(|(actual, expected)| actual - expected).collect();
    let error = rms(&differences);
    let relative = error / rms(expected).max(terms).max(VANISHING);
    println!("{what}: {:?} relative error {relative:.1e}", T::DTYPE);
    let allowed = relative <= tolerance || tolerance > 0.0 && error <= ROUNDING;
    assert!(allowed, "{what}: relative error {relative:e} above {tolerance:e}");
}

/// Returns the root mean square; 0 without elements.
pub fn rms(elements: &[f64]) -> f64 {
    let squares: f64 = elements.iter().map(|x| x * x).sum();
    (squares / elements.len().max(1) as f64).sqrt()
}
