//! Where a run computes: what the flags ask for, and who augments the images.

use std::sync::Arc;

use burn::tensor::Device;
use data::{Dataset, loader::Loader};

use super::resolve;
use crate::cli::TrainArgs;
use crate::config::{Mode, RunPlan};
use crate::device::{Seat, Selected, Target, Wish};
use crate::failure::Failure;
use crate::strategy::{DeviceDataset, DeviceDatasets, Strategy};

/// What the flags ask for.
pub(super) fn wish(arguments: &TrainArgs) -> Wish {
    match (arguments.gpus, arguments.cpus) {
        (Some(count), _) => Wish::Gpus(count),
        (None, Some(_)) => Wish::Cpu,
        (None, None) => Wish::Best,
    }
}

/// A build for GPUs that trains on the CPU without being told to.
pub(super) fn say_why_not(target: &Target) {
    if let Target::Cpu(Some(why)) = target {
        eprintln!("note: training on the CPU: {why}");
    }
}

/// Where a process trains.
pub(super) struct Place<'a> {
    pub target: &'a Target,
    pub seat: Seat,
    pub selected: Selected,
}

/// Why the loader has to do the pixels, though a GPU could; the reason on a CPU is that it is one.
pub(super) fn pixels_on_the_host(
    plan: &RunPlan,
    selected: &Selected,
    train: &Dataset,
    test: &Dataset,
) -> Option<String> {
    let Some(gpu) = &selected.gpu else { return Some("there is no GPU".into()) };
    if plan.parallel.mode == Mode::Dp {
        return Some("mode dp scatters each batch from there".into());
    }
    if plan.train.mixup > 0.0 || plan.train.cutmix > 0.0 {
        return Some("mixup and cutmix are the loader's".into());
    }
    // the rest is for the network
    let room = gpu.memory_bytes / 4;
    DeviceDataset::refusal(train, room).or_else(|| DeviceDataset::refusal(test, room))
}

/// The loaders of both sets. Unless they do the pixels, the sets are copied to the device.
pub(super) fn loaders(
    plan: &RunPlan,
    strategy: &mut dyn Strategy,
    [train, test]: [Dataset; 2],
    pixels: bool,
    device: &Device,
) -> Result<(Loader, Loader), Failure> {
    let (train, test) = (Arc::new(train), Arc::new(test));
    let train_loader = Loader::new(Arc::clone(&train), resolve::train_loader(plan, strategy, pixels)?)?;
    let test_loader = Loader::new(Arc::clone(&test), resolve::test_loader(plan, strategy, pixels)?)?;
    if !pixels {
        let on_device = |set: &Dataset, loader: &Loader| {
            DeviceDataset::new(set, loader.pipeline().clone(), &device.clone().inner())
        };
        strategy.keep_on_device(DeviceDatasets {
            train: on_device(&train, &train_loader),
            test: on_device(&test, &test_loader),
        })?;
    }
    Ok((train_loader, test_loader))
}
