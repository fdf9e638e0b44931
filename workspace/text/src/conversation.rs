//! A conversation: messages and tools as JSON, in the form that templates expect.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// ShareGPT's names of who speaks, with the roles of chat templates.
const SHARE_GPT_ROLES: [(&str, &str); 11] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("model", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("function", "tool"),
    ("function_response", "tool"),
    ("observation", "tool"),
];

/// Messages, and the tools that the assistant may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Objects with the string `role`.
    messages: Vec<Value>,
    /// A list of JSON schemas, or null.
    tools: Value,
}

impl Conversation {
    /// A conversation of messages with a role and a text.
    pub fn of_texts<'a>(messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let message = |(role, content): (&str, &str)| {
            Value::Object(Map::from_iter([
                ("role".to_owned(), role.into()),
                ("content".to_owned(), content.into()),
            ]))
        };
        Self { messages: messages.into_iter().map(message).collect(), tools: Value::Null }
    }

    /// A conversation of a list of messages, and of the list of tools or null. Messages are objects with the
    /// string `role`, or ShareGPT's with `from` and `value`. Tools may be a text with their JSON, as tables that
    /// have one type for each column store them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `messages` are not at least one such object, or `tools` no list.
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
        Ok(Self { messages: messages?, tools: self::tools(tools)? })
    }

    /// The messages.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// The tools; null if there are none.
    pub fn tools(&self) -> &Value {
        &self.tools
    }

    /// Calls `visit` with every text of the messages but their roles, those of tool calls too.
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

    /// Whether message `index` is the assistant's.
    pub(crate) fn is_answer(&self, index: usize) -> bool {
        self.messages.get(index).is_some_and(|message| message["role"] == "assistant")
    }

    /// Whether a string of the conversation, or a key, contains one of these characters.
    pub(crate) fn contains(&self, characters: &[char]) -> bool {
        fn within(value: &Value, characters: &[char]) -> bool {
            match value {
                Value::String(text) => text.contains(characters),
                Value::Array(values) => values.iter().any(|value| within(value, characters)),
                Value::Object(fields) => fields
                    .iter()
                    .any(|(key, value)| key.contains(characters) || within(value, characters)),
                _ => false,
            }
        }
        self.messages.iter().any(|message| within(message, characters))
            || within(&self.tools, characters)
    }
}

/// A message with a role; ShareGPT's becomes one.
fn message(mut fields: Map<String, Value>) -> Result<Value, String> {
    match fields.get("role") {
        Some(Value::String(_)) => return Ok(Value::Object(fields)),
        Some(_) => return Err("has a role that is not a string".to_owned()),
        None => {}
    }
    let known = |from: &str| SHARE_GPT_ROLES.iter().find(|(name, _)| *name == from);
    let role = match fields.get("from") {
        Some(Value::String(from)) => match known(from) {
            Some((_, role)) => *role,
            None => {
                return Err(format!("is from {from:?}, expected human, gpt, system or tool"));
            }
        },
        _ => return Err("has no role, and no \"from\" as ShareGPT's messages have".to_owned()),
    };
    let Some(value) = fields.shift_remove("value") else {
        return Err("has no \"value\", which ShareGPT's messages have beside \"from\"".to_owned());
    };
    fields.shift_remove("from");
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), value);
    message.extend(fields);
    Ok(Value::Object(message))
}

/// The tools as a list, or null.
fn tools(tools: Value) -> Result<Value> {
    let fault =
        || Error::Invalid("the tools are neither a list nor a text with a list in JSON".to_owned());
    let tools = match tools {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(&text).map_err(|_| fault())?,
        tools => tools,
    };
    match tools {
        // Templates ask whether there are tools by `tools is not none` as well as by `if tools`.
        Value::Array(list) if list.is_empty() => Ok(Value::Null),
        Value::Array(_) | Value::Null => Ok(tools),
        _ => Err(fault()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn share_gpt_messages_become_messages_with_roles() {
        let turns = json!([
            { "from": "system", "value": "s" }, { "from": "human", "value": "q" },
            { "from": "gpt", "value": "a", "weight": 1 }, { "from": "tool", "value": "t" },
        ]);
        let found = Conversation::from_json(turns, Value::Null).unwrap();
        let expected = json!([
            { "role": "system", "content": "s" }, { "role": "user", "content": "q" },
            { "role": "assistant", "content": "a", "weight": 1 }, { "role": "tool", "content": "t" },
        ]);
        assert_eq!(Value::from(found.messages().to_vec()), expected);
        assert_eq!(
            Conversation::of_texts([("user", "q")]),
            Conversation::from_json(json!([{ "role": "user", "content": "q" }]), json!([]))
                .unwrap()
        );
    }

    #[test]
    fn tools_are_a_list_or_its_json() {
        let messages = json!([{ "role": "user", "content": "q" }]);
        let tools = |tools| {
            let made = Conversation::from_json(messages.clone(), tools);
            made.map(|made| made.tools().clone()).map_err(|error| error.to_string())
        };
        assert_eq!(tools(json!([{ "name": "f" }])), Ok(json!([{ "name": "f" }])));
        assert_eq!(tools(json!("[{\"name\": \"f\"}]")), Ok(json!([{ "name": "f" }])));
        for none in [json!(null), json!([]), json!(""), json!("null")] {
            assert_eq!(tools(none), Ok(Value::Null));
        }
        for broken in [json!({}), json!(3), json!("["), json!("{}")] {
            assert!(tools(broken).unwrap_err().contains("the tools are neither a list"));
        }
    }

    #[test]
    fn what_is_no_conversation_is_named() {
        for (messages, expected) in [
            (json!("hello"), "the messages are not a list"),
            (json!([]), "the conversation has no message"),
            (json!(["hello"]), "message 1 of the conversation is not an object"),
            (
                json!([{ "role": "user" }, { "content": "a" }]),
                "message 2 of the conversation has no role",
            ),
            (json!([{ "role": 1 }]), "has a role that is not a string"),
            (json!([{ "from": "narrator", "value": "a" }]), "is from \"narrator\""),
            (json!([{ "from": "gpt" }]), "has no \"value\""),
        ] {
            let error = Conversation::from_json(messages, Value::Null).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
