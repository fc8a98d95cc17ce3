//! Trains as one rank, or as the only process: creates strategy, loaders and engine, and on rank 0 also the run folder and the
//! screen output.

use std::path::Path;

use data::{SplitRecord, Splits};

use super::fine_tune;
use super::finish::{Continuation, RankStats, by_class, finish, gather_rank_stats};
use super::memory;
use super::newest_checkpoint::load_newest_checkpoint;
use super::ranks::JoinedRank;
use super::resume_command::resume_command;
use super::setup::{
    self, DeviceAssignment, build_network, count_parameters, job_facts, network_spec, why_augment_on_cpu,
};
use super::{class_weights, split_file};
use crate::cli::TrainArgs;
use crate::config::{Devices, Mode, OnError, RunPlan};
use crate::console;
use crate::device;
use crate::diagnostics;
use crate::engine::checkpoint::{BestPolicy, CheckpointFolder, LoadedCheckpoint};
use crate::engine::{Engine, Loaders, RunLength, RunOutcome, RunOutput, RunResult};
use crate::failure::{Failure, exit_code_of_signal};
use crate::files::write_atomic;
use crate::report::{Reporter, ReporterOptions, RunFolder, RunSummary, Section, VALIDATION};
use crate::signals::StopFlag;
use crate::snapshot::{DatasetRecord, RunProgress};
use crate::strategy::Strategy;
use crate::strategy::ddp::{self, Ddp};
use crate::strategy::dp::Dp;
use crate::strategy::single::Single;
use crate::text::{counted, thousands};
use crate::timeline::{self, Timeline};

/// Everything that a process needs to train.
pub(super) struct Training<'a> {
    /// The command line.
    pub arguments: &'a TrainArgs,
    /// The plan, checked against the data.
    pub plan: &'a RunPlan,
    /// The run to continue.
    pub resumed: Option<&'a RunFolder>,
    /// The run folder that this program's launcher has made.
    pub launcher_folder: Option<&'a Path>,
    /// The device of this process.
    pub assignment: DeviceAssignment<'a>,
    /// This process's rank; `None` if it trains without other processes.
    pub rank: Option<&'a JoinedRank>,
    /// Whether the launcher has started this process again after a failure.
    pub restarted: bool,
}

/// Facts about a run for the start-up table and the summary.
struct RunFacts {
    parameters: usize,
    /// Rows about weights from a file and frozen layers.
    fine_tuning: fine_tune::Rows,
    data: String,
    source: String,
    device: String,
    dataset: DatasetRecord,
    record: Option<SplitRecord>,
    /// See [`RunSummary::evaluated`].
    evaluated: Option<&'static str>,
}

impl Training<'_> {
    /// Trains to the end of the plan or to a signal, and returns the exit code.
    ///
    /// # Errors
    /// A loss is not finite, a file cannot be written, or a rank has left the job.
    pub(super) fn run(&self, splits: Splits) -> Result<u8, Failure> {
        let (plan, selected) = (self.plan, &self.assignment.selected);
        let (source, record) = (splits.source.clone(), splits.record.clone());
        let dataset = DatasetRecord::of(&splits.train);
        let (mut strategy, parameters, fine_tuning) = self.build_strategy(&splits)?;
        let cpu_augment_reason = why_augment_on_cpu(plan, selected, &splits);
        if let (Some(why), true, 0) = (&cpu_augment_reason, self.assignment.set.is_gpu(), strategy.rank()) {
            console::eprint(format_args!("note: images are augmented on the host: {why}"));
        }
        let data = describe_data(plan, &splits, cpu_augment_reason.is_none());
        let loaders =
            setup::build_loaders(plan, &mut *strategy, splits, cpu_augment_reason.is_some(), &selected.device())?;
        let stop = match self.rank {
            Some(rank) => rank.stop.clone(),
            None => StopFlag::on_signals()?,
        };
        stop.enter_training();
        if let Some(rank) = self.rank {
            rank.status.set_training();
        }
        let checkpoint = match self.resumed {
            Some(folder) if strategy.rank() == 0 => self.load_checkpoint(folder, &dataset, &loaders)?,
            _ => None,
        };
        let progress = strategy.load_checkpoint(checkpoint.map(|loaded| (loaded.snapshot, loaded.progress)))?;
        let lengths = RunLength::new(plan, &loaders.train);
        lengths.check(&progress)?;
        if let (Some(note), 0) = (lengths.long_warmup_note(plan), strategy.rank()) {
            console::eprint(format_args!("note: {note}"));
        }
        let timeline = self.start_timeline(&mut *strategy)?;
        if strategy.rank() > 0 {
            return run_other_rank(plan, &mut *strategy, loaders, stop, progress, &timeline);
        }
        // With `parallel.threads` a worker computes with a thread pool of its own.
        let own_threads = plan.parallel.threads.filter(|_| self.rank.is_some() && selected.gpu.is_none());
        let described = own_threads.map_or_else(|| selected.description.clone(), device::describe_cpu);
        let device = format!("{described}, {} x{}", plan.parallel.mode, strategy.device_count());
        let evaluated = loaders.test.is_some().then_some(VALIDATION);
        let facts = RunFacts { parameters, fine_tuning, data, source, device, dataset, record, evaluated };
        self.run_rank_0(&mut *strategy, loaders, stop, progress, &timeline, facts)
    }

    /// Loads the newest checkpoint of the run in `folder`, and restores the run's links for `loaders`. Returns `None` for a run that
    /// has no checkpoint yet.
    fn load_checkpoint(
        &self,
        folder: &RunFolder,
        dataset: &DatasetRecord,
        loaders: &Loaders,
    ) -> Result<Option<LoadedCheckpoint>, Failure> {
        let plan = self.plan;
        let checkpoints = self.checkpoint_folder(folder)?;
        let Some(mut loaded) = load_newest_checkpoint(plan, folder, Some(dataset))? else { return Ok(None) };
        let policy = BestPolicy {
            keep: plan.checkpoint.keep_best,
            by: plan.best_by(),
            eval_images: loaders.eval.dataset_len() as u64,
            eval_crc: loaders.eval.eval_checksum(),
            old_eval_crc: loaders.eval.eval_checksum_without_label_sets(),
        };
        if let Some(warning) = checkpoints.restore_links(&loaded.path, &mut loaded.progress, policy)? {
            console::eprint(format_args!("warning: {warning}"));
        }
        loaded.progress.eval_crc = Some(policy.eval_crc);
        Ok(Some(loaded))
    }

    /// Starts the timeline of this rank, if the plan asks for one. All ranks call this function.
    fn start_timeline(&self, strategy: &mut dyn Strategy) -> Result<Timeline, Failure> {
        let timeline = Timeline::new(self.plan.log.timeline);
        #[cfg(feature = "cuda")]
        if self.assignment.selected.gpu.is_some()
            && let Some(note) = timeline.profile_kernels()
            && strategy.rank() == 0
        {
            console::eprint(note);
        }
        timeline.estimate_clock_offset(strategy.rank(), |bytes| strategy.all_gather(bytes))?;
        strategy.set_timeline(&timeline);
        Ok(timeline)
    }

    /// Builds network and strategy, and returns the network's number of parameters and the rows about fine-tuning.
    fn build_strategy(&self, splits: &Splits) -> Result<(Box<dyn Strategy>, usize, fine_tune::Rows), Failure> {
        let (plan, selected) = (self.plan, &self.assignment.selected);
        let spec = network_spec(plan, splits);
        let classes = spec.num_classes;
        let processes = self.rank.map_or(1, |rank| rank.comm.world_size());
        let devices =
            if plan.parallel.mode == Mode::Dp { plan.parallel.devices.map_or(1, Devices::count) } else { processes };
        let share = memory::images_of_process(&plan.train, devices, processes);
        let batch = share.min(splits.train.len()).max(1);
        let batches = splits.train.len().div_ceil(processes).div_ceil(batch);
        let network = build_network(plan, &spec, selected, batch, batches)?;
        let counts = [splits.train.len(), devices];
        let hint = "use larger images, such as data.image_size = 64, another batch_size, or drop_last = true";
        fine_tune::check_batches(plan, &network, &spec, counts, ("train.batch_size", hint))?;
        setup::check_resize_stages(plan, &network, &spec, Some(counts))?;
        let network = setup::init_from_images(network, plan, &splits.train)?;
        let reads = self.rank.is_none_or(|rank| rank.comm.rank() == 0);
        let (network, mut fine_tuning) =
            fine_tune::initial_weights(network, plan, spec, self.resumed, self.restarted, reads)?;
        fine_tuning.extend(fine_tune::frozen_rows(plan, &network));
        let parameters = count_parameters(&network);
        let device = selected.device();
        let mut strategy: Box<dyn Strategy> = match self.rank {
            None if plan.parallel.mode == Mode::Dp => {
                let devices = self.assignment.set.all(&self.assignment.local_rank)?;
                let devices = devices.into_iter().map(|one| one.device()).collect();
                Box::new(Dp::new(network, devices, classes, plan)?)
            }
            None => Box::new(Single::new(network, device, classes, plan)),
            Some(rank) => {
                rank.status.set_status(format_args!("comparing the job with the other ranks'"));
                ddp::check_same_job(&job_facts(plan, splits, &self.assignment), &rank.comm)?;
                Box::new(Ddp::new(network, device, classes, plan, rank.comm.clone(), rank.status.clone())?)
            }
        };
        let replica = &mut strategy.learner_mut().replica;
        replica.class_weights = class_weights::of_loss(plan, &splits.train)?;
        replica.pos_weights = class_weights::of_positives(plan, &splits.train)?;
        Ok((strategy, parameters, fine_tuning))
    }

    /// Trains as rank 0, which also writes the run folder and the screen.
    fn run_rank_0(
        &self,
        strategy: &mut dyn Strategy,
        loaders: Loaders,
        stop: StopFlag,
        progress: RunProgress,
        timeline: &Timeline,
        facts: RunFacts,
    ) -> Result<u8, Failure> {
        let plan = self.plan;
        let folder = self.run_folder(strategy.device_count())?;
        if self.rank.is_none() {
            diagnostics::write_to(&folder.path().join("logs"))?;
        }
        write_atomic(&folder.config(), plan.to_toml().as_bytes())?;
        split_file::write(&folder, plan.train.seed, facts.record.as_ref())?;
        let checkpoints = self.checkpoint_folder(&folder)?.with_dataset(facts.dataset.clone());
        let lengths = RunLength::new(plan, &loaders.train);
        let mut reporter = self.reporter(&folder, &lengths, &progress, &facts)?;
        let output = Some(RunOutput { reporter: &mut reporter, checkpoints });
        // A launcher answers signals itself.
        let announcement = if self.rank.is_none() { Some(stop.announce()?) } else { None };
        let engine = Engine::new(plan, strategy, loaders, output, stop, progress);
        let result = engine.with_timeline(timeline).run()?;
        if let (Some(announcement), RunOutcome::Interrupted { .. }) = (announcement, &result.outcome) {
            announcement.wait();
        }
        let stats = gather_rank_stats(strategy, timeline, result.replaced)?;
        if timeline.is_on() {
            let left_out = timeline::write(&folder.timeline(), &stats.timelines)?;
            if left_out > 0 {
                reporter.say(&format!("timeline.json: {} later spans were left out", thousands(left_out)))?;
            }
        }
        let other_launcher = self.rank.is_some() && self.launcher_folder.is_none();
        let continuation = Continuation {
            command: resume_command(self.arguments, folder.path(), other_launcher),
            // Allow the same time again, in addition to the time of all sessions so far.
            max_time_s: result.progress.elapsed_s.ceil() as usize + plan.train.max_time_s,
        };
        let classes = facts.dataset.classes.clone();
        let (summary, outcome) = summarize(plan, facts, &lengths, result, stats);
        finish(&mut reporter, summary, outcome, classes, plan.best_by(), &continuation)
    }

    /// Opens the folder of the run's checkpoints.
    fn checkpoint_folder(&self, folder: &RunFolder) -> Result<CheckpointFolder, Failure> {
        let plan = self.plan;
        Ok(CheckpointFolder::open(&folder.checkpoints(), plan.checkpoint.keep_last, plan.train.seed)?)
    }

    /// Opens the run folder of the resumed run or of this program's launcher, or creates one.
    fn run_folder(&self, devices: usize) -> Result<RunFolder, Failure> {
        Ok(match (self.resumed, self.launcher_folder) {
            (Some(folder), _) => folder.clone(),
            (None, Some(path)) => RunFolder::open(path)?,
            (None, None) => {
                let mode = self.plan.parallel.mode.to_string();
                RunFolder::create(&self.arguments.run_dir, &self.plan.model.name, &mode, devices)?
            }
        })
    }

    /// Prints the start-up table and opens the run's files.
    fn reporter(
        &self,
        folder: &RunFolder,
        lengths: &RunLength,
        progress: &RunProgress,
        facts: &RunFacts,
    ) -> Result<Reporter, Failure> {
        let plan = self.plan;
        let overview = Section::new("run")
            .row("model", format!("{}, {} parameters", plan.model.name, thousands(facts.parameters as u64)));
        let overview = facts.fine_tuning.iter().fold(overview, |section, (name, value)| section.row(*name, value));
        let overview = overview
            .row("data", format!("{} ({})", facts.data, facts.source))
            .row("device", &facts.device)
            .row(
                "length",
                format!("{} of {}", counted(lengths.epochs as u64, "epoch"), counted(lengths.steps_per_epoch, "step")),
            )
            .row("folder", folder.path().display());
        let mut sections = vec![overview];
        sections.extend(super::plan::sections(plan));
        let options = ReporterOptions {
            epochs: lengths.epochs,
            steps_per_epoch: lengths.steps_per_epoch as usize,
            pixel_shares: setup::pixel_shares(plan, lengths.epochs, facts.dataset.shape),
            every: plan.log.every,
            tensorboard: plan.log.tensorboard,
            quiet: self.arguments.quiet,
            multi_label: facts.dataset.multi_label,
            device: facts.device.clone(),
        };
        let mut reporter = match self.resumed {
            None => Reporter::new(folder.clone(), options, &sections)?,
            Some(_) => Reporter::resume(folder.clone(), options, &sections, progress.step, progress.epoch)?,
        };
        reporter.show_top5(
            !facts.dataset.multi_label && plan.model.num_classes.unwrap_or(facts.dataset.classes.len()) > 10,
        );
        Ok(reporter)
    }
}

/// Trains as a rank other than 0, which writes no file of the run.
fn run_other_rank(
    plan: &RunPlan,
    strategy: &mut dyn Strategy,
    loaders: Loaders,
    stop: StopFlag,
    progress: RunProgress,
    timeline: &Timeline,
) -> Result<u8, Failure> {
    let engine = Engine::new(plan, strategy, loaders, None, stop, progress);
    let end = engine.with_timeline(timeline).run()?;
    gather_rank_stats(strategy, timeline, end.replaced)?;
    Ok(match end.outcome {
        RunOutcome::Interrupted { signal, .. } => exit_code_of_signal(signal),
        _ => 0,
    })
}

/// Returns the summary of a run, and how the run ended.
fn summarize(
    plan: &RunPlan,
    facts: RunFacts,
    lengths: &RunLength,
    result: RunResult,
    stats: RankStats,
) -> (RunSummary, RunOutcome) {
    let RunResult { outcome, test, test_counts, progress, .. } = result;
    let (test_confusion, test_average_precision) = match test_counts {
        Some(counts) => by_class(facts.dataset.classes, counts),
        None => (None, None),
    };
    let summary = RunSummary {
        model: plan.model.name.clone(),
        parameters: facts.parameters as u64,
        dataset: plan.data.name.clone(),
        data: facts.data,
        device: facts.device,
        epochs: complete_epochs(&outcome, &progress, lengths, plan.train.epochs),
        planned_epochs: lengths.epochs,
        steps: progress.step,
        evaluated: facts.evaluated,
        best: progress.best,
        last: progress.last,
        test,
        test_confusion,
        test_average_precision,
        seconds: progress.elapsed_s,
        replaced_images: (plan.data.on_error == Some(OnError::Skip)).then_some(stats.replaced),
        peak_bytes: stats.peak_bytes,
        device_bytes: stats.device_bytes,
        ..RunSummary::default()
    };
    (summary, outcome)
}

/// Returns the number of complete epochs. `planned` is `train.epochs`; 0: the run's length is given in steps.
fn complete_epochs(outcome: &RunOutcome, progress: &RunProgress, lengths: &RunLength, planned: usize) -> usize {
    match outcome {
        RunOutcome::StoppedEarly { epoch, .. } => *epoch,
        RunOutcome::Finished(_) if planned == 0 => lengths.epochs,
        // After early stopping, older versions set the epoch past the last one.
        _ => (progress.epoch - 1).min((progress.step / lengths.steps_per_epoch) as usize),
    }
}

/// Describes the data set for the start-up table: name, images of each split, shape.
fn describe_data(plan: &RunPlan, splits: &Splits, on_gpu: bool) -> String {
    let place = match (on_gpu, &splits.train.encoded) {
        (true, _) => ", on the GPU as uint8".to_owned(),
        (false, None) => String::new(),
        (false, Some(_)) => {
            let bytes: u64 = splits.iter().map(|(_, split)| split.decoded_bytes()).sum();
            let gib = bytes as f64 / (1u64 << 30) as f64;
            let size = if gib < 1.0 { String::new() } else { format!(" ({gib:.1} GiB of pixels)") };
            format!(", decoded in each epoch{size}")
        }
    };
    format!(
        "{}, {} images {}{place}",
        plan.data.name,
        splits.iter().map(|(_, split)| thousands(split.len() as u64)).collect::<Vec<_>>().join(" + "),
        splits.train.shape,
    )
}
