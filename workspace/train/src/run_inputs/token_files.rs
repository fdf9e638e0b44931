//! The content of a run's token files, read by all ranks. Each rank reads a share of the files. To find ids outside the
//! vocabulary before training starts, all ranks read one file in short rounds. A run can be stopped between rounds.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_data::{TokenFile, TokenFileContent};
use moh_kernels::Backend;
use moh_step::Ranks;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TokenFileState {
    pub content: TokenFileContent,
    /// A number that is proven to be above all ids; see [`TokenFile::ids_below`].
    pub ids_below: Option<u64>,
}

/// Returns the state of every file on the first rank, and an empty list on other ranks. Each rank reads its share.
/// Returns `None` if a rank was asked to stop. Fails if a file's `PREFIX.json` describes other content, or if another
/// rank has failed.
pub(super) fn find<B: Backend>(
    ranks: &mut Ranks<B>,
    files: &[(String, &TokenFile)],
    stop: &AtomicBool,
) -> Result<Option<Vec<TokenFileState>>> {
    let (rank, size) = (ranks.group().rank(), ranks.group().size());
    let find = |(_, file): &(String, &TokenFile)| {
        let content = file.content();
        let ids_below = file.ids_below(&content)?;
        Ok::<_, Error>(TokenFileState { content, ids_below })
    };
    let mut own = Ok(Vec::new());
    for round in files.chunks(size) {
        if ranks.any(stop.load(Ordering::Relaxed))? {
            return Ok(None);
        }
        if let (Some(file), Ok(found)) = (round.get(rank), &mut own) {
            match find(file) {
                Ok(file) => found.push(file),
                Err(error) => own = Err(error),
            }
        }
    }
    let own = ranks.agree(own)?;
    let text = serde_json::to_vec(&own).map_err(exchanged)?;
    let mut shares = Vec::new();
    for text in ranks.gather(text)? {
        let share: Vec<TokenFileState> = serde_json::from_slice(&text).map_err(exchanged)?;
        shares.push(share.into_iter());
    }
    // File i is the next file of rank i % size.
    let in_order = (0..files.len()).map(|index| shares.get_mut(index % size)?.next());
    Ok(Some(in_order.map_while(|found| found).collect()))
}

/// Returns on all ranks a hash of the content of each file that the first rank has `found`.
pub(super) fn share_contents<B: Backend>(
    ranks: &mut Ranks<B>,
    found: &[TokenFileState],
) -> Result<Vec<String>> {
    let hash = |found: &TokenFileState| {
        let content = serde_json::to_vec(&found.content)?;
        Ok(blake3::hash(&content).to_hex().to_string())
    };
    let text = match ranks.is_first() {
        true => Some(found.iter().map(hash).collect::<Result<Vec<_>, _>>().map_err(exchanged)?),
        false => None,
    };
    let text = text.map(|hashes| hashes.join(" ").into_bytes());
    let shared = ranks.first_that_has(text)?.unwrap_or_default();
    // The text has only hexadecimal digits and spaces.
    Ok(String::from_utf8_lossy(&shared).split_whitespace().map(str::to_owned).collect())
}

fn exchanged(error: serde_json::Error) -> Error {
    moh_files::io(Path::new("token files"))(error.into()).into()
}

/// Tokens that a rank reads in a round: a fraction of a second at a disk's speed, seconds at a slow network's.
const ROUND_TOKENS: u64 = 1 << 24;

/// Returns the largest id in `file` plus 1, or `None` if `stop` was set on a rank. The file's own limit is the
/// vocabulary. Calls `progress` with the number of tokens read. Fails with the first id outside the vocabulary of the
/// first rank that has found one, or if another rank has failed.
pub(super) fn scan<B: Backend>(
    ranks: &mut Ranks<B>,
    file: &TokenFile,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<Option<u64>> {
    let (rank, size) = (ranks.group().rank() as u64, ranks.group().size() as u64);
    let tokens = file.num_tokens();
    let (mut done, mut largest) = (0, 0.0);
    while done < tokens {
        progress(done);
        let own = share(done..tokens, rank);
        let found = ranks.agree(file.largest_id(own).map_err(Error::from))?;
        let stopping = f64::from(stop.load(Ordering::Relaxed));
        let [found, stopping] = ranks.largest([f64::from(found), stopping])?;
        if stopping > 0.0 {
            return Ok(None);
        }
        largest = f64::max(largest, found);
        done = tokens.min(done.saturating_add(ROUND_TOKENS.saturating_mul(size)));
    }
    // An id is a u32, which f64 represents exactly.
    Ok(Some(largest as u64 + 1))
}

/// Returns the tokens that a rank reads of the rest of a file in this round.
fn share(rest: Range<u64>, rank: u64) -> Range<u64> {
    let start = rest.start.saturating_add(ROUND_TOKENS.saturating_mul(rank)).min(rest.end);
    start..start.saturating_add(ROUND_TOKENS).min(rest.end)
}

#[cfg(test)]
mod tests {
    use moh_data::{TokenFileInfo, TokenFileWriter};
    use moh_testkit::ranks::ranks_on_threads;

    use super::*;

    #[test]
    fn the_first_rank_learns_all_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let prefixes: Vec<_> = (0..5u32)
            .map(|index| {
                let prefix = dir.path().join(index.to_string());
                let mut writer = TokenFileWriter::create(&prefix, 9).unwrap();
                writer.push_document(&[index; 4]).unwrap();
                writer.finish(TokenFileInfo::default()).unwrap();
                prefix
            })
            .collect();
        let ranks = ranks_on_threads(3, |ranks| {
            let opened = prefixes.iter().map(|prefix| TokenFile::open(prefix).unwrap());
            let opened: Vec<TokenFile> = opened.collect();
            let files: Vec<_> = opened.iter().map(|file| (String::new(), file)).collect();
            let found = find(ranks, &files, &AtomicBool::new(false)).unwrap().unwrap();
            let is_asked = AtomicBool::new(ranks.group().rank() == 2);
            assert_eq!(find(ranks, &files, &is_asked).unwrap(), None);
            let expected: Vec<_> = opened.iter().map(TokenFile::content).collect();
            (found, expected)
        });
        for (rank, (found, expected)) in ranks.into_iter().enumerate() {
            let contents: Vec<_> = found.iter().map(|found| found.content.clone()).collect();
            assert_eq!(contents, if rank == 0 { expected } else { Vec::new() });
            assert!(found.iter().all(|found| found.ids_below == Some(9)));
        }
    }

    #[test]
    fn the_ranks_shares_of_all_rounds_are_the_file() {
        let tokens = 5 * ROUND_TOKENS + 3;
        for size in [1, 2, 3, 8] {
            let (mut next, mut done) = (0, 0);
            while done < tokens {
                for rank in 0..size {
                    let share = share(done..tokens, rank);
                    assert!(share.is_empty() || share.start == next);
                    next = next.max(share.end);
                }
                done += ROUND_TOKENS * size;
            }
            assert_eq!(next, tokens);
        }
    }
}
