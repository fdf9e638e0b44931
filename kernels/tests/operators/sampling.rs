//! Tokens that devices choose by logits, against the distribution in f64.

use half::bf16;
use moh_kernels::sampling::{
    LogProbabilities, LogitChange, RowChoice, RowRequest, RowSampling, RowToken, Sample, SampleArgs,
};
use moh_kernels::{Backend, Cpu, Element};

use crate::reference::{Random, cases, upload};

/// Returns a sampling without limits or changes, at temperature 1.
fn plain(random: f32) -> RowSampling {
    RowSampling { temperature: 1.0, min_p: 0.0, top_k: 0, top_p: 1.0, random, changes: Vec::new() }
}

fn sampled(sampling: RowSampling) -> RowRequest {
    RowRequest { token: RowToken::Sampled(sampling), log_probabilities: None }
}

fn sample<B: Backend, T: Element>(
    device: &B,
    logits: &[T],
    known: usize,
    rows: &[RowRequest],
) -> Vec<Option<RowChoice>> {
    let vocabulary = logits.len() / rows.len();
    let logits = upload(device, logits);
    device.sample(SampleArgs { vocabulary, known, logits: B::whole(&logits), rows }).unwrap()
}

/// Returns, in f64, the logits with their changes over the temperature, and the tokens with the likeliest first.
fn scaled<T: Element>(
    logits: &[T],
    known: usize,
    sampling: &RowSampling,
) -> (Vec<f64>, Vec<usize>) {
    let mut logits: Vec<f64> =
        logits[..known].iter().map(|logit| f64::from(logit.to_f32())).collect();
    for change in &sampling.changes {
        if let Some(logit) = logits.get_mut(change.token as usize) {
            let biased = *logit + f64::from(change.bias);
            let factor = f64::from(change.repetition);
            let repeated = if biased > 0.0 { biased / factor } else { biased * factor };
            *logit = repeated - f64::from(change.penalty);
        }
    }
    logits.iter_mut().for_each(|logit| *logit /= sampling.temperature);
    let mut order: Vec<usize> = (0..known).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    (logits, order)
}

/// Fails if no order of rounding can choose this token.
fn assert_possible<T: Element>(logits: &[T], known: usize, sampling: &RowSampling, token: u32) {
    const ROUNDING: f64 = 1e-4;
    let (scaled, order) = scaled(logits, known, sampling);
    let largest = scaled[order[0]];
    let weight = |token: usize| (scaled[token] - largest).exp();
    let rank = order.iter().position(|&other| other == token as usize).unwrap();
    let limit = if sampling.top_k == 0 { known } else { sampling.top_k.min(known) };
    assert!(rank < limit, "{token} is number {rank} of {limit}");
    let likely = |slack: f64| {
        let least = sampling.min_p * (1.0 + slack);
        order.iter().take_while(|&&other| weight(other) >= least || sampling.min_p == 0.0).count()
    };
    // The counts for both limits, with rounding in either direction. The likeliest token is always kept.
    let [fewest, most] = [likely(ROUNDING), likely(-ROUNDING)].map(|count| count.clamp(1, limit));
    assert!(rank < most, "{token} has {} of the likeliest one", weight(token as usize));
    let sums = |count: usize| order[..count].iter().map(|&other| weight(other)).sum::<f64>();
    let before: f64 = sums(rank);
    if sampling.top_p < 1.0 {
        let enough = sampling.top_p * sums(most) * (1.0 + ROUNDING) + ROUNDING;
        assert!(before <= enough, "{token} follows {before} of {enough}");
    }
    // Kept tokens with lower ids add up to at most `random`; with this token they add up to at least `random`.
    if sampling.top_p == 1.0 && fewest == most {
        let kept: std::collections::BTreeSet<usize> = order[..most].iter().copied().collect();
        let all = sums(most);
        let below: f64 = kept.range(..token as usize).map(|&other| weight(other)).sum();
        let with = below + weight(token as usize);
        let random = f64::from(sampling.random);
        let range = below / all - ROUNDING..=with / all + ROUNDING;
        assert!(range.contains(&random), "{token} has {range:?}, {random} was drawn");
    }
}

fn agrees<B: Backend, T: Element>(device: &B, vocabulary: usize, known: usize, seed: u64) {
    let mut random = Random(seed);
    let rows: Vec<RowSampling> = (0..12)
        .map(|row| {
            let changes = (0..row % 4)
                .map(|number| LogitChange {
                    token: (number * vocabulary / 4) as u32,
                    bias: [0.0, 2.0, -1.0][row % 3],
                    repetition: [1.0, 1.3][row % 2],
                    penalty: 0.25 * number as f32,
                })
                .collect();
            RowSampling {
                temperature: [0.7, 1.0, 2.5][row % 3],
                min_p: [0.0, 0.05][row / 6],
                top_k: [0, 3, 1000][row % 3],
                top_p: [1.0, 0.8][row / 3 % 2],
                random: (row * 2 + 1) as f32 / 24.0,
                changes,
            }
        })
        .collect();
    let logits: Vec<T> = random.elements::<T>(rows.len() * vocabulary);
    let requests: Vec<_> = rows.iter().cloned().map(sampled).collect();
    let found = sample(device, &logits, known, &requests);
    for ((row, found), logits) in rows.iter().zip(found).zip(logits.chunks(vocabulary)) {
        assert_possible(logits, known, row, found.unwrap().token);
    }
}

#[test]
fn tokens_are_those_of_the_distribution() {
    on_each_device!(device => agrees::<_, f32>(device, 1003, 1000, 1));
    on_each_device!(device => agrees::<_, bf16>(device, 2048, 2048, 2));
    on_each_device!(device => agrees::<_, f32>(device, 1, 1, 3));
}

/// Over a grid of random numbers every token is chosen as often as its probability implies.
#[test]
fn the_shares_of_tokens_are_their_probabilities() {
    let logits = [0.1f32, 0.2, 0.4, 0.2, 0.1].map(f32::ln);
    let count = |limit: &dyn Fn(f32) -> RowSampling| {
        let rows: Vec<_> =
            (0..1000).map(|number| sampled(limit((number as f32 + 0.5) / 1000.0))).collect();
        let logits = logits.repeat(rows.len());
        let mut of_devices = Vec::new();
        on_each_device!(device => {
            let mut counts = [0usize; 5];
            for choice in sample(device, &logits, 5, &rows) {
                counts[choice.unwrap().token as usize] += 1;
            }
            of_devices.push(counts);
        });
        of_devices
    };
    let all = |expected: [usize; 5], limit: &dyn Fn(f32) -> RowSampling| {
        for counts in count(limit) {
            let near =
                counts.iter().zip(expected).all(|(&found, expected)| found.abs_diff(expected) <= 1);
            assert!(near, "{counts:?} instead of {expected:?}");
        }
    };
    all([100, 200, 400, 200, 100], &plain);
    all([0, 250, 500, 250, 0], &|random| RowSampling { top_k: 3, ..plain(random) });
    // Among equal tokens the first are kept.
    all([0, 333, 667, 0, 0], &|random| RowSampling { top_k: 2, ..plain(random) });
    all([0, 333, 667, 0, 0], &|random| RowSampling { top_p: 0.5, ..plain(random) });
    all([0, 250, 500, 250, 0], &|random| RowSampling { min_p: 0.4, ..plain(random) });
    let bias = LogitChange { bias: 4f32.ln(), ..LogitChange::none(0) };
    all([308, 154, 308, 154, 77], &|random| RowSampling { changes: vec![bias], ..plain(random) });
}

#[test]
fn the_likeliest_token_is_the_first_of_equal_ones() {
    let greedy = RowSampling { temperature: 0.0, ..plain(0.9) };
    let penalised = LogitChange { penalty: 2.5, ..LogitChange::none(1) };
    let rows =
        [sampled(greedy.clone()), sampled(RowSampling { changes: vec![penalised], ..greedy })];
    let logits = [1.0f32, 3.0, 3.0, 9.0].repeat(2);
    on_each_device!(device => {
        let found = sample(device, &logits, 3, &rows);
        assert_eq!(found.into_iter().map(|choice| choice.unwrap().token).collect::<Vec<_>>(), [1, 2]);
    });
}

#[test]
fn log_probabilities_are_those_of_the_softmax() {
    fn check<B: Backend, T: Element>(device: &B, vocabulary: usize) {
        let logits: Vec<T> = Random(7).elements(3 * vocabulary);
        let given = [0, vocabulary / 2, vocabulary - 1].map(|token| token as u32);
        let row =
            |token, count| RowRequest { token: RowToken::Given(token), log_probabilities: count };
        let rows = [row(given[0], Some(5)), row(given[1], None), row(given[2], Some(0))];
        let found = sample(device, &logits, 1, &rows);
        for ((found, row), logits) in found.iter().zip(&rows).zip(logits.chunks(vocabulary)) {
            let found = found.as_ref().unwrap();
            let logits: Vec<f32> = logits.iter().map(|logit| logit.to_f32()).collect();
            let expected = (row.log_probabilities)
                .map(|count| LogProbabilities::new(&logits, found.token, count));
            assert_eq!(RowToken::Given(found.token), row.token);
            let (Some(found), Some(expected)) = (&found.log_probabilities, &expected) else {
                assert_eq!(found.log_probabilities, expected);
                continue;
            };
            assert!((found.of_token - expected.of_token).abs() < 1e-5);
            assert_eq!(found.most_likely.len(), expected.most_likely.len());
            for (found, expected) in found.most_likely.iter().zip(&expected.most_likely) {
                assert!(found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-5);
            }
        }
    }
    on_each_device!(device => check::<_, f32>(device, 700));
    on_each_device!(device => check::<_, bf16>(device, 257));
    on_each_device!(device => check::<_, f32>(device, 3));
    let logits = [1f32, 2.0, 4.0, 2.0, 1.0].map(f32::ln);
    let found = LogProbabilities::new(&logits, 0, 9);
    assert!((found.of_token - 0.1f64.ln()).abs() < 1e-6);
    assert_eq!(found.most_likely.iter().map(|most| most.0).collect::<Vec<_>>(), [2, 1, 3, 0, 4]);
}

#[test]
fn a_row_that_is_not_finite_has_no_token_and_others_have() {
    let logits = [1.0, f32::NAN, 2.0, 1.0, f32::NEG_INFINITY, 2.0, f32::INFINITY, 0.0, 0.0];
    for temperature in [0.0, 1.0] {
        let rows = vec![sampled(RowSampling { temperature, ..plain(0.99) }); 3];
        on_each_device!(device => {
            let found = sample(device, &logits, 3, &rows);
            assert!(found[0].is_none() && found[2].is_none());
            assert_eq!(found[1].as_ref().unwrap().token, 2);
        });
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let row = |token| RowRequest { token: RowToken::Given(token), log_probabilities: None };
    let sample = |known, rows: &[RowRequest]| {
        let logits = &[1f32, 2.0][..];
        Cpu.sample(SampleArgs { vocabulary: 2, known, logits, rows }).map_err(|it| it.to_string())
    };
    assert_eq!(sample(2, &[row(2)]).unwrap_err(), "token id 2 is outside the vocabulary of 2");
    assert!(sample(0, &[row(1)]).unwrap_err().contains("0 of 2 tokens"));
    assert!(sample(2, &[row(1), row(1)]).unwrap_err().contains("logits holds 2 elements"));
}

proptest::proptest! {
    #![proptest_config(cases(24))]
    #[test]
    fn any_shape_agrees(vocabulary in 1usize..600, padding in 0usize..4, seed: u64) {
        let known = vocabulary.saturating_sub(padding).max(1);
        on_each_device!(device, T => agrees::<_, T>(device, vocabulary, known, seed));
    }
}
