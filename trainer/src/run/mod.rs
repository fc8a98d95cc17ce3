//! A training run: reads the plan, selects the devices, starts the ranks, reads the data and trains the network.
//!
//! [`run()`] decides whether this process is the launcher, a worker or a single process. `plan.rs` reads and checks the plan,
//! `mode.rs` checks its mode, `run_data.rs` reads the data set and configures its loaders, `job_flags.rs` checks the flags about
//! nodes. `ranks.rs` starts and joins processes, and `worker.rs` is one rank. `setup.rs` builds network and loaders.
//! `newest_checkpoint.rs` loads the checkpoint from which a run continues. `decode_policy.rs` decides when images are decoded, and
//! `shared_images.rs` decodes them once for all processes. `fine_tune.rs` loads initial weights and checks frozen layers.
//! `training.rs` trains, and `finish.rs` reports the result. Smaller parts: `class_weights.rs` (weights of the loss), `memory.rs`
//! (a lower bound of the memory, before it is used), `resume_command.rs` (the command that continues the run), `split_file.rs` (images
//! that were held out) and `saved_tuning.rs` (the autotuning result of an earlier start).

mod class_weights;
mod decode_policy;
mod fine_tune;
mod finish;
pub(crate) mod job_flags;
pub(crate) mod memory;
mod mode;
mod newest_checkpoint;
pub(crate) mod plan;
pub(crate) mod ranks;
mod resume_command;
pub(crate) mod run_data;
mod saved_tuning;
mod setup;
mod shared_images;
pub(crate) mod split_file;
mod training;
mod worker;

use std::path::Path;

pub(crate) use self::finish::by_class;
pub(crate) use self::mode::check_plan;
use self::mode::{check_batch_size, uses_ddp};
use self::resume_command::resume_command;
pub(crate) use self::resume_command::shell_command;
use data::Splits;

use self::plan::{FolderAccess, PlanSource, PlannedRun, note_unused_parallel_keys, print_notes};
use self::run_data::{PixelAccess, read_data};
use self::setup::{DeviceAssignment, device_request, dry_run, note_missing_gpu};
use self::training::Training;
use self::worker::WorkerRun;
use crate::cli::{TrainArgs, workers_flag};
use crate::config::{Backend, Devices, RunPlan};
use crate::console;
use crate::device::{DeviceSet, LocalRank};
use crate::diagnostics;
use crate::engine::checkpoint;
use crate::failure::Failure;
use crate::files::write_atomic;
use crate::report::RunFolder;
use launch::{
    self, Role,
    environment::{KubeflowNode, Variables},
    secret,
};

/// Trains in this process or in several processes, and returns the exit code. The launcher and its workers are the same program
/// with the same arguments. The environment, `variables`, determines the role of this process.
///
/// # Errors
/// Flags or the plan are wrong, the data cannot be read, or the run failed.
pub fn run(arguments: &TrainArgs, mut variables: Variables) -> Result<u8, Failure> {
    if let Some(path) = &arguments.job.secret_file {
        secret::read_file(path, &mut variables)?;
    }
    let workers = workers_flag(arguments.gpus, arguments.cpus);
    let role = launch::detect(&variables, arguments.job.launcher.parse()?, workers)?;
    job_flags::check(&arguments.job, &role)?;
    // A dry run starts no job and joins none. Rank 0 shows the plan, also to another launcher.
    let (role, has_launcher) = match role {
        Role::Worker(worker) if arguments.dry_run && worker.rank > 0 => return Ok(0),
        Role::Worker(_) if arguments.dry_run => (Role::Launcher, true),
        role => (role, false),
    };
    let (job, launcher_folder) = (ranks::job_of_nodes(&arguments.job, &role), ranks::folder_of_launcher(&role));
    let access = folder_access(arguments, &role, job.as_ref(), launcher_folder.as_deref());
    let source = PlanSource::find(arguments, access)?;
    let devices_of_plan = source.devices();
    let devices = DeviceSet::of(device_request(devices_of_plan))?;
    if let Role::Worker(worker) = &role {
        let folder = launcher_folder.as_deref();
        let run = WorkerRun { arguments, role: &role, worker, variables: &variables, devices: &devices, folder };
        return run.run(source);
    }
    let kubeflow = role.kubeflow_node();
    note_missing_gpu(&devices);
    let workers = devices_of_plan.map(Devices::count).or_else(|| kubeflow.and_then(|node| node.workers)).unwrap_or(1);
    let nodes = arguments.job.nnodes.unwrap_or(1);
    let several_workers = workers > 1 || nodes > 1 || kubeflow.is_some() || has_launcher;
    let PlannedRun { mut plan, resumed } = source.read(several_workers)?;
    print_notes(&plan);
    note_unused_parallel_keys(&plan);
    let local_rank =
        LocalRank { local_world_size: workers, oversubscribe: arguments.oversubscribe, ..LocalRank::ALONE };
    let selected = devices.select(&local_rank)?;
    if selected.gpu.is_some() && arguments.oversubscribe {
        console::eprint("note: --oversubscribe: processes may share a GPU; timings mean nothing");
    }
    let is_ddp = uses_ddp(&plan, several_workers, nodes)?;
    if is_ddp {
        // This checks this node's workers only. The check is repeated when the world size is known.
        check_batch_size(&plan, workers)?;
    } else {
        job_flags::check_one_process(&arguments.job)?;
    }
    if arguments.dry_run {
        return dry_run(&plan, &selected, resumed.as_ref());
    }
    let splits = read_data(&mut plan, if is_ddp { PixelAccess::None } else { PixelAccess::Own })?;
    if let Some(folder) = &resumed {
        split_file::check(folder, plan.train.seed, splits.record.as_ref())?;
    }
    if !is_ddp {
        let assignment = DeviceAssignment { set: &devices, local_rank, selected };
        let resumed = resumed.as_ref();
        let training = Training {
            arguments,
            plan: &plan,
            resumed,
            launcher_folder: None,
            assignment,
            rank: None,
            restarted: false,
        };
        return training.run(splits);
    }
    let launch = WorkerLaunch { arguments, plan: &plan, kubeflow, job, variables: &variables, workers };
    launch.run(splits, resumed)
}

/// Returns how this process may use the run folder. `job` is the address of a job on several nodes, and the index of this node.
/// `launcher_folder` is the folder that this program's launcher has locked.
fn folder_access<'a>(
    arguments: &TrainArgs,
    role: &Role,
    job: Option<&'a (String, usize)>,
    launcher_folder: Option<&'a Path>,
) -> FolderAccess<'a> {
    match (launcher_folder, role, job) {
        (Some(folder), ..) => FolderAccess::LockedByLauncher(folder),
        _ if arguments.dry_run => FolderAccess::Read,
        // Rank 0 locks the run later, once all ranks have opened it. Until then, only check that no other program writes the run.
        (_, Role::Worker(_), _) => FolderAccess::Check(None),
        // If the nodes share the folder, node 0 locks it. The other nodes lock their folders once node 0 has joined.
        (_, _, Some((job, 1..))) => FolderAccess::Check(Some(job)),
        (_, _, Some((job, 0))) => FolderAccess::Write(Some(job)),
        (_, _, None) => FolderAccess::Write(None),
    }
}

/// What is needed to start the worker processes of this machine.
struct WorkerLaunch<'a> {
    arguments: &'a TrainArgs,
    plan: &'a RunPlan,
    /// This machine's part of a Kubeflow job.
    kubeflow: Option<&'a KubeflowNode>,
    /// Address of a job on several machines, and the index of this machine.
    job: Option<(String, usize)>,
    variables: &'a Variables,
    /// Workers on this machine.
    workers: usize,
}

impl WorkerLaunch<'_> {
    /// Starts the workers, waits for them and returns the exit code. The launcher has read the labels to report mistakes in them
    /// once, and has decoded no image.
    fn run(self, splits: Splits, resumed: Option<RunFolder>) -> Result<u8, Failure> {
        let Self { arguments, plan, kubeflow, job, variables, workers } = self;
        if plan.parallel.backend == Backend::Mpi {
            return Err(ranks::needs_mpirun(workers));
        }
        // Rank 0 reads the weights, and rank 0 runs on node 0.
        if !matches!(job, Some((_, 1..))) {
            fine_tune::check(plan, &splits, resumed.as_ref())?;
        }
        // The workers read the data themselves.
        drop(splits);
        let mut folder = resumed;
        let code = ranks::launch(arguments, plan, kubeflow, variables, workers, |world_size| {
            check_batch_size(plan, world_size)?;
            let folder = match &mut folder {
                Some(resumed) => {
                    if let Some((job, 1..)) = &job {
                        resumed.lock(Some(job))?;
                    }
                    resumed
                }
                None => {
                    let node = job.as_ref().map_or(0, |(_, node)| *node);
                    let new = RunFolder::create_for_node(&arguments.run_dir, &plan.model.name, world_size, node)?;
                    write_atomic(&new.config(), plan.to_toml().as_bytes())?;
                    folder.insert(new)
                }
            };
            diagnostics::write_to(&folder.path().join("logs"))?;
            Ok(folder.path().to_owned())
        })?;
        if let (launch::WORKER_DIED, Some(folder), None | Some((_, 0))) = (code, &folder, &job)
            && checkpoint::exists(&folder.checkpoints()).unwrap_or(false)
        {
            let command = resume_command(arguments, folder.path(), false);
            console::eprint(format_args!("the run has a checkpoint; continue with: {command}"));
        }
        Ok(code)
    }
}

/// Returns whether flags or the plan ask for GPUs. A mistake in them is reported when the plan is read.
pub(crate) fn asks_for_gpus(arguments: &TrainArgs) -> bool {
    let devices = PlanSource::find(arguments, FolderAccess::Read).ok().and_then(|source| source.devices());
    matches!(devices, Some(Devices::Gpus(_)))
}
