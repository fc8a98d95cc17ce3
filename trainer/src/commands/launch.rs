//! `trainer launch`: starts any program as several processes, as torchrun does.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

use super::bench::temporary_folder;
use super::hosts;
use crate::cli::LaunchArgs;
use crate::failure::Failure;
use crate::run::job_flags::{LOOPBACK, NodeOfJob};
use launch::{AnyProgram, JobFolder, LaunchConfig, OnSignal, find_program, secret};

/// Time from SIGTERM to SIGKILL. torchrun has the same default.
const GRACE: Duration = Duration::from_secs(30);
/// Default of `--rdzv-id`, as in torchrun.
const NO_ID: &str = "none";

/// Runs the program and returns the exit code: 0, 3 if a process failed, 128 + n after signal n.
///
/// # Errors
/// A flag is wrong, the program does not exist, or a host does not answer.
pub(super) fn run(arguments: &LaunchArgs) -> Result<u8, Failure> {
    let (mut variables, plan) = hosts::plan_of_node()?;
    let (mut job, mut workers) = (arguments.job.clone(), arguments.cpus);
    if let Some(plan) = plan {
        workers = Some(plan.workers);
        hosts::apply_to_job(&mut job, plan);
    }
    if let Some(asked) = hosts::asked(&job)? {
        let count = workers.map(|count| ("--cpus", count));
        return Ok(hosts::ssh_launcher(&job, &asked, count, false, &variables)?.run()?);
    }
    let Some(workers) = workers else {
        return Err(Failure::usage(
            "nothing says how many processes to start",
            "say it: trainer launch --cpus 4 -- PROGRAM; or name hosts: -H host1:4,host2:4",
        ));
    };
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
    config.timeouts.grace = GRACE;
    let (nodes, node_rank) = (job.nnodes.unwrap_or(1), job.node_rank.unwrap_or(0));
    if let Some(node) = NodeOfJob::of(&job, None) {
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
    let mut made = None;
    let code = config.run(|_| {
        let logs = folder(arguments, id).map_err(Failure::into_launch_error)?;
        made = Some(logs.clone());
        Ok(JobFolder { logs, variables: Vec::new() })
    })?;
    if let (Some(logs), None, 0) = (&made, &arguments.log_dir, code)
        && let Some(folder) = logs.parent()
    {
        // The job succeeded and the user asked for no logs, so delete the temporary folder
        let _ = fs::remove_dir_all(folder);
    }
    Ok(code)
}

/// Returns the folder for the job's logs: below `--log-dir`, or below a new temporary folder.
fn folder(arguments: &LaunchArgs, id: &str) -> Result<PathBuf, Failure> {
    let Some(folder) = &arguments.log_dir else { return Ok(temporary_folder("launch")?.join(id)) };
    DirBuilder::new().recursive(true).mode(0o777).create(folder).map_err(|error| {
        Failure::usage(
            format!("{}: cannot make the folder of logs: {error}", folder.display()),
            "name another: --log-dir DIR",
        )
    })?;
    Ok(folder.join(id))
}
