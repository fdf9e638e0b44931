//! The angles of rotary position embedding, computed in f64 and stored in f32.

use std::f64::consts::TAU;

use crate::{Llama3Scaling, RopeConfig, RopeScaling, YarnScaling};

/// Returns the frequencies of the `head_dim / 2` pairs, in radians per position.
pub fn frequencies(rope: &RopeConfig, head_dim: usize) -> Vec<f64> {
    let frequency = |pair: usize| rope.theta.powf(-(2.0 * pair as f64) / head_dim as f64);
    let frequencies = (0..head_dim / 2).map(frequency);
    match rope.scaling {
        None => frequencies.collect(),
        Some(RopeScaling::Linear { factor }) => frequencies.map(|f| f / factor).collect(),
        Some(RopeScaling::Llama3(scaling)) => frequencies.map(|f| scaled(f, &scaling)).collect(),
        Some(RopeScaling::Yarn(yarn)) => {
            let [low, high] = interpolated_pairs(&yarn, rope.theta, head_dim);
            let share = |pair: usize| ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let pairs = frequencies.enumerate();
            pairs.map(|(pair, f)| blended(f, yarn.factor, 1.0 - share(pair))).collect()
        }
    }
}

/// Returns the two pairs, as fractions, between which YaRN interpolates (section 3.2 of the paper, by turns within the
/// original length). YaRN keeps the frequencies of pairs below the first, and divides the frequencies above the second.
fn interpolated_pairs(yarn: &YarnScaling, theta: f64, head_dim: usize) -> [f64; 2] {
    let original = yarn.original_max_position_embeddings as f64;
    let pair = |turns: f64| head_dim as f64 * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
    // As transformers does where both pairs are the same.
    [low, if low == high { high + 0.001 } else { high }]
}

/// Returns `share` of a frequency, plus the rest of the frequency divided by `factor`.
fn blended(frequency: f64, factor: f64, share: f64) -> f64 {
    (1.0 - share) * frequency / factor + share * frequency
}

/// Returns a frequency with Llama 3.1's scaling: long wavelengths are multiplied by `factor`, short wavelengths are
/// unchanged, and wavelengths in between are interpolated.
fn scaled(frequency: f64, scaling: &Llama3Scaling) -> f64 {
    let original = scaling.original_max_position_embeddings as f64;
    let turns = original * frequency / TAU;
    if turns > scaling.high_freq_factor {
        frequency
    } else if turns < scaling.low_freq_factor {
        frequency / scaling.factor
    } else {
        let share = (turns - scaling.low_freq_factor)
            / (scaling.high_freq_factor - scaling.low_freq_factor);
        blended(frequency, scaling.factor, share)
    }
}

/// Returns the cosines and sines of positions 0 and up, `[positions, head_dim / 2]` each.
pub fn table(rope: &RopeConfig, head_dim: usize, positions: usize) -> (Vec<f32>, Vec<f32>) {
    let frequencies = frequencies(rope, head_dim);
    let angles =
        || (0..positions).flat_map(|position| frequencies.iter().map(move |f| f * position as f64));
    (angles().map(|a| a.cos() as f32).collect(), angles().map(|a| a.sin() as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_keeps_short_stretches_long_and_blends_between() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let short = TAU / 100.0;
        let long = TAU / 10_000.0;
        let between = TAU / 4096.0; // 2 turns: a third of the way from 1 to 4
        assert_eq!(scaled(short, &scaling), short);
        assert_eq!(scaled(long, &scaling), long / 8.0);
        let expected = between * (2.0 / 3.0 / 8.0 + 1.0 / 3.0);
        assert!((scaled(between, &scaling) - expected).abs() < 1e-18);
    }

    /// transformers 5.24.0, `_compute_yarn_parameters` with head_dim 16, in f32.
    #[test]
    fn yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between() {
        let yarn = YarnScaling {
            factor: 4.0,
            original_max_position_embeddings: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.25,
            truncate: true,
        };
        let of = |yarn| {
            let rope = RopeConfig { theta: 1e4, scaling: Some(RopeScaling::Yarn(yarn)) };
            (frequencies(&rope, 16), rope.score_factor())
        };
        assert_eq!(of(yarn).1, 1.5625);
        let ends = |between: [f64; 3]| {
            [[1.0, 0.3162278, 0.1], between, [0.00025, 7.905695e-05, 0.0]].concat()
        };
        for (truncate, between) in [
            (true, [0.02569351, 0.00625, 0.001383497]),
            (false, [0.02861361, 0.006556971, 0.001285632]),
        ] {
            let found = of(YarnScaling { truncate, ..yarn }).0;
            let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-6 * b;
            assert!(found.iter().zip(&ends(between)).all(close), "{found:?}");
        }
    }

    #[test]
    fn the_first_pair_turns_by_one_radian_a_position() {
        let rope = RopeConfig { theta: 10_000.0, scaling: None };
        let (cos, sin) = table(&rope, 4, 3);
        assert_eq!(cos.len(), 6);
        assert_eq!((cos[4], sin[2]), (2f64.cos() as f32, 1f64.sin() as f32));
        assert!((f64::from(sin[3]) - 0.01f64.sin()).abs() < 1e-9);
    }
}
