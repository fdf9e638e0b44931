//! `moh-eval`: a model's loss on a token file, its logits for given ids, and measures of its heads.

mod heads;
mod heads_report;
mod logits;
mod logits_file;
mod loss;
mod loss_report;
mod windows;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moh_program::exit;

use crate::heads::HeadsArguments;
use crate::logits::LogitsArguments;
use crate::loss::LossArguments;

/// Evaluate a model, dense or Mixture-of-Head.
#[derive(Parser)]
#[command(
    name = "moh-eval",
    version,
    arg_required_else_help = true,
    after_help = "Example, from the repository's root:\n  \
        moh-eval loss --model recipes/quickstart --data recipes/quickstart/voyage-valid \\\n    \
            --sequence-length 256"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mean loss, perplexity and bits per byte on a token file
    ///
    /// The file is divided, front to back, into non-overlapping windows of --sequence-length
    /// tokens; each has one target fewer than tokens. With --limit N, the windows that are evaluated are those
    /// in the middle of N equal parts of the file, always the same ones.
    ///
    /// Several models or files give a table, in which all windows have the same length. A checkpoint of a run is
    /// evaluated as an export of it would be, and nothing is written.
    #[command(after_help = "Examples, from the repository's root:\n  \
        moh-eval loss --model recipes/quickstart --data recipes/quickstart/voyage-valid \\\n    \
            --sequence-length 256\n  \
        moh-eval loss --model recipes/quickstart --data recipes/quickstart/voyage-valid \\\n    \
            --data recipes/quickstart/voyage --sequence-length 256 --limit 20 --json")]
    Loss(LossArguments),
    /// The logits of token ids, and the selected heads of a Mixture-of-Head model
    ///
    /// Writes safetensors: logits f32 [batch, length, vocabulary] and, for a Mixture-of-Head model,
    /// routed_mask u8 [layers, batch, length, routed heads], or, where layers differ, routed_mask.N of
    /// each layer N that routes, without the first dimension.
    #[command(after_help = "Example, from the repository's root:\n  \
        echo '[[0, 5, 6, 7], [0, 8, 9, 10]]' > ids.json\n  \
        moh-eval logits --model recipes/quickstart --ids ids.json --out logits.safetensors")]
    Logits(LogitsArguments),
    /// What heads do: which tokens compute them, how far they look, how alike they are
    ///
    /// By layer and head, on each token file: the load (the share of tokens that compute the head; * marks shared
    /// heads), the rank of its outputs (singular values with 99% of the sum of the squares of all), the mean distance in
    /// tokens and the entropy in nats of its attention, and the tokens of whose occurrences the largest share computes it.
    /// By layer: the entropy of the gates, and the mean over the pairs of heads of the similarity of attention patterns
    /// (1 - |a - b|_1 / 2 of two rows) and of outputs (cosine), of the tokens that compute both.
    #[command(after_help = "Examples, from the repository's root:\n  \
        moh-eval heads recipes/quickstart --data recipes/quickstart/voyage-valid --sequence-length 256\n  \
        moh-eval heads runs/quickstart --data voyage=recipes/quickstart/voyage-valid \\\n    \
            --sequence-length 256 --sentence 'The captain gave the lamp to the cook.'")]
    Heads(HeadsArguments),
}

fn main() -> ExitCode {
    exit::run(|| match moh_program::arguments::parse::<Arguments>().command {
        Command::Heads(arguments) => arguments.run(),
        Command::Loss(arguments) => arguments.run(),
        Command::Logits(arguments) => arguments.run(),
    })
}
