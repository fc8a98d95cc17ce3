//! Operations on images compared with torchvision (`reference/operations.jsonl`), and the draws that choose them.

use std::collections::BTreeMap;

use data::ImageShape;
use data::augment::{Augment, AugmentParams, AutoAugmentPolicy, Operation, Pipeline};
use serde_json::Value;

const CIFAR: ImageShape = ImageShape { channels: 3, height: 32, width: 32 };

fn golden() -> Vec<Value> {
    include_str!("reference/operations.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn shape(line: &Value) -> ImageShape {
    let side = |at: usize| line["shape"][at].as_u64().unwrap() as usize;
    ImageShape { channels: side(0), height: side(1), width: side(2) }
}

fn bytes(digits: &str) -> Vec<u8> {
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

/// The same image as in `make_operations_golden.py`.
fn image(shape: ImageShape) -> Vec<u8> {
    (0..shape.len()).map(|i| ((i * 37 + i / 5 * 11) % 180 + 20) as u8).collect()
}

fn operation(name: &str, strength: f64) -> Option<Operation> {
    Some(match name {
        "Identity" => return None,
        "ShearX" => Operation::ShearX(strength),
        "ShearY" => Operation::ShearY(strength),
        "TranslateX" => Operation::TranslateX(strength as i32),
        "TranslateY" => Operation::TranslateY(strength as i32),
        "Rotate" => Operation::Rotate(strength),
        "Brightness" => Operation::Brightness(1.0 + strength),
        "Color" => Operation::Saturation(1.0 + strength),
        "Contrast" => Operation::Contrast(1.0 + strength),
        "Sharpness" => Operation::Sharpness(1.0 + strength),
        "Posterize" => Operation::Posterize(strength as u32),
        "Solarize" => Operation::Solarize(strength as f32),
        "AutoContrast" => Operation::AutoContrast,
        "Equalize" => Operation::Equalize,
        other => panic!("operation {other}"),
    })
}

#[test]
fn every_operation_equals_torchvisions() {
    let mut cases = BTreeMap::<String, usize>::new();
    for line in golden().iter().filter(|line| line["operation"].is_string()) {
        let (name, shape) = (line["operation"].as_str().unwrap(), shape(line));
        let mut pixels = match line["flat"].as_u64() {
            Some(value) => vec![value as u8; shape.len()],
            None => image(shape),
        };
        if let Some(operation) = operation(name, line["strength"].as_f64().unwrap_or(0.0)) {
            operation.apply(&mut pixels, shape);
        }
        assert_eq!(pixels, bytes(line["result"].as_str().unwrap()), "{name} {} {shape}", line["strength"]);
        *cases.entry(name.to_owned()).or_default() += 1;
    }
    assert_eq!(cases.len(), 14, "{cases:?}");
    assert!(cases["Rotate"] >= 12 && cases["Equalize"] >= 3, "{cases:?}");
}

#[test]
fn inverted_values_are_torchvisions() {
    let golden: Value = serde_json::from_str(include_str!("reference/auto_augment.json")).unwrap();
    let mut values: Vec<u8> = (0..=255).collect();
    Operation::Invert.apply(&mut values, ImageShape { channels: 1, height: 16, width: 16 });
    assert_eq!(values, bytes(golden["inverted"].as_str().unwrap()));
}

#[test]
fn equalizing_spreads_the_values_as_torchvision_does() {
    let lines = golden();
    let table = lines.iter().find_map(|line| line["equalized"].as_array()).unwrap();
    let shape = ImageShape { channels: 1, height: 40, width: 40 };
    let before: Vec<u8> = (0..shape.len()).map(|i| (i % 23 * 3) as u8).collect();
    let mut after = before.clone();
    Operation::Equalize.apply(&mut after, shape);
    for pair in table {
        let (from, to) = (pair[0].as_u64().unwrap() as u8, pair[1].as_u64().unwrap() as u8);
        let seen = before.iter().zip(&after).filter(|(before, _)| **before == from).map(|(_, after)| *after);
        assert!(seen.clone().count() > 0 && seen.clone().all(|after| after == to), "{from}: {seen:?}");
    }
}

/// torchvision computes in f32 too, and may round elsewhere: within one level.
#[test]
fn turned_hues_are_torchvisions() {
    let lines = golden();
    let hues: Vec<_> = lines.iter().filter(|line| line["hue"].is_number()).collect();
    assert_eq!(hues.len(), 10);
    for line in hues {
        let (shape, hue) = (shape(line), line["hue"].as_f64().unwrap());
        let before = bytes(line["before"].as_str().unwrap());
        let mut after = before.clone();
        Operation::Hue(hue).apply(&mut after, shape);
        let expected = bytes(line["result"].as_str().unwrap());
        let worst = after.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(worst <= 1, "{hue}, {shape}: {worst} levels");
        assert_ne!(after, before, "{hue}");
        // The first row is grey.
        let plane = shape.height * shape.width;
        for row in [0, plane, 2 * plane] {
            assert!(after[row..][..shape.width].iter().zip(&before[row..]).all(|(a, b)| a.abs_diff(*b) <= 1), "{hue}");
        }
        let mut grey = before[..plane].to_vec();
        Operation::Hue(hue).apply(&mut grey, ImageShape { channels: 1, ..shape });
        assert_eq!(grey, before[..plane]);
    }
}

#[test]
fn color_jitter_turns_hues_when_asked_to_and_draws_the_rest_as_before() {
    let (plain, turning) =
        (Augment::ColorJitter { strength: 0.4, hue: 0.0 }, Augment::ColorJitter { strength: 0.4, hue: 0.1 });
    let turn = |operation: &Operation| match operation {
        Operation::Hue(turn) => Some(*turn),
        _ => None,
    };
    let (mut first, mut turns) = (0, Vec::new());
    for id in 0..2000 {
        let drawn = pipeline(&[turning]).params(5, 1, id).operations;
        assert_eq!(drawn.len(), 4);
        turns.extend(drawn.iter().filter_map(turn));
        first += usize::from(turn(&drawn[0]).is_some());
        let mut others: Vec<_> =
            drawn.into_iter().filter(|operation| turn(operation).is_none()).map(|o| format!("{o:?}")).collect();
        let mut plain: Vec<_> =
            pipeline(&[plain]).params(5, 1, id).operations.iter().map(|o| format!("{o:?}")).collect();
        others.sort();
        plain.sort();
        assert_eq!(others, plain, "the same factors");
    }
    let extent = turns.iter().fold(0.0f64, |most, turn| most.max(turn.abs()));
    let mean = turns.iter().sum::<f64>() / turns.len() as f64;
    assert!(turns.len() == 2000 && extent <= 0.1 && extent > 0.099 && mean.abs() < 0.005, "{extent} {mean}");
    assert!((400..600).contains(&first), "any order: {first}");
}

fn pipeline(augment: &[Augment]) -> Pipeline {
    Pipeline::new(augment, &[0.5; 3], &[0.25; 3], CIFAR).unwrap()
}

#[test]
fn operations_come_after_crop_and_flip_and_before_the_cut() {
    let operations = vec![Operation::Posterize(3), Operation::TranslateX(2)];
    let pipeline = pipeline(&[]);
    let (source, mut out) = (image(CIFAR), vec![0.0; CIFAR.len()]);
    let cut = data::augment::Rect { top: 4, bottom: 9, left: 0, right: 7 };
    let params = AugmentParams {
        dy: 3,
        dx: -2,
        flip: true,
        vertical_flip: true,
        operations: operations.clone(),
        cut: Some(cut),
    };
    pipeline.apply(&source, &params, &mut out);

    // The same in steps: without a mean, a deviation of 1/255 keeps the pixels' values.
    let plain = Pipeline::new(&[], &[0.0; 3], &[1.0 / 255.0; 3], CIFAR).unwrap();
    let mut cropped = vec![0.0; CIFAR.len()];
    plain.apply(&source, &AugmentParams { operations: vec![], cut: None, ..params.clone() }, &mut cropped);
    let mut pixels: Vec<u8> = cropped.iter().map(|x| x.round() as u8).collect();
    operations.iter().for_each(|operation| operation.apply(&mut pixels, CIFAR));
    let mut expected = vec![0.0; CIFAR.len()];
    pipeline.apply(&pixels, &AugmentParams { cut: Some(cut), ..AugmentParams::default() }, &mut expected);
    assert_eq!(out, expected);
}

#[test]
fn trivial_augment_draws_every_operation_equally_often() {
    let pipeline = pipeline(&[Augment::TrivialAugment]);
    let mut counts = BTreeMap::<String, u32>::new();
    for id in 0..28_000 {
        let params = pipeline.params(3, 1, id);
        assert_eq!(params, pipeline.params(3, 1, id));
        assert!(params.operations.len() <= 1);
        let name = params.operations.first().map_or("Identity".into(), |operation| format!("{operation:?}"));
        *counts.entry(name.split('(').next().unwrap().to_owned()).or_default() += 1;
    }
    // 2,000 each; chi-squared at its 99.9 % quantile for 13 degrees of freedom.
    let chi: f64 = counts.values().map(|&count| (f64::from(count) - 2_000.0).powi(2) / 2_000.0).sum();
    assert!(counts.len() == 14 && chi < 34.5, "{chi}: {counts:?}");
}

#[test]
fn rand_augment_draws_two_operations_of_one_strength() {
    let pipeline = pipeline(&[Augment::RandAugment { magnitude: 30 }]);
    let (mut twice, mut left) = (0, 0);
    for id in 0..5_000 {
        let operations = pipeline.params(3, 1, id).operations;
        assert!(operations.len() <= 2);
        twice += usize::from(operations.len() == 2);
        for operation in operations {
            match operation {
                // 150 of 331 pixels, as in the paper: 14 of 32.
                Operation::TranslateX(pixels) => {
                    assert_eq!(pixels.abs(), 14);
                    left += usize::from(pixels < 0);
                }
                Operation::Rotate(degrees) => assert_eq!(degrees.abs(), 30.0),
                Operation::Posterize(bits) => assert_eq!(bits, 4),
                _ => {}
            }
        }
    }
    // (13/14)^2 of 5,000 is 4,311; 5,000 * 2 / 14 / 2 is 357. Four standard deviations each.
    assert!((4_213..4_410).contains(&twice) && (284..430).contains(&left), "{twice} {left}");
}

#[test]
fn auto_augment_draws_the_sub_policies_with_their_probabilities() {
    for policy in AutoAugmentPolicy::ALL {
        let golden: Value = serde_json::from_str(include_str!("reference/auto_augment.json")).unwrap();
        let pairs = golden["policies"][policy.name()].as_array().unwrap();
        let pipeline = pipeline(&[Augment::AutoAugment { policy }]);
        let samples = 10_000;
        let mut counts = BTreeMap::<String, u32>::new();
        let mut right = 0;
        for id in 0..samples {
            for operation in pipeline.params(3, 1, id).operations {
                let name = format!("{operation:?}").split('(').next().unwrap().replace("Saturation", "Color");
                *counts.entry(name).or_default() += 1;
                right += u32::from(matches!(operation, Operation::TranslateX(pixels) if pixels > 0));
            }
        }
        // The expected number of each operation, and five standard deviations of a sum of at most two draws.
        let mut expected = BTreeMap::<String, f64>::new();
        for step in pairs.iter().flat_map(|pair| pair.as_array().unwrap()) {
            let share = step[1].as_f64().unwrap() / pairs.len() as f64;
            *expected.entry(step[0].as_str().unwrap().to_owned()).or_default() += f64::from(samples) * share;
        }
        for (name, &expected) in &expected {
            let drawn = f64::from(counts.get(name).copied().unwrap_or(0));
            assert!(
                (drawn - expected).abs() <= 5.0 * (2.0 * expected).sqrt(),
                "{policy:?} {name}: {drawn}, {expected}"
            );
        }
        assert!(counts.keys().all(|name| expected.contains_key(name)), "{counts:?}");
        if let Some(&all) = counts.get("TranslateX") {
            let right = f64::from(right) / f64::from(all);
            assert!((0.4..0.6).contains(&right), "half of the translations go left: {right}");
        }
    }
}

#[test]
fn rotations_are_uniform_and_come_before_a_policy() {
    let rotation = Augment::Rotation { degrees: 15.0 };
    let angle = |augment: &[Augment], id| match pipeline(augment).params(3, 1, id).operations[..] {
        [Operation::Rotate(angle), ..] => angle,
        ref other => panic!("{other:?}"),
    };
    let mut quarters = [0; 4];
    for id in 0..4_000 {
        let drawn = angle(&[rotation], id);
        quarters[((drawn + 15.0) / 7.5) as usize] += 1;
        assert_eq!(angle(&[Augment::TrivialAugment, rotation], id), drawn);
    }
    // 1,000 each; chi-squared at its 99.9 % quantile for 3 degrees of freedom.
    let chi: f64 = quarters.iter().map(|&count| (f64::from(count) - 1_000.0).powi(2) / 1_000.0).sum();
    assert!(chi < 16.3, "{chi}: {quarters:?}");
    let plain = pipeline(&[Augment::TrivialAugment]).params(3, 1, 5).operations;
    assert_eq!(pipeline(&[Augment::TrivialAugment, rotation]).params(3, 1, 5).operations[1..], plain);
}

#[test]
fn color_jitter_draws_each_factor_in_any_order() {
    let pipeline = pipeline(&[Augment::ColorJitter { strength: 0.4, hue: 0.0 }]);
    let mut orders = BTreeMap::<String, u32>::new();
    let (mut low, mut high) = (f64::MAX, f64::MIN);
    for id in 0..6_000 {
        let operations = pipeline.params(3, 1, id).operations;
        let mut order = String::new();
        for operation in &operations {
            let (Operation::Brightness(factor) | Operation::Contrast(factor) | Operation::Saturation(factor)) =
                operation
            else {
                panic!("{operation:?}")
            };
            (low, high) = (low.min(*factor), high.max(*factor));
            order.push(format!("{operation:?}").chars().next().unwrap());
        }
        *orders.entry(order).or_default() += 1;
    }
    assert!((0.6..0.601).contains(&low) && (1.399..1.4).contains(&high), "{low} {high}");
    // 1,000 each; chi-squared at its 99.9 % quantile for 5 degrees of freedom.
    let chi: f64 = orders.values().map(|&count| (f64::from(count) - 1_000.0).powi(2) / 1_000.0).sum();
    assert!(orders.len() == 6 && chi < 20.5, "{chi}: {orders:?}");
}

#[test]
fn random_erasing_draws_areas_and_ratios_of_the_paper() {
    let pipeline = pipeline(&[Augment::RandomErasing { probability: 0.25 }]);
    let mut erased = 0;
    let (mut small, mut large) = (f64::MAX, f64::MIN);
    for id in 0..8_000 {
        let Some(rect) = pipeline.params(3, 1, id).cut else { continue };
        erased += 1;
        assert!(rect.bottom <= 32 && rect.right <= 32 && rect.area() > 0);
        let ratio = (rect.bottom - rect.top) as f64 / (rect.right - rect.left) as f64;
        assert!((0.2..5.0).contains(&ratio), "{rect:?}");
        (small, large) = (small.min(rect.area() as f64), large.max(rect.area() as f64));
    }
    // Four standard deviations around 2,000. Rounding the sides changes the areas of 20 to 338 pixels a little.
    assert!((1_845..2_155).contains(&erased), "{erased}");
    assert!((14.0..26.0).contains(&small) && (320.0..360.0).contains(&large), "{small} {large}");
}

#[test]
fn one_augmentation_does_not_change_the_draws_of_another() {
    let crop = Augment::Crop { padding: 4, fill: data::augment::Fill::Zero };
    let (jitter, erasing) =
        (Augment::ColorJitter { strength: 0.4, hue: 0.0 }, Augment::RandomErasing { probability: 1.0 });
    let together = pipeline(&[erasing, jitter, crop, Augment::VerticalFlip, Augment::Flip]).params(1, 2, 3);
    let alone = pipeline(&[crop, Augment::Flip]).params(1, 2, 3);
    assert_eq!((alone.dy, alone.dx, alone.flip), (together.dy, together.dx, together.flip));
    assert_eq!(pipeline(&[jitter]).params(1, 2, 3).operations, together.operations);
    assert_eq!(pipeline(&[erasing]).params(1, 2, 3).cut, together.cut);
}

#[test]
fn impossible_strengths_are_errors() {
    let error = |augment: &[Augment], shape: ImageShape| {
        let statistics = vec![0.5; shape.channels];
        Pipeline::new(augment, &statistics, &statistics, shape).expect_err("no such pipeline").to_string()
    };
    for (augment, cause) in [
        (Augment::RandAugment { magnitude: 31 }, "augment: `rand-augment:31` is too strong"),
        (
            Augment::ColorJitter { strength: 0.4, hue: 0.6 },
            "augment: the hue of `color-jitter:0.4:0.6` is out of range",
        ),
        (Augment::ColorJitter { strength: 0.0, hue: 0.0 }, "augment: the strength of `color-jitter:0` is out of range"),
        (
            Augment::ColorJitter { strength: f64::NAN, hue: 0.0 },
            "augment: the strength of `color-jitter:NaN` is out of range",
        ),
        (Augment::Rotation { degrees: 0.0 }, "augment: the angle of `rotation:0` is out of range"),
        (Augment::Rotation { degrees: 180.5 }, "augment: the angle of `rotation:180.5` is out of range"),
        (
            Augment::RandomErasing { probability: 1.5 },
            "augment: the probability of `random-erasing:1.5` is out of range",
        ),
        (Augment::RandomResizedCrop { scale: 2.0 }, "augment: the scale of `random-resized-crop:2` is out of range"),
    ] {
        assert_eq!(error(&[augment], CIFAR), cause);
    }
    let two = ImageShape { channels: 2, height: 4, width: 4 };
    let policy = AutoAugmentPolicy::Cifar10;
    for (augment, name) in
        [(Augment::TrivialAugment, "trivial-augment"), (Augment::AutoAugment { policy }, "auto-augment:cifar10")]
    {
        assert_eq!(error(&[augment], two), format!("augment: `{name}` cannot change images of 2x4x4"));
    }
    assert_eq!(
        error(&[Augment::TrivialAugment, Augment::RandAugment { magnitude: 9 }], CIFAR),
        "augment: `trivial-augment` and `rand-augment:9` exclude each other"
    );
}
