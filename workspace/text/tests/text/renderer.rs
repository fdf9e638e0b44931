//! Renderings. Each line of `templates.json` is a case: a template, messages (a text is their JSON as Python reads it),
//! and the result: the text, its parts that are trained on, or the error. `tools/data/chat.py` checks the texts with
//! transformers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use moh_testkit::assert_refused;
use moh_text::{ChatNotes, ChatTemplate, Conversation, Error, RenderThreads, Result, TrainedTurns};
use serde_json::{Value, json};

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(name, token)| (name.to_owned(), token.to_owned()));
    ChatTemplate::new(Path::new("t.jinja").to_owned(), source, BTreeMap::from(tokens))
}

/// Returns the result of a case, under the names that the cases use.
fn found(case: &Value) -> Result<Value> {
    let mut conversation = match &case["messages"] {
        Value::Null => Conversation::parse(&case["record"].to_string())?,
        Value::String(text) => Conversation::parse(&format!("{{\"messages\": {text}}}"))?,
        messages => Conversation::from_json(messages.clone(), case["tools"].clone())?,
    };
    if case["adapted"] == true {
        conversation = conversation.with_adapted_content();
    }
    let template = template(case["template"].as_str().unwrap());
    let renderer = template.renderer()?;
    let Some(last) = case["last"].as_bool() else {
        return Ok(json!({ "text": renderer.render(&conversation, case["prompts"] == true)? }));
    };
    let turns = if last { TrainedTurns::Last } else { TrainedTurns::All };
    let found = renderer.training_text(&conversation, turns)?;
    let trained: Vec<_> = found.trained.iter().map(|range| &found.text[range.clone()]).collect();
    let ChatNotes { misread, unnamed, .. } = found.notes;
    Ok(json!({ "text": found.text, "trained": trained, "misread": misread, "unnamed": unnamed }))
}

#[test]
fn every_case_renders_as_it_says() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("templates.json")).unwrap();
    assert!(cases.len() > 90);
    for case in cases {
        let begun = Instant::now();
        match (found(&case), case["error"].as_str()) {
            (Ok(found), None) => {
                for key in ["text", "trained", "misread", "unnamed"] {
                    assert!(case[key].is_null() || case[key] == found[key], "{case}: {found}");
                }
            }
            (Err(error), Some(expected)) => {
                let error = error.to_string();
                let reason = case["reason"].as_str().unwrap_or_default();
                let is_named = error.contains(expected) && error.contains(reason);
                assert!(is_named && !error.contains('\n'), "{case}: {error}");
            }
            (found, _) => panic!("{case}: {found:?}"),
        }
        assert!(begun.elapsed().as_secs() < 20, "{case}");
    }
}

#[test]
fn a_rendering_that_takes_too_long_is_given_up() {
    // Some seconds of comparing, which takes little fuel.
    let source = "{% set a = 'a' * 30000000 %}{% set b = 'a' * 30000000 %}{% for i in range(2000) %}\
                  {% if messages[0].content == 'slow' and a is eq(b) %}{% endif %}{% endfor %}{{ messages | length }}";
    let threads = RenderThreads::new(template(source), Duration::from_secs(1)).unwrap();
    let slow = Arc::new(Conversation::of_texts([("user", "slow")]));
    let fast = Arc::new(Conversation::of_texts([("user", "fast")]));
    let begun = Instant::now();
    let stopped = threads.training_text(&slow, TrainedTurns::All, &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)) && begun.elapsed().as_secs() < 3);
    assert_eq!(threads.render(&fast, false).unwrap(), "1");
    assert_refused(threads.render(&slow, false), "takes longer than 1 s");
    assert_eq!(threads.render(&fast, false).unwrap(), "1");
}
