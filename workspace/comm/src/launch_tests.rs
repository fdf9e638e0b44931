//! Tests of `launch.rs`.

use proptest::prelude::*;

use super::*;

fn parse(variables: &[(&str, &str)], rendezvous: Option<&str>) -> Result<Launch> {
    let text = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
    Launch::parse(&variables.iter().map(text).collect(), rendezvous)
}

fn refusal(variables: &[(&str, &str)]) -> String {
    parse(variables, None).unwrap_err().to_string()
}

fn address(launch: &Launch) -> String {
    launch.rendezvous.as_ref().unwrap().to_string()
}

const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
];

const SLURM: [(&str, &str); 5] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_JOB_NODELIST", "gnode[10,20-25]"),
    ("SLURM_JOB_ID", "123456"),
];

const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];

fn and<'a>(sets: &[&[(&'a str, &'a str)]]) -> Vec<(&'a str, &'a str)> {
    sets.concat()
}

fn without<'a>(set: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    set.iter().copied().filter(|(other, _)| *other != name).collect()
}

#[test]
fn nothing_set_is_one_process() {
    assert_eq!(parse(&[], None).unwrap(), Launch::single());
    assert_eq!(parse(&[("MASTER_ADDR", "node1")], None).unwrap(), Launch::single());
    assert_eq!(parse(&[("RANK", ""), ("WORLD_SIZE", " ")], None).unwrap(), Launch::single());
}

#[test]
fn torchrun_names_rank_and_rendezvous() {
    let launch = parse(&TORCHRUN, None).unwrap();
    assert_eq!((launch.rank, launch.size, launch.local_rank), (5, 8, 1));
    assert_eq!((launch.launcher, address(&launch)), (Launcher::Torchrun, "node1:29500".into()));
    let six = [("MASTER_ADDR", "fe80::1"), ("MASTER_PORT", "29500")];
    let launch = parse(&and(&[&TORCHRUN[..4], &six]), None).unwrap();
    assert_eq!(address(&launch), "[fe80::1]:29500");
}

#[test]
fn the_port_after_the_agents_is_taken_where_the_agent_listens() {
    let agent = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "none")];
    let launch = parse(&and(&[&TORCHRUN, &agent]), None).unwrap();
    assert_eq!((address(&launch), launch.job), ("node1:29501".into(), "torchrun none".into()));
    let last = [("MASTER_ADDR", "node1"), ("MASTER_PORT", "65535")];
    let error = refusal(&and(&[&TORCHRUN[..4], &last, &agent]));
    assert!(error.contains("no port after it"), "{error}");
}

#[test]
fn slurm_names_the_first_host_and_a_port_from_the_job() {
    let launch = parse(&SLURM, None).unwrap();
    assert_eq!((launch.rank, launch.size, launch.local_rank), (3, 4, 1));
    assert_eq!((launch.launcher, address(&launch)), (Launcher::Slurm, "gnode10:23456".into()));
    let step = [("SLURM_STEP_ID", "2"), ("SLURM_STEP_NODELIST", "gnode[20-21]")];
    let launch = parse(&and(&[&SLURM, &step]), None).unwrap();
    assert_eq!((address(&launch), launch.job), ("gnode20:23658".into(), "srun 123456.2".into()));
}

#[test]
fn shells_of_slurm_that_are_no_task_are_one_process() {
    let salloc = without(&SLURM, "SLURM_PROCID");
    assert_eq!(parse(&salloc, None).unwrap(), Launch::single());
    let sbatch = and(&[&SLURM, &[("ENVIRONMENT", "BATCH")]]);
    assert_eq!(parse(&sbatch, None).unwrap(), Launch::single());
    let task = and(&[&sbatch, &[("SLURM_STEP_ID", "0")]]);
    assert_eq!(parse(&task, None).unwrap().size, 4);
}

#[test]
fn mpirun_on_one_machine_meets_there_and_elsewhere_needs_an_address() {
    let launch = parse(&OPEN_MPI, None).unwrap();
    assert_eq!((launch.rank, launch.size, launch.local_rank), (1, 2, 1));
    assert_eq!((launch.launcher, address(&launch)), (Launcher::OpenMpi, "127.0.0.1:29500".into()));
    let jobs = ["1234", "1235"].map(|job| {
        let launch = parse(&and(&[&OPEN_MPI, &[("PMIX_NAMESPACE", job)]]), None).unwrap();
        launch.rendezvous.unwrap().port
    });
    assert!(jobs[0] != jobs[1] && jobs.iter().all(|port| (20_000..30_000).contains(port)));
    let spread = without(&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE");
    let expected = "2 ranks have no address to meet at, mpirun does not provide rank 0's host: \
                    set MASTER_ADDR and MASTER_PORT, or give --rendezvous HOST:PORT with rank 0's \
                    host";
    assert_eq!(refusal(&spread), expected);
    let in_slurm = and(&[&spread, &SLURM]);
    assert_eq!(address(&parse(&in_slurm, None).unwrap()), "gnode10:23456");
}

#[test]
fn the_command_line_goes_before_every_variable() {
    for variables in [&TORCHRUN[..], &SLURM, &OPEN_MPI] {
        let launch = parse(variables, Some("here:7")).unwrap();
        assert_eq!(address(&launch), "here:7");
    }
    for text in ["", "here", "here:", ":7", "here:0", "here:70000", "a:b:7", "a b:7", "[]:7"] {
        let error = parse(&SLURM, Some(text)).unwrap_err().to_string();
        let expected = format!("--rendezvous = {text}: expected HOST:PORT, such as node7:29500");
        assert_eq!(error, expected);
    }
}

#[test]
fn torchrun_wins_inside_srun_and_mpirun_inside_sbatch() {
    let agent = [("TORCHELASTIC_RUN_ID", "x")];
    let launch = parse(&and(&[&SLURM, &TORCHRUN, &agent]), None).unwrap();
    assert_eq!((launch.launcher, launch.rank), (Launcher::Torchrun, 5));
    let launch = parse(&and(&[&SLURM, &OPEN_MPI]), None).unwrap();
    assert_eq!((launch.launcher, launch.rank), (Launcher::OpenMpi, 1));
}

#[test]
fn variables_set_by_hand_may_not_contradict_the_launcher() {
    let by_hand = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")];
    let expected = "RANK = 0 of WORLD_SIZE = 4 contradicts SLURM_PROCID = 3 of SLURM_NTASKS = 4: \
                    unset RANK, WORLD_SIZE and LOCAL_RANK to follow srun";
    assert_eq!(refusal(&and(&[&SLURM, &by_hand])), expected);
    let expected = "RANK = 0 of WORLD_SIZE = 4 contradicts OMPI_COMM_WORLD_RANK = 1 of \
                    OMPI_COMM_WORLD_SIZE = 2: unset RANK, WORLD_SIZE and LOCAL_RANK to follow \
                    mpirun";
    assert_eq!(refusal(&and(&[&OPEN_MPI, &by_hand])), expected);
}

#[test]
fn incomplete_variables_are_named() {
    let expected = "RANK set without WORLD_SIZE and LOCAL_RANK: unset variables left over from \
                    another job, or start with torchrun, which sets all of them";
    assert_eq!(refusal(&[("RANK", "0")]), expected);
    let expected = "MASTER_ADDR is set without MASTER_PORT: set both, or give --rendezvous \
                    HOST:PORT";
    assert_eq!(refusal(&without(&TORCHRUN, "MASTER_PORT")), expected);
    for (variables, expected) in [
        (
            vec![("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")],
            "WORLD_SIZE and LOCAL_RANK set without RANK:",
        ),
        (
            without(&SLURM, "SLURM_NTASKS"),
            "SLURM_PROCID and SLURM_LOCALID set without SLURM_NTASKS:",
        ),
        (without(&OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "set without OMPI_COMM_WORLD_SIZE"),
        (TORCHRUN[..4].to_vec(), "MASTER_ADDR and MASTER_PORT are not set"),
        (without(&SLURM, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST is not set"),
    ] {
        let message = refusal(&variables);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn numbers_that_contradict_each_other_are_named() {
    let ranks = |rank, size, local| [("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local)];
    for (rank, size, local, local_size, expected) in [
        ("2", "2", "0", "", "RANK = 2 is not below WORLD_SIZE = 2:"),
        ("0", "2", "3", "", "LOCAL_RANK = 3 is not below WORLD_SIZE"),
        ("0", "0", "0", "", "RANK = 0 is not below WORLD_SIZE = 0:"),
        ("0", "2", "1", "1", "LOCAL_RANK = 1 is not below LOCAL_WORLD_SIZE = 1:"),
        ("0", "2", "1", "4", "LOCAL_WORLD_SIZE = 4 is not below WORLD_SIZE + 1 = 3:"),
    ] {
        let local_size = [("LOCAL_WORLD_SIZE", local_size)];
        let message = refusal(&and(&[&ranks(rank, size, local), &local_size]));
        assert!(message.starts_with(expected), "{message}");
    }
    for text in ["-1", "x", "1.5", "99999999999999999999", "70000"] {
        let error = refusal(&ranks("0", text, "0"));
        assert_eq!(error, format!("WORLD_SIZE = {text}: expected a number up to 65536"));
    }
}

fn names() -> Vec<&'static str> {
    let of_launchers =
        [&TORCHRUN[..], &SLURM, &OPEN_MPI].concat().into_iter().map(|(name, _)| name);
    let agent = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PMIX_NAMESPACE"];
    let steps = ["SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_NODELIST", "ENVIRONMENT"];
    of_launchers.chain(agent).chain(steps).collect()
}

proptest! {
    #[test]
    fn no_environment_makes_it_panic_or_gives_an_impossible_rank(
        values in prop::collection::btree_map(
            prop::sample::select(names()),
            prop_oneof!["[0-9]{1,6}", "\\PC{0,12}", "[a-c\\[\\],0-9:-]{0,12}", Just("True".into())],
            0..12,
        ),
        rendezvous in prop::option::of("\\PC{0,12}"),
    ) {
        let values = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        if let Ok(launch) = Launch::parse(&values, rendezvous.as_deref()) {
            prop_assert!(launch.rank < launch.size && launch.local_rank < launch.size);
            prop_assert_eq!(launch.rendezvous.is_some(), launch.size > 1);
        }
    }
}
