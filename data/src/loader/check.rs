//! Checks that a loader's configuration is possible for a data set.

use super::LoaderConfig;
use crate::augment::Augment;
use crate::sampler::check_shard;
use crate::{DataError, Dataset, ImageShape};

/// Checks a data set, and a configuration for it.
///
/// # Errors
/// A key of the configuration that is wrong or impossible for this data set, or a data set without images or with missing pixels.
pub(super) fn check(config: &LoaderConfig, dataset: &Dataset) -> Result<(), DataError> {
    check_dataset(dataset)?;
    check_shard(dataset.len(), config.rank, config.world_size)?;
    check_config(config)?;
    check_weights(config, dataset)?;
    check_multi_label(config, dataset)?;
    check_encoded(config, dataset)?;
    check_resize_stages(config, dataset.shape)
}

fn check_dataset(dataset: &Dataset) -> Result<(), DataError> {
    let (images, pixels, shape) = (dataset.len(), dataset.all_pixels().len(), dataset.shape);
    if images == 0 {
        return Err(DataError::new("", "the data set has no images", "check its folder").at(dataset.name.as_str()));
    }
    if dataset.encoded.as_ref().is_some_and(|encoded| encoded.len() == images) {
        return Ok(());
    }
    if images.checked_mul(shape.len()) != Some(pixels) {
        let cause = format!("{pixels} bytes of pixels for {images} images of {shape}");
        return Err(DataError::new("", cause, "all images must have the same shape").at(dataset.name.as_str()));
    }
    Ok(())
}

/// Checks that a multi-label data set is not used with options that need one class per image.
fn check_multi_label(config: &LoaderConfig, dataset: &Dataset) -> Result<(), DataError> {
    let used = [
        ("mixup", config.mixup.is_some()),
        ("cutmix", config.cutmix.is_some()),
        ("sampler_weights", !config.sampler_weights.is_empty()),
        ("class_weights", !config.class_weights.is_empty()),
    ];
    match used.into_iter().find(|(_, used)| *used && dataset.label_sets.is_some()) {
        None => Ok(()),
        Some((name, _)) => {
            let hint = format!("leave `{name}` out, or use a data set whose images have one class each");
            Err(DataError::new("", format!("{name} needs one class per image"), hint).at(name))
        }
    }
}

/// Checks that weights of classes can be used for `dataset`.
fn check_weights(config: &LoaderConfig, dataset: &Dataset) -> Result<(), DataError> {
    let classes = dataset.classes.len();
    for (name, weights) in [("sampler_weights", &config.sampler_weights), ("class_weights", &config.class_weights)] {
        let mistake = |cause: String, hint: &str| Err(DataError::new("", cause, hint).at(name));
        if weights.is_empty() {
            continue;
        }
        if weights.len() != classes {
            return mistake(format!("{} weights for {classes} classes", weights.len()), "give one weight per class");
        }
        if let Some(weight) = weights.iter().find(|weight| !weight.is_finite() || **weight < 0.0) {
            return mistake(format!("{weight} is not a weight"), "use numbers of at least 0");
        }
        if !weights.iter().zip(dataset.class_sizes()).any(|(weight, size)| *weight > 0.0 && size > 0) {
            return mistake("no image has a weight above 0".into(), "give a class with images a weight above 0");
        }
    }
    Ok(())
}

/// Checks that the data set has the images that the configuration needs: at their own sizes, or in memory.
fn check_encoded(config: &LoaderConfig, dataset: &Dataset) -> Result<(), DataError> {
    if dataset.encoded.is_some() && !config.pixels {
        let cause = "the images are not in memory: they are decoded in each epoch";
        return Err(DataError::new("", cause, "let the loader augment the images").at("pixels"));
    }
    match &dataset.encoded {
        Some(encoded) if config.ten_crop => drop(encoded.ten_crop_side()?),
        None if config.ten_crop => {
            let cause = format!("the images of `{}` are in memory at the size of the network's", dataset.name);
            let hint = "ten crops are cut out of images in files, of an image folder, a manifest or tar archives";
            return Err(DataError::new("", cause, hint).at("ten_crop"));
        }
        _ => {}
    }
    let resized = config.augment.iter().find(|step| matches!(step, Augment::RandomResizedCrop { .. }));
    match resized {
        Some(step) if dataset.encoded.is_none() => {
            let cause =
                format!("`{step}` needs the images at their own sizes, and memory holds them at {}", dataset.shape);
            let hint = "decode the images in each epoch: data.decode = \"epoch\"; or use \"crop\"";
            Err(DataError::new("", cause, hint).at("augment"))
        }
        _ => Ok(()),
    }
}

/// Checks that the images of every stage are smaller than those of the data set.
fn check_resize_stages(config: &LoaderConfig, shape: ImageShape) -> Result<(), DataError> {
    let mistake = |cause: String, hint: String| Err(DataError::new("", cause, hint).at("image_sizes"));
    let shorter = shape.height.min(shape.width);
    match config.resize_stages.iter().find(|stage| stage.side == 0 || stage.side >= shorter) {
        Some(stage) => {
            let cause = format!("images of {shape} cannot be resized to a smaller side of {}", stage.side);
            mistake(cause, format!("use sides below {shorter}; the last epochs have whole images"))
        }
        None if !config.pixels && !config.resize_stages.is_empty() => {
            let cause = "images are resized on the host, by the loader".to_owned();
            mistake(cause, "let the loader augment the images".into())
        }
        None => Ok(()),
    }
}

fn check_config(config: &LoaderConfig) -> Result<(), DataError> {
    let LoaderConfig { global_batch, world_size, .. } = *config;
    let at_least_one = |name: &str| DataError::new("", "0 is too few", "use at least 1").at(name);
    if global_batch == 0 {
        return Err(at_least_one("global_batch"));
    }
    if config.workers == 0 {
        return Err(at_least_one("workers"));
    }
    if config.ten_crop && !(config.evaluation && config.pixels) {
        let cause = "ten crops are views of an evaluation, decoded by the loader";
        return Err(DataError::new("", cause, "set evaluation and pixels as well").at("ten_crop"));
    }
    if !config.pixels && (config.mixup.is_some() || config.cutmix.is_some()) {
        let cause = "images are mixed on the host, by the loader";
        return Err(DataError::new("", cause, "let the loader augment the images, or use neither mixup nor cutmix")
            .at("pixels"));
    }
    if let Some(step) = config.augment.iter().find(|step| !config.pixels && step.computes_pixels()) {
        let cause = format!("`{step}` computes pixels, and a device only gathers them");
        return Err(DataError::new("", cause, "let the loader augment the images").at("pixels"));
    }
    if global_batch < world_size {
        let cause = format!("{global_batch} samples per step cannot be shared by {world_size} workers");
        return Err(
            DataError::new("", cause, format!("use at least {world_size}, or fewer workers")).at("global_batch")
        );
    }
    Ok(())
}
