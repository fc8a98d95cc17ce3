//! Steps that are queued, as with a CUDA graph, and finished while later steps are queued: the run has the same results.

use std::collections::VecDeque;
use std::fs;

use crate::common::entries;
use crate::engine::{self, Purpose};
use data::loader::Batch;
use serde_json::Value;
use trainer::{
    engine::{Loaders, RunOutcome, RunResult, checkpoint},
    failure::Failure,
    report::RunFolder,
    signals::{StopFlag, StopReason},
    strategy::{Batches, Evaluation, Learner, StepOutcome, Strategy, single::Single},
};

/// A [`Single`] that queues the steps of full batches, and returns their outcomes later.
struct QueuedSingle {
    inner: Single,
    queue: VecDeque<StepOutcome>,
    taken: usize,
    finished: usize,
    /// The largest number of queued steps.
    longest: usize,
    /// The step that fails, if one does.
    fails: Option<usize>,
    /// The step during which the run receives SIGTERM, and the flag that the signal sets.
    stop: Option<(usize, StopFlag)>,
}

impl QueuedSingle {
    fn new(inner: Single) -> Self {
        Self { inner, queue: VecDeque::new(), taken: 0, finished: 0, longest: 0, fails: None, stop: None }
    }
}

impl Strategy for QueuedSingle {
    fn learner(&self) -> &Learner {
        self.inner.learner()
    }

    fn learner_mut(&mut self) -> &mut Learner {
        self.inner.learner_mut()
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<StopReason>) -> Result<StepOutcome, Failure> {
        self.inner.train_step(batches, lr, stop)
    }

    fn queue_step(
        &mut self,
        batches: Vec<Batch>,
        lr: f64,
        stop: Option<StopReason>,
    ) -> Result<Option<StepOutcome>, Failure> {
        let full = batches.iter().all(|batch| batch.len() == 8);
        let outcome = self.train_step(batches, lr, stop)?;
        if let Some((_, stop)) = self.stop.as_ref().filter(|(at, _)| *at == self.taken) {
            stop.request(15);
        }
        self.taken += 1;
        if !full {
            return Ok(Some(outcome));
        }
        self.queue.push_back(outcome);
        self.longest = self.longest.max(self.queue.len());
        Ok(None)
    }

    fn finish_step(&mut self) -> Result<Option<StepOutcome>, Failure> {
        let step = self.finished;
        self.finished += 1;
        match self.fails == Some(step) {
            true => Err(Failure::run("the training loss is NaN", "lower it")),
            false => Ok(self.queue.pop_front()),
        }
    }

    fn evaluate(&mut self, batches: &mut Batches<'_>, stop: &StopFlag) -> Result<Evaluation, Failure> {
        assert!(self.queue.is_empty(), "no step is left when an epoch ends");
        self.inner.evaluate(batches, stop)
    }
}

/// A checkpoint every three of an epoch's six steps, of which the last one has fewer images.
const PLAN: &str = "[checkpoint]\nevery_steps = 3\nkeep_last = 9\n";

fn loaders() -> Loaders {
    Loaders {
        train: engine::loader(44, 0, Purpose::Training),
        eval: engine::loader(20, 1, Purpose::Evaluation),
        test: None,
    }
}

fn run(folder: &RunFolder, strategy: &mut dyn Strategy, stop: StopFlag) -> Result<RunResult, Failure> {
    engine::run(folder, &engine::plan(PLAN), strategy, loaders(), stop)
}

fn single() -> Single {
    engine::single(&engine::plan(PLAN))
}

/// The names of a run's checkpoints.
fn names(folder: &RunFolder) -> Vec<String> {
    entries(&folder.checkpoints()).iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
}

/// Returns the values of each step's line that do not depend on time.
fn lines(folder: &RunFolder) -> Vec<[Value; 5]> {
    let text = fs::read_to_string(folder.metrics()).unwrap();
    let of = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        ["epoch", "step", "loss", "lr", "top1"].map(|key| line[key].clone())
    };
    text.lines().map(of).collect()
}

#[test]
fn a_run_with_queued_steps_equals_a_run_without() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| RunFolder::create(&root.path().join(name), "lenet", "single", 1).unwrap();
    let (plain, queued) = (folder("plain"), folder("queued"));
    let mut queues = QueuedSingle::new(single());
    run(&plain, &mut single(), StopFlag::never()).unwrap();
    let end = run(&queued, &mut queues, StopFlag::never()).unwrap();
    assert!(matches!(end.outcome, RunOutcome::Finished(_)), "{:?}", end.outcome);
    assert_eq!((queues.longest, queues.taken, queues.finished), (2, 12, 10), "two of the steps are not queued");

    assert_eq!(lines(&queued), lines(&plain));
    assert_eq!(lines(&queued).len(), 12);
    let all = names(&plain);
    assert!(all.contains(&"step-3".to_owned()) && all.contains(&"step-9".to_owned()), "{all:?}");
    assert_eq!(names(&queued), all);
    for name in all {
        let weights =
            |folder: &RunFolder| fs::read(folder.checkpoints().join(&name).join("model.safetensors")).unwrap();
        assert!(weights(&queued) == weights(&plain), "{name}");
    }
}

#[test]
fn the_error_of_a_queued_step_names_the_step() {
    let root = tempfile::tempdir().unwrap();
    let folder = RunFolder::create(root.path(), "lenet", "single", 1).unwrap();
    let mut queues = QueuedSingle { fails: Some(4), ..QueuedSingle::new(single()) };
    let failure = run(&folder, &mut queues, StopFlag::never()).err().expect("a step fails");
    assert!(failure.message.starts_with("epoch 1, step 4: the training loss is NaN"), "{}", failure.message);
    assert_eq!(lines(&folder).len(), 4, "the steps before are reported");
}

#[test]
fn a_signal_ends_the_run_when_all_queued_steps_are_finished() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| RunFolder::create(&root.path().join(name), "lenet", "single", 1).unwrap();
    let (whole, parts) = (folder("whole"), folder("parts"));
    run(&whole, &mut single(), StopFlag::never()).unwrap();

    let stop = StopFlag::never();
    let mut queues = QueuedSingle { stop: Some((7, stop.clone())), ..QueuedSingle::new(single()) };
    let end = run(&parts, &mut queues, stop).unwrap();
    // The next step brings the signal, and one more is queued before its outcome is known.
    assert!(matches!(end.outcome, RunOutcome::Interrupted { signal: 15, step: 9 | 10 }), "{:?}", end.outcome);
    assert_eq!(end.progress.step, queues.taken as u64, "every step that was taken is counted");
    assert_eq!(checkpoint::load_newest(&parts.checkpoints()).unwrap().0.progress.step, end.progress.step);

    run(&parts, &mut QueuedSingle::new(single()), StopFlag::never()).unwrap();
    let weights = |folder: &RunFolder| fs::read(folder.checkpoints().join("last/model.safetensors")).unwrap();
    assert!(weights(&parts) == weights(&whole), "the resumed run has the same weights");
    assert_eq!(lines(&parts), lines(&whole));
}
