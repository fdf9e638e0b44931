//! The text of a record: the option `--field` names a field, a path `a.b` of fields in fields, or a template such as
//! `{title}: {text}`. One type for JSON objects and the columns of tables.

mod json;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

pub(crate) use self::json::list_of_records;

use crate::conversation::VARIABLES;
use crate::prepare::{Error, Result};

const MAX_SHOWN_KEYS: usize = 5;

#[derive(Clone, Debug)]
pub(crate) struct Fields {
    /// Each wanted field, once.
    paths: Vec<String>,
    parts: Vec<TemplatePart>,
    tree: Node,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Field,
    Template,
    /// The messages of a conversation and the tools: the text is an object of JSON with both.
    Chat,
}

/// The fields of a conversation besides its messages: the tools that the assistant may call, variables of the template,
/// and fields that [`crate::ChatNotes`] names because nothing reads them.
const OF_CHAT: [&str; 5] = ["tools", VARIABLES, "documents", "functions", "system"];

#[derive(Clone, Debug)]
enum TemplatePart {
    Literal(String),
    Field(usize),
}

/// A key of objects, with its field and the keys in it.
#[derive(Clone, Debug, Default)]
struct Node {
    /// An index of the list of [`Slots`].
    slot: Option<usize>,
    keys: Vec<(String, Node)>,
}

/// The values of a record's fields, two for each path: the value of the key that is literally the path, and the value
/// of the key at the path's end.
pub(crate) type Slots<'a> = Vec<Option<Value<'a>>>;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Text(&'a str),
    /// A string as it is in JSON.
    Escaped(&'a str),
    /// A number or a truth value as JSON writes it.
    Scalar(Cow<'a, str>),
    /// A float that JSON cannot write, as Python writes it.
    NotFinite(&'static str),
    Null,
    /// An object or a list.
    Json(Cow<'a, str>),
    /// Another value without a text.
    Other,
}

/// The nouns for a kind of records in errors.
#[derive(Clone, Copy)]
pub(crate) struct Nouns {
    pub(crate) field: &'static str,
    /// The container of the fields.
    pub(crate) record: &'static str,
}

pub(crate) const LINE: Nouns = Nouns { field: "field", record: "line" };
pub(crate) const ELEMENT: Nouns = Nouns { field: "field", record: "element" };
pub(crate) const ROW: Nouns = Nouns { field: "column", record: "table" };

impl Fields {
    pub(crate) fn parse(argument: &str) -> Result<Self> {
        let is_template = argument.contains(['{', '}']);
        let mut fields = Self::none(if is_template { Kind::Template } else { Kind::Field });
        if is_template {
            fields.template(argument).map_err(|problem| {
                Error::Invalid(format!(
                    "--field {argument:?}: {problem}; a template is text with names of fields in \
                     braces, as \"{{title}}: {{text}}\", and {{{{ and }}}} for braces"
                ))
            })?;
        } else {
            fields.push_path(argument);
        }
        fields.grow_tree();
        Ok(fields)
    }

    /// Returns the fields of a conversation: its messages, in a field or at the end of a path of fields, and all
    /// others.
    pub(crate) fn of_chat(messages: &str) -> Self {
        let mut fields = Self::none(Kind::Chat);
        fields.paths.extend([messages].iter().chain(&OF_CHAT).map(|&path| path.to_owned()));
        fields.grow_tree();
        fields
    }

    fn none(kind: Kind) -> Self {
        Self { paths: Vec::new(), parts: Vec::new(), tree: Node::default(), kind }
    }

    fn grow_tree(&mut self) {
        for (index, path) in self.paths.iter().enumerate() {
            self.tree.insert(&[path], 2 * index);
            let keys: Vec<&str> = path.split('.').collect();
            if keys.len() > 1 {
                self.tree.insert(&keys, 2 * index + 1);
            }
        }
    }

    fn template(&mut self, argument: &str) -> Result<(), &'static str> {
        let mut literal = String::new();
        let mut rest = argument;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let (brace, after) = rest[at..].split_at(1);
            if let Some(doubled) = after.strip_prefix(brace) {
                literal.push_str(brace);
                rest = doubled;
                continue;
            }
            if brace == "}" {
                return Err("a brace is closed that is not open");
            }
            let (name, after) = after.split_once('}').ok_or("a brace is not closed")?;
            if name.is_empty() || name.contains('{') {
                return Err("braces without a name in them");
            }
            self.push_literal(&mut literal);
            self.push_path(name);
            rest = after;
        }
        literal.push_str(rest);
        self.push_literal(&mut literal);
        if self.paths.is_empty() {
            return Err("it names no field");
        }
        Ok(())
    }

    fn push_literal(&mut self, literal: &mut String) {
        if !literal.is_empty() {
            self.parts.push(TemplatePart::Literal(std::mem::take(literal)));
        }
    }

    fn push_path(&mut self, path: &str) {
        let index = self.paths.iter().position(|known| known == path).unwrap_or_else(|| {
            self.paths.push(path.to_owned());
            self.paths.len() - 1
        });
        self.parts.push(TemplatePart::Field(index));
    }

    pub(crate) fn paths(&self) -> &[String] {
        &self.paths
    }

    /// Returns whether numbers and truth values also have a text.
    pub(crate) fn is_template(&self) -> bool {
        self.kind == Kind::Template
    }

    /// Returns whether lists have a text, as messages do.
    pub(crate) fn is_chat(&self) -> bool {
        self.kind == Kind::Chat
    }

    pub(crate) fn is_optional(&self, path: &str) -> bool {
        self.is_chat() && OF_CHAT.contains(&path)
    }

    pub(crate) fn slots<'a>(&self) -> Slots<'a> {
        vec![None; 2 * self.paths.len()]
    }

    /// Returns the text of a record with these values. `keys` returns the record's keys, for errors.
    pub(crate) fn text<'a>(
        &'a self,
        slots: &Slots<'a>,
        nouns: Nouns,
        keys: impl Fn() -> Vec<String>,
    ) -> Result<Cow<'a, str>, String> {
        if self.is_chat() {
            return self.conversation(slots, nouns, keys).map(Cow::Owned);
        }
        let part = |part: &'a TemplatePart| match part {
            TemplatePart::Literal(text) => Ok(Cow::Borrowed(text.as_str())),
            TemplatePart::Field(index) => self.field_text(*index, slots, nouns, &keys),
        };
        match &self.parts[..] {
            [only] => part(only),
            parts => {
                let mut text = String::new();
                for found in parts.iter().map(part) {
                    text.push_str(&found?);
                }
                Ok(Cow::Owned(text))
            }
        }
    }

    fn field_text<'a>(
        &self,
        index: usize,
        slots: &Slots<'a>,
        nouns: Nouns,
        keys: &impl Fn() -> Vec<String>,
    ) -> Result<Cow<'a, str>, String> {
        let Some(value) = value_of(slots, index) else {
            return Err(missing(&self.paths[index], nouns, &keys()));
        };
        let what = || format!("the {} {:?}", nouns.field, self.paths[index]);
        match value {
            Value::Text(text) => Ok(Cow::Borrowed(text)),
            Value::Escaped(string) => {
                unescaped(string).map_err(|reason| format!("{} is broken: {reason}", what()))
            }
            Value::Scalar(text) if self.is_template() => Ok(text.clone()),
            Value::Null => Err(format!("{} is null", what())),
            _ if self.is_template() => {
                Err(format!("{} is not a string, number or truth value", what()))
            }
            _ => Err(format!("{} is not a string", what())),
        }
    }

    fn conversation(
        &self,
        slots: &Slots<'_>,
        nouns: Nouns,
        keys: impl Fn() -> Vec<String>,
    ) -> Result<String, String> {
        let (field, path) = (nouns.field, &self.paths[0]);
        let messages = match value_of(slots, 0) {
            Some(Value::Json(messages)) => messages,
            Some(Value::Null) => return Err(format!("the {field} {path:?} is null")),
            Some(_) => return Err(format!("the {field} {path:?} is not a list of messages")),
            None => return Err(missing(path, nouns, &keys())),
        };
        let other = |index: usize| match value_of(slots, index) {
            None | Some(Value::Null) => Cow::Borrowed("null"),
            Some(Value::Json(json)) => Cow::Borrowed(&**json),
            // A text with the tools in JSON.
            Some(Value::Escaped(text)) => Cow::Borrowed(*text),
            Some(Value::Text(text)) => serde_json::Value::from(*text).to_string().into(),
            // Neither a list nor a map. The value does not matter.
            Some(_) => Cow::Borrowed("false"),
        };
        let is_unread = |index: &usize| !matches!(&*other(*index), "null" | "\"\"" | "[]" | "{}");
        let unread: Vec<&str> =
            (3..=OF_CHAT.len()).filter(is_unread).map(|index| OF_CHAT[index - 1]).collect();
        let [tools, variables] = [other(1), other(2)];
        Ok(format!(
            "{{\"messages\":{messages},\"tools\":{tools},\"{VARIABLES}\":{variables},\"unread\":{unread:?}}}"
        ))
    }
}

/// Returns the value of the path `index`.
fn value_of<'s, 'a>(slots: &'s Slots<'a>, index: usize) -> Option<&'s Value<'a>> {
    slots[2 * index].as_ref().or(slots[2 * index + 1].as_ref())
}

impl Node {
    fn insert(&mut self, keys: &[&str], slot: usize) {
        let Some((first, rest)) = keys.split_first() else {
            self.slot = Some(slot);
            return;
        };
        let at = self.keys.iter().position(|(key, _)| key == first).unwrap_or_else(|| {
            self.keys.push(((*first).to_owned(), Node::default()));
            self.keys.len() - 1
        });
        self.keys[at].1.insert(rest, slot);
    }

    /// Clears the values under this key: if a key occurs twice, the last value counts.
    fn clear(&self, slots: &mut Slots<'_>) {
        if let Some(slot) = self.slot {
            slots[slot] = None;
        }
        self.keys.iter().for_each(|(_, node)| node.clear(slots));
    }
}

pub(crate) fn missing(path: &str, nouns: Nouns, keys: &[String]) -> String {
    let Nouns { field, record } = nouns;
    let shown: Vec<_> = keys.iter().take(MAX_SHOWN_KEYS).map(|key| format!("{key:?}")).collect();
    let shown = if shown.is_empty() { "nothing".to_owned() } else { shown.join(", ") };
    format!("no {field} {path:?}, the {record} has {shown}: name the text's {field} with --field")
}

fn unescaped(string: &str) -> Result<Cow<'_, str>, String> {
    if memchr::memchr(b'\\', string.as_bytes()).is_none() {
        return Ok(Cow::Borrowed(&string[1..string.len() - 1]));
    }
    serde_json::from_str(string).map(Cow::Owned).map_err(|fault| json::reason(&fault))
}
