//! From the settings of a recipe or a command line to a type of device: only this module opens the device. Work is a
//! struct with a generic method, because a closure cannot be generic. [`ResidentMemory`] is the memory of a device
//! without its own.

mod host_memory;
mod open;

pub use host_memory::{ResidentMemory, available_memory};
pub use open::{DeviceName, Error, OnDevice, OpenDevice};
