//! Builds the network and the loaders, lists the facts that all ranks must share, and runs `--dry-run`.

use std::sync::Arc;

use burn::tensor::Device;
use data::augment::{AugmentParams, Pipeline};
use data::{
    Dataset, ImageShape, Splits,
    loader::{Loader, LoaderConfig},
};
use models::{Network, Spec};

use super::memory::{self, MemoryUse};
use super::newest_checkpoint::load_newest_checkpoint;
use super::{class_weights, fine_tune};
use crate::config::{Devices, Mode, OnError, OptimizerKind, Precision, RunPlan, Setting};
use crate::console;
use crate::device::{self, DeviceRequest, DeviceSet, LocalRank, SelectedDevice};
use crate::engine::Loaders;
use crate::engine::checkpoint::LoadedCheckpoint;
use crate::failure::Failure;
use crate::report::start_table::start_table;
use crate::report::{RunFolder, Section};
use crate::strategy::single::Single;
use crate::strategy::{DeviceDataset, DeviceDatasets, Strategy};
use crate::text::{counted, thousands};

/// Returns the request for the devices of a run.
pub(super) fn device_request(devices: Option<Devices>) -> DeviceRequest {
    match devices {
        Some(Devices::Gpus(count)) => DeviceRequest::Gpus(count),
        Some(Devices::Cpus(_)) => DeviceRequest::Cpu,
        None => DeviceRequest::Best,
    }
}

/// Prints the reason why a build for GPUs trains on the CPU, if no flag asked for the CPU.
pub(super) fn note_missing_gpu(devices: &DeviceSet) {
    if let DeviceSet::Cpu(Some(why)) = devices {
        console::eprint(format_args!("note: training on the CPU: {why}"));
    }
}

/// The device of one process, and the devices of the whole job.
pub(super) struct DeviceAssignment<'a> {
    /// The devices that flags or `parallel.devices` request.
    pub set: &'a DeviceSet,
    /// The position of the process among the processes of its host.
    pub local_rank: LocalRank,
    /// The device of the process.
    pub selected: SelectedDevice,
}

/// Returns the classes and the shape of the images that the run's network is built for.
pub(super) fn network_spec(plan: &RunPlan, splits: &Splits) -> Spec {
    let Splits { train, .. } = splits;
    Spec {
        num_classes: plan.model.num_classes.unwrap_or(train.classes.len()),
        in_channels: train.shape.channels,
        image_size: [train.shape.height, train.shape.width],
    }
}

/// Returns the reason why the loader augments images on the CPU, or `None` if the GPU does.
pub(super) fn why_augment_on_cpu(plan: &RunPlan, selected: &SelectedDevice, splits: &Splits) -> Option<String> {
    let Some(gpu) = &selected.gpu else { return Some("there is no GPU".into()) };
    if plan.parallel.mode == Mode::Dp {
        return Some("mode dp scatters batches from host memory".into());
    }
    if plan.train.mixup > 0.0 || plan.train.cutmix > 0.0 {
        return Some("mixup and CutMix run in the loader".into());
    }
    if !plan.train.image_sizes.is_empty() {
        return Some("train.image_sizes resizes images in the loader".into());
    }
    if let Some(step) = plan.data.augment.iter().find(|step| step.computes_pixels()) {
        return Some(format!("`{step}` runs in the loader"));
    }
    if splits.iter().any(|(_, split)| split.encoded.is_some()) {
        return Some("the loader decodes the images in each epoch".into());
    }
    // A quarter of the GPU's memory may hold the data set. The rest is for the network.
    let room = gpu.memory_bytes / 4;
    let eval = splits.val.as_ref().unwrap_or(&splits.test);
    DeviceDataset::refusal(&splits.train, room).or_else(|| DeviceDataset::refusal(eval, room))
}

/// Makes the loaders of all splits. Without `pixels`, copies the splits that are read in every epoch to the device.
pub(super) fn build_loaders(
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
    let train_config = LoaderConfig {
        class_weights: class_weights::of_loss(plan, &train)?,
        sampler_weights: class_weights::of_sampler(plan, &train)?,
        ..super::run_data::train_loader(plan, strategy, pixels)?
    };
    if train_config.drop_last && train.len() < train_config.global_batch {
        let (images, batch) = (train.len(), train_config.global_batch);
        let cause =
            format!("{images} training images make no full batch of {batch}, and the incomplete one is left out");
        return Err(plan
            .error_at(&["train.drop_last"], cause, "use a smaller batch_size, or drop_last = false")
            .into());
    }
    let new = |set: &Arc<Dataset>, config| {
        Loader::new(Arc::clone(set), config).map_err(|error| super::run_data::with_plan_location(plan, error))
    };
    let shape = train.shape;
    let train_loader = new(&train, train_config)?;
    let eval_loader = new(&eval, super::run_data::eval_loader(plan, strategy, shape, pixels)?)?;
    let test_loader = match test {
        Some(test) => Some(new(&Arc::new(test), super::run_data::eval_loader(plan, strategy, shape, true)?)?),
        None => None,
    };
    if !pixels {
        let on_device = |set: &Dataset, loader: &Loader| {
            DeviceDataset::new(set, loader.pipeline().clone(), &device.clone().inner())
        };
        strategy.set_device_datasets(DeviceDatasets {
            train: on_device(&train, &train_loader),
            eval: on_device(&eval, &eval_loader),
        })?;
    }
    Ok(Loaders { train: train_loader, eval: eval_loader, test: test_loader })
}

/// Builds the network of the plan for the images. `batch` is the number of images of one forward pass in this process, and
/// `batches` the number of its batches in an epoch, which a step cannot exceed.
pub(super) fn build_network(
    plan: &RunPlan,
    spec: &Spec,
    selected: &SelectedDevice,
    batch: usize,
    batches: usize,
) -> Result<Network, Failure> {
    let bytes_per_element = if plan.train.precision == Precision::Bf16 { 2 } else { 4 };
    let accumulate = plan.train.accumulate.min(batches.max(1));
    let refusal = memory::refusal(&plan.model.name, spec, MemoryUse::Training { batch, accumulate, bytes_per_element });
    if let Some(cause) = refusal.filter(|_| selected.gpu.is_none()) {
        return Err(plan.error_at(&["data.image_size", "train.batch_size"], cause, memory::HINT).into());
    }
    let network = models::build_frozen(&plan.model.name, spec, plan.train.seed, &selected.device(), &plan.model.freeze)
        .map_err(|error| super::plan::model_mistake(plan, &error))?;
    fine_tune::check_layers(plan, &network)?;
    Ok(network)
}

/// Checks that the network accepts the images of the first epochs too. `counts`: images per epoch and devices, if they are known.
///
/// # Errors
/// The images are too small for the network, or a layer's size depends on them.
pub(super) fn check_resize_stages(
    plan: &RunPlan,
    network: &Network,
    spec: &Spec,
    counts: Option<[usize; 2]>,
) -> Result<(), Failure> {
    const HINT: &str = "use larger sizes, or none";
    let ([height, width], name) = (spec.image_size, &plan.model.name);
    // Include frozen weights, whose sizes may also depend on the image size.
    let lengths = |network: &Network| {
        let mut lengths = Vec::new();
        models::state::visit(network, |info, _, _| lengths.push(info.len()));
        lengths
    };
    for stage in super::run_data::resize_stages(plan) {
        let shape = stage.resized(ImageShape { channels: spec.in_channels, height, width });
        let small_spec = Spec { image_size: [shape.height, shape.width], ..*spec };
        let mistake = |cause: String| plan.error_at(&["train.image_sizes"], cause, HINT);
        let built = models::skip_init(name, &small_spec).map_err(|error| mistake(error.to_string()))?;
        if lengths(&built) != lengths(network) {
            let cause = format!(
                "{name} for images of {}x{} pixels has other weights than for {height}x{width}",
                shape.height, shape.width
            );
            return Err(mistake(cause).into());
        }
        if let Some(counts) = counts {
            fine_tune::check_batches(plan, network, &small_spec, counts, ("train.image_sizes", HINT))?;
        }
    }
    Ok(())
}

/// Returns, for each epoch with small images, the number of pixels of an image divided by that of a full-size image. `epochs` is
/// the number of epochs of the run. The array is the full-size shape, `[C, H, W]`.
pub(super) fn pixel_shares(plan: &RunPlan, epochs: usize, [channels, height, width]: [usize; 3]) -> Vec<f64> {
    let whole = ImageShape { channels, height, width };
    let resize_stages = super::run_data::resize_stages(plan);
    let epochs = resize_stages.last().map_or(0, |last| last.last_epoch.min(epochs));
    let config = LoaderConfig { resize_stages, ..LoaderConfig::default() };
    (1..=epochs).map(|epoch| config.shape_in(epoch, whole).len() as f64 / whole.len() as f64).collect()
}

/// Sets initial weights that depend on the training images, if the network has such weights. They are computed from the first
/// images of the training set, normalised and not augmented. All ranks of a job have the same images, so they compute the same
/// weights.
pub(super) fn init_from_images(network: Network, plan: &RunPlan, train: &Dataset) -> Result<Network, Failure> {
    let count = network.init_image_count().min(train.len());
    if count == 0 {
        return Ok(network);
    }
    let shape = train.shape;
    let (mean, std) = super::run_data::normalisation(plan)?;
    let pipeline = Pipeline::new(&[], &mean, &std, shape)?;
    let mut images = Vec::with_capacity(count * shape.len());
    for index in 0..train.len() {
        let pixels = match train.pixels(index) {
            Err(error) if plan.data.on_error == Some(OnError::Skip) && error.is_bad_image => continue,
            pixels => pixels?,
        };
        let at = images.len();
        images.resize(at + shape.len(), 0.0);
        pipeline.apply(&pixels, &AugmentParams::default(), &mut images[at..]);
        if images.len() == count * shape.len() {
            break;
        }
    }
    let count = images.len() / shape.len();
    Ok(network.initialised_from(&images, [count, shape.channels, shape.height, shape.width]))
}

/// Returns the facts on which all ranks of a job must agree: the plan, the data and the kind of device. The plan's paths and
/// numbers of devices are left out, since machines may differ, and only rank 0 reads the file of weights. Of `[log]`, only the
/// timeline must agree, because the ranks gather it. For images that are decoded in every epoch, the facts have the checksum of
/// their names, not of their pixels.
pub(super) fn job_facts(plan: &RunPlan, splits: &Splits, target: &DeviceAssignment<'_>) -> Vec<String> {
    let device = format!("device = {}", if target.set.is_gpu() { "GPU" } else { "CPU" });
    let own = [("data", "dir"), ("model", "weights"), ("parallel", "devices")];
    let shared = |setting: &Setting| {
        let place = (setting.section, setting.key);
        place == ("log", "timeline") || (setting.section != "log" && !own.contains(&place))
    };
    let settings = plan.settings().into_iter().filter(shared).map(|setting| setting.to_string());
    let mut facts: Vec<String> = std::iter::once(device).chain(settings).collect();
    // Each rank computes Muon's products itself, and their rounding depends on the instructions.
    if plan.optimizer.kind == OptimizerKind::Muon {
        let products = target.selected.gpu.as_ref().map_or(device::cpu_kernels(), |gpu| gpu.name.as_str());
        facts.push(format!("products of Muon = {products}"));
    }
    for (name, set) in splits.iter() {
        let labels = match &set.label_sets {
            None => crc32c::crc32c(bytemuck::cast_slice(&set.labels)),
            Some(sets) => sets.iter().fold(0, |sum, set| {
                // Include the length, since the label sets `a;b` and nothing differ from `a` and `b`.
                let sum = crc32c::crc32c_append(sum, &(set.len() as u32).to_le_bytes());
                crc32c::crc32c_append(sum, bytemuck::cast_slice(set))
            }),
        };
        let images = match &set.encoded {
            // Use the names only: reading all files would take as long as an epoch.
            Some(encoded) => encoded.names().fold(0, |sum, name| crc32c::crc32c_append(sum, name.as_bytes())),
            None => crc32c::crc32c(set.all_pixels()),
        };
        facts.push(format!(
            "{name} set = {} images {}, checksum {images:08x} {labels:08x}",
            thousands(set.len() as u64),
            set.shape,
        ));
    }
    let names =
        splits.train.classes.iter().fold(0, |sum, name| crc32c::crc32c_append(sum, format!("{name}\n").as_bytes()));
    facts.push(format!("classes = {}, checksum of their names {names:08x}", splits.train.classes.len()));
    facts
}

/// Checks everything that needs no data, builds the network and prints the plan. Of a run to continue, also loads the checkpoint.
pub(super) fn dry_run(plan: &RunPlan, selected: &SelectedDevice, resumed: Option<&RunFolder>) -> Result<u8, Failure> {
    let mut section = Section::new("dry run").row("device", &selected.description);
    let checkpoint = match resumed {
        Some(folder) => load_newest_checkpoint(plan, folder, None)?,
        None => None,
    };
    let known = super::run_data::known_facts(&plan.data.name)
        .map(|facts| ([facts.channels, facts.height, facts.width], facts.classes));
    let saved = checkpoint.as_ref().and_then(|loaded| loaded.dataset.as_ref());
    if let Some(([channels, height, width], classes)) = saved.map(|data| (data.shape, data.classes.len())).or(known) {
        let side = plan.data.image_size;
        let spec = Spec {
            num_classes: plan.model.num_classes.unwrap_or(classes),
            in_channels: channels,
            image_size: [side.unwrap_or(height), side.unwrap_or(width)],
        };
        let network = build_network(plan, &spec, selected, 1, 1)?;
        check_resize_stages(plan, &network, &spec, None)?;
        section = section.row(
            "model",
            format!(
                "{}, {} parameters, {} multiply-adds per image",
                plan.model.name,
                thousands(count_parameters(&network) as u64),
                thousands(models::cost(&network, &spec).macs)
            ),
        );
        let (network, weights) = fine_tune::initial_weights(network, plan, spec, resumed, false, true)?;
        for (name, value) in weights.into_iter().chain(fine_tune::frozen_rows(plan, &network)) {
            section = section.row(name, value);
        }
        if let Some(LoadedCheckpoint { path, snapshot, progress, .. }) = checkpoint {
            let step = progress.step;
            Single::new(network, selected.device(), spec.num_classes, plan)
                .load_checkpoint(Some((snapshot, progress)))?;
            section = section.row("continues", format!("{} after {}", path.display(), counted(step, "step")));
        }
    } else {
        models::find(&plan.model.name).map_err(|error| Failure::usage(&error, error.hint()))?;
        section = section.row("model", format!("{}, built once the images are read", plan.model.name));
    }
    let mut sections = vec![section];
    sections.extend(super::plan::sections(plan));
    console::print(start_table(&sections));
    console::print("dry run: the plan is valid; no data were read, nothing was trained or written");
    Ok(0)
}

pub(super) fn count_parameters(network: &Network) -> usize {
    models::parameters(network).iter().map(|parameter| parameter.len()).sum()
}
