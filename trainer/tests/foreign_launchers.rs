//! Jobs started by real launchers, whose workers are this program.

use std::process::{Command, Stdio};

use crate::common::{self, Bench, CONFIG, losses, python_with, skip_or_fail};

/// Trains with `launcher… trainer …` and compares the losses with those of the same job under the program's own launcher.
fn trains_under(launcher: &[&str], announced: &str) {
    let program = launcher[0];
    if let Err(error) = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        return skip_or_fail(program, error);
    }
    let bench = Bench::new(CONFIG);
    let trainer = env!("CARGO_BIN_EXE_trainer");
    let limit = ["--set", "train.max_steps=12"];
    let mut command = Command::new(program);
    bench.own_mpi_session(&mut command);
    command.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").env("NO_COLOR", "1").args(&launcher[1..]);
    let output = command.args([trainer, "--config", "config.toml", "--run-dir", "theirs"]).args(limit).output();
    let ended: common::Ended = output.expect("the launcher starts").into();
    let ended = ended.expect(0);
    let said = ended.stdout + &ended.stderr;
    assert!(said.contains(announced) && said.contains("rank 0 of 2"), "{said}");

    bench.run(&[&["--config", "config.toml", "--run-dir", "ours", "--cpus", "2"][..], &limit].concat()).expect(0);
    assert_eq!(losses(&bench.only_run("theirs")), losses(&bench.only_run("ours")), "bit for bit");
}

#[test]
fn ranks_of_mpirun_have_the_losses_of_the_own_launcher() {
    trains_under(&["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"], "started by Open MPI");
}

/// Runs torchrun. PyTorch 1.13 on Python 3.11, as in Debian 12, cannot read the default of its option `--redirects`.
const TORCHRUN: &str = "
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import main
if Std.from_str('0') is None:
    Std.from_str = classmethod(lambda cls, text: Std.NONE)
main()";

#[test]
fn ranks_of_torchrun_have_the_losses_of_the_own_launcher() {
    let Some(python) = python_with(&["torch"]) else { return };
    let port = common::free_port().to_string();
    let python = python.to_str().expect("a path in UTF-8");
    let torchrun = [python, "-c", TORCHRUN, "--master_port", &port, "--nproc_per_node", "2", "--no_python"];
    trains_under(&torchrun, "started by torchrun");
}

#[test]
#[ignore = "needs a Slurm cluster"]
fn ranks_of_srun_have_the_losses_of_the_own_launcher() {
    trains_under(&["srun", "-n", "2"], "started by Slurm");
}
