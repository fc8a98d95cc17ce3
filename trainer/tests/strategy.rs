//! The training step, called as a library: accumulation, the weight average, restoring, losses that are not finite.

use std::sync::Arc;

use data::{
    Dataset, ImageShape,
    augment::{Augment, Fill},
    loader::{Batch, Loader, LoaderConfig},
};
use models::{Spec, StateTensor};
use trainer::{
    config::{self, ConfigSource, DatasetFacts, Overrides, Registry, RunPlan},
    device,
    signals::StopFlag,
    snapshot::{RunProgress, Snapshot},
    strategy::{DeviceDataset, DeviceDatasets, Evaluation, Strategy, single::Single},
};

const SHAPE: ImageShape = ImageShape { channels: 1, height: 28, width: 28 };

fn plan(extra: &str) -> RunPlan {
    let text = format!("[model]\nname = \"lenet\"\n[data]\nname = \"fashion-mini\"\n{extra}");
    let facts = DatasetFacts { channels: 1, height: 28, width: 28, classes: 10, mean: vec![0.5], std: vec![0.5] };
    let datasets = |_: &str| Some(facts.clone());
    let registry = Registry { models: &["lenet"], dataset_names: &["fashion-mini"], dataset_facts: &datasets };
    config::resolve(&ConfigSource::new("test.toml", text), &Overrides::default(), &registry).expect("a valid plan")
}

fn single(plan: &RunPlan) -> Single {
    let device = device::cpu().device();
    let spec = Spec { num_classes: 10, in_channels: 1, image_size: [28, 28] };
    let network = models::build("lenet", &spec, 7, &device).expect("lenet");
    Single::new(network, device, 10, plan)
}

/// Makes a batch of `count` computed images, starting with image `first`.
fn batch(first: usize, count: usize) -> Batch {
    let pixel = |i: usize, p: usize| ((i * 31 + p) as f32 * 0.37).sin();
    Batch {
        images: (first..first + count).flat_map(|i| (0..SHAPE.len()).map(move |p| pixel(i, p))).collect(),
        params: Vec::new(),
        labels: (first..first + count).map(|i| (i % 10) as i32).collect(),
        views: 1,
        multi_hot: Vec::new(),
        mix: None,
        ids: (first as u32..(first + count) as u32).collect(),
        epoch: 1,
        index: 0,
        repetitions: Vec::new(),
        replaced: Vec::new(),
        global_len: count,
        global_weight: count as f64,
        shape: SHAPE,
    }
}

#[track_caller]
fn assert_close(one: &[StateTensor], other: &[StateTensor], tolerance: f32) {
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(other) {
        assert_eq!(a.name, b.name);
        for (x, y) in a.values.iter().zip(&b.values) {
            assert!((x - y).abs() <= tolerance, "{}: {x} against {y}", a.name);
        }
    }
}

#[test]
fn accumulated_batches_of_any_sizes_equal_one_batch() {
    let plan = plan("[train]\nlabel_smoothing = 0.1\n");
    let (mut whole, mut parts) = (single(&plan), single(&plan));
    let start = whole.snapshot();
    let one = whole.train_step(vec![batch(0, 24)], 0.1, None).expect("step");
    let three = parts.train_step(vec![batch(0, 12), batch(12, 8), batch(20, 4)], 0.1, None).expect("step");
    assert_eq!((one.samples, one.correct), (three.samples, three.correct));
    assert!((one.loss() - three.loss()).abs() < 1e-6);
    assert_close(&whole.snapshot().model, &parts.snapshot().model, 1e-6);
    assert_ne!(start.model, whole.snapshot().model, "the step moved the weights");
}

/// The weighted mean divides by the weights of all batches of the step, not of each.
#[test]
fn accumulated_batches_share_one_weighted_mean() {
    let weights: Vec<f64> = (0..10).map(|class| [0.0, 3.0, 0.5][class % 3]).collect();
    let plan = plan("[train]\nlabel_smoothing = 0.1\n");
    let weighted = |first: usize, count: usize| {
        let mut batch = batch(first, count);
        batch.global_weight = batch.labels.iter().map(|&label| weights[label as usize]).sum();
        batch
    };
    let strategy = || {
        let mut strategy = single(&plan);
        strategy.learner_mut().replica.class_weights = weights.clone();
        strategy
    };
    let (mut whole, mut parts) = (strategy(), strategy());
    let start = whole.snapshot();
    let one = whole.train_step(vec![weighted(0, 24)], 0.1, None).expect("step");
    let three = parts.train_step(vec![weighted(0, 12), weighted(12, 8), weighted(20, 4)], 0.1, None).expect("step");
    assert!((one.loss() - three.loss()).abs() < 1e-6 && (one.weight - three.weight).abs() < 1e-9);
    assert_close(&whole.snapshot().model, &parts.snapshot().model, 1e-6);
    // A batch in which no sample counts moves nothing: its gradients are 0, not 0 / 0.
    let plan = self::plan("[optimizer]\nmomentum = 0\nweight_decay = 0\n");
    let mut still = single(&plan);
    still.learner_mut().replica.class_weights = weights.clone();
    let mut nothing = batch(0, 1);
    nothing.global_weight = 0.0;
    assert_eq!(still.train_step(vec![nothing], 0.1, None).expect("step").loss(), 0.0);
    assert_eq!(still.snapshot().model, start.model);
}

#[test]
fn the_weight_average_follows_its_definition() {
    let plan = plan("[train]\nema = 0.75\n");
    let mut single = single(&plan);
    let mut expected = single.snapshot().model;
    for step in 0..3 {
        single.train_step(vec![batch(8 * step, 8)], 0.1, None).expect("step");
        for (average, now) in expected.iter_mut().zip(single.snapshot().model) {
            for (average, now) in average.values.iter_mut().zip(now.values) {
                *average = 0.75 * *average + 0.25 * now;
            }
        }
    }
    let snapshot = single.snapshot();
    assert_close(&snapshot.ema.expect("an average"), &expected, 1e-6);
}

#[test]
fn evaluation_uses_the_average_and_counts_every_sample() {
    let (mut plain, mut averaged) = (single(&plan("")), single(&plan("[train]\nema = 0.999999\n")));
    for step in 0..12 {
        let samples = || vec![batch(8 * step, 8)];
        plain.train_step(samples(), 0.5, None).expect("step");
        averaged.train_step(samples(), 0.5, None).expect("step");
    }
    let images = || [batch(0, 7), batch(7, 4)].into_iter().map(Ok);
    let counts = |strategy: &mut Single| match strategy.evaluate(&mut images(), &StopFlag::never()) {
        Ok(Evaluation::Done(counts)) => counts,
        other => panic!("{other:?}"),
    };
    let (plain, averaged) = (counts(&mut plain), counts(&mut averaged));
    assert_eq!((plain.samples, averaged.samples), (11, 11));
    let fresh = counts(&mut single(&self::plan("")));
    assert!((averaged.loss() - fresh.loss()).abs() < 1e-3, "an average of decay 0.999999 has hardly moved");
    assert!((plain.loss() - fresh.loss()).abs() > 1e-2, "the weights have");
}

#[test]
fn a_restored_strategy_continues_to_the_same_bits() {
    let plan = plan("[train]\nema = 0.9\n[optimizer]\nkind = \"adamw\"\nlr = 0.01\n");
    let mut one = single(&plan);
    one.train_step(vec![batch(0, 8)], 0.01, None).expect("step");
    let mut other = single(&plan);
    other.load_checkpoint(Some((one.snapshot(), RunProgress::start()))).expect("its own kind");
    for strategy in [&mut one, &mut other] {
        strategy.train_step(vec![batch(8, 8)], 0.01, None).expect("step");
    }
    assert_eq!(one.snapshot(), other.snapshot());
}

#[test]
fn a_snapshot_that_does_not_fit_is_refused_with_the_name_of_the_tensor() {
    let mut strategy = single(&plan(""));
    let good = strategy.snapshot();
    let mut missing = good.clone();
    missing.model.remove(0);
    assert!(
        strategy
            .load_checkpoint(Some((missing, RunProgress::start())))
            .unwrap_err()
            .to_string()
            .contains("conv1.weight")
    );
    let foreign = Snapshot { ema: Some(good.model.clone()), ..good.clone() };
    assert!(
        strategy.load_checkpoint(Some((foreign, RunProgress::start()))).unwrap_err().to_string().contains("train.ema")
    );
    strategy.load_checkpoint(Some((good, RunProgress::start()))).expect("its own snapshot");
}

#[test]
fn a_loss_that_is_not_finite_stops_before_the_weights_change() {
    let mut strategy = single(&plan(""));
    let before = strategy.snapshot();
    let mut bad = batch(0, 4);
    bad.images[5] = f32::NAN;
    let failure = strategy.train_step(vec![bad], 0.1, None).unwrap_err();
    assert_eq!(failure.code, 1);
    assert!(failure.to_string().contains("hint: training diverged"), "{failure}");
    assert_eq!(before, strategy.snapshot());
}

#[test]
fn clipping_limits_the_norm_of_the_step() {
    let clipped = plan("[train]\ngrad_clip = 0.001\n[optimizer]\nmomentum = 0.0\nweight_decay = 0.0\n");
    let mut strategy = single(&clipped);
    let before = strategy.snapshot().model;
    let norm = strategy.train_step(vec![batch(0, 8)], 1.0, None).expect("step").grad_norm.expect("clipping is on");
    assert!(norm > 0.001, "{norm}");
    let after = strategy.snapshot().model;
    let moved: f64 = before
        .iter()
        .zip(&after)
        .flat_map(|(a, b)| a.values.iter().zip(&b.values))
        .map(|(a, b)| f64::from(a - b).powi(2))
        .sum();
    assert!((moved.sqrt() - 0.001).abs() < 1e-5, "learning rate 1: the step is the clipped norm, {}", moved.sqrt());
}

/// Where the pixels of a batch are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PixelSource {
    Loader,
    Device,
}

/// Losses, weights and evaluation are those of a run with the loader's pixels, bit for bit.
#[test]
fn a_data_set_on_the_device_trains_to_the_same_bits() {
    let set = Arc::new(Dataset {
        name: "formula".into(),
        images: (0..50 * SHAPE.len()).map(|i| (i * 197 + i / 7 + 3) as u8).collect(),
        encoded: None,
        label_sets: None,
        shared: None,
        labels: (0..50).map(|i| (i % 10) as u16).collect(),
        shape: SHAPE,
        classes: (0..10).map(|class| class.to_string()).collect(),
    });
    let run = |pixels_from: PixelSource| {
        let pixels = pixels_from == PixelSource::Loader;
        let config = LoaderConfig {
            global_batch: 8,
            augment: vec![Augment::Crop { padding: 2, fill: Fill::Zero }, Augment::Flip, Augment::Cutout { size: 6 }],
            mean: vec![0.3],
            std: vec![0.4],
            pixels,
            ..LoaderConfig::default()
        };
        let exact = LoaderConfig { evaluation: true, shuffle: false, ..config.clone() };
        let loaders = [config, exact].map(|config| Loader::new(Arc::clone(&set), config).expect("a loader"));
        let mut strategy = single(&plan(""));
        if !pixels {
            let device = device::cpu().device().inner();
            let [train, eval] =
                [&loaders[0], &loaders[1]].map(|loader| DeviceDataset::new(&set, loader.pipeline().clone(), &device));
            strategy.set_device_datasets(DeviceDatasets { train, eval }).expect("one device");
        }
        let losses: Vec<u64> = (1..3)
            .flat_map(|epoch| loaders[0].epoch(epoch, 0))
            .map(|batch| {
                strategy.train_step(vec![batch.expect("a batch")], 0.1, None).expect("step").loss_sum.to_bits()
            })
            .collect();
        let evaluation = strategy.evaluate(&mut loaders[1].epoch(1, 0), &StopFlag::never()).expect("evaluation");
        (losses, evaluation, strategy.snapshot())
    };
    let (host, device) = (run(PixelSource::Loader), run(PixelSource::Device));
    assert_eq!(host.0.len(), 14);
    assert_eq!(host, device);
}
