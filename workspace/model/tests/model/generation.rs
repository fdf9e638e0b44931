//! Generation of several sequences. The logits equal the logits of whole passes. A sequence does not depend on the
//! other sequences, on the division of its prompt, or on a prompt that shares its blocks.

use half::bf16;
#[cfg(feature = "cuda-emulator")]
use moh_kernels::Cuda;
use moh_kernels::{Backend, Cpu, Element, ElementType};
use moh_model::{
    Architecture, BatchGenerator, BatchOptions, Chunk, Generator, Model, ModelConfig, MohConfig,
    PassHeads, RouterKind, SequenceId,
};
use moh_testkit::models::{VOCABULARY, config, model, moh};

/// Returns a dense model, and a model with each router, of both architectures.
fn configs() -> Vec<ModelConfig> {
    let routers = [
        None,
        Some(moh(RouterKind::QueryNorm, &[3], &[2])),
        Some(moh(RouterKind::Group, &[0], &[4])),
        Some(moh(RouterKind::Static, &[5], &[0])),
        Some(moh(RouterKind::Linear, &[3], &[2])),
        Some(moh(RouterKind::OneStage, &[3], &[2])),
        Some(moh(RouterKind::TwoStage, &[3], &[2])),
    ];
    let of = |moh: Option<MohConfig>| {
        Architecture::ALL.map(|architecture| {
            let tied = architecture == Architecture::Llama;
            ModelConfig { architecture, ..config(10, tied, moh.clone()) }
        })
    };
    routers.into_iter().flat_map(of).collect()
}

fn prompt(length: usize, seed: u32) -> Vec<u32> {
    (0..length as u32).map(|i| (i * 37 + i * i * seed + seed) % VOCABULARY).collect()
}

fn options(pass_tokens: usize, blocks: usize) -> BatchOptions {
    BatchOptions { pass_tokens, blocks, block_length: 8, pack_weights: true, independent: true }
}

fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// A generated sequence: its logits after the prompt and after each token.
struct Run {
    id: SequenceId,
    logits: Vec<Vec<f32>>,
}

/// Computes sequences together until each has `count` logits. A pass has parts of at most `part` tokens of prompts, and
/// a token of each sequence with a complete prompt.
fn generate<B: Backend>(
    generator: &mut BatchGenerator<'_, B>,
    prompts: &[Vec<u32>],
    count: usize,
    part: usize,
    share: usize,
) -> Vec<Vec<Vec<f32>>> {
    let add = |prompt: &Vec<u32>| Run { id: generator.add(prompt, share).unwrap(), logits: vec![] };
    let mut runs: Vec<Run> = prompts.iter().map(add).collect();
    while runs.iter().any(|run| run.logits.len() < count) {
        let mut chunks = Vec::new();
        for run in runs.iter().filter(|run| run.logits.len() < count) {
            let waiting = generator.waiting(run.id).unwrap();
            let tokens = waiting.min(part);
            let logits = usize::from(tokens == waiting);
            chunks.push(Chunk { sequence: run.id, tokens, logits });
        }
        for (chunk, logits) in chunks.iter().zip(generator.pass(&chunks).unwrap()) {
            if !logits.is_empty() {
                let run = runs.iter_mut().find(|run| run.id == chunk.sequence).unwrap();
                generator.push(run.id, best(&logits)).unwrap();
                run.logits.push(logits);
            }
        }
    }
    for run in &runs {
        generator.remove(run.id);
    }
    runs.into_iter().map(|run| run.logits).collect()
}

/// Returns the logits after the prompt and `count - 1` likeliest tokens, by whole passes.
fn by_whole_passes<B: Backend>(
    model: &mut Model<B>,
    prompt: &[u32],
    count: usize,
) -> Vec<Vec<f32>> {
    let (mut ids, mut found) = (prompt.to_vec(), Vec::new());
    for _ in 0..count {
        let output = model.run(std::slice::from_ref(&ids)).unwrap();
        let last = output.logits.len() - VOCABULARY as usize;
        let logits = output.logits[last..].to_vec();
        ids.push(best(&logits));
        found.push(logits);
    }
    found
}

fn are_those_of_whole_passes<B: Backend + Clone, T: Element>(backend: B, tolerance: f32) {
    for config in configs() {
        let mut model = model(backend.clone(), T::ELEMENT, config.clone());
        let prompts = [prompt(19, 3), prompt(1, 5), prompt(33, 7)];
        let found = {
            let mut generator = BatchGenerator::new(&model, options(40, 32)).unwrap();
            generate(&mut generator, &prompts, 5, 12, 0)
        };
        for (prompt, found) in prompts.iter().zip(found) {
            let expected = by_whole_passes(&mut model, prompt, 5);
            for (found, expected) in found.iter().zip(&expected) {
                let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
                let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
                let error = error.fold(0f32, f32::max) / largest;
                assert!(error < tolerance, "{:?}: off by {error}", config.moh);
                if tolerance < 1e-3 {
                    assert_eq!(best(found), best(expected), "{:?}", config.moh);
                }
            }
        }
    }
}

#[test]
fn logits_are_those_of_whole_passes() {
    are_those_of_whole_passes::<_, f32>(Cpu, 1e-5);
}

#[cfg(feature = "cuda-emulator")]
#[test]
fn logits_on_an_emulated_gpu_are_those_of_whole_passes() {
    are_those_of_whole_passes::<_, f32>(Cuda::emulated(), 1e-5);
}

/// Checks that each sequence alone, with its prompt in one pass, has the same bits as all sequences together in several
/// ways.
fn is_independent<T: Element>(config: ModelConfig) {
    let model = model(Cpu, T::ELEMENT, config);
    let prompts = [prompt(25, 3), prompt(2, 5), prompt(40, 7), prompt(17, 11)];
    let alone: Vec<_> = (prompts.iter())
        .map(|prompt| {
            let mut generator = BatchGenerator::new(&model, options(64, 8)).unwrap();
            generate(&mut generator, std::slice::from_ref(prompt), 6, 64, 0).remove(0)
        })
        .collect();
    for pack_weights in [false, true] {
        // Without packed weights the bits differ, but are independent too.
        let options = |tokens, blocks| BatchOptions { pack_weights, ..options(tokens, blocks) };
        let mut generator = BatchGenerator::new(&model, options(160, 32)).unwrap();
        let expected = match pack_weights {
            true => alone.clone(),
            false => generate(&mut generator, &prompts, 6, 64, 0),
        };
        for part in [1, 3, 7, 8, 30] {
            let mut generator = BatchGenerator::new(&model, options(160, 32)).unwrap();
            let found = generate(&mut generator, &prompts, 6, part, 0);
            assert!(found == expected, "in parts of {part}");
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_among_others() {
    for config in configs() {
        is_independent::<f32>(config.clone());
        is_independent::<bf16>(config);
    }
}

#[test]
fn prompts_that_begin_alike_share_their_blocks() {
    let model = model(
        Cpu,
        ElementType::F32,
        config(10, false, Some(moh(RouterKind::TwoStage, &[3], &[2]))),
    );
    let common = prompt(27, 3);
    let with = |tail: &[u32]| [&common, tail].concat();
    let prompts = [with(&[1, 2, 3]), with(&[4]), with(&[1, 2, 3]), common[..20].to_vec()];
    let mut generator = BatchGenerator::new(&model, options(64, 14)).unwrap();
    let of = |generator: &mut BatchGenerator<'_, Cpu>, prompt: &Vec<u32>, share| {
        generate(generator, std::slice::from_ref(prompt), 4, 64, share).remove(0)
    };
    let expected: Vec<_> = prompts.iter().map(|prompt| of(&mut generator, prompt, 0)).collect();
    assert_eq!(generator.free_blocks(), 14);
    for _ in 0..2 {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            assert!(of(&mut generator, prompt, usize::MAX) == *expected);
        }
    }
    // The first 24 of 30 tokens belong to an earlier prompt: three blocks.
    let id = generator.add(&prompts[0], usize::MAX).unwrap();
    assert_eq!(generator.waiting(id).unwrap(), 6);
    assert_eq!((generator.needed_blocks(id, 6).unwrap(), generator.free_blocks()), (1, 11));
    // 23 tokens may be shared: two whole blocks.
    let limited = generator.add(&prompts[0], 23).unwrap();
    assert_eq!(generator.waiting(limited).unwrap(), 14);
    generator.remove(limited);
    // At most one of its two sequences has written to a shared block: each sequence has its own last block.
    let both = generate(&mut generator, &prompts[..2], 4, 64, usize::MAX);
    assert!(both[..] == expected[..2]);
    generator.remove(id);
    assert_eq!(generator.free_blocks(), 14);
}

#[test]
fn a_single_sequence_takes_tokens_in_any_parts() {
    let model = model(
        Cpu,
        ElementType::F32,
        config(10, true, Some(moh(RouterKind::QueryNorm, &[3], &[2]))),
    );
    let ids = prompt(50, 3);
    let expected = Generator::new(&model, 64).unwrap().extend(&ids).unwrap();
    let mut parts = Generator::with_options(&model, 64, options(7, 8)).unwrap();
    parts.extend(&ids[..20]).unwrap();
    assert!(parts.extend(&ids[20..]).unwrap() == expected);
    assert_eq!(parts.position(), 50);
    let next = parts.extend(&[best(&expected)]).unwrap();
    assert_eq!(next.len(), VOCABULARY as usize);
    for (ids, length) in [(&[0; 14][..], 65), (&[], 51)] {
        let error = parts.extend(ids).unwrap_err();
        let expected =
            format!("a sequence of {length} tokens is too short or too long: use 1 to 64");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn what_a_pass_cannot_compute_is_refused_and_changes_nothing() {
    let model = model(Cpu, ElementType::F32, config(10, true, None));
    let mut generator = BatchGenerator::new(&model, options(24, 4)).unwrap();
    let [first, second] =
        [20, 16].map(|length| generator.add(&prompt(length, 3), usize::MAX).unwrap());
    let chunk = |sequence, tokens| Chunk { sequence, tokens, logits: 1 };
    let whole = [chunk(first, 20), chunk(second, 4)];
    let mut gone = BatchGenerator::new(&model, options(24, 4)).unwrap();
    let unknown = (0..3).map(|_| gone.add(&[1], 0).unwrap()).last().unwrap();
    for (chunks, expected) in [
        (vec![chunk(unknown, 1)], "there is no such sequence"),
        (vec![chunk(first, 0)], "0 tokens of a sequence with 20 to compute"),
        (vec![chunk(first, 21)], "21 tokens of a sequence with 20 to compute"),
        (vec![chunk(first, 1), chunk(first, 1)], "a pass has a sequence twice"),
        (vec![Chunk { logits: 3, ..chunk(first, 2) }], "logits of 3 tokens of 2"),
        (
            vec![chunk(first, 20), chunk(second, 5)],
            "a pass of 25 tokens, of which it has at most 24",
        ),
    ] {
        let message = generator.pass(&chunks).unwrap_err().to_string();
        assert_eq!(message, expected);
    }
    let logits = generator.pass(&whole).unwrap();
    assert!(logits.iter().all(|logits| logits.len() == VOCABULARY as usize));
    for token in [1, 2] {
        generator.push(first, token).unwrap();
    }
    let message = generator.pass(&[chunk(first, 2)]).unwrap_err().to_string();
    assert!(
        message.starts_with("2 tokens of a sequence with a prompt of 20 end at 22"),
        "{message}"
    );
    // The first sequence has 3 of 4 blocks, the second sequence the last block.
    let error = generator.pass(&[chunk(second, 8)]).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("has 0 free blocks, and the next tokens need 1:"), "{message}");
    generator.remove(first);
    generator.remove(first);
    assert_eq!(generator.free_blocks(), 3);
    generator.pass(&[chunk(second, 8)]).unwrap();
    assert!(generator.pass(&[]).unwrap().is_empty());
    for length in [0, 65] {
        let error = generator.add(&vec![0; length], usize::MAX).unwrap_err();
        let expected =
            format!("a sequence of {length} tokens is too short or too long: use 1 to 64");
        assert_eq!(error.to_string(), expected);
    }
    let message = generator.add(&[VOCABULARY], usize::MAX).unwrap_err().to_string();
    assert_eq!(message, format!("token {VOCABULARY} of a vocabulary of {VOCABULARY}"));
    let none = BatchOptions { blocks: 0, ..options(1, 1) };
    assert!(BatchGenerator::new(&model, none).is_err());
}

#[test]
fn the_logits_of_all_tokens_of_a_prompt_are_those_of_a_whole_pass() {
    let mut model = model(Cpu, ElementType::F32, config(10, true, None));
    let ids = prompt(30, 3);
    let found = {
        let mut generator = BatchGenerator::new(&model, options(16, 8)).unwrap();
        let sequence = generator.add(&ids, 0).unwrap();
        let chunk = |tokens| Chunk { sequence, tokens, logits: tokens };
        [16, 14].map(|tokens| generator.pass(&[chunk(tokens)]).unwrap().remove(0)).concat()
    };
    let output = model.run(std::slice::from_ref(&ids)).unwrap();
    for position in 0..ids.len() {
        let part = position * VOCABULARY as usize..(position + 1) * VOCABULARY as usize;
        let pairs = found[part.clone()].iter().zip(&output.logits[part]);
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-5), "{position}");
    }
}

fn heads_are_those_of_whole_passes<B: Backend + Clone>(backend: B) {
    let by_layer = moh(RouterKind::QueryNorm, &[3, 8], &[2, 0]);
    let others = configs().into_iter().map(|config| config.moh);
    for moh in others.chain([Some(by_layer)]) {
        let mut model = model(backend.clone(), ElementType::F32, config(10, true, moh.clone()));
        let prompts = [prompt(7, 3), prompt(4, 5)];
        let heads = {
            let mut generator = BatchGenerator::new(&model, options(40, 32)).unwrap();
            let chunk = |prompt: &Vec<u32>| Chunk {
                sequence: generator.add(prompt, 0).unwrap(),
                tokens: prompt.len(),
                logits: 0,
            };
            let chunks: Vec<_> = prompts.iter().map(chunk).collect();
            let mut heads = PassHeads::default();
            generator.pass_choosing(&chunks, &[], 1, Some(&mut heads)).unwrap();
            heads
        };
        let mut row = 0;
        for prompt in prompts {
            let output = model.run(std::slice::from_ref(&prompt)).unwrap();
            for position in 0..prompt.len() {
                let layers = 0..output.heads.len();
                let expected: Vec<_> =
                    layers.map(|layer| output.active_heads(layer, 0, position)).collect();
                assert_eq!(heads.of_token(row), expected, "{moh:?}, token {row}");
                row += 1;
            }
        }
    }
}

#[test]
fn the_heads_of_a_pass_are_those_of_whole_passes() {
    heads_are_those_of_whole_passes(Cpu);
}

#[cfg(feature = "cuda-emulator")]
#[test]
fn the_heads_of_a_pass_on_an_emulated_gpu_are_those_of_whole_passes() {
    heads_are_those_of_whole_passes(Cuda::emulated());
}
