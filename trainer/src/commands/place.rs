//! Where a run computes: what the flags ask for, and who augments the images.

use std::sync::Arc;

use burn::tensor::Device;
use data::{Dataset, Splits, loader::Loader};

use super::resolve;
use crate::cli::TrainArgs;
use crate::config::{Mode, RunPlan};
use crate::device::{DeviceRequest, DeviceSet, LocalRank, Selected};
use crate::engine::Loaders;
use crate::failure::Failure;
use crate::strategy::{DeviceDataset, DeviceDatasets, Strategy};

/// What the flags ask for.
pub(super) fn wish(arguments: &TrainArgs) -> DeviceRequest {
    match (arguments.gpus, arguments.cpus) {
        (Some(count), _) => DeviceRequest::Gpus(count),
        (None, Some(_)) => DeviceRequest::Cpu,
        (None, None) => DeviceRequest::Best,
    }
}

/// A build for GPUs that trains on the CPU without being told to.
pub(super) fn say_why_not(target: &DeviceSet) {
    if let DeviceSet::Cpu(Some(why)) = target {
        eprintln!("note: training on the CPU: {why}");
    }
}

/// Where a process trains.
pub(super) struct DeviceAssignment<'a> {
    pub target: &'a DeviceSet,
    pub seat: LocalRank,
    pub selected: Selected,
}

/// Why the loader has to do the pixels, though a GPU could; the reason on a CPU is that it is one.
pub(super) fn pixels_on_the_host(plan: &RunPlan, selected: &Selected, splits: &Splits) -> Option<String> {
    let Some(gpu) = &selected.gpu else { return Some("there is no GPU".into()) };
    if plan.parallel.mode == Mode::Dp {
        return Some("mode dp scatters each batch from there".into());
    }
    if plan.train.mixup > 0.0 || plan.train.cutmix > 0.0 {
        return Some("mixup and cutmix are the loader's".into());
    }
    // the rest is for the network
    let room = gpu.memory_bytes / 4;
    let eval = splits.val.as_ref().unwrap_or(&splits.test);
    DeviceDataset::refusal(&splits.train, room).or_else(|| DeviceDataset::refusal(eval, room))
}

/// Makes the loaders of all splits. Without `pixels`, the splits that are read in every epoch are copied to the device.
pub(super) fn loaders(
    plan: &RunPlan,
    strategy: &mut dyn Strategy,
    splits: Splits,
    pixels: bool,
    device: &Device,
) -> Result<Loaders, Failure> {
    let (eval, test) = match splits.val {
        Some(val) => (val, Some(splits.test)),
        None => (splits.test, None),
    };
    let (train, eval) = (Arc::new(splits.train), Arc::new(eval));
    let train_loader = Loader::new(Arc::clone(&train), resolve::train_loader(plan, strategy, pixels)?)?;
    let eval_loader = Loader::new(Arc::clone(&eval), resolve::eval_loader(plan, strategy, pixels)?)?;
    let test_loader = match test {
        Some(test) => Some(Loader::new(Arc::new(test), resolve::eval_loader(plan, strategy, true)?)?),
        None => None,
    };
    if !pixels {
        let on_device = |set: &Dataset, loader: &Loader| {
            DeviceDataset::new(set, loader.pipeline().clone(), &device.clone().inner())
        };
        strategy.keep_on_device(DeviceDatasets {
            train: on_device(&train, &train_loader),
            test: on_device(&eval, &eval_loader),
        })?;
    }
    Ok(Loaders { train: train_loader, eval: eval_loader, test: test_loader })
}
