//! Whether the tile unit may be used.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use crate::matmul::avx512;

/// Bits of XCR0: the system saves the configuration and the data of tiles.
const TILE_STATE: u32 = 0b11 << 17;
/// Bits 22 and 24 of EDX of CPUID leaf 7: AMX-BF16 and AMX-TILE.
const AMX_BF16: u32 = 1 << 22 | 1 << 24;
/// Bit 27 of ECX of CPUID leaf 1: XGETBV may be used.
const OSXSAVE: u32 = 1 << 27;

/// Whether the processor has the tile unit, and the kernel lets this process use it.
pub(in crate::matmul) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    // Packing and storing use AVX512-BF16, which every processor with a tile unit has.
    *AVAILABLE.get_or_init(|| avx512::available() && is_present() && is_saved() && is_permitted())
}

fn is_present() -> bool {
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & AMX_BF16 == AMX_BF16
}

/// Whether the system saves tiles when threads change.
fn is_saved() -> bool {
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let (low, _high): (u32, u32);
    // SAFETY: the instruction exists, by the check above; it reads a register.
    #[allow(unsafe_code)]
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high, options(nomem, nostack));
    }
    low & TILE_STATE == TILE_STATE
}

/// Asks Linux for the state of tiles, for all threads of the process: without it, the first
/// instruction is a fault. A seccomp filter may refuse the call.
fn is_permitted() -> bool {
    const ARCH_GET_XCOMP_PERM: libc::c_int = 0x1022;
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    let mut permitted = 0u64;
    // SAFETY: the first call has no pointer, the second writes a u64.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
            && libc::syscall(libc::SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &raw mut permitted) == 0
            && permitted >> XFEATURE_XTILEDATA & 1 == 1
    }
}
