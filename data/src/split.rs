//! A part of the training set that is held out for validation, and the fraction of the rest that is trained on.
//!
//! Both parts are stratified: of a class with `n` images `round(n * validation)` are held out. Which ones depends on the seed and
//! on the labels alone: the training set is permuted as by `torch.randperm(len(train), generator)` with the generator's seed
//! `seed`, and the first images of each class in this order are held out. The next images of the class are trained on. So the
//! images of a smaller fraction are among those of a larger one, and the fraction does not change the validation split. Both
//! parts keep the data set's order.
//!
//! The images of a multi-label data set are not stratified: they count as one class here. A choice that leaves a class without
//! training images is an error.

use crate::label_sets::first_missing_class;
use crate::memory::available_memory;
use crate::sampler::{SamplerError, permutation};
use crate::{DataError, Dataset, Splits};

/// Which part of the training set to hold out, and which part of the rest to keep.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SplitOptions {
    /// Fraction of each class's training images that becomes the validation split, in (0, 1). `None` holds nothing out.
    pub validation: Option<f64>,
    /// Fraction of each class's other training images to keep, in (0, 1]. `None` keeps all.
    pub fraction: Option<f64>,
    /// Seed of the choice.
    pub seed: u64,
}

/// The training images that a run does not train on, as positions in the training set before the split.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SplitRecord {
    /// Number of training images before the split.
    pub images: usize,
    /// The validation split, in ascending order.
    pub validation: Vec<u32>,
    /// Images of no split, in ascending order.
    pub unused: Vec<u32>,
    /// [`Splits::names_crc`]: positions mean the same images only while the checksum stays the same.
    pub names_crc: Option<u32>,
}

/// Splits the training set. A data set without test images is tested on the part that is held out.
///
/// # Errors
/// A fraction is out of range or leaves a class without images. The data set has a validation split already, or more images than
/// a `u32` can number, or the memory is not sufficient for the copy. The error's place is the option's name.
pub fn split(mut splits: Splits, options: &SplitOptions) -> Result<Splits, DataError> {
    if options.validation.is_none() && options.fraction.is_none() {
        return Ok(splits);
    }
    if let (Some(_), Some(val)) = (options.validation, &splits.val) {
        let cause = format!("the data set has a validation split of {} images already", val.len());
        return Err(error("validation", cause, "leave data.validation out, or remove the split from the data set"));
    }
    let train = &mut splits.train;
    let (kept, record) = partition(train, options)?;
    if options.validation.is_some() {
        if train.encoded.is_none() {
            check_memory(record.validation.len() * train.shape.len())?;
        }
        let held_out = train.select(&record.validation);
        if splits.test.is_empty() {
            splits.test = held_out;
        } else {
            splits.val = Some(held_out);
        }
    }
    train.keep(&kept);
    splits.record = Some(SplitRecord { names_crc: splits.names_crc, ..record });
    Ok(splits)
}

/// Returns the images to train on, in ascending order, and the other ones.
fn partition(train: &Dataset, options: &SplitOptions) -> Result<(Vec<u32>, SplitRecord), DataError> {
    let len = u32::try_from(train.len()).map_err(|_| SamplerError::TooManySamples { len: train.len() })?;
    let sizes = strata(train);
    let held_out = match options.validation {
        None => vec![0; sizes.len()],
        Some(fraction) => counts_per_class("validation", fraction, &sizes, train)?,
    };
    let rest: Vec<usize> = sizes.iter().zip(&held_out).map(|(all, held_out)| all - held_out).collect();
    if options.validation.is_some()
        && let Some(class) = (0..sizes.len()).find(|&class| sizes[class] > 0 && rest[class] == 0)
    {
        let fraction = options.validation.unwrap_or_default();
        let cause =
            format!("{fraction} holds out all {}: none is left to train on", stratum_of(train, class, sizes[class]));
        return Err(error("validation", cause, fraction_hint(&sizes, true, false)));
    }
    let kept = match options.fraction {
        None => rest,
        Some(fraction) => counts_per_class("fraction", fraction, &rest, train)?,
    };
    let (mut validation, mut training, mut unused) = (Vec::new(), Vec::new(), Vec::new());
    let mut seen = vec![0; sizes.len()];
    for id in permutation(len, options.seed) {
        let class = usize::from(train.labels[id as usize]);
        let part = match seen[class] {
            before if before < held_out[class] => &mut validation,
            before if before < held_out[class] + kept[class] => &mut training,
            _ => &mut unused,
        };
        part.push(id);
        seen[class] += 1;
    }
    [&mut validation, &mut training, &mut unused].into_iter().for_each(|part| part.sort_unstable());
    if train.label_sets.is_some() {
        let option = if options.validation.is_some() { "validation" } else { "fraction" };
        check_classes_left(option, train, &training)?;
    }
    Ok((training, SplitRecord { images: train.len(), validation, unused, names_crc: None }))
}

/// Returns the number of images of each stratum, of which the same fraction is taken. Strata are classes; a multi-label data
/// set is one stratum.
fn strata(train: &Dataset) -> Vec<usize> {
    if train.label_sets.is_some() { vec![train.len()] } else { train.class_sizes() }
}

/// Checks that every class of a multi-label data set has an image among those to train on.
fn check_classes_left(option: &str, train: &Dataset, training: &[u32]) -> Result<(), DataError> {
    let sets = train.label_sets.iter().flat_map(|sets| training.iter().flat_map(|&id| sets.of(id as usize)));
    let Some(class) = first_missing_class(train.classes.len(), sets) else { return Ok(()) };
    let count = train.class_sizes()[class];
    let cause = format!("none of the {} is left to train on", images_of(train, class, count));
    Err(error(option, cause, "take another part or another seed, or name the split of each image in the manifest"))
}

/// Returns `fraction` of each class's size, rounded to the nearest integer.
fn counts_per_class(option: &str, fraction: f64, sizes: &[usize], train: &Dataset) -> Result<Vec<usize>, DataError> {
    let may_take_all = option == "fraction";
    let is_possible = if may_take_all { fraction <= 1.0 } else { fraction < 1.0 };
    if !(fraction > 0.0 && is_possible) {
        let cause = format!("{fraction} is not a part of the training set");
        return Err(error(option, cause, "use a number above 0 and below 1, such as 0.1; leave it out for none"));
    }
    let parts: Vec<usize> = sizes.iter().map(|&size| (size as f64 * fraction).round() as usize).collect();
    match (0..sizes.len()).find(|&class| sizes[class] > 0 && parts[class] == 0) {
        None => Ok(parts),
        Some(class) => {
            let cause = format!("{fraction} of the {} is none", stratum_of(train, class, sizes[class]));
            Err(error(option, cause, fraction_hint(sizes, false, may_take_all)))
        }
    }
}

/// Returns `3 training images of the class `cat``, for a `count` of 3.
fn images_of(train: &Dataset, class: usize, count: usize) -> String {
    format!("{count} training images of the class `{}`", train.classes[class])
}

/// Returns the text of [`images_of`] for a class of [`strata`].
fn stratum_of(train: &Dataset, class: usize, count: usize) -> String {
    match train.label_sets {
        None => images_of(train, class, count),
        Some(_) => format!("{count} training images"),
    }
}

/// Returns what to do about a fraction that takes all (`too_many`) or none of the images of a class. The smallest of the classes, whose
/// sizes are `sizes`, sets the limit.
fn fraction_hint(sizes: &[usize], too_many: bool, may_take_all: bool) -> String {
    let size = sizes.iter().copied().filter(|size| *size > 0).min().unwrap_or(1);
    // Half an image is rounded up. Four digits are enough for a hint.
    let digits = |images: f64| (images / size as f64 * 1e4).ceil();
    match (size, too_many) {
        (1, _) if !may_take_all => "one image cannot be split: add images of the class, or remove it".into(),
        (_, true) => format!("use at most {}", (digits(size as f64 - 0.5) - 1.0) / 1e4),
        (_, false) => format!("use at least {}", digits(0.5) / 1e4),
    }
}

fn check_memory(bytes: usize) -> Result<(), DataError> {
    match available_memory() {
        Some(available) if bytes as u64 > available => {
            let cause = format!("the copy of {bytes} bytes does not fit into memory, {available} are available");
            Err(error("validation", cause, "use a smaller fraction, a smaller image_size, or limit_train"))
        }
        _ => Ok(()),
    }
}

fn error(option: &str, cause: impl Into<String>, hint: impl Into<String>) -> DataError {
    DataError::new("", cause, hint).at(option)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImageShape;

    /// Makes a set whose image `i` has the pixel `i % 251`, with `sizes[c]` images of class `c` in turn.
    fn dataset(sizes: &[usize]) -> Dataset {
        let most = sizes.iter().max().copied().unwrap_or(0);
        let turns = (0..most).flat_map(|turn| (0..sizes.len()).filter(move |&class| turn < sizes[class]));
        let labels: Vec<u16> = turns.map(|class| class as u16).collect();
        Dataset {
            name: "formula".into(),
            images: (0..labels.len()).map(|i| (i % 251) as u8).collect(),
            label_sets: None,
            shared: None,
            encoded: None,
            labels,
            shape: ImageShape { channels: 1, height: 1, width: 1 },
            classes: ["ant", "bee", "cat", "dog"][..sizes.len()].iter().map(ToString::to_string).collect(),
        }
    }

    fn splits(sizes: &[usize], test: &[usize]) -> Splits {
        Splits {
            train: dataset(sizes),
            val: None,
            test: dataset(test),
            source: "here".into(),
            names_crc: None,
            record: None,
        }
    }

    fn options(validation: impl Into<Option<f64>>, fraction: impl Into<Option<f64>>, seed: u64) -> SplitOptions {
        SplitOptions { validation: validation.into(), fraction: fraction.into(), seed }
    }

    #[test]
    fn parts_are_stratified_disjoint_and_complete() {
        let whole = splits(&[100, 30, 9], &[5, 5, 5]);
        let parts = split(whole.clone(), &options(0.2, 0.5, 7)).unwrap();
        let (val, record) = (parts.val.unwrap(), parts.record.unwrap());
        assert_eq!(val.class_sizes(), [20, 6, 2]);
        assert_eq!(parts.train.class_sizes(), [40, 12, 4]);
        assert_eq!((record.images, record.validation.len(), record.unused.len()), (139, 28, 55));
        let trained: Vec<u8> = parts.train.images.clone();
        let mut all: Vec<u32> = record.validation.iter().chain(&record.unused).copied().collect();
        all.extend(trained.iter().map(|&pixel| u32::from(pixel)));
        all.sort_unstable();
        assert!(all.into_iter().eq(0..139), "each image is in one part");
        // Pixels and labels of a part are those of its images, in the data set's order.
        for (part, ids) in
            [(&val, record.validation.clone()), (&parts.train, trained.iter().map(|&p| u32::from(p)).collect())]
        {
            assert!(ids.is_sorted());
            for (index, id) in ids.into_iter().enumerate() {
                assert_eq!(part.labels[index], whole.train.labels[id as usize]);
                assert_eq!(part.image(index), whole.train.image(id as usize));
            }
        }
        assert_eq!(parts.test.len(), 15);
    }

    /// The recipe in `docs/data.md`, written out with the permutation alone.
    #[test]
    fn the_first_images_of_each_class_in_the_seeds_permutation_are_held_out() {
        let whole = splits(&[50, 20], &[1, 1]);
        let record = split(whole.clone(), &options(0.1, None, 3)).unwrap().record.unwrap();
        let mut expected = Vec::new();
        for (class, count) in [(0, 5), (1, 2)] {
            let order = permutation(70, 3).into_iter().filter(|&id| whole.train.labels[id as usize] == class);
            expected.extend(order.take(count));
        }
        expected.sort_unstable();
        assert_eq!(record.validation, expected);
        assert_ne!(split(whole, &options(0.1, None, 4)).unwrap().record.unwrap().validation, expected);
    }

    #[test]
    fn fractions_are_nested_and_leave_the_validation_split_alone() {
        let whole = || splits(&[61, 17, 40], &[1, 1, 1]);
        let parts = |fraction| split(whole(), &options(0.1, fraction, 5)).unwrap();
        let (all, half, tenth) = (parts(None), parts(Some(0.5)), parts(Some(0.1)));
        assert_eq!(all.val.as_ref().unwrap().images, half.val.unwrap().images);
        assert_eq!(all.val.unwrap().images, tenth.val.unwrap().images);
        assert!(half.train.images.iter().all(|id| all.train.images.contains(id)));
        assert!(tenth.train.images.iter().all(|id| half.train.images.contains(id)));
        assert_eq!((half.train.class_sizes(), tenth.train.class_sizes()), (vec![28, 8, 18], vec![6, 2, 4]));
        let alone = split(whole(), &options(None, 1.0, 5)).unwrap();
        assert!(alone.val.is_none() && alone.train.images == whole().train.images);
    }

    #[test]
    fn without_test_images_the_held_out_part_is_the_test_split() {
        let parts = split(splits(&[10, 10], &[0, 0]), &options(0.3, None, 1)).unwrap();
        assert!(parts.val.is_none());
        assert_eq!((parts.test.class_sizes(), parts.train.class_sizes()), (vec![3, 3], vec![7, 7]));
    }

    #[test]
    fn impossible_parts_are_errors() {
        let said = |splits, options: &SplitOptions| {
            let error = split(splits, options).unwrap_err();
            format!("{error}; {}", error.hint)
        };
        let small = || splits(&[20, 3], &[1, 1]);
        let whole = "use a number above 0 and below 1, such as 0.1; leave it out for none";
        for fraction in [0.0, 1.0, -0.1, 1.5, f64::NAN] {
            let expected = format!("validation: {fraction} is not a part of the training set; {whole}");
            assert_eq!(said(small(), &options(fraction, None, 0)), expected);
        }
        assert!(said(small(), &options(None, 0.0, 0)).starts_with("fraction: 0 is not a part"));
        assert!(said(small(), &options(None, 1.01, 0)).starts_with("fraction: 1.01 is not a part"));
        assert_eq!(
            said(small(), &options(0.1, None, 0)),
            "validation: 0.1 of the 3 training images of the class `bee` is none; use at least 0.1667"
        );
        assert!(split(small(), &options(0.1667, None, 0)).is_ok());
        let of_the_smallest = said(splits(&[20, 4, 2], &[1, 1, 1]), &options(0.02, None, 0));
        assert!(of_the_smallest.ends_with("class `ant` is none; use at least 0.25"), "{of_the_smallest}");
        assert_eq!(
            said(small(), &options(0.9, None, 0)),
            "validation: 0.9 holds out all 3 training images of the class `bee`: none is left to train on; use at most 0.8333"
        );
        assert!(split(small(), &options(0.8333, None, 0)).is_ok());
        assert!(
            said(small(), &options(0.2, 0.1, 0)).starts_with("fraction: 0.1 of the 2 training images of the class")
        );
        let mut with_val = small();
        with_val.val = Some(dataset(&[1, 1]));
        assert_eq!(
            said(with_val.clone(), &options(0.5, None, 0)),
            "validation: the data set has a validation split of 2 images already; leave data.validation out, or remove the \
             split from the data set"
        );
        assert!(split(with_val, &options(None, 0.5, 0)).is_ok());
    }

    #[test]
    fn the_fraction_of_a_hint_works() {
        for size in 2..300 {
            for too_many in [false, true] {
                let hint = fraction_hint(&[300, size], too_many, true);
                let fraction: f64 = hint.rsplit(' ').next().unwrap().parse().unwrap();
                let sizes = [size, 300];
                assert!(split(splits(&sizes, &[1, 1]), &options(fraction, None, 0)).is_ok(), "{size}: {hint}");
            }
        }
        assert!(fraction_hint(&[1], false, false).starts_with("one image cannot be split"));
        assert_eq!(fraction_hint(&[40, 0, 1], false, true), "use at least 0.5");
    }

    /// A limit may leave classes out; that is not the split's fault.
    #[test]
    fn a_class_without_training_images_is_left_alone() {
        let parts = split(splits(&[8, 0, 8], &[1, 1, 1]), &options(0.25, None, 0)).unwrap();
        assert_eq!(parts.val.unwrap().class_sizes(), [2, 0, 2]);
    }
}
