//! The paths of attention on a GPU, and the choice of a path.

use std::sync::Arc;

use super::{AttentionShape, Pass, hopper, tiled};
use crate::cuda::{Cuda, locked};
#[cfg(any(feature = "cuda", test))]
use crate::error::Result;
use crate::scalar::Element;
use crate::workspace::gpu::attention::{hopper_backward_bytes, packed_bytes};

/// A way to compute attention on a GPU. Each path supports fewer problems than the next path, and is
/// faster on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AttentionPath {
    /// The tensor cores and the copy engine of Hopper (sm_90a): bf16, heads of 64 or 128,
    /// contiguous keys, rows that start at multiples of 16 bytes.
    Hopper,
    /// The tensor cores of Ampere and later GPUs: bf16, even heads of at most 128.
    Tiled,
    /// Plain arithmetic: f32 and bf16, heads of at most 256 elements; wider heads are an error.
    Plain,
}

impl AttentionPath {
    /// The paths in order: the GPU stores their indices.
    const ALL: [Self; 3] = [Self::Hopper, Self::Tiled, Self::Plain];

    /// Returns the first path to try, from the environment variable `MOH_ATTENTION`.
    #[cfg(feature = "cuda")]
    pub(crate) fn from_environment() -> Result<Self> {
        let name = std::env::var_os("MOH_ATTENTION");
        name.map_or(Ok(Self::Hopper), |name| Self::named(&name.to_string_lossy()))
    }

    /// Returns the path with this name, a value of the variable.
    #[cfg(any(feature = "cuda", test))]
    fn named(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name).ok_or_else(|| {
            let reason = format!("MOH_ATTENTION = {name:?}: expected hopper, tiled or plain");
            crate::Error::device("the GPU", "start", reason)
        })
    }

    /// Returns the path's name, as a value of the variable.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hopper => "hopper",
            Self::Tiled => "tiled",
            Self::Plain => "plain",
        }
    }

    /// Returns the first path that supports the problem, starting with the GPU's first path to try.
    pub(super) fn choose<T: Element>(pass: Pass<'_, '_>) -> Self {
        let supports = |path: &Self| match path {
            Self::Hopper => hopper::supports::<T>(pass),
            Self::Tiled => tiled::supports::<T>(pass),
            Self::Plain => true,
        };
        let mut allowed = Self::ALL.into_iter().skip(pass.cuda.first_path);
        allowed.find(supports).unwrap_or(Self::Plain)
    }

    /// Stores the path as the last path that the GPU used.
    pub(super) fn remember(self, cuda: &Cuda) {
        *locked(&cuda.last_path) = Some(self as usize);
    }

    /// Returns the scratch that the backward pass needs on this path.
    pub(super) fn backward_scratch_bytes(self, shape: &AttentionShape, routed: bool) -> usize {
        match self {
            Self::Hopper => hopper_backward_bytes(shape, routed),
            Self::Tiled => packed_bytes(shape, routed),
            Self::Plain => 0,
        }
    }
}

impl Cuda {
    /// Sets the first attention path to try. If it does not support a shape or this GPU, the next
    /// path is used.
    pub fn with_attention(mut self, first: AttentionPath) -> Self {
        (self.first_path, self.last_path) = (first as usize, Arc::default());
        self
    }

    /// Returns whether this GPU supports the kernels of a path.
    pub fn has_attention(&self, path: AttentionPath) -> bool {
        path != AttentionPath::Hopper || self.device().runs_hopper()
    }

    /// Returns the path of the last attention, forward or backward; `None` before the first.
    pub fn attention_path(&self) -> Option<AttentionPath> {
        locked(&self.last_path).map(|path| AttentionPath::ALL[path])
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionPath;

    #[test]
    fn the_variable_names_a_path_or_is_refused() {
        assert_eq!(AttentionPath::named("hopper"), Ok(AttentionPath::Hopper));
        assert_eq!(AttentionPath::named("tiled"), Ok(AttentionPath::Tiled));
        assert_eq!(AttentionPath::named("plain"), Ok(AttentionPath::Plain));
        let refused = AttentionPath::named("flash").map_err(|error| error.to_string());
        let message = "MOH_ATTENTION = \"flash\": expected hopper, tiled or plain";
        assert!(refused.is_err_and(|refusal| refusal.ends_with(message)));
    }
}
