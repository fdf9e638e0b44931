//! A device with all operators. Each operator has its own trait, declared beside its formula and
//! implemented for [`crate::Cpu`] in its folder's `cpu.rs` and for a GPU in its `cuda.rs`.

use crate::adamw::Optimizer;
use crate::add::Add;
use crate::attention::Attention;
use crate::convert::Convert;
use crate::cross_entropy::CrossEntropy;
use crate::embedding::Embedding;
use crate::key_value_cache::KeyValueCache;
use crate::linear::Linear;
use crate::qk_norm::QkNorm;
use crate::rms_norm::RmsNorm;
use crate::rope::Rope;
use crate::router::logits::Logits;
use crate::router::query_norm::QueryNorm;
use crate::sampling::Sample;
use crate::swiglu::Swiglu;
use crate::workspace::Workspace;

#[cfg(feature = "cuda")]
impl crate::Cuda {
    /// Opens the GPU with index `ordinal` of this machine.
    ///
    /// # Errors
    /// Fails if the driver, cuBLASLt or the GPU is missing or too old, or if the
    /// variable `MOH_ATTENTION` names no [`crate::AttentionPath`].
    pub fn new(ordinal: usize) -> crate::Result<Self> {
        let first = crate::AttentionPath::from_environment()?;
        Ok(Self::open(ordinal)?.with_attention(first))
    }
}

/// Declares [`Backend`] as the sum of these operators.
macro_rules! backend {
    ($($operator:ident),+ $(,)?) => {
        /// A device, its memory and all operators.
        ///
        /// `T` is the type of weights and activations, `G` of gradients, `M` of the optimiser's
        /// moments. Every operator may run asynchronously until [`crate::Memory::synchronize`] or
        /// [`crate::Memory::download`]. An operator rejects buffers of lengths that do not fit its shape;
        /// it fails if the device fails. Matrices are row-major, a linear layer's weight is `[outputs, inputs]`, and
        /// `kernels/README.md` defines the shape letters.
        pub trait Backend: Workspace $(+ $operator)+ {}

        impl<D: Workspace $(+ $operator)+> Backend for D {}
    };
}

backend!(
    Add,
    Attention,
    Convert,
    CrossEntropy,
    Embedding,
    KeyValueCache,
    Linear,
    Logits,
    Optimizer,
    QkNorm,
    QueryNorm,
    RmsNorm,
    Rope,
    Sample,
    Swiglu,
);
