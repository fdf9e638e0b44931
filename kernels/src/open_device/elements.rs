//! Dispatches the element types of a training state, chosen at run time, to type parameters.

use crate::{Element, ElementType};
use half::bf16;

/// Work that is generic over a training state: weights and activations `T`, gradients `G`, moments
/// `M`.
pub trait InTrainingElements {
    /// The result of the work.
    type Output;

    /// Runs the work on a state of these types.
    fn run<T: Element, G: Element, M: Element>(self) -> Self::Output;
}

/// The element types of a training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingTypes {
    /// Weights and activations.
    pub weights: ElementType,
    /// Gradients.
    pub gradients: ElementType,
    /// Both optimiser moments.
    pub moments: ElementType,
}

/// Runs `work` on a training state of these types.
pub fn in_training_elements<W: InTrainingElements>(types: TrainingTypes, work: W) -> W::Output {
    match types.weights {
        ElementType::F32 => with_weights::<W, f32>(types, work),
        ElementType::BF16 => with_weights::<W, bf16>(types, work),
    }
}

fn with_weights<W: InTrainingElements, T: Element>(types: TrainingTypes, work: W) -> W::Output {
    match (types.gradients, types.moments) {
        (ElementType::F32, ElementType::F32) => work.run::<T, f32, f32>(),
        (ElementType::F32, ElementType::BF16) => work.run::<T, f32, bf16>(),
        (ElementType::BF16, ElementType::F32) => work.run::<T, bf16, f32>(),
        (ElementType::BF16, ElementType::BF16) => work.run::<T, bf16, bf16>(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::open_device::{Compute, OpenDevice};

    struct Name;

    impl Compute for Name {
        type Output = ElementType;

        fn run<B: Backend + Clone, T: Element>(self, _: B) -> ElementType {
            T::ELEMENT
        }
    }

    impl InTrainingElements for Name {
        type Output = TrainingTypes;

        fn run<T: Element, G: Element, M: Element>(self) -> TrainingTypes {
            TrainingTypes { weights: T::ELEMENT, gradients: G::ELEMENT, moments: M::ELEMENT }
        }
    }

    #[test]
    fn every_type_reaches_the_work() {
        for weights in ElementType::ALL {
            assert_eq!(OpenDevice::Cpu.compute(weights, Name), weights);
            for gradients in ElementType::ALL {
                for moments in ElementType::ALL {
                    let types = TrainingTypes { weights, gradients, moments };
                    assert_eq!(in_training_elements(types, Name), types);
                }
            }
        }
    }
}
