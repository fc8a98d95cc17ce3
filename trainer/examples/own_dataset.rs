//! The trainer with a data set of your own: `data.name = "stripes"`. docs/library.md explains it.
//!
//!     cargo run --release --example own_dataset -- --config config.toml --cpus 2

use std::path::Path;
use std::process::ExitCode;

use data::formats::{CustomDataset, CustomSplits, LabelledImages};
use data::{DataError, ImageShape};

/// Side of an image in pixels.
const SIDE: usize = 16;

/// Makes grey images of stripes, which are vertical in class 0 and horizontal in class 1. A function that reads files would take
/// them from the folder, and name file, cause and remedy in a [`DataError`].
fn read(_folder: &Path) -> Result<CustomSplits, DataError> {
    let split = |count: usize, phase: usize| {
        let labels: Vec<u16> = (0..count).map(|image| (image % 2) as u16).collect();
        let image = |(index, &label): (usize, &u16)| {
            let pixel = move |at: usize| {
                let along = if label == 0 { at % SIDE } else { at / SIDE };
                let noise = (at * 31 + index * 17) % 64;
                (if (along + index / 2 + phase) % 4 < 2 { 160 } else { 32 } + noise) as u8
            };
            (0..SIDE * SIDE).map(pixel)
        };
        let images = labels.iter().enumerate().flat_map(image).collect();
        LabelledImages { images, labels }
    };
    Ok(CustomSplits { train: split(512, 0), test: split(128, 1) })
}

fn main() -> ExitCode {
    data::formats::register(CustomDataset {
        name: "stripes",
        description: "grey stripes, vertical or horizontal",
        shape: ImageShape { channels: 1, height: SIDE, width: SIDE },
        classes: &["vertical", "horizontal"],
        mean: &[0.5],
        std: &[0.25],
        read,
    });
    trainer::main()
}
