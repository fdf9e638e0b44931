//! Recipes that are refused, with all of their faults.

use moh_step::GroupFactors;

use super::*;

#[test]
fn all_unknown_keys_come_at_once_with_the_key_that_was_meant() {
    let text = edited(
        "micro_batch = 2\nattention = \"moh\"",
        "microbatch = 2\nattention = \"moh\"\nmoh = { routed_topk = 3 }",
    )
    .replace("seed = 1", "sede = 1")
    .replace("num_hidden_layers", "n_layer")
        + "[checkpoints]\nkeep = 1\n[zzz]\n";
    let message = refused(&text, &[]);
    // A misspelt key is also missing, but has one message.
    assert_eq!(
        message.lines().collect::<Vec<_>>(),
        [
            "recipes/x.toml: line 4: run.sede: unknown key, did you mean run.seed",
            "recipes/x.toml: line 12: model.new.n_layer: unknown key, did you mean \
             model.new.num_hidden_layers",
            "recipes/x.toml: line 36: stage.moh.microbatch: unknown key, did you mean \
             stage.moh.micro_batch",
            "recipes/x.toml: line 38: stage.moh.moh.routed_topk: unknown key, did you mean \
             stage.moh.moh.routed_top_k",
            "recipes/x.toml: line 40: checkpoints: unknown key, did you mean checkpoint",
            "recipes/x.toml: line 42: zzz: unknown key, expected one of run, model, data, stage, \
             precision, memory, checkpoint, log, guard",
        ]
    );
}

#[test]
fn all_faults_of_a_recipe_come_at_once() {
    // A missing key, a missing table, wrong types, an unknown key, an impossible number, and overrides that do not
    // apply. Keys that depend on values that could not be read have no fault.
    let text = edited("seed = 1", "")
        .replace("device = \"cpu\"", "device = \"gpu\"")
        .replace("hidden_size = 64", "hidden_size = \"64\"")
        .replace("sequence_length = 32\n", "")
        .replace("tokens = 1000", "tokens = -5")
        .replace("micro_batch = 2\nattention = \"dense\"", "attention = \"sparse\"")
        .replace("name = \"moh\"\n", "")
        + "moh = { router = \"two\", shared_heads = -1 }\n[checkpoint]\nkeep = 0\nevery = 2\n";
    let overrides =
        ["stage.mho.tokens=1", "run.dri=x", "stage.adapt.shared_heads=2", "log.every_steps=0"];
    let message = refused(&text, &overrides);
    assert_eq!(
        message.lines().collect::<Vec<_>>(),
        [
            "recipes/x.toml: line 2: run.seed: missing",
            "recipes/x.toml: line 5: run.device: must be \"cpu\" or \"cuda\", not \"gpu\"",
            "recipes/x.toml: line 10: model.new.hidden_size: must be a whole number from 0, not the \
             text \"64\"",
            "recipes/x.toml: line 16: data.sequence_length: missing",
            "recipes/x.toml: line 23: stage.adapt.micro_batch: missing",
            "recipes/x.toml: line 25: stage.adapt.tokens: must be a whole number from 0, not -5",
            "recipes/x.toml: line 27: stage.adapt.attention: must be \"dense\" or \"moh\", not \
             \"sparse\"",
            "recipes/x.toml: line 30: stage.1.name: missing",
            "recipes/x.toml: line 36: stage.1.moh.router: must be \"query-norm\" or \"group\" or \"static\" or \"linear\" or \"one-stage\" or \"two-stage\", not \
             \"two\"",
            "recipes/x.toml: line 36: stage.1.moh.shared_heads: must be a whole number from 0, or a \
             list of one for each layer, not -1",
            "recipes/x.toml: line 38: checkpoint.keep = 0: must be at least 1",
            "recipes/x.toml: line 39: checkpoint.every: unknown key, did you mean \
             checkpoint.every_steps",
            "--set: run.dri: unknown key, did you mean run.dir",
            "--set: stage.adapt.shared_heads: unknown key, did you mean stage.adapt.moh.shared_heads",
            "--set: log.every_steps = 0: must be at least 1",
            "--set: stage.mho.tokens: there is no \"mho\", only adapt, 1",
        ],
        "{message}"
    );
    // Hostile input is refused after a number of faults.
    let stages = "[[stage]]\nx = 1\n".repeat(5000);
    assert!(refused(&format!("{}{stages}", SMALL_RECIPE), &[]).lines().count() <= 200);
}

#[test]
fn decay_steps_fit_the_stage_and_the_decay() {
    for (keys, expected) in [
        ("decay_steps = 0", "learning_rate.decay_steps = 0: must be from 1 to "),
        ("decay_steps = 100000", "learning_rate.decay_steps = 100000: must be from 1 to "),
        ("decay = 'constant', decay_steps = 1", "decay_steps = 1: is for decays that end: cosine,"),
        ("decay = \"inverse-square-root\", decay_steps = 1", "decay_steps = 1: is for decays that"),
        ("decay = \"wsd\"", "learning_rate.decay: must be \"cosine\""),
    ] {
        let keys = format!("warmup_steps = 2, {keys} }}");
        refuses_text(&edited("warmup_steps = 2 }", &keys), &[], expected);
    }
}

#[test]
fn shared_heads_are_given_once() {
    let both = "attention = \"moh\"\nmoh = { shared_heads = 1, shared_head_ids = [[0]] }";
    let expected = "stage.moh.moh.shared_head_ids = [..]: is there beside shared_heads: leave one";
    refuses_text(&edited("attention = \"moh\"", both), &[], expected);
}

#[test]
fn what_depends_on_a_faulty_key_is_not_checked() {
    let one = |from: &str, to: &str, expected: &str| {
        let message = refuses_text(&edited(from, to), &[], expected);
        assert_eq!(message.lines().count(), 1, "{message}");
    };
    one("sequence_length = 32", "sequence_length = true", "data.sequence_length: must be");
    one("sequence_length = 32", "seq_length = 32", "did you mean data.sequence_length");
    one("num_hidden_layers = 5", "", "model.new.num_hidden_layers: missing");
    one("[[data.sources]]\npath = \"data/a\"", "", "data.sources: missing");
    one("max = 2e-5", "max = {}", "stage.moh.learning_rate.max: must be a number");
    one("tokens = 1e3", "tokens = \"1e3\"", "stage.moh.tokens: must be a whole number");
    one(
        "learning_rate = { max = 2e-5, min = 1e-6, warmup_steps = 2 }",
        "",
        "stage.moh.learning_rate",
    );
    one("[model.new]", "[model.nwe]", "model.nwe: unknown key, did you mean model.new");
}

#[test]
fn wrong_types_name_the_key_and_what_was_expected() {
    let cases = [
        ("seed = 1", "seed = \"1\"", "run.seed: must be a whole number from 0, not the text \"1\""),
        ("seed = 1", "seed = 1.5", "run.seed: must be a whole number from 0, not 1.5"),
        ("seed = 1", "seed = nan", "run.seed: must be a whole number from 0, not NaN"),
        ("seed = 1", "seed = 2026-01-01", "run.seed: must be a whole number from 0, not the date"),
        ("dtype = \"f32\"", "dtype = 32", "run.dtype: must be \"f32\" or \"bf16\", not 32"),
        ("dtype = \"f32\"", "dtype = 'fp8'", "run.dtype: must be \"f32\" or \"bf16\", not \"fp8\""),
        ("dir = \"runs/small\"", "dir = 3", "run.dir: must be a text in quotes, not 3"),
        (
            "batches = 4",
            "batches = []",
            "data.validation.batches: must be a whole number from 0, not a list",
        ),
        ("path = \"data/a\"", "weight = 1", "data.sources.0.path: missing"),
        ("max = 2e-5", "max = true", "stage.moh.learning_rate.max: must be a number, not true"),
        ("name = \"moh\"\n", "", "stage.1.name: missing"),
        (
            "[data]",
            "[log]\ntensorboard = 1\n[data]",
            "log.tensorboard: must be true or false, not 1",
        ),
        ("[data]", "memory = 3\n[data]", "memory: unknown key"),
        (
            "num_key_value_heads = 4",
            "num_key_value_heads = 4\neos_token_id = -1",
            "model.new.eos_token_id: must be a token or a list of tokens, not -1",
        ),
        (
            "num_key_value_heads = 4",
            "num_key_value_heads = 4\nbos_token_id = 5000000000",
            "model.new.bos_token_id: must be u32",
        ),
        (
            "attention = \"moh\"",
            "attention = \"moh\"\nmoh = { router = \"two\" }",
            "stage.moh.moh.router: must be \"query-norm\" or \"group\" or \"static\" or \"linear\" or \"one-stage\" or \"two-stage\", not \
             \"two\"",
        ),
    ];
    for (from, to, expected) in cases {
        let message = refuses_text(&edited(from, to), &[], expected);
        assert!(message.starts_with("recipes/x.toml: line "), "{message}");
    }
}

#[test]
fn the_guard_has_limits() {
    let guard = with(&[]).guard;
    assert_eq!((guard.factor, guard.patience), (0.0, 10));
    assert_eq!(with(&["guard.factor=3"]).guard.factor, 3.0);
    for (change, expected) in [
        ("guard.factor=1", "guard.factor = 1: must be a finite number above 1, or 0"),
        ("guard.factor=-3", "guard.factor = -3: must be a finite number above 1, or 0"),
        ("guard.factor=inf", "must be a finite number above 1, or 0"),
        ("guard.factor=nan", "must be a finite number above 1, or 0"),
        ("guard.patience=0", "guard.patience = 0: must be at least 1"),
        ("guard.rewind=100", "unknown key"),
        ("guard.median=3", "unknown key"),
    ] {
        refuses(&[change], expected);
    }
}

#[test]
fn the_peak_rate_is_a_positive_number() {
    assert_eq!(with(&["log.peak_tflops=989"]).log.peak_tflops, Some(989.0));
    for value in ["0", "-1", "nan", "inf"] {
        refuses(&[&format!("log.peak_tflops={value}")], "must be a finite number above 0");
    }
}

#[test]
fn every_impossible_number_is_reported_at_once() {
    let faults = [
        ("data.sequence_length=1", " = 1: must be from 2"),
        ("data.sources.0.weight=nan", " = NaN: must be a finite number above 0"),
        ("data.validation.batches=0", " = 0: must be at least 1"),
        ("stage.adapt.tokens=0", " = 0: must be from 1 to"),
        ("stage.adapt.learning_rate.max=inf", " = inf: must be a finite number above 0"),
        ("stage.moh.learning_rate.warmup_steps=9", " = 9: must be at most the stage's 8 steps"),
        (
            "stage.moh.learning_rate.min=3e-5",
            " = 0.00003: must be a number from 0 to max = 0.00002",
        ),
        ("stage.moh.optimizer.beta1=1", " = 1: must be a number from 0 to below 1"),
        ("stage.moh.optimizer.beta2=-0.1", " = -0.1: must be a number from 0 to below 1"),
        ("stage.moh.optimizer.eps=0", " = 0: must be a finite number above 0"),
        ("stage.moh.optimizer.clip_norm=0", " = 0: must be a finite number above 0"),
        ("stage.moh.optimizer.weight_decay=-1", " = -1: must be a finite number from 0"),
        ("stage.moh.parallel.tensor=0", " = 0: must be at least 1"),
        ("stage.moh.parallel.virtual_stages=0", " = 0: must be at least 1"),
        (
            "stage.adapt.parallel.virtual_stages=2",
            " = 2: needs a pipeline: set parallel.pipeline to 2 or",
        ),
        ("stage.moh.moh.balance_loss_weight=nan", " = NaN: must be a finite number from 0"),
        ("stage.moh.micro_batch=0", " = 0: must be at least 1"),
        ("checkpoint.keep=0", " = 0: must be at least 1"),
        ("checkpoint.keep_every=150", " = 150: must be a multiple of checkpoint.every_steps = 100"),
        (
            "checkpoint.every_minutes=-1",
            " = -1: must be from 0 to 525600, a year; 0 for no checkpoints by time",
        ),
        ("log.every_steps=0", " = 0: must be at least 1"),
        ("run.dir=''", ": must be a path in UTF-8, and not empty"),
    ];
    let cpu = ["run.device=cuda", "run.dtype=f32", "precision.gradients=bf16"];
    let changes: Vec<&str> = faults.iter().map(|fault| fault.0).chain(cpu).collect();
    let message = refuses(&changes, "precision.gradients = bf16: must be f32 with run.device");
    for (change, reason) in faults {
        let (key, _) = change.split_once('=').unwrap();
        let expected = format!("{key}{reason}");
        assert!(message.contains(&expected), "{expected}\n{message}");
    }
}

#[test]
fn moments_that_rounding_would_freeze_are_refused() {
    let (dtype, moments) = ("run.dtype=bf16", "precision.moments=bf16");
    let beta2 = "stage.moh.optimizer.beta2=0.999";
    let reason = "must be at most 0.99 with precision.moments = \"bf16\"";
    refuses_key(&[dtype, moments, beta2], "stage.moh.optimizer.beta2 = 0.999: ", reason);
    with(&[dtype, moments, "stage.moh.optimizer.beta2=0.99"]);
    with(&[beta2]);
}

#[test]
fn a_batch_that_is_not_whole_micro_batches_names_the_nearest() {
    let message = refused(SMALL_RECIPE, &["stage.moh.batch_tokens=200"]);
    let expected = "--set: stage.moh.batch_tokens = 200: must be a multiple of sequence_length x \
                    micro_batch = 32 x 2 = 64: nearest 192 and 256";
    assert_eq!(message, expected);
    assert!(refuses(&["stage.moh.batch_tokens=63"], "nearest").ends_with("nearest 64"));
    refused(SMALL_RECIPE, &["stage.moh.micro_batch=9e15", "stage.moh.batch_tokens=9e15"]);
}

#[test]
fn odd_and_duplicate_stage_names_are_refused() {
    for (name, reason) in [
        ("adapt", "is the name of an earlier stage"),
        ("", "must be 1 to 64 letters"),
        ("a.b", "must be 1 to 64 letters"),
        ("../x", "must be 1 to 64 letters"),
        ("-x", "must be 1 to 64 letters"),
        ("\\u0000", "must be 1 to 64 letters"),
        ("\u{e9}", "must be 1 to 64 letters"),
    ] {
        let text = edited("name = \"moh\"", &format!("name = \"{name}\""));
        let message = refused(&text, &[]);
        assert!(message.contains("stage.1.name = ") && message.contains(reason), "{message}");
    }
}

#[test]
fn a_model_is_either_loaded_or_new() {
    refuses(&["model.from=a/b"], "model: has both from and [model.new]");
    for change in ["model.revision=main", "model.config=c.json"] {
        let key = change.split('=').next().unwrap();
        refuses(&[change], &format!("--set: {key}: belongs to from"));
    }
    refuses(&["model={}"], "--set: model: needs from");
    refuses(&["model.pad_vocab_to=128", "model.vocab_size=1000"], "such as 1024");
    refuses(&["model.pad_vocab_to=1099511627776"], " = 1099511627776: must be at most");
}

#[test]
fn a_fresh_models_shape_is_checked() {
    refuses_key(&["model.new.hidden_size=0"], "model.new", "hidden_size = 0: must be from 1");
    for hostile in [
        "model.new.num_attention_heads=0",
        "model.new.num_key_value_heads=3",
        "model.new.vocab_size=1e15",
        "model.new.rms_norm_eps=nan",
        "model.new.rope_theta=inf",
        "model.new.initializer_range=nan",
        "model.new.num_hidden_layers=1e15",
        "model.new.head_dim=7",
        "stage.moh.moh.shared_heads=9",
        "stage.moh.moh.shared_heads=7",
    ] {
        refused(SMALL_RECIPE, &[hostile]);
    }
}

#[test]
fn sequential_order_takes_no_weights() {
    let changes = ["data.order=sequential", "data.sources.0.weight=2"];
    refuses(&changes, "must be 1 with order = \"sequential\"");
}

#[test]
fn text_that_is_not_toml_names_its_line() {
    let message = refused(&edited("seed = 1", "seed = = 1"), &[]);
    assert!(message.starts_with("recipes/x.toml: line 4: "), "{message}");
    refused("", &[]);
    refused(&"[".repeat(100_000), &[]);
    refused(&format!("a = {}", "[".repeat(100_000)), &[]);
    refused(&format!("{}=1", "a.".repeat(1000) + "b"), &[]);
    refused("run = 1", &[]);
}

#[test]
fn files_that_are_no_recipes_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.toml");
    assert!(matches!(Recipe::load(&path, &[]), Err(Error::File(moh_files::FileError::Io { .. }))));
    std::fs::write(&path, b"\xff\xfe").unwrap();
    assert_refused(Recipe::load(&path, &[]), "not text in UTF-8");
    std::fs::write(&path, vec![b'\n'; 2 << 20]).unwrap();
    assert_refused(Recipe::load(&path, &[]), "a recipe has at most");
    std::fs::write(&path, SMALL_RECIPE).unwrap();
    assert_eq!(Recipe::load(&path, &[]).unwrap(), with(&[]));
}

#[test]
fn what_a_stage_cannot_learn_from_is_refused() {
    let refuses_options = |options: &str, key: &str, reason: &str| {
        let change = format!("stage.moh.distill={{ {options} }}");
        refuses_key(&[&change], &format!("stage.moh.distill.{key}"), reason);
    };
    refuses_options("weight = 1.0", "teacher", "missing");
    refuses_options("teacher = ''", "teacher", "must be a path in UTF-8, and not empty");
    refuses_options("teacher = 'start'", "teacher", "is a new model, which has learned nothing");
    for (option, reason) in [
        ("weight = inf", "must be a finite number above 0"),
        ("weight = 0.0", "must be a finite number above 0"),
        ("cross_entropy = -1.0", "must be a finite number from 0"),
        ("temperature = 0.0", "must be a number above 0, at most 100"),
        ("temperature = 101.0", "must be a number above 0, at most 100"),
        ("weights = 1.0", "unknown key, did you mean stage.moh.distill.weight"),
    ] {
        let (key, _) = option.split_once(' ').unwrap();
        refuses_options(&format!("teacher = 'x', {option}"), key, reason);
    }
}

#[test]
fn groups_that_cannot_be_trained_so_are_refused() {
    for (groups, reason) in [
        ("attention = -1.0", "attention = -1: must be a number from 0, which freezes the group"),
        (
            "router = inf",
            "router = inf: must be a number from 0, which freezes the group, to 10000",
        ),
        ("rest = nan", "rest = NaN: must be a number from 0"),
        ("attention = 0, router = 0, rest = 0", "groups: freezes all groups: leave one to train"),
        ("mlp = 1.0", "mlp: unknown key"),
    ] {
        let change = format!("stage.moh.optimizer.groups={{ {groups} }}");
        refuses_key(&[&change], "stage.moh.optimizer.groups", reason);
    }
    let recipe = with(&["stage.moh.optimizer.groups={ attention = 2.5, rest = 0 }"]);
    let GroupFactors { attention, router, rest } = recipe.stages[1].optimizer.groups;
    assert_eq!([attention, router, rest], [2.5, 1.0, 0.0]);
}

#[test]
fn calibrations_that_cannot_be_made_are_refused() {
    for (moh, at, reason) in [
        ("calibration = { token = 1 }", "calibration.token", "unknown key"),
        (
            "calibration = { shared = 'best' }",
            "calibration.shared",
            "must be \"calibrated\" or \"calibrated-number\" or \"given\"",
        ),
        ("calibration = { tokens = 0 }", "calibration.tokens = 0", "must be from 1 to"),
        (
            "calibration = { tokens = 95 }",
            "calibration.tokens = 95",
            "must be at least 96: 3 sequences of 32 tokens, and 1.5 times as many tokens as all query heads are wide",
        ),
        ("calibration = { search_tokens = 0 }", "calibration.search_tokens = 0", "must be from 1"),
        (
            "shared_head_ids = [[0, 2], [1, 3], [0, 1], [4, 5], [6, 7]], calibration = {}",
            "calibration.shared = \"calibrated\"",
            "chooses the heads that shared_head_ids names: leave these out, or set it to \"given\"",
        ),
        (
            "shared_head_ids = [[0, 2], [1, 3], [0, 1], [4, 5], [6, 7]], \
             calibration = { shared = 'calibrated-number' }",
            "calibration.shared = \"calibrated-number\"",
            "chooses the heads that shared_head_ids names",
        ),
        (
            "router = 'query-norm', calibration = { shared = 'given', refit = false }",
            "calibration",
            "changes nothing with shared = \"given\" and refit = false: leave it out",
        ),
    ] {
        let change = format!("stage.moh.moh={{ {moh} }}");
        refuses_key(&[&change], &format!("stage.moh.moh.{at}"), reason);
    }
    // A stage after a stage that has converted.
    let converted = ["stage.adapt.attention=\"moh\"", "stage.moh.moh={ calibration = {} }"];
    let reason = "the model of stage adapt is a Mixture-of-Head model already, and only a dense one is measured";
    refuses_key(&converted, "stage.moh.moh.calibration", reason);
    // A stage that keeps the heads has the same number, or names them.
    let kept_of = |calibration: &str, moh: &str| {
        let moh = format!("stage.moh.moh={{ {moh} }}");
        let adapt = format!("stage.adapt.moh={{ calibration = {calibration} }}");
        parse(SMALL_RECIPE, &["stage.adapt.attention=\"moh\"", &adapt, &moh])
    };
    let kept = |moh: &str| kept_of("{}", moh);
    for moh in ["shared_heads = 3", "router = 'static', shared_heads = 6, routed_top_k = 0"] {
        let message = kept(moh).unwrap_err().to_string();
        let reason = "the stage keeps the heads that stage adapt calibrates, and so its router";
        assert!(message.contains("stage.moh.moh: ") && message.contains(reason), "{message}");
    }
    for moh in ["routed_top_k = 3", "shared_head_ids = [[0], [1], [2], [3], [4]]"] {
        kept(moh).unwrap();
    }
    // Where the calibration chooses the number too, the stage has the same numbers of shared and routed heads.
    let number = "{ shared = 'calibrated-number' }";
    let expected = "and so its router and its numbers of heads: give these";
    assert_refused(kept_of(number, "routed_top_k = 3"), expected);
    kept_of(number, "").unwrap();
}

#[test]
fn the_matrices_of_a_router_are_added_and_kept() {
    let moh = "stage.adapt.attention=\"moh\"";
    let (two_stage, query_norm) = ("\"two-stage\"", "\"query-norm\"");
    let routers = |first: &str, second: &str| {
        let [first, second] = [("adapt", first), ("moh", second)]
            .map(|(stage, router)| format!("stage.{stage}.moh={{ router = {router} }}"));
        parse(SMALL_RECIPE, &[moh, &first, &second])
    };
    routers(two_stage, two_stage).unwrap();
    routers(query_norm, two_stage).unwrap();
    let refused = |first: &str, second: &str| {
        let message = routers(first, second).unwrap_err().to_string();
        assert_eq!(message.lines().count(), 1, "{message}");
        message
    };
    for second in [query_norm, "\"one-stage\""] {
        let message = refused(two_stage, second);
        let expected = "stage.moh.moh: the model of the stage before has the router \"two-stage\", whose matrices";
        assert!(message.contains(expected), "{message}");
    }
    let dense = [moh, "stage.adapt.moh={ router = 'two-stage' }", "stage.moh.attention=\"dense\""];
    refuses(&dense, "stage.moh.moh: the model of the stage before has");
    // Matrices that start fitted need a calibration in the stage that adds them.
    let message = refused(query_norm, "\"linear\"");
    let expected =
        "stage.moh.moh.router = \"linear\": begins with matrices that are fitted to a text";
    assert!(message.contains(expected) && message.contains("choose another one"), "{message}");
    let message = refuses(&["stage.moh.moh={ router = 'linear' }"], expected);
    assert!(message.contains("add calibration"), "{message}");
    let fitted = "\"linear\", calibration = { shared = 'given', refit = false }";
    routers(fitted, "\"linear\"").unwrap();
}

#[test]
fn calibrations_have_defaults_and_are_of_stages_that_convert() {
    let recipe = with(&["stage.moh.moh={ calibration = {} }"]);
    let expected = CalibrationOptions {
        tokens: 65_536,
        search_tokens: 4096,
        shared: moh_model::SharedChoice::Calibrated,
        refit: true,
    };
    assert_eq!(recipe.stages[1].calibration(), Some(expected));
    assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    assert!(recipe.has_refitted(2) && !recipe.has_refitted(1));
    assert_eq!(recipe.calibrated_stage(1).map(|stage| stage.name.as_str()), Some("moh"));
    assert_eq!(recipe.calibrated_stage(0), None);
    // All of `moh` is ignored in a dense stage, so that one override gives the dense baseline.
    let dense = with(&["stage.moh.moh={ calibration = {} }", "stage.moh.attention=\"dense\""]);
    assert_eq!(dense.stages[1].calibration(), None);
}
