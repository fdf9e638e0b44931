//! Views with their number type erased, for libraries that move bytes between processes.

use crate::scalar::DType;

/// Where numbers lie that may be read.
#[derive(Debug, Clone, Copy)]
pub enum Location<'a> {
    /// The host's memory.
    Host(&'a [u8]),
    /// An address of the device.
    Device(u64),
}

/// Where numbers lie that may be written.
#[derive(Debug)]
pub enum LocationMut<'a> {
    /// The host's memory.
    Host(&'a mut [u8]),
    /// An address of the device.
    Device(u64),
}

/// Read access to `len` numbers of type `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct Region<'a> {
    /// The type of the numbers.
    pub dtype: DType,
    /// How many they are.
    pub len: usize,
    /// Where they lie.
    pub location: Location<'a>,
}

/// Write access to `len` numbers of type `dtype`.
#[derive(Debug)]
pub struct RegionMut<'a> {
    /// The type of the numbers.
    pub dtype: DType,
    /// How many they are.
    pub len: usize,
    /// Where they lie.
    pub location: LocationMut<'a>,
}
