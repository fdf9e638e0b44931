//! `moh-eval heads`: measures a model's heads on token files and on a sentence.

use std::io::{Write as _, stdout};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Context as _;
use moh_kernels::Backend;
use moh_kernels::open_device::{DeviceName, OnDevice};
use moh_program::arguments::at_least;
use moh_program::models::NamedModel;
use moh_program::progress::Bar;
use moh_program::{exit, options};
use moh_report::head_measures::{
    HeadDocument, HeadText, Sentence, SentenceToken, measure_heads, sentence,
};
use moh_text::TextTokenizer;

use crate::heads_report;
use crate::windows::{say_length, window_length, windows};

#[derive(clap::Args)]
pub(crate) struct HeadsArguments {
    /// Model: a directory, an id on the hub, or a run's checkpoint, RUN or RUN@STEP
    #[arg(value_name = "MODEL", required_unless_present = "named")]
    model: Option<String>,
    /// The model, as in the other commands
    #[arg(long = "model", value_name = "MODEL", conflicts_with = "model", id = "named")]
    named: Option<String>,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    revision: Option<String>,
    /// Token file, without .bin and .idx, and a name for it, such as a topic; repeat it for more
    #[arg(long, value_name = "[NAME=]PREFIX", required_unless_present = "sentence")]
    data: Vec<String>,
    /// Tokens of each file that are measured, in whole windows that are spread over it
    #[arg(long, default_value_t = 16_384, value_parser = at_least::<u64>(1))]
    tokens: u64,
    /// Tokens per window [default: 2048, or the model's context length if that is less]
    #[arg(long, value_name = "TOKENS", value_parser = at_least::<usize>(0))]
    sequence_length: Option<usize>,
    /// Also the heads that each token of this text computes, and with --json the attention maps
    #[arg(long, value_name = "TEXT")]
    sentence: Option<String>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Accept a token file of another tokenizer than the model's if the model's gives the same ids on a sample of
    /// it
    #[arg(long)]
    allow_other_tokenizer: bool,
}

impl HeadsArguments {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        let name = self.model.as_ref().or(self.named.as_ref()).map_or("", String::as_str);
        let model = NamedModel::open(name, self.revision.as_deref())?;
        let (length, texts) = self.texts(&model)?;
        let ids = self.sentence_ids(&model)?;
        let device = options::open_device(self.device)?;
        let document = device.run(Heads { model: &model, length, texts, ids: ids.as_deref() })?;
        match self.json {
            true => {
                let text = serde_json::to_string_pretty(&document)?;
                Ok(writeln!(stdout(), "{text}")?)
            }
            false => Ok(heads_report::write(&mut stdout(), &document)?),
        }
    }

    /// Returns the length of windows, and the tokens to measure.
    fn texts(&self, model: &NamedModel) -> anyhow::Result<(usize, Vec<HeadText>)> {
        let length = window_length(std::slice::from_ref(model), self.sequence_length)?;
        if self.sequence_length.is_none() && !self.data.is_empty() {
            say_length(length, std::slice::from_ref(model));
        }
        let text = |data: &String| {
            let (name, prefix) = named_file(data);
            let all = windows(model, &prefix, length, self.allow_other_tokenizer)?;
            let windows = all.spread((self.tokens / length as u64).max(1));
            let mut ids = vec![0; length * windows.len() as usize];
            for (number, window) in ids.chunks_exact_mut(length).enumerate() {
                windows.read(number as u64, window)?;
            }
            Ok(HeadText { name, ids })
        };
        Ok((length, self.data.iter().map(text).collect::<anyhow::Result<_>>()?))
    }

    /// Returns the ids of `--sentence`, if given.
    fn sentence_ids(&self, model: &NamedModel) -> anyhow::Result<Option<Vec<u32>>> {
        let Some(text) = &self.sentence else { return Ok(None) };
        let Some(tokenizer) = model.tokenizer()? else {
            let message = format!("--sentence: {} has no tokenizer", model.name);
            return Err(exit::Usage(message).into());
        };
        Ok(Some(tokenizer.encode_prompt(text).context("--sentence")?))
    }
}

/// Returns the name and the prefix of an argument of `--data`. The default name is the last part of the prefix.
fn named_file(argument: &str) -> (String, PathBuf) {
    let is_file = |prefix: &str| PathBuf::from(format!("{prefix}.idx")).exists();
    match argument.split_once('=') {
        Some((name, prefix)) if !is_file(argument) => (name.to_owned(), prefix.into()),
        _ => {
            let prefix = PathBuf::from(argument);
            let name = prefix.file_name().unwrap_or(prefix.as_os_str());
            (name.to_string_lossy().into_owned(), prefix)
        }
    }
}

/// Returns a token as text, or its id without a tokenizer.
fn token_text(tokenizer: Option<&TextTokenizer>, id: u32) -> String {
    let decoded = tokenizer.and_then(|tokenizer| tokenizer.decode(&[id], false).ok());
    decoded.unwrap_or_else(|| id.to_string())
}

struct Heads<'a> {
    model: &'a NamedModel,
    length: usize,
    texts: Vec<HeadText>,
    ids: Option<&'a [u32]>,
}

impl OnDevice for Heads<'_> {
    type Output = anyhow::Result<HeadDocument>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Heads { model, length, texts, ids } = self;
        let mut tensors = model.tensors()?;
        let tokenizer = model.tokenizer()?;
        let text = |id| token_text(tokenizer, id);
        let (mut measured, mut layers) = (Vec::new(), Vec::new());
        if !texts.is_empty() {
            let mut bar = Bar::count("measuring layers", model.config.num_hidden_layers as u64);
            let mut progress = |done, all| {
                bar.update(done as u64, all as u64);
                ControlFlow::Continue(())
            };
            let (config, read) = (&model.config, &mut *tensors);
            let report = measure_heads(&backend, config, &texts, length, read, &mut progress);
            (measured, layers) = report?.unwrap_or_default();
        }
        let heads = layers.iter_mut().flat_map(|layer| &mut layer.heads);
        for token in heads.flat_map(|head| &mut head.tokens) {
            token.text = tokenizer.map(|_| text(token.id));
        }
        let of_sentence = |ids: &[u32]| {
            let layers = sentence::<B, anyhow::Error>(&backend, &model.config, ids, &mut *tensors)?;
            let tokens = ids.iter().map(|&id| SentenceToken { id, text: text(id) }).collect();
            Ok::<_, anyhow::Error>(Sentence { tokens, layers })
        };
        let sentence = ids.map(of_sentence).transpose()?;
        let (model, texts) = (model.name.clone(), measured);
        Ok(HeadDocument { model, sequence_length: length, texts, layers, sentence })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_name_before_the_sign_or_its_own() {
        let named = |argument| {
            let (name, prefix) = named_file(argument);
            (name, prefix.display().to_string())
        };
        assert_eq!(
            named("data/village-valid"),
            ("village-valid".into(), "data/village-valid".into())
        );
        assert_eq!(named("village=data/valid"), ("village".into(), "data/valid".into()));
        let place = tempfile::tempdir().unwrap();
        let prefix = place.path().join("a=b").display().to_string();
        std::fs::write(format!("{prefix}.idx"), "").unwrap();
        assert_eq!(named_file(&prefix), ("a=b".into(), prefix.clone().into()));
    }
}
