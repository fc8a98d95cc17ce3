//! One rank of a job, from the plan to the exit code.

use std::path::Path;

use launch::{
    Role,
    environment::{Variables, WorkerRole},
};

use super::{
    mode::nothing_to_tune,
    plan::{PlanSource, PlannedRun, print_notes},
    ranks::{self, JoinedRank},
    run_data::{PixelAccess, read_data},
    saved_tuning,
    setup::{DeviceAssignment, note_missing_gpu},
    split_file,
    training::Training,
};
use crate::{
    cli::TrainArgs,
    config::{Devices, Mode, RunPlan},
    console,
    device::DeviceSet,
    diagnostics,
    failure::Failure,
    report::RunFolder,
};

/// What a process needs to train as a rank.
pub(super) struct WorkerRun<'a> {
    pub arguments: &'a TrainArgs,
    pub role: &'a Role,
    /// The rank in `role`.
    pub worker: &'a WorkerRole,
    pub variables: &'a Variables,
    /// The devices that flags and plan request.
    pub devices: &'a DeviceSet,
    /// The run folder that this program's launcher has made. `None`: another launcher has started the rank.
    pub folder: Option<&'a Path>,
}

impl WorkerRun<'_> {
    /// Joins the other ranks, trains, and returns the exit code.
    ///
    /// # Errors
    /// The plan is wrong, the ranks do not join, or the run failed. If this program's launcher has started the rank, the launcher
    /// shows the failure of a rank that has joined, and the result is the exit code.
    pub(super) fn run(&self, source: PlanSource) -> Result<u8, Failure> {
        let &Self { worker, folder, .. } = self;
        if folder.is_none() {
            if worker.rank == 0 {
                if !self.arguments.quiet {
                    console::eprint(self.role);
                }
                note_missing_gpu(self.devices);
            }
            diagnostics::write_to_stderr();
        }
        let PlannedRun { mut plan, resumed } = source.read(true)?;
        if folder.is_none() && worker.rank == 0 {
            // With this program's launcher, the launcher has printed the notes.
            print_notes(&plan);
        }
        if resumed.is_none() {
            self.warn_of_torchrun_restart();
        }
        self.check_plan(&mut plan)?;
        let rank = ranks::join(worker, self.variables, &plan)?;
        let result = self.train(plan, resumed, &rank);
        if let Err(failure) = &result {
            rank.record_failure(failure);
            if folder.is_some() {
                // The launcher shows the failure, the root cause first.
                return Ok(failure.code);
            }
        }
        rank.leave();
        result
    }

    /// Warns on rank 0 if torchrun has started the job again: the run starts from the beginning.
    fn warn_of_torchrun_restart(&self) {
        let restarts = self.variables.get("TORCHELASTIC_RESTART_COUNT").filter(|count| *count != "0");
        if let (Some(count), None, 0) = (restarts, self.folder, self.worker.rank) {
            console::eprint(format_args!(
                "warning: restart {count} begins with the first epoch, in a new run folder; --resume instead of --config continues \
                 the newest run"
            ));
        }
    }

    /// Checks that the plan trains in several processes. Records the number of workers, which the launcher has decided, in the
    /// plan, so that a resumed run has the same number.
    fn check_plan(&self, plan: &mut RunPlan) -> Result<(), Failure> {
        plan.parallel.devices = Some(match self.devices.is_gpu() {
            true => Devices::Gpus(self.worker.local_world_size),
            false => Devices::Cpus(self.worker.local_world_size),
        });
        if plan.parallel.mode == Mode::Dp {
            let hint = "start the trainer alone, with --cpus N; or train with --mode ddp";
            return Err(plan
                .error_at(&["parallel.mode"], format!("dp is one process, and {}", self.role), hint)
                .into());
        }
        if self.worker.world_size == 1 && !plan.parallel.autotune.is_empty() {
            return Err(nothing_to_tune(plan));
        }
        Ok(())
    }

    /// Selects the device, and returns it.
    fn select_device(&self, rank: &JoinedRank) -> Result<DeviceAssignment<'_>, Failure> {
        let oversubscribe = self.arguments.oversubscribe;
        let local_rank = ranks::local_rank(self.worker, oversubscribe);
        if local_rank.other_launcher {
            ranks::limit_threads(rank)?;
        }
        // Selecting the device starts the thread pool, so the number of threads must be set before.
        let selected = self.devices.select(&local_rank)?;
        ranks::check_gpus_unique(rank, selected.gpu.as_ref(), oversubscribe)?;
        Ok(DeviceAssignment { set: self.devices, local_rank, selected })
    }

    /// Selects the device, reads the data and trains. After a restart the run continues from its newest checkpoint.
    fn train(&self, mut plan: RunPlan, mut resumed: Option<RunFolder>, rank: &JoinedRank) -> Result<u8, Failure> {
        let assignment = self.select_device(rank)?;
        let (is_rank_0, launcher_folder) = (self.worker.rank == 0, self.folder);
        let restarted = self.variables.get(launch::worker::ATTEMPT).is_some_and(|attempt| attempt != "0");
        rank.status.set_status(format_args!("reading {}", plan.data.name));
        let splits = read_data(&mut plan, PixelAccess::Shared(&rank.comm))?;
        match (&mut resumed, launcher_folder) {
            (Some(folder), None) if is_rank_0 => folder.lock(None)?,
            (None, Some(path)) if is_rank_0 && restarted => resumed = Some(RunFolder::open(path)?),
            _ => {}
        }
        saved_tuning::apply(&mut plan, resumed.as_ref(), restarted, &rank.comm)?;
        if let (Some(folder), true) = (&resumed, is_rank_0) {
            split_file::check(folder, plan.train.seed, splits.record.as_ref())?;
        }
        let (arguments, resumed, rank) = (self.arguments, resumed.as_ref(), Some(rank));
        Training { arguments, plan: &plan, resumed, launcher_folder, assignment, rank, restarted }.run(splits)
    }
}
