//! The order of training data, over real token files.

use std::path::PathBuf;

use moh_data::{
    Error, Order, Source, SourceStart, TokenFile, TokenFileInfo, TokenFileWriter, TrainingData,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// Writes a token file with the token p + `first` at position p, in documents of these lengths.
fn counting_file(dir: &TempDir, name: &str, first: u32, documents: &[usize]) -> PathBuf {
    let prefix = dir.path().join(name);
    let mut writer = TokenFileWriter::create(&prefix, 100_000).unwrap();
    let mut next = first;
    for &length in documents {
        let tokens: Vec<u32> = (next..).take(length).collect();
        writer.push_document(&tokens).unwrap();
        next += length as u32;
    }
    writer.finish(TokenFileInfo::default()).unwrap();
    prefix
}

fn source(path: PathBuf, weight: f64) -> Source {
    Source { path, weight }
}

/// Opens one counting file, with documents of these lengths.
fn counting(documents: &[usize], length: usize, order: Order, seed: u64) -> TrainingData {
    let dir = tempfile::tempdir().unwrap();
    let sources = [source(counting_file(&dir, "a", 0, documents), 1.0)];
    TrainingData::open(&sources, length, order, seed, 100_000).unwrap()
}

fn tokens(data: &TrainingData, number: u64) -> Vec<u32> {
    let mut tokens = vec![0; data.sequence_length() + 1];
    data.sample(number, &mut tokens, None).unwrap();
    tokens
}

#[test]
fn positions_are_of_documents() {
    let dir = tempfile::tempdir().unwrap();
    let file = TokenFile::open(&counting_file(&dir, "a", 0, &[5, 0, 6, 3])).unwrap();
    for (positions, documents) in [
        (0..5, 0..1),
        (4..6, 0..3),
        (5..6, 2..3),
        (5..5, 2..3),
        (10..14, 2..4),
        (13..14, 3..4),
        (0..14, 0..4),
    ] {
        assert_eq!(file.documents_of(positions.clone()).unwrap(), documents, "{positions:?}");
    }
    for outside in [14..14, 13..15, 20..30, u64::MAX..u64::MAX] {
        assert!(file.documents_of(outside.clone()).is_err(), "{outside:?}");
    }
}

#[test]
fn sequential_windows_advance_by_the_sequence_length_and_start_over() {
    let data = counting(&[5, 6], 4, Order::Sequential, 0);
    assert_eq!(data.num_windows(0), 2);
    let read: Vec<_> = (0..3).map(|number| tokens(&data, number)).collect();
    assert_eq!(read, [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]);
}

#[test]
fn positions_know_where_their_document_starts() {
    let data = |length| counting(&[3, 0, 1, 2, 9], length, Order::Sequential, 0);
    let of_three = data(3);
    let data = data(5);
    let (mut tokens, mut document_start) = ([0; 6], [9; 5]);
    data.sample(0, &mut tokens, Some(&mut document_start)).unwrap();
    assert_eq!(document_start, [0, 0, 0, 3, 4]);
    data.sample(1, &mut tokens, Some(&mut document_start)).unwrap();
    assert_eq!((tokens[0], document_start), (5, [0, 1, 1, 1, 1]));
    // The last target of a window may start a document, but is not a key.
    let (mut tokens, mut document_start) = ([0; 4], [9; 3]);
    of_three.sample(0, &mut tokens, Some(&mut document_start)).unwrap();
    assert_eq!(document_start, [0, 0, 0]);
}

#[test]
fn within_documents_the_first_token_of_one_is_no_target() {
    let open = || counting(&[3, 0, 1, 2, 9], 3, Order::Sequential, 0);
    let data = open().by_document(true);
    let mut masks = [[9; 4]; 3];
    for (number, mask) in masks.iter_mut().enumerate() {
        assert!(data.mask(number as u64, mask).unwrap());
    }
    // Documents start at 0, 3, 4 and 6. The document of the last target counts as well.
    assert_eq!(masks, [[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1]]);
    assert_eq!(data.trained_targets(0..3).unwrap(), Some(2 + 1 + 3));
    let (others, mut mask) = (open(), [9; 4]);
    assert!(!others.mask(1, &mut mask).unwrap());
    assert_eq!((mask, others.trained_targets(0..3).unwrap()), ([1; 4], None));
}

#[test]
fn data_that_follow_others_begin_after_the_windows_that_these_have_read() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] =
        [("a", 0), ("b", 1000)].map(|(name, first)| counting_file(&dir, name, first, &[99]));
    let open =
        |sources: &[Source]| TrainingData::open(sources, 4, Order::Shuffled, 3, 100_000).unwrap();
    let first = open(&[source(a.clone(), 3.0), source(b.clone(), 1.0)]);
    let drawn = first.samples_by_source(0..16);
    assert_eq!(drawn, [12, 4]);
    assert_eq!(first.samples_by_source(4..16).iter().sum::<u64>(), 12);
    let start = |number| SourceStart { number, windows: drawn[number as usize] };
    let second = open(&[source(b, 1.0), source(a, 1.0)]).beginning_at(16, vec![start(1), start(0)]);
    assert_eq!(second.file_numbers().collect::<Vec<_>>(), [1, 0]);
    assert_eq!(second.samples_by_source(16..24), [4, 4]);
    let mut read: Vec<u32> = (0..16).map(|number| tokens(&first, number)[0]).collect();
    read.extend((16..24).map(|number| tokens(&second, number)[0]));
    let windows = read.len();
    read.sort_unstable();
    read.dedup();
    assert_eq!(read.len(), windows, "a window came again");
    // Each file has 24 windows. The next epoch uses another permutation.
    assert!((16..200).all(|number| second.locate(number).1 <= 92));
}

#[test]
fn reading_ahead_changes_no_sample() {
    let data = counting(&[3, 0, 50, 9000], 10, Order::Shuffled, 2);
    let before: Vec<_> = (0..100).map(|number| tokens(&data, number)).collect();
    data.read_ahead(0..100);
    data.read_ahead(u64::MAX - 1..u64::MAX);
    let file = &data.files()[0];
    for (start, count) in [(0, 0), (9052, 1), (9053, 7), (40, u64::MAX), (u64::MAX, 1)] {
        file.read_ahead(start, count);
    }
    assert_eq!((0..100).map(|number| tokens(&data, number)).collect::<Vec<_>>(), before);
}

#[test]
fn what_cannot_be_sampled_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = counting_file(&dir, "a", 0, &[5]);
    let open = |length, weight, vocab_size| {
        let sources = [source(path.clone(), weight)];
        TrainingData::open(&sources, length, Order::Shuffled, 0, vocab_size)
    };
    assert!(matches!(open(5, 1.0, 99), Err(Error::TooShort { tokens: 5, needed: 6, .. })));
    let message = |length, weight| open(length, weight, 99).unwrap_err().to_string();
    assert_eq!(message(0, 1.0), "sequence_length = 0: must be at least 1");
    assert!(message(4, 0.0).ends_with(": weight 0: must be a positive number"));
    assert!(open(4, 1.0, 5).unwrap().sample(7, &mut [0; 5], None).is_ok());
    let error = open(4, 1.0, 4).unwrap().sample(7, &mut [0; 5], None).unwrap_err();
    let expected = "token 4 has the id 4, outside the vocabulary of 4:";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(TrainingData::open(&[], 4, Order::Shuffled, 0, 9).is_err());
}

#[test]
fn a_mixture_reads_each_source_with_its_weight() {
    let dir = tempfile::tempdir().unwrap();
    let sources = [
        source(counting_file(&dir, "a", 0, &[41]), 3.0),
        source(counting_file(&dir, "b", 50_000, &[10, 21]), 1.0),
    ];
    for order in [Order::Shuffled, Order::Sequential] {
        let data = TrainingData::open(&sources, 10, order, 5, 100_000).unwrap();
        let from_b = (0..4096).filter(|&number| tokens(&data, number)[0] >= 50_000).count();
        assert_eq!(from_b, 1024);
    }
}

#[test]
fn seeds_and_epochs_change_the_order() {
    let order = |seed, epoch: u64| -> Vec<u32> {
        let data = counting(&[1001], 10, Order::Shuffled, seed);
        (epoch * 100..epoch * 100 + 100).map(|number| tokens(&data, number)[0]).collect()
    };
    assert_ne!(order(1, 0), order(2, 0));
    assert_ne!(order(1, 0), order(1, 1));
    assert_eq!(order(1, 0), order(1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn each_epoch_visits_each_window_once(
        documents in prop::collection::vec(1usize..30, 2..40),
        length in 1usize..20,
        seed: u64,
        sequential: bool,
    ) {
        let total: usize = documents.iter().sum();
        prop_assume!(total > length);
        let order = if sequential { Order::Sequential } else { Order::Shuffled };
        let data = counting(&documents, length, order, seed);
        let windows = data.num_windows(0);
        prop_assert_eq!(windows, ((total - 1) / length) as u64);
        let mut in_sequence = Vec::new();
        for epoch in 0..3 {
            let read: Vec<_> =
                (0..windows).map(|place| tokens(&data, epoch * windows + place)).collect();
            let mut firsts: Vec<u32> = read.iter().map(|window| window[0]).collect();
            firsts.sort_unstable();
            let expected: Vec<u32> =
                (0..windows as u32).map(|window| window * length as u32).collect();
            prop_assert_eq!(firsts, expected);
            let joined =
                read.iter().all(|window| window.windows(2).all(|pair| pair[1] == pair[0] + 1));
            prop_assert!(joined);
            in_sequence.extend(read);
        }
        // Each sample is the same when another reader reads them alone and backwards.
        let again = counting(&documents, length, order, seed);
        for (number, expected) in in_sequence.iter().enumerate().rev().step_by(7) {
            prop_assert_eq!(&tokens(&again, number as u64), expected);
        }
    }

    #[test]
    fn each_source_of_a_mixture_is_read_in_whole_epochs(seed: u64, share in 0.1f64..0.9) {
        let dir = tempfile::tempdir().unwrap();
        let sources = [
            source(counting_file(&dir, "a", 0, &[71]), share),
            source(counting_file(&dir, "b", 50_000, &[31]), 1.0 - share),
        ];
        let data = TrainingData::open(&sources, 10, Order::Shuffled, seed, 100_000).unwrap();
        let mut seen: [Vec<u64>; 2] = Default::default();
        for number in 0..1500 {
            let (from, start) = data.locate(number);
            seen[from].push(start / 10);
        }
        for (from, starts) in seen.iter().enumerate() {
            let windows = data.num_windows(from);
            for epoch in starts.chunks_exact(windows as usize) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                prop_assert!(epoch.iter().copied().eq(0..windows));
            }
        }
    }
}
