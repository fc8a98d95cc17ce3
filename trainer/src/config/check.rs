//! What can be checked only with the data set at hand: classes, channels, image size.

use super::DatasetFacts;
use super::error::ConfigError;
use super::origin::Origins;
use super::plan::RunPlan;

/// Compares a plan with its data set and fills in what is the data set's to say.
pub(super) fn against(plan: &mut RunPlan, origins: &Origins, facts: &DatasetFacts) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    let name = plan.data.name.clone();
    let classes = *plan.model.num_classes.get_or_insert(facts.classes);
    if classes != facts.classes {
        errors.push(origins.error(
            "model",
            "num_classes",
            format!("`model.num_classes` is {classes}, but data set \"{name}\" has {} classes", facts.classes),
            format!("remove `num_classes` (default: the data set's), or choose a data set with {classes} classes"),
        ));
    }
    check_channels(plan, origins, facts, &mut errors);
    check_size(plan, origins, facts, &mut errors);
    errors
}

/// Mean and standard deviation have a number a channel.
fn check_channels(plan: &mut RunPlan, origins: &Origins, facts: &DatasetFacts, errors: &mut Vec<ConfigError>) {
    let data = &mut plan.data;
    for (key, list, default) in [("mean", &mut data.mean, &facts.mean), ("std", &mut data.std, &facts.std)] {
        let list = list.get_or_insert_with(|| default.clone());
        if list.len() != facts.channels {
            let numbers = if list.len() == 1 { "1 number".to_owned() } else { format!("{} numbers", list.len()) };
            let channels =
                if facts.channels == 1 { "1 channel".to_owned() } else { format!("{} channels", facts.channels) };
            errors.push(origins.error(
                "data",
                key,
                format!("`data.{key}` has {numbers}, but images of \"{}\" have {channels}", data.name),
                format!("give {} a channel, or remove the key: the default is {default:?}", "one number"),
            ));
        }
    }
}

/// Crops and cut-outs leave something of the image.
fn check_size(plan: &mut RunPlan, origins: &Origins, facts: &DatasetFacts, errors: &mut Vec<ConfigError>) {
    let (height, width) = (facts.height, facts.width);
    let images = format!("images of \"{}\" are {height}x{width}", plan.data.name);
    if height == width {
        plan.data.image_size.get_or_insert(height);
    }
    let size = plan.data.image_size.unwrap_or(height.min(width));
    if plan.data.image_size.is_some() && size < height.max(width) {
        errors.push(origins.error(
            "data",
            "image_size",
            format!("`data.image_size` is {size}, but {images}"),
            format!("images are padded, never shrunk: use {} or more, or remove it", height.max(width)),
        ));
        return;
    }
    // Padding comes first: crops and cut-outs see the padded image.
    let (side, images) = match plan.data.image_size {
        Some(size) => (size, format!("images are {size}x{size}")),
        None => (height.min(width), images),
    };
    for augmentation in &plan.data.augment {
        if let Some(padding) = augmentation.padding()
            && padding >= side
        {
            errors.push(origins.error(
                "data",
                "augment",
                format!("`data.augment`: \"{augmentation}\" pads by the whole image or more: {images}"),
                format!("use a padding of {} or less; 4 is usual for 32x32", side.saturating_sub(1)),
            ));
        }
    }
    if plan.train.cutout >= side {
        errors.push(origins.error(
            "train",
            "cutout",
            format!("`train.cutout`: {} pixels cut out the whole image: {images}", plan.train.cutout),
            format!("use {} or less; 8 to 16 is usual for 32x32", side.saturating_sub(1)),
        ));
    }
}
