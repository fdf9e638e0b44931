//! The arguments of `moh-serve`. Where vLLM has the same option, it has the same name.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Parser;
use moh_kernels::ElementType;
use moh_kernels::open_device::DeviceName;
use moh_program::arguments::at_least;
use moh_program::options;

/// Serve a model, dense or Mixture-of-Head, over HTTP with OpenAI's API
///
/// Many clients are answered at once: every pass computes a token of each sequence that generates, and parts of the
/// prompts of others. A Mixture-of-Head model computes only each token's selected heads. A conversation with the model,
/// and the heads of each token, are at the address that is printed once the model is loaded.
#[derive(Debug, Parser)]
#[command(
    name = "moh-serve",
    version,
    arg_required_else_help = true,
    after_help = "Example, from the repository's root:\n  moh-serve --model recipes/quickstart\n  \
        curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n    \
        -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 32}'"
)]
pub struct Arguments {
    /// Directory of the model, its id on the hub, or a checkpoint of a run: RUN for its newest one, RUN@STEP for another
    #[arg(long)]
    pub model: String,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    pub revision: Option<String>,
    /// Follow the run: serve each new checkpoint once the answers that were begun are finished
    #[arg(long)]
    pub watch_run: bool,
    /// What clients call the model [default: --model]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Address to listen at; other than a loopback address, every machine that reaches it can ask
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen at; 0 is any that is free
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// File with the keys of clients, one in each line: requests without one of them are refused
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Element type of the computation
    #[arg(long, value_parser = options::element_types(), default_value = "f32")]
    pub dtype: ElementType,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    pub device: DeviceName,
    /// On a GPU, make the results of a sequence bitwise independent of the other sequences; on a CPU they always are
    #[arg(long)]
    pub deterministic: bool,
    /// Tokens of a sequence, prompt and answer, at most [default: the model's context]
    #[arg(long, value_name = "TOKENS", value_parser = at_least::<usize>(1))]
    pub max_model_len: Option<usize>,
    /// Sequences that are computed at the same time, at most --max-num-batched-tokens
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = at_least::<usize>(1))]
    pub max_num_seqs: usize,
    /// Tokens of a pass
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least::<usize>(1))]
    pub max_num_batched_tokens: usize,
    /// Tokens of prompts in a pass that other sequences wait for: fewer make their tokens come more evenly
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = at_least::<usize>(1))]
    pub chunked_prefill_size: usize,
    /// Tokens whose keys and values are kept, of all sequences [default: in a quarter of the available memory, on a
    /// GPU in 4 GiB, at most what --max-num-seqs sequences need]
    #[arg(long, value_name = "TOKENS", value_parser = at_least::<usize>(1))]
    pub kv_cache_tokens: Option<usize>,
    /// Tokens of a block of the cache
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least::<usize>(1))]
    pub block_size: usize,
    /// Sequences that may wait: further ones are answered with status 429
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = at_least::<usize>(1))]
    pub max_queue: usize,
    /// Connections at the same time
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = at_least::<usize>(1))]
    pub max_connections: usize,
    /// Give a request up after this time [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = at_least::<u64>(1))]
    pub request_timeout: Option<u64>,
}

impl Arguments {
    /// The keys of clients.
    pub fn keys(&self) -> anyhow::Result<Vec<String>> {
        self.api_key_file.as_deref().map_or_else(|| Ok(Vec::new()), read_keys)
    }
}

fn read_keys(file: &Path) -> anyhow::Result<Vec<String>> {
    let option = || format!("--api-key-file {}", file.display());
    let text = std::fs::read_to_string(file).with_context(option)?;
    let keys: Vec<_> = text.lines().map(str::trim).filter(|key| !key.is_empty()).collect();
    if keys.is_empty() {
        bail!("{}: contains no key: write one in a line, or leave the option out", option());
    }
    Ok(keys.into_iter().map(str::to_owned).collect())
}
