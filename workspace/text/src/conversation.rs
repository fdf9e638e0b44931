//! A conversation: messages and tools as JSON, in the form in which transformers' `apply_chat_template` passes them to
//! templates.

use serde_json::{Map, Value};

use crate::numbers::beyond_json;
use crate::{Error, Result};

/// The names of the assistant's reasoning. transformers passes it to templates under the first two, whatever its name.
pub(crate) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Keys of messages that are obeyed or that have no text, even if the template does not read them.
const KNOWN_KEYS: [&str; 6] = ["role", "content", "name", "tool_call_id", "weight", "train"];

/// The key of a record with further variables of the template, as in TRL, and the names that may not be variables.
pub(crate) const VARIABLES: &str = "chat_template_kwargs";
const NO_VARIABLES: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// Messages, and the tools that the assistant may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Objects with the string `role`.
    messages: Vec<Value>,
    /// A list of JSON schemas, or null.
    tools: Value,
    pub(crate) variables: Map<String, Value>,
    /// Unread keys beside the messages.
    unread: Vec<String>,
    /// Whether contents adapt to the template: parts are joined to a text, or a text becomes a part.
    pub(crate) adapts_content: bool,
}

impl Conversation {
    /// Creates a conversation of messages with a role and a text.
    pub fn of_texts<'a>(messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let message = |(role, content): (&str, &str)| {
            Value::Object(Map::from_iter([
                ("role".to_owned(), role.into()),
                ("content".to_owned(), content.into()),
            ]))
        };
        let messages = messages.into_iter().map(message).collect();
        Self::new(messages, Value::Null)
    }

    fn new(messages: Vec<Value>, tools: Value) -> Self {
        let (variables, unread, adapts_content) = (Map::new(), Vec::new(), false);
        Self { messages, tools, variables, unread, adapts_content }
    }

    /// Creates a conversation of a list of messages, and of the list of tools or null. Messages are objects with the
    /// string `role`, or ShareGPT's with `from` and `value`. Null keys are removed. The assistant's reasoning gets all
    /// names that templates know. Tools may be a text with their JSON, as in tables with one type for each column.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `messages` is not a list of at least one such object, or if `tools` is not a list.
    pub fn from_json(messages: Value, tools: Value) -> Result<Self> {
        let Value::Array(messages) = messages else {
            return Err(Error::Invalid("the messages are not a list".to_owned()));
        };
        if messages.is_empty() {
            return Err(Error::Invalid("the conversation has no message".to_owned()));
        }
        let messages = messages.into_iter().enumerate();
        let messages: Result<Vec<Value>> = messages
            .map(|(index, message)| {
                let fault = |reason: &str| {
                    Error::Invalid(format!("message {} of the conversation {reason}", index + 1))
                };
                match message {
                    Value::Object(fields) => self::message(fields).map_err(|reason| fault(&reason)),
                    _ => Err(fault("is not an object")),
                }
            })
            .collect();
        Ok(Self::new(messages?, self::tools(tools)?))
    }

    /// Creates a conversation of a JSON object with `messages`, `tools`, `chat_template_kwargs` (variables of the
    /// template) and `unread` (names of other keys). Parses the JSON as Python: with integers of any size and NaN.
    /// Fails as [`Conversation::from_json`].
    pub fn parse(text: &str) -> Result<Self> {
        let mut record: Value = serde_json::from_str(&beyond_json(text))
            .map_err(|error| Error::Invalid(format!("not a conversation in JSON: {error}")))?;
        let mut take = |name: &str| record.get_mut(name).map_or(Value::Null, Value::take);
        let mut conversation = Self::from_json(take("messages"), take("tools"))?;
        conversation.variables = match take(VARIABLES) {
            Value::Null => Map::new(),
            Value::Object(variables)
                if !NO_VARIABLES.iter().any(|name| variables.contains_key(*name)) =>
            {
                variables
            }
            _ => {
                return Err(Error::Invalid(format!(
                    "{VARIABLES:?} is no object of variables for the chat template, without {}",
                    NO_VARIABLES.join(", ")
                )));
            }
        };
        let has_system = conversation.messages.iter().any(|message| message["role"] == "system");
        let unread = take("unread");
        let unread = unread.as_array().into_iter().flatten().filter_map(Value::as_str);
        let unread = unread.filter(|key| *key != "system" || !has_system);
        conversation.unread = unread.map(|key| format!("{key}, beside the messages")).collect();
        Ok(conversation)
    }

    /// Adapts each content to the template: a list of parts of text becomes a text, or a text becomes a list.
    #[must_use]
    pub fn with_adapted_content(self) -> Self {
        Self { adapts_content: true, ..self }
    }

    /// Returns the messages.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Returns the tools, or null without tools.
    pub fn tools(&self) -> &Value {
        &self.tools
    }

    /// Calls `visit` with every text of the messages except their roles, also with the texts of tool calls.
    pub fn visit_texts(&self, visit: &mut dyn FnMut(&str)) {
        fn within(value: &Value, visit: &mut dyn FnMut(&str)) {
            match value {
                Value::String(text) => visit(text),
                Value::Array(values) => values.iter().for_each(|value| within(value, visit)),
                Value::Object(fields) => fields.values().for_each(|value| within(value, visit)),
                _ => {}
            }
        }
        let fields = self.messages.iter().filter_map(Value::as_object).flatten();
        fields.filter(|(key, _)| *key != "role").for_each(|(_, value)| within(value, visit));
    }

    /// Returns whether message `index` is the assistant's.
    pub(crate) fn is_answer(&self, index: usize) -> bool {
        self.messages.get(index).is_some_and(|message| message["role"] == "assistant")
    }

    /// Returns whether a model is trained on message `index`: a message of the assistant, unless its `weight` (OpenAI's
    /// key) or its `train` (axolotl's key) says no.
    pub(crate) fn is_trained(&self, index: usize) -> bool {
        let says_no = |key: &str| {
            let value = &self.messages[index][key];
            value.as_f64() == Some(0.0) || value.as_bool() == Some(false)
        };
        self.is_answer(index) && !says_no("weight") && !says_no("train")
    }

    /// Returns the unread keys beside the messages. Also returns each message's keys that have a value, that the
    /// template does not name, and that have no meaning here.
    pub(crate) fn unnamed_keys<'s>(
        &'s self,
        is_named: impl Fn(&str) -> bool + 's,
    ) -> impl Iterator<Item = &'s str> {
        let fields = self.messages.iter().filter_map(Value::as_object).flatten();
        let unnamed = fields.filter(move |(key, value)| {
            let key = key.as_str();
            // Reasoning with one of its names has all of them.
            let is_reasoning = REASONING.contains(&key);
            let is_read =
                is_named(key) || is_reasoning && REASONING.iter().any(|key| is_named(key));
            !KNOWN_KEYS.contains(&key) && !is_read && !is_empty(value) && key != "thinking"
        });
        self.unread.iter().chain(unnamed.map(|(key, _)| key)).map(String::as_str)
    }

    /// Returns whether a string of the conversation, or a key, contains one of these characters.
    pub(crate) fn contains(&self, characters: &[char]) -> bool {
        let values = self.messages.iter().chain([&self.tools]).chain(self.variables.values());
        // JSON does not escape these characters.
        values.map(Value::to_string).any(|text| text.contains(characters))
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Returns a message with a role. Converts ShareGPT's messages.
fn message(mut fields: Map<String, Value>) -> Result<Value, String> {
    fields.retain(|_, value| !value.is_null());
    let weight =
        fields.get("weight").is_none_or(|weight| matches!(weight.as_f64(), Some(0.0 | 1.0)));
    if !weight {
        return Err("has a weight that is neither 0 nor 1".to_owned());
    }
    if !fields.get("train").is_none_or(Value::is_boolean) {
        return Err("has a \"train\" that is neither true nor false".to_owned());
    }
    let fields = match fields.get("role") {
        Some(Value::String(_)) => fields,
        Some(_) => return Err("has a role that is not a string".to_owned()),
        None => share_gpt(fields)?,
    };
    Ok(Value::Object(with_reasoning(fields)))
}

/// Returns the message with the assistant's reasoning under all its names, in transformers' order of keys.
fn with_reasoning(mut fields: Map<String, Value>) -> Map<String, Value> {
    let Some(thought) = REASONING.iter().find_map(|name| fields.get(*name)).cloned() else {
        return fields;
    };
    let older = fields.shift_remove("thinking").unwrap_or_else(|| thought.clone());
    fields.shift_insert(0, "thinking".to_owned(), older);
    fields.insert("reasoning_content".to_owned(), thought);
    fields
}

fn share_gpt(mut fields: Map<String, Value>) -> Result<Map<String, Value>, String> {
    let Some(Value::String(from)) = fields.get("from") else {
        return Err("has no role, and no \"from\" as ShareGPT's messages have".to_owned());
    };
    let role = match &from[..] {
        "human" | "user" => "user",
        "gpt" | "chatgpt" | "model" | "assistant" => "assistant",
        "system" => "system",
        "tool" | "function" | "function_response" | "observation" => "tool",
        _ => return Err(format!("is from {from:?}, expected human, gpt, system or tool")),
    };
    let Some(value) = fields.shift_remove("value") else {
        return Err("has no \"value\", which ShareGPT's messages have beside \"from\"".to_owned());
    };
    fields.shift_remove("from");
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), value);
    message.extend(fields);
    Ok(message)
}

fn tools(tools: Value) -> Result<Value> {
    let fault =
        || Error::Invalid("the tools are neither a list nor a text with a list in JSON".to_owned());
    let tools = match tools {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(&beyond_json(&text)).map_err(|_| fault())?,
        tools => tools,
    };
    match tools {
        // Templates ask whether there are tools by `tools is not none` as well as by `if tools`.
        Value::Array(list) if list.is_empty() => Ok(Value::Null),
        Value::Array(_) | Value::Null => Ok(tools),
        _ => Err(fault()),
    }
}
