//! Checks of several keys together: names that do not exist, and keys that contradict each other, the data set or the build.

use data::augment::Augment;

use super::class_weights::ClassWeights;
use super::error::ConfigError;
use super::image_sizes;
use super::keyword::{BatchNormPolicy, BatchScope, Decode, LrScale, Mode, OnError, OptimizerKind, ScheduleKind};
use super::multi_label;
use super::origin::{Origins, SetBy};
use super::plan::RunPlan;
use super::reader::Reader;
use super::suggest;
use super::{DatasetFacts, Registry};

/// Reports contradictions within a plan.
pub(super) fn consistency(plan: &RunPlan, reader: &mut Reader, registry: &Registry) {
    name(reader, "model", "model", &plan.model.name, registry.models);
    name(reader, "data", "data set", &plan.data.name, registry.dataset_names);
    data(plan, reader, registry);
    train(plan, reader);
    image_sizes::check(plan, reader);
    multi_label::check(plan, reader);
    if plan.optimizer.kind != OptimizerKind::AdamW && plan.optimizer.nesterov && plan.optimizer.momentum == 0.0 {
        reader.reject(
            "optimizer.nesterov",
            "Nesterov momentum needs a momentum, found momentum = 0",
            "set momentum = 0.9, or nesterov = false",
        );
    }
    if plan.optimizer.lr_scale != LrScale::None && plan.train.batch_scope == BatchScope::Global {
        reader.notes.push(
            "`optimizer.lr_scale`: the global batch does not grow with the workers (train.batch_scope = \"global\"), so the \
             learning rate does not either"
                .to_owned(),
        );
    }
    schedule(plan, reader);
    parallel(plan, reader);
}

/// Checks that a section's `name` exists. The key has no default.
fn name(reader: &mut Reader, section: &'static str, what: &str, name: &str, names: &[&str]) {
    if reader.is_broken(section, "name") || names.contains(&name) {
        return;
    }
    let path = format!("{section}.name");
    if reader.origins.has(&path) {
        let hint = suggest::hint("names", name, &suggest::without_aliases(names));
        return reader.reject(&path, format!("no {what} is called {name:?}"), hint);
    }
    // The mistake in the section's form or name is reported elsewhere.
    if reader.is_misspelt(section) {
        return;
    }
    let cause = match reader.origins.headers.contains_key(section) {
        true => format!("missing key `name` in [{section}]"),
        false => format!("missing section [{section}]"),
    };
    let example = names.first().copied().unwrap_or("…");
    let hint = format!("write `name = \"{example}\"` below `[{section}]`; names: {}", names.join(", "));
    reader.errors.push(reader.origins.error(&path, cause, hint));
}

/// Checks `[data]`.
fn data(plan: &RunPlan, reader: &mut Reader, registry: &Registry) {
    let data = &plan.data;
    let on_disk =
        registry.dataset_names.contains(&data.name.as_str()) && (registry.dataset_facts)(&data.name).is_none();
    if on_disk && data.dir.is_none() && !reader.is_broken("data", "dir") {
        let cause = format!("data set \"{}\" needs `data.dir`", data.name);
        let hint = "add `dir = \"path/to/folder\"` below `[data]`, or give --data-dir path/to/folder";
        reader.errors.push(reader.origins.error("data.name", cause, hint));
    }
    if registry.dataset_names.contains(&data.name.as_str()) {
        image_files(plan, reader, on_disk);
    }
    let cutout = (plan.train.cutout > 0).then_some(Augment::Cutout { size: plan.train.cutout });
    let steps: Vec<_> = data.augment.iter().chain(&cutout).collect();
    for (i, step) in steps.iter().enumerate() {
        if let Some(other) = steps[..i].iter().find(|other| other.kind() == step.kind()) {
            reader.reject(
                "data.augment",
                format!("\"{other}\" and \"{step}\" exclude each other"),
                "an image is cropped, flipped, recoloured and cut by one rule each: keep one of the two",
            );
            return;
        }
    }
}

/// Checks the settings for images in files. `in_files` tells whether the data set has such images. The images of other data sets
/// have one size and are in memory.
fn image_files(plan: &RunPlan, reader: &mut Reader, in_files: bool) {
    let data = &plan.data;
    let name = &data.name;
    let crop = data.augment.iter().find(|step| matches!(step, Augment::RandomResizedCrop { .. }));
    if !in_files {
        let set = [
            ("resize", data.resize.is_some()),
            ("decode", data.decode.is_some()),
            ("on_error", data.on_error.is_some()),
        ];
        for (key, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            let cause = format!("this key is for images in files, and \"{name}\" is always in memory");
            reader.reject(&format!("data.{key}"), cause, format!("remove `{key}`"));
        }
        if let Some(crop) = crop {
            let cause = format!("\"{crop}\" needs images in files, at their own sizes, and \"{name}\" is in memory");
            reader.reject("data.augment", cause, "use \"crop\"");
        }
        return;
    }
    if let (Some(crop), None) = (crop, data.image_size) {
        reader.reject("data.augment", format!("\"{crop}\" needs a size"), "set image_size = 224 below `[data]`");
    }
    if let (Some(crop), Some(Decode::Memory)) = (crop, data.decode) {
        let cause = format!("\"{crop}\" needs the original images, and decode = \"memory\" keeps them at `image_size`");
        reader.reject("data.decode", cause, "use decode = \"epoch\", or \"crop\"");
    }
    if let (Some(OnError::Skip), Some(Decode::Memory)) = (data.on_error, data.decode) {
        let cause = "decode = \"memory\" decodes all images before the run starts, and names the damaged ones";
        reader.reject(
            "data.on_error",
            cause,
            "use decode = \"epoch\", or replace the images that `trainer data verify` names",
        );
    }
    match (data.resize, data.image_size) {
        (Some(_), None) => reader.reject(
            "data.resize",
            "needs `data.image_size`, the side of the centre that is cut out",
            "set for example image_size = 224 and resize = 256",
        ),
        (Some(side), Some(size)) if side < size => reader.reject(
            "data.resize",
            format!("the centre of {size} pixels (`data.image_size`) does not fit into images resized to {side}"),
            format!("use {size} or more; {} is usual", usual_resize(size)),
        ),
        _ => {}
    }
}

/// Returns the side to which torchvision's presets resize images before the centre of `size` pixels is cut out: 256 for 224.
fn usual_resize(size: usize) -> usize {
    (size as f64 / 0.875).round() as usize
}

/// Fills in the side of the images of a data set whose facts are known before its files are read. Not that of images in files:
/// with `data.image_size` they would be resized, and without it an image of another size is an error.
pub(super) fn fill_in_size(plan: &mut RunPlan, facts: &DatasetFacts) {
    if facts.height == facts.width {
        plan.data.image_size.get_or_insert(facts.height);
    }
}

/// Fills in the values that other values of the plan determine.
pub(super) fn fill_in_resize(plan: &mut RunPlan) {
    let data = &mut plan.data;
    let crops = data.augment.iter().any(|step| matches!(step, Augment::RandomResizedCrop { .. }));
    if let (true, Some(size), None) = (crops, data.image_size, data.resize) {
        data.resize = Some(usual_resize(size));
    }
}

/// Checks `[train]`.
fn train(plan: &RunPlan, reader: &mut Reader) {
    let (train, limit) = (&plan.train, plan.data.limit_train);
    if train.class_weights == ClassWeights::Balanced && plan.data.sampler_weights == ClassWeights::Balanced {
        let note = "`train.class_weights` and `data.sampler_weights` are both \"balanced\": one of them is sufficient";
        reader.notes.push(note.into());
    }
    if train.epochs == 0 && train.max_steps == 0 && !reader.is_broken("train", "max_steps") {
        reader.reject("train.epochs", "0 epochs train nothing", "give 1 or more, or limit the run by `max_steps`");
    }
    if train.drop_last && limit > 0 && limit < train.batch_size {
        reader.reject(
            "train.drop_last",
            format!(
                "{limit} images (`data.limit_train`) make no full batch of {}, and the incomplete one is \
                 left out",
                train.batch_size
            ),
            "use a smaller batch_size, or drop_last = false",
        );
    }
}

/// Checks `[schedule]`: milestones, and the warm-up against the run's length.
fn schedule(plan: &RunPlan, reader: &mut Reader) {
    let schedule = &plan.schedule;
    if schedule.kind == ScheduleKind::MultiStep && !reader.is_broken("schedule", "milestones") {
        milestones("schedule.milestones", &schedule.milestones, reader);
    }
    let (lr, min_lr) = (plan.optimizer.lr, schedule.min_lr);
    if schedule.kind == ScheduleKind::Cosine && min_lr > lr && !reader.is_broken("optimizer", "lr") {
        let cause = format!("the last learning rate is above the highest, `optimizer.lr` = {lr}");
        reader.reject("schedule.min_lr", cause, "use a number below `optimizer.lr`; 0 is usual");
    }
    // A run limited by steps has no length in epochs before the data are read. Trials of a few steps keep the warm-up of their
    // file.
    if plan.train.epochs == 0 || plan.train.max_steps > 0 {
        return;
    }
    let epochs = plan.train.epochs as f64;
    if schedule.kind != ScheduleKind::OneCycle && schedule.warmup_epochs >= epochs {
        reader.reject(
            "schedule.warmup_epochs",
            format!("{} epochs of warm-up in a run of {epochs}", schedule.warmup_epochs),
            "shorten the warm-up (0 = none) or train for more epochs",
        );
    }
    if schedule.kind == ScheduleKind::MultiStep {
        for late in schedule.milestones.iter().filter(|milestone| **milestone >= epochs && **milestone > 1.0) {
            reader.notes.push(format!("`schedule.milestones`: epoch {late} is never reached in {epochs} epochs"));
        }
    }
}

/// Checks that milestones are in ascending order, and either all fractions or all epochs.
pub(super) fn milestones(key: &str, list: &[f64], reader: &mut Reader) {
    let fractions = list.iter().filter(|milestone| **milestone < 1.0).count();
    let falling = list.windows(2).find(|pair| pair[0] >= pair[1]);
    let (cause, hint) = if list.is_empty() {
        ("expected at least one milestone, found none".to_owned(), "kind = \"constant\" has none")
    } else if list.contains(&1.0) || (fractions > 0 && fractions < list.len()) {
        let cause = "expected all milestones below 1 (fractions of the run) or all above 1 (epochs)";
        (cause.to_owned(), "[0.5, 0.75] is after half and three quarters of the run")
    } else if let Some(pair) = falling {
        let cause = format!("expected rising milestones, found {} before {}", pair[0], pair[1]);
        (cause, "sort them in ascending order, without duplicates")
    } else {
        return;
    };
    reader.reject(key, cause, hint);
}

/// Checks `[parallel]`.
fn parallel(plan: &RunPlan, reader: &mut Reader) {
    let in_file = |key| reader.origins.set_by("parallel", key) == SetBy::File;
    if let Some(devices) = plan.parallel.devices
        && plan.parallel.mode == Mode::Single
        && devices.count() > 1
        && in_file("mode")
        && in_file("devices")
    {
        reader.reject(
            "parallel.devices",
            format!("\"{devices}\" are several devices, and mode = \"single\" has one"),
            "use mode = \"ddp\" or \"dp\", or leave `devices` out",
        );
    }
    let parallel = &plan.parallel;
    if parallel.mode == Mode::Dp && parallel.batch_norm == BatchNormPolicy::Reduce {
        reader.reject(
            "parallel.batch_norm",
            "\"reduce\" has nothing to average in mode \"dp\": only device 0's statistics persist",
            "use \"local\" (PyTorch's DataParallel), or \"sync\"",
        );
    }
    if parallel.mode == Mode::Dp && !parallel.autotune.is_empty() {
        reader.reject(
            "parallel.autotune",
            "mode \"dp\" has nothing to tune: one process adds up the gradients of all devices",
            "leave `autotune` and --autotune out, or use mode = \"ddp\"",
        );
    }
}

/// Contradictions between a plan and its data set.
struct Mistakes<'a> {
    origins: &'a Origins,
    errors: Vec<ConfigError>,
}

impl Mistakes<'_> {
    fn add(&mut self, path: &str, cause: String, hint: impl Into<String>) {
        self.errors.push(self.origins.error(path, cause, hint));
    }
}

/// Compares a plan with its data set and fills in the values that the data set determines.
pub(super) fn check_dataset(plan: &mut RunPlan, origins: &Origins, facts: &DatasetFacts) -> Vec<ConfigError> {
    let mut mistakes = Mistakes { origins, errors: Vec::new() };
    let name = &plan.data.name;
    let classes = *plan.model.num_classes.get_or_insert(facts.classes);
    if classes != facts.classes {
        mistakes.add(
            "model.num_classes",
            format!("`model.num_classes` is {classes}, but data set \"{name}\" has {} classes", facts.classes),
            format!("remove `num_classes` (default: the data set's), or choose a data set with {classes} classes"),
        );
    }
    if facts.classes < 2 {
        let cause = format!("data set \"{name}\" has {} class, and a classifier needs two or more", facts.classes);
        mistakes.add("data.name", cause, "add images of another class, such as those without it");
    }
    check_channels(plan, facts, &mut mistakes);
    check_size(plan, facts, &mut mistakes);
    check_class_weights(plan, facts, &mut mistakes);
    mistakes.errors
}

/// Checks that lists of weights have one number per class.
fn check_class_weights(plan: &RunPlan, facts: &DatasetFacts, mistakes: &mut Mistakes) {
    let lists = [
        ("data.sampler_weights", Some(&plan.data.sampler_weights)),
        ("train.class_weights", Some(&plan.train.class_weights)),
        ("train.pos_weight", plan.train.pos_weight.as_ref()),
    ];
    for (path, weights) in lists {
        let Some(ClassWeights::Given(list)) = weights else { continue };
        if list.len() != facts.classes {
            let (found, classes, name) = (list.len(), facts.classes, &plan.data.name);
            let cause = format!("`{path}` has {found} weights, but data set \"{name}\" has {classes} classes");
            mistakes.add(path, cause, "give one number per class, in the order of the classes; or use \"balanced\"");
        }
    }
}

/// Checks that mean and standard deviation have one number per channel.
fn check_channels(plan: &mut RunPlan, facts: &DatasetFacts, mistakes: &mut Mistakes) {
    let data = &mut plan.data;
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    for (path, list, default) in [("data.mean", &mut data.mean, &facts.mean), ("data.std", &mut data.std, &facts.std)] {
        let list = list.get_or_insert_with(|| default.clone());
        if list.len() != facts.channels {
            let (numbers, channels) = (counted(list.len(), "number"), counted(facts.channels, "channel"));
            mistakes.add(
                path,
                format!("`{path}` has {numbers}, but images of \"{}\" have {channels}", data.name),
                format!("give one number per channel, or remove the key: the default is {default:?}"),
            );
        }
    }
}

/// Checks that crops and cut-outs leave a part of the image.
fn check_size(plan: &RunPlan, facts: &DatasetFacts, mistakes: &mut Mistakes) {
    let (height, width) = (facts.height, facts.width);
    let images = format!("images of \"{}\" are {height}x{width}", plan.data.name);
    // Padding comes first: crops and cut-outs see the padded image.
    let (side, images) = match plan.data.image_size {
        Some(size) if size < height.max(width) => {
            let hint = format!("images are padded, never shrunk: use {} or more, or remove it", height.max(width));
            return mistakes.add("data.image_size", format!("`data.image_size` is {size}, but {images}"), hint);
        }
        Some(size) => (size, format!("images are {size}x{size}")),
        None => (height.min(width), images),
    };
    for augmentation in &plan.data.augment {
        if let Augment::Crop { padding, .. } = *augmentation
            && padding >= side
        {
            mistakes.add(
                "data.augment",
                format!("`data.augment`: \"{augmentation}\" pads by the whole image or more: {images}"),
                format!("use a padding of {} or less; 4 is usual for 32x32", side.saturating_sub(1)),
            );
        }
    }
    if plan.train.cutout >= side {
        mistakes.add(
            "train.cutout",
            format!("`train.cutout`: {} pixels cut out the whole image: {images}", plan.train.cutout),
            format!("use {} or less; 8 to 16 is usual for 32x32", side.saturating_sub(1)),
        );
    }
}
