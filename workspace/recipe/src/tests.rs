//! Tests of reading, overriding, validating and writing recipes.

mod faults;

use std::path::{Path, PathBuf};

use moh_model::{HeadCounts, MohConfig, RouterKind, SharedHeadSets};
use moh_step::Hyperparameters;
pub(super) use moh_testkit::{SMALL_RECIPE, assert_refused};
use proptest::prelude::*;

use super::*;

pub(super) fn parse(text: &str, overrides: &[&str]) -> Result<Recipe, Error> {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    Recipe::parse(text, Path::new("recipes/x.toml"), &overrides)
}

pub(super) fn with(overrides: &[&str]) -> Recipe {
    parse(SMALL_RECIPE, overrides).unwrap()
}

pub(super) fn refused(text: &str, overrides: &[&str]) -> String {
    match parse(text, overrides) {
        Ok(recipe) => panic!("accepted: {recipe:?}"),
        Err(error) => error.to_string(),
    }
}

/// Checks that [`SMALL_RECIPE`] with `overrides` is refused with a message that has `expected`. Returns the message.
#[track_caller]
pub(super) fn refuses(overrides: &[&str], expected: &str) -> String {
    refuses_text(SMALL_RECIPE, overrides, expected)
}

/// Checks the same of the recipe `text`.
#[track_caller]
pub(super) fn refuses_text(text: &str, overrides: &[&str], expected: &str) -> String {
    let message = refused(text, overrides);
    assert!(message.contains(expected), "{expected}: {message}");
    message
}

/// Checks that [`SMALL_RECIPE`] with `overrides` is refused in one line, which has the key and the reason.
#[track_caller]
pub(super) fn refuses_key(overrides: &[&str], key: &str, reason: &str) {
    let message = refuses(overrides, key);
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains(reason), "{reason}: {message}");
}

/// Returns [`SMALL_RECIPE`] with one piece replaced.
pub(super) fn edited(from: &str, to: &str) -> String {
    assert!(SMALL_RECIPE.contains(from));
    SMALL_RECIPE.replace(from, to)
}

#[test]
fn defaults_are_filled_in() {
    let recipe = with(&[]);
    assert_eq!(recipe.data.order, Order::Shuffled);
    assert_eq!(recipe.data.sources[0].weight, 1.0);
    assert_eq!(recipe.stages[1].tokens, 1000);
    assert_eq!(recipe.stages[1].num_steps(), 8);
    assert_eq!(recipe.num_steps(), 16);
    assert_eq!(recipe.stages[0].moh, None);
    assert_eq!(recipe.stages[1].moh, Some(MohOptions::default()));
    assert_eq!(recipe.stages[0].optimizer, Hyperparameters::default());
    assert_eq!(recipe.log, LogOptions::default());
    let new = recipe.model.new.unwrap();
    assert_eq!(new.max_position_embeddings, Some(32));
    assert_eq!(new.head_dim, Some(8));
    assert_eq!(recipe.model.pad_vocab_to, None);
    let padded = with(&["model.tokenizer=dir"]);
    assert_eq!(padded.model.pad_vocab_to, Some(128));
}

#[test]
fn routing_is_resolved_against_the_models_heads() {
    let path = Path::new("x.toml");
    let mut recipe = with(&[]);
    let mut model = recipe.model_config(path).unwrap().unwrap();
    recipe.resolve(path, &model).unwrap();
    let moh = recipe.stages[1].moh.clone().unwrap();
    assert_eq!((moh.shared_heads, moh.routed_top_k), (Some(4.into()), Some(2.into())));

    // A measured dense model gets the router that loses least there, and later stages keep it.
    let first = ["stage.adapt.attention=moh", "stage.adapt.moh={ calibration = {} }"];
    let named = [first[0], "stage.adapt.moh={ router = 'two-stage', calibration = {} }"];
    for (changes, router) in [(first, RouterKind::Linear), (named, RouterKind::TwoStage)] {
        let mut recipe = with(&changes);
        recipe.resolve(path, &model).unwrap();
        let routers = recipe.stages.iter().map(|stage| stage.moh.as_ref().unwrap().router);
        assert!(routers.eq([Some(router); 2]));
    }

    let (shared_heads, routed_top_k) = (2.into(), 1.into());
    model.moh = Some(MohConfig { router: RouterKind::QueryNorm, shared_heads, routed_top_k });
    let mut recipe = with(&[]);
    recipe.resolve(path, &model).unwrap();
    let moh = recipe.stages[1].moh_config(&model).unwrap().unwrap();
    assert_eq!((moh.shared_heads, moh.routed_top_k), (2.into(), 1.into()));
    let given = with(&["stage.moh.moh.shared_heads=5"]);
    let moh = given.stages[1].moh_config(&model).unwrap().unwrap();
    assert_eq!((moh.shared_heads, moh.routed_top_k), (5.into(), 1.into()));

    // The router is the model's, or the recipe's.
    model.moh = model.moh.map(|moh| MohConfig { router: RouterKind::Group, ..moh });
    let group = ["stage.moh.moh.shared_heads=2", "stage.moh.moh.routed_top_k=2"];
    let mut recipe = with(&group);
    recipe.resolve(path, &model).unwrap();
    assert_eq!(recipe.stages[1].moh.as_ref().unwrap().router, Some(RouterKind::Group));
    let fixed = with(&["stage.moh.moh.router=\"static\""]);
    let moh = fixed.stages[1].moh_config(&model).unwrap().unwrap();
    assert_eq!((moh.router, moh.routed_top_k), (RouterKind::Static, 0.into()));
    let some = ["stage.moh.moh.router=\"static\"", "stage.moh.moh.routed_top_k=1"];
    refuses(&some, "routed_top_k = 1: must be 0");
    model.moh = model.moh.map(|moh| MohConfig { router: RouterKind::QueryNorm, ..moh });

    // A stage keeps the matrices of its model's router, with any head counts, and adds the matrices that the model
    // lacks.
    let two_stage = with(&["stage.moh.moh.router=\"two-stage\""]);
    let moh = two_stage.stages[1].moh_config(&model).unwrap().unwrap();
    assert_eq!(moh.router, RouterKind::TwoStage);
    let (before, moh) = (model.clone(), model.moh.clone().unwrap());
    model.moh = Some(MohConfig { router: RouterKind::TwoStage, ..moh });
    let moh = two_stage.stages[1].moh_config(&model).unwrap();
    assert_eq!(moh, model.moh);
    assert_eq!(with(&[]).stages[1].moh_config(&model).unwrap(), model.moh);
    let other = with(&["stage.moh.moh.router=\"query-norm\""]);
    let unused = "is in the model, and not used with this attention";
    assert_refused(other.stages[1].moh_config(&model), unused);
    assert!(two_stage.stages[0].moh_config(&model).is_err());
    model = before;

    // The heads themselves are kept, and written as such.
    let ids = [vec![0, 2], vec![3, 1], vec![0, 1], vec![4, 5], vec![6, 7]];
    let sets = SharedHeadSets::from_ids(&ids[..model.num_hidden_layers]).unwrap();
    model.moh = model.moh.map(|moh| MohConfig { shared_heads: sets.clone(), ..moh });
    let mut recipe = with(&[]);
    recipe.resolve(path, &model).unwrap();
    let moh = recipe.stages[1].moh.clone().unwrap();
    assert_eq!((moh.shared_heads, moh.shared_head_ids), (None, sets.ids()));
    let read = Recipe::parse(&recipe.to_toml().unwrap(), path, &[]);
    assert_eq!(read.unwrap().stages[1].moh_config(&model).unwrap(), model.moh);
}

#[test]
fn a_new_model_may_be_one_of_mixture_of_head() {
    let (two_stage, moh) = ("model.new.moh.router=two-stage", "stage.adapt.attention=moh");
    let recipe = with(&[two_stage, moh, "model.new.moh.shared_heads=2"]);
    let model = recipe.model_config(Path::new("x.toml")).unwrap().unwrap();
    let (shared_heads, routed_top_k) = (2.into(), 4.into());
    let expected = MohConfig { router: RouterKind::TwoStage, shared_heads, routed_top_k };
    assert_eq!(model.moh, Some(expected));
    // Stages have the model's heads, or other heads.
    assert_eq!(recipe.stages[1].moh_config(&model).unwrap(), model.moh);
    let other =
        with(&[two_stage, moh, "stage.moh.moh.shared_heads=4", "stage.moh.moh.routed_top_k=1"]);
    let heads = other.stages[1].moh_config(&model).unwrap().unwrap();
    assert_eq!((heads.router, heads.shared_heads), (RouterKind::TwoStage, 4.into()));

    refuses(&[two_stage], "stage.adapt.moh: model.layers.0.self_attn.router");
    refuses(
        &["model.new.moh={ shared_heads = 4, routed_top_k = 5 }"],
        "model.new: moh: routed_top_k = 5: must be at most the 4 routed heads",
    );
    refuses(&["model.new.moh.router=best"], "model.new.moh.router");
    refuses(
        &["model.new.moh={ shared_heads = 1, shared_head_ids = [[0]] }"],
        "model.new.moh.shared_head_ids = [..]: is there beside",
    );
}

#[test]
fn element_types_have_two_names() {
    let named = |dtype: &str| with(&[&format!("run.dtype=\"{dtype}\"")]).run.dtype;
    assert_eq!(named("float32"), named("f32"));
    assert_eq!(named("bfloat16"), named("bf16"));
}

#[test]
fn head_counts_may_differ_by_layer() {
    let path = Path::new("x.toml");
    let counts = |list: &[usize]| list.iter().copied().collect::<HeadCounts>();
    let resolved = |overrides: &[&str]| {
        let mut recipe = with(overrides);
        let model = recipe.model_config(path).unwrap().unwrap();
        recipe.resolve(path, &model).unwrap();
        assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
        recipe
    };
    let recipe = resolved(&[
        "stage.moh.moh.shared_heads=[8, 4, 2, 2, 0]",
        "stage.moh.moh.routed_top_k=[0, 1, 1e0, 6, 8]",
    ]);
    let moh = recipe.stages[1].moh.as_ref().unwrap();
    assert_eq!(moh.shared_heads, Some(counts(&[8, 4, 2, 2, 0])));
    assert_eq!(moh.routed_top_k, Some(counts(&[0, 1, 1, 6, 8])));
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("shared_heads = [8, 4, 2, 2, 0]"), "{text}");

    // 75% of each layer's heads are active where a recipe sets no number. The first layer is dense.
    let recipe = resolved(&["stage.moh.moh.shared_heads=[8, 5, 4, 2, 0]"]);
    let moh = recipe.stages[1].moh.as_ref().unwrap();
    assert_eq!(moh.routed_top_k, Some(counts(&[0, 1, 2, 4, 6])));

    let recipe = resolved(&["stage.moh.moh.shared_heads=[4, 4, 4, 4, 4]"]);
    assert_eq!(recipe, resolved(&["stage.moh.moh.shared_heads=4"]));
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("shared_heads = 4\n"), "{text}");
}

#[test]
fn head_counts_that_do_not_fit_the_layers_are_refused() {
    for (value, expected) in [
        ("shared_heads=[4, 4]", "moh: shared_heads has 2 entries, and the model 5 layers"),
        ("routed_top_k=[2, 2, 2, 2, 2, 2]", "moh: routed_top_k has 6 entries"),
        ("shared_heads=[]", "moh: shared_heads has 0 entries"),
        ("shared_heads=[8, 9, 8, 8, 8]", "moh: shared_heads of layer 1 = 9: the model has 8"),
        ("shared_heads=[8, 8, 8, 7, 8]", "moh: shared_heads of layer 3 = 7: the default share"),
        ("shared_heads=6", "moh: shared_heads = 6: the default share of 0.75 of 8 heads is 6"),
        ("routed_top_k=[0, 0, 0, 0, 5]", "moh: routed_top_k of layer 4 = 5: must be at most the 4"),
        ("shared_heads=[4, -1]", "moh.shared_heads.1: must be a whole number from 0, not -1"),
        ("shared_heads=[4, [4]]", "moh.shared_heads.1: must be a whole number from 0, not a list"),
        ("shared_heads=-1", "moh.shared_heads: must be a whole number from 0, or a list"),
        ("shared_heads=1.5", "moh.shared_heads: must be a whole number from 0, or a list"),
        ("shared_heads=\"4\"", "moh.shared_heads: must be a whole number from 0, or a list"),
        ("shared_heads={}", "moh.shared_heads: must be a whole number from 0, or a list"),
    ] {
        refuses(&[&format!("stage.moh.moh.{value}")], &format!("stage.moh.{expected}"));
    }
}

#[test]
fn a_recipe_that_does_not_fit_its_model_is_refused() {
    let path = Path::new("x.toml");
    let text = edited("[model.new]", "[model]\nfrom = \"org/name\"\n[unused]");
    let text = text.split("[unused]").next().unwrap().to_string()
        + &SMALL_RECIPE[SMALL_RECIPE.find("[data]").unwrap()..];
    let mut recipe = parse(
        &text,
        &[
            "data.sequence_length=64",
            "stage.moh.moh.routed_top_k=17",
            "stage.adapt.parallel.tensor=3",
            "stage.adapt.parallel.pipeline=6",
            "stage.moh.parallel={pipeline = 2, virtual_stages = 3}",
            "model.vocab_size=100",
        ],
    )
    .unwrap();
    let model = with(&[]).model_config(path).unwrap().unwrap();
    let message = recipe.resolve(path, &model).unwrap_err().to_string();
    for expected in [
        "x.toml: data.sequence_length = 64: the model supports 32 tokens",
        "x.toml: stage.moh.moh: routed_top_k = 17: must be at most the 4 routed heads",
        "x.toml: stage.adapt.parallel.tensor = 3: must divide the 4 key/value heads",
        "x.toml: stage.adapt.parallel.pipeline = 6: must be at most the 5 blocks",
        "x.toml: stage.moh.parallel.virtual_stages = 3: must be at most 2: the 5 blocks \
         make no more parts for pipeline = 2",
        "x.toml: model.vocab_size = 100: the model already has 512",
    ] {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn the_resolved_recipe_reads_back_equal() {
    let path = Path::new("x.toml");
    for overrides in [
        &[][..],
        &["model.new.eos_token_id=[1,2]", "model.new.bos_token_id=0"],
        &["data.order=sequential", "checkpoint.keep_every=200"],
        &["model.new.rope_scaling={rope_type=\"llama3\", factor=8, low_freq_factor=1, \
           high_freq_factor=4, original_max_position_embeddings=16}"],
        &["stage.moh.optimizer.eps=1e-300", "stage.moh.learning_rate.min=0"],
        &["model.new.moh={ shared_heads = [0, 2, 4, 6, 8], routed_top_k = [2, 2, 2, 2, 0] }"],
    ] {
        let mut recipe = with(overrides);
        assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
        let model = recipe.model_config(path).unwrap().unwrap();
        recipe.resolve(path, &model).unwrap();
        assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    }
}

#[test]
fn overrides_reach_stages_by_name_and_create_tables() {
    let recipe = with(&[
        "stage.moh.tokens=1e9",
        "stage.moh.moh.routed_top_k = 1",
        "stage.adapt.optimizer.beta2=0.99",
        "run.dir=runs/other",
        "data.sources.0.weight=2",
        "log.every_steps=1",
        "log.every_steps=10",
    ]);
    assert_eq!(recipe.stages[1].tokens, 1_000_000_000);
    assert_eq!(recipe.stages[1].moh.as_ref().unwrap().routed_top_k, Some(1.into()));
    assert_eq!(recipe.stages[0].optimizer.beta2, 0.99);
    assert_eq!(recipe.run.dir, PathBuf::from("runs/other"));
    assert_eq!(recipe.data.sources[0].weight, 2.0);
    assert_eq!(recipe.log.every_steps, 10);
}

#[test]
fn one_override_makes_the_dense_run_to_compare_with() {
    let routed = with(&["stage.moh.moh.routed_top_k=1"]);
    assert!(routed.stages[1].moh.is_some());
    let dense = with(&["stage.moh.moh.routed_top_k=1", "stage.moh.attention=dense"]);
    assert_eq!(dense.stages[1].moh, None);
}

#[test]
fn a_text_needs_no_quotes_whatever_it_looks_like() {
    for text in ["2024", "2026-11-21", "nan", "true", "1e9", "[a]", "{}", "a=b", "it's"] {
        assert_eq!(with(&[&format!("run.dir={text}")]).run.dir, PathBuf::from(text));
        let recipe = with(&[&format!("data.sources.0.path={text}")]);
        assert_eq!(recipe.data.sources[0].path, PathBuf::from(text));
        let recipe = with(&[&format!("data.validation.path={text}")]);
        assert_eq!(recipe.data.validation[0].path, PathBuf::from(text));
    }
    assert_eq!(with(&["stage.moh.name=7"]).stages[1].name, "7");
    // Quotes are TOML's.
    assert_eq!(with(&["run.dir=\"2024\""]).run.dir, PathBuf::from("2024"));
    assert_eq!(with(&["run.dir='a b'"]).run.dir, PathBuf::from("a b"));
    let text = edited("dir = \"runs/small\"", "dir = 2024");
    refuses_text(&text, &[], "run.dir: must be a text in quotes, not 2024");
}

#[test]
fn a_stage_without_tokens_says_nothing_of_its_warm_up() {
    for key in ["tokens", "batch_tokens"] {
        let message = refuses(&[&format!("stage.moh.{key}=0")], &format!("stage.moh.{key} = 0: "));
        assert!(!message.contains("warmup"), "{message}");
    }
}

#[test]
fn wrong_overrides_are_named() {
    let cases = [
        ("stage.mho.tokens=1", "--set: stage.mho.tokens: there is no \"mho\", did you mean moh"),
        ("stage.xyz.tokens=1", "--set: stage.xyz.tokens: there is no \"xyz\", only adapt, moh"),
        (
            "stage.moh.moh.routed_topk=3",
            "--set: stage.moh.moh.routed_topk: unknown key, did you mean stage.moh.moh.routed_top_k",
        ),
        ("data.validation.3.batches=2", "--set: data.validation.3: unknown key"),
        ("run.seed.x=3", "--set: run.seed.x: \"x\" is below a value that is not a table"),
        ("run.seed", "--set: \"run.seed\": expected key=value"),
        ("=3", "expected key=value"),
        ("run..seed=3", "expected key=value"),
        ("run.seed=-1", "--set: run.seed: must be a whole number from 0, not -1"),
        ("run.device=gpu", "--set: run.device: must be \"cpu\" or \"cuda\", not \"gpu\""),
        ("run.seed=1\n[log]\nevery_steps=0", "--set: run.seed: must be a whole number"),
        (
            "stage.moh.tokens=1e30",
            "--set: stage.moh.tokens: must be a whole number of at most 9007199254740992 if it has an \
             exponent, not 1e30",
        ),
        ("stage.moh.tokens=1e-30", "must be a whole number from 0, not 1e-30"),
        ("stage.moh.tokens=0.25", "must be a whole number from 0, not 0.25"),
        ("stage.moh=1", "--set: stage.moh: must be a table, not 1"),
        (
            "data.sources.1.path=x",
            "--set: data.sources.1.path: there is no \"1\", only 0: to add one, set the whole list, now \
             data.sources=[{ path = \"data/a\" }]",
        ),
        (
            "stage.moh.learning_rate.min=1",
            "--set: stage.moh.learning_rate.min = 1: must be a number from 0 to max = 0.00002",
        ),
        ("run={}", "--set: run.dir: missing"),
        ("stage=3", "--set: stage: must be a list, not 3"),
        ("stage=[]", "--set: stage: must have from 1 to 1000 tables"),
    ];
    for (text, expected) in cases {
        refuses(&[text], expected);
    }
}

#[test]
fn parallel_splits_are_read_and_left_to_the_trainer() {
    let recipe = with(&["stage.adapt.parallel.tensor=2", "stage.moh.parallel={pipeline=5}"]);
    let (adapt, moh) = (recipe.stages[0].parallel, recipe.stages[1].parallel);
    assert_eq!(adapt, ParallelOptions { tensor: 2, pipeline: 1, virtual_stages: 1 });
    assert_eq!(moh, ParallelOptions { tensor: 1, pipeline: 5, virtual_stages: 1 });
    let recipe = with(&["stage.moh.parallel={pipeline = 2, virtual_stages = 2}"]);
    assert_eq!(recipe.stages[1].parallel.virtual_stages, 2);
    let text = recipe.to_toml().unwrap();
    assert_eq!(Recipe::parse(&text, Path::new("again.toml"), &[]).unwrap(), recipe);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn valid_numbers_read_back_equal(
        seed in 0..=i64::MAX, max in 1e-12..1e3f64, share in 0.0..=1.0f64, beta in 0.0..1.0f64,
        eps in 1e-30..1.0f64, steps in 1..1_000_000u64, micro in 1..64u64, batch in 1..1000u64,
        weight in 1e-6..1e6f64, recompute in 0..3usize,
    ) {
        let batch_tokens = 32 * micro * batch;
        let recipe = with(&[
            &format!("run.seed={seed}"),
            &format!("stage.moh.learning_rate={{max={max:?},min={:?},warmup_steps=0}}", max * share),
            &format!("stage.moh.optimizer={{beta1={beta:?},beta2={beta:?},eps={eps:?}}}"),
            &format!("stage.moh.micro_batch={micro}"),
            &format!("stage.moh.batch_tokens={batch_tokens}"),
            &format!("stage.moh.tokens={}", batch_tokens * steps),
            &format!("data.sources.0.weight={weight:?}"),
            &format!("memory.recompute={}", ["none", "cheap", "block"][recompute]),
        ]);
        prop_assert_eq!(recipe.stages[1].num_steps(), steps);
        prop_assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    }

    #[test]
    fn arbitrary_text_and_overrides_never_panic(
        text in "\\PC{0,200}", key in "[a-z_.0-9]{0,30}", value in "\\PC{0,40}",
        cut in 0..600usize, insert in "\\PC{0,8}",
    ) {
        let _ = parse(&text, &[&format!("{key}={value}"), &text]);
        let _ = parse(SMALL_RECIPE, &[&format!("{key}={value}")]);
        let cut = SMALL_RECIPE.floor_char_boundary(cut);
        let _ = parse(&format!("{}{insert}{}", &SMALL_RECIPE[..cut], &SMALL_RECIPE[cut..]), &[]);
    }
}
