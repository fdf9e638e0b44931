//! Templates in the forms of Llama 3, Qwen, Mistral, Gemma, ChatML and Zephyr. The expected texts are those of jinja2
//! with transformers' settings.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::*;

const CHAT_ML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + \
     message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}\
     {{ '<|im_start|>assistant\\n' }}{% endif %}";
/// Leaves out what the assistant thought, but for the last turn.
const THINKING: &str = "{%- for message in messages %}{%- set content = message.content %}\
     {%- if message.role == 'assistant' and not loop.last and '</think>' in content %}\
     {%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\
     {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}\
     {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
const GENERATION: &str = "{%- for message in messages %}\n\
     {{- '<|im_start|>' + message.role + '\\n' }}\n\
     {%- if message.role == 'assistant' %}\n\
     {%- generation %}\n    {{- message.content + ('' if loop.last else '!') + '<|im_end|>' }}\n\
     {%- endgeneration %}\n\
     {%- else %}\n    {{- message.content + '<|im_end|>' }}\n{%- endif %}\n{{- '\\n' }}\n\
     {%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n";

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(name, token)| (name.to_owned(), token.to_owned()));
    ChatTemplate::new(Path::new("t.jinja").to_owned(), source, BTreeMap::from(tokens))
}

fn conversation(messages: Value) -> Conversation {
    Conversation::from_json(messages, Value::Null).unwrap()
}

fn turns() -> Conversation {
    Conversation::of_texts([
        ("user", "Hi"),
        ("assistant", "Yo"),
        ("user", "?"),
        ("assistant", "ok"),
    ])
}

/// The text, and the parts that are trained on.
fn trained(
    source: &str,
    of: &Conversation,
    turns: TrainedTurns,
) -> Result<(String, Vec<String>), String> {
    let template = template(source);
    let renderer = template.renderer().map_err(|error| error.to_string())?;
    let found = renderer.training_text(of, turns).map_err(|error| error.to_string())?;
    let parts = found.trained.iter().map(|range| found.text[range.clone()].to_owned()).collect();
    Ok((found.text, parts))
}

fn rendered(source: &str, of: &Conversation, prompts: bool) -> Result<String, String> {
    let template = template(source);
    let renderer = template.renderer().map_err(|error| error.to_string())?;
    renderer.render(of, prompts).map_err(|error| error.to_string())
}

#[test]
fn answers_are_what_follows_their_prompts() {
    let (text, parts) = trained(CHAT_ML, &turns(), TrainedTurns::All).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n\
         <|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    );
    assert_eq!(parts, ["Yo<|im_end|>\n", "ok<|im_end|>\n"]);
    let (_, parts) = trained(CHAT_ML, &turns(), TrainedTurns::Last).unwrap();
    assert_eq!(parts, ["ok<|im_end|>\n"]);
    let asked = Conversation::of_texts([("user", "Hi")]);
    assert_eq!(trained(CHAT_ML, &asked, TrainedTurns::All).unwrap().1, [""; 0]);
    let error = trained(CHAT_ML, &asked, TrainedTurns::Last).unwrap_err();
    assert_eq!(error, "the last message is not the assistant's");
}

#[test]
fn a_template_names_what_is_generated() {
    let (text, parts) = trained(GENERATION, &turns(), TrainedTurns::All).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo!<|im_end|>\n\
         <|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    );
    assert_eq!(parts, ["Yo!<|im_end|>", "ok<|im_end|>"]);
    let (_, parts) = trained(GENERATION, &turns(), TrainedTurns::Last).unwrap();
    assert_eq!(parts, ["ok<|im_end|>"]);
    assert_eq!(
        rendered(GENERATION, &turns(), true).unwrap(),
        format!("{text}<|im_start|>assistant\n")
    );
    let marked = Conversation::of_texts([("user", "a\u{fdd0}b")]);
    let error = trained(GENERATION, &marked, TrainedTurns::All).unwrap_err();
    assert!(error.contains("U+FDD0"), "{error}");
}

#[test]
fn earlier_turns_that_are_written_otherwise_are_refused() {
    let thoughts = Conversation::of_texts([
        ("user", "Hi"),
        ("assistant", "<think>\nHm\n</think>\n\nYo"),
        ("user", "?"),
        ("assistant", "<think>\nSo\n</think>\n\nok"),
    ]);
    let error = trained(THINKING, &thoughts, TrainedTurns::All).unwrap_err();
    assert!(
        error.contains("up to message 2, or") && error.contains("--chat-train last"),
        "{error}"
    );
    let (text, parts) = trained(THINKING, &thoughts, TrainedTurns::Last).unwrap();
    assert!(text.contains("assistant\nYo<|im_end|>"), "{text}");
    assert_eq!(parts, ["<think>\nSo\n</think>\n\nok<|im_end|>\n"]);
    // Without thoughts, both are the same.
    assert_eq!(trained(THINKING, &turns(), TrainedTurns::All).unwrap().1.len(), 2);
}

#[test]
fn blocks_and_python_methods_render_as_in_transformers() {
    // In the form of Llama 3's: a block's line and its newline vanish, special tokens and the methods of
    // strings are known, text is not escaped.
    let source = "{{- bos_token }}\n{% for message in messages %}\n    \
         {%- if message['role'] not in ['system', 'user'] %}\n        \
         {{- raise_exception('role') }}\n    {%- endif %}\n\
         {{ '<|' + message['role'].upper() + '|>\\n' + message.content.strip() + eos_token }}\n\
         {% endfor %}\n{% if add_generation_prompt %}\n{{ '<|assistant|>\\n' }}{% endif %}";
    let asked = Conversation::of_texts([("system", "Be brief."), ("user", " Why? <b> ")]);
    let expected = "<s>\n<|SYSTEM|>\nBe brief.</s>\n<|USER|>\nWhy? <b></s>\n<|assistant|>\n";
    assert_eq!(rendered(source, &asked, true).unwrap(), expected);
}

#[test]
fn tools_are_defined_and_written_as_by_json_dumps() {
    let source = "{%- if tools is not none and tools %}{% for tool in tools %}{{ tool | tojson }}|\
         {{ tool | tojson(indent=2) }}|{% endfor %}{% else %}{{ tools is none }} {{ documents is none }}{% endif %}";
    let asked = json!([{ "role": "user", "content": "q" }]);
    assert_eq!(rendered(source, &conversation(asked.clone()), false).unwrap(), "True True");
    let tools = json!([{ "name": "f<>", "x": [1, 2.0, 1e-7, true, null, "\u{e9}'\n"], "y": {}, "z": { "a": [] } }]);
    let called = Conversation::from_json(asked, tools).unwrap();
    // python3: json.dumps(tool, ensure_ascii=False), json.dumps(tool, ensure_ascii=False, indent=2)
    let expected = "{\"name\": \"f<>\", \"x\": [1, 2.0, 1e-07, true, null, \"\u{e9}'\\n\"], \"y\": {}, \"z\": {\"a\": []}}|\
         {\n  \"name\": \"f<>\",\n  \"x\": [\n    1,\n    2.0,\n    1e-07,\n    true,\n    null,\n    \"\u{e9}'\\n\"\n  ],\n  \
         \"y\": {},\n  \"z\": {\n    \"a\": []\n  }\n}|";
    assert_eq!(rendered(source, &called, false).unwrap(), expected);
}

#[test]
fn values_print_as_in_python() {
    let source = "{{ true }} {{ none }} {{ 1.0 }} {{ 3 }} {{ missing }} {{ messages[0].n }} {{ messages[0].f }}";
    let asked = conversation(json!([{ "role": "user", "n": null, "f": 1e22 }]));
    assert_eq!(rendered(source, &asked, false).unwrap(), "True None 1.0 3  None 1e+22");
}

#[test]
fn messages_are_read_in_any_direction() {
    // As Qwen 3's, which looks for the last question from the end on.
    let source = "{%- set ns = namespace(found=-1) %}{%- for message in messages[::-1] %}\
         {%- set index = (messages | length - 1) - loop.index0 %}\
         {%- if ns.found < 0 and message.role == 'user' and message.content is string and \
         not (message.content.startswith('<tool_response>')) %}{%- set ns.found = index %}{%- endif %}\
         {%- endfor %}{{ ns.found }}{% for message in messages[1:] %}{{ message.content }}{% endfor %}";
    assert_eq!(rendered(source, &turns(), false).unwrap(), "2Yo?ok");
}

#[test]
fn faults_are_one_sentence_that_names_the_file() {
    for (source, expected) in [
        ("{% for", "t.jinja: chat template: "),
        ("{% generation %}", "t.jinja: chat template: "),
        ("{% endgeneration %}", "t.jinja: chat template: "),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ missing.field.deep }}", "chat template: "),
        ("{{ missing | tojson }}", "tojson"),
        ("{{ messages | tojson(indent=1000) }}", "an indent of 1000"),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
    ] {
        let message = rendered(source, &turns(), false).unwrap_err();
        assert!(message.contains(expected) && !message.contains('\n'), "{message}");
    }
}

#[test]
fn every_template_ends() {
    let endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}\
         {% endfor %}{% endfor %}{% endfor %}";
    assert!(rendered(endless, &turns(), false).unwrap_err().contains("fuel"));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(rendered(recursive, &turns(), false).unwrap_err().contains("t.jinja: chat template: "));
    let deep = format!("{}{}", "{% if true %}".repeat(100_000), "{% endif %}".repeat(100_000));
    assert!(rendered(&deep, &turns(), false).unwrap_err().contains("t.jinja: chat template: "));
}
