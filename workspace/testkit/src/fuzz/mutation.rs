//! Mutations of an input: of its bytes, of the integers in it, and of words and numbers in its
//! text.

use fastrand::Rng;

const MAX_MUTATIONS: usize = 6;
/// Integers at the limits of the readers' arithmetic.
const INTEGERS: [u64; 14] = [
    0,
    1,
    2,
    7,
    8,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    u32::MAX as u64,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX,
];
/// Text that replaces a number or a word.
const WORDS: &str = concat!(
    "0 -1 1 4294967295 9223372036854775807 18446744073709551615 18446744073709551616 1e308 1e400 -0.0 1.5 ",
    r#"null true "" [] {} nan inf "../../etc" "\u0000""#
);

/// Returns an input of the corpus with a few mutations, of at most `longest` bytes.
pub(crate) fn mutated(corpus: &[Vec<u8>], longest: usize, random: &mut Rng) -> Vec<u8> {
    let mut input = pick(corpus, random).to_vec();
    for _ in 0..random.usize(1..=MAX_MUTATIONS) {
        mutate(&mut input, corpus, random);
    }
    input.truncate(longest);
    input
}

fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Rng) {
    let at = random.usize(0..=input.len());
    let end = (at + random.usize(0..=16)).min(input.len());
    match random.u8(0..12) {
        0 => flip(input, random),
        1 => replace(input, at..(at + 1).min(input.len()), &[random.u8(..)]),
        2 => input.truncate(at),
        3 => replace(input, at..end, &[]),
        4 => {
            let copy = input[at..end].to_vec();
            replace(input, at..at, &copy);
        }
        5 => integer(input, at, random),
        6 | 7 => word(input, at, random),
        8 => {
            let depth = random.usize(1..300);
            let bracket = if random.bool() { b'[' } else { b'{' };
            replace(input, at..at, &vec![bracket; depth]);
        }
        9 => {
            let other = pick(corpus, random);
            let from = random.usize(0..=other.len());
            let to = (from + random.usize(0..=64)).min(other.len());
            replace(input, at..end, &other[from..to]);
        }
        10 => swap_words(input, random),
        _ => {
            let many = vec![random.u8(..); random.usize(1..2000)];
            replace(input, at..at, &many);
        }
    }
}

fn pick<'a>(corpus: &'a [Vec<u8>], random: &mut Rng) -> &'a [u8] {
    match corpus.is_empty() {
        true => &[],
        false => &corpus[random.usize(0..corpus.len())],
    }
}

fn replace(input: &mut Vec<u8>, range: std::ops::Range<usize>, by: &[u8]) {
    input.splice(range, by.iter().copied());
}

fn flip(input: &mut [u8], random: &mut Rng) {
    if !input.is_empty() {
        let at = random.usize(0..input.len());
        input[at] ^= 1 << random.u32(0..8);
    }
}

/// Overwrites bytes with an integer, or adds a small number to the existing integer.
fn integer(input: &mut [u8], at: usize, random: &mut Rng) {
    let bytes = [1, 2, 4, 8][random.usize(0..4)].min(input.len() - at);
    let mut old = [0; 8];
    old[..bytes].copy_from_slice(&input[at..at + bytes]);
    let value = match random.bool() {
        true => INTEGERS[random.usize(0..INTEGERS.len())],
        false => u64::from_le_bytes(old).wrapping_add(random.u64(0..5)).wrapping_sub(2),
    };
    input[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
}

/// Replaces the number or word at a position.
fn word(input: &mut Vec<u8>, at: usize, random: &mut Rng) {
    if let Some(range) = word_at(input, at) {
        let words: Vec<&str> = WORDS.split(' ').collect();
        replace(input, range, words[random.usize(0..words.len())].as_bytes());
    }
}

fn swap_words(input: &mut Vec<u8>, random: &mut Rng) {
    let (a, b) = (random.usize(0..=input.len()), random.usize(0..=input.len()));
    if let (Some(a), Some(b)) = (word_at(input, a), word_at(input, b)) {
        let copy = input[a].to_vec();
        replace(input, b, &copy);
    }
}

/// Returns the letters, digits, signs and points around a position.
fn word_at(input: &[u8], at: usize) -> Option<std::ops::Range<usize>> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-+.".contains(byte);
    let before = input[..at].iter().rev().take_while(|byte| is_part(byte)).count();
    let after = input[at..].iter().take_while(|byte| is_part(byte)).count();
    (before + after > 0).then_some(at - before..at + after)
}
