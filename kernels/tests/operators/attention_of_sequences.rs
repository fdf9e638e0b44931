//! Attention of sequences of different lengths against its reference. No sequence depends on the
//! other sequences, nor on the division of its prompt.

use crate::reference::operators::{self, SCORE_FACTOR};
use crate::reference::{
    F32_TOLERANCE, Random, assert_close, cases, columns, download, flat, garbage, place, tensor,
    tolerance, upload,
};
use half::bf16;
use moh_kernels::attention::{Attention, Selection, SequenceAttention, Span};
use moh_kernels::{Backend, Cpu, Element, QkvShape};
use proptest::prelude::*;

/// New tokens of a sequence after its first `position` tokens.
#[derive(Debug, Clone, Copy)]
struct New {
    position: usize,
    tokens: usize,
    is_prompt: bool,
}

/// Heads, shared heads, and the blocks of the pool.
#[derive(Debug, Clone, Copy)]
struct Setting {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    shared_heads: usize,
    block_length: usize,
    weighted: bool,
}

impl Setting {
    fn shape(&self, tokens: usize) -> QkvShape {
        let Setting { heads, kv_heads, head_dim, .. } = *self;
        QkvShape { batch: 1, length: tokens, heads, kv_heads, head_dim }
    }
}

/// A sequence: queries, selection and weights of all tokens, and its keys and values.
struct Sequence<T> {
    qkv: Vec<T>,
    routed: Vec<u8>,
    weights: Vec<f32>,
    keys: Vec<T>,
    values: Vec<T>,
}

impl<T: Element> Sequence<T> {
    fn new(setting: &Setting, length: usize, seed: u64) -> Self {
        let (mut random, width) = (Random(seed), setting.kv_heads * setting.head_dim);
        let routed = setting.heads - setting.shared_heads;
        Sequence {
            qkv: random.elements(length * setting.shape(1).row()),
            routed: (0..length * routed).map(|_| u8::from(random.below(2) == 0)).collect(),
            weights: random.elements(length * setting.heads),
            keys: random.elements(length * width),
            values: random.elements(length * width),
        }
    }
}

/// Outputs and logarithms of sums.
type Results<T> = (Vec<T>, Vec<f32>);

/// Computes the attention of new tokens of some sequences in one pass; returns the results of each sequence.
fn run<B: Backend, T: Element>(
    device: &B,
    setting: &Setting,
    sequences: &[(&Sequence<T>, New)],
    seed: u64,
) -> Vec<Results<T>> {
    let &Setting { heads, head_dim, kv_heads, shared_heads, block_length, weighted } = setting;
    let width = kv_heads * head_dim;
    let blocks = |new: &New| (new.position + new.tokens).div_ceil(block_length);
    let count: usize = sequences.iter().map(|(_, new)| blocks(new)).sum();
    // Blocks in a shuffled order, with one block that belongs to no sequence.
    let table: Vec<u32> = Random(seed).permutation(count + 1)[1..].to_vec();
    let mut pool =
        [(); 2].map(|()| vec![T::from_f32(f32::NAN); (count + 1) * block_length * width]);
    let (mut spans, mut tokens, mut first_block) = (Vec::new(), 0, 0);
    let (mut qkv, mut routed, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, new) in sequences {
        let end = new.position + new.tokens;
        for (pool, rows) in pool.iter_mut().zip([&sequence.keys, &sequence.values]) {
            for (position, row) in rows.chunks_exact(width).enumerate().take(end) {
                let block = table[first_block + position / block_length] as usize;
                let at = block * block_length + position % block_length;
                place(pool, row, at, block_length, head_dim);
            }
        }
        let part = |width: usize| new.position * width..end * width;
        qkv.extend_from_slice(&sequence.qkv[part(setting.shape(1).row())]);
        routed.extend_from_slice(&sequence.routed[part(heads - shared_heads)]);
        weights.extend_from_slice(&sequence.weights[part(heads)]);
        let rows = tokens..tokens + new.tokens;
        let (position, is_prompt) = (new.position, new.is_prompt);
        spans.push(Span { rows, position, first_block, is_prompt });
        (tokens, first_block) = (tokens + new.tokens, first_block + blocks(new));
    }
    let [keys, values] = pool.map(|elements| upload(device, &elements));
    let (qkv, table) = (upload(device, &qkv), upload(device, &table));
    let generated = upload(device, &Span::generated(&spans));
    let (routed, weights) = (upload(device, &routed), upload(device, &weights));
    let mut out = garbage::<B, T>(device, tokens * heads * head_dim);
    let mut log_sum_exp = garbage::<B, f32>(device, tokens * heads);
    let args = SequenceAttention {
        shape: &setting.shape(tokens),
        sequences: &spans,
        selection: Some(Selection {
            shared_heads,
            routed: B::whole(&routed),
            weights: weighted.then(|| B::whole(&weights)),
        }),
        score_factor: SCORE_FACTOR,
        qkv: B::whole(&qkv),
        keys: B::whole(&keys),
        values: B::whole(&values),
        block_table: B::whole(&table),
        generated: B::whole(&generated),
        block_length,
        out: B::whole_mut(&mut out),
        log_sum_exp: B::whole_mut(&mut log_sum_exp),
    };
    device.attention_of_sequences(args).unwrap();
    let (out, sums) = (download::<B, T>(device, &out), download::<B, f32>(device, &log_sum_exp));
    let of = |span: &Span| {
        let part = |width: usize| span.rows.start * width..span.rows.end * width;
        (out[part(heads * head_dim)].to_vec(), sums[part(heads)].to_vec())
    };
    spans.iter().map(of).collect()
}

fn agrees<B: Backend, T: Element>(device: &B, setting: &Setting, all: &[New], seed: u64) {
    let sequences: Vec<Sequence<T>> = (0..)
        .zip(all)
        .map(|(at, new)| Sequence::new(setting, new.position + new.tokens, seed + at))
        .collect();
    let given: Vec<_> = sequences.iter().zip(all.iter().copied()).collect();
    let found = run(device, setting, &given, seed);
    let &Setting { heads, kv_heads, head_dim, shared_heads, weighted, .. } = setting;
    for ((sequence, new), (out, log_sum_exp)) in given.iter().zip(found) {
        let New { position, tokens, .. } = *new;
        let (end, row) = (position + tokens, setting.shape(1).row());
        let queries = columns(&sequence.qkv[position * row..], row, 0..heads * head_dim);
        let q = tensor(&queries, (1, tokens, heads, head_dim));
        let [k, v] = [&sequence.keys, &sequence.values]
            .map(|rows| tensor(rows, (1, end, kv_heads, head_dim)));
        let seen = operators::visibility((1, tokens, end), true, position, None).unwrap();
        let (expected, sums) = operators::attention(&q, &k, &v, &seen).unwrap();
        let (mut expected, mut sums) = (flat(&expected), flat(&sums));
        for pair in 0..tokens * heads {
            let (token, head) = (position + pair / heads, pair % heads);
            let routed = head.checked_sub(shared_heads);
            let at = |routed| token * (heads - shared_heads) + routed;
            let is_active = routed.is_none_or(|routed| sequence.routed[at(routed)] != 0);
            let weight = if weighted { sequence.weights[token * heads + head].into() } else { 1.0 };
            let factor = if is_active { weight } else { 0.0 };
            sums[pair] *= f64::from(u8::from(is_active));
            expected[pair * head_dim..][..head_dim].iter_mut().for_each(|x| *x *= factor);
        }
        assert_close("out", &out, &expected, tolerance::<T>());
        assert_close("log_sum_exp", &log_sum_exp, &sums, F32_TOLERANCE);
    }
}

const SETTING: Setting = Setting {
    heads: 6,
    kv_heads: 3,
    head_dim: 16,
    shared_heads: 2,
    block_length: 16,
    weighted: false,
};

fn prompt(position: usize, tokens: usize) -> New {
    New { position, tokens, is_prompt: true }
}

fn generated(position: usize) -> New {
    New { position, tokens: 1, is_prompt: false }
}

#[test]
fn prompts_and_generated_tokens_of_a_pass_agree() {
    let all = [prompt(0, 70), generated(40), prompt(33, 5), generated(0), prompt(16, 1)];
    for weighted in [false, true] {
        let setting = Setting { weighted, ..SETTING };
        on_each_device!(device, T => agrees::<_, T>(device, &setting, &all, 1));
    }
}

/// Long sequences, which a GPU divides, and groups with more heads than a GPU computes together.
#[test]
fn long_sequences_agree() {
    let positions = [1500, 511, 512, 1023, 0].map(generated);
    let all = [&positions[..], &[prompt(3, 2)]].concat();
    for (heads, kv_heads, head_dim, shared_heads) in
        [(10, 2, 20, 3), (3, 3, 80, 1), (4, 1, 128, 0), (2, 2, 200, 2)]
    {
        let setting = Setting { heads, kv_heads, head_dim, shared_heads, ..SETTING };
        on_each_device!(device, T => agrees::<_, T>(device, &setting, &all, 3));
    }
}

/// The results of a generated token have the same bits alone and among other tokens.
#[test]
fn a_generated_token_does_not_depend_on_its_neighbours() {
    let sequences: Vec<Sequence<f32>> =
        (0..3).map(|seed| Sequence::new(&SETTING, 2000, seed)).collect();
    let among: Vec<_> = sequences.iter().zip([1999, 700, 20].map(generated)).collect();
    on_each_device!(device => {
        for (together, one) in run(device, &SETTING, &among, 1).iter().zip(&among) {
            assert!(run(device, &SETTING, &[*one], 2)[0] == *together, "{:?}", one.1);
        }
    });
}

/// Checks that on a CPU a token's results have the same bits for any other tokens in the pass, and for any division of
/// the prompt.
fn is_independent<T: Element>(setting: &Setting) {
    const LENGTH: usize = 150;
    let sequence = Sequence::<T>::new(setting, LENGTH, 1);
    let others: Vec<Sequence<T>> = (2..5).map(|seed| Sequence::new(setting, 90, seed)).collect();
    let whole = run(&Cpu, setting, &[(&sequence, prompt(0, LENGTH))], 1).remove(0);
    let width = setting.heads * setting.head_dim;
    for ends in [vec![64, 65, 150], vec![1, 33, 100, 101, 149, 150], (1..=LENGTH).collect()] {
        let mut start = 0;
        for (at, end) in ends.into_iter().enumerate() {
            let new = prompt(start, end - start);
            let neighbours = [prompt(at % 30, 1 + at % 40), generated(at % 80), prompt(0, 80)];
            let mut given: Vec<_> = others.iter().zip(neighbours).collect();
            given.insert(at % 4, (&sequence, new));
            let (out, sums) = run(&Cpu, setting, &given, at as u64).remove(at % 4);
            let same =
                |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(out == whole.0[start * width..end * width], "outputs {start}..{end}");
            let expected = &whole.1[start * setting.heads..end * setting.heads];
            assert!(same(&sums, expected), "sums {start}..{end}");
            start = end;
        }
    }
    let alone = run(&Cpu, setting, &[(&sequence, generated(LENGTH - 1))], 1).remove(0);
    let among = [(&others[0], prompt(0, 50)), (&sequence, generated(LENGTH - 1))];
    assert!(run(&Cpu, setting, &among, 7).remove(1) == alone);
}

#[test]
fn a_sequence_depends_neither_on_its_neighbours_nor_on_the_division_of_its_prompt() {
    for setting in [SETTING, Setting { head_dim: 64, weighted: true, ..SETTING }] {
        is_independent::<f32>(&setting);
        is_independent::<bf16>(&setting);
    }
}

#[test]
fn sequences_that_do_not_fit_are_refused() {
    let shape = SETTING.shape(2);
    let (qkv, keys) = (vec![0f32; 2 * shape.row()], vec![0f32; 2 * 16 * 48]);
    let refused = |sequences: &[Span], block_table: &[u32]| {
        let (mut out, mut sums) = (vec![0f32; 2 * 96], vec![0f32; 12]);
        let args = SequenceAttention::<Cpu, f32> {
            shape: &shape,
            sequences,
            selection: None,
            score_factor: 1.0,
            qkv: &qkv,
            keys: &keys,
            values: &keys,
            block_table,
            generated: &Span::generated(sequences),
            block_length: 16,
            out: &mut out,
            log_sum_exp: &mut sums,
        };
        Cpu.attention_of_sequences(args).unwrap_err().to_string()
    };
    let span = |rows, position, is_prompt| Span { rows, position, first_block: 0, is_prompt };
    for (sequences, table, expected) in [
        (vec![span(0..1, 0, true)], &[0][..], "sequences of 1 tokens, expected 2"),
        (vec![span(1..2, 0, true)], &[0], "rows 1..2 of a sequence after those up to 0"),
        (vec![span(0..2, 0, false)], &[0], "2 generated tokens of a sequence: one at a time"),
        (vec![span(0..2, 15, true)], &[0], "blocks 0..2 of a table of 1"),
        (vec![span(0..2, 0, true)], &[2], "1536 keys and 1536 values, expected 2304"),
    ] {
        let message = refused(&sequences, table);
        assert!(message.contains(expected), "{message}");
    }
}

fn sequences() -> impl Strategy<Value = Vec<New>> {
    let new = (0usize..70, 1usize..40, any::<bool>()).prop_map(|(position, tokens, is_prompt)| {
        if is_prompt { prompt(position, tokens) } else { generated(position) }
    });
    prop::collection::vec(new, 1..5)
}

fn settings() -> impl Strategy<Value = Setting> {
    let sizes = (1usize..4, 1usize..4, 1usize..20, 1usize..20);
    (sizes, any::<prop::sample::Index>(), any::<bool>()).prop_map(
        |((kv_heads, group, half, block_length), shared, weighted)| {
            let heads = kv_heads * group;
            let shared_heads = shared.index(heads + 1);
            let head_dim = 2 * half;
            Setting { heads, kv_heads, head_dim, shared_heads, block_length, weighted }
        },
    )
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn any_sequences_agree(setting in settings(), all in sequences(), seed in 0u64..1_000_000) {
        on_each_device!(device => agrees::<_, f32>(device, &setting, &all, seed));
    }
}
