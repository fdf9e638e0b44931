//! The values of `--field`, and the texts that they make of objects: each line of `tests.json` is a case.

use super::*;

fn text(argument: &str, object: &str) -> Result<String, String> {
    let fields = Fields::parse(argument).map_err(|error| error.to_string())?;
    let mut slots = fields.slots();
    fields.of_json(object, LINE, &mut slots).map(Cow::into_owned)
}

#[test]
fn every_case_is_the_text_or_the_error_that_it_says() {
    let cases: Vec<serde_json::Value> = serde_json::from_str(include_str!("tests.json")).unwrap();
    for case in cases {
        let [argument, object] = ["field", "object"].map(|key| case[key].as_str().unwrap());
        match text(argument, object) {
            Ok(text) => assert_eq!(case["text"], text, "{case}"),
            Err(error) => {
                let part = case["error"].as_str().unwrap();
                let ending = case["ending"].as_str().unwrap_or_default();
                assert!(error.contains(part) && error.ends_with(ending), "{case}: {error}");
            }
        }
    }
    assert_eq!(Fields::parse("{m.a}: {text} {text}").unwrap().paths(), ["m.a", "text"]);
}

#[test]
fn what_is_beside_the_messages_is_kept_or_named() {
    let fields = Fields::of_chat("m");
    let object = r#"{"m":[],"tools":"","system":"s","documents":[],"functions":null,"chat_template_kwargs":{"a":1}}"#;
    let text = fields.of_json(object, LINE, &mut fields.slots()).unwrap().into_owned();
    let expected =
        r#"{"messages":[],"tools":"","chat_template_kwargs":{"a":1},"unread":["system"]}"#;
    assert_eq!(text, expected);
}

#[test]
fn deep_nesting_needs_no_stack() {
    let deep = format!("{{\"d\": {}{}, \"t\": \"\"}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    assert_eq!(text("t", &deep).unwrap(), "");
    assert_eq!(text("d", &deep).unwrap_err(), "the field \"d\" is not a string");
}
