use std::fs;

use super::*;
use crate::ConfigFile;

fn config() -> ModelConfig {
    let fields = serde_json::json!({
        "model_type": "moh_qwen3", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2,
        "moh_router": "query-norm", "moh_shared_heads": [4, 2, 2, 1],
        "moh_routed_top_k": [0, 1, 1, 3],
    });
    ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
}

fn card() -> ModelCard {
    ModelCard {
        source: Some("Model-8B".into()),
        base_models: vec!["org/Model-8B".into()],
        licence: vec![("license", "other".into()), ("license_name", "llama3".into())],
        terms: vec![PathBuf::from("m/LICENSE"), PathBuf::from("m/USE_POLICY.md")],
        made: vec!["`moh-train` did:".into(), "| a |\n|---|\n| b |".into()],
    }
}

/// Returns the card created from this README, of a source in a directory `name`.
fn of_readme(name: &str, readme: impl AsRef<[u8]>) -> ModelCard {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(CARD_FILE), readme).unwrap();
    ModelCard::of_source(&dir.path().join(name), dir.path()).unwrap()
}

#[test]
fn a_card_begins_with_what_the_hub_reads() {
    let text = card().text(&config());
    let expected = "---\nbase_model: org/Model-8B\nlicense: other\nlicense_name: llama3\n\
                    library_name: transformers\npipeline_tag: text-generation\ntags:\n\
                    - mixture-of-head\n- moh\n- custom_code\n- arxiv:2410.11842\n---\n\n\
                    # Model-8B with Mixture-of-Head attention\n";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(text, card().text(&config()));
    assert!(
        text.contains("\nThe base model is [org/Model-8B](https://huggingface.co/org/Model-8B).\n")
    );
    // A local directory is not an id on the hub.
    let local = ModelCard { source: Some("mine".into()), ..ModelCard::default() };
    let text = local.text(&config());
    assert!(text.starts_with("---\nlibrary_name:") && text.contains("`mine`"), "{text}");
    let text = ModelCard::default().text(&config());
    assert!(text.contains("# Mixture-of-Head model\n") && text.contains("were random"), "{text}");
}

#[test]
fn a_source_that_is_not_the_base_model_is_named_beside_it() {
    let tuned = ModelCard { source: Some("tuned".into()), ..card() };
    assert!(tuned.text(&config()).contains("Model-8B). This model was made from `tuned`.\n"));
    let merged = ModelCard { base_models: vec!["a/b".into(), "c/d".into()], ..tuned };
    let text = merged.text(&config());
    assert!(text.starts_with("---\nbase_model:\n- a/b\n- c/d\nlicense: other\n"), "{text}");
    assert!(text.contains("# b with") && text.contains("[c/d](https://huggingface.co/c/d). This"));
}

#[test]
fn a_card_has_the_heads_of_each_layer_and_the_terms() {
    let text = card().text(&config());
    assert!(text.contains("by the norms of its queries. The weights have"), "{text}");
    for line in [
        "| 0 | 4 | 4 | none: dense | 4 (100%) |",
        "| 1-2 | 4 | 2 | 1 of 2 | 3 (75%) |",
        "| 3 | 4 | 1 | 3 of 3 | 4 (100%) |",
        "| a |\n|---|\n| b |",
        "That of the base model, which states `other`: `LICENSE`, `USE_POLICY.md`.",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line}\n{text}");
    }
    assert!(text.is_ascii());
}

#[test]
fn a_card_says_how_tokens_get_their_heads() {
    for (router, expected) in [
        (RouterKind::Group, "selects whole groups of the others"),
        (RouterKind::Static, "the others are never computed. The weights have"),
        (RouterKind::Linear, "by a learned router. But for the router's matrices, the weights"),
        (RouterKind::TwoStage, "a learned router, which also weighs the heads. But for the router"),
    ] {
        let mut config = config();
        config.moh.as_mut().unwrap().router = router;
        let text = card().text(&config);
        assert!(text.contains(expected), "{text}");
        assert!(router.has_matrices() || !text.contains("matrices"), "{text}");
    }
}

#[test]
fn a_dense_model_has_a_card_without_code() {
    let text = card().text(&ModelConfig { moh: None, ..config() });
    assert!(text.contains("# Model-8B as a dense model\n\nA Qwen3 in which every head"), "{text}");
    assert!(!text.contains("custom_code") && !text.contains("trust_remote_code"), "{text}");
}

#[test]
fn a_run_keeps_what_its_source_says() {
    let merged = vec!["a/b".to_owned(), "c/d".to_owned()];
    for base_models in [Vec::new(), vec!["org/Model-8B".to_owned()], merged] {
        let card = ModelCard { base_models, terms: Vec::new(), made: Vec::new(), ..card() };
        for readme in [card.kept_readme(), card.text(&config())] {
            assert_eq!(of_readme("Model-8B", readme), card);
        }
    }
}

#[test]
fn the_front_matter_states_the_licence() {
    let licence = |readme: &str| of_readme("m", readme).licence;
    let llama =
        "---\nlanguage:\n- en\nlicense: llama3\nlicense_name: \"my-licence\"\n---\nlicense: mit\n";
    let expected = [("license", "llama3".to_owned()), ("license_name", "my-licence".to_owned())];
    assert_eq!(licence(llama), expected);
    let mit = [("license", "mit".to_owned())];
    for readme in [
        "---\r\nlicense:\r\n- mit\r\n---\r\n",
        "---\nlicense:\n  - 'mit'\ntags:\n- x\n---",
        "---\nlicense: mit # as upstream\n---",
    ] {
        assert_eq!(licence(readme), mit, "{readme:?}");
    }
    for nothing in [
        "",
        "---",
        "license: mit",
        "---\n---\nlicense: mit",
        "---\nlicense:",
        "---\nlicense:\n---\n- mit",
        "---\nlicenses: mit",
        "---\n license: mit",
        "---\nlicense: a b",
        "---\nlicense: [mit]",
        "---\nlicense: {mit: x}",
        "---\nlicense: |\n  mit",
        "---\nlicense: # mit",
        "---\nlicense:\n- mit\n- cc-by-nc-4.0\n---",
        "---\nlicense: x: y",
        "---\nlicense: \u{fffd}",
        "---\nlicense: -->",
        "\u{0}---\nlicense: mit",
    ] {
        assert_eq!(licence(nothing), [], "{nothing:?}");
    }
    assert_eq!(licence(&format!("---\nlicense: {}\n---", "a".repeat(300))), []);
    assert_eq!(of_readme("m", b"---\nlicense: mit\n\xff\xfe---").licence, mit);
}

#[test]
fn a_licence_that_is_named_replaces_the_one_that_was_stated() {
    let stated = "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n";
    let with = |id: &str| {
        let mut card = of_readme("m", stated);
        card.set_license(id);
        card.licence
    };
    assert_eq!(with("mit"), [("license", "mit".to_owned())]);
    assert_eq!(with("other"), of_readme("m", stated).licence);
    assert!(is_license_id("cc-by-4.0") && !is_license_id("a b") && !is_license_id("x: y"));
}

#[test]
fn base_models_are_one_or_a_list_of_ids() {
    let stated = |name: &str, value: &str| {
        let readme = format!("---\nlicense: mit\nbase_model:{value}\ntags: x\n---\n");
        of_readme(name, readme).base_models
    };
    for one in [" a/b", " \"a/b\"", "\n- a/b", "\n  -  'a/b'", " a/b  # x"] {
        assert_eq!(stated("m", one), ["a/b"], "{one:?}");
    }
    assert_eq!(stated("m", "\n  - a/b\n  - c/d"), ["a/b", "c/d"]);
    for none in ["", " ", " /mnt/a", " a/b/c", " a b", "\n- a/b\n- ../c", " x](http://y)", " null/"]
    {
        assert!(stated("m", none).is_empty(), "{none:?}");
    }
    // A fine-tune on the hub is the base of models made from it.
    assert_eq!(stated("models--acme--Tuned/snapshots/0123", " a/b"), ["acme/Tuned"]);
}

#[test]
fn a_source_has_the_name_of_its_directory_or_of_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let named = |path: &Path| {
        let card = ModelCard::of_source(path, dir.path()).unwrap();
        (card.source.unwrap(), card.base_models)
    };
    let own = dir.path().join("a b");
    let snapshot = dir.path().join("models--org--name/snapshots/0123");
    for path in [&own, &snapshot] {
        fs::create_dir_all(path).unwrap();
    }
    assert_eq!(named(&own), ("a_b".to_owned(), Vec::new()));
    assert_eq!(named(&snapshot), ("name".to_owned(), vec!["org/name".to_owned()]));
    #[cfg(unix)]
    {
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert_eq!(named(&link).0, "a_b");
    }
    for (gone, expected) in [
        ("org/x", "x"),
        ("runs/x@200", "x_200"),
        ("/gone/x", "x"),
        ("/gone/--", "model--"),
        ("\n---", "model_---"),
    ] {
        assert_eq!(named(Path::new(gone)).0, expected);
    }
}

#[test]
fn a_readme_that_is_none_is_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(CARD_FILE);
    let read = || ModelCard::of_source(Path::new("m"), dir.path()).unwrap();
    let nothing = ModelCard { source: Some("m".into()), ..ModelCard::default() };
    fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
    assert_eq!(read(), nothing);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(read(), nothing);
    let missing = dir.path().join("missing");
    assert_eq!(ModelCard::of_source(Path::new("m"), &missing).unwrap(), nothing);
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let message = ModelCard::of_source(Path::new("m"), &file).unwrap_err().to_string();
    assert!(message.contains("file: "), "{message}");
}

#[test]
fn terms_are_files_with_a_name_of_terms() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["LICENSE", "LICENSE-MIT", "NOTICE.txt", "USE_POLICY.md", "LICENSE.py", "license"] {
        fs::write(dir.path().join(name), "x").unwrap();
    }
    fs::create_dir(dir.path().join("LICENSES")).unwrap();
    fs::File::create(dir.path().join("COPYING")).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
    let terms = ModelCard::of_source(dir.path(), dir.path()).unwrap().terms;
    let expected = ["LICENSE", "LICENSE-MIT", "NOTICE.txt", "USE_POLICY.md"];
    assert_eq!(terms, expected.map(|name| dir.path().join(name)));
}
