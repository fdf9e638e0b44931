//! Executes the tile unit's instructions on processors that lack it: each is a trap, whose handler does
//! what the instruction would have done, by the model. Tests so execute the very assembly everywhere.

use std::cell::Cell;
use std::sync::OnceLock;

use super::model::multiply_tiles;
use super::operand::{ROWS, TILE};
use super::permission::available;

thread_local! {
    /// The tiles; `None` while they are not configured.
    static TILES: Cell<Option<[[u32; TILE]; 8]>> = const { Cell::new(None) };
}

/// Whether traps are handled, which begins with the first call; false on a processor with the unit.
pub(super) fn are_handled() -> bool {
    static HANDLED: OnceLock<bool> = OnceLock::new();
    *HANDLED.get_or_init(|| !available() && install())
}

fn install() -> bool {
    // SAFETY: the handler has the signature that SA_SIGINFO asks for, and touches only the
    // interrupted thread's registers, its tiles and the memory that the instruction names.
    #[allow(unsafe_code)]
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) == 0
    }
}

/// An instruction of the unit, VEX-encoded.
#[derive(Debug, PartialEq)]
enum Instruction {
    Configure,
    Release,
    Zero(usize),
    /// The memory operand: address, and bytes between rows.
    Load(usize, usize, usize),
    Store(usize, usize, usize),
    /// Sums, left and right tile.
    Multiply(usize, usize, usize),
}

/// The general registers by their numbers in instructions.
const REGISTERS: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Decodes an instruction; `register` gives a general register's value. Returns its bytes too.
fn decode(code: &[u8; 15], register: impl Fn(usize) -> usize) -> Option<(Instruction, usize)> {
    let [0xc4, second, third, opcode, modrm, ..] = *code else { return None };
    // Map 0F38, W = 0, L = 0.
    if second & 0x1f != 2 || third & 0x84 != 0 {
        return None;
    }
    // The prefix's register bits are inverted.
    let (extend_index, extend_base) =
        (8 * usize::from(second & 0x40 == 0), 8 * usize::from(second & 0x20 == 0));
    let other = usize::from(!third >> 3 & 0xf);
    let prefix = third & 3; // none, 66, F3, F2
    let (form, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), usize::from(modrm & 7));
    if form == 3 {
        let instruction = match (opcode, prefix) {
            (0x49, 0) if modrm == 0xc0 => Instruction::Release,
            (0x49, 3) => Instruction::Zero(reg),
            (0x5c, 2) => Instruction::Multiply(reg, rm, other),
            _ => return None,
        };
        return Some((instruction, 5));
    }
    let displacement = |at: usize| match form {
        0 => (0, at),
        1 => (code[at] as i8 as isize, at + 1),
        _ => {
            let bytes = [code[at], code[at + 1], code[at + 2], code[at + 3]];
            (i32::from_le_bytes(bytes) as isize, at + 4)
        }
    };
    match (opcode, prefix, rm) {
        (0x49, 0, 0..=3 | 5..=7) => Some((Instruction::Configure, displacement(5).1)),
        (0x49, 0, 4) => Some((Instruction::Configure, displacement(6).1)),
        (0x4b, 2 | 3, 4) => {
            let scaled = code[5];
            let (base, index) = (
                usize::from(scaled & 7) + extend_base,
                usize::from(scaled >> 3 & 7) + extend_index,
            );
            if base % 8 == 5 && form == 0 {
                return None;
            }
            let (displacement, end) = displacement(6);
            let start = register(base).wrapping_add_signed(displacement);
            let stride = register(index) << (scaled >> 6);
            let instruction = match prefix {
                3 => Instruction::Load(reg, start, stride),
                _ => Instruction::Store(reg, start, stride),
            };
            Some((instruction, end))
        }
        _ => None,
    }
}

#[allow(unsafe_code)]
extern "C" fn handle(_: libc::c_int, _: *const libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes the interrupted thread's context; its instruction pointer is at an
    // instruction, of which at most 15 bytes are read, within the test's code.
    unsafe {
        let registers = &mut (*context).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize];
        let code = &*(at as *const [u8; 15]);
        let value = |number: usize| registers[REGISTERS[number] as usize] as usize;
        let Some((instruction, length)) = decode(code, value) else { std::process::abort() };
        execute(&instruction);
        registers[libc::REG_RIP as usize] = at + length as i64;
    }
}

/// Executes an instruction; one on tiles that are not configured ends the process.
fn execute(instruction: &Instruction) {
    let mut tiles = match (instruction, TILES.get()) {
        (Instruction::Configure, _) => [[0; TILE]; 8],
        (_, Some(tiles)) => tiles,
        (_, None) => std::process::abort(),
    };
    match *instruction {
        Instruction::Configure => {}
        Instruction::Release => return TILES.set(None),
        Instruction::Zero(tile) => tiles[tile] = [0; TILE],
        Instruction::Load(tile, start, stride) => {
            for (row, pairs) in tiles[tile].chunks_exact_mut(ROWS).enumerate() {
                let from = (start + row * stride) as *const [u32; ROWS];
                // SAFETY: the instruction reads these bytes.
                #[allow(unsafe_code)]
                unsafe {
                    pairs.copy_from_slice(&from.read_unaligned());
                }
            }
        }
        Instruction::Store(tile, start, stride) => {
            for (row, pairs) in tiles[tile].as_chunks::<ROWS>().0.iter().enumerate() {
                let to = (start + row * stride) as *mut [u32; ROWS];
                // SAFETY: the instruction writes these bytes.
                #[allow(unsafe_code)]
                unsafe {
                    to.write_unaligned(*pairs);
                }
            }
        }
        Instruction::Multiply(sums, left, right) => {
            let (left, right) = (tiles[left], tiles[right]);
            multiply_tiles(&mut tiles[sums], &left, &right);
        }
    }
    TILES.set(Some(tiles));
}

#[test]
fn instructions_are_decoded() {
    let of = |bytes: &[u8]| {
        let mut code = [0; 15];
        code[..bytes.len()].copy_from_slice(bytes);
        decode(&code, |number| 1000 * number)
    };
    // Assembled by LLVM: tilezero tmm3; tdpbf16ps tmm1, tmm4, tmm7; tilerelease.
    assert_eq!(of(&[0xc4, 0xe2, 0x7b, 0x49, 0xd8]), Some((Instruction::Zero(3), 5)));
    assert_eq!(of(&[0xc4, 0xe2, 0x42, 0x5c, 0xcc]), Some((Instruction::Multiply(1, 4, 7), 5)));
    assert_eq!(of(&[0xc4, 0xe2, 0x78, 0x49, 0xc0]), Some((Instruction::Release, 5)));
    // tileloadd tmm5, [r9 + 2 * r10 + 1024]; tilestored [rax + rcx], tmm2.
    let load = [0xc4, 0x82, 0x7b, 0x4b, 0xac, 0x51, 0x00, 0x04, 0x00, 0x00];
    assert_eq!(of(&load), Some((Instruction::Load(5, 9000 + 1024, 20_000), 10)));
    assert_eq!(
        of(&[0xc4, 0xe2, 0x7a, 0x4b, 0x14, 0x08]),
        Some((Instruction::Store(2, 0, 1000), 6))
    );
    assert_eq!(of(&[0x90]), None);
}
