//! Rendering, and which part of a rendered text is the assistant's.
//!
//! A template with blocks `{% generation %}` says itself what the assistant generates. Of others it is the
//! text behind the prompt for a turn, which is the text of the messages before it with `add_generation_prompt`, up to
//! the end of the text of the messages with it. Both must be beginnings of the whole text.

use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, State, context};
use minijinja_contrib::pycompat;

use crate::generation::{FUNCTION, MARKS, take_marks};
use crate::{ChatTemplate, Conversation, Error, Result, python};

/// Maximum instructions of a rendering, so that every template ends.
const MAX_INSTRUCTIONS: u64 = 100_000_000;
/// Maximum bytes of a rendered text.
const MAX_BYTES: usize = 1 << 30;
const NAME: &str = "chat";

/// Which of the assistant's turns a model is trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedTurns {
    /// All of them.
    #[default]
    All,
    /// The last message, which must be the assistant's: for templates that write earlier turns otherwise, such as
    /// those that leave out what the assistant thought.
    Last,
}

/// A rendered conversation, and the parts of it that a model is trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingText {
    /// The text.
    pub text: String,
    /// The assistant's bytes of it, in increasing order.
    pub trained: Vec<Range<usize>>,
    /// Whether the template itself named them; otherwise they may end with what follows the token that ends a turn.
    pub is_exact: bool,
}

/// A compiled template; threads may share it.
pub struct Renderer<'a> {
    template: &'a ChatTemplate,
    environment: Environment<'a>,
}

/// A conversation as values of the engine, which are cheap to copy.
struct Values {
    messages: Vec<Value>,
    tools: Value,
}

impl Values {
    fn new(conversation: &Conversation) -> Self {
        let messages = conversation.messages().iter();
        Self {
            messages: messages.map(|message| Value::from(Serde(message))).collect(),
            tools: Value::from(Serde(conversation.tools())),
        }
    }
}

/// A text that is rendered, whose length is limited.
struct Limited(Vec<u8>);

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > MAX_BYTES - self.0.len() {
            return Err(std::io::Error::other(format!(
                "the text is longer than {MAX_BYTES} bytes"
            )));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> Renderer<'a> {
    pub(crate) fn new(template: &'a ChatTemplate) -> Result<Self> {
        let fault = |error: minijinja::Error| fault(template, &error);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(fault)?);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.set_formatter(python::print);
        environment.add_filter("tojson", python::tojson);
        environment.add_function("raise_exception", |message: String| {
            Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function(FUNCTION, mark);
        environment.add_template(NAME, &template.source).map_err(fault)?;
        Ok(Self { template, environment })
    }

    /// The text of a conversation, with `prompts` up to where the model's next answer begins.
    pub fn render(&self, conversation: &Conversation, prompts: bool) -> Result<String> {
        let values = Values::new(conversation);
        let marked = self.render_first(&values, values.messages.len(), prompts)?;
        Ok(if self.template.has_generation { take_marks(&marked).0 } else { marked })
    }

    /// The whole text of a conversation, and which of it is the assistant's.
    ///
    /// # Errors
    /// As [`Renderer::render`]; fails if the template does not tell the assistant's text from the rest of it.
    pub fn training_text(
        &self,
        conversation: &Conversation,
        turns: TrainedTurns,
    ) -> Result<TrainingText> {
        let values = Values::new(conversation);
        let count = values.messages.len();
        let last = count.saturating_sub(1);
        if turns == TrainedTurns::Last && !conversation.is_answer(last) {
            return Err(Error::Invalid("the last message is not the assistant's".to_owned()));
        }
        if self.template.has_generation {
            if conversation.contains(&MARKS) {
                return Err(Error::Invalid(
                    "the conversation contains U+FDD0 or U+FDD1, which are no characters: remove them"
                        .to_owned(),
                ));
            }
            let (text, mut trained) = take_marks(&self.render_first(&values, count, false)?);
            if turns == TrainedTurns::Last {
                trained.drain(..trained.len().saturating_sub(1));
            }
            return Ok(TrainingText { text, trained, is_exact: true });
        }
        let text = self.render_first(&values, count, false)?;
        let first = if turns == TrainedTurns::Last { last } else { 0 };
        let mut trained = Vec::new();
        for index in (first..count).filter(|&index| conversation.is_answer(index)) {
            let before = self.render_first(&values, index, true)?;
            // Without another message behind it, the turn ends where the text does.
            let through = match index == last {
                true => text.len(),
                false => {
                    let through = self.render_first(&values, index + 1, false)?;
                    if !text.starts_with(&through) {
                        return Err(other_beginning(index));
                    }
                    through.len()
                }
            };
            if !text.starts_with(&before) || before.len() > through {
                return Err(other_beginning(index));
            }
            trained.push(before.len()..through);
        }
        Ok(TrainingText { text, trained, is_exact: false })
    }

    /// The text of the first `count` messages, with the marks of blocks `generation`.
    fn render_first(&self, values: &Values, count: usize, prompts: bool) -> Result<String> {
        let fault = |error: minijinja::Error| fault(self.template, &error);
        let tokens = Value::from_pairs(self.template.special_tokens.clone());
        // As in transformers, what is not there is none instead of undefined.
        let variables = context! {
            messages => values.messages[..count].to_vec(),
            tools => values.tools.clone(),
            documents => (),
            add_generation_prompt => prompts,
            ..tokens
        };
        let template = self.environment.get_template(NAME).map_err(fault)?;
        let mut text = Limited(Vec::new());
        template.render_captured_to(variables, &mut text).map_err(fault)?;
        String::from_utf8(text.0).map_err(|_| unusable(self.template, "its text is not UTF-8"))
    }
}

/// The block `generation`: its text between marks.
fn mark(state: &mut State<'_, '_>, arguments: Kwargs) -> Result<Value, minijinja::Error> {
    let caller: Value = arguments.get("caller")?;
    let [open, close] = MARKS;
    Ok(Value::from_safe_string(format!("{open}{}{close}", caller.call(state, &[])?)))
}

fn fault(template: &ChatTemplate, error: &minijinja::Error) -> Error {
    use std::error::Error as _;
    // What a writer refused is the cause of a general error.
    let reason = match (error.kind(), error.source()) {
        (ErrorKind::WriteFailure, Some(source)) => source.to_string(),
        _ => error.to_string(),
    };
    unusable(template, &reason)
}

fn unusable(template: &ChatTemplate, reason: &str) -> Error {
    moh_files::unusable(&template.path, format!("chat template: {reason}")).into()
}

/// A conversation in which the text of a turn cannot be found.
fn other_beginning(turn: usize) -> Error {
    Error::Invalid(format!(
        "the chat template's text of the messages up to message {}, or of those before it with a prompt, is not the \
         beginning of the whole text, so that the assistant's tokens are not known: give the template \
         {{% generation %}} blocks, or train on the last message alone with --chat-train last",
        turn + 1
    ))
}

impl std::fmt::Debug for Renderer<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Renderer").field("template", self.template).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
