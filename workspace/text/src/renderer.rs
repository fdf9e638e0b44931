//! Renders conversations, and finds the assistant's part of the rendered text.
//!
//! A template with blocks `{% generation %}` marks the text that the assistant generates. With other templates, a
//! turn's text starts after its prompt: the text of the messages before the turn, with `add_generation_prompt`. It ends
//! with the text of the messages up to and including the turn. Both texts must be beginnings of the whole text.
//!
//! [`crate::bounds`] bounds the work of a rendering by the length of its conversation.
//! [`RenderThreads`](crate::RenderThreads) also bound its time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::machinery::{self, CompiledTemplate, TemplateConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, merge_maps};
use minijinja::{AutoEscape, Environment, ErrorKind, State, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::generation::{FUNCTION, MARKS, take_marks};
use crate::reads::Reads;
use crate::template::Source;
use crate::{ChatTemplate, Conversation, Error, Result, bounds, python};

/// Maximum instructions of a rendering: a least number, plus one for `WORK_OF_BYTES` bytes of the conversation, plus
/// `WORK_OF_MESSAGE` for each of at most `MAX_COUNTED_MESSAGES` messages. An instruction also stands for 64 bytes of
/// memory.
const LEAST_WORK: u64 = 4_000_000;
const WORK_OF_BYTES: u64 = 2;
const WORK_OF_MESSAGE: u64 = 1_000;
const MAX_COUNTED_MESSAGES: u64 = 12_000;
/// Messages that double the work that an empty conversation may take.
pub const MESSAGES_OF_LEAST_WORK: usize = (LEAST_WORK / WORK_OF_MESSAGE) as usize;
const NAME: &str = "chat";

/// Which of the assistant's turns a model is trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedTurns {
    /// All turns.
    #[default]
    All,
    /// The last message, which must be the assistant's. For templates that write earlier turns differently, for example
    /// without the assistant's reasoning.
    Last,
}

/// A rendered conversation, and the parts of it that a model is trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingText {
    /// The text.
    pub text: String,
    /// The ranges of the assistant's bytes, in increasing order.
    pub trained: Vec<Range<usize>>,
    /// Whether the template itself marked the ranges. Otherwise they may end with text after the token that ends a
    /// turn.
    pub is_exact: bool,
    /// Parts of the conversation that are not read, or not trained on.
    pub notes: ChatNotes,
}

/// Parts of conversations that are not read, or not trained on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatNotes {
    /// Messages with a list as content where the template writes a text, or the reverse.
    pub misread: u64,
    /// The keys that the template does not name, each with the number of messages, or of conversations, that have it.
    pub unnamed: BTreeMap<String, u64>,
    /// Conversations without a token that is trained on.
    #[serde(default)]
    pub untrained: u64,
}

/// A compiled template; threads may share it.
pub struct Renderer<'a> {
    environment: Environment<'a>,
    special_tokens: Value,
    default: Compiled<'a>,
    /// The template of conversations with tools, if it is another.
    for_tools: Option<Compiled<'a>>,
    pub(crate) begun: Arc<AtomicU64>,
}

struct Compiled<'a> {
    source: &'a Source,
    code: CompiledTemplate<'a>,
}

/// A conversation as values of the engine, which are cheap to copy.
struct Values {
    messages: Vec<Value>,
    tools: Value,
    variables: Value,
    work: u64,
}

impl<'a> Renderer<'a> {
    pub(crate) fn new(template: &'a ChatTemplate) -> Result<Self> {
        let mut environment = Environment::new();
        bounds::install(&mut environment);
        environment.set_formatter(python::print);
        environment.add_filter("tojson", python::tojson);
        environment.add_function("raise_exception", |message: String| {
            Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function(FUNCTION, mark);
        Ok(Self {
            environment,
            special_tokens: Value::from_pairs(template.special_tokens.clone()),
            default: Compiled::new(&template.default)?,
            for_tools: template.for_tools.as_ref().map(Compiled::new).transpose()?,
            begun: Arc::default(),
        })
    }

    /// Renders a conversation. With `prompts`, the text ends where the model's next answer starts.
    ///
    /// # Errors
    /// Fails if the template rejects the conversation, does not suit it, or takes too much work.
    pub fn render(&self, conversation: &Conversation, prompts: bool) -> Result<String> {
        let compiled = self.template_of(conversation);
        let values = self.values(compiled, conversation)?;
        let marked = self.render_first(compiled, &values, values.messages.len(), prompts)?;
        Ok(if compiled.source.has_generation { take_marks(&marked).0 } else { marked })
    }

    /// Renders a whole conversation, and finds the assistant's text in it.
    ///
    /// # Errors
    /// As [`Renderer::render`]. Also fails if the template does not separate the assistant's text from the rest.
    pub fn training_text(
        &self,
        conversation: &Conversation,
        turns: TrainedTurns,
    ) -> Result<TrainingText> {
        let compiled = self.template_of(conversation);
        let values = self.values(compiled, conversation)?;
        let count = values.messages.len();
        let last = count.saturating_sub(1);
        if turns == TrainedTurns::Last && !conversation.is_answer(last) {
            return Err(Error::Invalid("the last message is not the assistant's".to_owned()));
        }
        let text = self.render_first(compiled, &values, count, false)?;
        let mut notes = self.notes(compiled, conversation);
        let is_exact = compiled.source.has_generation;
        let (text, trained) = match is_exact {
            true => marked_text(&text, conversation, turns)?,
            false => {
                let trained = self.answers(compiled, &values, &text, conversation, turns)?;
                (text, trained)
            }
        };
        notes.untrained = u64::from(trained.is_empty());
        Ok(TrainingText { text, trained, is_exact, notes })
    }

    /// Counts the parts of a conversation that the template does not read.
    fn notes(&self, compiled: &Compiled<'a>, conversation: &Conversation) -> ChatNotes {
        let reads = self.reads(compiled);
        let misread = conversation.messages().iter().filter(|message| reads.misreads(message));
        let mut notes = ChatNotes { misread: misread.count() as u64, ..ChatNotes::default() };
        for key in conversation.unnamed_keys(|key| compiled.source.names.contains(key)) {
            *notes.unnamed.entry(key.to_owned()).or_default() += 1;
        }
        notes
    }

    /// Finds the assistant's turns in a rendered conversation: each is the text between the renderings before and
    /// after its message.
    fn answers(
        &self,
        compiled: &Compiled<'a>,
        values: &Values,
        text: &str,
        conversation: &Conversation,
        turns: TrainedTurns,
    ) -> Result<Vec<Range<usize>>> {
        let count = values.messages.len();
        let last = count.saturating_sub(1);
        let first = if turns == TrainedTurns::Last { last } else { 0 };
        let mut trained = Vec::new();
        for index in (first..count).filter(|&index| conversation.is_trained(index)) {
            let before = self.render_first(compiled, values, index, true)?;
            // The turn of the last message ends with the text.
            let through = match index == last {
                true => text.len(),
                false => {
                    let through = self.render_first(compiled, values, index + 1, false)?;
                    if !text.starts_with(&through) {
                        return Err(other_beginning(index, index < last));
                    }
                    through.len()
                }
            };
            if !text.starts_with(&before) || before.len() > through {
                return Err(other_beginning(index, index < last));
            }
            trained.push(before.len()..through);
        }
        Ok(trained)
    }

    fn template_of(&self, conversation: &Conversation) -> &Compiled<'a> {
        match &self.for_tools {
            Some(compiled) if !conversation.tools().is_null() => compiled,
            _ => &self.default,
        }
    }

    fn reads(&self, compiled: &Compiled<'a>) -> &'a Reads {
        compiled.source.reads.get_or_init(|| {
            Reads::find(&mut |messages, tools| {
                let values =
                    Values::new(messages.iter().map(Cow::Borrowed), tools, &Map::new()).ok()?;
                self.render_first(compiled, &values, messages.len(), false).ok()
            })
        })
    }

    fn values(&self, compiled: &Compiled<'a>, conversation: &Conversation) -> Result<Values> {
        let adapts = conversation.adapts_content;
        let adapted = conversation.messages().iter().map(|message| {
            let has = |key: &str| message.get(key).is_some();
            Ok(match adapts && has("content") || has("tool_calls") {
                true => Cow::Owned(self.reads(compiled).adapted(message, adapts)?),
                false => Cow::Borrowed(message),
            })
        });
        let adapted = adapted.collect::<Result<Vec<_>>>()?.into_iter();
        Values::new(adapted, conversation.tools(), &conversation.variables)
    }

    /// Renders the first `count` messages, with the marks of blocks `generation`.
    fn render_first(
        &self,
        compiled: &Compiled<'a>,
        values: &Values,
        count: usize,
        prompts: bool,
    ) -> Result<String> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let variables = context! {
            messages => values.messages[..count].to_vec(),
            tools => values.tools.clone(),
            add_generation_prompt => prompts,
            ..merge_maps([self.special_tokens.clone(), values.variables.clone()])
        };
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(values.work));
        let CompiledTemplate { instructions, blocks, .. } = &compiled.code;
        let mut text = String::new();
        let mut out = machinery::make_string_output(&mut text);
        let done = machinery::eval(
            &environment,
            instructions,
            variables,
            blocks,
            &mut out,
            AutoEscape::None,
        );
        done.map_err(|error| fault(compiled.source, &error, values.work))?;
        Ok(text)
    }
}

impl<'a> Compiled<'a> {
    fn new(source: &'a Source) -> Result<Self> {
        let refused = |error: minijinja::Error| {
            Error::from(moh_files::unusable(&source.path, format!("chat template: {error}")))
        };
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let config = TemplateConfig {
            syntax_config: syntax.map_err(refused)?,
            default_auto_escape: Arc::new(|_| AutoEscape::None),
        };
        let mut code = CompiledTemplate::new(NAME, &source.calls, &config).map_err(refused)?;
        bounds::replace(&mut code.instructions).map_err(refused)?;
        Ok(Self { source, code })
    }
}

impl Values {
    fn new<'m>(
        messages: impl Iterator<Item = Cow<'m, Json>>,
        tools: &Json,
        variables: &Map<String, Json>,
    ) -> Result<Self> {
        let mut bytes = bytes_of(tools);
        let messages = messages.map(|message| {
            bytes += bytes_of(&message);
            python::from_json(&message).map_err(Error::Invalid)
        });
        let messages = messages.collect::<Result<Vec<_>>>()?;
        let counted = (messages.len() as u64).min(MAX_COUNTED_MESSAGES);
        let work = LEAST_WORK + bytes / WORK_OF_BYTES + counted * WORK_OF_MESSAGE;
        let tools = python::from_json(tools).map_err(Error::Invalid)?;
        let variables =
            variables.iter().map(|(key, value)| Ok((&key[..], python::from_json(value)?)));
        // As in transformers, a missing variable is null instead of undefined.
        let variables = [Ok(("documents", ().into()))].into_iter().chain(variables);
        let variables = variables.collect::<Result<Vec<_>, _>>().map_err(Error::Invalid)?;
        Ok(Self { messages, tools, variables: Value::from_pairs(variables), work })
    }
}

/// Counts the bytes of a value's texts, and a few bytes for each value.
fn bytes_of(value: &Json) -> u64 {
    8 + match value {
        Json::String(text) => text.len() as u64,
        Json::Array(values) => values.iter().map(bytes_of).sum(),
        Json::Object(fields) => {
            fields.iter().map(|(key, value)| key.len() as u64 + bytes_of(value)).sum()
        }
        _ => 0,
    }
}

/// Returns a text without its marks, and the ranges between them that are trained on.
fn marked_text(
    marked: &str,
    conversation: &Conversation,
    turns: TrainedTurns,
) -> Result<(String, Vec<Range<usize>>)> {
    if conversation.contains(&MARKS) {
        return Err(Error::Invalid(
            "the conversation contains U+FDD0 or U+FDD1, which are no characters: remove them"
                .to_owned(),
        ));
    }
    let (text, blocks) = take_marks(marked);
    Ok((text, trained_blocks(blocks, conversation, turns)?))
}

/// Returns the ranges of the blocks `generation` of turns that are trained on.
fn trained_blocks(
    mut blocks: Vec<Range<usize>>,
    conversation: &Conversation,
    turns: TrainedTurns,
) -> Result<Vec<Range<usize>>> {
    let count = conversation.messages().len();
    let answers: Vec<usize> = (0..count).filter(|&index| conversation.is_answer(index)).collect();
    let first = if turns == TrainedTurns::Last { count.saturating_sub(1) } else { 0 };
    let is_trained = |index: usize| conversation.is_trained(index) && index >= first;
    let is_one_each = blocks.len() == answers.len();
    if is_one_each {
        let mut answers = answers.iter();
        blocks.retain(|_| answers.next().is_some_and(|&index| is_trained(index)));
    } else if let Some(index) = answers.iter().find(|&&index| !conversation.is_trained(index)) {
        return Err(Error::Invalid(format!(
            "message {} is not to be trained on, and the chat template writes {} blocks {{% generation %}} for {} \
             messages of the assistant's, so that its block is not known: leave out its weight and train",
            index + 1,
            blocks.len(),
            answers.len()
        )));
    }
    let mut joined = Vec::<Range<usize>>::new();
    for block in blocks.into_iter().filter(|block| !block.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == block.start => last.end = block.end,
            _ => joined.push(block),
        }
    }
    if turns == TrainedTurns::Last && !is_one_each {
        joined.drain(..joined.len().saturating_sub(1));
    }
    Ok(joined)
}

/// Renders a block `generation`: its text between marks.
fn mark(state: &mut State<'_, '_>, arguments: Kwargs) -> Result<Value, minijinja::Error> {
    let caller: Value = arguments.get("caller")?;
    let [open, close] = MARKS;
    Ok(Value::from_safe_string(format!("{open}{}{close}", caller.call(state, &[])?)))
}

/// Returns the error of a rendering. It names the template's file without a folder: a server shows it to its clients.
fn fault(source: &Source, error: &minijinja::Error, work: u64) -> Error {
    let reason = match error.kind() {
        ErrorKind::OutOfFuel => format!(
            "it takes more than the {work} steps, each with 64 bytes, that a conversation of this length may take: \
             look for a loop that does not end or a value that grows in it"
        ),
        ErrorKind::UnknownFunction if error.detail().is_some_and(|it| it.starts_with("strftime_now ")) => {
            "strftime_now is not defined, so that a conversation has the same text on every day: edit the template to \
             ask whether `strftime_now is defined`, and to write a date of your choice if it is not"
                .to_owned()
        }
        _ => error.to_string(),
    };
    let name = source.path.file_name().map_or(source.path.as_path(), Path::new);
    moh_files::unusable(name, format!("chat template: {reason}")).into()
}

/// Returns the error of a turn with unknown text. `helps` is whether training on the last message alone would help.
fn other_beginning(turn: usize, helps: bool) -> Error {
    let more = match helps {
        true => ", or train on the last message alone with --chat-train last",
        false => {
            ": its prompt for an answer may hold what the answer does not begin with, such as <think>"
        }
    };
    Error::Invalid(format!(
        "the chat template's text of the messages up to message {}, or of those before it with a prompt, is not the \
         beginning of the whole text, so that the assistant's tokens are not known: give the template \
         {{% generation %}} blocks{more}",
        turn + 1
    ))
}
