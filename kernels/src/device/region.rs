//! Views with their element type erased, for libraries that move bytes between processes.

use crate::scalar::DType;

/// The location of readable elements.
#[derive(Debug, Clone, Copy)]
pub enum Location<'a> {
    /// The host's memory.
    Host(&'a [u8]),
    /// An address of the device.
    Device(u64),
}

/// The location of writable elements.
#[derive(Debug)]
pub enum LocationMut<'a> {
    /// The host's memory.
    Host(&'a mut [u8]),
    /// An address of the device.
    Device(u64),
}

/// Read access to `len` elements of type `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct Region<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// Their location.
    pub location: Location<'a>,
}

/// Write access to `len` elements of type `dtype`.
#[derive(Debug)]
pub struct RegionMut<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// Their location.
    pub location: LocationMut<'a>,
}
