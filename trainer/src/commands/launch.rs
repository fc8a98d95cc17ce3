//! `trainer launch`: starts any program as several processes, as torchrun does.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{hosts, temporary_logs};
use crate::cli::{LaunchArgs, ProcessCount};
use crate::device::{self, MissingCudaPart};
use crate::failure::Failure;
use crate::run::job_flags::{LOOPBACK, NodePlacement};
use launch::{AnyProgram, JobFolder, LaunchConfig, OnSignal, cores, find_program, secret};

/// Time from SIGTERM to SIGKILL. torchrun has the same default.
const GRACE_PERIOD: Duration = Duration::from_secs(30);
/// Default of `--rdzv-id`, as in torchrun.
const NO_ID: &str = "none";

/// Runs the program and returns the exit code: 0, 3 if a process failed, 128 + n after signal n.
///
/// # Errors
/// A flag is wrong, the program does not exist, or a host does not answer.
pub(super) fn run(arguments: &LaunchArgs) -> Result<u8, Failure> {
    let (mut variables, plan) = hosts::node_plan()?;
    let (mut job, mut workers) = (arguments.job.clone(), arguments.cpus);
    if let Some(plan) = plan {
        workers = Some(ProcessCount::Number(plan.workers));
        hosts::apply_to_job(&mut job, plan);
    }
    if let Some(requested) = hosts::requested_hosts(&job)? {
        let count = workers.map(total_process_count).transpose()?.map(|count| ("--cpus", count));
        return Ok(hosts::ssh_launcher(&job, &requested, count, false, &variables)?.run()?);
    }
    let Some(workers) = workers else {
        return Err(Failure::usage(
            "nothing says how many processes to start",
            "say it: trainer launch --cpus 4 -- PROGRAM; or name hosts: -H host1:4,host2:4",
        ));
    };
    let workers = local_process_count(workers, device::count_gpus)?;
    if let Some(path) = &job.secret_file {
        secret::read_file(path, &mut variables)?;
    }
    let id = arguments.rdzv_id.as_deref().unwrap_or(NO_ID);
    if id.is_empty() || id.starts_with('.') || id.contains('/') || id.chars().any(char::is_control) {
        return Err(Failure::usage(
            format!("--rdzv-id {id:?} cannot name a folder"),
            "choose a word, such as the job's number",
        ));
    }
    let mut config = LaunchConfig {
        program: find_program(&arguments.program[0])?,
        arguments: arguments.program[1..].to_vec(),
        any_program: Some(AnyProgram { run_id: id.to_owned() }),
        on_signal: OnSignal::Forward,
        max_restarts: job.max_restarts.unwrap_or(0),
        pin: !arguments.no_pin,
        ..LaunchConfig::of_this_program(workers)?
    };
    config.timeouts.grace = GRACE_PERIOD;
    let (nodes, node_rank) = (job.nnodes.unwrap_or(1), job.node_rank.unwrap_or(0));
    if arguments.standalone && nodes > 1 {
        return Err(Failure::usage(
            format!("--standalone (one machine) contradicts --nnodes {nodes}"),
            "leave one of them out",
        ));
    }
    if let Some(node) = NodePlacement::of(&job, None) {
        config.rendezvous = Some(node.rendezvous(secret::of_job(&variables)?)?);
    } else if nodes == 0 || node_rank > 0 {
        return Err(Failure::usage(
            format!("--nnodes {nodes} --node-rank {node_rank}: nodes count from 0 and are below their number"),
            "the first of two is --nnodes 2 --node-rank 0",
        ));
    } else {
        let address = job.master_addr.clone().unwrap_or_else(|| LOOPBACK.to_owned());
        config.address = (address, job.master_port.unwrap_or(0));
    }
    let mut temporary = None;
    let result = config.run(|_| {
        let parent = match &arguments.log_dir {
            Some(folder) => make_folder(folder),
            None => temporary_logs::create("launch").inspect(|folder| temporary = Some(folder.clone())),
        };
        Ok(JobFolder { logs: parent.map_err(Failure::into_launch_error)?.join(id), variables: Vec::new() })
    });
    if let Some(folder) = temporary {
        temporary_logs::remove_unless_failed(&folder, &result);
    }
    Ok(result?)
}

/// Returns the number of processes on this machine. `gpus` counts its GPUs.
///
/// # Errors
/// One process per GPU is requested, and there is no GPU.
fn local_process_count(
    count: ProcessCount,
    gpus: impl FnOnce() -> Result<usize, MissingCudaPart>,
) -> Result<usize, Failure> {
    match count {
        ProcessCount::Number(number) => Ok(number),
        ProcessCount::Cores => Ok(cores::quota()),
        ProcessCount::Auto => Ok(gpus().unwrap_or_else(|_| cores::quota())),
        ProcessCount::Gpus => {
            gpus().map_err(|missing| Failure::usage(format!("one process per GPU: {}", missing.cause), missing.hint))
        }
    }
}

/// Returns the number of ranks of a job on several hosts.
///
/// # Errors
/// The number depends on the hosts' GPUs or cores, which this machine does not know.
fn total_process_count(count: ProcessCount) -> Result<usize, Failure> {
    match count {
        ProcessCount::Number(number) => Ok(number),
        ProcessCount::Auto | ProcessCount::Gpus | ProcessCount::Cores => Err(Failure::usage(
            "--cpus auto, gpu and cpu count the GPUs or cores of one machine, and -H and --hostfile name hosts",
            "give each host its number of processes: -H host1:4,host2:4",
        )),
    }
}

/// Makes the folder of `--log-dir`.
fn make_folder(folder: &Path) -> Result<PathBuf, Failure> {
    DirBuilder::new().recursive(true).mode(0o777).create(folder).map_err(|error| {
        Failure::usage(
            format!("{}: cannot make the folder of logs: {error}", folder.display()),
            "name another: --log-dir DIR",
        )
    })?;
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_counted_by_gpus_or_cores() {
        let missing = || Err(MissingCudaPart { cause: "no NVIDIA driver".into(), hint: "--cpus N".into() });
        let count = |count, gpus: Option<usize>| local_process_count(count, || gpus.map_or_else(missing, Ok)).unwrap();
        let cores = cores::quota();
        assert_eq!(count(ProcessCount::Number(3), None), 3);
        assert_eq!((count(ProcessCount::Auto, Some(5)), count(ProcessCount::Auto, None)), (5, cores));
        assert_eq!((count(ProcessCount::Gpus, Some(5)), count(ProcessCount::Cores, Some(5))), (5, cores));
        let error = local_process_count(ProcessCount::Gpus, missing).unwrap_err();
        assert_eq!(error.to_string(), "one process per GPU: no NVIDIA driver\n  hint: --cpus N");
        assert_eq!(
            (
                total_process_count(ProcessCount::Number(3)).unwrap(),
                total_process_count(ProcessCount::Auto).unwrap_err().code
            ),
            (3, 2)
        );
    }
}
