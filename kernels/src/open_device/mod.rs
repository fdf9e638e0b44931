//! From the settings of a recipe or a command line to type parameters: only this module opens the
//! device and dispatches on element types. Work is a struct with a generic method, because a
//! closure cannot be generic. [`ResidentMemory`] is the memory of a device without its own.

mod host_memory;
mod open;

pub use host_memory::{ResidentMemory, available_memory};
pub use open::{
    Compute, DeviceName, Error, InTrainingElements, OnDevice, OpenDevice, TrainingTypes,
    in_training_elements,
};
