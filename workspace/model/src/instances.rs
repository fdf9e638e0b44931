//! The code of models on the CPU, for all programs and tests that are built without full optimisation.
//!
//! A generic function is compiled for its types in each crate that uses it, unless a dependency has compiled it for
//! these types (rustc's `share-generics`, on up to `opt-level` 1). Without these instances every program and every test
//! would compile all models again.

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
