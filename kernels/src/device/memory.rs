//! A device's memory: buffers, views of them, and copies.
//!
//! Buffers are allocated when a model is planned and reused in every step. Operators write into
//! views of them.

use std::ops::Range;

use crate::{Region, RegionMut, Result, Scalar};

/// Read access to a part of a [`Memory`]'s buffer.
pub type View<'a, M, S> = <M as Memory>::View<'a, S>;
/// Write access to a part of a [`Memory`]'s buffer.
pub type ViewMut<'a, M, S> = <M as Memory>::ViewMut<'a, S>;

/// Bytes of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// In use, by this program and others.
    pub used: u64,
    /// Total.
    pub total: u64,
}

/// The purpose of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Weights of a model.
    Weights,
    /// The 16 bits by which bf16 weights differ from the optimiser's f32 weights.
    Remainders,
    /// Gradients of weights.
    Gradients,
    /// Rounded copies of gradients, for communication between ranks.
    RoundedGradients,
    /// Moments of the optimiser.
    Moments,
    /// Activations saved for the backward pass.
    Activations,
    /// Gradients of activations.
    ActivationGradients,
    /// Rows of tensor-parallel ranks, for all-gather and reduce-scatter.
    Gathered,
    /// Logits of one chunk of tokens, and the sums that ranks all-reduce.
    Logits,
    /// Passes without gradients.
    Evaluation,
    /// A frozen model and its passes.
    Teacher,
    /// Scratch of operators.
    Scratch,
    /// Tables, sums, and anything without another purpose.
    Other,
}

impl Purpose {
    /// All purposes, in order.
    pub const ALL: [Purpose; 13] = [
        Purpose::Weights,
        Purpose::Remainders,
        Purpose::Gradients,
        Purpose::RoundedGradients,
        Purpose::Moments,
        Purpose::Activations,
        Purpose::ActivationGradients,
        Purpose::Gathered,
        Purpose::Logits,
        Purpose::Evaluation,
        Purpose::Teacher,
        Purpose::Scratch,
        Purpose::Other,
    ];
}

/// Implements `Copy` for arguments that consist of views of any memory: a derived implementation would require that
/// the memory itself is `Copy`.
macro_rules! copy_views {
    ($($name:ident<$($parameter:ident: $bound:ident),+>),+) => {$(
        impl<$($parameter: $bound),+> Clone for $name<'_, $($parameter),+> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<$($parameter: $bound),+> Copy for $name<'_, $($parameter),+> {}
    )+};
}
pub(crate) use copy_views;

/// The memory of a device.
///
/// Every method may run asynchronously until [`Memory::synchronize`] or [`Memory::download`].
///
/// # Errors
/// Methods that copy, fill or wait fail if the lengths differ or if the device fails, also because of an
/// earlier operator.
pub trait Memory: Send + Sync + Sized + 'static {
    /// An owned buffer.
    type Buffer<S: Scalar>: Send + Sync;
    /// Read access to a part of a buffer.
    type View<'a, S: Scalar>: Copy;
    /// Write access to a part of a buffer.
    type ViewMut<'a, S: Scalar>;

    /// Returns a name for messages, such as `the CPU`.
    fn name(&self) -> String;

    /// Returns the use of the device's own memory; `None` if buffers are in the host's memory.
    fn memory_info(&self) -> Option<MemoryInfo> {
        None
    }

    /// Allocates a buffer of `len` zeros.
    fn allocate<S: Scalar>(&self, len: usize) -> Result<Self::Buffer<S>>;

    /// Runs a constructor of buffers that have this purpose. It affects only the counts of
    /// a [`crate::CountingMemory`]. Within another purpose, the outer purpose counts.
    fn for_purpose<R>(&self, _purpose: Purpose, construct: impl FnOnce() -> R) -> R {
        construct()
    }

    /// Returns the number of elements of a buffer.
    fn len<S: Scalar>(buffer: &Self::Buffer<S>) -> usize;

    /// Returns read access to `range`, which is within the buffer.
    fn view<S: Scalar>(buffer: &Self::Buffer<S>, range: Range<usize>) -> Self::View<'_, S>;

    /// Returns write access to `range`, which is within the buffer.
    fn view_mut<S: Scalar>(
        buffer: &mut Self::Buffer<S>,
        range: Range<usize>,
    ) -> Self::ViewMut<'_, S>;

    /// Returns read access to a whole buffer.
    fn whole<S: Scalar>(buffer: &Self::Buffer<S>) -> Self::View<'_, S> {
        Self::view(buffer, 0..Self::len(buffer))
    }

    /// Returns write access to a whole buffer.
    fn whole_mut<S: Scalar>(buffer: &mut Self::Buffer<S>) -> Self::ViewMut<'_, S> {
        let len = Self::len(buffer);
        Self::view_mut(buffer, 0..len)
    }

    /// Returns the number of elements of a view.
    fn view_len<S: Scalar>(view: Self::View<'_, S>) -> usize {
        Self::region::<S>(view).len
    }

    /// Returns the number of elements of a mutable view.
    fn view_mut_len<S: Scalar>(view: &Self::ViewMut<'_, S>) -> usize {
        Self::view_len::<S>(Self::as_view(view))
    }

    /// Returns the same view with a shorter lifetime.
    fn reborrow<'v, 'long: 'v, S: Scalar>(view: Self::View<'long, S>) -> Self::View<'v, S> {
        Self::part(view, 0..Self::view_len::<S>(view))
    }

    /// Returns write access to the same elements with a shorter lifetime.
    fn reborrow_mut<'v, S: Scalar>(view: &'v mut Self::ViewMut<'_, S>) -> Self::ViewMut<'v, S> {
        let len = Self::view_mut_len::<S>(view);
        Self::part_mut(view, 0..len)
    }

    /// Returns read access to a range of a view's elements.
    fn part<'v, 'long: 'v, S: Scalar>(
        view: Self::View<'long, S>,
        range: Range<usize>,
    ) -> Self::View<'v, S>;

    /// Returns write access to a range of a view's elements.
    fn part_mut<'v, S: Scalar>(
        view: &'v mut Self::ViewMut<'_, S>,
        range: Range<usize>,
    ) -> Self::ViewMut<'v, S>;

    /// Returns read access to the elements of a mutable view.
    fn as_view<'v, S: Scalar>(view: &'v Self::ViewMut<'_, S>) -> Self::View<'v, S>;

    /// Returns the view with its type erased.
    fn region<'a, S: Scalar>(view: Self::View<'a, S>) -> Region<'a>;

    /// Returns the view with its type erased.
    fn region_mut<'a, S: Scalar>(view: Self::ViewMut<'a, S>) -> RegionMut<'a>;

    /// Copies from the host; both have the same length.
    fn upload<S: Scalar>(&self, source: &[S], destination: Self::ViewMut<'_, S>) -> Result<()>;

    /// Copies to the host; both have the same length.
    fn download<S: Scalar>(&self, source: Self::View<'_, S>, destination: &mut [S]) -> Result<()>;

    /// Lets the host change elements. A device copies them to the host and back. For small tables only:
    /// it waits for all earlier operators.
    fn on_host<S: Scalar>(
        &self,
        elements: Self::ViewMut<'_, S>,
        change: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()>;

    /// Copies on the device; both have the same length.
    fn copy<S: Scalar>(
        &self,
        source: Self::View<'_, S>,
        destination: Self::ViewMut<'_, S>,
    ) -> Result<()>;

    /// Sets every element to zero.
    fn zero<S: Scalar>(&self, destination: Self::ViewMut<'_, S>) -> Result<()>;

    /// Waits for all earlier operators.
    fn synchronize(&self) -> Result<()>;

    /// Runs a group of operators, such as a training step, on the thread that starts them with the
    /// least latency: on the CPU, one of the threads that share the work.
    fn install<R: Send>(&self, operators: impl FnOnce() -> R + Send) -> R {
        operators()
    }
}
