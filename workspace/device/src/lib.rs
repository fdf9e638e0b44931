//! From what a recipe or a command line says to what the compiler knows: the device is opened here,
//! and element types become type parameters, here alone. Work is given as a structure with a generic
//! method, because a closure cannot be generic.

mod elements;
mod name;
mod open;

pub use elements::{
    InElements, InTrainingElements, TrainingTypes, in_elements, in_training_elements,
};
pub use name::DeviceName;
pub use open::{Compute, Error, OnDevice, OpenDevice};
