//! The stored integer types of Megatron's indexed dataset.

use serde::{Deserialize, Serialize};

/// The stored type of a token, with its name in `PREFIX.json` and its code in the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// Unsigned, of a byte.
    U8 = 1,
    /// Signed, of a byte.
    I8 = 2,
    /// Signed, of two bytes.
    I16 = 3,
    /// Used by writers for large vocabularies.
    I32 = 4,
    /// Signed, of eight bytes.
    I64 = 5,
    /// Used by writers for vocabularies below 65,500.
    #[default]
    U16 = 8,
}

/// Vocabularies of this size or above are stored as i32, as in Megatron.
const LARGE_VOCABULARY: usize = 65_500;

impl TokenType {
    /// Returns the type with an index's code, or the reason why no type has it.
    pub(crate) fn from_code(code: u8) -> Result<Self, String> {
        let all = [Self::U8, Self::I8, Self::I16, Self::I32, Self::I64, Self::U16];
        all.into_iter().find(|kind| kind.code() == code).ok_or_else(|| match code {
            6 | 7 => format!("type code {code} is a floating-point type, not token ids"),
            _ => format!("type code {code} is unknown (1 to 5 and 8 are token ids)"),
        })
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    /// Returns the number of bytes of a token.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Returns the number of ids that the type can store, or `None` for signed types, which also store negative
    /// numbers.
    pub(crate) fn num_ids(self) -> Option<u64> {
        match self {
            Self::U8 => Some(1 << 8),
            Self::U16 => Some(1 << 16),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => None,
        }
    }

    /// Returns the name, as `PREFIX.json` writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U16 => "u16",
        }
    }

    /// Returns the stored type for a vocabulary of this size.
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size < LARGE_VOCABULARY { Self::U16 } else { Self::I32 }
    }

    /// Widens stored tokens into `out`, one entry per token. Returns the first id that is negative
    /// or not below `limit`, with its index in `out`.
    pub(crate) fn widen(
        self,
        bytes: &[u8],
        out: &mut [u32],
        limit: u64,
    ) -> Result<(), (usize, i64)> {
        debug_assert_eq!(bytes.len(), out.len() * self.bytes());
        match self {
            Self::U8 => widen(bytes, out, limit, |[b]: [u8; 1]| i64::from(b)),
            Self::I8 => widen(bytes, out, limit, |b| i64::from(i8::from_le_bytes(b))),
            Self::I16 => widen(bytes, out, limit, |b| i64::from(i16::from_le_bytes(b))),
            Self::I32 => widen(bytes, out, limit, |b| i64::from(i32::from_le_bytes(b))),
            Self::I64 => widen(bytes, out, limit, i64::from_le_bytes),
            Self::U16 => widen(bytes, out, limit, |b| i64::from(u16::from_le_bytes(b))),
        }
    }

    /// Counts the stored ids that are negative or not below `limit`. Also returns the first such id, with its index.
    pub(crate) fn outside(self, bytes: &[u8], limit: u64) -> (u64, Option<(u64, i64)>) {
        match self {
            Self::U8 => outside(bytes, limit, |[b]: [u8; 1]| i64::from(b)),
            Self::I8 => outside(bytes, limit, |b| i64::from(i8::from_le_bytes(b))),
            Self::I16 => outside(bytes, limit, |b| i64::from(i16::from_le_bytes(b))),
            Self::I32 => outside(bytes, limit, |b| i64::from(i32::from_le_bytes(b))),
            Self::I64 => outside(bytes, limit, i64::from_le_bytes),
            Self::U16 => outside(bytes, limit, |b| i64::from(u16::from_le_bytes(b))),
        }
    }

    /// Returns the last stored id, if any.
    pub(crate) fn last(self, bytes: &[u8]) -> Option<i64> {
        let last = &bytes[bytes.len().checked_sub(self.bytes())?..];
        // With a limit of 0 every id is outside.
        self.outside(last, 0).1.map(|(_, id)| id)
    }
}

/// Runs the loop of [`TokenType::outside`] for one stored type of N bytes.
fn outside<const N: usize>(
    bytes: &[u8],
    limit: u64,
    id_of: impl Fn([u8; N]) -> i64,
) -> (u64, Option<(u64, i64)>) {
    let (items, _) = bytes.as_chunks::<N>();
    // A negative id is a large number here.
    let is_outside = |item: &[u8; N]| id_of(*item) as u64 >= limit;
    let count = items.iter().map(|item| u64::from(is_outside(item))).sum();
    let first = match count {
        0 => None,
        _ => items.iter().position(is_outside).map(|at| (at as u64, id_of(items[at]))),
    };
    (count, first)
}

/// Runs the loop of [`TokenType::widen`] for one stored type of N bytes.
fn widen<const N: usize>(
    bytes: &[u8],
    out: &mut [u32],
    limit: u64,
    id_of: impl Fn([u8; N]) -> i64,
) -> Result<(), (usize, i64)> {
    let (items, _) = bytes.as_chunks::<N>();
    for (i, (item, slot)) in items.iter().zip(out).enumerate() {
        let id = id_of(*item);
        match u64::try_from(id).ok().filter(|&id| id < limit).and_then(|id| id.try_into().ok()) {
            Some(id) => *slot = id,
            None => return Err((i, id)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_name_their_types() {
        for code in [1, 2, 3, 4, 5, 8] {
            assert_eq!(TokenType::from_code(code).unwrap().code(), code);
        }
        assert!(TokenType::from_code(6).unwrap_err().contains("floating-point"));
        assert!(TokenType::from_code(0).unwrap_err().contains("unknown"));
    }

    #[test]
    fn negative_and_large_ids_are_found() {
        let mut out = [0; 3];
        let ids: Vec<u8> = [1i64, -2, 3].iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(TokenType::I64.widen(&ids, &mut out, u64::MAX), Err((1, -2)));
        let ids: Vec<u8> = [1i64, 2, 1 << 40].iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(TokenType::I64.widen(&ids, &mut out, u64::MAX), Err((2, 1 << 40)));
        assert_eq!(TokenType::U8.widen(&[7, 8, 9], &mut out, 9), Err((2, 9)));
        assert_eq!(TokenType::U8.widen(&[7, 8, 9], &mut out, 10), Ok(()));
        assert_eq!(out, [7, 8, 9]);
        assert_eq!(TokenType::I64.outside(&ids, 1 << 32), (1, Some((2, 1 << 40))));
        assert_eq!(TokenType::I8.outside(&[1, 255, 128], 200), (2, Some((1, -1))));
        assert_eq!(TokenType::U8.outside(&[7, 8, 9], 10), (0, None));
        assert_eq!(
            (TokenType::U16.last(&[1, 0, 2, 1]), TokenType::I8.last(&[])),
            (Some(258), None)
        );
    }

    #[test]
    fn the_stored_type_follows_megatrons_rule() {
        assert_eq!(TokenType::for_vocabulary(65_499), TokenType::U16);
        assert_eq!(TokenType::for_vocabulary(65_500), TokenType::I32);
    }
}
