//! Returns freed memory to the system.

/// Bytes of the smallest allocation with pages of its own, which glibc returns to the system when it is freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_PAGES: libc::c_int = 1 << 20;

/// Makes glibc return freed memory to the system: allocations of at least 1 MiB at once, and the free end
/// of each of its arenas from 128 KiB.
///
/// By default, freeing a larger allocation than before makes glibc raise both bounds, up to 32 and 64 MiB. Each
/// arena then keeps that much, and threads that serve large requests use up to eight arenas
/// for each processor. With other C libraries this does nothing.
///
/// Source: `mallopt(3)`, `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD`.
pub(crate) fn return_to_system() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call sets a parameter of the allocator under the allocator's lock.
    #[allow(unsafe_code)]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_PAGES);
    }
}
