//! Compiled code of models on the CPU, for all programs and tests that are built without full optimisation.
//!
//! Each crate compiles a generic function again for its types, unless a dependency already has. Rustc shares such code
//! up to `opt-level` 1 (`share-generics`). Without these instances every program and every test would compile all
//! models again.

use std::hint::black_box;

use moh_kernels::Cpu;

use crate::{BatchGenerator, BlockPass, Generator, Model};

#[used]
static INSTANCES: fn() = instantiate;

fn instantiate() {
    black_box([
        Model::<Cpu>::run as *const (),
        Model::<Cpu>::evaluate as *const (),
        Model::<Cpu>::forward_backward as *const (),
        BatchGenerator::<Cpu>::new as *const (),
        BatchGenerator::<Cpu>::pass_choosing as *const (),
        Generator::<Cpu>::extend as *const (),
        Generator::<Cpu>::next_token as *const (),
        BlockPass::<Cpu>::forward as *const (),
    ]);
}
