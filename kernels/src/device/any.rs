//! Buffers and views that carry their element type: a model may hold tensors of different types, which are known only
//! at run time. [`for_element!`](crate::for_element) calls an operator with the types of its arguments.

use std::ops::Range;

use half::bf16;

use crate::adamw::remainder::split;
use crate::scalar::{DType, Element, ElementType, Scalar};
use crate::{Cpu, Memory, RegionMut, Result, View, ViewMut};

/// A buffer of a device, of one of several element types.
pub enum AnyBuffer<M: Memory> {
    /// Of f32.
    F32(M::Buffer<f32>),
    /// Of bf16.
    BF16(M::Buffer<bf16>),
    /// Of i16: remainders of the weights' rounding.
    I16(M::Buffer<i16>),
}

/// Read access to a part of an [`AnyBuffer`].
pub enum AnyView<'a, M: Memory> {
    /// Of f32.
    F32(View<'a, M, f32>),
    /// Of bf16.
    BF16(View<'a, M, bf16>),
    /// Of i16.
    I16(View<'a, M, i16>),
}

/// Write access to a part of an [`AnyBuffer`].
pub enum AnyViewMut<'a, M: Memory> {
    /// Of f32.
    F32(ViewMut<'a, M, f32>),
    /// Of bf16.
    BF16(ViewMut<'a, M, bf16>),
    /// Of i16.
    I16(ViewMut<'a, M, i16>),
}

crate::memory::copy_views!(AnyView<M: Memory>);

/// A scalar of [`AnyBuffer`]s.
pub trait Stored: Scalar {
    /// Returns the buffer with its type erased.
    fn any_buffer<M: Memory>(buffer: M::Buffer<Self>) -> AnyBuffer<M>;
    /// Returns the buffer if it has elements of this type.
    fn buffer<M: Memory>(buffer: AnyBuffer<M>) -> Option<M::Buffer<Self>>;
    /// Returns the view with its type erased.
    fn any_view<M: Memory>(view: View<'_, M, Self>) -> AnyView<'_, M>;
    /// Returns the view with its type erased.
    fn any_view_mut<M: Memory>(view: ViewMut<'_, M, Self>) -> AnyViewMut<'_, M>;
    /// Returns the view if it has elements of this type.
    fn view<M: Memory>(view: AnyView<'_, M>) -> Option<View<'_, M, Self>>;
    /// Returns the view if it has elements of this type.
    fn view_mut<M: Memory>(view: AnyViewMut<'_, M>) -> Option<ViewMut<'_, M, Self>>;
}

macro_rules! stored {
    ($($type:ty => $variant:ident),*) => {$(
        impl Stored for $type {
            fn any_buffer<M: Memory>(buffer: M::Buffer<Self>) -> AnyBuffer<M> {
                AnyBuffer::$variant(buffer)
            }

            fn buffer<M: Memory>(buffer: AnyBuffer<M>) -> Option<M::Buffer<Self>> {
                if let AnyBuffer::$variant(buffer) = buffer { Some(buffer) } else { None }
            }

            fn any_view<M: Memory>(view: View<'_, M, Self>) -> AnyView<'_, M> {
                AnyView::$variant(view)
            }

            fn any_view_mut<M: Memory>(view: ViewMut<'_, M, Self>) -> AnyViewMut<'_, M> {
                AnyViewMut::$variant(view)
            }

            fn view<M: Memory>(view: AnyView<'_, M>) -> Option<View<'_, M, Self>> {
                if let AnyView::$variant(view) = view { Some(view) } else { None }
            }

            fn view_mut<M: Memory>(view: AnyViewMut<'_, M>) -> Option<ViewMut<'_, M, Self>> {
                if let AnyViewMut::$variant(view) = view { Some(view) } else { None }
            }
        }
    )*};
}

stored!(f32 => F32, bf16 => BF16, i16 => I16);

/// Evaluates an expression with the contents of a buffer or view, and the type of its elements.
macro_rules! each {
    ($any:ident, $value:expr, $contents:pat, $type:ident => $expression:expr) => {
        match $value {
            $any::F32($contents) => {
                type $type = f32;
                $expression
            }
            $any::BF16($contents) => {
                type $type = bf16;
                $expression
            }
            $any::I16($contents) => {
                type $type = i16;
                $expression
            }
        }
    };
}

fn element(dtype: DType) -> ElementType {
    let found = ElementType::ALL.into_iter().find(|element| element.dtype() == dtype);
    found.unwrap_or_else(|| panic!("no operator computes in {}", dtype.name()))
}

fn differs<S: Scalar>(found: DType) -> ! {
    panic!("elements of {} are used as {}", found.name(), S::DTYPE.name())
}

impl<M: Memory> AnyBuffer<M> {
    /// Allocates `len` zeros.
    pub fn zeros(memory: &M, element: ElementType, len: usize) -> Result<Self> {
        crate::for_element!(T: element => Ok(T::any_buffer(memory.allocate::<T>(len)?)))
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        each!(AnyBuffer, self, _, S => S::DTYPE)
    }

    /// Returns the type of the elements, which operators compute in.
    ///
    /// # Panics
    /// Panics if the elements are no floats.
    pub fn element(&self) -> ElementType {
        element(self.dtype())
    }

    /// Returns the buffer of its type.
    ///
    /// # Panics
    /// Panics if the elements have another type.
    pub fn into_typed<S: Stored>(self) -> M::Buffer<S> {
        let found = self.dtype();
        S::buffer(self).unwrap_or_else(|| differs::<S>(found))
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(AnyBuffer, self, buffer, S => M::len::<S>(buffer))
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns read access to `range`, which is within the buffer.
    pub fn view(&self, range: Range<usize>) -> AnyView<'_, M> {
        each!(AnyBuffer, self, buffer, S => S::any_view(M::view::<S>(buffer, range)))
    }

    /// Returns write access to `range`, which is within the buffer.
    pub fn view_mut(&mut self, range: Range<usize>) -> AnyViewMut<'_, M> {
        each!(AnyBuffer, self, buffer, S => S::any_view_mut(M::view_mut::<S>(buffer, range)))
    }

    /// Returns write access to all elements, for libraries that move bytes between processes.
    pub fn region_mut(&mut self) -> RegionMut<'_> {
        each!(AnyBuffer, self, buffer, S => M::region_mut::<S>(M::whole_mut::<S>(buffer)))
    }

    /// Returns read access to all elements.
    pub fn whole(&self) -> AnyView<'_, M> {
        self.view(0..self.len())
    }

    /// Returns write access to all elements.
    pub fn whole_mut(&mut self) -> AnyViewMut<'_, M> {
        self.view_mut(0..self.len())
    }
}

impl<'a, M: Memory> AnyView<'a, M> {
    /// Returns the type of the elements.
    pub fn dtype(self) -> DType {
        each!(AnyView, self, _, S => S::DTYPE)
    }

    /// Returns the type of the elements, which operators compute in.
    ///
    /// # Panics
    /// Panics if the elements are no floats.
    pub fn element(self) -> ElementType {
        element(self.dtype())
    }

    /// Returns the number of elements.
    pub fn len(self) -> usize {
        each!(AnyView, self, view, S => M::view_len::<S>(view))
    }

    /// Returns whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns the view of its type.
    ///
    /// # Panics
    /// Panics if the elements have another type.
    pub fn typed<'v, S: Stored>(self) -> View<'v, M, S>
    where
        'a: 'v,
    {
        M::reborrow::<S>(S::view(self).unwrap_or_else(|| differs::<S>(self.dtype())))
    }

    /// Copies the elements to a buffer of the host with elements of the same type.
    pub fn download(self, memory: &M, to: AnyViewMut<'_, Cpu>) -> Result<()> {
        each!(AnyView, self, view, S => memory.download::<S>(view, to.typed()))
    }

    /// Copies the elements to the host, as f32.
    pub fn to_f32(self, memory: &M) -> Result<Vec<f32>> {
        let mut values = vec![0f32; self.len()];
        if self.element() == ElementType::F32 {
            memory.download::<f32>(self.typed(), &mut values)?;
            return Ok(values);
        }
        let mut elements = vec![bf16::ZERO; self.len()];
        memory.download::<bf16>(self.typed(), &mut elements)?;
        elements
            .iter()
            .zip(&mut values)
            .for_each(|(element, value)| *value = Element::to_f32(*element));
        Ok(values)
    }
}

impl<'a> AnyView<'a, Cpu> {
    /// Returns the bytes of the elements, as they are in memory.
    pub fn bytes(self) -> &'a [u8] {
        each!(AnyView, self, view, S => bytemuck::cast_slice::<S, u8>(view))
    }
}

impl<'a, M: Memory> AnyViewMut<'a, M> {
    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        each!(AnyViewMut, self, _, S => S::DTYPE)
    }

    /// Returns the type of the elements, which operators compute in.
    ///
    /// # Panics
    /// Panics if the elements are no floats.
    pub fn element(&self) -> ElementType {
        element(self.dtype())
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(AnyViewMut, self, view, S => M::view_mut_len::<S>(view))
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns write access to the same elements with a shorter lifetime.
    pub fn reborrow(&mut self) -> AnyViewMut<'_, M> {
        each!(AnyViewMut, self, view, S => S::any_view_mut(M::reborrow_mut::<S>(view)))
    }

    /// Returns the view of its type.
    ///
    /// # Panics
    /// Panics if the elements have another type.
    pub fn typed<S: Stored>(self) -> ViewMut<'a, M, S> {
        let found = self.dtype();
        S::view_mut(self).unwrap_or_else(|| differs::<S>(found))
    }

    /// Copies f32 from the host. Rounds each to the type of the elements; remainders get the part that rounding to bf16
    /// removes.
    pub fn fill_from_f32(self, memory: &M, values: &[f32]) -> Result<()> {
        let rounded = |&value: &f32| <bf16 as Element>::from_f32(value);
        let remainder = |&value: &f32| split(value).1;
        match self {
            AnyViewMut::F32(view) => memory.upload::<f32>(values, view),
            AnyViewMut::BF16(view) => {
                memory.upload::<bf16>(&values.iter().map(rounded).collect::<Vec<_>>(), view)
            }
            AnyViewMut::I16(view) => {
                memory.upload::<i16>(&values.iter().map(remainder).collect::<Vec<_>>(), view)
            }
        }
    }

    /// Sets every element to zero.
    pub fn zero(self, memory: &M) -> Result<()> {
        each!(AnyViewMut, self, view, S => memory.zero::<S>(view))
    }

    /// Copies elements of the same type and number on the device.
    pub fn copy_from(self, memory: &M, source: AnyView<'_, M>) -> Result<()> {
        each!(AnyViewMut, self, view, S => memory.copy::<S>(source.typed(), view))
    }
}

/// Evaluates an expression with names for element types: `for_element!(T: a.element(), G: b.element() =>
/// device.operator::<T, G>(a.typed(), b.typed()))`.
#[macro_export]
macro_rules! for_element {
    ($name:ident: $element:expr => $expression:expr) => {
        match $element {
            $crate::ElementType::F32 => {
                type $name = f32;
                $expression
            }
            $crate::ElementType::BF16 => {
                type $name = $crate::bf16;
                $expression
            }
        }
    };
    ($name:ident: $element:expr, $($rest:tt)+) => {
        $crate::for_element!($name: $element => $crate::for_element!($($rest)+))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_have_the_elements_of_their_buffer() {
        for element in ElementType::ALL {
            let mut buffer = AnyBuffer::zeros(&Cpu, element, 5).unwrap();
            buffer.view_mut(1..4).fill_from_f32(&Cpu, &[1.0, 1.00001, -2.5]).unwrap();
            let rounded = if element == ElementType::F32 { 1.00001 } else { 1.0 };
            assert_eq!(buffer.whole().to_f32(&Cpu).unwrap(), [0.0, 1.0, rounded, -2.5, 0.0]);
            assert_eq!((buffer.element(), buffer.len()), (element, 5));
            let mut copy = AnyBuffer::zeros(&Cpu, element, 3).unwrap();
            copy.whole_mut().copy_from(&Cpu, buffer.view(1..4)).unwrap();
            buffer.view_mut(2..3).zero(&Cpu).unwrap();
            assert_eq!(buffer.view(1..4).to_f32(&Cpu).unwrap(), [1.0, 0.0, -2.5]);
            assert_eq!(copy.whole().to_f32(&Cpu).unwrap(), [1.0, rounded, -2.5]);
        }
    }

    #[test]
    fn an_expression_gets_every_choice_of_types() {
        for first in ElementType::ALL {
            for second in ElementType::ALL {
                let bytes =
                    for_element!(T: first, G: second => size_of::<T>() * 10 + size_of::<G>());
                assert_eq!(bytes, first.bytes() * 10 + second.bytes());
            }
        }
    }

    #[test]
    #[should_panic(expected = "elements of f32 are used as bf16")]
    fn elements_of_another_type_are_refused() {
        let buffer = AnyBuffer::zeros(&Cpu, ElementType::F32, 1).unwrap();
        let _: &[bf16] = buffer.whole().typed();
    }

    #[test]
    #[should_panic(expected = "no operator computes in i16")]
    fn remainders_are_no_elements() {
        AnyBuffer::<Cpu>::I16(vec![0]).element();
    }
}
