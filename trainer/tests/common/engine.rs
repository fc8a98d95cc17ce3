//! Runs the engine without the program, with a strategy of the test.

use std::sync::Arc;

use data::{
    Dataset, ImageShape,
    loader::{Batch, Loader, LoaderConfig},
};
use models::Spec;
use trainer::{
    config::{self, ConfigSource, DatasetFacts, Overrides, Registry, RunPlan},
    device,
    engine::{
        Engine, Loaders, RunOutput, RunResult,
        checkpoint::{self, CheckpointFolder},
    },
    failure::Failure,
    report::{Reporter, ReporterOptions, RunFolder},
    signals::{StopFlag, StopReason},
    strategy::{Batches, Evaluation, Learner, StepOutcome, Strategy, single::Single},
};

const SHAPE: ImageShape = ImageShape { channels: 1, height: 28, width: 28 };

/// What a loader's images are for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Training,
    Evaluation,
}

/// Returns a loader of `count` images that a formula makes. `shift` moves the labels.
pub fn loader(count: usize, shift: usize, purpose: Purpose) -> Loader {
    let set = Dataset {
        name: "formula".into(),
        images: (0..count * SHAPE.len()).map(|i| (i * 197 + i / 7 + 3) as u8).collect(),
        encoded: None,
        label_sets: None,
        shared: None,
        labels: (0..count).map(|i| ((i + shift) % 10) as u16).collect(),
        shape: SHAPE,
        classes: (0..10).map(|class| class.to_string()).collect(),
    };
    let config =
        LoaderConfig { global_batch: 8, evaluation: purpose == Purpose::Evaluation, ..LoaderConfig::default() };
    Loader::new(Arc::new(set), config).unwrap()
}

/// Returns the plan of two epochs of LeNet, with the lines `more` at the end of its TOML.
pub fn plan(more: &str) -> RunPlan {
    let text = format!("[model]\nname = \"lenet\"\n[data]\nname = \"fashion-mini\"\n[train]\nepochs = 2\n{more}");
    let facts = DatasetFacts { channels: 1, height: 28, width: 28, classes: 10, mean: vec![0.5], std: vec![0.5] };
    let datasets = |_: &str| Some(facts.clone());
    let registry = Registry { models: &["lenet"], dataset_names: &["fashion-mini"], dataset_facts: &datasets };
    config::resolve(&ConfigSource::new("test.toml", text), &Overrides::default(), &registry).expect("a valid plan")
}

/// Returns the strategy of one process on the CPU.
pub fn single(plan: &RunPlan) -> Single {
    let device = device::cpu().device();
    let network = models::build("lenet", &Spec { num_classes: 10, in_channels: 1, image_size: [28, 28] }, 7, &device);
    Single::new(network.expect("a network"), device, 10, plan)
}

/// A [`Single`] that runs `act` in its `at`-th evaluation, before the first image.
pub struct Disturbed {
    /// The strategy.
    pub inner: Single,
    /// The evaluation, from 1.
    pub at: usize,
    /// What happens there.
    pub act: Box<dyn Fn()>,
    evaluations: usize,
}

impl Disturbed {
    pub fn new(inner: Single, at: usize, act: impl Fn() + 'static) -> Self {
        Self { inner, at, act: Box::new(act), evaluations: 0 }
    }
}

impl Strategy for Disturbed {
    fn learner(&self) -> &Learner {
        self.inner.learner()
    }

    fn learner_mut(&mut self) -> &mut Learner {
        self.inner.learner_mut()
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<StopReason>) -> Result<StepOutcome, Failure> {
        self.inner.train_step(batches, lr, stop)
    }

    fn evaluate(&mut self, batches: &mut Batches<'_>, stop: &StopFlag) -> Result<Evaluation, Failure> {
        self.evaluations += 1;
        if self.evaluations == self.at {
            (self.act)();
        }
        self.inner.evaluate(batches, stop)
    }
}

/// Runs the engine in `folder`, from its newest checkpoint if there is one.
pub fn run(
    folder: &RunFolder,
    plan: &RunPlan,
    strategy: &mut dyn Strategy,
    loaders: Loaders,
    stop: StopFlag,
) -> Result<RunResult, Failure> {
    let newest =
        checkpoint::load_newest(&folder.checkpoints()).ok().map(|(newest, _)| (newest.snapshot, newest.progress));
    let resumed = newest.is_some();
    let progress = strategy.load_checkpoint(newest).expect("a checkpoint of this network");
    let options = ReporterOptions {
        epochs: 2,
        steps_per_epoch: loaders.train.batches_per_epoch(),
        pixel_shares: Vec::new(),
        every: 0,
        tensorboard: false,
        quiet: true,
        multi_label: false,
        device: "cpu".to_owned(),
    };
    let reporter = match resumed {
        false => Reporter::new(folder.clone(), options, &[]),
        true => Reporter::resume(folder.clone(), options, &[], progress.step, progress.epoch),
    };
    let mut reporter = reporter.expect("a reporter");
    let checkpoints = CheckpointFolder::open(&folder.checkpoints(), 9, plan.train.seed).expect("a store");
    let output = Some(RunOutput { reporter: &mut reporter, checkpoints });
    Engine::new(plan, strategy, loaders, output, stop, progress).run()
}
