//! `trainer [train]`: resolve → read the data → build → run → summary.

use std::{path::Path, time::Instant};

use data::{
    Splits,
    formats::{self, LoadRequest},
};
use models::Spec;

use super::{
    compare,
    ending::{finish, gather_ends},
    place::{DeviceAssignment, loaders, pixels_on_the_host, say_why_not, wish},
    resolve::{self, dataset_facts},
    start::{build, count_parameters, dry_run, facts, overview, restore},
    workers::{self, Rank},
};
use crate::cli::TrainArgs;
use crate::config::{Backend, BatchScope, Mode, RunPlan};
use crate::device::{DeviceSet, LocalRank};
use crate::diagnostics;
use crate::engine::checkpoint::Store;
use crate::engine::{Ending, Engine, Files, Lengths, RunEnd};
use crate::failure::Failure;
use crate::files::write_atomic;
use crate::report::{Reporter, ReporterOptions, RunFolder, RunSummary};
use crate::signals::Stop;
use crate::strategy::ddp::Ddp;
use crate::strategy::dp::Dp;
use crate::strategy::single::Single;
use crate::strategy::{Strategy, ddp};
use crate::text::thousands;
use crate::timeline::{self, Timeline};
use launch::{
    self, Role,
    environment::{self, Launcher, Variables, WorkerRole},
    secret,
};

/// A run to start or to continue.
struct Job {
    plan: RunPlan,
    /// The folder of the run to continue.
    resumed: Option<RunFolder>,
}

pub(super) fn run(arguments: TrainArgs) -> Result<u8, Failure> {
    if arguments.cpus == Some(0) {
        return Err(Failure::usage("--cpus 0: nobody would train", "ask for at least one: --cpus 1"));
    }
    let mut variables = environment::variables();
    if let Some(path) = &arguments.job.secret_file {
        secret::read_file(path, &mut variables)?;
    }
    compare::follow(&variables);
    let asked = arguments.gpus.map(|count| ("--gpus", count)).or(arguments.cpus.map(|count| ("--cpus", count)));
    let target = DeviceSet::of(wish(&arguments))?;
    let role = launch::detect(&variables, arguments.job.launcher.parse()?, asked)?;
    let node = match &role {
        Role::Worker(worker) => return work(&arguments, &role, worker, &variables, &target),
        Role::Local(node) => node.as_ref(),
    };
    say_why_not(&target);
    let workers = asked.map_or(1, |(_, count)| count);
    let several = workers > 1 || arguments.job.nnodes > 1 || node.is_some();
    let Job { mut plan, resumed } = job(&arguments, several, target.is_gpu())?;
    let seat = LocalRank { local_world: workers, oversubscribe: arguments.oversubscribe, ..LocalRank::ALONE };
    let selected = target.select(&seat)?;
    if selected.gpu.is_some() && arguments.oversubscribe {
        eprintln!("note: --oversubscribe: processes may share a GPU; timings mean nothing");
    }
    if arguments.dry_run {
        return dry_run(&plan, &selected);
    }
    let several = processes(&plan, &arguments, several)?;
    let splits = read_data(&mut plan)?;
    if !several {
        return train(&arguments, plan, resumed, &DeviceAssignment { target: &target, seat, selected }, splits, None);
    }
    if plan.parallel.backend == Backend::Mpi {
        return Err(workers::needs_mpirun(workers));
    }
    let share = plan.train.batch_size / (workers * arguments.job.nnodes).max(1);
    if share == 0 && plan.train.batch_scope == BatchScope::Global {
        let cause = format!("a batch of {} cannot be shared by {workers} workers", plan.train.batch_size);
        return Err(plan.mistake(&["train.batch_size"], cause, "use a larger batch, or fewer workers").into());
    }
    // the workers read the data themselves: here they were only checked, while a mistake is still one process's
    drop(splits);
    let folder = match resumed {
        Some(folder) => folder,
        None => {
            let world = workers * arguments.job.nnodes;
            let folder = RunFolder::create(&arguments.run_dir, &plan.model.name, "ddp", world)?;
            write_atomic(&folder.config(), plan.to_toml().as_bytes())?;
            folder
        }
    };
    diagnostics::write_to(&folder.path().join("logs"))?;
    workers::launch(&arguments, &plan, node, &variables, workers, folder.path())
}

/// Whether the plan trains in several processes; `several` are asked for.
fn processes(plan: &RunPlan, arguments: &TrainArgs, several: bool) -> Result<bool, Failure> {
    let mistake = |cause: &str, hint: &str| Err(plan.mistake(&["parallel.mode"], cause, hint).into());
    match plan.parallel.mode {
        Mode::Ddp if !several => mistake(
            "ddp needs several processes",
            "say how many: --cpus N or --gpus N; or train in one process with --mode single",
        ),
        Mode::Single if several => {
            mistake("single is one process on one device", "leave --cpus and --gpus out, or use --mode ddp or dp")
        }
        Mode::Dp if arguments.job.nnodes > 1 => mistake("dp is one process", "use --mode ddp for several machines"),
        Mode::Dp if arguments.cpus.or(arguments.gpus).is_none() => {
            mistake("dp needs to know its devices", "say how many: --cpus N or --gpus N")
        }
        mode => Ok(mode == Mode::Ddp),
    }
}

/// One rank of a job.
fn work(
    arguments: &TrainArgs,
    role: &Role,
    worker: &WorkerRole,
    variables: &Variables,
    target: &DeviceSet,
) -> Result<u8, Failure> {
    let own = variables.get(workers::RUN_FOLDER).filter(|_| worker.launcher == Launcher::Own);
    if own.is_none() && worker.rank == 0 {
        eprintln!("{role}");
        say_why_not(target);
    }
    if own.is_none() {
        diagnostics::write_to_stderr();
    }
    let Job { mut plan, mut resumed } = job(arguments, true, target.is_gpu())?;
    let seat = LocalRank {
        local_rank: worker.local_rank,
        local_world: worker.local_world,
        foreign: own.is_none(),
        oversubscribe: arguments.oversubscribe,
    };
    let selected = target.select(&seat)?;
    if plan.parallel.mode == Mode::Dp {
        let hint = "start the trainer alone, with --cpus N; or train with --mode ddp";
        return Err(plan.mistake(&["parallel.mode"], format!("dp is one process, and {role}"), hint).into());
    }
    let rank = workers::join(worker, variables, &plan)?;
    if own.is_none() {
        workers::share_cores(&rank)?;
    }
    workers::one_gpu_each(&rank, selected.gpu.as_ref(), arguments.oversubscribe)?;
    let again = variables.get(launch::worker::ATTEMPT).is_some_and(|attempt| attempt != "0");
    let mut run = || {
        rank.status.set_status(format_args!("reading {}", plan.data.name));
        let splits = read_data(&mut plan)?;
        if let (Some(path), None, 0) = (own, &resumed, worker.rank) {
            let folder = RunFolder::open(Path::new(path))?;
            // started again after a failure: the run goes on where its newest checkpoint is
            if again {
                resumed = Some(folder);
            }
        }
        let place = DeviceAssignment { target, seat, selected: selected.clone() };
        train(arguments, plan.clone(), resumed.clone(), &place, splits, Some(&rank))
    };
    let result = run();
    if let Err(failure) = &result {
        rank.failed(failure);
        if own.is_some() {
            // our launcher shows it, the root cause first
            return Ok(failure.code);
        }
    }
    rank.leave();
    result
}

/// Reads the data set of the plan and checks the plan against it.
fn read_data(plan: &mut RunPlan) -> Result<Splits, Failure> {
    let start = Instant::now();
    let splits = formats::load(&LoadRequest {
        name: plan.data.name.clone(),
        dir: Some(plan.data.dir.clone().unwrap_or_else(super::cache_folder)),
        image_size: plan.data.image_size,
        limit_train: limit(plan.data.limit_train),
        limit_test: limit(plan.data.limit_test),
    })?;
    let (train, test, seconds) = (splits.train.len(), splits.test.len(), start.elapsed().as_secs_f64());
    tracing::info!(name = plan.data.name, train, test, seconds, "read the data set");
    plan.check_against(&dataset_facts(&plan.data.name, &splits))?;
    Ok(splits)
}

/// The number of images to keep; 0 keeps all.
fn limit(count: usize) -> Option<usize> {
    (count > 0).then_some(count)
}

/// The plan, from `--config` or from the run to continue.
fn job(arguments: &TrainArgs, several: bool, gpu: bool) -> Result<Job, Failure> {
    let Some(run) = &arguments.resume else {
        let path = arguments.config.as_deref().ok_or_else(|| {
            Failure::usage("nothing says what to train", "name a TOML file: --config configs/quickstart.toml")
        })?;
        return Ok(Job { plan: resolve::plan(path, arguments, several, gpu)?, resumed: None });
    };
    let folder = match run {
        Some(path) => RunFolder::open(path),
        None => RunFolder::newest(&arguments.run_dir),
    }
    .map_err(|error| Failure::usage(&error, &error.hint))?;
    let plan = resolve::plan(&folder.config(), arguments, several, gpu)?;
    if let Some(path) = &arguments.config {
        let asked = resolve::plan(path, arguments, several, gpu)?;
        same_plan(path, &asked, &folder, &plan)?;
    }
    Ok(Job { plan, resumed: Some(folder) })
}

/// Checks that `--config` beside `--resume` says what the run says. A run's own config.toml may have more keys: those that the
/// data set determined.
fn same_plan(path: &Path, asked: &RunPlan, folder: &RunFolder, run: &RunPlan) -> Result<(), Failure> {
    let Some((asked, run)) = asked.first_difference(run) else { return Ok(()) };
    let run = run.map_or_else(|| "it has no such key".to_owned(), |setting| format!("`{setting}`"));
    Err(Failure::usage(
        format!("{}: `{asked}` is not what {} was started with: {run}", path.display(), folder.path().display()),
        "leave --config out to continue the run as it is, or give --set to change a value on purpose",
    ))
}

fn train(
    arguments: &TrainArgs,
    plan: RunPlan,
    resumed: Option<RunFolder>,
    place: &DeviceAssignment<'_>,
    splits: Splits,
    rank: Option<&Rank>,
) -> Result<u8, Failure> {
    let (source, shape, class_names) = (splits.source.clone(), splits.train.shape, splits.train.classes.clone());
    let classes = plan.model.num_classes.unwrap_or(class_names.len());
    let spec = Spec { num_classes: classes, in_channels: shape.channels, image_size: [shape.height, shape.width] };
    let selected = &place.selected;
    let network = build(&plan, &spec, selected)?;
    let parameters = count_parameters(&network);
    let device = selected.device.clone();
    let mut strategy: Box<dyn Strategy> = match rank {
        None if plan.parallel.mode == Mode::Dp => {
            let devices = place.target.all(&place.seat)?.into_iter().map(|one| one.device).collect();
            Box::new(Dp::new(network, devices, shape, classes, &plan)?)
        }
        None => Box::new(Single::new(network, device, classes, &plan)),
        Some(rank) => {
            rank.status.set_status(format_args!("comparing the job with the other ranks'"));
            ddp::same_job(&facts(&plan, &splits, place.target), &rank.comm)?;
            Box::new(Ddp::new(network, device, classes, &plan, rank.comm.clone(), rank.status.clone())?)
        }
    };

    let host_pixels = pixels_on_the_host(&plan, selected, &splits);
    if let (Some(why), true, 0) = (&host_pixels, place.target.is_gpu(), strategy.rank()) {
        eprintln!("note: images are augmented on the host: {why}");
    }
    let images = [Some(&splits.train), splits.val.as_ref(), Some(&splits.test)].into_iter().flatten();
    let data = format!(
        "{}, {} images {shape}{}",
        plan.data.name,
        images.map(|split| thousands(split.len() as u64)).collect::<Vec<_>>().join(" + "),
        if host_pixels.is_none() { ", on the GPU as uint8" } else { "" }
    );
    let loaders = loaders(&plan, &mut *strategy, splits, host_pixels.is_some(), &selected.device)?;
    let lengths = Lengths::new(&plan, loaders.train.batches_per_epoch());

    let stop = match rank {
        Some(rank) => rank.stop.clone(),
        None => {
            Stop::on_signals().map_err(|error| Failure::run(format!("signal handlers: {error}"), "check ulimits"))?
        }
    };
    let first = strategy.rank() == 0;
    let progress = match (&resumed, first) {
        (Some(folder), true) => restore(&plan, folder)?,
        _ => None,
    };
    let progress = strategy.load_checkpoint(progress)?;
    let timeline = Timeline::new(plan.log.timeline);
    #[cfg(feature = "cuda")]
    if selected.gpu.is_some() {
        timeline.watch_kernels();
    }
    timeline.synchronise(strategy.rank(), |bytes| strategy.all_gather(bytes))?;
    strategy.set_timeline(&timeline);
    if !first {
        let engine = Engine::new(&plan, &mut *strategy, loaders, None, stop, progress);
        let end = engine.record(&timeline).run()?;
        gather_ends(&*strategy, &timeline)?;
        return Ok(match end.ending {
            Ending::Finished(_) | Ending::Exhausted { .. } | Ending::OutOfTime { .. } => 0,
            Ending::Interrupted { signal, .. } => 128 + signal as u8,
        });
    }

    let folder = match (&resumed, std::env::var_os(workers::RUN_FOLDER).filter(|_| rank.is_some())) {
        (Some(folder), _) => folder.clone(),
        (None, Some(path)) => RunFolder::open(Path::new(&path))?,
        (None, None) => {
            let mode = plan.parallel.mode.to_string();
            RunFolder::create(&arguments.run_dir, &plan.model.name, &mode, strategy.devices())?
        }
    };
    if rank.is_none() {
        diagnostics::write_to(&folder.path().join("logs"))?;
    }
    write_atomic(&folder.config(), plan.to_toml().as_bytes())?;
    let store = Store::open(&folder.checkpoints(), plan.checkpoint.keep_last, plan.train.seed)?;

    let device = format!("{}, {} x{}", selected.description, plan.parallel.mode, strategy.devices());
    let mut sections = vec![overview(&plan, &lengths, parameters, &data, &source, &device, folder.path())];
    sections.extend(resolve::sections(&plan));
    let options = ReporterOptions {
        epochs: lengths.epochs,
        steps_per_epoch: lengths.steps_per_epoch as usize,
        every: plan.log.every,
        tensorboard: plan.log.tensorboard,
        quiet: arguments.quiet,
        device: device.clone(),
    };
    let mut reporter = match resumed {
        None => Reporter::new(folder.clone(), options, &sections)?,
        Some(_) => Reporter::resume(folder.clone(), options, &sections, progress.step, progress.epoch)?,
    };
    reporter.show_top5(classes > 10);
    let files = Some(Files { reporter: &mut reporter, store });
    let engine = Engine::new(&plan, &mut *strategy, loaders, files, stop, progress);
    let RunEnd { ending, test, progress } = engine.record(&timeline).run()?;
    let ends = gather_ends(&*strategy, &timeline)?;
    if timeline.is_on() {
        let left_out = timeline::write(&folder.timeline(), &ends.timelines)?;
        if left_out > 0 {
            reporter.say(&format!("timeline.json: {} later spans were left out", thousands(left_out)))?;
        }
    }
    let epochs = match &ending {
        Ending::Exhausted { epoch, .. } => *epoch,
        _ => progress.epoch - 1,
    };
    let summary = RunSummary {
        model: plan.model.name.clone(),
        parameters: parameters as u64,
        dataset: plan.data.name.clone(),
        data,
        device,
        epochs,
        planned_epochs: lengths.epochs,
        steps: progress.step,
        best: progress.best,
        last: progress.last,
        test,
        seconds: progress.elapsed_s,
        peak_bytes: ends.peak_bytes,
        device_bytes: ends.device_bytes,
        ..RunSummary::default()
    };
    finish(&mut reporter, summary, ending, class_names, &folder)
}
