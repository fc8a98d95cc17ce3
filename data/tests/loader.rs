//! A loader's batches do not depend on the number of workers, the prefetching or the world size.

use std::collections::BTreeMap;
use std::sync::Arc;

use data::augment::{Augment, Fill};
use data::loader::{Batch, Loader, LoaderConfig, ResizeStage};
use data::sampler::{DistributedSampler, FIRST_EPOCH, weighted_draws};
use data::{Dataset, ImageShape};

const SHAPE: ImageShape = ImageShape { channels: 3, height: 8, width: 6 };

fn dataset(len: usize) -> Arc<Dataset> {
    let images = (0..len * SHAPE.len()).map(|i| (i * 31 + i / 144 * 7) as u8).collect();
    let labels = (0..len).map(|i| (i % 10) as u16).collect();
    let classes = (0..10).map(|i| i.to_string()).collect();
    Arc::new(Dataset {
        name: "test".into(),
        images,
        encoded: None,
        labels,
        label_sets: None,
        shared: None,
        shape: SHAPE,
        classes,
    })
}

fn config() -> LoaderConfig {
    LoaderConfig {
        global_batch: 16,
        seed: 11,
        augment: vec![
            Augment::Crop { padding: 2, fill: Fill::Reflect },
            Augment::Flip,
            Augment::VerticalFlip,
            Augment::Rotation { degrees: 20.0 },
            Augment::TrivialAugment,
            Augment::Cutout { size: 3 },
        ],
        mean: vec![0.4914, 0.4822, 0.4465],
        std: vec![0.2023, 0.1994, 0.2010],
        ..LoaderConfig::default()
    }
}

fn mixed() -> LoaderConfig {
    LoaderConfig { mixup: Some(0.4), cutmix: Some(1.0), ..config() }
}

fn load(len: usize, config: LoaderConfig, epoch: usize, first: usize) -> Vec<Batch> {
    let loader = Loader::new(dataset(len), config).unwrap();
    let batches = loader.epoch(epoch, first);
    assert_eq!(batches.len(), loader.batches_per_epoch().saturating_sub(first));
    batches.map(Result::unwrap).collect()
}

fn bits(pixels: &[f32]) -> Vec<u32> {
    pixels.iter().map(|x| x.to_bits()).collect()
}

/// One sample of a step: the pixels' bits, label, partner's label and lambda's bits.
type Sample = (Vec<u32>, i32, Option<(i32, u32)>);

/// Returns the samples of each step by id, of all ranks.
fn steps(len: usize, config: &LoaderConfig, world_size: usize, epoch: usize) -> Vec<BTreeMap<u32, Sample>> {
    let mut steps: Vec<BTreeMap<u32, Sample>> = Vec::new();
    for rank in 0..world_size {
        for batch in load(len, LoaderConfig { rank, world_size, ..config.clone() }, epoch, 0) {
            if steps.len() == batch.index {
                steps.push(BTreeMap::new());
            }
            let shape = config.shape_in(epoch, SHAPE);
            assert_eq!((batch.epoch, batch.shape, batch.ids.len()), (epoch, shape, batch.len()));
            for (i, pixels) in batch.images.chunks(shape.len()).enumerate() {
                let mix = batch.mix.as_ref().map(|mix| (mix.labels[i], mix.lambda.to_bits()));
                let twice = steps[batch.index].insert(batch.ids[i], (bits(pixels), batch.labels[i], mix));
                assert!(twice.is_none(), "sample {} twice in step {}", batch.ids[i], batch.index);
            }
        }
    }
    steps
}

fn growing() -> LoaderConfig {
    let stage = |last_epoch, side| ResizeStage { last_epoch, side };
    LoaderConfig { resize_stages: vec![stage(2, 3), stage(4, 5)], ..config() }
}

/// The mean of images stays, apart from what the border's pixels weigh. Evaluations have whole images.
#[test]
fn images_grow_over_the_epochs() {
    let exact = LoaderConfig { evaluation: true, ..growing() };
    for (epoch, [height, width]) in [(1, [4, 3]), (2, [4, 3]), (3, [7, 5]), (4, [7, 5]), (5, [8, 6])] {
        let (small, whole) = (load(40, growing(), epoch, 1), load(40, config(), epoch, 1));
        let shape = ImageShape { height, width, ..SHAPE };
        assert!(small.iter().all(|batch| batch.shape == shape && batch.images.len() == batch.len() * shape.len()));
        let mean = |batches: &[Batch]| {
            let pixels = || batches.iter().flat_map(|batch| &batch.images);
            pixels().map(|&pixel| f64::from(pixel)).sum::<f64>() / pixels().count() as f64
        };
        assert!((mean(&small) - mean(&whole)).abs() < 0.05, "epoch {epoch}: {} and {}", mean(&small), mean(&whole));
        assert_eq!(small == whole, epoch == 5);
        assert!(load(40, exact.clone(), epoch, 0).iter().all(|batch| batch.shape == SHAPE));
    }
}

#[test]
fn every_world_sees_the_same_samples_in_every_step() {
    let resized_and_mixed = LoaderConfig { resize_stages: growing().resize_stages, ..mixed() };
    for config in [config(), mixed(), growing(), resized_and_mixed] {
        // 100 samples are six batches of 16 and one of 4. Worlds of 1, 2 and 4 share them without padding.
        let one = steps(100, &config, 1, 2);
        assert_eq!(one.iter().map(BTreeMap::len).collect::<Vec<_>>(), [16, 16, 16, 16, 16, 16, 4]);
        for world_size in [2, 4] {
            assert!(one == steps(100, &config, world_size, 2), "world {world_size}");
        }
        // A world size that does not divide the batch shares it unevenly and changes nothing else.
        assert!(one[..6] == steps(100, &LoaderConfig { drop_last: true, ..config.clone() }, 3, 2), "world 3");
        assert!(one != steps(100, &config, 1, 3), "another epoch differs");
    }
}

#[test]
fn ranks_get_the_samples_of_the_distributed_sampler() {
    for (world_size, len) in [(1, 100), (2, 101), (4, 90), (4, 64), (8, 3)] {
        for rank in 0..world_size {
            let batches = load(len, LoaderConfig { rank, world_size, ..config() }, 5, 0);
            let ids: Vec<u32> = batches.iter().flat_map(|batch| batch.ids.clone()).collect();
            let sampler = DistributedSampler::new(len, rank, world_size, true, 11, false).unwrap();
            assert_eq!(ids, sampler.indices(5), "rank {rank} of {world_size}");
            let total: usize = batches.iter().map(|batch| batch.global_len).sum();
            assert_eq!(total, sampler.total_size());
        }
    }
}

/// Id, draw, label and the pixels' bits of a sample.
type Drawn = (u32, u32, i32, Vec<u32>);

/// Returns each step's samples of all ranks in the order of the epoch.
fn interleaved(len: usize, config: &LoaderConfig, world_size: usize, first: usize) -> Vec<Vec<Drawn>> {
    let ranks: Vec<Vec<Batch>> =
        (0..world_size).map(|rank| load(len, LoaderConfig { rank, world_size, ..config.clone() }, 2, first)).collect();
    let step = |index: usize| {
        let batch = |position: usize| (&ranks[position % world_size][index], position / world_size);
        let sample = |position| {
            let (batch, i) = batch(position);
            let pixels = bits(&batch.images[i * SHAPE.len()..(i + 1) * SHAPE.len()]);
            (batch.ids[i], batch.repetitions[i], batch.labels[i], pixels)
        };
        (0..ranks[0][index].global_len).map(sample).collect()
    };
    (0..ranks[0].len()).map(step).collect()
}

fn weighted() -> LoaderConfig {
    let weights = vec![1.0, 0.0, 1.0, 30.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0];
    LoaderConfig { sampler_weights: weights, drop_last: true, ..config() }
}

/// Returns the configuration without the steps that a device cannot do.
fn gathering(mut config: LoaderConfig) -> LoaderConfig {
    config.augment.retain(|step| !step.computes_pixels());
    config
}

#[test]
fn every_world_draws_the_same_weighted_samples_in_every_step() {
    let one = interleaved(100, &weighted(), 1, 0);
    // The order is that of PyTorch's sampler with the seed 11 + 2.
    let weights: Vec<f64> = (0..100).map(|id| weighted().sampler_weights[id % 10]).collect();
    let ids: Vec<u32> = one.iter().flatten().map(|sample| sample.0).collect();
    assert_eq!(ids, weighted_draws(&weights, 100, 13)[..96]);
    for world_size in [2, 3, 4] {
        assert!(one == interleaved(100, &weighted(), world_size, 0), "world {world_size}");
        assert!(one[4..] == interleaved(100, &weighted(), world_size, 4), "world {world_size}, from the fifth step on");
    }
    let mixed = LoaderConfig { mixup: Some(0.4), ..weighted() };
    assert!(interleaved(100, &mixed, 1, 0) == interleaved(100, &mixed, 3, 0), "mixed");
    // Most of the draws are of the ten images of class 3. Each draw has its own augmentation.
    let of_one: Vec<_> = one.iter().flatten().filter(|sample| sample.0 == 3).collect();
    assert!(of_one.len() > 3, "{}", of_one.len());
    for (draw, sample) in of_one.iter().enumerate() {
        assert_eq!((sample.1, sample.2), (draw as u32, 3));
        assert!(of_one[..draw].iter().all(|other| other.3 != sample.3), "draw {draw}");
    }
    // The device augments as the host does, where it only gathers.
    let gathering = gathering(weighted());
    let left = load(100, LoaderConfig { pixels: false, ..gathering.clone() }, 2, 0);
    let pipeline = Loader::new(dataset(100), gathering.clone()).unwrap().pipeline().clone();
    let set = dataset(100);
    for (batch, host) in left.iter().zip(&interleaved(100, &gathering, 1, 0)) {
        for (i, params) in batch.params.iter().enumerate() {
            let mut pixels = vec![0.0; SHAPE.len()];
            pipeline.apply(set.image(batch.ids[i] as usize), params, &mut pixels);
            assert_eq!(bits(&pixels), host[i].3);
        }
    }
}

#[test]
fn a_weighted_epoch_is_filled_up_and_an_evaluation_is_exact() {
    // 100 draws are six batches of 16 and one of 4, filled up for 3 ranks with the epoch's first draws.
    let config = LoaderConfig { drop_last: false, ..weighted() };
    let steps = interleaved(100, &config, 3, 0);
    assert_eq!(steps.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 16, 16, 16, 16, 6]);
    assert_eq!(steps[6][4..], steps[0][..2]);
    let exact = load(30, LoaderConfig { evaluation: true, ..weighted() }, 2, 0);
    assert!(exact.iter().flat_map(|batch| batch.ids.clone()).eq(0..30));
    assert!(exact.iter().all(|batch| batch.repetitions.is_empty()));
}

#[test]
fn all_ranks_know_the_weight_of_the_global_batch() {
    let weights: Vec<f64> = (0..10).map(|class| 0.1 + 0.3 * f64::from(class)).collect();
    let weighted = LoaderConfig { class_weights: weights.clone(), ..config() };
    let whole = load(100, weighted.clone(), 1, 0);
    for rank in 0..4 {
        let share = load(100, LoaderConfig { rank, world_size: 4, ..weighted.clone() }, 1, 0);
        for (whole, share) in whole.iter().zip(&share) {
            assert_eq!(whole.global_weight.to_bits(), share.global_weight.to_bits(), "rank {rank}");
        }
    }
    let expected: f64 = whole[0].labels.iter().map(|&label| weights[label as usize]).sum();
    assert_eq!(whole[0].global_weight, expected);
    // Mixed images have probabilities as targets, whose mean is over the samples.
    let mixed = load(100, LoaderConfig { mixup: Some(0.4), ..weighted }, 1, 0);
    assert_eq!((mixed[0].global_weight, load(100, config(), 1, 0)[6].global_weight), (16.0, 4.0));
}

/// The program counts epochs from 1, and PyTorch's `set_epoch(1)` is the order of the first.
#[test]
fn the_first_epoch_is_set_epoch_1() {
    let config = LoaderConfig { mean: vec![0.0; 3], std: vec![1.0; 3], ..LoaderConfig::default() };
    let ids: Vec<u32> = load(10, config, FIRST_EPOCH, 0).into_iter().flat_map(|batch| batch.ids).collect();
    // sampler = DistributedSampler(range(10), num_replicas=1, rank=0, seed=0); sampler.set_epoch(1); list(sampler)
    assert_eq!(ids, [5, 6, 1, 2, 0, 8, 9, 3, 7, 4]);
}

#[test]
fn workers_and_prefetching_change_no_bit() {
    for config in [config(), mixed()] {
        let expected = load(100, config.clone(), 1, 0);
        for (workers, prefetch) in [(1, 0), (2, 1), (4, 3), (3, 100)] {
            let batches = load(100, LoaderConfig { workers, prefetch, ..config.clone() }, 1, 0);
            assert!(batches == expected, "{workers} workers, {prefetch} ahead");
        }
    }
}

#[test]
fn an_epoch_resumes_in_the_middle() {
    for config in [config(), mixed()] {
        let whole = load(100, config.clone(), 3, 0);
        assert_eq!(whole.iter().map(|batch| batch.index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
        for first in [1, 6, 7, 8] {
            assert!(load(100, config.clone(), 3, first) == whole[whole.len().min(first)..], "from batch {first}");
        }
    }
}

#[test]
fn evaluation_sees_every_sample_once_without_augmentation() {
    let exact = LoaderConfig { evaluation: true, drop_last: true, ..mixed() };
    for (len, world_size) in [(100, 1), (101, 2), (98, 3), (65, 4), (3, 4), (103, 16)] {
        let mut ids = Vec::new();
        for rank in 0..world_size {
            for batch in load(len, LoaderConfig { rank, world_size, ..exact.clone() }, 0, 0) {
                assert!(batch.mix.is_none() && !batch.is_empty());
                for (&id, pixels) in batch.ids.iter().zip(batch.images.chunks(SHAPE.len())) {
                    assert_eq!(pixels[47], (f32::from(dataset(len).image(id as usize)[47]) / 255.0 - 0.4914) / 0.2023);
                }
                ids.extend(batch.ids);
            }
        }
        ids.sort_unstable();
        assert!(ids.iter().copied().eq(0..len as u32), "{len} samples, world {world_size}: {ids:?}");
    }
}

#[test]
fn a_smaller_last_batch_is_kept_or_dropped() {
    let kept = load(70, config(), 0, 0);
    assert_eq!(kept.iter().map(Batch::len).collect::<Vec<_>>(), [16, 16, 16, 16, 6]);
    assert_eq!(kept[4].global_len, 6);
    let dropped = load(70, LoaderConfig { drop_last: true, ..config() }, 0, 0);
    assert!(dropped == kept[..4]);
    // Four ranks share 6 samples, padded with two samples of the epoch's front.
    let shares: Vec<Batch> =
        (0..4).map(|rank| load(70, LoaderConfig { rank, world_size: 4, ..config() }, 0, 4).remove(0)).collect();
    assert!(shares.iter().all(|batch| batch.len() == 2 && batch.global_len == 8));
    assert_eq!([shares[2].ids[1], shares[3].ids[1]], kept[0].ids[..2]);
}

#[test]
fn a_padded_batch_repeats_its_last_image() {
    let drawn = LoaderConfig { drop_last: false, ..weighted() };
    for config in [mixed(), LoaderConfig { pixels: false, ..gathering(config()) }, drawn] {
        let is_drawn = !config.sampler_weights.is_empty();
        let batch = load(70, config, 1, 4).remove(0);
        let padded = batch.clone().padded(16);
        assert_eq!((padded.len(), padded.ids.len(), padded.global_len), (16, 16, batch.global_len));
        assert_eq!(padded.labels[..6], batch.labels);
        assert!(padded.ids[6..].iter().all(|id| *id == batch.ids[5]));
        assert_eq!(padded.repetitions.len(), if is_drawn { 16 } else { 0 });
        assert!(padded.repetitions.iter().skip(6).all(|earlier| *earlier == batch.repetitions[5]));
        assert_eq!(padded.params.len(), if batch.params.is_empty() { 0 } else { 16 });
        let images: Vec<&[f32]> = padded.images.chunks(SHAPE.len()).collect();
        assert_eq!(images.len(), if batch.images.is_empty() { 0 } else { 16 });
        assert!(images.iter().skip(6).all(|image| *image == images[5]));
        assert_eq!(padded.mix.map(|mix| mix.labels.len()), batch.mix.as_ref().map(|_| 16));
        assert_eq!(batch.clone().padded(3), batch, "never shorter");
    }
}

/// Checkpoints of older versions contain the checksum.
#[test]
fn the_checksum_of_an_evaluation_covers_the_classes_of_each_image() {
    let loader = |dataset: Dataset| Loader::new(Arc::new(dataset), config()).unwrap();
    let checksum = |dataset: Dataset| loader(dataset).eval_checksum();
    let one_class_each = Arc::unwrap_or_clone(dataset(20));
    assert_eq!(checksum(one_class_each.clone()), 0x2604_14ee);
    let with_sets = |sets: [&[u16]; 2]| {
        let sets = sets.into_iter().cycle().take(20).collect();
        checksum(Dataset { labels: vec![0; 20], label_sets: Some(sets), ..one_class_each.clone() })
    };
    let sums = [with_sets([&[1, 2], &[3]]), with_sets([&[1], &[2, 3]]), with_sets([&[1], &[]])];
    assert!(sums[0] != sums[1] && sums[0] != sums[2] && sums[1] != sums[2], "{sums:?}");

    let without_classes = Dataset { labels: vec![0; 20], ..one_class_each.clone() };
    let with_classes = Dataset {
        label_sets: Some(vec![vec![1u16]; 20].iter().map(Vec::as_slice).collect()),
        ..without_classes.clone()
    };
    let of_older_versions = loader(with_classes).eval_checksum_without_label_sets();
    assert_eq!(of_older_versions, Some(checksum(without_classes)));
    assert_eq!(loader(one_class_each).eval_checksum_without_label_sets(), None);
}

#[test]
fn the_partner_is_the_reversed_batch() {
    let plain = load(64, config(), 0, 0);
    let mixup = load(64, LoaderConfig { mixup: Some(1.0), ..config() }, 0, 0);
    for (plain, mixed) in plain.iter().zip(&mixup) {
        let mix = mixed.mix.as_ref().expect("a mix");
        assert!(mix.labels.iter().eq(plain.labels.iter().rev()));
        assert_eq!((&plain.labels, &plain.ids), (&mixed.labels, &mixed.ids));
        let partners = plain.images.chunks(SHAPE.len()).rev().flatten();
        for ((own, partner), mixed) in plain.images.iter().zip(partners).zip(&mixed.images) {
            assert_eq!(*mixed, mix.lambda * own + (1.0 - mix.lambda) * partner);
        }
    }
}

#[test]
fn a_half_consumed_epoch_can_be_dropped_and_another_begun() {
    let loader = Loader::new(dataset(100), LoaderConfig { workers: 2, prefetch: 3, ..config() }).unwrap();
    let expected: Vec<Batch> = loader.epoch(1, 0).map(Result::unwrap).collect();
    for taken in 0..4 {
        let mut epoch = loader.epoch(0, 0);
        assert_eq!(epoch.by_ref().take(taken).count(), taken);
        let next = loader.epoch(1, 0);
        drop(epoch);
        assert!(next.map(Result::unwrap).eq(expected.iter().cloned()));
    }
    // The iterator outlives the loader.
    let last = loader.epoch(1, 0);
    drop(loader);
    assert!(last.map(Result::unwrap).eq(expected));
}

#[test]
fn impossible_configurations_are_errors_with_a_hint() {
    let sides = |side| LoaderConfig { resize_stages: vec![ResizeStage { last_epoch: 1, side }], ..config() };
    let cases: [(&str, LoaderConfig); 19] = [
        ("global_batch: 0 is too few", LoaderConfig { global_batch: 0, ..config() }),
        ("workers: 0 is too few", LoaderConfig { workers: 0, ..config() }),
        (
            "global_batch: 4 samples per step cannot be shared by 8 workers",
            LoaderConfig { global_batch: 4, world_size: 8, ..config() },
        ),
        ("sampler: the world size is 0", LoaderConfig { world_size: 0, ..config() }),
        ("sampler: rank 2 is outside a world of 2", LoaderConfig { rank: 2, world_size: 2, ..config() }),
        (
            "global_batch: drop_last leaves nothing of 40 samples in batches of 64",
            LoaderConfig { global_batch: 64, drop_last: true, ..config() },
        ),
        ("mean: 1 values for images of 3 channels (3x8x6)", LoaderConfig { mean: vec![0.5], ..config() }),
        ("std: 0 values for images of 3 channels (3x8x6)", LoaderConfig { std: Vec::new(), ..config() }),
        (
            "augment: `crop:6` pads images of 3x8x6 by 6 pixels",
            LoaderConfig { augment: vec![Augment::Crop { padding: 6, fill: Fill::Zero }], ..config() },
        ),
        ("class_weights: 2 weights for 10 classes", LoaderConfig { class_weights: vec![1.0; 2], ..config() }),
        ("class_weights: -1 is not a weight", LoaderConfig { class_weights: vec![-1.0; 10], ..config() }),
        ("sampler_weights: NaN is not a weight", LoaderConfig { sampler_weights: vec![f64::NAN; 10], ..config() }),
        ("sampler_weights: no image has a weight above 0", LoaderConfig { sampler_weights: vec![0.0; 10], ..config() }),
        ("mixup: alpha = 0 is not a positive number", LoaderConfig { mixup: Some(0.0), ..config() }),
        ("cutmix: alpha = -2 is not a positive number", LoaderConfig { cutmix: Some(-2.0), ..config() }),
        ("image_sizes: images of 3x8x6 cannot be resized to a smaller side of 6", sides(6)),
        ("image_sizes: images of 3x8x6 cannot be resized to a smaller side of 0", sides(0)),
        (
            "image_sizes: images are resized on the host, by the loader",
            LoaderConfig { pixels: false, augment: Vec::new(), ..sides(4) },
        ),
        (
            "pixels: `rotation:20` computes pixels, and a device only gathers them",
            LoaderConfig { pixels: false, ..config() },
        ),
    ];
    for (message, config) in cases {
        let error = Loader::new(dataset(40), config).err().expect(message);
        assert_eq!(error.to_string(), message);
        assert!(!error.hint.is_empty(), "{message}");
    }
}

#[test]
fn impossible_data_sets_are_errors() {
    let error = |dataset| Loader::new(Arc::new(dataset), config()).err().expect("an error").to_string();
    let mut short = Dataset::clone(&dataset(10));
    short.images.pop();
    assert_eq!(error(short), "test: 1439 bytes of pixels for 10 images of 3x8x6");
    assert_eq!(error(Dataset::clone(&dataset(0))), "test: the data set has no images");
}
