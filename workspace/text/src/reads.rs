//! Finds the form in which a template reads messages, by rendering short messages. The content is a text or a list of
//! parts. The arguments of a tool call are a text or an object.

use serde_json::{Value, json};

use crate::numbers::beyond_json;
use crate::{Error, Result};

/// A word that no template has.
const WORD: &str = "Qv7zk";
/// The tested roles. Other roles are read as the first role.
const ROLES: [&str; 4] = ["user", "system", "assistant", "tool"];

/// Renders messages with tools. Returns `None` if the template rejects them.
type Render<'r> = dyn FnMut(&[Value], &Value) -> Option<String> + 'r;

#[derive(Debug)]
pub(crate) struct Reads {
    /// Whether arguments as a text are written unchanged.
    arguments_as_text: bool,
    content: [Content; ROLES.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Text,
    Parts,
    Either,
}

impl Reads {
    pub(crate) fn find(render: &mut Render<'_>) -> Self {
        let mut user = Content::Text;
        let content = ROLES.map(|role| {
            let found = content(role, render).unwrap_or(user);
            if role == ROLES[0] {
                user = found;
            }
            found
        });
        let arguments = json!({ WORD: WORD });
        // As both Python and JavaScript write it with spaces.
        let text = format!("{{\"{WORD}\": \"{WORD}\"}}");
        let mut written = |arguments: Value| render(&asked_and(call(arguments)), &tools());
        let arguments_as_text = match written(Value::from(text.as_str())) {
            Some(found) => found.contains(&text) || written(arguments).is_none(),
            None => false,
        };
        Self { arguments_as_text, content }
    }

    fn of_role(&self, message: &Value) -> Content {
        let role = ROLES.iter().position(|role| message["role"] == *role);
        self.content[role.unwrap_or(0)]
    }

    /// Returns whether the content is a list where the template writes a text, or a text where it reads a list.
    pub(crate) fn misreads(&self, message: &Value) -> bool {
        match &message["content"] {
            Value::Array(_) => self.of_role(message) == Content::Text,
            Value::String(text) => self.of_role(message) == Content::Parts && !text.is_empty(),
            _ => false,
        }
    }

    /// Converts a message to the form that the template reads: the arguments of calls, which must be JSON, and with
    /// `adapts_content` the content.
    pub(crate) fn adapted(&self, message: &Value, adapts_content: bool) -> Result<Value> {
        let mut message = message.clone();
        let reads = self.of_role(&message);
        match message.get_mut("content").filter(|_| adapts_content) {
            Some(content @ Value::Array(_)) if reads == Content::Text => {
                let parts = content.as_array().into_iter().flatten();
                let texts: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
                *content = texts.join("\n").into();
            }
            Some(content @ Value::String(_)) if reads == Content::Parts => {
                *content = json!([{ "type": "text", "text": content.take() }]);
            }
            _ => {}
        }
        if self.arguments_as_text {
            return Ok(message);
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let call = if call["function"].is_object() { &mut call["function"] } else { call };
            if let Some(Value::String(text)) = call.get("arguments") {
                let parsed = match text.trim().is_empty() {
                    true => Ok(json!({})),
                    false => serde_json::from_str(&beyond_json(text)),
                };
                call["arguments"] = parsed.map_err(|error| {
                    Error::Invalid(format!("the arguments of a tool call are not JSON: {error}"))
                })?;
            }
        }
        Ok(message)
    }
}

fn asked_and(message: Value) -> Vec<Value> {
    vec![json!({ "role": "user", "content": "a" }), message]
}

fn call(arguments: Value) -> Value {
    let function = json!({ "name": "f", "arguments": arguments });
    let call = json!([{ "id": "call00000", "type": "function", "function": function }]);
    json!({ "role": "assistant", "content": "", "tool_calls": call })
}

fn tools() -> Value {
    let parameters = json!({ "type": "object", "properties": {} });
    json!([{ "type": "function", "function": { "name": "f", "description": "f", "parameters": parameters } }])
}

/// Returns the form in which the template reads a role's content, or `None` if it rejects every form.
fn content(role: &str, render: &mut Render<'_>) -> Option<Content> {
    let mut writes = |content: Value| {
        let message =
            json!({ "role": role, "content": content, "tool_call_id": "call00000", "name": "f" });
        let messages = match role {
            "user" => vec![message],
            "system" => vec![message, json!({ "role": "user", "content": "a" })],
            "tool" => {
                let mut messages = asked_and(call(json!({})));
                messages.push(message);
                messages
            }
            _ => asked_and(message),
        };
        let text = render(&messages, &Value::Null)?;
        // A list that is printed has its keys in quotes.
        let is_printed = text.contains("'type'") || text.contains("\"type\": \"text\"");
        Some(text.contains(WORD) && !is_printed)
    };
    let text = writes(WORD.into()) == Some(true);
    let list = writes(json!([{ "type": "text", "text": WORD }])) == Some(true);
    match (text, list) {
        (true, true) => Some(Content::Either),
        (true, false) => Some(Content::Text),
        (false, true) => Some(Content::Parts),
        (false, false) => None,
    }
}
