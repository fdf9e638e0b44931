//! `moh-generate` as a process: its output, and a sentence for each invalid input.

use std::fs;
use std::path::Path;
use std::process::Command;

use moh_kernels::{Cpu, ElementType};
use moh_model::Generator;
use moh_testkit::options::take_negative_numbers;
use moh_testkit::programs::{
    VOCABULARY, WORDS, edit_config, edit_weights, exits, failure, fixtures, program, read_json,
    success, workplace, write_moh, write_tokenizer,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-generate");

fn of_source(dir: &Path, options: &[&str]) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(["--model", "source"]).args(options);
    command
}

/// Returns the command on the model `source` and a prompt of three words.
fn moh_generate(dir: &Path, options: &[&str]) -> Command {
    of_source(dir, &[&["--prompt", "w1 w2 w3"], options].concat())
}

fn told(dir: &Path, options: &[&str]) -> (String, String) {
    exits(&mut moh_generate(dir, options), 0)
}

/// Returns a directory with a model in `source`. Its tokenizer has fewer words than its vocabulary has rows.
fn prepared() -> tempfile::TempDir {
    let dir = workplace();
    write_tokenizer(&dir.path().join("source"), "w0");
    dir
}

#[test]
fn greedy_text_is_always_the_same_and_as_long_as_asked() {
    let dir = prepared();
    let text = success(&mut moh_generate(dir.path(), &["--max-tokens", "9"]));
    assert!(text.starts_with("w1 w2 w3 w") && text.ends_with('\n'), "{text}");
    assert_eq!(text.split_whitespace().count(), 12, "{text}");
    let again = ["--max-tokens", "9", "--temperature", "0", "--seed", "7"];
    assert_eq!(success(&mut moh_generate(dir.path(), &again)), text);
    let longer = success(&mut moh_generate(dir.path(), &[]));
    assert!(longer.starts_with(text.trim_end()), "{longer}");
    assert_eq!(longer.split_whitespace().count(), 64, "to the end of the context");
    assert_eq!(success(&mut moh_generate(dir.path(), &["--max-tokens", "0"])), "w1 w2 w3\n");
    for dtype in ["f32", "bf16"] {
        success(&mut moh_generate(dir.path(), &["--dtype", dtype, "--max-tokens", "2"]));
    }
    // The speed does not include the prompt.
    let (_, line) = told(dir.path(), &["--max-tokens", "9"]);
    assert!(line.starts_with("9 tokens, ") && line.trim_end().ends_with(" s"), "{line}");
    let (_, rest) = line.split_once("tokens, ").unwrap();
    let (rate, rest) = rest.split_once(" tokens/s after a prompt of 3 tokens in ").unwrap();
    let seconds = rest.trim_end().strip_suffix(" s").unwrap();
    assert!(rate.parse::<f64>().unwrap() > 0.0 && seconds.parse::<f64>().is_ok(), "{line}");
}

#[test]
fn a_seed_reproduces_its_text() {
    let dir = prepared();
    let sample = |seed: &str| {
        let options = ["--temperature", "1", "--top-p", "0.95", "--seed", seed];
        success(&mut moh_generate(dir.path(), &options))
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn rows_that_pad_the_vocabulary_are_never_chosen() {
    let dir = prepared();
    // A padding row has the largest logit by far, for any hidden state.
    edit_weights(dir.path(), |tensors| {
        let (_, shape, bytes) =
            tensors.iter_mut().find(|(name, ..)| name == "lm_head.weight").unwrap();
        for (id, row) in bytes.chunks_mut(4 * shape[1]).enumerate().skip(WORDS) {
            // Rows of even ids point along the first component, rows of odd ids in the opposite direction.
            let weight = if id % 2 == 0 { 1e3f32 } else { -1e3 };
            row.fill(0);
            row[..4].copy_from_slice(&weight.to_le_bytes());
        }
    });
    let model =
        moh_program::models::load(Cpu, ElementType::F32, &dir.path().join("source"), 3).unwrap();
    let logits = Generator::new(&model, 3).unwrap().extend(&[1, 2, 3]).unwrap();
    let largest = |row: &[f32]| (0..VOCABULARY).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    assert!(largest(&logits) >= WORDS, "the test's own premise");

    for options in [&[][..], &["--temperature", "1"], &["--temperature", "2", "--top-p", "0.9"]] {
        let text = success(&mut moh_generate(dir.path(), options));
        for word in text.split_whitespace() {
            let id: usize = word.strip_prefix('w').unwrap().parse().unwrap();
            assert!(id < WORDS, "{text}");
        }
        assert_eq!(text.split_whitespace().count(), 64, "{text}");
    }
}

#[test]
fn a_file_names_the_end_and_the_output_says_why_it_ended() {
    let dir = prepared();
    let run = |options: &[&str]| told(dir.path(), options);
    let (text, _) = run(&["--max-tokens", "1"]);
    let first: u32 = text.split_whitespace().last().unwrap()[1..].parse().unwrap();
    let (text, reason) = run(&["--max-tokens", "3000"]);
    assert_eq!(text.split_whitespace().count(), 64);
    assert!(reason.starts_with("61 tokens, ended by the model's context length, "), "{reason}");
    assert!(run(&["--max-tokens", "1"]).1.starts_with("1 token, "));
    let file = dir.path().join("source/generation_config.json");
    fs::write(&file, format!("{{\"eos_token_id\": [{VOCABULARY}, {first}]}}")).unwrap();
    let (text, reason) = run(&[]);
    assert_eq!(text, "w1 w2 w3\n");
    assert!(reason.starts_with("0 tokens, ended by the model, "), "{reason}");
    fs::remove_file(&file).unwrap();
    edit_config(dir.path(), |config| config["eos_token_id"] = vec![first].into());
    assert_eq!(run(&[]).0, "w1 w2 w3\n");
    fs::write(&file, "{\"eos_token_id\": \"w1\"}").unwrap();
    let message = failure(dir.path(), &mut moh_generate(dir.path(), &[]), 1);
    let expected = "source/generation_config.json: eos_token_id: expected a token id, found \"w1\"";
    assert_eq!(message, expected);
}

#[test]
fn limits_of_sampling_ask_for_it_or_say_that_they_have_no_effect() {
    let dir = prepared();
    let run = |options: &[&str]| told(dir.path(), options);
    let sampled = run(&["--top-p", "0.95", "--seed", "4"]);
    let explicit = run(&["--top-p", "0.95", "--seed", "4", "--temperature", "1"]);
    assert_eq!(sampled.0, explicit.0);
    assert_ne!(sampled.0, run(&["--top-p", "0.95", "--seed", "5"]).0);
    assert!(!sampled.1.contains("warning"), "{}", sampled.1);
    let greedy = run(&["--temperature", "0", "--top-p", "0.95"]);
    assert_eq!(greedy.0, run(&[]).0);
    assert_eq!(run(&["--temperature", "9", "--top-k", "1", "--seed", "4"]).0, greedy.0);
    assert_ne!(run(&["--temperature", "9"]).0, greedy.0);
    let warning = "warning: --temperature 0 always selects the most likely token: --top-k, --top-p and --min-p \
                   have no effect\n";
    assert!(greedy.1.starts_with(warning), "{}", greedy.1);
}

#[test]
fn penalties_avoid_tokens_and_values_without_meaning_are_refused() {
    let dir = prepared();
    let words = |options: &[&str]| {
        let text =
            success(&mut moh_generate(dir.path(), &[&["--max-tokens", "9"], options].concat()));
        text.split_whitespace().skip(3).map(str::to_owned).collect::<Vec<_>>()
    };
    for penalty in ["--presence-penalty", "--frequency-penalty", "--repetition-penalty"] {
        let found = words(&[penalty, "1e9"]);
        let differ: std::collections::HashSet<&String> = found.iter().collect();
        assert_eq!((found.len(), differ.len()), (9, 9), "{penalty}: {found:?}");
        // The prompt counts only for the repetition penalty.
        let in_prompt = |word: &String| ["w1", "w2", "w3"].contains(&word.as_str());
        assert!(penalty != "--repetition-penalty" || !found.iter().any(in_prompt), "{found:?}");
    }
    let first = words(&[]).remove(0);
    assert!(words(&["--frequency-penalty", "-1e9"]).iter().all(|word| *word == first));
    assert_eq!(words(&["--min-p", "1", "--seed", "7"]), words(&[]));
    for (option, value, expected) in [
        ("--min-p", "1.5", "--min-p 1.5: must be at least 0 and at most 1"),
        ("--repetition-penalty", "0", "--repetition-penalty 0: must be above 0"),
        ("--presence-penalty", "nan", "--presence-penalty NaN: must be a number"),
    ] {
        let mut command = moh_generate(dir.path(), &[option, value]);
        assert_eq!(failure(dir.path(), &mut command, 2), expected);
    }
}

#[test]
fn prompts_come_from_files_and_standard_input() {
    let dir = prepared();
    let expected = success(&mut moh_generate(dir.path(), &["--max-tokens", "9"]));
    fs::write(dir.path().join("prompt.txt"), "w1 w2 w3\n").unwrap();
    let with = |file: &str| of_source(dir.path(), &["--max-tokens", "9", "--prompt-file", file]);
    assert_eq!(success(&mut with("prompt.txt")), expected);
    let input = fs::File::open(dir.path().join("prompt.txt")).unwrap();
    assert_eq!(success(with("-").stdin(input)), expected);
    let message = failure(dir.path(), &mut with("none.txt"), 1);
    assert!(message.starts_with("--prompt-file none.txt: "), "{message}");
    exits(with("prompt.txt").args(["--prompt", "w1"]), 2);
}

#[test]
fn a_message_is_answered_in_the_chat_template() {
    let dir = prepared();
    let template = "{% for message in messages %}{{ 'w1 ' if message.role == 'system' else 'w2 ' }}\
         {{ message.content }} {% endfor %}{% if add_generation_prompt %}{{ bos_token }}{% endif %}";
    let config = serde_json::json!({ "chat_template": template, "bos_token": "w36" });
    let options = ["--max-tokens", "9", "--chat", "--system", "w7"];
    let message = failure(dir.path(), &mut moh_generate(dir.path(), &options), 1);
    assert!(message.starts_with("source: the tokenizer has no chat template"), "{message}");
    fs::write(dir.path().join("source/tokenizer_config.json"), config.to_string()).unwrap();
    let answer = success(&mut moh_generate(dir.path(), &options));
    let prompt = "w1 w7 w2 w1 w2 w3 w36";
    let continued = success(&mut of_source(dir.path(), &["--max-tokens", "9", "--prompt", prompt]));
    assert_eq!(continued.strip_prefix(prompt).unwrap().trim(), answer.trim());
    assert_eq!(answer.split_whitespace().count(), 9);
    // A system message without --chat.
    exits(&mut moh_generate(dir.path(), &["--system", "w7"]), 2);
}

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = workplace();
    assert!(take_negative_numbers(PROGRAM, &[], dir.path()) >= 10);
    let arguments = ["--prompt", "- One", "--chat", "--system", "- Two"];
    // The model has no tokenizer.
    let message = failure(dir.path(), &mut of_source(dir.path(), &arguments), 1);
    assert!(message.contains("tokenizer"), "{message}");
}

#[test]
fn a_context_length_beyond_all_memory_costs_only_what_is_generated() {
    let dir = prepared();
    let asked = ["--max-tokens", "9"];
    let text = success(&mut moh_generate(dir.path(), &asked));
    edit_config(dir.path(), |config| config["max_position_embeddings"] = (1u64 << 40).into());
    assert_eq!(success(&mut moh_generate(dir.path(), &asked)), text);
    let asked = ["--max-tokens", "1099511627776"];
    let message = failure(dir.path(), &mut moh_generate(dir.path(), &asked), 1);
    assert!(message.contains("no room for 8796093022208 bytes"), "{message}");
}

#[test]
fn prompts_and_models_that_do_not_fit_are_refused() {
    let dir = prepared();
    let root = dir.path();
    let prompt = |prompt: &str| failure(root, &mut of_source(root, &["--prompt", prompt]), 1);
    assert!(prompt(&"w1 ".repeat(64)).starts_with("--prompt: 64 tokens, expected 1 to 63"));
    assert!(prompt("").starts_with("--prompt: 0 tokens, expected 1 to 63"));

    fs::remove_file(root.join("source/tokenizer.json")).unwrap();
    let message = failure(root, &mut moh_generate(root, &[]), 1);
    assert_eq!(message, "source: contains no tokenizer.json, which text requires");
}

#[test]
fn wrong_usage_exits_with_two_and_the_help_has_an_example() {
    let dir = prepared();
    for options in [
        &["--temperature", "-1"][..],
        &["--temperature=-1"],
        &["--temperature", "nan"],
        &["--top-p", "0"],
        &["--top-p", "1.1"],
        &["--max-tokens", "-1"],
        &["--none"],
    ] {
        assert_eq!(exits(&mut moh_generate(dir.path(), options), 2).0, "", "{options:?}");
    }
    let negative = failure(dir.path(), &mut moh_generate(dir.path(), &["--temperature", "-1"]), 2);
    assert_eq!(negative, "--temperature -1: must be at least 0");
    let text = success(program(PROGRAM, dir.path()).arg("--help"));
    assert!(text.contains("Example") && text.contains("\n  moh-generate --model "), "{text}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_is_refused_by_a_build_without() {
    let dir = prepared();
    let message = failure(dir.path(), &mut moh_generate(dir.path(), &["--device", "cuda"]), 1);
    let expected = "--device cuda: this build supports the CPU only: build it with --features cuda";
    assert_eq!(message, expected);
    exits(&mut moh_generate(dir.path(), &["--device", "gpu"]), 2);
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_known_story_of_the_fixtures_is_told() {
    let fixtures = fixtures();
    let cases = read_json(&fixtures.join("vectors/greedy-stories260K.json"));
    let mut told = 0;
    for case in cases["cases"].as_array().unwrap() {
        let Some(text) = case["text"].as_str() else { continue };
        let dir = tempfile::tempdir().unwrap();
        let mut model = fixtures.join("stories260K");
        if let (Some(shared), Some(top_k)) =
            (case["shared"].as_u64(), case["routed_top_k"].as_u64())
        {
            let out = dir.path().join("moh");
            write_moh(&model, &out, shared as usize, top_k as usize);
            model = out;
        }
        let new =
            case["ids"].as_array().unwrap().len() as u64 - case["prompt_len"].as_u64().unwrap();
        let mut command = program(PROGRAM, dir.path());
        command.arg("--model").arg(model).args(["--prompt", case["prompt"].as_str().unwrap()]);
        let found = success(command.args(["--max-tokens", &new.to_string()]));
        assert_eq!(found.trim_end(), text.trim_end());
        told += 1;
    }
    assert!(told > 0);
}
