//! `-H` and `--hostfile`: starts the same command on several hosts and passes each host its node rank and number of workers.

use crate::cli::{JobArgs, TrainArgs, workers_flag};
use crate::failure::Failure;
use crate::run;
use launch::{
    Role, SshLauncher,
    environment::{self, Variables},
    hosts::{self, Host, SshNodePlan},
    secret,
};

/// Returns the hosts of `-H` or `--hostfile`. Returns `None` without these flags. [`apply_to_job`] removes the flags in a
/// launcher that `-H` has started, so this launcher does not start the job again.
///
/// # Errors
/// The list, the file or LSF's variable is malformed.
pub(super) fn requested_hosts(job: &JobArgs) -> Result<Option<Vec<Host>>, Failure> {
    Ok(match (&job.hosts, &job.hostfile) {
        (Some(text), _) if text == "lsf" => Some(hosts::of_lsf(&environment::variables())?),
        (Some(text), _) => Some(hosts::parse_list(text)?),
        (None, Some(path)) => Some(hosts::read_file(path)?),
        (None, None) => None,
    })
}

/// Replaces the flags about hosts and workers by the flags of this node. Does this only in a launcher that `-H` has started,
/// and in the workers of this launcher.
///
/// # Errors
/// The environment variable that describes the node is malformed.
pub(super) fn apply_node_plan(arguments: &mut TrainArgs, variables: &Variables) -> Result<(), Failure> {
    let Some(plan) = SshNodePlan::of(variables)? else { return Ok(()) };
    set_workers(arguments, plan.workers);
    apply_to_job(&mut arguments.job, plan);
    Ok(())
}

/// Sets the number of workers of a node. The workers use GPUs if the flags or the run's configuration ask for GPUs.
fn set_workers(arguments: &mut TrainArgs, workers: usize) {
    let on_gpus = arguments.gpus.is_some() || (arguments.cpus.is_none() && run::asks_for_gpus(arguments));
    match on_gpus {
        true => arguments.gpus = Some(workers),
        false => arguments.cpus = Some(workers),
    }
}

/// Replaces the flags about hosts by the flags of one node.
pub(super) fn apply_to_job(job: &mut JobArgs, plan: SshNodePlan) {
    (job.hosts, job.hostfile, job.secret_file) = (None, None, None);
    job.host_flags = plan.flags;
    // A job on one host needs no rendezvous between nodes
    if plan.nodes > 1 {
        (job.nnodes, job.node_rank) = (Some(plan.nodes), Some(plan.node_rank));
        (job.master_addr, job.master_port) = (Some(plan.master_addr), Some(plan.master_port));
    }
}

/// Trains on several hosts.
///
/// # Errors
/// The flags or the plan are wrong, another launcher has started this process, or a host does not answer.
pub(super) fn train(arguments: &TrainArgs, asked: &[Host], variables: Variables) -> Result<u8, Failure> {
    let count = workers_flag(arguments.gpus, arguments.cpus);
    let launcher = ssh_launcher(&arguments.job, asked, count, true, &variables)?;
    // Check the plan of the first node here, so that a mistake is reported once and not by every node
    let mut first = arguments.clone();
    let workers = launcher.hosts.first().map_or(1, |host| host.slots);
    set_workers(&mut first, workers);
    (first.job.hosts, first.job.hostfile) = (None, None);
    if launcher.hosts.len() > 1 {
        first.job.nnodes = Some(launcher.hosts.len());
    }
    if arguments.dry_run {
        return run::run(&first, variables);
    }
    run::check_plan(&first, None, workers > 1 || launcher.hosts.len() > 1)?;
    Ok(launcher.run()?)
}

/// Builds the launcher for the hosts that get at least one rank. `count` is the flag that sets the number of ranks, and its
/// value.
///
/// # Errors
/// Another launcher has started this process, there are more ranks than slots, or the secret cannot be read.
pub(super) fn ssh_launcher(
    job: &JobArgs,
    asked: &[Host],
    count: Option<(&str, usize)>,
    name_lines: bool,
    variables: &Variables,
) -> Result<SshLauncher, Failure> {
    let flag = if job.hosts.is_some() { "-H" } else { "--hostfile" };
    let role = launch::detect(variables, job.launcher.parse()?, None)?;
    if role != Role::Launcher {
        return Err(Failure::usage(
            format!("{flag} starts the job on its hosts itself, but this process was {role}"),
            format!("leave {flag} out to be a part of that job; or say --launcher local to start another from here"),
        ));
    }
    let hosts = hosts::fill(asked, count.map(|(_, count)| count), count.map_or("--cpus", |(flag, _)| flag))?;
    let mut variables: Variables = variables.clone();
    if let Some(path) = &job.secret_file {
        secret::read_file(path, &mut variables)?;
    }
    let mut flags = vec!["-H".to_owned(), hosts::list(&hosts)];
    for (flag, value) in [
        ("--master-addr", job.master_addr.clone()),
        ("--master-port", job.master_port.map(|port| port.to_string())),
        ("--secret-file", job.secret_file.as_ref().map(|path| path.display().to_string())),
    ] {
        flags.extend(value.into_iter().flat_map(|value| [flag.to_owned(), value]));
    }
    Ok(SshLauncher {
        hosts,
        master_addr: job.master_addr.clone(),
        master_port: job.master_port,
        secret: secret::of_job(&variables)?,
        flags,
        name_lines,
    })
}

/// Returns the environment variables of this process, and this node's plan if `-H` has started this process.
///
/// # Errors
/// The environment variable that describes the node is malformed.
pub(super) fn node_plan() -> Result<(Variables, Option<SshNodePlan>), Failure> {
    let variables = environment::variables();
    let plan = SshNodePlan::of(&variables)?;
    Ok((variables, plan))
}
