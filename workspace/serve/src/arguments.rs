//! The arguments of `moh-serve`. Options that vLLM also has bear vLLM's names.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Parser;
use moh_kernels::ElementType;
use moh_kernels::open_device::DeviceName;
use moh_program::arguments::{at_least, between, only};
use moh_program::{exit, options};
use moh_serve::guard::Guard;

/// The largest number of tokens of a pass or a block, of sequences, and of connections.
const MAX_COUNT: usize = 1 << 20;
const EXPECTED_HOST: &str = "expected a name such as gpu.example.org, without scheme and port";
/// A year.
const MAX_SECONDS: u64 = 365 * 24 * 60 * 60;

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
    /// Address to listen at; other than a loopback address needs --api-key-file or --allow-anyone
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Answer every machine that reaches --host, without keys
    #[arg(long)]
    pub allow_anyone: bool,
    /// Name of this machine for which requests may ask, beside localhost and --host; repeat it for more. With keys, any
    /// name may be asked for unless one is given
    #[arg(long, value_name = "NAME", value_parser = only(|name: &String| is_host(name), EXPECTED_HOST))]
    pub allowed_host: Vec<String>,
    /// Port to listen at; 0 is any that is free
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// File with the keys of clients, one in each line, and comments after #: requests without one of them are refused
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Element type of the computation [default: the type of the model's weights]
    #[arg(long, value_parser = options::element_types())]
    pub dtype: Option<ElementType>,
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
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = between(1, MAX_COUNT))]
    pub max_num_seqs: usize,
    /// Tokens of a pass
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = between(1, MAX_COUNT))]
    pub max_num_batched_tokens: usize,
    /// Tokens of prompts in a pass that other sequences wait for: fewer make their tokens come more evenly
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = between(1, MAX_COUNT))]
    pub chunked_prefill_size: usize,
    /// Tokens whose keys and values are kept, of all sequences [default: in a quarter of the available memory, on a
    /// GPU in 4 GiB, at most what --max-num-seqs sequences need]
    #[arg(long, value_name = "TOKENS", value_parser = at_least::<usize>(1))]
    pub kv_cache_tokens: Option<usize>,
    /// Tokens of a block of the cache
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = between(1, MAX_COUNT))]
    pub block_size: usize,
    /// Sequences that may wait: further ones are answered with status 429
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = between(1, MAX_COUNT))]
    pub max_queue: usize,
    /// Connections at the same time; of more, those that have waited longest for their clients are closed
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = between(1, MAX_COUNT))]
    pub max_connections: usize,
    /// Give a request up after this time [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = between(1, MAX_SECONDS))]
    pub request_timeout: Option<u64>,
}

impl Arguments {
    /// Returns the guard, which decides which requests are answered.
    pub fn guard(&self) -> anyhow::Result<Guard> {
        let keys = self.api_key_file.as_deref().map_or_else(|| Ok(Vec::new()), read_keys)?;
        if keys.is_empty() && !self.host.is_loopback() && !self.allow_anyone {
            let message = format!(
                "--host {}: every machine that reaches it could ask: give clients keys with --api-key-file, or accept \
                 that with --allow-anyone",
                self.host
            );
            return Err(exit::Usage(message).into());
        }
        Ok(Guard::new(&keys, self.host, &self.allowed_host))
    }
}

/// Returns whether a text is the name of a host, without a port.
fn is_host(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    (!text.is_empty() && text.bytes().all(is_part)) || text.parse::<IpAddr>().is_ok()
}

fn read_keys(file: &Path) -> anyhow::Result<Vec<String>> {
    let option = || format!("--api-key-file {}", file.display());
    let bytes = std::fs::read(file).with_context(option)?;
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let mut keys = Vec::new();
    for (number, line) in text.split(|&byte| byte == b'\n').enumerate() {
        let key = line.trim_ascii();
        if key.is_empty() || key.starts_with(b"#") {
            continue;
        }
        // A key with bytes that a header cannot have would never match.
        match str::from_utf8(key) {
            Ok(key) if key.bytes().all(|byte| (b' '..=b'~').contains(&byte)) => {
                keys.push(key.to_owned());
            }
            _ => bail!(
                "{}: the key in line {} has characters other than those of printable ASCII: choose another one",
                option(),
                number + 1
            ),
        }
    }
    if keys.is_empty() {
        bail!("{}: contains no key: write one in a line, or leave the option out", option());
    }
    Ok(keys)
}
