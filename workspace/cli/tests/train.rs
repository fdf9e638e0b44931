//! `moh-train` as processes: killed, stopped, locked out, on a full disk, and one sentence per
//! invalid input.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::Value;
use support::{
    failure, names, program, repository, stderr, success, trainable, write_tokenizer, write_tokens,
};

mod support;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-train");

/// The recipe after its head.
const RECIPE: &str = r#"
validation = { path = "text", batches = 2, every_steps = 9 }

[[stage]]
name = "adapt"
attention = "dense"
tokens = 3840
batch_tokens = 64
micro_batch = 2
learning_rate = { max = 1e-2, min = 1e-3, warmup_steps = 2 }

[[stage]]
name = "moh"
attention = "moh"
moh = { shared_heads = 4, routed_top_k = 2 }
tokens = 3840
batch_tokens = 64
micro_batch = 2
learning_rate = { max = 5e-3, min = 1e-3, warmup_steps = 1 }

[checkpoint]
every_steps = 7
"#;

/// A directory with a model, a token file and a recipe of two stages of 60 steps.
fn prepared() -> tempfile::TempDir {
    trainable(RECIPE)
}

fn moh_train(dir: &Path, overrides: &[&str]) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(["--recipe", "recipe.toml"]);
    for change in overrides {
        command.args(["--set", change]);
    }
    command
}

/// Starts a run and waits for its first `lines` lines of output.
fn started(command: &mut Command, lines: usize) -> (Child, BufReader<ChildStderr>) {
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    for _ in 0..lines {
        reader.read_line(&mut String::new()).unwrap();
    }
    (child, reader)
}

#[test]
fn lines_count_the_steps_of_all_stages() {
    let dir = prepared();
    let overrides = ["stage.adapt.tokens=128", "stage.moh.tokens=192"];
    let output = moh_train(dir.path(), &overrides).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = stderr(&output);
    let steps = text.lines().filter_map(|line| line.split_once(": loss").map(|(step, _)| step));
    let steps: Vec<&str> = steps.filter(|step| !step.starts_with("validation")).collect();
    assert_eq!(steps, ["adapt 1/5", "adapt 2/5", "moh 3/5", "moh 4/5", "moh 5/5"], "{text}");
}

fn terminate(child: &Child) {
    let done = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(done.success());
}

/// The results of a finished run, without the speed.
#[derive(PartialEq)]
struct Results(Vec<u8>, String, Vec<Value>);

fn results(run: &Path) -> Results {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        for field in ["tokens_per_second", "speed"] {
            value.as_object_mut().unwrap().remove(field).unwrap();
        }
        value
    };
    Results(
        fs::read(run.join("export/model.safetensors")).unwrap(),
        fs::read_to_string(run.join("summary.json")).unwrap(),
        metrics.lines().map(line).collect(),
    )
}

/// The newest checkpoint's step; 0 without a checkpoint.
fn newest_checkpoint(run: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return 0 };
    entries
        .filter_map(|entry| {
            entry.unwrap().file_name().to_str()?.strip_prefix("step-")?.parse().ok()
        })
        .max()
        .unwrap_or(0)
}

#[test]
fn a_text_without_end_of_text_is_warned_of() {
    let dir = prepared();
    let warning = |change: &dyn Fn(&mut Value)| {
        let path = dir.path().join("text.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(&path, json.to_string()).unwrap();
        let _ = fs::remove_dir_all(dir.path().join("run"));
        let short = ["stage.adapt.tokens=128", "stage.moh.tokens=64"];
        let output = moh_train(dir.path(), &short).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output).lines().filter(|line| line.starts_with("warning: text: ")).count()
    };
    // Without a record, with none, and with a token; the file is also that of validation.
    assert_eq!(warning(&|_| {}), 0);
    assert_eq!(warning(&|json| json["eos_token"] = Value::Null), 1);
    assert_eq!(warning(&|json| json["eos_token"] = "e".into()), 0);
}

#[test]
fn a_killed_run_ends_as_one_that_was_not() {
    let dir = prepared();
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    // The process is killed some time after the lines were read, at any point.
    for (lines, microseconds) in [(2, 700), (9, 3100), (17, 12_000), (31, 400)] {
        let (mut child, _reader) = started(&mut moh_train(dir.path(), &[]), lines);
        std::thread::sleep(std::time::Duration::from_micros(microseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    success(&mut moh_train(dir.path(), &[]));
    let run = dir.path().join("run");
    assert!(results(&run) == results(&dir.path().join("whole")));
    let parts = [
        ".lock",
        "checkpoints",
        "export",
        "has-checkpoints",
        "inputs.json",
        "machine.json",
        "metrics.jsonl",
        "model",
        "recipe.toml",
        "routing.jsonl",
        "run.svg",
    ];
    assert_eq!(names(&run), [&parts[..], &["summary.json", "tensorboard"]].concat());
    assert_eq!(names(&run.join("checkpoints")), ["step-119", "step-120"]);

    let text = success(&mut moh_train(dir.path(), &[]));
    assert!(text.starts_with("this run has already finished\n"), "{text}");
}

#[test]
fn a_step_is_replayed_from_the_run_directory_alone() {
    let dir = prepared();
    let overrides = ["stage.adapt.tokens=640", "stage.moh.tokens=640"];
    success(&mut moh_train(dir.path(), &overrides));
    let line = fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    let line: Value = serde_json::from_str(line.lines().nth(15).unwrap()).unwrap();
    let text = success(program(PROGRAM, dir.path()).args(["replay", "run", "--step", "16"]));
    assert!(
        text.starts_with("step 16, step 6 of stage moh, from the checkpoint of step 14\n"),
        "{text}"
    );
    let loss = format!("loss {:.4}, balance ", line["loss"].as_f64().unwrap());
    assert!(text.lines().nth(1).unwrap().starts_with(&loss), "{text}");
    assert!(text.contains("\napplied\n") && text.contains("model.layers.0.mlp.up_proj.weight"));
    let mut late = program(PROGRAM, dir.path());
    let error = failure(dir.path(), late.args(["replay", "run", "--step", "21"]), 1);
    assert_eq!(error, "run: has no step 21: use 1 to 20");
}

#[test]
fn a_terminated_run_exits_with_75_and_continues() {
    let dir = prepared();
    let long = ["stage.adapt.tokens=25600"];
    success(&mut moh_train(dir.path(), &[long[0], "run.dir=whole"]));
    let (mut child, mut reader) = started(&mut moh_train(dir.path(), &long), 5);
    terminate(&child);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut reader, &mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(75), "{rest}");
    let step = newest_checkpoint(&dir.path().join("run"));
    let last = format!(
        "stopped after step {step} with a checkpoint: run the same command again to continue"
    );
    assert_eq!(rest.lines().last(), Some(last.as_str()));
    let output = moh_train(dir.path(), &long).output().unwrap();
    assert!(output.status.success());
    assert!(stderr(&output).starts_with(&format!("continuing after step {step} of 460\n")));
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
}

#[test]
fn a_time_limit_and_the_end_of_a_job_stop_a_run_with_75() {
    let dir = prepared();
    let endless = ["stage.adapt.tokens=64e6"];
    let stopped = |command: &mut Command| {
        let output = command.output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(75), "{text}");
        let step = newest_checkpoint(&dir.path().join("run"));
        assert!(text.ends_with(&format!(
            "stopped after step {step} with a checkpoint: run the same command again to continue\n"
        )));
        step
    };
    let first = stopped(moh_train(dir.path(), &endless).args(["--time-limit", "1s"]));
    let end = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() + 2;
    let job = |end: u64| {
        let mut command = moh_train(dir.path(), &endless);
        command.env("SLURM_JOB_END_TIME", end.to_string()).args(["--time-limit", "2h"]);
        command
    };
    assert!(stopped(&mut job(end)) > first);
    // The end of a job that is over does not count: the run goes on until it is stopped.
    let (mut child, _reader) = started(&mut job(end - 1000), 5);
    terminate(&child);
    assert_eq!(child.wait().unwrap().code(), Some(75));
}

#[test]
fn a_time_limit_without_a_unit_is_refused() {
    let dir = prepared();
    let output = moh_train(dir.path(), &[]).args(["--time-limit", "90"]).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let expected = "expected a time such as 90m, 1h30m, 12:00:00 or 2-12:00:00";
    assert!(text.contains("--time-limit <TIME>") && text.contains(expected), "{text}");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn a_stopped_run_continues_when_its_model_is_gone_and_a_new_one_does_not_start() {
    let dir = prepared();
    let long = ["stage.adapt.tokens=25600"];
    let (mut child, mut reader) = started(&mut moh_train(dir.path(), &long), 5);
    terminate(&child);
    std::io::Read::read_to_string(&mut reader, &mut String::new()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(75));
    fs::rename(dir.path().join("source"), dir.path().join("gone")).unwrap();
    let other = [long[0], "run.dir=other"];
    let message = failure(dir.path(), &mut moh_train(dir.path(), &other), 1);
    assert!(message.starts_with("source: "), "{message}");
    success(&mut moh_train(dir.path(), &long));
}

#[cfg(target_os = "linux")]
#[test]
fn a_hangup_stops_a_run_unless_it_is_ignored() {
    let dir = prepared();
    let hang_up = |child: &Child| {
        let done = Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap();
        assert!(done.success());
    };
    let finish = |mut child: Child, mut reader: BufReader<ChildStderr>| {
        std::io::Read::read_to_string(&mut reader, &mut String::new()).unwrap();
        child.wait().unwrap().code()
    };
    let long = ["stage.adapt.tokens=25600"];
    let (child, reader) = started(&mut moh_train(dir.path(), &long), 5);
    hang_up(&child);
    assert_eq!(finish(child, reader), Some(75));
    // As nohup starts a program.
    let mut shell = program("sh", dir.path());
    shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", PROGRAM, "--recipe", "recipe.toml"]);
    let (child, reader) = started(shell.args(["--set", long[0]]), 5);
    hang_up(&child);
    assert_eq!(finish(child, reader), Some(0));
}

#[test]
fn chosen_steps_leave_a_timeline_and_others_none() {
    let dir = prepared();
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    success(moh_train(dir.path(), &[]).args(["--trace", "2,60-61"]));
    let traces = |run: &str| {
        let mut names = names(&dir.path().join(run));
        names.retain(|name| name.contains("trace"));
        names
    };
    let expected = ["trace-step-2.json", "trace-step-60.json", "trace-step-61.json"];
    assert_eq!((traces("run"), traces("whole")), (expected.map(str::to_owned).into(), Vec::new()));
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
    let text = fs::read_to_string(dir.path().join("run/trace-step-60.json")).unwrap();
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    for name in ["step 60", "backward 1", "gradient norm", "evaluation", "checkpoint"] {
        assert!(events.iter().any(|event| event["name"] == name), "{name}");
    }
}

#[test]
fn steps_that_cannot_be_traced_are_refused() {
    let dir = prepared();
    let trace = |steps: &str| {
        let mut command = moh_train(dir.path(), &[]);
        command.args(["--trace", steps]);
        command
    };
    let message = failure(dir.path(), &mut trace("3,121"), 2);
    assert_eq!(message, "--trace: step 121: the run has 120 steps");
    for (steps, expected) in [
        ("0", "\"0\": steps count from 1"),
        ("3,9-7", "\"9-7\": the range ends before it begins"),
        ("last", "\"last\": expected steps, as in 3,10-12"),
    ] {
        let output = trace(steps).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("--trace <STEPS>") && text.contains(expected), "{text}");
    }
    for other in ["--plan", "--preflight"] {
        let output = trace("3").arg(other).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
    assert!(!dir.path().join("run").exists());
}

/// The variable with which Nsight Systems names its library.
const PROFILER: &str = "NVTX_INJECTION64_PATH";

#[test]
fn a_profiler_hears_of_every_span() {
    let dir = prepared();
    let library = dir.path().join("profiler.so");
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/profiler.c"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(compiler.status().unwrap().success());
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    let mut watched = moh_train(dir.path(), &[]);
    success(watched.env(PROFILER, &library).env("RANGES", dir.path().join("ranges")));
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
    let ranges = fs::read_to_string(dir.path().join("ranges")).unwrap();
    let count = |line: &str| ranges.lines().filter(|found| *found == line).count();
    assert_eq!((count("step 1"), count("step 120"), count("optimizer")), (1, 1, 120));
    // Two micro-batches a step.
    assert_eq!((count("forward 0"), count("backward 1")), (120, 120));
    assert_eq!(2 * count("end"), ranges.lines().count());
}

#[test]
fn a_profiler_that_cannot_be_loaded_is_an_error() {
    let dir = prepared();
    let mut command = moh_train(dir.path(), &[]);
    let message = failure(dir.path(), command.env(PROFILER, "/none/profiler.so"), 1);
    assert!(message.starts_with("NVTX_INJECTION64_PATH=/none/profiler.so: "), "{message}");
    let advice = ": unset NVTX_INJECTION64_PATH to run without a profiler";
    assert!(message.ends_with(advice), "{message}");
}

#[test]
fn a_second_process_in_one_run_directory_is_refused() {
    let dir = prepared();
    let long = ["stage.adapt.tokens=64e6"];
    let (mut child, _reader) = started(&mut moh_train(dir.path(), &long), 3);
    let message = failure(dir.path(), &mut moh_train(dir.path(), &long), 1);
    let advice = "wait for it, or use another run.dir";
    assert_eq!(message, format!("run: another process trains in this run directory: {advice}"));
    terminate(&child);
    assert_eq!(child.wait().unwrap().code(), Some(75));
}

#[test]
fn the_plan_of_the_papers_run_needs_nothing_but_the_repository() {
    let mut command = program(PROGRAM, &repository());
    command.args(["--recipe", "recipes/moh-llama3-8b.toml", "--plan", "--device-tflops", "600"]);
    let text = success(&mut command);
    assert!(text.contains("8,030,261,248"), "{text}");
    assert!(text.contains("Time on one device that achieves 600 TFLOP/s, assumed\n"), "{text}");
    assert!(!repository().join("runs/moh-llama3-8b").exists());
}

#[test]
fn lines_name_data_stages_and_evaluations() {
    let dir = prepared();
    let output = moh_train(dir.path(), &[]).output().unwrap();
    let (text, table) = (stderr(&output), support::stdout(&output));
    // 480 sequences of 16 tokens; the file has 124 of them.
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("data text: 3.87 epochs, 7,680 tokens of 2,000"));
    let warning = "warning: text is read 3.87 times: add data, or lower the stages' tokens or the \
                   source's weight";
    assert_eq!(lines.next(), Some(warning));
    assert!(lines.next().unwrap().starts_with("validation before training: loss "), "{text}");
    assert_eq!(lines.next(), Some("stage adapt: dense attention, 8 heads, 60 steps"));
    assert!(lines.next().unwrap().contains(", gradient norm "), "{text}");
    for expected in [
        "validation after stage adapt: loss ",
        "validation after conversion, 6 of 8 heads: loss ",
        "stage moh: Mixture-of-Head, 6 of 8 heads, 60 steps\n",
        "validation after stage moh: loss ",
        "checkpoint of step 7 complete after ",
        "checkpoint of step 120 complete after ",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    // moh-eval reads 2000 / 16 windows, the run 2 micro-batches of 2.
    let note = "--sequence-length 16  # all 125 windows; the table's losses are of the first 4\n";
    assert!(table.contains(note), "{table}");
    assert!(table.contains("bits per byte"), "{table}");
}

#[test]
fn a_run_without_validation_has_no_table() {
    let rest = RECIPE.replace("validation = { path = \"text\", batches = 2, every_steps = 9 }", "");
    let short = rest.replace("3840", "64").replace("warmup_steps = 2", "warmup_steps = 1");
    let dir = trainable(&short);
    let output = moh_train(dir.path(), &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(support::stdout(&output).starts_with("model    run/export\n"));
    assert!(stderr(&output).contains("stage adapt: dense attention, 8 heads, 1 step\n"));
    // A finished run says so again, also where no picture can be made of it.
    fs::write(dir.path().join("run/routing.jsonl"), "x\n").unwrap();
    let output = moh_train(dir.path(), &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(support::stdout(&output).contains("\nmodel    run/export\n"));
    let warning = "warning: no picture: run/routing.jsonl:1: ";
    assert!(stderr(&output).contains(warning), "{}", stderr(&output));
}

#[test]
fn a_plan_shows_the_epochs_of_each_source() {
    let dir = prepared();
    write_tokens(&dir.path().join("more"), support::VOCABULARY, 16_001, 2);
    let sources = "data.sources=[{path = \"text\", weight = 1}, {path = \"more\", weight = 3}]";
    let plan = |overrides: &[&str]| success(moh_train(dir.path(), overrides).arg("--plan"));
    // 4,000 sequences: 1,000 of the 124 of one file and 3,000 of the 1,000 of the other.
    let long = ["stage.adapt.tokens=32000", "stage.moh.tokens=32000"];
    let text = plan(&[&[sources], &long[..]].concat());
    for expected in ["8.06 epochs", "3.00 epochs", "16,000 of 2,000", "48,000 of 16,001"] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    assert_eq!(text.matches("warning: ").count(), 2, "{text}");
    // Each window is read once.
    let once = plan(&["data.sources=[{path = \"more\"}]", "stage.moh.tokens=12160"]);
    assert!(once.contains("1.00 epochs") && !once.contains("warning"), "{once}");
    let absent = plan(&["data.sources=[{path = \"text\"}, {path = \"none\"}]"]);
    assert!(absent.contains("epochs: not known, not all files of data.sources are on"), "{absent}");
}

/// `moh-train --plan` of the paper's run with more arguments.
fn cluster_plan(arguments: &[&str]) -> Command {
    let mut command = program(PROGRAM, &repository());
    command.args(["--recipe", "recipes/moh-llama3-8b.toml", "--plan"]).args(arguments);
    command
}

const H100: &str = "recipes/hardware/h100-sxm.toml";

#[test]
fn the_plan_of_many_ranks_has_their_memory_traffic_and_time() {
    let text = success(&mut cluster_plan(&["--ranks", "64"]));
    for expected in ["Layout of 64 ranks", "2 x 32 x 1", "1 x 8 x 8", "Sent by one rank in a step"]
    {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    assert!(!text.contains("Predicted time") && !text.contains("one process"), "{text}");
    let text = success(&mut cluster_plan(&["--ranks", "64", "--hardware", H100]));
    for expected in [
        "Predicted time on H100 SXM 80 GB",
        "pipeline bubble",
        "tokens/s",
        "stage, without its checkpoints",
        "one checkpoint: not known; set node.filesystem_write_gb_per_s and node.hash_gb_per_s",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    // Each time names how its rates are known, and the rates follow.
    let ends = |start: &str, end: &str| {
        let mut lines = text.lines().map(str::trim);
        assert!(
            lines.any(|line| line.starts_with(start) && line.ends_with(end)),
            "{start}\n{text}"
        );
    };
    for time in ["compute", "tokens/s", "all stages", "data ranks' exchange, as far as exposed"] {
        ends(time, "  assumed");
    }
    ends("matrix products, bf16", "675 TFLOP/s  assumed");
    let profile = fs::read_to_string(repository().join(H100)).unwrap();
    let known = "ranks = 8\nfilesystem_write_gb_per_s = { value = 2, basis = \"measured\" }\n\
                 hash_gb_per_s = { value = 4, basis = \"published\" }";
    let dir = prepared();
    let path = dir.path().join("known.toml");
    fs::write(&path, profile.replace("ranks = 8", known)).unwrap();
    let text = success(&mut cluster_plan(&["--ranks", "64", "--hardware", path.to_str().unwrap()]));
    assert!(text.contains("stage, with its checkpoints"), "{text}");
    // 66.4 GB by 8 nodes at 2 GB/s, and hashed by 64 ranks at 4.
    let line = text.lines().find(|line| line.contains("hashing and writing one")).unwrap();
    assert!(line.contains("4.4 seconds  published"), "{line}");
    let long = ["--set", "stage.adapt.micro_batch=8", "--ranks", "64", "--hardware", H100];
    let text = success(&mut cluster_plan(&long));
    assert!(text.contains("stage adapt DOES NOT FIT: "), "{text}");
}

#[test]
fn suggested_layouts_can_be_planned() {
    let text = success(&mut cluster_plan(&["--ranks", "64", "--hardware", H100, "--suggest"]));
    let first = |stage: &str| {
        let lines = text.lines().skip_while(|line| !line.starts_with(&format!("Stage {stage}: ")));
        let mut lines = lines.filter(|line| line.contains("--set"));
        lines.next().unwrap().split_once(". ").unwrap().1.to_string()
    };
    let (adapt, moh) = (first("adapt"), first("moh"));
    let overrides = adapt.split(' ').chain(moh.split(' '));
    let arguments: Vec<&str> =
        ["--ranks", "64", "--hardware", H100].into_iter().chain(overrides).collect();
    let planned = success(&mut cluster_plan(&arguments));
    assert!(!planned.contains("DOES NOT FIT"), "{planned}");
    let text = success(&mut cluster_plan(&["--ranks", "1", "--hardware", H100, "--suggest"]));
    assert!(text.contains("Stage adapt: 0 of ") && text.contains("the smallest needs "), "{text}");
}

#[test]
fn plans_of_ranks_that_cannot_be_are_refused() {
    let dir = prepared();
    let refused = |arguments: &[&str]| failure(&repository(), &mut cluster_plan(arguments), 1);
    let message = refused(&["--ranks", "12"]);
    assert!(message.contains("stage.moh.parallel: --ranks 12 is not a multiple of"), "{message}");
    assert!(message.contains("use --ranks 8, or --suggest"), "{message}");
    let message = refused(&["--ranks", "1"]);
    assert!(message.ends_with("use --ranks 2, or --suggest for layouts of 1 rank"), "{message}");
    let message = refused(&["--ranks", "8", "--hardware", "none.toml"]);
    assert!(message.starts_with("none.toml: No such file"), "{message}");
    let profile = dir.path().join("h.toml");
    let text = fs::read_to_string(repository().join(H100)).unwrap();
    fs::write(&profile, text.replace("latency_us", "latency")).unwrap();
    let message = refused(&["--ranks", "8", "--hardware", profile.to_str().unwrap()]);
    assert!(message.contains("h.toml: line "), "{message}");
    assert!(
        message.contains("network.latency: unknown key, did you mean network.latency_us"),
        "{message}"
    );
}

#[test]
fn recipes_that_do_not_fit_are_refused() {
    let dir = prepared();
    for (change, expected) in [
        ("data.sequence_lenght=16", "sequence_length"),
        ("run.seed=abc", "--set: run.seed"),
        ("stage.adapt.learning_rate.max=-1", "must be a finite number above 0"),
        ("stage.adapt.micro_batch=0", "stage.adapt.micro_batch"),
        ("stage.tune.tokens=1", "stage.tune"),
        ("stage.adapt", "expected key=value"),
        ("stage.adapt.batch_tokens=65", "must be a multiple of sequence_length x micro_batch"),
        ("stage.moh.moh={shared_heads = 7, routed_top_k = 1}", "leaves one routed head"),
        ("stage.moh.moh.routed_top_k=5", "must be at most the 4 routed heads"),
        ("stage.moh.moh.shared_heads=9", "the model has 8 heads"),
        ("run.device=cuda", "use --set run.device=cpu"),
        ("stage.adapt.parallel.tensor=2", "1 rank was started: start a multiple of 2"),
        ("stage.adapt.parallel.virtual_stages=2", "stage.adapt.parallel.virtual_stages"),
        ("model.from=./none", "./none: no such directory"),
        ("model.from=recipe.toml", "recipe.toml: is a file, expected a model directory"),
        ("model.from=org/none", "org/none: "),
    ] {
        let message = failure(dir.path(), &mut moh_train(dir.path(), &[change]), 1);
        assert!(message.contains(expected), "{change}: {message}");
    }
    let longer =
        ["data.sequence_length=80", "stage.adapt.batch_tokens=160", "stage.moh.batch_tokens=160"];
    let message = failure(dir.path(), &mut moh_train(dir.path(), &longer), 1);
    assert!(message.contains("the model supports 64 tokens"), "{message}");
    let other = |text: Option<&str>| {
        match text {
            Some(text) => fs::write(dir.path().join("recipe.toml"), text).unwrap(),
            None => fs::remove_file(dir.path().join("recipe.toml")).unwrap(),
        }
        failure(dir.path(), &mut moh_train(dir.path(), &[]), 1)
    };
    let message = other(Some("[run\n"));
    assert!(message.starts_with("recipe.toml: line 1: "), "{message}");
    let message = other(None);
    assert!(message.starts_with("recipe.toml: No such file"), "{message}");
}

#[test]
fn wrong_usage_exits_with_two() {
    let dir = prepared();
    for arguments in [&[][..], &["--plan"], &["recipe.toml"], &["--recipe"]] {
        let output = program(PROGRAM, dir.path()).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    for arguments in [
        &["--device-tflops", "9"][..],
        &["--plan", "--device-tflops", "0"],
        &["--ranks", "2"],
        &["--plan", "--ranks", "0"],
        &["--plan", "--hardware", "h.toml"],
        &["--plan", "--ranks", "2", "--suggest"],
        &["--rendezvous-timeout", "0"],
        &["--operation-timeout", "99999999999"],
    ] {
        let output = moh_train(dir.path(), &[]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    let text = success(program(PROGRAM, dir.path()).arg("--help"));
    assert!(text.contains("Example") && text.contains("  moh-train --recipe recipes/"), "{text}");
}

#[test]
fn models_that_are_damaged_are_refused() {
    let dir = prepared();
    let path = dir.path().join("source/model.safetensors");
    let good = fs::read(&path).unwrap();
    let mut corrupt = good.clone();
    corrupt[20] = b'}';
    for (bytes, expected) in [
        (&good[..good.len() - 1], "model.safetensors: is cut short or corrupt"),
        (&corrupt[..], "model.safetensors: has a corrupt safetensors header"),
    ] {
        fs::write(&path, bytes).unwrap();
        let message = failure(dir.path(), &mut moh_train(dir.path(), &[]), 1);
        assert!(message.contains(expected), "{message}");
    }
    fs::write(&path, good).unwrap();
    fs::remove_file(dir.path().join("source/config.json")).unwrap();
    let message = failure(dir.path(), &mut moh_train(dir.path(), &[]), 1);
    assert!(message.starts_with("source/config.json: No such file"), "{message}");
}

#[test]
fn token_files_that_do_not_fit_are_refused() {
    let dir = prepared();
    let root = dir.path();
    write_tokens(&root.join("short"), support::VOCABULARY, 16, 1);
    write_tokens(&root.join("cut"), support::VOCABULARY, 2000, 1);
    let bytes = fs::read(root.join("cut.bin")).unwrap();
    fs::write(root.join("cut.bin"), &bytes[..bytes.len() - 1]).unwrap();
    for (path, expected) in [
        ("none", "none.bin: cannot read: No such file"),
        ("short", "short: has 16 tokens, one window needs 17"),
        ("cut", "cut."),
    ] {
        let source = format!("data.sources=[{{path = \"{path}\"}}]");
        let message = failure(root, &mut moh_train(root, &[&source]), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    let held_out = "data.validation.path=none";
    let message = failure(root, &mut moh_train(root, &[held_out]), 1);
    assert!(message.starts_with("none.bin: cannot read"), "{message}");

    // The whole file is read before the run begins.
    write_tokens(&root.join("wide"), support::VOCABULARY + 9, 2000, 1);
    let source = "data.sources=[{path = \"wide\"}]";
    let output = moh_train(root, &[source, "run.dir=wide-run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("error: wide.bin: token ") && last.contains("outside the vocabulary"));
    assert!(!text.contains("stage adapt"), "{text}");
}

#[test]
fn a_token_file_of_another_tokenizer_is_refused() {
    let dir = prepared();
    let root = dir.path();
    write_tokenizer(&root.join("source"), "w0");
    write_tokenizer(&root.join("other"), "w1");
    fs::write(root.join("words.txt"), "w1 w2 w3 ".repeat(40)).unwrap();
    let prepare = |tokenizer: &str, out: &str| {
        let mut command = program(env!("CARGO_BIN_EXE_moh-data"), root);
        success(command.args([
            "prepare",
            "--no-append-eos",
            "--tokenizer",
            tokenizer,
            "--out",
            out,
            "words.txt",
        ]));
    };
    prepare("other", "theirs");
    prepare("source", "ours");
    for key in ["data.sources=[{path = \"theirs\"}]", "data.validation.path=theirs"] {
        let message = failure(root, &mut moh_train(root, &[key]), 1);
        assert!(message.starts_with("theirs.json: prepared with another tokenizer"), "{message}");
    }
    // The tokenizer gives bits per byte, and goes with the export.
    let ours = ["data.sources=[{path = \"ours\"}]", "data.validation.path=ours"];
    let text = success(&mut moh_train(root, &ours));
    assert!(text.contains("moh-generate --model run/export"), "{text}");
    let same = |name: &str| fs::read(root.join(name).join("tokenizer.json")).unwrap();
    assert!(same("source") == same("run/export"));
    let metrics = fs::read_to_string(root.join("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    // Windows of 16 words have 15 targets: 15 words of 2 bytes and 14 spaces between them.
    let expected = last["validation_loss"].as_f64().unwrap() * 15.0 / 44.0 / 2f64.ln();
    assert!((last["validation_bits_per_byte"].as_f64().unwrap() - expected).abs() < 1e-12);
}

#[test]
fn a_run_directory_that_cannot_be_written_is_refused() {
    let dir = prepared();
    fs::write(dir.path().join("occupied"), "mine").unwrap();
    for place in ["occupied", "occupied/deeper"] {
        let run = format!("run.dir={place}");
        let message = failure(dir.path(), &mut moh_train(dir.path(), &[&run]), 1);
        assert!(message.starts_with(&format!("{place}: ")), "{message}");
    }
    assert_eq!(fs::read_to_string(dir.path().join("occupied")).unwrap(), "mine");
}

/// A limit on the size of files acts like a full disk.
#[test]
fn a_full_disk_keeps_the_newest_checkpoint_and_room_continues() {
    let dir = prepared();
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    let (mut child, _reader) = started(&mut moh_train(dir.path(), &[]), 30);
    child.kill().unwrap();
    child.wait().unwrap();
    let run = dir.path().join("run");
    let step = newest_checkpoint(&run);
    assert!(step >= 7, "{step}");
    let before = names(&run.join("checkpoints"));
    // 32 blocks are 16 or 32 KB, depending on the shell; the weights have 46.
    let script = format!("ulimit -f 32; exec '{PROGRAM}' --recipe recipe.toml");
    let mut shell = Command::new("sh");
    support::isolate(&mut shell, dir.path());
    let output = shell.arg("-c").arg(script).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("error: ") && last.contains("File too large"), "{text}");
    let good = format!("the last good checkpoint is of step {step}");
    assert!(last.contains("the checkpoint could not be written") && last.contains(&good), "{text}");
    // The run has gone on until its end, and tried again at every seventh step and at the stages' ends.
    let warnings = text.lines().filter(|line| line.starts_with("warning: the checkpoint of step "));
    let attempts = (step + 1..=120).filter(|step| step % 7 == 0 || step % 60 == 0).count();
    assert_eq!(warnings.count(), attempts, "{text}");
    assert!(text.contains("moh 120/120: "), "{text}");
    let left = names(&run.join("checkpoints"));
    let whole: Vec<_> = left.iter().filter(|name| !name.starts_with(".tmp-")).collect();
    assert_eq!(whole, before.iter().filter(|name| !name.starts_with(".tmp-")).collect::<Vec<_>>());
    let output = moh_train(dir.path(), &[]).output().unwrap();
    assert!(output.status.success());
    assert!(stderr(&output).starts_with(&format!("continuing after step {step} of 120\n")));
    assert!(results(&run) == results(&dir.path().join("whole")));
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_shell_with_a_launchers_variables_is_told_which_ones() {
    let dir = prepared();
    let mut command = moh_train(dir.path(), &[]);
    command.envs([
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOB_NODELIST", "node1"),
    ]);
    let message = failure(dir.path(), &mut command, 1);
    let expected = "SLURM_PROCID and SLURM_NTASKS say that this is one of 4 processes, but this program \
         was built without MPI: build it with --features mpi, or unset these variables to start one \
         process";
    assert_eq!(message, expected);
}
