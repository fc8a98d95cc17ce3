//! Ranks over an installed MPI library, in processes that mpirun starts: `cargo test --release -p comm --features mpi --test mpi`.
//! Each test starts this program once per rank. The program runs one of the ignored tests below.
#![cfg(feature = "mpi")]

mod support;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use comm::{CommConfig, CommError, Communicator, ErrorKind, ReduceOp, Secret, TransportKind, join};
use half::{bf16, f16};
use support::matrix::collectives;
use support::{Job, LIMIT, Number};

/// Variable with the address of the rendezvous.
const STORE: &str = "TEST_STORE";
const SECRET: &str = "TEST_SECRET";
/// Variable with a folder in which each rank creates a file after it has printed its message.
const SAID: &str = "TEST_SAID";

/// Returns Open MPI's launcher. Tests may run more ranks than cores, and as root.
fn mpirun(world_size: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-np", &world_size.to_string()]).env("NO_COLOR", "1");
    command
}

/// Runs the ignored test `body` as every rank of a job.
#[track_caller]
fn ranks(body: &str, world_size: usize) -> Output {
    let job = Job::new(world_size);
    let mut command = mpirun(world_size);
    command.arg(std::env::current_exe().expect("this program")).args(["--ignored", "--exact", body, "--nocapture"]);
    let [said, session] = [(), ()].map(|()| tempfile::tempdir().expect("a temporary folder"));
    command.env(STORE, job.server.local_addr().to_string()).env(SECRET, job.secret.to_hex()).env(SAID, said.path());
    // Two mpirun that start at the same time remove each other's session folders from a common one (open-mpi/ompi#8510).
    command.env("OMPI_MCA_orte_tmpdir_base", session.path());
    command.output().expect("mpirun starts")
}

/// Returns what the ranks printed on stdout, or the error of mpirun.
#[track_caller]
fn said(output: Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!said.is_empty(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    said
}

/// Returns this process's communicator, as a rank that mpirun has started.
fn rank() -> Communicator {
    joined(|_| {}).expect("this rank joins")
}

fn joined(change: impl Fn(&mut CommConfig)) -> Result<Communicator, CommError> {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name}: run this through its test"));
    let number = |name: &str| variable(name).parse().expect("a number");
    let secret = Secret::from_hex(&variable(SECRET)).expect("a secret");
    let (rank, world_size) = (number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE"));
    let mut config = CommConfig::new(rank, world_size, variable(STORE), secret, TransportKind::Mpi);
    change(&mut config);
    join(&config)
}

/// Prints `message`, and returns when all ranks have printed theirs. mpirun ends all ranks as soon as one has ended without
/// MPI_Finalize, as every rank does after an error.
fn say(comm: &Communicator, message: &str) {
    println!("rank {}: {message}", comm.rank());
    let said = PathBuf::from(std::env::var_os(SAID).expect("the folder of `ranks`"));
    std::fs::write(said.join(comm.rank().to_string()), "").expect("a file in the folder");
    wait_until(|| std::fs::read_dir(&said).expect("the folder").count() == comm.world_size());
}

/// Waits until another process has done something. Panics after [`LIMIT`].
#[track_caller]
fn wait_until(done: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < until, "nothing happened within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "a rank of `matrix`"]
fn matrix_rank() {
    fn sizes<T: Number>(comm: &Communicator) {
        // The other sizes of the tests of all transports are limits of shared memory.
        [0, 1, 7, 1000, 100_003].into_iter().for_each(|n| collectives::<T>(comm, n));
    }
    let comm = rank();
    sizes::<f32>(&comm);
    sizes::<bf16>(&comm);
    // How a type is sent does not depend on the number of ranks.
    if comm.world_size() == 3 {
        sizes::<f64>(&comm);
        sizes::<f16>(&comm);
        sizes::<i32>(&comm);
        sizes::<i64>(&comm);
        sizes::<u8>(&comm);
    }
    // A group of every second rank, a duplicate of the world, and both at once.
    let all: Vec<usize> = (0..comm.world_size()).collect();
    let group: Vec<usize> = all.iter().copied().filter(|rank| rank % 2 == 0).collect();
    let even = comm.group(&group).expect("a group");
    let copy = comm.duplicate().expect("a duplicate");
    let mut ours = vec![1.0f32; 5000];
    if let Some(even) = &even {
        even.all_reduce(&mut ours, ReduceOp::Sum).expect("the group's sum");
        assert!(ours.iter().all(|v| *v == group.len() as f32));
    }
    let pending = copy.all_reduce_async(vec![2.0f32; 5000], ReduceOp::Sum);
    collectives::<f32>(&comm, 64);
    let theirs = pending.wait().expect("the duplicate's sum");
    assert!(theirs.iter().all(|v| *v == 2.0 * all.len() as f32));
}

#[test]
fn matrix() {
    for world_size in [2, 3, 4] {
        let output = ranks("matrix_rank", world_size);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Without a test of this name, the ranks would end with 0 too.
        let passed = String::from_utf8_lossy(&output.stdout).matches("1 passed").count();
        assert_eq!(passed, world_size);
    }
}

#[test]
#[ignore = "a rank of `a_mismatch_is_the_same_error_on_every_rank`"]
fn mismatch_rank() {
    let comm = rank();
    comm.barrier().expect("all are here");
    let mut data = vec![0f32; if comm.rank() == 1 { 13 } else { 12 }];
    let error = comm.all_reduce(&mut data, ReduceOp::Sum).expect_err("the lengths differ");
    assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
    say(&comm, &error.message);
}

#[test]
fn a_mismatch_is_the_same_error_on_every_rank() {
    let said = said(ranks("mismatch_rank", 3));
    for rank in 0..3 {
        let want = format!(
            "rank {rank}: rank 1 calls all_reduce of 13 f32 (sum) where rank 0 calls all_reduce of 12 f32 (sum)"
        );
        assert!(said.contains(&want), "{said}");
    }
}

#[test]
#[ignore = "a rank of `a_rank_that_does_not_come_is_waited_for_until_the_timeout`"]
fn absent_rank() {
    // Long enough for the store to answer on a busy machine.
    let comm = joined(|config| config.timeout = Duration::from_secs(20)).expect("this rank joins");
    let error = if comm.rank() == 0 {
        comm.barrier().expect_err("rank 1 does not arrive")
    } else {
        wait_until(|| comm.error().is_some());
        comm.error().expect("rank 0 has given up")
    };
    say(&comm, &error.message);
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_until_the_timeout() {
    let said = said(ranks("absent_rank", 2));
    for rank in 0..2 {
        let want = format!("rank {rank}: barrier, collective #1 of the world: MPI did not return within 20");
        assert!(said.contains(&want), "{said}");
    }
}
