//! Augmentation compared with a naive implementation, and the statistics of its parameters.

use data::ImageShape;
use data::augment::{Augment, AugmentParams, Fill, MixConfig, MixParams, Pipeline, Rect};
use proptest::prelude::*;

const CIFAR: ImageShape = ImageShape { channels: 3, height: 32, width: 32 };

fn pipeline(augment: &[Augment], shape: ImageShape) -> Pipeline {
    let mean: Vec<f32> = (0..shape.channels).map(|c| 0.4 + 0.05 * c as f32).collect();
    let std: Vec<f32> = (0..shape.channels).map(|c| 0.2 + 0.01 * c as f32).collect();
    Pipeline::new(augment, &mean, &std, shape).unwrap()
}

fn image(shape: ImageShape) -> Vec<u8> {
    (0..shape.len()).map(|i| (i * 197 + i / 7 + 3) as u8).collect()
}

/// Computes the result of `Pipeline::apply` pixel by pixel and step by step: pad, take the window, mirror, normalise, cut.
fn naive(image: &[u8], shape: ImageShape, padding: usize, fill: Fill, params: &AugmentParams) -> Vec<f32> {
    let (height, width, padding) = (shape.height as i64, shape.width as i64, padding as i64);
    let reflect = |at: i64, side: i64| {
        if at < 0 {
            -at
        } else if at >= side {
            2 * (side - 1) - at
        } else {
            at
        }
    };
    let padded = |channel: i64, y: i64, x: i64| {
        let (y, x) = (y - padding, x - padding);
        if fill == Fill::Zero && (y < 0 || y >= height || x < 0 || x >= width) {
            return 0;
        }
        image[((channel * height + reflect(y, height)) * width + reflect(x, width)) as usize]
    };
    let mut out = Vec::new();
    for channel in 0..shape.channels as i64 {
        for y in 0..height {
            for x in 0..width {
                let column = if params.flip { width - 1 - x } else { x };
                let row = if params.vertical_flip { height - 1 - y } else { y };
                let pixel =
                    padded(channel, row + padding + i64::from(params.dy), column + padding + i64::from(params.dx));
                let mean = 0.4 + 0.05 * channel as f32;
                let std = 0.2 + 0.01 * channel as f32;
                let cut = params.cut.is_some_and(|cut| {
                    (cut.top..cut.bottom).contains(&(y as usize)) && (cut.left..cut.right).contains(&(x as usize))
                });
                out.push(if cut { 0.0 } else { (f32::from(pixel) / 255.0 - mean) / std });
            }
        }
    }
    out
}

/// Gathers the image from its source rows and columns, as a device does.
fn gathered(image: &[u8], shape: ImageShape, pipeline: &Pipeline, params: &AugmentParams) -> Vec<f32> {
    let values: Vec<f32> = pipeline.values().collect();
    let mut out = Vec::new();
    for channel in 0..shape.channels {
        for row in pipeline.rows(params) {
            for column in pipeline.columns(params) {
                let pixel = match (row.source, column.source) {
                    (Some(y), Some(x)) => image[(channel * shape.height + y) * shape.width + x],
                    _ => 0,
                };
                let cut = row.cut && column.cut;
                out.push(if cut { 0.0 } else { values[channel * 256 + usize::from(pixel)] });
            }
        }
    }
    out
}

proptest! {
    #[test]
    fn apply_equals_the_naive_implementation(
        channels in 1usize..4, height in 2usize..12, width in 2usize..12, padding in 1usize..11, size in 1usize..12,
        reflect: bool, flips in 0..3, vertical_flip: bool, cut: bool, seed: u64, epoch in 0usize..1000, id: u32,
    ) {
        let shape = ImageShape { channels, height, width };
        let side = height.min(width);
        let padding = padding.min(side - 1);
        let fill = if reflect { Fill::Reflect } else { Fill::Zero };
        let mut augment = vec![Augment::Crop { padding, fill }];
        match flips {
            0 => {}
            1 => augment.push(Augment::Flip),
            _ => augment.push(Augment::AlternatingFlip),
        }
        if vertical_flip {
            augment.push(Augment::VerticalFlip);
        }
        if cut {
            augment.push(Augment::Cutout { size: size.min(side) });
        }
        let pipeline = pipeline(&augment, shape);
        let params = pipeline.params(seed, epoch, id);
        prop_assert!(params.dy.unsigned_abs() as usize <= padding && params.dx.unsigned_abs() as usize <= padding);
        let image = image(shape);
        let mut out = vec![f32::NAN; shape.len()];
        pipeline.apply(&image, &params, &mut out);
        prop_assert_eq!(&out, &naive(&image, shape, padding, fill, &params));
        prop_assert_eq!(out, gathered(&image, shape, &pipeline, &params));
    }

    #[test]
    fn flipping_twice_changes_nothing(height in 1usize..9, width in 1usize..9) {
        let shape = ImageShape { channels: 1, height, width };
        // Mean 0 and deviation 1/255 keep the pixel values, so the output can be an input again.
        let pipeline = Pipeline::new(&[Augment::Flip], &[0.0], &[1.0 / 255.0], shape).unwrap();
        let image = image(shape);
        for (flip, vertical_flip) in [(true, false), (false, true), (true, true)] {
            let flips = AugmentParams { flip, vertical_flip, ..AugmentParams::default() };
            let once = |image: &[u8]| {
                let mut out = vec![0.0; shape.len()];
                pipeline.apply(image, &flips, &mut out);
                out.iter().map(|x| x.round() as u8).collect::<Vec<u8>>()
            };
            prop_assert_eq!(once(&once(&image)), image.clone());
        }
    }
}

#[test]
fn normalisation_equals_pytorch() {
    // (torch.tensor([0., 1., 128., 254., 255.]) / 255 - torch.tensor(0.4914)) / torch.tensor(0.2023), all digits.
    let expected: [f32; 5] = [-2.429_065_7, -2.409_680_8, 0.052_203_71, 2.494_703, 2.514_088];
    let shape = ImageShape { channels: 1, height: 1, width: 5 };
    let pipeline = Pipeline::new(&[], &[0.4914], &[0.2023], shape).unwrap();
    let mut out = [0.0; 5];
    pipeline.apply(&[0, 1, 128, 254, 255], &AugmentParams::default(), &mut out);
    assert_eq!(out, expected);
}

#[test]
fn reflection_equals_numpy() {
    // numpy.pad([10, 20, 30, 40], 2, mode="reflect") is [30, 20, 10, 20, 30, 40, 30, 20].
    let shape = ImageShape { channels: 1, height: 4, width: 4 };
    let crop = Augment::Crop { padding: 2, fill: Fill::Reflect };
    let pipeline = Pipeline::new(&[crop], &[0.0], &[1.0 / 255.0], shape).unwrap();
    let rows: Vec<u8> = [10u8, 20, 30, 40].repeat(4);
    let columns: Vec<u8> = [10u8, 20, 30, 40].iter().flat_map(|&x| [x; 4]).collect();
    let padded = [30.0, 20.0, 10.0, 20.0, 30.0, 40.0, 30.0, 20.0];
    for offset in -2..=2i32 {
        let window = &padded[(offset + 2) as usize..][..4];
        let mut out = [0.0f32; 16];
        pipeline.apply(&rows, &AugmentParams { dx: offset, ..AugmentParams::default() }, &mut out);
        assert!(
            out.chunks(4).all(|row| row.iter().zip(window).all(|(x, y)| (x - y).abs() < 1e-3)),
            "{offset}: {out:?}"
        );
        pipeline.apply(&columns, &AugmentParams { dy: offset, ..AugmentParams::default() }, &mut out);
        assert!(
            out.chunks(4).zip(window).all(|(row, y)| row.iter().all(|x| (x - y).abs() < 1e-3)),
            "{offset}: {out:?}"
        );
    }
}

/// Chi-squared of counts that should be equal.
fn chi_squared(counts: &[u32]) -> f64 {
    let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    counts.iter().map(|&count| (f64::from(count) - expected).powi(2) / expected).sum()
}

#[test]
fn offsets_flips_and_centres_are_uniform_and_independent() {
    let crop = Augment::Crop { padding: 4, fill: Fill::Zero };
    let augment = [crop, Augment::Flip, Augment::VerticalFlip, Augment::Cutout { size: 8 }];
    let pipeline = pipeline(&augment, CIFAR);
    // 9 x 9 offsets x 4 orientations, over neighbouring seeds, epochs and ids.
    let mut joint = vec![0u32; 324];
    let mut centres = vec![0u32; 32];
    let mut repeated = 0;
    for (seed, epoch) in [(0, 0), (0, 1), (1, 0), (1, 1), (u64::MAX, 200)] {
        for id in 0..20_000 {
            let params = pipeline.params(seed, epoch, id);
            let at = (params.dy + 4) * 9 + params.dx + 4;
            joint[(at * 4 + i32::from(params.flip) * 2 + i32::from(params.vertical_flip)) as usize] += 1;
            let cut = params.cut.expect("a cutout");
            let centre = if cut.top > 0 { cut.top + 4 } else { cut.bottom - 4 };
            centres[centre] += 1;
            repeated += u32::from(params == pipeline.params(seed, epoch + 1, id));
        }
    }
    // The 99.9 % quantiles for 323 and 31 degrees of freedom. The draws are fixed, so the test never changes.
    assert!(chi_squared(&joint) < 405.0, "{}", chi_squared(&joint));
    assert!(chi_squared(&centres) < 61.1, "{}", chi_squared(&centres));
    // Parameters differ between epochs. By chance 100,000 pairs agree about 100,000 / (324 * 32 * 32) = 0.3 times.
    assert!(repeated < 6, "{repeated}");
}

#[test]
fn alternating_flip_alternates_from_a_random_half() {
    let pipeline = pipeline(&[Augment::AlternatingFlip], CIFAR);
    let flipped = |epoch, id| pipeline.params(9, epoch, id).flip;
    let started = (0..10_000).filter(|&id| flipped(0, id)).count();
    assert!((4_800..5_200).contains(&started), "{started}");
    for id in 0..100 {
        for epoch in 0..10 {
            assert_ne!(flipped(epoch, id), flipped(epoch + 1, id));
        }
    }
}

#[test]
fn one_augmentation_does_not_change_the_parameters_of_another() {
    let crop = Augment::Crop { padding: 4, fill: Fill::Zero };
    let alone = pipeline(&[crop], CIFAR).params(1, 2, 3);
    let together = pipeline(&[Augment::Cutout { size: 8 }, Augment::Flip, crop], CIFAR).params(1, 2, 3);
    assert_eq!((alone.dy, alone.dx), (together.dy, together.dx));
}

/// A GPU applies these parameters too, and old checkpoints resume with them. They must therefore never change; a few lines of
/// Python compute the same values with the documented hash.
#[test]
fn parameters_do_not_change_between_versions() {
    let augment = [Augment::Crop { padding: 4, fill: Fill::Zero }, Augment::Flip, Augment::Cutout { size: 8 }];
    let pipeline = pipeline(&augment, CIFAR);
    let drawn: Vec<AugmentParams> = [(0, 0, 0), (42, 3, 49_999)].map(|(s, e, i)| pipeline.params(s, e, i)).into();
    let cut = |top, bottom, left, right| Some(Rect { top, bottom, left, right });
    assert_eq!(
        drawn,
        [
            AugmentParams { dy: 1, dx: 3, flip: true, cut: cut(8, 16, 0, 6), ..AugmentParams::default() },
            AugmentParams { dy: 1, dx: 4, flip: false, cut: cut(15, 23, 11, 19), ..AugmentParams::default() },
        ]
    );
}

#[test]
fn impossible_pipelines_are_errors() {
    let crop = |padding| Augment::Crop { padding, fill: Fill::Reflect };
    let error = |augment: &[Augment], mean: &[f32], std: &[f32]| {
        Pipeline::new(augment, mean, std, CIFAR).expect_err("no such pipeline").to_string()
    };
    let (mean, std) = (&[0.5; 3][..], &[0.2; 3][..]);
    assert_eq!(error(&[crop(32)], mean, std), "augment: `reflect-crop:32` pads images of 3x32x32 by 32 pixels");
    assert_eq!(error(&[crop(0)], mean, std), "augment: `reflect-crop:0` does nothing");
    assert_eq!(
        error(&[Augment::Cutout { size: 33 }], mean, std),
        "augment: `cutout:33` cuts 33 pixels out of images of 3x32x32"
    );
    assert_eq!(
        error(&[Augment::Flip, crop(4), Augment::AlternatingFlip], mean, std),
        "augment: `flip` and `alternating-flip` exclude each other"
    );
    assert_eq!(error(&[], &[0.5], std), "mean: 1 values for images of 3 channels (3x32x32)");
    assert_eq!(error(&[], mean, &[0.2; 4]), "std: 4 values for images of 3 channels (3x32x32)");
    assert_eq!(error(&[], mean, &[0.2, 0.0, 0.2]), "std: 0 is not a positive number");
    assert_eq!(error(&[], &[0.2, f32::NAN, 0.2], std), "mean: NaN is not a number");
    assert!(Pipeline::new(&[crop(31)], mean, std, CIFAR).is_ok());
}

#[test]
fn mixup_blends_and_cutmix_replaces() {
    let shape = ImageShape { channels: 2, height: 2, width: 3 };
    let (mut own, partner) = ([1.0; 12], [3.0; 12]);
    MixParams::Mixup { lambda: 0.75 }.apply(&mut own, &partner, shape);
    assert_eq!(own, [1.5; 12]);
    let mut own = [1.0; 12];
    let rect = Rect { top: 1, bottom: 2, left: 1, right: 3 };
    MixParams::Cutmix { lambda: 2.0 / 3.0, rect }.apply(&mut own, &partner, shape);
    assert_eq!(own, [1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]);
}

#[test]
fn batches_are_mixed_by_seed_epoch_and_index() {
    let both = MixConfig::new(Some(1.0), Some(1.0)).unwrap();
    let (mut mixups, mut lambdas) = (0, 0.0);
    for index in 0..4_000 {
        let mix = both.params(7, 1, index, CIFAR).expect("a mix");
        assert_eq!(Some(mix), both.params(7, 1, index, CIFAR));
        assert_ne!(Some(mix), both.params(7, 2, index, CIFAR));
        assert!((0.0..=1.0).contains(&mix.lambda()));
        match mix {
            MixParams::Mixup { lambda } => (mixups, lambdas) = (mixups + 1, lambdas + lambda),
            MixParams::Cutmix { lambda, rect } => {
                assert!(rect.bottom <= 32 && rect.right <= 32);
                assert_eq!(lambda, 1.0 - rect.area() as f32 / 1024.0);
            }
        }
    }
    // Probability 1/2 and mean 1/2, each within four standard deviations.
    assert!((1_874..2_126).contains(&mixups), "{mixups}");
    assert!((lambdas / mixups as f32 - 0.5).abs() < 0.026, "{lambdas}");
    assert_eq!(MixConfig::default().params(7, 1, 0, CIFAR), None);
    let only = |mixup, cutmix| MixConfig::new(mixup, cutmix).unwrap().params(7, 1, 0, CIFAR);
    assert!(matches!(only(Some(0.2), None), Some(MixParams::Mixup { .. })));
    assert!(matches!(only(None, Some(0.2)), Some(MixParams::Cutmix { .. })));
}

#[test]
fn impossible_alphas_are_errors() {
    for alpha in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = MixConfig::new(None, Some(alpha)).unwrap_err();
        assert_eq!(error.to_string(), format!("cutmix: alpha = {alpha} is not a positive number"));
    }
}
