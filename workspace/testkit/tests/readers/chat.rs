//! Chat templates and conversations.

use std::collections::BTreeMap;

use moh_text::{ChatTemplate, Conversation, TrainedTurns};
use serde_json::Value;

use crate::{outcome, target};

const TEMPLATES: [&str; 3] = [
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{%- if tools is not none %}{{- tools | tojson(indent=2) }}{%- endif %}\n\
     {%- for message in messages[::-1] %}{# a #}{{- message.role.upper() }}\n\
     {%- if message.role == 'assistant' %}{%- generation %}{{- message.content | trim }}{%- endgeneration %}\n\
     {%- else %}{%- raw %}{{ }}{%- endraw %}{{ message.content.split(' ')[-1] }}{%- endif %}{%- endfor %}",
    "{%- set ns = namespace(n=0) %}{%- macro say(text) %}[{{ text }}]{%- endmacro %}\
     {%- for message in messages if message.content %}{%- set ns.n = ns.n + 1 %}{{ say(message.content) ~ ns.n }}\
     {%- if loop.last and message.role == 'tool' %}{{ raise_exception('a tool') }}{%- endif %}{%- endfor %}",
];
const CONVERSATION: &str = r#"{"messages": [{"role": "system", "content": "a b"}, {"from": "human", "value": "q"},
    {"role": "assistant", "content": " y ", "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1e-7}}}]}],
    "tools": "[{\"name\": \"f\"}]"}"#;

fn render(template: &ChatTemplate, conversation: &Conversation) -> Result<(), String> {
    let renderer = template.renderer().map_err(|error| error.to_string())?;
    for turns in [TrainedTurns::All, TrainedTurns::Last] {
        let found = renderer.training_text(conversation, turns);
        let found = found.map_err(|error| error.to_string())?;
        let mut end = 0;
        for range in &found.trained {
            assert!(end <= range.start && found.text.get(range.clone()).is_some(), "{found:?}");
            end = range.end;
        }
    }
    outcome(renderer.render(conversation, true))
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(
        "t.jinja".into(),
        source,
        BTreeMap::from([("bos_token".into(), "<s>".into())]),
    )
}

#[test]
fn a_mutated_chat_template_renders_or_is_refused() {
    let conversation = Conversation::of_texts([("user", "a b"), ("assistant", "c")]);
    let seeds = &TEMPLATES.map(|template| template.as_bytes().to_vec());
    target("chat-template", seeds, 64)
        .run(|input| render(&template(&String::from_utf8_lossy(input)), &conversation));
}

#[test]
fn a_mutated_conversation_is_rendered_or_refused() {
    let templates = TEMPLATES.map(template);
    let seeds = &[CONVERSATION.as_bytes().to_vec()];
    target("conversation", seeds, 64).run(|input| {
        let mut record: Value = serde_json::from_slice(input).map_err(|error| error.to_string())?;
        let mut take = |name: &str| record.get_mut(name).map_or(Value::Null, Value::take);
        let conversation = Conversation::from_json(take("messages"), take("tools"));
        let conversation = conversation.map_err(|error| error.to_string())?;
        templates.iter().try_for_each(|template| render(template, &conversation))
    });
}
