//! Loads the quickstart's model and continues a text, token by token:
//!
//!     cargo run --release -p moh --example generate -- "Grace has the"
//!
//! Any other model directory also works, such as the `export` of a run, as the second argument.

use std::io::Write as _;
use std::path::PathBuf;

use moh::{Cpu, ElementType, Generator, Sampler, Sampling, StoredModel, TextTokenizer};

/// Number of positions: the tokens of the text and of its continuation.
const POSITIONS: usize = 96;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let text = arguments.next().unwrap_or_else(|| "Once there was".to_owned());
    let quickstart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/quickstart");
    let directory = PathBuf::from(arguments.next().unwrap_or_else(|| quickstart.to_owned()));

    let tokenizer = TextTokenizer::load(&directory.join("tokenizer.json"))?;
    let model = StoredModel::open(&directory)?.load(Cpu, ElementType::F32, POSITIONS)?;

    let ids = tokenizer.encode_prompt(&text)?;
    let sampling = Sampling { temperature: 0.7, top_k: Some(50), ..Sampling::default() };
    let mut sampler = Sampler::new(1, sampling, tokenizer.vocab_size());
    // Keys and values of earlier tokens are cached: each pass computes only the new tokens.
    let mut generator = Generator::new(&model, POSITIONS)?;
    let mut logits = generator.extend(&ids)?;
    let mut decoder = tokenizer.stream(&ids, true);
    print!("{text}");
    while generator.position() < POSITIONS {
        let next = sampler.sample(&logits)?;
        print!("{}", decoder.push(next)?);
        std::io::stdout().flush()?;
        logits = generator.extend(&[next])?;
    }
    println!("{}", decoder.finish()?);
    Ok(())
}
