use super::*;

use moh_testkit::{SMALL_RECIPE, assert_refused};

fn three_stages(directory: &Path) -> PathBuf {
    let path = directory.join("recipe.toml");
    let mut recipe = Recipe::parse(SMALL_RECIPE, &path, &[]).unwrap();
    recipe.run.dir = directory.join("compared");
    let stage = recipe.stages[0].clone();
    recipe.stages = ["one", "two", "three"]
        .map(|name| moh_recipe::Stage { name: name.to_owned(), ..stage.clone() })
        .to_vec();
    std::fs::write(&path, recipe.to_toml().unwrap()).unwrap();
    path
}

fn plan(path: &Path, variants: &[&str]) -> Result<Comparison> {
    let variants = variants.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    Comparison::plan(path, &[], variants)
}

/// Returns the runs by name, each with its parent and the names of its stages.
fn runs(path: &Path, variants: &[&str]) -> Vec<(String, Option<String>, usize)> {
    let comparison = plan(path, variants).unwrap();
    let parent = |run: &PlannedRun| {
        let root = run.parent.as_ref()?.root();
        assert_eq!(root.parent(), Some(comparison.directory()));
        Some(root.file_name()?.to_str()?.to_owned())
    };
    let row = |run: &PlannedRun| (run.name.clone(), parent(run), run.recipe.stages.len());
    comparison.runs().iter().map(row).collect()
}

fn row(name: &str, parent: Option<&str>, stages: usize) -> (String, Option<String>, usize) {
    (name.to_owned(), parent.map(str::to_owned), stages)
}

#[test]
fn variants_share_the_stages_before_their_first_change() {
    let temporary = tempfile::tempdir().unwrap();
    let path = three_stages(temporary.path());
    let (last, middle) = ("stage.three.optimizer.eps=1e-7", "stage.two.optimizer.eps=1e-6");
    assert_eq!(
        runs(&path, &[&format!("a:{last}"), "base"]),
        [
            row("shared-two", None, 2),
            row("a", Some("shared-two"), 3),
            row("base", Some("shared-two"), 3)
        ]
    );
    assert_eq!(
        runs(&path, &[&format!("a:{last}"), &format!("b:{last},{middle}"), "base"]),
        [
            row("shared-one", None, 1),
            row("shared-two", Some("shared-one"), 2),
            row("a", Some("shared-two"), 3),
            row("b", Some("shared-one"), 3),
            row("base", Some("shared-two"), 3),
        ]
    );
    // The recipe itself needs no more shared stages than the other variants.
    assert_eq!(runs(&path, &["base"])[1], row("base", Some("shared-two"), 3));
    assert_eq!(runs(&path, &[&format!("b:{middle}"), "base"])[2].1.as_deref(), Some("shared-one"));
}

#[test]
fn keys_outside_stages_end_sharing_unless_they_change_no_weight() {
    let temporary = tempfile::tempdir().unwrap();
    let path = three_stages(temporary.path());
    for key in ["run.seed=77", "guard.factor=9.0", "memory.recompute=none", "precision.reduce=bf16"]
    {
        assert_eq!(runs(&path, &[&format!("a:{key}")]), [row("a", None, 3)], "{key}");
        let shared = runs(&path, &[&format!("a:{key}"), "b:stage.three.tokens=999999"]);
        assert_eq!(shared[1..], [row("a", None, 3), row("b", Some("shared-two"), 3)], "{key}");
    }
    for key in ["log.every_steps=7", "checkpoint.keep=9", "log.tensorboard=false"] {
        assert_eq!(
            runs(&path, &[&format!("a:{key}")])[1].1.as_deref(),
            Some("shared-two"),
            "{key}"
        );
    }
    let moh = "stage.three.attention=moh,stage.three.moh={shared_heads=4,routed_top_k=[2,1,2,1,2]}";
    let comparison =
        plan(&path, &["a:run.seed=77,log.every_steps=7", &format!("b:{moh}")]).unwrap();
    let [a, b] = ["a", "b"].map(|name| {
        let run = comparison.variants().find(|run| run.name == name).unwrap();
        let change = |change: &KeyChange| (change.key.clone(), change.now.clone());
        run.changes.iter().map(change).collect::<Vec<_>>()
    });
    assert_eq!([&a[0].0, &a[1].0], ["log.every_steps", "run.seed"]);
    let lists = b.iter().filter(|(key, _)| key.starts_with("stage.three.moh.routed_top_k"));
    let list = ("stage.three.moh.routed_top_k".to_owned(), Some("[2, 1, 2, 1, 2]".to_owned()));
    assert_eq!(lists.collect::<Vec<_>>(), [&list]);
}

#[test]
fn variants_that_are_no_comparison_are_refused_by_name() {
    let temporary = tempfile::tempdir().unwrap();
    let path = three_stages(temporary.path());
    for (variants, expected) in [
        (&["a", "A:run.seed=3"][..], "--variant A: is the name of an earlier variant"),
        (&["a:run.seed=7", "b: run.seed = 7"], "--variant b: is the same as the variant a"),
        (&["a:run.dir=x"], "--variant a: run.dir is the directory of the whole comparison"),
        (&["a:run.deterministic=true"], "--variant a: run.device and run.deterministic are"),
        (&["a", "b:stage.four.tokens=1"], "--variant b: stage.four.tokens: there is no \"four\""),
        (&["a:stage.one.micro_batch=0"], "--variant a: stage.one.micro_batch"),
    ] {
        let message = plan(&path, variants).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn a_directory_with_other_files_is_not_taken_and_an_empty_one_is() {
    let temporary = tempfile::tempdir().unwrap();
    let path = three_stages(temporary.path());
    let comparison = plan(&path, &["a:stage.three.tokens=999999", "base"]).unwrap();
    let directory = comparison.directory();
    std::fs::create_dir(directory).unwrap();
    std::fs::write(directory.join("notes.txt"), "mine").unwrap();
    assert_refused(comparison.claim(), "not the directory of a comparison, and holds notes.txt");
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), 1);
    std::fs::remove_file(directory.join("notes.txt")).unwrap();
    drop(comparison.claim().unwrap());
    // Killed before the record was written, and after it.
    std::fs::remove_file(comparison.record()).unwrap();
    drop(comparison.claim().unwrap());
    let text = std::fs::read_to_string(comparison.record()).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(record["variants"][0]["shared_stages"], serde_json::json!(["one", "two"]));
    assert_eq!(record["variants"][0]["changes"][0]["key"], "stage.three.tokens");
    // A variant that has not started may be omitted or changed.
    drop(plan(&path, &["a:stage.three.tokens=888888"]).unwrap().claim().unwrap());
    std::fs::create_dir(directory.join("a")).unwrap();
    let error = plan(&path, &["base"]).unwrap().claim().unwrap_err();
    assert!(error.to_string().contains("compared/a: is a variant of this comparison that no"));
    std::fs::write(comparison.record(), "{").unwrap();
    assert_refused(comparison.claim(), "comparison.json: not the record of a comparison");
}
