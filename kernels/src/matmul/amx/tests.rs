//! The model on every machine; the assembly against it, bit for bit, where there is AVX-512: executed
//! by the tile unit, or instruction by instruction by the model.

use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::Config;

use super::instructions::Instructions;
use super::model::Model;
use super::operand::TILE;
use super::*;
use crate::matmul::avx512;
use crate::matmul::blocked;
use crate::matmul::matrix::{Destination, MatrixMut};
use crate::matmul::tests::{Case, agrees_by, elements, view};

/// Whether the assembly can be executed; says how.
pub(crate) fn assembly_runs() -> bool {
    if available() {
        println!("the assembly is executed by the tile unit");
        return true;
    }
    let runs = avx512::available() && traps::are_handled();
    let how =
        if runs { "instruction by instruction by the model" } else { "not at all: no AVX-512" };
    println!("this machine has no tile unit: the assembly is executed {how}");
    runs
}

fn agrees_on<U: Unit, O: Element, A: Element, B: Element>(case: Case, threads: usize) {
    agrees_by::<O, A, B>(case, "amx", |out, destination, scale, left, right| {
        blocked::multiply::<OnUnit<U>, _, _, _>(out, destination, scale, left, right, threads);
    });
}

/// All combinations of types on the model.
fn agrees(case: Case, threads: usize) {
    agrees_on::<Model, f32, bf16, bf16>(case, threads);
    agrees_on::<Model, bf16, bf16, bf16>(case, threads);
    agrees_on::<Model, f32, f32, bf16>(case, threads);
    agrees_on::<Model, bf16, bf16, f32>(case, threads);
}

/// The bits of a matmul.
fn bits<U: Unit, O: Element>(
    [m, n, k]: [usize; 3],
    transposed: [bool; 2],
    threads: usize,
) -> Vec<u32> {
    let (left, right) = (elements::<bf16>(m * k, 1), elements::<bf16>(k * n, 2));
    let mut out = elements::<O>(m * n, 3);
    blocked::multiply::<OnUnit<U>, _, _, _>(
        MatrixMut::new(&mut out, m, n),
        Destination::Accumulate,
        0.5,
        view(&left, m, k, 0, transposed[0]),
        view(&right, k, n, 0, transposed[1]),
        threads,
    );
    out.into_iter().map(|element| element.to_f32().to_bits()).collect()
}

const LAYOUTS: [[bool; 2]; 4] = [[false, true], [false, false], [true, false], [true, true]];

#[test]
fn blocks_and_their_edges_agree() {
    for [left_transposed, right_transposed] in LAYOUTS {
        for (destination, shape, threads) in [
            (0, [32, 32, 32], 1),
            (1, [205, 100, 301], 2),
            (2, [33, 17, 650], 1),
            (1, [5, 47, 2101], 3),
            (0, [70, 3, 4130], 2),
            (2, [1, 1, 1], 1),
            (1, [600, 40, 33], 2),
        ] {
            let (gap, scale, seed) = (0, 1.0, 1);
            let case =
                Case { shape, left_transposed, right_transposed, destination, gap, scale, seed };
            agrees(case, threads);
        }
    }
}

#[test]
fn neither_threads_nor_rows_change_a_bit() {
    for shape in [[300, 70, 100], [65, 40, 2100]] {
        for transposed in LAYOUTS {
            let [one, two, five] =
                [1, 2, 5].map(|threads| bits::<Model, bf16>(shape, transposed, threads));
            assert!(one == two && one == five, "{shape:?}");
        }
    }
}

#[test]
fn the_assembly_has_the_bits_of_the_model() {
    if !assembly_runs() {
        return;
    }
    for transposed in LAYOUTS {
        for shape in
            [[64, 64, 64], [37, 20, 301], [1, 33, 1], [70, 100, 31], [33, 50, 0], [40, 40, 2100]]
        {
            for threads in [1, 2] {
                let expected = bits::<Model, f32>(shape, transposed, threads);
                let found = bits::<Instructions, f32>(shape, transposed, threads);
                assert!(found == expected, "{shape:?} {transposed:?} on {threads} threads");
                let expected = bits::<Model, bf16>(shape, transposed, threads);
                let found = bits::<Instructions, bf16>(shape, transposed, threads);
                assert!(found == expected, "{shape:?} {transposed:?} on {threads} threads, bf16");
            }
        }
    }
}

#[test]
fn every_bit_pattern_has_the_bits_of_the_model() {
    if !assembly_runs() {
        return;
    }
    // Denormal, huge, infinite and missing numbers among ordinary ones.
    let mut state = 7u32;
    let mut pattern = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    };
    let operands: [Vec<u32>; 2] =
        std::array::from_fn(|_| (0..2 * TILE).map(|_| pattern()).collect());
    let mut sums = [vec![0f32; unit::SUMS], vec![0f32; unit::SUMS]];
    Model.multiply(&operands[0], &operands[1], SIDE, false, &mut sums[0]);
    Instructions::configured().multiply(&operands[0], &operands[1], SIDE, false, &mut sums[1]);
    for (model, assembly) in sums[0].iter().zip(&sums[1]) {
        let same = model.to_bits() == assembly.to_bits() || model.is_nan() && assembly.is_nan();
        assert!(same, "{model} {assembly}");
    }
}

#[test]
fn a_step_sums_even_and_odd_terms_apart() {
    // In order, the last term would vanish beside the first; the odd terms' sum keeps it.
    let (mut left, mut right) = ([0; TILE], [0; TILE]);
    let bits = |even: f32, odd: f32| {
        let [even, odd] = [even, odd].map(|x| u32::from(bf16::from_f32(x).to_bits()));
        odd << 16 | even
    };
    (left[0], right[0]) = (bits(16_777_216.0, 1.0), bits(1.0, 1.0));
    (left[1], right[ROWS_OF_A_TILE]) = (bits(0.0, 1.0), bits(0.0, 1.0));
    let mut sums = [0; TILE];
    model::multiply_tiles(&mut sums, &left, &right);
    assert_eq!(f32::from_bits(sums[0]), 16_777_218.0);
}

const ROWS_OF_A_TILE: usize = operand::ROWS;

proptest! {
    #![proptest_config(Config { cases: 48, failure_persistence: None, ..Config::default() })]

    #[test]
    fn any_matmul_agrees(
        (m, n, k) in (1usize..80, 1usize..110, 0usize..90),
        left_transposed: bool,
        right_transposed: bool,
        destination in 0u8..3,
        gap in 0usize..3,
        scale in prop::sample::select(vec![1.0f32, 0.3, -2.0]),
        seed in 0u32..1_000_000,
        threads in 1usize..4,
    ) {
        let shape = [m, n, k];
        let case = Case { shape, left_transposed, right_transposed, destination, gap, scale, seed };
        agrees(case, threads);
    }
}
