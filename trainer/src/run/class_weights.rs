//! Computes the weights of `train.class_weights`, `train.pos_weight` and `data.sampler_weights` for a training set.

use data::Dataset;

use crate::config::{ClassWeights, RunPlan};
use crate::failure::Failure;

/// Returns the weight of each class in the loss, `[classes]`. Empty if the plan sets no weights.
///
/// # Errors
/// The weights are `balanced`, and a class has no training image.
pub(super) fn of_loss(plan: &RunPlan, train: &Dataset) -> Result<Vec<f64>, Failure> {
    weights(plan, "train.class_weights", &plan.train.class_weights, train)
}

/// Returns the weight with which the sampler draws an image of each class, `[classes]`. Empty if the plan sets no weights.
///
/// # Errors
/// The weights are `balanced`, and a class has no training image; or only classes without images have a weight above 0.
pub(super) fn of_sampler(plan: &RunPlan, train: &Dataset) -> Result<Vec<f64>, Failure> {
    let key = "data.sampler_weights";
    let weights = weights(plan, key, &plan.data.sampler_weights, train)?;
    let is_drawn = |(weight, size): (&f64, usize)| *weight > 0.0 && size > 0;
    if !weights.is_empty() && !weights.iter().zip(train.class_sizes()).any(is_drawn) {
        let hint = "give a class with images a weight above 0, or use \"balanced\"";
        return Err(plan.error_at(&[key], "all training images have the weight 0", hint).into());
    }
    Ok(weights)
}

/// Returns the weight of each class's positive images in a multi-label loss, `[classes]` (PyTorch: `pos_weight`). Empty if the
/// plan sets no weights. With `balanced`, the weight is the number of images without the class divided by the number of images
/// with it.
///
/// # Errors
/// The weights are `balanced`, and a class has no training image.
pub(super) fn of_positives(plan: &RunPlan, train: &Dataset) -> Result<Vec<f64>, Failure> {
    match &plan.train.pos_weight {
        None | Some(ClassWeights::None) => Ok(Vec::new()),
        Some(ClassWeights::Given(list)) => Ok(list.clone()),
        Some(ClassWeights::Balanced) => {
            let sizes = sizes(plan, "train.pos_weight", train)?;
            Ok(sizes.into_iter().map(|with| (train.len() - with) as f64 / with as f64).collect())
        }
    }
}

fn weights(plan: &RunPlan, key: &str, weights: &ClassWeights, train: &Dataset) -> Result<Vec<f64>, Failure> {
    match weights {
        ClassWeights::None => Ok(Vec::new()),
        ClassWeights::Given(list) => Ok(list.clone()),
        ClassWeights::Balanced => {
            let sizes = sizes(plan, key, train)?;
            let share = train.len() as f64 / sizes.len() as f64;
            Ok(sizes.into_iter().map(|size| share / size as f64).collect())
        }
    }
}

/// Returns the number of training images of each class, `[classes]`, from which balanced weights are computed.
///
/// # Errors
/// A class has no training image.
fn sizes(plan: &RunPlan, key: &str, train: &Dataset) -> Result<Vec<usize>, Failure> {
    let sizes = train.class_sizes();
    let Some(empty) = sizes.iter().position(|size| *size == 0) else { return Ok(sizes) };
    let cause = format!("`{key}`: the class `{}` has no training image to balance", train.classes[empty]);
    let hint = match plan.data.limit_train {
        0 => "add images of the class, remove it from the data set, or give one number per class",
        _ => {
            "images of the class may be among those that data.limit_train leaves out: raise it, or give one number per class"
        }
    };
    Err(plan.error_at(&[key], cause, hint).into())
}
