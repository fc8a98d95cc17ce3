//! `trainer bench allreduce`: the launcher's processes, nothing but the collective.

use std::time::Duration;

use super::workers;
use crate::{
    cli::AllreduceArgs,
    comm::{TransportKind, bench},
    failure::Failure,
    launch::{
        self, Job, Request, Role,
        environment::{self, WorkerRole},
    },
};

/// Longest wait in one all-reduce.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Measures; gives the exit code.
///
/// # Errors
/// An unknown backend, or a job that cannot be put together.
pub(super) fn run(arguments: &AllreduceArgs) -> Result<u8, Failure> {
    let transport: TransportKind = arguments
        .backend
        .parse()
        .map_err(|error: String| Failure::usage(error, "use --backend shm or --backend tcp"))?;
    transport.built().map_err(|error| Failure::usage(&error.message, error.hint))?;
    let variables = environment::variables();
    match launch::detect(&variables, &Request::default())? {
        Role::Worker(role) => {
            let rank = workers::join_over(&role, &variables, transport, TIMEOUT)?;
            let result = measure(arguments, &role, &rank);
            if let Err(failure) = &result {
                rank.failed(failure);
            }
            rank.leave();
            result.map(|()| 0)
        }
        Role::Local(_) if transport == TransportKind::Mpi => Err(workers::needs_mpirun(arguments.cpus.into())),
        Role::Local(_) => {
            let logs = tempfile_folder()?;
            let result = Job::of_this_program(usize::from(arguments.cpus), logs.clone())?.run();
            // the logs of a bench that worked are of no use
            if result == Ok(0) {
                let _ = std::fs::remove_dir_all(&logs);
            }
            Ok(result?)
        }
    }
}

/// A folder of its own for the workers' logs.
fn tempfile_folder() -> Result<std::path::PathBuf, Failure> {
    let folder = std::env::temp_dir().join(format!("trainer-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| {
        Failure::run(format!("{}: {error}", folder.display()), "set TMPDIR to a folder you can write")
    })?;
    Ok(folder)
}

fn measure(arguments: &AllreduceArgs, role: &WorkerRole, rank: &workers::Rank) -> Result<(), Failure> {
    let (time, shared) = (Duration::from_millis(arguments.ms), arguments.memory == "shared");
    let mut config = bench::BenchConfig { time, shared, ..Default::default() };
    if !arguments.sizes.is_empty() {
        config.sizes = arguments.sizes.clone();
    }
    let shown = role.rank == 0 && !arguments.json;
    if shown {
        print!("{}", bench::header());
    }
    let rows = bench::all_reduce(&rank.comm, &config, |row| {
        if shown {
            println!("{}", row.line());
        }
    })?;
    if role.rank == 0 && arguments.json {
        let text = bench::json(&rows).map_err(|error| Failure::run(error, "please report this"))?;
        println!("{text}");
    }
    Ok(())
}
