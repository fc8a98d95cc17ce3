//! Every key of the TOML: its default, its range and what it means.

use std::ops::{
    Bound::{Excluded, Included},
    RangeBounds,
};
use std::path::PathBuf;

use super::Registry;
use super::augment::{self, Augmentation, BadAugmentation};
use super::choice::{Backend, BatchNormPolicy, BatchScope, Compression, LrScale, Mode, OptimizerName, Precision};
use super::plan::{Checkpoint, Data, Log, Model, Optimizer, OptimizerKind, Parallel, Train};
use super::reader::{Reader, describe};
use super::suggest;
use super::value::Mistake;

/// Largest batch, epochs, steps between two events, …: above it is a slip of the keyboard.
const MANY: i64 = 1_000_000;
/// Largest number of steps: no run is longer.
const STEPS: i64 = 1_000_000_000;

/// `[model]`
pub(super) fn model(reader: &mut Reader, registry: &Registry) -> Model {
    let mut section = reader.section("model");
    Model {
        name: section.name("name", "model", registry.models).unwrap_or_default(),
        num_classes: section.optional_count(
            "num_classes",
            2..=MANY,
            "classes of the last layer; default the data set's",
        ),
    }
}

/// `[data]`
pub(super) fn data(reader: &mut Reader, registry: &Registry) -> Data {
    let mut section = reader.section("data");
    let name = section.name("name", "data set", registry.dataset_names).unwrap_or_default();
    let dir = section.get("dir", "the folder that holds the files, in quotes", |value| {
        let text = value.string()?;
        match text.is_empty() || text.contains(char::is_control) {
            true => Err(Mistake::new("expected a folder's name, found none or one with control characters")),
            false => Ok(PathBuf::from(text)),
        }
    });
    let about = format!("what is done to each training image, of {}; default []", augment::WORDS.join(", "));
    let augment = section.get("augment", &about, |value| value.strings(augmentation)).unwrap_or_default();
    let channels = "one number a channel, of pixels scaled to 0..1; default the data set's";
    let data = Data {
        name,
        dir,
        mean: section.get("mean", channels, |value| value.numbers(|mean| share(mean, 0.0..=1.0))),
        std: section.get("std", channels, |value| value.numbers(|std| share(std, (Excluded(0.0), Included(1.0))))),
        augment,
        image_size: section.optional_count(
            "image_size",
            1..=16_384,
            "side of the images in pixels; default the data set's",
        ),
        workers: section.count("workers", 2, 1..=1024, "background threads that assemble batches"),
        limit_train: section.count("limit_train", 0, 0..=STEPS, "training images used, 0 = all"),
        limit_test: section.count("limit_test", 0, 0..=STEPS, "test images used, 0 = all"),
    };
    let on_disk = !data.name.is_empty() && (registry.datasets)(&data.name).is_none();
    if on_disk && data.dir.is_none() && !section.is_broken("dir") {
        section.reject(
            "name",
            format!("data set \"{}\" needs `data.dir`", data.name),
            "add `dir = \"path/to/folder\"` below `[data]`, or give --data-dir path/to/folder",
        );
    }
    if let Some(twice) = repeated(&data.augment) {
        let cause = format!("`data.augment`: {twice}");
        section.reject("augment", cause, "an image is cropped at most once and flipped by one rule");
    }
    data
}

/// One word of `data.augment`.
fn augmentation(word: &str) -> Result<Augmentation, Mistake> {
    Augmentation::parse(word).map_err(|bad| match bad {
        BadAugmentation::Unknown => {
            let name = word.split(':').next().unwrap_or(word);
            if let "cutout" | "mixup" | "cutmix" = name {
                return Mistake::new(format!("{name:?} is not set here")).hint(format!("set `{name}` below `[train]`"));
            }
            Mistake::new(format!("unknown augmentation {word:?}")).hint(format!(
                "{}augmentations: {}",
                suggest::did_you_mean(name, augment::WORDS),
                suggest::nearest_first(name, augment::WORDS)
            ))
        }
        BadAugmentation::Padding(digits) => {
            Mistake::new(format!("expected a padding of 1 pixel or more, found {digits:?}"))
                .hint("write it like \"crop:4\"; leave the augmentation out for none")
        }
        BadAugmentation::NoParameter(name) => {
            Mistake::new(format!("{word:?}: {name} takes no parameter")).hint(format!("write {name:?}"))
        }
    })
}

/// Why a list of augmentations contradicts itself.
fn repeated(list: &[Augmentation]) -> Option<&'static str> {
    let crops = list.iter().filter(|augmentation| augmentation.padding().is_some()).count();
    match (crops, list.len() - crops) {
        (2.., _) => Some("more than one crop"),
        (_, 2..) => Some("more than one flip"),
        _ => None,
    }
}

/// A channel's mean or deviation, of pixels in 0..1.
fn share(number: f64, range: impl RangeBounds<f64>) -> Result<f32, Mistake> {
    let mistake = match range.contains(&number) {
        true => return Ok(number as f32),
        false => Mistake::new(format!("expected a number {}, found {number}", describe(&range))),
    };
    Err(if number > 1.0 { mistake.hint("pixels are scaled to 0..1 first: divide by 255") } else { mistake })
}

/// `[train]`
pub(super) fn train(reader: &mut Reader, registry: &Registry, data: &Data) -> Train {
    let mut section = reader.section("train");
    let train = Train {
        epochs: section.count("epochs", 10, 0..=MANY, "passes over the training set; 0 only with `max_steps`"),
        batch_size: section.count("batch_size", 128, 1..=MANY, "samples a step"),
        batch_scope: section.choice("batch_scope", BatchScope::Global, "what `batch_size` counts"),
        precision: section.choice("precision", Precision::F32, "number format of activations and gradients"),
        seed: section.count("seed", 0, 0.., "of weights, shuffling and augmentation") as u64,
        label_smoothing: section.number(
            "label_smoothing",
            0.0,
            0.0..1.0,
            "share of the target spread over all classes",
        ),
        mixup: section.number("mixup", 0.0, 0.0..=100.0, "alpha of the Beta distribution, 0 = off"),
        cutmix: section.number("cutmix", 0.0, 0.0..=100.0, "alpha of the Beta distribution, 0 = off"),
        cutout: section.count("cutout", 0, 0..=16_384, "side of the square cut out, in pixels, 0 = off"),
        ema: section.number("ema", 0.0, 0.0..1.0, "decay of the weights' moving average such as 0.999, 0 = off"),
        grad_clip: section.number("grad_clip", 0.0, 0.0..=1e9, "largest global norm of the gradients, 0 = off"),
        accumulate: section.count("accumulate", 1, 1..=65_536, "batches an optimizer step"),
        drop_last: section.flag("drop_last", false, "leaves out an incomplete last batch"),
        eval_every: section.count("eval_every", 1, 1..=MANY, "epochs between evaluations"),
        max_steps: section.count("max_steps", 0, 0..=STEPS, "optimizer steps of the run, 0 = no limit"),
        max_time_s: section.count("max_time_s", 0, 0..=STEPS, "seconds of training, 0 = no limit"),
        patience: section.count("patience", 0, 0..=MANY, "epochs without a better top-1 before the run ends, 0 = off"),
    };
    if train.epochs == 0 && train.max_steps == 0 && !section.is_broken("max_steps") {
        section.reject(
            "epochs",
            "`train.epochs`: 0 epochs train nothing",
            "give 1 or more, or limit the run by `max_steps`",
        );
    }
    if train.drop_last && data.limit_train > 0 && data.limit_train < train.batch_size {
        section.reject(
            "drop_last",
            format!(
                "`train.drop_last`: {} images (`data.limit_train`) make no full batch of {}, and the incomplete one is left out",
                data.limit_train, train.batch_size
            ),
            "use a smaller batch_size, or drop_last = false",
        );
    }
    if train.precision == Precision::Bf16 && !registry.gpu {
        section.reject(
            "precision",
            "`train.precision`: \"bf16\" needs a GPU, and this run is on the CPU",
            "use precision = \"f32\", or train on GPUs: --gpus N, of a build with --features cuda",
        );
    }
    train
}

/// `[optimizer]`
pub(super) fn optimizer(reader: &mut Reader) -> Optimizer {
    let mut section = reader.section("optimizer");
    let name = section.choice("kind", OptimizerName::Sgd, "the optimizer");
    // PyTorch's defaults for AdamW: 0.1 and 5e-4 are SGD's and let it diverge.
    let (lr, weight_decay) = match name {
        OptimizerName::Sgd => (0.1, 5e-4),
        OptimizerName::AdamW => (1e-3, 1e-2),
    };
    let lr = section.number("lr", lr, (Excluded(0.0), Included(1000.0)), "the schedule's highest learning rate");
    let momentum = section.number("momentum", 0.9, 0.0..1.0, "momentum of sgd");
    let nesterov = section.flag("nesterov", false, "Nesterov momentum of sgd");
    let betas = section.get("betas", "decay of the two moments of adamw; default [0.9, 0.999]", |value| {
        let list = value.numbers(|beta| match (0.0..1.0).contains(&beta) {
            true => Ok(beta),
            false => Err(Mistake::new(format!("expected numbers of at least 0 and below 1, found {beta}"))),
        })?;
        <[f64; 2]>::try_from(list).map_err(|list| Mistake::new(format!("expected two numbers, found {}", list.len())))
    });
    let eps = section.number("eps", 1e-8, (Excluded(0.0), Included(1.0)), "added to the denominator of adamw");
    let weight_decay = section.number("weight_decay", weight_decay, 0.0..=1000.0, "pull of the weights to zero");
    let decay_norm_and_bias =
        section.flag("decay_norm_and_bias", true, "false exempts batch norm and biases from weight decay");
    let lr_scale = section.choice("lr_scale", LrScale::None, "growth of lr with the number of workers");

    section.only_for(name, &[OptimizerName::Sgd], &["momentum", "nesterov"]);
    section.only_for(name, &[OptimizerName::AdamW], &["betas", "eps"]);
    let kind = match name {
        OptimizerName::Sgd => OptimizerKind::Sgd { momentum, nesterov },
        OptimizerName::AdamW => OptimizerKind::AdamW { betas: betas.unwrap_or([0.9, 0.999]), eps },
    };
    if matches!(kind, OptimizerKind::Sgd { nesterov: true, momentum: 0.0 }) {
        section.reject(
            "nesterov",
            "`optimizer.nesterov`: Nesterov momentum needs a momentum, found momentum = 0",
            "set momentum = 0.9, or nesterov = false",
        );
    }
    Optimizer { kind, lr, weight_decay, decay_norm_and_bias, lr_scale }
}

/// What to do where the mpi backend is missing.
const MPI_HINT: &str = "build with `cargo build --release --features mpi` (it needs an MPI library's headers and libclang), \
                        or use \"auto\", \"shm\" or \"tcp\"";

/// `[parallel]`
pub(super) fn parallel(reader: &mut Reader) -> Parallel {
    let mut section = reader.section("parallel");
    let mebibytes = (Excluded(0.0), Included(4096.0));
    let parallel = Parallel {
        mode: section.choice("mode", Mode::Single, "how devices take part in a step"),
        backend: section.choice("backend", Backend::Auto, "what carries gradients"),
        bucket_mb: section.number("bucket_mb", 25.0, mebibytes, "size of a gradient bucket in MiB"),
        first_bucket_mb: section.number("first_bucket_mb", 1.0, mebibytes, "size of the first bucket in MiB"),
        overlap: section.flag("overlap", true, "reduces gradients while the backward pass runs"),
        compression: section.choice("compression", Compression::None, "format of gradients on the wire"),
        batch_norm: section.choice("batch_norm", BatchNormPolicy::Local, "what batch norm does across workers"),
        timeout_s: section.count("timeout_s", 600, 1..=MANY, "seconds after which a silent worker counts as dead"),
        check_sync_every: section.count(
            "check_sync_every",
            0,
            0..=STEPS,
            "steps between comparisons of ranks, 0 = off",
        ),
    };
    if parallel.mode == Mode::Dp && parallel.batch_norm == BatchNormPolicy::Reduce {
        section.reject(
            "batch_norm",
            "`parallel.batch_norm`: \"reduce\" has nothing to average in mode \"dp\": only device 0's statistics persist",
            "use \"local\" (PyTorch's DataParallel), or \"sync\"",
        );
    }
    let mut unbuilt = |key: &str, asked: bool, cause: String, hint: &str| {
        if asked {
            section.reject(key, format!("`parallel.{key}`: {cause} is not built in this version"), hint);
        }
    };
    if parallel.mode == Mode::Ddp {
        let (backend, hint) = match parallel.backend {
            Backend::Auto | Backend::Shm | Backend::Tcp => (None, ""),
            Backend::Mpi if cfg!(feature = "mpi") => (None, ""),
            Backend::Mpi => (Some(parallel.backend), MPI_HINT),
            Backend::Cuda | Backend::Nccl if cfg!(feature = "cuda") => (None, ""),
            Backend::Cuda | Backend::Nccl => (Some(parallel.backend), "use \"auto\", \"shm\" or \"tcp\""),
        };
        let name = backend.map(|backend| format!("\"{backend}\"")).unwrap_or_default();
        unbuilt("backend", backend.is_some(), name, hint);
    }
    parallel
}

/// `[checkpoint]`
pub(super) fn checkpoint(reader: &mut Reader) -> Checkpoint {
    let mut section = reader.section("checkpoint");
    Checkpoint {
        every: section.count("every", 1, 0..=MANY, "epochs between checkpoints, 0 = only at the end"),
        every_steps: section.count("every_steps", 0, 0..=STEPS, "optimizer steps between checkpoints, 0 = off"),
        keep_last: section.count("keep_last", 2, 1..=MANY, "newest checkpoints kept: a run can resume from one"),
        keep_best: section.flag("keep_best", true, "keeps the checkpoint with the best test accuracy"),
    }
}

/// `[log]`
pub(super) fn log(reader: &mut Reader) -> Log {
    let mut section = reader.section("log");
    Log {
        every: section.count("every", 50, 1..=STEPS, "steps between progress lines"),
        tensorboard: section.flag("tensorboard", true, "writes TensorBoard events"),
        timeline: section.flag("timeline", false, "writes a timeline of the steps"),
    }
}
