//! Training over an installed MPI library, in processes that mpirun starts.
//! `cargo test --release -p trainer --features mpi --test mpi` runs these tests.
#![cfg(feature = "mpi")]

mod common;

use std::process::{Command, Stdio};

use common::{Bench, CONFIG, Ended, losses};

/// Returns the command of Open MPI's launcher. It allows more ranks than cores, and the superuser, because tests may have both.
fn mpirun(world_size: usize, bench: &Bench) -> Command {
    let mut command = Command::new("mpirun");
    bench.own_mpi_session(&mut command);
    command.args(["--allow-run-as-root", "--oversubscribe", "-np", &world_size.to_string()]).env("NO_COLOR", "1");
    // The time in which a rank that has lost another one can say so, which is a second without the option. Open MPI always
    // waits for so long.
    command.args(["--mca", "odls_base_sigkill_timeout", "10"]);
    command
}

/// Trains under mpirun, over `backend`, with `more` arguments.
fn trains(bench: &Bench, world_size: usize, backend: &str, more: &[&str]) -> Ended {
    let mut command = mpirun(world_size, bench);
    command.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").arg(env!("CARGO_BIN_EXE_trainer"));
    command.args(["--config", "config.toml", "--backend", backend]).args(more);
    command.output().expect("mpirun starts").into()
}

#[test]
fn training_over_mpi_has_the_losses_of_the_custom_collectives() {
    let bench = Bench::new(CONFIG);
    let limit = ["--set", "train.max_steps=12"];
    trains(&bench, 2, "mpi", &[&["--run-dir", "theirs"][..], &limit].concat()).expect(0);
    bench.run(&[&["--config", "config.toml", "--run-dir", "ours", "--cpus", "2"][..], &limit].concat()).expect(0);
    let (theirs, ours) = (losses(&bench.only_run("theirs")), losses(&bench.only_run("ours")));
    assert!(!ours.is_empty());
    assert_eq!(theirs, ours, "a sum of two has one order");

    trains(&bench, 4, "mpi", &[&["--run-dir", "theirs4"][..], &limit].concat()).expect(0);
    let four = losses(&bench.only_run("theirs4"));
    assert_eq!(four.len(), ours.len());
}

#[test]
fn a_job_that_mpirun_has_not_started_is_refused() {
    let bench = Bench::new(CONFIG);
    let ended = bench.run(&["--config", "config.toml", "--backend", "mpi", "--cpus", "2"]).expect(2);
    assert!(ended.stderr.contains("mpirun -np 2 trainer"), "{}", ended.stderr);
    assert!(common::entries(&bench.path("runs")).is_empty());
}

#[test]
fn bench_allreduce_has_exact_sums() {
    let bench = Bench::new(CONFIG);
    let mut command = mpirun(2, &bench);
    command.arg(env!("CARGO_BIN_EXE_trainer"));
    command.args(["bench", "allreduce", "--backend", "mpi", "--sizes", "4,65536,1000000", "--ms", "20", "--json"]);
    let ended: Ended = command.output().expect("mpirun starts").into();
    let ended = ended.expect(0);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).expect("json");
    let rows = report["results"].as_array().expect("rows");
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{rows:?}");
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    let bench = Bench::new(&CONFIG.replace("epochs = 3", "epochs = 10000"));
    let mut command = mpirun(2, &bench);
    command.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").arg(env!("CARGO_BIN_EXE_trainer"));
    command.args(["--config", "config.toml", "--backend", "mpi", "--run-dir", "runs"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun starts");
    let trains = || {
        let runs = common::entries(&bench.path("runs"));
        runs.iter().any(|run| std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| !text.is_empty()))
    };
    common::wait_until("the first step", trains);
    let ranks = common::children(child.id());
    assert_eq!(ranks.len(), 2);
    common::signal_process(ranks[1], 9);
    let ended: Ended = child.wait_with_output().expect("mpirun ends").into();
    assert_ne!(ended.code, Some(0));
    let said = ended.stdout + &ended.stderr;
    assert!(said.contains("is gone: its connection was closed") && said.contains("step "), "{said}");
    common::wait_until("the other rank's end", || !std::path::Path::new(&format!("/proc/{}", ranks[0])).exists());
}

/// The examples of the crate `launch`, which `.ci/run` has built with MPI.
#[test]
fn the_tutorials_programs_join_over_mpi() {
    let program = std::env::current_exe().expect("this program");
    let examples = program.ancestors().nth(2).expect("target/release/deps").join("examples");
    for (name, line) in [
        ("p2p_nonblocking", "Rank 1 has data 1.0"),
        ("collectives", "Rank 1 all_to_all [0.0, 1.0, 1.0]"),
        ("ring_all_reduce", "Rank 1 has data [0.0, 3.0, 6.0, 9.0]"),
        ("distributed_sgd", "Rank 1, epoch 9: "),
    ] {
        let bench = Bench::new("");
        let output = mpirun(2, &bench).arg(examples.join(name)).arg("mpi").output().expect("mpirun starts");
        let ended = Ended::from(output).expect(0);
        assert!(ended.stdout.contains(line), "{name}: {}", ended.stdout);
    }
}

#[test]
fn doctor_names_the_thread_support_of_the_library() {
    let bench = Bench::new(CONFIG);
    let page = bench.run(&["doctor"]).expect(0).stdout;
    let line = page.lines().find(|line| line.contains("mpirun (Open MPI)")).unwrap_or_else(|| panic!("{page}"));
    assert!(line.contains("MPI_THREAD_MULTIPLE"), "{line}");
}
