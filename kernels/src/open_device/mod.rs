//! From the settings of a recipe or a command line to type parameters: this module alone opens the
//! device and dispatches on element types. Work is a struct with a generic method, because a
//! closure cannot be generic. [`ResidentMemory`] is the memory of a device without its own.

mod elements;
mod host_memory;
mod name;
mod open;

pub use elements::{InTrainingElements, TrainingTypes, in_training_elements};
pub use host_memory::{ResidentMemory, available_memory};
pub use name::DeviceName;
pub use open::{Compute, Error, OnDevice, OpenDevice};
