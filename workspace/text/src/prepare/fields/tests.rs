//! What `--field` says, and the text that it makes of objects.

use super::*;

/// The text of an object under a `--field`.
fn text(argument: &str, object: &str) -> Result<String, String> {
    let fields = Fields::parse(argument).unwrap();
    let mut slots = fields.slots();
    fields.of_json(object, LINE, &mut slots).map(Cow::into_owned)
}

#[test]
fn a_field_is_a_key_or_a_path() {
    let object = r#"{"x": [{"a": 1}], "a": {"b": "in", "c": {"d": "deep"}}, "t": "top"}"#;
    assert_eq!(text("t", object).unwrap(), "top");
    assert_eq!(text("a.b", object).unwrap(), "in");
    assert_eq!(text("a.c.d", object).unwrap(), "deep");
    // A key that is literally the path wins, wherever it is.
    for object in [r#"{"a.b": "key", "a": {"b": "in"}}"#, r#"{"a": {"b": "in"}, "a.b": "key"}"#] {
        assert_eq!(text("a.b", object).unwrap(), "key");
    }
    assert_eq!(text("a\"b", r#"{"a\"b": "quoted"}"#).unwrap(), "quoted");
}

#[test]
fn of_a_key_that_comes_twice_the_last_value_counts() {
    assert_eq!(text("t", r#"{"t": 1, "t": "last"}"#).unwrap(), "last");
    assert_eq!(text("a.b", r#"{"a": {"b": "first"}, "a": {"b": "last"}}"#).unwrap(), "last");
    let error = text("a.b", r#"{"a": {"b": "first"}, "a": {"c": 1}}"#).unwrap_err();
    assert!(error.starts_with("no field \"a.b\", the line has \"a\":"), "{error}");
}

#[test]
fn a_template_joins_fields() {
    let object = r#"{"title": "A\tB", "text": "one", "n": 1.50, "yes": true, "m": {"a": -2}}"#;
    assert_eq!(text("{title}\n\n{text}", object).unwrap(), "A\tB\n\none");
    assert_eq!(text(r"{title}\n{text}", object).unwrap(), "A\tB\\none");
    assert_eq!(text("{{{n}}} {yes} {m.a}{text}{text}", object).unwrap(), "{1.50} true -2oneone");
    let fields = Fields::parse("{m.a}: {text} {text}").unwrap();
    assert_eq!(fields.paths(), ["m.a", "text"]);
}

#[test]
fn a_value_without_a_text_is_refused() {
    let object = r#"{"n": 1, "o": {"t": ""}, "z": null, "b": "\u0062"}"#;
    let cases = [
        (
            "t",
            "no field \"t\", the line has \"n\", \"o\", \"z\", \"b\": name the text's field with",
        ),
        ("{b}{t}", "no field \"t\", the line has"),
        ("o.x", "no field \"o.x\", the line has"),
        ("n", "the field \"n\" is not a string"),
        ("o", "the field \"o\" is not a string"),
        ("{o}", "the field \"o\" is not a string, number or truth value"),
        ("z", "the field \"z\" is null"),
        ("{z}", "the field \"z\" is null"),
    ];
    for (argument, part) in cases {
        let error = text(argument, object).unwrap_err();
        assert!(error.contains(part), "{argument}: {error}");
    }
    let many: String = (0..9).map(|key| format!("\"k{key}\": 0, ")).collect();
    let error = text("t", &format!("{{{many}\"k9\": 0}}")).unwrap_err();
    assert!(error.contains("\"k4\": name"), "{error}");
}

#[test]
fn numbers_that_python_alone_writes_are_read_where_no_field_has_them() {
    let object =
        r#"{"a": NaN, "t": "NaN, -Infinity", "x": [1, -Infinity, {"y": Infinity}], "n": 1}"#;
    assert_eq!(text("t", object).unwrap(), "NaN, -Infinity");
    assert_eq!(text("{t} {n}", object).unwrap(), "NaN, -Infinity 1");
    for argument in ["a", "{t} {a}", "x"] {
        let error = text(argument, object).unwrap_err();
        assert!(error.contains("NaN") || error == "the field \"x\" is not a string", "{error}");
    }
    assert!(text("t", r#"{"a": nan, "t": ""}"#).unwrap_err().starts_with("broken JSON at column"));
    let error = text("text", r#"{"version": 1, "data": [{"text": "a"}]}"#).unwrap_err();
    assert!(error.ends_with(
        "if its list \"data\" has the documents, write them as lines, as in `jq -c '.data[]' FILE`"
    ));
}

#[test]
fn a_template_with_a_wrong_brace_is_refused() {
    for (argument, part) in [
        ("{text", "a brace is not closed"),
        ("text}", "a brace is closed that is not open"),
        ("{}", "braces without a name in them"),
        ("{a{b}", "braces without a name in them"),
        ("{{text}}", "it names no field"),
    ] {
        let error = Fields::parse(argument).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("{{ and }} for braces"), "{error}");
    }
}

#[test]
fn deep_nesting_needs_no_stack() {
    let deep = format!("{{\"d\": {}{}, \"t\": \"\"}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    assert_eq!(text("t", &deep).unwrap(), "");
    assert_eq!(text("d", &deep).unwrap_err(), "the field \"d\" is not a string");
}

#[test]
fn escapes_are_taken_back_and_half_a_surrogate_pair_is_refused() {
    let object = r#"{"t": "\"\\\/\b\f\n\r\t\u00e4\u20AC\ud83d\uDE00"}"#;
    assert_eq!(text("t", object).unwrap(), "\"\\/\u{8}\u{c}\n\r\t\u{e4}\u{20ac}\u{1f600}");
    for half in [r"\ud83d", r"\ud83dxxxxxx", r"\ud83d\n", r"\ude00\ud83d", r"\ud83d\u0041"] {
        let object = format!("{{\"t\": \"ab{half}\", \"other\": \"{half}\"}}");
        for argument in ["t", "{t}"] {
            let error = text(argument, &object).unwrap_err();
            assert!(error.starts_with("the field \"t\" is broken: "), "{error}");
        }
    }
}
