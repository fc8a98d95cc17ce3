//! The examples of the crate `launch`, PyTorch's tutorial "Writing Distributed Applications with PyTorch", under
//! `trainer launch`. `mpi.rs` runs them under mpirun.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::common::{Bench, Ended, skip_or_fail};

/// Returns the path of an example. Cargo builds the examples with the tests of their crate, as in a test of the whole workspace.
#[track_caller]
fn example(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().expect("this program");
    let path = program.ancestors().nth(2).expect("target/release/deps").join("examples").join(name);
    if !path.exists() {
        skip_or_fail("examples of launch", format!("{}: cargo build --release -p launch --examples", path.display()));
        return None;
    }
    Some(path)
}

/// Runs an example over a transport and returns its lines, sorted, without the ranks that the launcher has put before them.
#[track_caller]
fn lines(name: &str, world_size: usize, transport: &str) -> Option<Vec<String>> {
    let (bench, world_size, program) = (Bench::new(""), world_size.to_string(), example(name)?);
    let program = program.to_str().expect("a path in UTF-8");
    let ended = bench.run(&["launch", "--cpus", &world_size, "--", program, transport]).expect(0);
    let text = |line: &str| line.split_once("]: ").expect("a rank").1.to_owned();
    let mut lines: Vec<String> = ended.stdout.lines().map(text).collect();
    lines.sort_unstable();
    Some(lines)
}

/// The programs need no launcher of this project.
#[test]
fn the_collectives_example_runs_under_mpirun() {
    if let Err(error) = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        return skip_or_fail("mpirun", error);
    }
    for transport in TRANSPORTS {
        let Some(program) = example("collectives") else { return };
        let mut command = Command::new("mpirun");
        let bench = Bench::new("");
        bench.own_mpi_session(&mut command);
        command.args(["--allow-run-as-root", "--oversubscribe", "-np", "2"]).arg(program).arg(transport);
        let ended = Ended::from(command.output().expect("mpirun starts")).expect(0);
        assert!(ended.stdout.contains("Rank 1 all_gather [0.0, 1.0]\n"), "{transport}: {}", ended.stdout);
    }
}

/// Without a launcher the job has one rank.
#[test]
fn the_collectives_example_runs_without_a_launcher() {
    let Some(program) = example("collectives") else { return };
    let ended = Ended::from(Command::new(program).output().expect("the example starts")).expect(0);
    assert!(ended.stdout.contains("Rank 0 all_gather [0.0]\n"), "{}", ended.stdout);
}

const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

#[test]
fn the_blocking_send_example_has_pytorchs_output() {
    for transport in TRANSPORTS {
        let Some(lines) = lines("p2p_blocking", 2, transport) else { return };
        assert_eq!(lines, ["Rank 0 has data 1.0", "Rank 1 has data 1.0"], "{transport}");
    }
}

#[test]
fn the_nonblocking_send_example_has_pytorchs_output() {
    for transport in TRANSPORTS {
        let Some(lines) = lines("p2p_nonblocking", 2, transport) else { return };
        let want = ["Rank 0 has data 1.0", "Rank 0 started sending", "Rank 1 has data 1.0", "Rank 1 started receiving"];
        assert_eq!(lines, want, "{transport}");
    }
}

#[test]
fn the_collectives_example_has_the_expected_results() {
    for transport in TRANSPORTS {
        let Some(lines) = lines("collectives", 3, transport) else { return };
        let mut want = vec!["Rank 0 reduce [6.0]".to_owned(), "Rank 0 gather [0.0, 1.0, 2.0]".to_owned()];
        let from_all: [&[f32]; 3] =
            [&[1.0, 2.0, 2.0], &[0.0, 1.0, 1.0, 2.0, 2.0, 2.0], &[0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]];
        for (rank, from_all) in from_all.iter().enumerate() {
            want.push(format!("Rank {rank} has data 3.0"));
            want.push(format!("Rank {rank} broadcast [0.0]"));
            want.push(format!("Rank {rank} scatter [{}.0]", 10 * rank));
            want.push(format!("Rank {rank} all_gather [0.0, 1.0, 2.0]"));
            want.push(format!("Rank {rank} reduce_scatter [{}.0]", rank + 2));
            want.push(format!("Rank {rank} all_to_all {from_all:?}"));
        }
        want.sort_unstable();
        assert_eq!(lines, want, "{transport}");
    }
}

#[test]
fn the_ring_all_reduce_example_sums_over_all_ranks() {
    for transport in TRANSPORTS {
        let Some(lines) = lines("ring_all_reduce", 4, transport) else { return };
        assert_eq!(
            lines,
            [0, 1, 2, 3].map(|rank| format!("Rank {rank} has data [0.0, 10.0, 20.0, 30.0]")),
            "{transport}"
        );
    }
}

#[test]
fn the_sgd_example_has_the_loss_of_one_process() {
    let mut of_one = None;
    for (world_size, transport) in [(1, "shm"), (2, "shm"), (2, "tcp"), (4, "tcp")] {
        let Some(lines) = lines("distributed_sgd", world_size, transport) else { return };
        assert_eq!(lines.len(), 10 * world_size, "a line for each rank and epoch");
        let loss = |epoch: usize| {
            let ends = lines.iter().filter_map(|line| line.split_once(&format!("epoch {epoch}: ")));
            ends.map(|(_, loss)| loss.parse::<f64>().expect("a number")).sum::<f64>() / world_size as f64
        };
        assert!(loss(9) < 0.8 * loss(0) || loss(9) < 0.6, "{lines:?}");
        // The same samples in batches of the same size: the mean over the ranks is close to that of one process
        let alone = *of_one.get_or_insert(loss(9));
        assert!((loss(9) - alone).abs() < 0.01 * alone, "{world_size} over {transport}: {} against {alone}", loss(9));
    }
}
