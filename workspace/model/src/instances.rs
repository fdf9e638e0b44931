//! Compiled code of models on the CPU, for all programs and tests that are built without full optimisation.
//!
//! Each crate compiles a generic function again for its types, unless a dependency already has. Rustc shares such code
//! up to `opt-level` 1 (`share-generics`). Without these instances every program and every test would compile all
//! models again.

use std::hint::black_box;

use half::bf16;
use moh_kernels::{Cpu, Element};

use crate::{BatchGenerator, BlockPass, Generator, Model};

#[used]
static INSTANCES: [fn(); 3] =
    [instantiate::<f32, f32>, instantiate::<bf16, f32>, instantiate::<bf16, bf16>];

fn instantiate<T: Element, G: Element>() {
    black_box([
        Model::<Cpu, T>::run as *const (),
        Model::<Cpu, T>::evaluate as *const (),
        Model::<Cpu, T>::forward_backward::<G> as *const (),
        BatchGenerator::<Cpu, T>::new as *const (),
        BatchGenerator::<Cpu, T>::pass_choosing as *const (),
        Generator::<Cpu, T>::extend as *const (),
        Generator::<Cpu, T>::next_token as *const (),
        BlockPass::<Cpu>::forward as *const (),
    ]);
}
