//! Documents to ids on one thread: the crate's encoder, the faster library by itself, and the slower one. The text
//! is generated, or read from the file that `MOH_BENCH_TEXT` names.

// A benchmark fails by panicking. It uses a part of the modules that it shares with the crate's tests.
#![allow(clippy::duplicate_mod, clippy::unwrap_used, dead_code, unused_imports)]

#[path = "../src/prepare/encode/shape.rs"]
mod shape;
mod prepare {
    pub(crate) mod encode {
        pub(crate) use crate::shape;
    }
}
#[path = "../src/prepare/encode/tests/kinds.rs"]
mod kinds;

use std::sync::LazyLock;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use moh_text::TextTokenizer;
use moh_text::prepare::ids_of;
use tokenizers_1::pipeline::{EncodeOptions, PipelineTokenizer};

const VOCABULARY: usize = 32_000;
/// Text that the vocabulary is trained on, and text that is encoded.
const TRAINED: usize = 8 << 20;
const ENCODED: usize = 8 << 20;
const DOCUMENT_BYTES: usize = 4096;
const KINDS: [&str; 4] = ["Llama 3", "Qwen", "Llama 2", "Llama 2, not legacy"];

struct Case {
    tokenizer: TextTokenizer,
    bare: PipelineTokenizer,
}

static TEXT: LazyLock<String> = LazyLock::new(|| match std::env::var("MOH_BENCH_TEXT") {
    Ok(path) => std::fs::read_to_string(path).unwrap(),
    Err(_) => kinds::text(TRAINED + ENCODED, 1),
});

static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let trained = &TEXT[..TEXT.floor_char_boundary(TEXT.len() - ENCODED)];
    let trained = &trained[..trained.floor_char_boundary(TRAINED)];
    let all = kinds::all(VOCABULARY, trained);
    let load = |name| {
        let kind = all.iter().find(|kind| kind.name == name).unwrap();
        let json = tokenizers_1::canonicalize_str(&kind.json.to_string()).unwrap();
        Case { tokenizer: kind.load(), bare: tokenizers_1::from_json(&json).unwrap() }
    };
    KINDS.into_iter().map(load).collect()
});

/// The text in documents of about `bytes` bytes.
fn documents(bytes: usize) -> Vec<&'static str> {
    let mut rest = &TEXT[TEXT.floor_char_boundary(TEXT.len() - ENCODED)..];
    let mut documents = Vec::new();
    while !rest.is_empty() {
        let (document, others) = rest.split_at(rest.floor_char_boundary(bytes));
        documents.push(document);
        rest = others;
    }
    documents
}

fn bench(bencher: Bencher<'_, '_>, bytes: usize, mut encode: impl FnMut(&str) -> usize) {
    let documents = documents(bytes);
    let total = documents.iter().map(|document| document.len()).sum::<usize>();
    bencher.counter(BytesCount::new(total)).bench_local(|| {
        documents.iter().map(|document| encode(black_box(document))).sum::<usize>()
    });
}

#[divan::bench(args = 0..KINDS.len(), consts = [DOCUMENT_BYTES, ENCODED])]
fn encoder<const BYTES: usize>(bencher: Bencher<'_, '_>, kind: usize) {
    let mut encode = ids_of(&CASES[kind].tokenizer).unwrap();
    bench(bencher, BYTES, |text| encode(text).unwrap());
}

#[divan::bench(args = 0..KINDS.len(), consts = [DOCUMENT_BYTES, ENCODED])]
fn library<const BYTES: usize>(bencher: Bencher<'_, '_>, kind: usize) {
    let options = EncodeOptions::no_specials();
    bench(bencher, BYTES, |text| {
        let mut ids = Vec::new();
        CASES[kind].bare.encode_into(text, &options, &mut ids).unwrap();
        ids.len()
    });
}

#[divan::bench(args = 0..KINDS.len(), consts = [DOCUMENT_BYTES, ENCODED])]
fn slower_library<const BYTES: usize>(bencher: Bencher<'_, '_>, kind: usize) {
    let tokenizer = &CASES[kind].tokenizer;
    bench(bencher, BYTES, |text| tokenizer.encode(text).unwrap().len());
}

fn main() {
    KINDS.iter().enumerate().for_each(|(kind, name)| println!("{kind}: {name}"));
    divan::main();
}
