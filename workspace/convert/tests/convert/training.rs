//! From a Hugging Face directory through a conversion, which may enlarge the vocabulary, and training to an export.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use moh_calibrate::{CalibrationOptions, CalibrationTokens};
use moh_comm::World;
use moh_convert::{Calibrated, ConversionOptions, Receipt, TargetAttention, convert};
use moh_data::{TokenFile, Windows};
use moh_hf::{ConfigFile, StoredModel, WeightFiles, write_random_model};
use moh_kernels::open_device::OpenDevice;
use moh_kernels::{Cpu, DType, ElementType};
use moh_model::{HeadCounts, Model, MohConfig, RouterKind, SharedChoice};
use moh_recipe::{AttentionKind, Recipe};
use moh_step::{EvaluationText, Evaluator};
use moh_text::TextTokenizer;
use moh_text::prepare::AppendEos;
use moh_train::{Event, ModelSource, Outcome, RunOptions};
use serde_json::{Value, json};

use moh_testkit::assert_refused;
use moh_testkit::programs::{copy_all, fixtures, read_json};
use moh_testkit::small_tokenizer::{END_OF_TEXT, write_tokenizer};
use moh_testkit::texts::prepare_text;

const TEXT: &str = "{\"text\": \"the ship left the village and the village left the ship\"}\n";

/// Returns a directory with [`prepare_model`]'s files of a Llama.
fn prepared() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    prepare_model(dir.path(), "llama", 4, 2);
    dir
}

/// Writes a model with its tokenizer, a larger tokenizer with two more tokens, and training text of each tokenizer.
fn prepare_model(dir: &Path, model_type: &str, heads: usize, kv_heads: usize) {
    std::fs::write(dir.join("text.jsonl"), TEXT.repeat(20)).unwrap();
    let old = dir.join("model");
    write_tokenizer(&old, &[" left"]);
    let rows = TextTokenizer::load(&old).unwrap().vocab_size();
    let config = json!({
        "model_type": model_type, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": rows, "head_dim": 2,
        "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": false, "hidden_act": "silu",
    });
    let weights = dir.join("weights");
    let config = ConfigFile::from_value(config, Path::new("config.json")).unwrap();
    write_random_model(&weights, &config, DType::F32, 1 << 30, 5).unwrap();
    copy_all(&weights, &old);
    let mut larger = read_json(&old.join("tokenizer.json"));
    for (id, content) in [(rows, "village"), (rows + 1, " ship")] {
        larger["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        }));
    }
    let new = dir.join("larger");
    std::fs::create_dir(&new).unwrap();
    std::fs::write(new.join("tokenizer.json"), larger.to_string()).unwrap();
    for (tokenizer, prefix) in [(&new, "tokens"), (&old, "own-tokens")] {
        let (text, end) = (dir.join("text.jsonl"), AppendEos::Token(END_OF_TEXT));
        prepare_text(tokenizer, &text, &dir.join(prefix), end);
    }
}

fn recipe(dir: &Path) -> Recipe {
    let path = |name: &str| dir.join(name).display().to_string();
    let text = format!(
        r#"
        [run]
        dir = "{}"
        seed = 1
        device = "cpu"
        dtype = "f32"
        [model]
        from = "{}"
        [data]
        sequence_length = 8
        sources = [{{ path = "{}" }}]
        [[stage]]
        name = "moh"
        attention = "moh"
        tokens = 32
        batch_tokens = 16
        micro_batch = 2
        learning_rate = {{ max = 1e-3, min = 1e-4, warmup_steps = 0 }}
        "#,
        path("run"),
        path("model"),
        path("own-tokens"),
    );
    Recipe::parse(&text, Path::new("recipe.toml"), &[]).unwrap()
}

/// Writes to `expanded` the model with the larger tokenizer's vocabulary.
fn expand(dir: &Path) -> PathBuf {
    let options = ConversionOptions {
        attention: TargetAttention::Dense,
        tokenizer: Some(dir.join("larger")),
        pad_vocab_to: Some(32),
        ..ConversionOptions::new(dir.join("model"), dir.join("expanded"))
    };
    converted(&options);
    options.out
}

/// Writes a verified conversion.
fn converted(options: &ConversionOptions) -> Receipt {
    let conversion = convert(options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    conversion.verify(OpenDevice::Cpu).unwrap();
    conversion.publish().unwrap()
}

/// Returns the recipe of the model in `expanded`, on text of the larger tokenizer.
fn expanded_recipe(dir: &Path) -> Recipe {
    let mut recipe = recipe(dir);
    recipe.model.from = Some(dir.join("expanded").display().to_string());
    recipe.data.sources[0].path = dir.join("tokens");
    recipe
}

#[test]
fn a_run_does_not_enlarge_the_vocabulary_and_names_the_command_that_does() {
    let dir = prepared();
    let (model, larger) = (dir.path().join("model"), dir.path().join("larger"));
    let mut recipe = recipe(dir.path());
    (recipe.model.tokenizer, recipe.model.pad_vocab_to) = (Some(larger.clone()), Some(32));
    let error = run(&mut recipe, &model).unwrap_err().to_string();
    let command = format!(
        "moh-convert --from {} --attention dense --tokenizer {} --pad-vocab-to 32 --out DIR",
        model.display(),
        larger.display()
    );
    assert!(error.contains(&command), "{error}");
    assert!(!dir.path().join("run").exists());
}

/// A run of an earlier version keeps the configuration of the smaller model, and both tokenizers.
#[test]
fn a_run_that_has_enlarged_its_vocabulary_itself_resumes() {
    let dir = prepared();
    let dir = dir.path();
    let expanded = expand(dir);
    let mut whole = expanded_recipe(dir);
    whole.run.dir = dir.join("whole");
    run(&mut whole, &expanded).unwrap();
    let mut recipe = expanded_recipe(dir);
    let outcome = run_until(&mut recipe, &expanded, 1).unwrap();
    assert_eq!(outcome, Outcome::Stopped { step: 1 });

    let (model, larger, kept) = (dir.join("model"), dir.join("larger"), dir.join("run/model"));
    std::fs::create_dir(kept.join("tokenizer")).unwrap();
    let mut hashes = serde_json::Map::new();
    for (name, from) in [
        ("config.json", model.join("config.json")),
        ("tokenizer.json", model.join("tokenizer.json")),
        ("tokenizer_config.json", model.join("tokenizer_config.json")),
        ("special_tokens_map.json", model.join("special_tokens_map.json")),
        ("tokenizer/tokenizer.json", larger.join("tokenizer.json")),
    ] {
        let bytes = std::fs::read(from).unwrap();
        std::fs::write(kept.join(name), &bytes).unwrap();
        hashes.insert(name.to_owned(), blake3::hash(&bytes).to_hex().as_str().into());
    }
    let edit = |name: &str, edit: &dyn Fn(&str) -> String| {
        let path = dir.join("run").join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, edit(&text)).unwrap();
    };
    edit("inputs.json", &|text| {
        let mut inputs: Value = serde_json::from_str(text).unwrap();
        inputs["model_files"] = Value::Object(hashes.clone());
        inputs.to_string()
    });
    let keys = |from: &Path| format!("from = \"{}\"", from.display());
    let tokenizer = format!("\ntokenizer = \"{}\"\npad_vocab_to = 32", larger.display());
    for name in [".moh-run", "recipe.toml"] {
        edit(name, &|text| {
            let changed = text.replace(&keys(&expanded), &(keys(&model) + &tokenizer));
            assert_ne!(changed, text);
            changed
        });
    }
    recipe.model.from = Some(model.display().to_string());
    (recipe.model.tokenizer, recipe.model.pad_vocab_to) = (Some(larger), Some(32));
    assert!(matches!(run(&mut recipe, &model).unwrap(), Outcome::Finished(_)));
    let weights = |run: &str| std::fs::read(dir.join(run).join("export/model.safetensors"));
    assert!(weights("run").unwrap() == weights("whole").unwrap());
}

#[test]
fn a_new_model_takes_the_special_tokens_of_its_tokenizer() {
    let dir = prepared();
    let mut recipe = recipe(dir.path());
    recipe.model.from = None;
    recipe.model.tokenizer = Some(dir.path().join("model"));
    let new = |eos: Option<u32>| {
        let mut fields = json!({
            "vocab_size": 262, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
            "max_position_embeddings": 16,
        });
        if let Some(eos) = eos {
            fields["eos_token_id"] = json!([eos]);
        }
        Some(serde_json::from_value(fields).unwrap())
    };
    let path = Path::new("recipe.toml");
    let tokens = |recipe: &Recipe| {
        let source = ModelSource::open(recipe, path, None).unwrap();
        let config = source.config_file();
        (config.fields["bos_token_id"].clone(), config.fields["eos_token_id"].clone())
    };
    recipe.model.new = new(None);
    let (bos, eos) = tokens(&recipe);
    assert!(bos.is_u64() && eos.is_u64() && bos != eos, "{bos} {eos}");
    recipe.model.new = new(Some(7));
    assert_eq!(tokens(&recipe).1, json!(7));
}

#[test]
fn a_run_keeps_the_head_of_a_model_that_is_not_really_tied() {
    let dir = prepared();
    let model = dir.path().join("model");
    let text = std::fs::read_to_string(model.join("config.json")).unwrap();
    let tied = text.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(text, tied);
    std::fs::write(model.join("config.json"), tied).unwrap();
    let mut recipe = recipe(dir.path());
    let source = ModelSource::open(&recipe, Path::new("recipe.toml"), Some(&model)).unwrap();
    assert!(source.warning().unwrap().contains("the model is not tied"));
    drop(source);
    run(&mut recipe, &model).unwrap();
    let export = dir.path().join("run/export");
    let config = ConfigFile::read(&export).unwrap().config;
    assert!(!config.tie_word_embeddings);
    WeightFiles::open(&export).unwrap().check(&config).unwrap();
}

#[test]
fn another_vocabulary_is_padded_as_in_training() {
    let dir = prepared();
    let options = ConversionOptions {
        tokenizer: Some(dir.path().join("larger")),
        ..ConversionOptions::new(dir.path().join("model"), dir.path().join("expanded"))
    };
    assert_eq!(converted(&options).vocab_size[1] % 128, 0);
}

fn run(recipe: &mut Recipe, model: &Path) -> Result<Outcome, moh_train::Error> {
    run_until(recipe, model, u64::MAX)
}

/// Runs the recipe up to step `last`.
fn run_until(recipe: &mut Recipe, model: &Path, last: u64) -> Result<Outcome, moh_train::Error> {
    let (stop, world) = (AtomicBool::new(false), World::single());
    let (path, options) = (Path::new("recipe.toml"), RunOptions::new(&stop));
    let mut stop_at = |event: Event<'_>| {
        let is_last = matches!(event, Event::Step { step, .. } if step == last);
        stop.fetch_or(is_last, Ordering::Relaxed);
    };
    moh_train::run(recipe, path, Some(model), OpenDevice::Cpu, &world, options, &mut stop_at)
}

#[test]
fn a_run_with_a_larger_vocabulary_exports_it_with_its_tokenizer() {
    let dir = prepared();
    let expanded = expand(dir.path());
    let mut recipe = expanded_recipe(dir.path());
    let outcome = run(&mut recipe, &expanded).unwrap();
    assert!(matches!(outcome, Outcome::Finished(_)));
    let export = dir.path().join("run/export");
    let config = ConfigFile::read(&export).unwrap().config;
    assert_eq!(config.vocab_size % 32, 0);
    assert_eq!(
        config.moh.clone().map(|moh| (moh.shared_heads, moh.routed_top_k)),
        Some((2.into(), 1.into()))
    );
    WeightFiles::open(&export).unwrap().check(&config).unwrap();
    let exported = TextTokenizer::load(&export).unwrap();
    let larger = TextTokenizer::load(&dir.path().join("larger")).unwrap();
    assert_eq!(exported.hash(), larger.hash());
}

#[test]
fn the_model_before_it_took_over_a_larger_vocabulary_teaches() {
    let dir = prepared();
    let expanded = expand(dir.path());
    // A text without the new tokens, which the smaller teacher does not know, and without a record of its tokenizer.
    std::fs::remove_file(dir.path().join("own-tokens.json")).unwrap();
    let taught = |run_dir: &str, teacher: &str| {
        let mut recipe = recipe(dir.path());
        recipe.model.from = Some(expanded.display().to_string());
        recipe.run.dir = dir.path().join(run_dir);
        let teacher = dir.path().join(teacher);
        recipe.stages[0].attention = AttentionKind::Dense;
        recipe.stages[0].distill = serde_json::from_value(json!({ "teacher": teacher })).unwrap();
        run(&mut recipe, &expanded).unwrap();
        let metrics = std::fs::read_to_string(recipe.run.dir.join("metrics.jsonl")).unwrap();
        let first: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
        first["distillation_loss"].as_f64().unwrap()
    };
    // The rows that both models have are equal. Other rows are excluded from both distributions.
    assert_eq!([taught("small", "model"), taught("large", "expanded")], [0.0, 0.0]);
}

#[test]
fn a_qwen3_is_converted_trained_and_exported() {
    let dir = tempfile::tempdir().unwrap();
    prepare_model(dir.path(), "qwen3", 4, 2);
    let options = ConversionOptions::new(dir.path().join("model"), dir.path().join("converted"));
    converted(&options);
    let mut recipe = recipe(dir.path());
    let outcome = run(&mut recipe, &options.out).unwrap();
    assert!(matches!(outcome, Outcome::Finished(_)));
    let export = dir.path().join("run/export");
    let file = ConfigFile::read(&export).unwrap();
    assert_eq!(file.fields["model_type"], "moh_qwen3");
    assert_eq!(file.fields["architectures"], json!(["MohQwen3ForCausalLM"]));
    let weights = WeightFiles::open(&export).unwrap();
    weights.check(&file.config).unwrap();
    let mut trained = [0f32; 2];
    weights.read_f32("model.layers.1.self_attn.k_norm.weight", &mut trained).unwrap();
    assert!(trained.iter().all(|&weight| weight != 1.0), "{trained:?}");
}

pub fn windows(prefix: &Path, length: usize) -> Windows {
    Windows::new(TokenFile::open(prefix).unwrap(), length).unwrap()
}

/// Converts a model by measurement on a text, with `active` active heads, unless it stops at a layer.
fn measured(
    (source, out): (PathBuf, PathBuf),
    (router, shared): (RouterKind, SharedChoice),
    active: usize,
    windows: &Windows,
    stop_at: Option<usize>,
) -> Result<ConversionOptions, moh_convert::Error> {
    let options = ConversionOptions::new(source, out);
    let config = ConfigFile::read(&options.source).unwrap().config;
    let mut ids = vec![0; windows.len() as usize * windows.length()];
    for (window, ids) in (0..).zip(ids.chunks_exact_mut(windows.length())) {
        windows.read(window, ids).unwrap();
    }
    let tokens = CalibrationTokens::new(ids, windows.length(), 4096, &config).unwrap();
    let (shared_heads, top_k) = ((active / 2).into(), active - active / 2);
    let moh = MohConfig { router, shared_heads, routed_top_k: HeadCounts::All(top_k) };
    let calibration = CalibrationOptions { moh, shared, refit: true, stored: None };
    let stop = AtomicBool::new(false);
    let mut progress = |done, _| stop.store(stop_at == Some(done), Ordering::Relaxed);
    let (texts, cpu, progress) = (vec!["tokens".to_owned()], OpenDevice::Cpu, &mut progress);
    let calibrated =
        Calibrated::measure(&options, &calibration, &tokens, texts, cpu, progress, &stop)?;
    Ok(ConversionOptions { calibrated: Some(calibrated.into()), ..options })
}

#[test]
fn an_interrupted_calibration_goes_on_behind_its_layers() {
    let dir = tempfile::tempdir().unwrap();
    prepare_model(dir.path(), "qwen3", 32, 8);
    let text = windows(&dir.path().join("own-tokens"), 16);
    let measure = |out: &str, stop_at| {
        let place = (dir.path().join("model"), dir.path().join(out));
        measured(place, (RouterKind::Linear, SharedChoice::Calibrated), 16, &text, stop_at)
    };
    converted(&measure("whole", None).unwrap());
    let expected = "stopped.calibration keeps the layers that were measured, 1;";
    assert_refused(measure("stopped", Some(1)), expected);
    // A kill may leave part of a record.
    let log = dir.path().join("stopped.calibration");
    let mut bytes = fs::read(&log).unwrap();
    bytes.extend([7; 100]);
    fs::write(&log, bytes).unwrap();
    converted(&measure("stopped", None).unwrap());
    let [whole, again] = ["whole", "stopped"]
        .map(|out| fs::read(dir.path().join(out).join("model.safetensors")).unwrap());
    assert!(whole == again && !log.exists());
}

pub fn loss(directory: &Path, windows: &Windows) -> f64 {
    let stored = StoredModel::open(directory).unwrap();
    let mut model: Model<Cpu> = stored.load(Cpu, ElementType::F32, windows.length()).unwrap();
    let text = EvaluationText { windows, count: windows.len(), decoded_bytes: None };
    let mut evaluator = Evaluator::new(&model, 4, windows.length()).unwrap();
    evaluator.evaluate(&mut model, text, None, &mut |_, _| {}).unwrap().loss
}

/// Heads are chosen by exchanges, since 32 heads have too many sets. Then trains with the dense model as the teacher.
#[test]
fn a_qwen3_of_32_heads_is_measured_taught_and_exported() {
    for router in [RouterKind::QueryNorm, RouterKind::Group, RouterKind::TwoStage] {
        let dir = tempfile::tempdir().unwrap();
        prepare_model(dir.path(), "qwen3", 32, 8);
        let text = windows(&dir.path().join("own-tokens"), 16);
        let place = (dir.path().join("model"), dir.path().join("converted"));
        let choice = (router, SharedChoice::CalibratedNumber);
        let options = measured(place, choice, 16, &text, None).unwrap();
        converted(&options);
        let chosen = ConfigFile::read(&options.out).unwrap().config.moh.unwrap();
        assert!((0..2).all(|layer| chosen.layer(layer).active() == 16), "{chosen:?}");

        let mut recipe = recipe(dir.path());
        let stage = &mut recipe.stages[0];
        stage.tokens *= 10;
        stage.distill = serde_json::from_value(json!({ "teacher": options.source })).unwrap();
        let outcome = run(&mut recipe, &options.out).unwrap();
        assert!(matches!(outcome, Outcome::Finished(_)));
        let export = dir.path().join("run/export");
        let exported = ConfigFile::read(&export).unwrap();
        assert_eq!(exported.config.moh, Some(chosen), "{router:?}");
        assert_eq!(exported.fields["moh_output_refitted"], true);
        let (before, after) = (loss(&options.out, &text), loss(&export, &text));
        assert!(after < before, "{router:?}: {before} {after}");
    }
}

/// Choosing four of eight heads by measurement raises stories260K's loss only a little, and steps with the dense model
/// as the teacher recover most of it. The dense loss is 1.2202. Routers that ignore the token reach 1.3715, untuned.
#[test]
#[ignore = "needs stories260K in ../shared/fixtures, beside the repository"]
fn stories260k_keeps_its_loss() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = tempfile::tempdir().unwrap();
    let source = fixtures().join("stories260K");
    for part in ["train", "valid"] {
        let text = fixtures().join(format!("data/stories-{part}.jsonl"));
        prepare_text(&source, &text, &dir.path().join(part), AppendEos::Never);
    }
    let path = |name: &str| dir.path().join(name).display().to_string();
    let valid = windows(&dir.path().join("valid"), 256);
    let place = (source.clone(), dir.path().join("converted"));
    let text = windows(&dir.path().join("train"), 256).spread(64);
    let choice = (RouterKind::QueryNorm, SharedChoice::CalibratedNumber);
    let options = measured(place, choice, 4, &text, None).unwrap();
    converted(&options);
    let found = loss(&options.out, &valid);
    assert!(found <= 1.365, "untuned: {found}");

    let changes = [
        format!("run.dir={}", path("run")),
        format!("data.sources=[{{ path = \"{}\" }}]", path("train")),
        format!("data.validation.path={}", path("valid")),
        format!("stage.tune.distill={{ teacher = \"{}\" }}", source.display()),
        "stage.tune.tokens=307200".to_owned(),
    ];
    let recipe = repository.join("tools/quality/tune.toml");
    let mut recipe = Recipe::load(&recipe, &changes).unwrap();
    recipe.model.from = Some(options.out.display().to_string());
    let outcome = run(&mut recipe, &options.out).unwrap();
    assert!(matches!(outcome, Outcome::Finished(_)));
    let found = loss(&Path::new(&path("run")).join("export"), &valid);
    assert!(found <= 1.29, "tuned: {found}");
}
