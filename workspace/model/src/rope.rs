//! The angles of rotary position embedding, computed in f64 and stored in f32.

use std::f64::consts::TAU;

use crate::{Llama3Scaling, RopeConfig};

/// Frequencies of the `head_dim / 2` pairs, in radians per position.
pub fn frequencies(rope: &RopeConfig, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2)
        .map(|pair| {
            let frequency = rope.theta.powf(-(2.0 * pair as f64) / head_dim as f64);
            rope.scaling.map_or(frequency, |scaling| scaled(frequency, &scaling))
        })
        .collect()
}

/// Llama 3.1's scaling: long wavelengths are multiplied by `factor`, short ones are unchanged, and
/// those in between are interpolated.
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
        (1.0 - share) * frequency / scaling.factor + share * frequency
    }
}

/// Cosines and sines of positions 0 and up, `[positions, head_dim / 2]` each.
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

    #[test]
    fn the_first_pair_turns_by_one_radian_a_position() {
        let rope = RopeConfig { theta: 10_000.0, scaling: None };
        let (cos, sin) = table(&rope, 4, 3);
        assert_eq!(cos.len(), 6);
        assert_eq!((cos[4], sin[2]), (2f64.cos() as f32, 1f64.sin() as f32));
        assert!((f64::from(sin[3]) - 0.01f64.sin()).abs() < 1e-9);
    }
}
