//! Jobs that real launchers start: this program is their worker. A launcher that is not installed is skipped, and said so,
//! unless `TRAINER_TEST_LAUNCHERS` lists it: `TRAINER_TEST_LAUNCHERS=mpirun,torchrun`.

mod common;

use std::process::{Command, Stdio};

use common::{Bench, CONFIG, losses};

/// Trains by `launcher arguments… trainer …`; false where there is no such program.
fn trains_under(launcher: &str, arguments: &[&str], announced: &str) {
    let required = std::env::var("TRAINER_TEST_LAUNCHERS").is_ok_and(|list| list.split(',').any(|one| one == launcher));
    if let Err(error) = Command::new(launcher).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        assert!(!required, "{launcher} has to be tested here: {error}");
        eprintln!("skipped: {launcher}: {error}");
        return;
    }
    let bench = Bench::new(CONFIG);
    let trainer = env!("CARGO_BIN_EXE_trainer");
    let limit = ["--set", "train.max_steps=12"];
    let mut command = Command::new(launcher);
    command.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").env("NO_COLOR", "1").args(arguments);
    let output = command.args([trainer, "--config", "config.toml", "--run-dir", "theirs"]).args(limit).output();
    let ended: common::Ended = output.expect("it was there a moment ago").into();
    let ended = ended.expect(0);
    let said = ended.stdout + &ended.stderr;
    assert!(said.contains(announced) && said.contains("rank 0 of 2"), "{said}");

    // the same job by our own launcher
    bench.run(&[&["--config", "config.toml", "--run-dir", "ours", "--cpus", "2"][..], &limit].concat()).expect(0);
    assert_eq!(losses(&bench.only_run("theirs")), losses(&bench.only_run("ours")), "the same losses to the last bit");
}

#[test]
fn mpirun() {
    trains_under("mpirun", &["--allow-run-as-root", "--oversubscribe", "-np", "2"], "started by Open MPI");
}

#[test]
fn torchrun() {
    trains_under("torchrun", &["--nproc-per-node", "2", "--no-python"], "started by torchrun");
}

#[test]
fn srun() {
    // a cluster of one's own is not set up here: it runs where there is one
    if std::env::var_os("TRAINER_TEST_LAUNCHERS").is_some_and(|list| list.to_string_lossy().contains("srun")) {
        trains_under("srun", &["-n", "2"], "started by Slurm");
    } else {
        eprintln!("skipped: srun needs a cluster: TRAINER_TEST_LAUNCHERS=srun");
    }
}
