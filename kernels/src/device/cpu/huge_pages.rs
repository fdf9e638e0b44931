//! Huge pages for large buffers: with pages of 4 KiB the address of almost every row of a matrix misses
//! the processor's first translation cache.

/// Bytes of a huge page of x86-64, and of AArch64 with pages of 4 KiB.
const PAGE: usize = 2 << 20;

/// Asks the system to back the whole huge pages within a buffer that has not been written yet.
///
/// Linux then allocates them on the first access, if huge pages are available and programs may ask for them
/// (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`); otherwise nothing
/// changes. Other systems are not asked.
pub(crate) fn request<T>(buffer: &mut [T]) {
    let start = buffer.as_mut_ptr().cast::<u8>();
    let before = start.addr().next_multiple_of(PAGE) - start.addr();
    let len = size_of_val(buffer).saturating_sub(before) / PAGE * PAGE;
    if len > 0 {
        advise(start.wrapping_add(before), len);
    }
}

#[cfg(target_os = "linux")]
fn advise(start: *mut u8, len: usize) {
    // SAFETY: the pages are within the caller's buffer. The advice does not change their contents. If the system
    // has no huge pages, the call fails and changes nothing.
    #[allow(unsafe_code)]
    unsafe {
        libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_start: *mut u8, _len: usize) {}
