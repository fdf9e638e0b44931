//! Identifies the content of a token file, at any path, by the sizes of its two files, the hash of the index, and a
//! hash of evenly spaced blocks of the tokens. If the file has a mask, blocks of the mask are hashed as well. The index
//! contains every document's length, so most other texts have another index. The blocks distinguish texts with the same
//! lengths. A change of tokens between the blocks that keeps all lengths is not detected.

use serde::{Deserialize, Serialize};

const BLOCK_BYTES: usize = 4096;
/// Blocks of a file; smaller files are hashed whole.
const BLOCKS: usize = 256;

/// Identifies the content of a token file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenFileContent {
    /// Bytes of `PREFIX.idx`.
    pub idx_bytes: u64,
    /// blake3 of `PREFIX.idx`, in hexadecimal.
    pub idx_blake3: String,
    /// Bytes of `PREFIX.bin`.
    pub bin_bytes: u64,
    /// blake3 of 256 evenly spaced blocks of 4096 bytes of `PREFIX.bin`, from its first to its last bytes. Files of at
    /// most 1 MiB are hashed whole.
    pub bin_sample_blake3: String,
    /// The same hash of `PREFIX.mask`; absent without a mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_sample_blake3: Option<String>,
}

impl TokenFileContent {
    /// Returns the content of these files. `mask` is `None` if the token file has no mask.
    pub(crate) fn from_bytes(idx: &[u8], bin: &[u8], mask: Option<&[u8]>) -> Self {
        Self {
            idx_bytes: idx.len() as u64,
            idx_blake3: blake3::Hasher::new().update_rayon(idx).finalize().to_hex().to_string(),
            bin_bytes: bin.len() as u64,
            bin_sample_blake3: sample(bin).to_hex().to_string(),
            mask_sample_blake3: mask.map(|mask| sample(mask).to_hex().to_string()),
        }
    }
}

/// Returns the hash of evenly spaced blocks.
fn sample(bytes: &[u8]) -> blake3::Hash {
    if bytes.len() <= BLOCKS * BLOCK_BYTES {
        return blake3::hash(bytes);
    }
    let mut hasher = blake3::Hasher::new();
    let last = (bytes.len() - BLOCK_BYTES) as u128;
    for block in 0..BLOCKS as u128 {
        // At most `last`, which is a usize.
        let start = (last * block / (BLOCKS as u128 - 1)) as usize;
        hasher.update(&bytes[start..start + BLOCK_BYTES]);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_is_hashed_whole() {
        let mut bytes = vec![7; BLOCKS * BLOCK_BYTES];
        assert_eq!(sample(&bytes), blake3::hash(&bytes));
        assert_eq!(sample(&[]), blake3::hash(&[]));
        let before = sample(&bytes);
        bytes[123_456] = 8;
        assert_ne!(sample(&bytes), before);
    }

    #[test]
    fn the_first_and_the_last_byte_of_a_large_file_count() {
        let bytes = vec![7; 3_000_001];
        for at in [0, 3_000_000] {
            let mut changed = bytes.clone();
            changed[at] = 8;
            assert_ne!(sample(&changed), sample(&bytes), "byte {at}");
        }
        let longer = TokenFileContent::from_bytes(&[], &vec![7; 3_000_002], None);
        assert_ne!(longer, TokenFileContent::from_bytes(&[], &bytes, None));
        let masked = TokenFileContent::from_bytes(&[], &bytes, Some(&[1]));
        assert_ne!(masked, TokenFileContent::from_bytes(&[], &bytes, None));
        assert_ne!(masked, TokenFileContent::from_bytes(&[], &bytes, Some(&[0])));
    }
}
