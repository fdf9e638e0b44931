//! Templates in the forms of Llama 3, Qwen, Mistral, Gemma, ChatML and Zephyr. The expected texts are those of jinja2
//! with transformers' settings.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use moh_text::{ChatTemplate, Conversation, Error, RenderThreads, TrainedTurns};
use serde_json::{Value, json};

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
fn turns_with_a_weight_of_zero_are_not_trained_on() {
    let says = |key: &str, value: Value| {
        let mut turns = Value::from(turns().messages().to_vec());
        turns[1][key] = value;
        turns
    };
    for source in [CHAT_ML, GENERATION] {
        for (key, value) in [("weight", json!(0)), ("weight", json!(0.0)), ("train", json!(false))]
        {
            let of = conversation(says(key, value));
            let (text, parts) = trained(source, &of, TrainedTurns::All).unwrap();
            assert!(text.contains("assistant\nYo") && parts.len() == 1, "{text}");
            assert!(parts[0].starts_with("ok<|im_end|>"), "{parts:?}");
        }
        for (key, value) in [("weight", json!(1)), ("train", json!(true)), ("train", json!(null))] {
            let of = conversation(says(key, value));
            assert_eq!(trained(source, &of, TrainedTurns::All).unwrap().1.len(), 2);
        }
    }
    let halves = GENERATION.replace(
        "{%- endgeneration %}",
        "{%- endgeneration %}{%- generation %}{%- endgeneration %}",
    );
    let error = trained(&halves, &conversation(says("weight", json!(0))), TrainedTurns::All);
    assert!(
        error.unwrap_err().starts_with(
            "message 2 is not to be trained on, and the chat template writes 4 blocks"
        )
    );
    for (key, value) in [("weight", json!(0.5)), ("weight", json!("0")), ("train", json!(0))] {
        let error = Conversation::from_json(says(key, value), Value::Null).unwrap_err().to_string();
        assert!(error.starts_with("message 2 of the conversation has a"), "{error}");
    }
}

#[test]
fn arguments_and_parts_are_what_the_template_reads() {
    let text = r#"{"a":  12345678901234567890123}"#;
    let called = json!([{ "role": "user", "content": "q" }, { "role": "assistant", "tool_calls": [
        { "id": "1", "type": "function", "function": { "name": "f", "arguments": text } }] }]);
    let each = "{% for m in messages %}{% for c in m.tool_calls or [] %}";
    let end = "{% endfor %}{% endfor %}";
    for (body, expected) in [
        ("{{ c.function.arguments | tojson }}", r#"{"a": 12345678901234567890123}"#),
        (
            "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
            "a=12345678901234567890123",
        ),
        ("{{ '<' + c.function.arguments + '>' }}", r#"<{"a":  12345678901234567890123}>"#),
        (
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}\
             {{ c.function.arguments | tojson }}{% endif %}",
            text,
        ),
    ] {
        let source = format!("{each}{body}{end}");
        assert_eq!(
            rendered(&source, &conversation(called.clone()), false).unwrap(),
            expected,
            "{body}"
        );
    }
    let broken = Value::from_iter([called[0].clone(), {
        let mut message = called[1].clone();
        message["tool_calls"][0]["function"]["arguments"] = json!("{");
        message
    }]);
    let error = rendered(
        &format!("{each}{{{{ c.function.arguments | tojson }}}}{end}"),
        &conversation(broken),
        false,
    );
    assert!(error.unwrap_err().starts_with("the arguments of a tool call are not JSON: "));

    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    let one = json!([{ "role": "user", "content": "c" }]);
    let reads = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}\
                 {% endfor %}{% endfor %}";
    let either = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
                  {% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}";
    let lists = |source: &str| {
        let (template, parts) = (template(source), conversation(parts.clone()));
        template
            .renderer()
            .unwrap()
            .training_text(&parts, TrainedTurns::All)
            .map(|found| found.lists)
    };
    for (source, of_list, of_text, as_it_is, missed) in [
        (reads, "ab", "c", "", 0),
        (either, "ab", "c", "c", 0),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb", "c", "c", 1),
    ] {
        let adapted = |of: &Value| {
            rendered(source, &conversation(of.clone()).with_adapted_content(), false).unwrap()
        };
        assert_eq!(
            (adapted(&parts).as_str(), adapted(&one).as_str()),
            (of_list, of_text),
            "{source}"
        );
        assert_eq!(rendered(source, &conversation(one.clone()), false).unwrap(), as_it_is);
        assert_eq!(lists(source).unwrap(), missed);
    }
}

#[test]
fn keys_that_the_template_does_not_name_are_counted() {
    let source = "{% for m in messages %}{{ m.content }}{{ m.mood }}{{ m.thinking }}{% endfor %}";
    let of = conversation(json!([
        { "role": "user", "content": "a", "id": 1, "name": "n", "weight": 1, "mood": "x", "empty": [], "none": null },
        { "role": "assistant", "content": "a", "id": 2, "reasoning": "r", "tool_calls": [{}] },
    ]));
    let template = template(source);
    let found = template.renderer().unwrap().training_text(&of, TrainedTurns::Last).unwrap();
    assert_eq!(found.text, "axar");
    let expected = [("id", 2), ("tool_calls", 1)].map(|(key, count)| (key.to_owned(), count));
    assert_eq!(found.unnamed, BTreeMap::from(expected));
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
    let value = r#"{"n": null, "f": 1e22, "l": ["it's", true, {"k": [1.0]}], "i": 18446744073709551616,
        "j": -9223372036854775809, "x": NaN, "y": [-Infinity]}"#;
    let asked = format!(r#"{{"messages": [{{"role": "user", "none": null, "v": {value}}}]}}"#);
    let asked = Conversation::parse(&asked).unwrap();
    for (source, expected) in [
        ("{{ true }} {{ none }} {{ 1.0 }} {{ 3 }} {{ missing }}", "True None 1.0 3 "),
        (
            "{{ messages[0].none }}{{ v.n }} {{ v.f }} {{ v.i }} {{ v.j }}",
            "None 1e+22 18446744073709551616 -9223372036854775809",
        ),
        (
            "{{ v.l }} {{ v.l ~ (1, 2) ~ (1,) }}",
            "[\"it's\", True, {'k': [1.0]}] [\"it's\", True, {'k': [1.0]}](1, 2)(1,)",
        ),
        (
            "{{ v.x }} {{ v.y }} {{ [v.x, v.y, v.i] | tojson }}",
            "nan [-inf] [NaN, [-Infinity], 18446744073709551616]",
        ),
        (
            "{{ v.i + 1 }} {{ 1 + 2.5 }} {{ true + 1 }} {{ [1] + [2] }} {{ (1,) + (2,) }}",
            "18446744073709551617 3.5 2 [1, 2] (1, 2)",
        ),
        (
            "{{ {1: 2, none: 'a'} | tojson }} {{ v.l | string | length }}",
            "{\"1\": 2, \"null\": \"a\"} 28",
        ),
        (
            "{{ 1 in [1, 2] }} {{ 'a' in 'ba' }} {{ 'n' in v }} {{ 2 < 10 }} {{ [1] == [1] }} {{ v.i > 1 }}",
            "True True True True True True",
        ),
    ] {
        let source = format!("{{% set v = messages[0].v %}}{source}");
        assert_eq!(rendered(&source, &asked, false).unwrap(), expected);
    }
    let large = format!(r#"{{"messages": [{{"role": "user", "v": {}}}]}}"#, "9".repeat(40));
    let error = rendered("", &Conversation::parse(&large).unwrap(), false).unwrap_err();
    assert!(error.ends_with("has more than 128 bits"), "{error}");
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
    let loops = |times: usize, body: &str| {
        format!(
            "{{% set ns = namespace(l=[1], s='ab', m={{}}) %}}{{% for i in range({times}) %}}{body}{{% endfor %}}"
        )
    };
    let doubled = "{% set ns.l = ns.l + ns.l %}";
    for (source, expected) in [
        (loops(60, doubled), "takes more than the 4"),
        (loops(60, "{% set ns.l = ns.l * 2 %}") + "{{ ns.l }}", ""),
        (loops(60, "{% set ns.s = ns.s + ns.s %}"), "takes more than the 4"),
        (loops(60, "{% set ns.s = ns.s ~ ns.s %}"), "takes more than the 4"),
        (loops(60, "{% set ns.s = ns.s * 2 %}"), ""),
        (loops(60, "{% set ns.s = ns.s | replace('a', ns.s) %}"), "takes more than the 4"),
        (loops(60, "{% set ns.s = ns.s.replace('a', ns.s) %}"), "takes more than the 4"),
        (loops(60, "{% set ns.s = [ns.s, ns.s] | join(ns.s) %}"), "takes more than the 4"),
        (loops(60, "{% set ns.s = ns.s.join(ns.s | list) %}"), "takes more than the 4"),
        (loops(60, "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"), "takes more than the 4"),
        (loops(60, "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}", "takes more than the 4"),
        (loops(60, "{% set ns.m = {'a': ns.m, 'b': ns.m} %}") + "{{ ns.m == ns.l }}", "takes more than the 4"),
        (loops(90_000, "{% set ns.l = [ns.l] %}"), "a value within more than 200 others"),
        (loops(90_000, "{% set ns.l = (ns.l,) %}"), "a value within more than 200 others"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}".into(), "takes more than the 4"),
        ("{% macro m(l, n) %}{% if n %}{{ m(l + l, n - 1) }}{% else %}{{ l }}{% endif %}{% endmacro %}{{ m([1], 60) }}".into(), ""),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(), "recursion"),
        ("{{ 'a' | center(9999999999) }}".into(), ""),
        ("{{ ('a\n' * 10000000) | indent(100000) }}".into(), ""),
        ("{{ '%9999999999d' | format(1) }}".into(), ""),
        ("{{ '{:>9999999999}'.format(1) }}".into(), "the width 9999999999 is too large"),
        ("{{ range(99999999) | list }}".into(), ""),
        (format!("{}{}", "{% if true %}".repeat(100_000), "{% endif %}".repeat(100_000)), ""),
    ] {
        let begun = std::time::Instant::now();
        let error = rendered(&source, &turns(), false).unwrap_err();
        assert!(error.contains("t.jinja: chat template: ") && error.contains(expected), "{source:.200}: {error}");
        assert!(begun.elapsed().as_secs() < 10, "{source:.200}");
    }
}

#[test]
fn a_rendering_that_takes_too_long_is_given_up() {
    // Some seconds of comparing, which takes little fuel.
    let source = "{% set a = 'a' * 30000000 %}{% set b = 'a' * 30000000 %}{% for i in range(4000) %}\
                  {% if messages[0].content == 'slow' and a is eq(b) %}{% endif %}{% endfor %}{{ messages | length }}";
    let threads = RenderThreads::new(template(source)).unwrap();
    let slow = Arc::new(Conversation::of_texts([("user", "slow")]));
    let fast = Arc::new(turns());
    let stop = std::sync::atomic::AtomicBool::new(true);
    let begun = std::time::Instant::now();
    let stopped = threads.training_text(&slow, TrainedTurns::All, &stop);
    assert!(matches!(stopped, Err(Error::Interrupted)) && begun.elapsed().as_secs() < 3);
    assert_eq!(threads.render(&fast, false).unwrap(), "4");
    let error = threads.render(&slow, false).unwrap_err().to_string();
    assert!(error.contains("takes longer than 3 s"), "{error}");
    assert_eq!(threads.render(&fast, false).unwrap(), "4");
}
