//! Measures the loader in images per second: `cargo bench -p benches --bench loader [-- BATCHES | -- jpeg [PYTHON]]`.
//!
//! `jpeg` measures JPEG files, beside torchvision (`files.rs`). Otherwise:
//! CIFAR-shaped random images, batches of 128, several configurations. One round runs every configuration for BATCHES
//! batches (default 391, an epoch of CIFAR-10). A machine that becomes slower therefore affects all configurations. The
//! table shows each configuration's median, slowest and fastest round.

mod files;

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use data::augment::{Augment, Fill};
use data::loader::{Batch, Loader, LoaderConfig};
use data::{DataError, Dataset, ImageShape};

const ROUNDS: usize = 9;
const IMAGES: usize = 50_000;

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let batches = match arguments.next() {
        Some(files) if files == "jpeg" => return files::measure(arguments.next().as_deref()),
        Some(argument) => argument.parse().map_err(|_| format!("`{argument}` is not a number of batches"))?,
        None => IMAGES.div_ceil(128),
    };
    let dataset = Arc::new(dataset());
    let mut rows = Vec::new();
    for (name, config) in configurations() {
        for workers in [1, 2] {
            let loader = Loader::new(Arc::clone(&dataset), LoaderConfig { workers, ..config.clone() })?;
            rows.push((name, workers, loader, Vec::new()));
        }
    }
    // Round 0 warms up caches and allocator and is not counted.
    for round in 0..=ROUNDS {
        for (_, _, loader, rates) in &mut rows {
            let rate = images_per_second(loader, round, batches);
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    println!("{:<40} {:>7} {:>12} {:>12} {:>12}", "augmentation", "workers", "images/s", "slowest", "fastest");
    for (name, workers, _, mut rates) in rows {
        rates.sort_by(f64::total_cmp);
        let (median, slowest, fastest) = (rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1]);
        println!("{name:<40} {workers:>7} {median:>12.0} {slowest:>12.0} {fastest:>12.0}");
    }
    Ok(())
}

/// Loads the first `batches` batches of an epoch and discards them.
fn images_per_second(loader: &Loader, epoch: usize, batches: usize) -> f64 {
    let start = Instant::now();
    let len = |batch: Result<Batch, DataError>| black_box(batch).map_or(0, |batch| batch.len());
    let images: usize = loader.epoch(epoch, 0).take(batches).map(len).sum();
    images as f64 / start.elapsed().as_secs_f64()
}

fn configurations() -> [(&'static str, LoaderConfig); 7] {
    let plain = LoaderConfig {
        global_batch: 128,
        mean: vec![0.4914, 0.4822, 0.4465],
        std: vec![0.2023, 0.1994, 0.2010],
        prefetch: 4,
        ..LoaderConfig::default()
    };
    let with = |augment: &[Augment]| LoaderConfig { augment: augment.to_vec(), ..plain.clone() };
    let crop = |fill| Augment::Crop { padding: 4, fill };
    let full = with(&[crop(Fill::Zero), Augment::Flip, Augment::Cutout { size: 8 }]);
    [
        ("normalise", plain.clone()),
        ("crop, flip, normalise", with(&[crop(Fill::Zero), Augment::Flip])),
        ("crop, flip, cutout, normalise", full.clone()),
        (
            "reflect-crop, flip, cutout, normalise",
            with(&[crop(Fill::Reflect), Augment::Flip, Augment::Cutout { size: 8 }]),
        ),
        ("crop, flip, cutout, normalise, mixup", LoaderConfig { mixup: Some(0.2), ..full }),
        ("crop, flip, trivial-augment, normalise", with(&[crop(Fill::Zero), Augment::Flip, Augment::TrivialAugment])),
        (
            "crop, flip, rand-augment, random-erasing, normalise",
            with(&[
                crop(Fill::Zero),
                Augment::Flip,
                Augment::RandAugment { magnitude: 9 },
                Augment::RandomErasing { probability: 0.5 },
            ]),
        ),
    ]
}

/// Returns noise in the shape of CIFAR-10's training set.
fn dataset() -> Dataset {
    let shape = ImageShape { channels: 3, height: 32, width: 32 };
    let mut state = 1u64;
    let mut byte = || {
        // Knuth's MMIX generator: its top bits are random enough for pixels.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    Dataset {
        name: "noise".into(),
        images: (0..IMAGES * shape.len()).map(|_| byte()).collect(),
        encoded: None,
        label_sets: None,
        shared: None,
        labels: (0..IMAGES).map(|i| (i % 10) as u16).collect(),
        shape,
        classes: (0..10).map(|i| i.to_string()).collect(),
    }
}
