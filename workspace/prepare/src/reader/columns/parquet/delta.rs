//! Parquet's delta encodings begin with how many lengths of values follow. The crate takes memory for so many before
//! it reads them: a number that a damaged page has no values for is found here.

use parquet::basic::Encoding;
use parquet::column::page::Page;

/// Whether a page says to have more lengths than values; `has_levels` says whether its values may be null. What is
/// wrong with it otherwise is for the crate to find.
pub(super) fn has_too_many_lengths(page: &Page, has_levels: bool) -> bool {
    let (bytes, values, encoding, levels) = match page {
        Page::DataPage { def_level_encoding, .. }
            if has_levels && *def_level_encoding != Encoding::RLE =>
        {
            return false;
        }
        Page::DataPage { buf, num_values, encoding, .. } => {
            let levels = buf.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize);
            let levels = if has_levels { levels.saturating_add(size_of::<u32>()) } else { 0 };
            (buf, num_values, encoding, levels)
        }
        Page::DataPageV2 {
            buf,
            num_values,
            encoding,
            def_levels_byte_len,
            rep_levels_byte_len,
            ..
        } => {
            let levels = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
            (buf, num_values, encoding, levels)
        }
        Page::DictionaryPage { .. } => return false,
    };
    let lists = match encoding {
        Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
        // Those of what a value has of the one before, and of the rest.
        Encoding::DELTA_BYTE_ARRAY => 2,
        _ => return false,
    };
    let mut rest = bytes.get(levels..).unwrap_or_default();
    (0..lists).any(|_| match list(&mut rest, u64::from(*values)) {
        Some(is_too_long) => is_too_long,
        None => {
            rest = &[];
            false
        }
    })
}

/// Reads past a list of lengths, unless it has more than `limit`; whether it has. `None` if it is cut off.
fn list(rest: &mut &[u8], limit: u64) -> Option<bool> {
    let (block, parts, count) = (number(rest)?, number(rest)?, number(rest)?);
    if count > limit {
        return Some(true);
    }
    let _first = number(rest)?;
    let part = block.checked_div(parts)?;
    let mut left = count.saturating_sub(1);
    while left > 0 {
        let _least = number(rest)?;
        let (widths, after) = rest.split_at_checked(usize::try_from(parts).ok()?)?;
        *rest = after;
        for &width in widths {
            // A part without values has no bytes.
            if left == 0 {
                break;
            }
            let bytes = part.checked_mul(u64::from(width))? / 8;
            *rest = rest.get(usize::try_from(bytes).ok()?..)?;
            left = left.saturating_sub(part);
        }
    }
    Some(false)
}

/// Reads a number in groups of seven bits, the lowest first.
fn number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(bytes: &[u8], num_values: u32, encoding: Encoding) -> Page {
        Page::DataPage {
            buf: bytes::Bytes::copy_from_slice(bytes),
            num_values,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        }
    }

    #[test]
    fn more_lengths_than_values_are_found_in_both_lists() {
        // Blocks of 128 in 4 parts, 3 lengths, the first 5 (zigzag), the least step 0, 8 bits in the first part.
        let list = |count: &[u8]| {
            let mut bytes = vec![0x80, 1, 4];
            bytes.extend(count);
            bytes.extend([10, 0, 8, 0, 0, 0]);
            bytes.extend([7; 32]);
            bytes
        };
        let (good, bad) = (list(&[3]), list(&[0xff, 0xff, 0xff, 0xff, 0xff, 1]));
        let one = Encoding::DELTA_LENGTH_BYTE_ARRAY;
        let two = Encoding::DELTA_BYTE_ARRAY;
        let found = |bytes: &[u8], values, encoding| {
            let mut levels = vec![2, 0, 0, 0, 6, 1];
            levels.extend(bytes);
            let found = has_too_many_lengths(&page(bytes, values, encoding), false);
            assert_eq!(has_too_many_lengths(&page(&levels, values, encoding), true), found);
            found
        };
        assert!(!found(&good, 3, one) && found(&good, 2, one) && found(&bad, 3, one));
        assert!(!found(&[good.clone(), good.clone()].concat(), 3, two));
        assert!(found(&[good.clone(), bad.clone()].concat(), 3, two));
        assert!(!found(&bad, 3, Encoding::PLAIN));
        for end in 0..good.len() {
            assert!(!found(&good[..end], 3, two), "{end}");
        }
    }
}
