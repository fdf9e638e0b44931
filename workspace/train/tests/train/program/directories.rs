//! The owner of a run directory. Other people's files are refused, and a moved run is the run of its recipe. A
//! directory that is removed while the run trains is not created again.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::page::page;
use super::{PROGRAM, moh_train, prepared, results, started};
use moh_testkit::programs::{assert_has, exits, failure, program, success};

const SHORT: [&str; 2] = ["stage.adapt.tokens=640", "stage.moh.tokens=640"];

fn short(dir: &Path, overrides: &[&str]) -> Command {
    moh_train(dir, &[&SHORT[..], overrides].concat())
}

#[test]
fn a_project_with_its_model_data_and_recipe_is_not_a_run_directory() {
    let dir = prepared();
    let project = dir.path();
    fs::rename(project.join("source"), project.join("model")).unwrap();
    let weights = fs::read(project.join("model/model.safetensors")).unwrap();
    let mut command = short(project, &["model.from=model", "run.dir=."]);
    let message = failure(project, &mut command, 1);
    let expected = ".: is not a run directory, and holds held-out.bin, held-out.idx, held-out.json and 5 \
                    more: a run takes a directory that is new, empty or its own, so choose another one, such as --set run.dir=./run";
    assert_eq!(message, expected);
    assert!(fs::read(project.join("model/model.safetensors")).unwrap() == weights);
}

#[test]
fn a_users_own_recipe_survives_in_the_directory_that_it_names() {
    let dir = prepared();
    let recipe = fs::read_to_string(dir.path().join("recipe.toml")).unwrap();
    fs::create_dir(dir.path().join("mine")).unwrap();
    let own = format!("# With comments.\n{}", recipe.replace("\"run\"", "\"mine\""));
    fs::write(dir.path().join("mine/recipe.toml"), &own).unwrap();
    let mut command = program(PROGRAM, dir.path());
    let message = failure(dir.path(), command.args(["--recipe", "mine/recipe.toml"]), 1);
    assert!(
        message.starts_with("mine: is not a run directory, and holds recipe.toml: "),
        "{message}"
    );
    assert_eq!(fs::read_to_string(dir.path().join("mine/recipe.toml")).unwrap(), own);
}

#[test]
fn the_recipe_of_a_moved_run_is_that_run_unless_the_command_names_another() {
    let dir = prepared();
    success(&mut short(dir.path(), &[]));
    fs::rename(dir.path().join("run"), dir.path().join("moved")).unwrap();
    let start = |set: &[&str]| {
        let mut command = program(PROGRAM, dir.path());
        exits(command.args(["--recipe", "moved/recipe.toml"]).args(set), 0)
    };
    let (printed, told) = start(&[]);
    let expected =
        "moved/recipe.toml is the recipe of the run beside it, so run.dir is moved, not run\n";
    assert_eq!(told, expected);
    assert!(printed.starts_with("this run has already finished\n"));
    assert!(!dir.path().join("run").exists());
    // The directory is stored, and the message does not come again.
    assert_eq!(start(&[]).1, "");
    start(&["--set", "run.dir=again"]);
    assert!(results(&dir.path().join("again")) == results(&dir.path().join("moved")));
}

#[cfg(unix)]
#[test]
fn a_link_to_the_recipe_of_a_moved_run_is_that_run() {
    let dir = prepared();
    success(&mut short(dir.path(), &[]));
    fs::rename(dir.path().join("run"), dir.path().join("moved")).unwrap();
    for (target, link) in [("moved/recipe.toml", "g.toml"), ("g.toml", "again.toml")] {
        std::os::unix::fs::symlink(target, dir.path().join(link)).unwrap();
    }
    let mut command = program(PROGRAM, dir.path());
    let (printed, told) = exits(command.args(["--recipe", "again.toml"]), 0);
    let expected = "again.toml is a link to the recipe of a run, so run.dir is moved, not run\n";
    assert_eq!(told, expected);
    assert!(printed.starts_with("this run has already finished\n"));
    assert!(!dir.path().join("run").exists());
}

#[cfg(unix)]
#[test]
fn a_run_directory_that_is_no_directory_is_refused() {
    let dir = prepared();
    fs::write(dir.path().join("afile"), "mine").unwrap();
    let message = failure(dir.path(), &mut short(dir.path(), &["run.dir=afile"]), 1);
    let expected = "afile: run.dir is a file: choose a directory that is new or a run's, such as \
                    --set run.dir=afile-2";
    assert_eq!(message, expected);
    std::os::unix::fs::symlink("missing", dir.path().join("alink")).unwrap();
    let message = failure(dir.path(), &mut short(dir.path(), &["run.dir=alink"]), 1);
    let expected = "alink: run.dir is a link to missing, which is not a directory: ";
    assert!(message.starts_with(expected), "{message}");
    let message = failure(dir.path(), &mut short(dir.path(), &["run.dir=afile/deeper"]), 1);
    assert!(message.starts_with("afile/deeper: "), "{message}");
    assert_eq!(fs::read_to_string(dir.path().join("afile")).unwrap(), "mine");
}

#[test]
fn another_recipe_is_refused_with_a_command_that_starts_another_run() {
    let dir = prepared();
    success(&mut short(dir.path(), &["run.dir=first run"]));
    let changed = ["run.dir=first run", "run.seed=2"];
    let (_, text) = exits(&mut short(dir.path(), &changed), 1);
    assert!(text.contains("run.seed: was 1, now 2\n"), "{text}");
    let command = text.lines().last().unwrap().trim();
    let expected = "moh-train --recipe recipe.toml --set stage.adapt.tokens=640 --set \
                    stage.moh.tokens=640 --set 'run.dir=first run' --set run.seed=2 --set \
                    'model.from=first run@20' --set 'run.dir=first run-2'";
    assert_eq!(command, expected, "{text}");
    let pasted = command.replacen("moh-train", PROGRAM, 1);
    success(program("sh", dir.path()).args(["-c", &pasted]));
    let stored = fs::read_to_string(dir.path().join("first run-2/recipe.toml")).unwrap();
    assert!(stored.contains("from = \"first run@20\"") && stored.contains("seed = 2"), "{stored}");
}

#[test]
fn a_run_whose_directory_is_removed_ends_with_an_error() {
    let dir = prepared();
    let endless = ["stage.adapt.tokens=64e6"];
    let (child, mut reader) = started(&mut moh_train(dir.path(), &endless), 9);
    let run = dir.path().join("run");
    while fs::remove_dir_all(&run).is_err() {}
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut reader, &mut rest).unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(1), "{rest}");
    let last = rest.lines().last().unwrap();
    assert!(last.starts_with("error: run/.moh-run: "), "{rest}");
    assert!(!run.exists());
}

#[test]
fn validation_sets_may_change_and_a_stage_may_follow_a_finished_run() {
    let dir = prepared();
    success(&mut short(dir.path(), &[]));
    let recipe = fs::read_to_string(dir.path().join("recipe.toml")).unwrap();
    let other = recipe.replace(
        "validation = { path = \"held-out\", batches = 2, every_steps = 9 }",
        "validation = [{ name = \"book\", path = \"held-out\", batches = 1 }]",
    );
    let more = "\n[[stage]]\nname = \"more\"\nattention = \"dense\"\ntokens = 640\nbatch_tokens = 64\n\
                micro_batch = 2\nlearning_rate = { max = 1e-3, min = 1e-3, warmup_steps = 1 }\n";
    assert_ne!(other, recipe);
    fs::write(dir.path().join("recipe.toml"), other + more).unwrap();
    let (table, text) = exits(&mut short(dir.path(), &[]), 0);
    assert!(text.contains("continuing after step 20 of 30\n"), "{text}");
    let rows =
        ["as loaded, validation ", "after stage moh, validation ", "after stage more, book "];
    assert_has(&table, &rows);
    let page = page(&dir.path().join("run"));
    assert!(page.contains("book") && page.contains("after stage more, book"));
}
