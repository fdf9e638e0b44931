//! Token sequences of examples, by the rules of lm-evaluation-harness 0.4.13 for causal models.
//!
//! Spaces at the end of the context belong to the continuation. Context and continuation are
//! encoded as one text, and the continuation is what follows as many tokens as the context has by
//! itself: a token across the border counts to the context. A text begins with the tokens that the
//! tokenizer puts before texts, usually BOS, unless it already names the beginning token. What the
//! tokenizer puts after texts is left out: it would stand between context and continuation.

use std::path::Path;

use moh_data::TextTokenizer;
use rayon::prelude::*;

use super::{Example, TaskFile};
use crate::Error;

/// Maximum tokens of the requests of all files, which are in memory at once.
const MAX_TOKENS: usize = 1 << 28;
/// Choices that are encoded before their tokens are counted.
const BLOCK_CHOICES: usize = 4096;

/// A context and its continuation, as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The context, whose beginning may be cut off, and the continuation.
    pub(super) tokens: Vec<u32>,
    /// Number of tokens of the continuation, below that of `tokens`.
    pub(super) continuation: usize,
}

impl Request {
    /// The tokens that the model reads: all but the last.
    pub fn input(&self) -> &[u32] {
        // There is at least one token of context and one of continuation.
        &self.tokens[..self.tokens.len() - 1]
    }

    /// How many tokens of the input no log-probability follows.
    pub(super) fn unscored(&self) -> usize {
        self.input().len() - self.continuation
    }
}

/// Makes requests of examples.
pub struct Encoder<'a> {
    tokenizer: &'a TextTokenizer,
    /// The token that begins an empty context, and its text.
    beginning: Option<(u32, String)>,
    max_length: usize,
    vocab_size: usize,
}

impl<'a> Encoder<'a> {
    /// An encoder for a model that reads up to `max_length` tokens of ids below `vocab_size`.
    /// `beginning` is the token that an empty context becomes: BOS, or else EOS.
    ///
    /// # Errors
    /// Fails if the tokenizer does.
    pub fn new(
        tokenizer: &'a TextTokenizer,
        beginning: Option<u32>,
        max_length: usize,
        vocab_size: usize,
    ) -> Result<Self, Error> {
        let with_text = |id: u32| Ok::<_, Error>((id, tokenizer.decode(&[id], false)?));
        let beginning = beginning.map(with_text).transpose()?;
        Ok(Encoder { tokenizer, beginning, max_length, vocab_size })
    }

    /// The requests of the examples of `files`, in order: one for each choice.
    ///
    /// # Errors
    /// Fails for a choice that adds no token to its context or has more than the model reads, for
    /// an id outside the vocabulary, if there are too many tokens for memory, and if the tokenizer
    /// fails.
    pub fn requests(&self, files: &[TaskFile]) -> Result<Vec<Request>, Error> {
        let mut requests = Vec::new();
        let mut tokens = 0;
        for file in files {
            let of_example = |example: &Example| self.of_example(&file.path, example);
            // A block of examples at a time, so that the sum is known before it exceeds the memory.
            for examples in blocks(&file.examples) {
                let found: Vec<Vec<Request>> =
                    examples.par_iter().map(of_example).collect::<Result<_, _>>()?;
                requests.extend(found.into_iter().flatten().inspect(|r| tokens += r.tokens.len()));
                if tokens > MAX_TOKENS {
                    let reason = format!("more than {MAX_TOKENS} tokens at once: give fewer");
                    return Err(Error::from(moh_files::unusable(&file.path, reason)));
                }
            }
        }
        Ok(requests)
    }

    /// The requests of one example of the file `path`.
    fn of_example(&self, path: &Path, example: &Example) -> Result<Vec<Request>, Error> {
        let refuse = |reason: String| {
            let (path, line) = (path.to_owned(), example.line);
            Err(moh_data::Error::Line { path, line, reason }.into())
        };
        let mut requests = Vec::new();
        for (index, choice) in example.choices.iter().enumerate() {
            let continuation = format!("{}{choice}", example.delimiter);
            let request = match self.encode(&example.context, &continuation)? {
                Ok(request) => request,
                Err(reason) => return refuse(format!("choice {index} {reason}")),
            };
            if let Some(id) = request.tokens.iter().find(|&&id| id as usize >= self.vocab_size) {
                let size = self.vocab_size;
                return refuse(format!(
                    "has the id {id}, outside the model's vocabulary of {size}: use its own tokenizer"
                ));
            }
            requests.push(request);
        }
        Ok(requests)
    }

    /// The request of a continuation, or why there is none.
    fn encode(&self, context: &str, continuation: &str) -> Result<Result<Request, String>, Error> {
        let (context, continuation) = if context.is_empty() {
            let continuation = self.tokenizer.encode_without_special_tokens(continuation)?;
            match &self.beginning {
                // The continuation's own beginning token is the context.
                Some((id, _)) if continuation.first() == Some(id) => {
                    (vec![*id], continuation[1..].to_vec())
                }
                Some((id, _)) => (vec![*id], continuation),
                None => return Ok(Err(NO_BEGINNING.to_owned())),
            }
        } else {
            let border = trim_end(context).len();
            let whole = self.text(&format!("{context}{continuation}"))?;
            let context = self.text(&context[..border])?;
            let rest = whole.get(context.len()..).unwrap_or_default().to_vec();
            (context, rest)
        };
        Ok(self.request(context, &continuation))
    }

    fn request(&self, mut tokens: Vec<u32>, continuation: &[u32]) -> Result<Request, String> {
        if tokens.is_empty() {
            // A context of spaces, which the harness refuses, with a tokenizer that begins texts
            // with nothing.
            let (id, _) = self.beginning.as_ref().ok_or(NO_BEGINNING)?;
            tokens.push(*id);
        }
        let (count, max) = (continuation.len(), self.max_length);
        if count == 0 {
            return Err("adds no token to the context: begin it with other text".to_owned());
        }
        if count > max {
            return Err(format!("has {count} tokens, the model reads at most {max}: shorten it"));
        }
        // The last token is only predicted.
        let kept = tokens.len().min(max + 1 - count);
        let tokens = [&tokens[tokens.len() - kept..], continuation].concat();
        Ok(Request { tokens, continuation: count })
    }

    /// The tokens of a text, without those that end one.
    fn text(&self, text: &str) -> Result<Vec<u32>, Error> {
        let begins = |(_, token): &(u32, String)| !token.is_empty() && text.starts_with(token);
        Ok(match self.beginning.as_ref().is_some_and(begins) {
            true => self.tokenizer.encode_without_special_tokens(text)?,
            false => self.tokenizer.encode_prompt(text)?,
        })
    }
}

/// Neighbouring examples with about as many choices as a block has.
fn blocks(examples: &[Example]) -> impl Iterator<Item = &[Example]> {
    let mut rest = examples;
    std::iter::from_fn(move || {
        let mut choices = 0;
        let fits = |example: &&Example| {
            choices += example.choices.len();
            choices <= BLOCK_CHOICES
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (block, after) = rest.split_at(count);
        rest = after;
        (!block.is_empty()).then_some(block)
    })
}

const NO_BEGINNING: &str = "has an empty context, and the tokenizer names no token that begins texts: give it one, \
                            or name bos_token in tokenizer_config.json";

/// Removes spaces from the end of a text: those of Python's `str.rstrip`, to which the separators
/// U+001C to U+001F belong.
fn trim_end(text: &str) -> &str {
    text.trim_end_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A tokenizer of the characters of `letters`, with ids from 3 on, that puts `<s>` (1) before
    /// texts and `</s>` (2) after them, and that merges a space and an `a`, id 0.
    fn tokenizer(letters: &str, template: bool) -> (tempfile::TempDir, TextTokenizer) {
        let mut vocab = serde_json::Map::new();
        for (token, id) in [(" a", 0), ("<s>", 1), ("</s>", 2)] {
            vocab.insert(token.to_owned(), id.into());
        }
        for (letter, id) in letters.chars().zip(3..) {
            vocab.insert(letter.to_string(), id.into());
        }
        let special = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        };
        let piece = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let post = json!({
            "type": "TemplateProcessing", "single": [piece("<s>"), text, piece("</s>")], "pair": [],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
            },
        });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": null, "decoder": {"type": "Fuse"},
            "post_processor": template.then_some(post),
            "added_tokens": [special(1, "<s>"), special(2, "</s>")],
            "model": {"type": "BPE", "vocab": vocab, "merges": [[" ", "a"]]},
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let loaded = TextTokenizer::load(dir.path()).unwrap();
        (dir, loaded)
    }

    /// Ids of the letters of `" abc"`: 3 to 6.
    const LETTERS: &str = " abc";

    fn encode(encoder: &Encoder<'_>, context: &str, continuation: &str) -> (Vec<u32>, usize) {
        let request = encoder.encode(context, continuation).unwrap().unwrap();
        (request.tokens, request.continuation)
    }

    #[test]
    fn the_continuation_is_what_follows_the_context_of_the_whole_text() {
        let (_dir, tokenizer) = tokenizer(LETTERS, true);
        let encoder = Encoder::new(&tokenizer, Some(1), 64, 7).unwrap();
        assert_eq!(encode(&encoder, "b", " a"), (vec![1, 5, 0], 1));
        assert_eq!(encode(&encoder, "b", " cb"), (vec![1, 5, 3, 6, 5], 3));
        // A space at the end of the context moves, and merges with what follows.
        assert_eq!(encode(&encoder, "b ", "a"), (vec![1, 5, 0], 1));
        assert_eq!(encode(&encoder, "b  ", "c"), (vec![1, 5, 3, 3, 6], 3));
        // The beginning of a text is written once, and its end never.
        assert_eq!(encode(&encoder, "<s>b", "c"), (vec![1, 5, 6], 1));
        assert_eq!(encode(&encoder, "  ", "c"), (vec![1, 3, 3, 6], 3));
    }

    #[test]
    fn an_empty_context_is_the_beginning_token() {
        let (_dir, framing) = tokenizer(LETTERS, true);
        let (_dir, plain) = tokenizer(LETTERS, false);
        for tokenizer in [&framing, &plain] {
            let encoder = Encoder::new(tokenizer, Some(2), 64, 7).unwrap();
            assert_eq!(encode(&encoder, "", " a"), (vec![2, 0], 1));
            assert_eq!(encode(&encoder, "", "</s>b"), (vec![2, 5], 1));
        }
        let encoder = Encoder::new(&plain, None, 64, 7).unwrap();
        for context in ["", "  "] {
            let reason = encoder.encode(context, "a").unwrap().unwrap_err();
            assert!(reason.starts_with("has an empty context"), "{reason}");
        }
        assert_eq!(encode(&encoder, "b", "c"), (vec![5, 6], 1));
        let encoder = Encoder::new(&plain, Some(2), 64, 7).unwrap();
        assert_eq!(encode(&encoder, "  ", "c"), (vec![2, 3, 3, 6], 3));
    }

    #[test]
    fn long_contexts_lose_their_beginning_and_long_continuations_are_refused() {
        let (_dir, tokenizer) = tokenizer(LETTERS, true);
        let encoder = Encoder::new(&tokenizer, Some(1), 4, 7).unwrap();
        // Four tokens are read, the fifth is only predicted.
        assert_eq!(encode(&encoder, "bbb", "c"), (vec![1, 5, 5, 5, 6], 1));
        assert_eq!(encode(&encoder, "bbbb", "cc"), (vec![5, 5, 5, 6, 6], 2));
        assert_eq!(encode(&encoder, "bb", "cccc"), (vec![5, 6, 6, 6, 6], 4));
        let reason = encoder.encode("bb", "ccccc").unwrap().unwrap_err();
        assert_eq!(reason, "has 5 tokens, the model reads at most 4: shorten it");
    }

    #[test]
    fn faults_name_file_and_line() {
        let (_dir, tokenizer) = tokenizer(LETTERS, true);
        let request = |vocab_size: usize, context: &str, choice: &str| {
            let encoder = Encoder::new(&tokenizer, Some(1), 64, vocab_size).unwrap();
            let example = Example {
                line: 3,
                context: context.to_owned(),
                delimiter: String::new(),
                choices: vec!["b".to_owned(), choice.to_owned()],
                answer: 0,
            };
            let kind = super::super::TaskKind::MultipleChoice;
            let file = TaskFile { path: "t.jsonl".into(), kind, examples: vec![example] };
            encoder.requests(&[file]).map_err(|error| error.to_string())
        };
        assert_eq!(request(7, "a", "c").unwrap().len(), 2);
        let error = request(6, "a", "c").unwrap_err();
        assert!(error.starts_with("t.jsonl:3: has the id 6, outside the model's"), "{error}");
        // Letters without a token add none.
        let error = request(7, "a", "z").unwrap_err();
        assert!(error.starts_with("t.jsonl:3: choice 1 adds no token"), "{error}");
    }

    #[test]
    fn spaces_are_those_of_python() {
        // 'a \n\x1c\x1f\x85\xa0\u3000'.rstrip() == 'a' and 'a\u200b'.rstrip() == 'a\u200b' in
        // Python.
        assert_eq!(trim_end("a \n\u{1c}\u{1f}\u{85}\u{a0}\u{3000}"), "a");
        assert_eq!(trim_end("a\u{200b}"), "a\u{200b}");
        assert_eq!(trim_end(" "), "");
    }
}
