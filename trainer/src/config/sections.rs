//! Every key of the TOML, declared once: field, type, default, range and documentation.
//!
//! The reader, the defaults, the hints, a run's `config.toml`, the start screen and the table in `configs/README.md` come from
//! here. The order is the order of `config.toml`.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};
use std::path::PathBuf;

use data::augment::Augment;

use super::class_weights::ClassWeights;
use super::devices::Devices;
use super::key::{Key, KeyVisitor, Range, sections};
use super::keyword::{
    Anneal, Backend, BatchNormPolicy, BatchScope, BestBy, Compression, Decode, Keyword, LrScale, Mode, OnError,
    OptimizerKind, Precision, ScheduleKind, Tta, Tunable,
};

/// Upper limit of counts such as batch size and epochs. A larger value is a typing mistake.
const MANY: i32 = 1_000_000;
/// Upper limit of numbers of steps, images and seconds.
const LARGEST_COUNT: i32 = 1_000_000_000;
/// Longest side of an image in pixels.
const PIXELS: i32 = 16_384;
/// Largest bucket in MiB.
const BUCKET: (std::ops::Bound<f64>, std::ops::Bound<f64>) = (Excluded(0.0), Included(4096.0));

/// Factors between learning rates.
const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e12;

sections! {
    /// `[model]`: the network.
    ModelConfig "model" {
        /// The model, one that `trainer models` lists.
        name: String = String::new(), also ["arch"];
        /// Classes of the last layer.
        num_classes: Option<usize> = None, in 2..=MANY, unset "the data set's", also ["classes"];
        /// The initial weights: a PyTorch file, a safetensors file or a checkpoint's folder, relative to the current directory. If
        /// the last layer of the file has another number of classes, the network keeps its own initial last layer.
        weights: Option<PathBuf> = None, unset "random ones, from `train.seed`", also ["pretrained", "checkpoint", "init"];
        /// Layers that are not trained: names or prefixes in the state dict, such as `layer1` or `fc.bias`. Batch norms among them
        /// keep their statistics.
        freeze: Vec<String> = vec![], unset "none", also ["frozen"];
    }

    /// `[data]`: the data set and its preprocessing.
    DataConfig "data" {
        /// The data set, one that `trainer data list` shows.
        name: String = String::new(), also ["dataset"];
        /// The folder that holds the files, relative to the current directory; for `manifest` the CSV file.
        dir: Option<PathBuf> = None, unset "the usual places", also ["path", "root", "data_dir"];
        /// The character between the classes of an image in a manifest: `";"` reads `cat;dog`, and an empty label means no class.
        /// The loss is then PyTorch's `BCEWithLogitsLoss`.
        label_delim: Option<char> = None, unset "each image has one class", also ["label_delimiter", "multi_label", "delimiter"];
        /// Augmentations of each training image. `crop` and `reflect-crop` shift by up to 4 pixels, `crop:2` by up to 2, with a
        /// black or a mirrored border; `random-resized-crop:0.08` cuts out 8 % to 100 % of the image at its own size;
        /// `alternating-flip` mirrors each image every other epoch. `rotation:15`, `rand-augment:9`, `color-jitter:0.4` and
        /// `random-erasing:0.5` have an angle, strength or probability, `color-jitter:0.4:0.1` turns hues too, and
        /// `auto-augment:cifar10` has a policy;
        /// [the order](../docs/data.md#augmentation) is always the same.
        augment: Vec<Augment> = vec![], unset "none", also ["transforms", "augmentation", "augmentations"];
        /// Mean per channel, of pixels scaled to 0..1.
        mean: Option<Vec<f32>> = None, in 0..=1, unset "the data set's";
        /// Standard deviation per channel, of pixels scaled to 0..1.
        std: Option<Vec<f32>> = None, in (Excluded(0), Included(1)), unset "the data set's";
        /// Side of the square images in pixels. Smaller images are padded; images in files are resized.
        image_size: Option<usize> = None, in 1..=PIXELS, unset "the data set's";
        /// Side in pixels to which the shorter side of images in files is resized, before the centre of `image_size` is cut out.
        resize: Option<usize> = None, in 1..=PIXELS,
            unset "`image_size` / 0.875 with `random-resized-crop`, else the whole image becomes the square",
            also ["resize_size", "val_resize_size"];
        /// When images in files are decoded: once into memory, or in each epoch.
        decode: Option<Decode> = None, unset "in each epoch if the decoded images take more than half of the memory",
            also ["cache", "lazy"];
        /// What happens where an image that is decoded in an epoch is damaged: `skip` takes the next image of its class.
        on_error: Option<OnError> = None, unset "`error`", also ["skip_errors", "ignore_errors"];
        /// Background threads that assemble batches.
        workers: usize = 2, in 1..=1024, also ["num_workers"];
        /// Training images used, from the first.
        limit_train: usize = 0, in 0..=LARGEST_COUNT, unset "all";
        /// Test images used, from the first.
        limit_test: usize = 0, in 0..=LARGEST_COUNT, unset "all";
        /// Part of each class's training images that is held out for validation. The best checkpoint and early stopping go by
        /// it, and the test set is evaluated once, at the end.
        validation: Option<f64> = None, in (Excluded(0), Excluded(1)), unset "none", also ["val", "val_split"];
        /// Part of each class's training images that is trained on, after `validation` has held out its part.
        fraction: Option<f64> = None, in (Excluded(0), Included(1)), unset "all", also ["train_fraction", "subset"];
        /// Draws training images with replacement (`WeightedRandomSampler`). Each class has a weight, which all its images have.
        /// `balanced` draws all classes equally often.
        sampler_weights: ClassWeights = ClassWeights::None, unset "off", also ["sampler", "weighted_sampler"];
    }

    /// `[train]`: the length of the run, its batches and its regularisation.
    TrainConfig "train" {
        /// Passes over the training set; 0 only with `max_steps`.
        epochs: usize = 10, in 0..=MANY, also ["num_epochs", "max_epochs"];
        /// Samples per step, see `batch_scope`.
        batch_size: usize = 128, in 1..=MANY, also ["batch", "bs"];
        /// What `batch_size` counts.
        batch_scope: BatchScope = BatchScope::Global;
        /// Number format of activations and their gradients.
        precision: Precision = Precision::F32, also ["dtype", "amp"];
        /// Seed of weights, shuffling and augmentation.
        seed: u64 = 0, in 0..;
        /// Share of the target spread over all classes.
        label_smoothing: f64 = 0.0, in 0..1, unset "off", also ["smoothing"];
        /// Weights of the classes in the training loss (PyTorch's `CrossEntropyLoss(weight)`). `balanced` weights a class by
        /// `images / (classes * its images)` of the training set.
        class_weights: ClassWeights = ClassWeights::None, unset "off", also ["weight", "loss_weights"];
        /// Weights of the images that have a class against those that do not, a number for each class (PyTorch's
        /// `BCEWithLogitsLoss(pos_weight)`), with `data.label_delim`. `balanced`: the images without the class / those with it.
        pos_weight: Option<ClassWeights> = None, unset "off", also ["pos_weights", "positive_weight"];
        /// Alpha of mixup's Beta distribution.
        mixup: f64 = 0.0, in 0..=100, unset "off";
        /// Alpha of CutMix's Beta distribution.
        cutmix: f64 = 0.0, in 0..=100, unset "off";
        /// Side in pixels of the square that is cut out of each training image.
        cutout: usize = 0, in 0..=PIXELS, unset "off";
        /// Sides in pixels to which the training images are resized at first, one after the other (progressive resizing).
        /// Evaluations and the last epochs have whole images.
        image_sizes: Vec<usize> = vec![], in 1..=PIXELS, unset "off", also ["progressive_resizing", "progressive_sizes"];
        /// When each of `image_sizes` ends: fractions of `epochs`, or epochs where above 1.
        image_milestones: Vec<f64> = vec![], in (Excluded(0), Included(MANY)), unset "none";
        /// Decay of the exponential moving average of the weights (0.999 is usual).
        ema: f64 = 0.0, in 0..1, unset "off", also ["ema_decay"];
        /// Largest global L2 norm of the gradients.
        grad_clip: f64 = 0.0, in 0..=1_000_000_000, unset "off", also ["clip", "clip_grad_norm", "max_grad_norm"];
        /// Batches per optimizer step.
        accumulate: usize = 1, in 1..=65_536,
            also ["accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"];
        /// Whether a process with one GPU captures its step as a CUDA graph and launches the graph. With several processes, only if
        /// the custom all-reduce kernels sum the gradients. `false` launches kernel by kernel.
        graph: Option<bool> = None, unset "`true`", also ["cuda_graph", "cuda_graphs"];
        /// Leaves out an epoch's last batch where it is smaller than the others.
        drop_last: bool = false, unset "off";
        /// Epochs between evaluations.
        eval_every: usize = 1, in 1..=MANY;
        /// Test-time augmentation: `flip` also evaluates the mean of the logits of each image and its mirror image. Its accuracy is
        /// reported beside the plain one.
        tta: Tta = Tta::None, unset "off";
        /// Optimizer steps after which the run ends. The schedule spans `epochs` nevertheless, unless `epochs` is 0.
        max_steps: usize = 0, in 0..=LARGEST_COUNT, unset "no limit", also ["steps"];
        /// Seconds of training, over all sessions of the run, after which the run is evaluated, saved and ended.
        max_time_s: usize = 0, in 0..=LARGEST_COUNT, unset "no limit";
        /// Early stopping: epochs without a better evaluation (`checkpoint.best`) after which the run ends.
        patience: usize = 0, in 0..=MANY, unset "off";
    }

    /// `[optimizer]`: the optimizer and its parameters, by PyTorch's names.
    OptimizerConfig "optimizer" {
        /// The optimizer.
        kind: OptimizerKind = OptimizerKind::Sgd, also ["optimizer", "type"];
        /// Momentum factor (PyTorch's `momentum`).
        momentum: f64 = 0.9, for OptimizerKind::Muon = 0.95, in 0..1, only OptimizerKind::[Sgd, Muon];
        /// Nesterov momentum.
        nesterov: bool = false, for OptimizerKind::Muon = true, unset "off", only OptimizerKind::[Sgd, Muon];
        /// Decay of the first and the second moment.
        betas: [f64; 2] = [0.9, 0.999], in 0..1, only OptimizerKind::[AdamW, Muon];
        /// Added to the denominator.
        eps: f64 = 1e-8, in (Excluded(0), Included(1)), only OptimizerKind::[AdamW, Muon];
        /// The schedule's highest learning rate.
        lr: f64 = 0.1, for OptimizerKind::AdamW = 1e-3, for OptimizerKind::Muon = 1e-3, in (Excluded(0), Included(1000)),
            also ["learning_rate", "base_lr"];
        /// The highest learning rate of the parameters that AdamW updates beside Muon: batch norms, biases, depthwise convolutions,
        /// the first and the last layer.
        adamw_lr: Option<f64> = None, in (Excluded(0), Included(1000)), unset "as `lr`", only OptimizerKind::[Muon];
        /// Weight decay, L2 for sgd and decoupled for adamw and muon.
        weight_decay: f64 = 5e-4, for OptimizerKind::AdamW = 1e-2, for OptimizerKind::Muon = 0.1, in 0..=1000, unset "off",
            also ["wd", "l2"];
        /// Whether batch norm and biases decay too.
        decay_norm_and_bias: bool = true, unset "off";
        /// Factor of `lr` for the biases of batch norms. The weight decay of a bias per step does not change.
        norm_bias_lr_factor: f64 = 1.0, in (Excluded(0), Included(1000));
        /// Factors of `lr` for layers, names or prefixes in the state dict: `{ layer1 = 0.1, fc = 10 }`. If several names match,
        /// the longest one applies.
        lr_factors: BTreeMap<String, f64> = BTreeMap::new(), in (Excluded(0), Included(1000)), unset "1 for all",
            also ["lr_mult", "layer_lrs"];
        /// Factor of `lr` from each group of layers to the one before (timm's layer-wise decay): the classifier has `lr`. The
        /// factors of `lr_factors` multiply it.
        layer_decay: Option<f64> = None, in (Excluded(0), Included(1)), unset "off", also ["layer_lr_decay", "llrd"];
        /// Growth of `lr` with the number of workers.
        lr_scale: LrScale = LrScale::None, unset "off";
    }

    /// `[schedule]`: the learning rate over the run, set before each optimizer step.
    ScheduleConfig "schedule" {
        /// The learning rate over the run.
        kind: ScheduleKind = ScheduleKind::Cosine, also ["scheduler", "type"];
        /// When the learning rate is multiplied by `gamma`, in ascending order: fractions of `epochs`, or epochs if above 1.
        milestones: Vec<f64> = vec![0.5, 0.75], in (Excluded(0), Included(MANY)), only ScheduleKind::[MultiStep];
        /// Factor at each milestone.
        gamma: f64 = 0.1, in (Excluded(0), Included(1)), only ScheduleKind::[MultiStep];
        /// Length of the linear rise to `lr` in epochs.
        warmup_epochs: f64 = 0.0, in 0..=MANY, unset "none", only ScheduleKind::[Cosine, MultiStep, Constant], also ["warmup"];
        /// First learning rate as a factor of `lr`.
        warmup_start: f64 = 0.01, in 0..=1, only ScheduleKind::[Cosine, MultiStep, Constant];
        /// Last learning rate (PyTorch's `eta_min`, timm's `--min-lr`); `optimizer.lr_scale` does not
        /// change `min_lr`; factors of single layers do.
        min_lr: f64 = 0.0, in 0..=1000, only ScheduleKind::[Cosine], also ["eta_min", "lr_min"];
        /// Fraction of `epochs` in which the learning rate rises (PyTorch's `pct_start`).
        pct_start: f64 = 0.3, in (Excluded(0), Excluded(1)), only ScheduleKind::[OneCycle];
        /// `lr / div` is the first learning rate (PyTorch's `div_factor`).
        div: f64 = 25.0, in FACTOR, only ScheduleKind::[OneCycle], also ["div_factor"];
        /// `lr / div / final_div` is the last learning rate (PyTorch's `final_div_factor`).
        final_div: f64 = 1e4, in FACTOR, only ScheduleKind::[OneCycle], also ["final_div_factor"];
        /// Shape of both slopes (PyTorch's `anneal_strategy`).
        anneal: Anneal = Anneal::Cos, only ScheduleKind::[OneCycle];
    }

    /// `[parallel]`: how several devices train one network.
    ParallelConfig "parallel" {
        /// How devices take part in a step. Several devices set `ddp`, unless a flag or the file selects `dp`.
        mode: Mode = Mode::Single;
        /// The devices on this machine: processes in mode `ddp`, devices of one process in mode `dp`. `--cpus N` and `--gpus N`
        /// set them.
        devices: Option<Devices> = None, unset "one: a GPU if there is one, else the CPU";
        /// Communication backend of the gradients. `cuda` and `nccl` need a build with `--features cuda`, `mpi` one with
        /// `--features mpi`.
        backend: Backend = Backend::Auto;
        /// Size of a gradient bucket in MiB.
        bucket_mb: f64 = 25.0, in BUCKET;
        /// Size of the first bucket in MiB. A small one lets the first reduction start early.
        first_bucket_mb: f64 = 1.0, in BUCKET;
        /// Reduces a bucket while the rest of the backward pass runs.
        overlap: bool = true;
        /// Format of gradients on the wire.
        compression: Compression = Compression::None, unset "off";
        /// Batch norm across workers. `local`: each worker normalises its own share, and evaluations use rank 0's running
        /// statistics. `broadcast` copies these to all ranks before an evaluation, `reduce` averages them. `sync` normalises by
        /// the whole batch (PyTorch's `SyncBatchNorm`).
        batch_norm: BatchNormPolicy = BatchNormPolicy::Local;
        /// Seconds after which a silent worker, or a machine that does not answer, counts as dead.
        timeout_s: usize = 600, in 1..=MANY;
        /// Steps between comparisons of all ranks' parameters.
        check_sync_every: usize = 0, in 0..=LARGEST_COUNT, unset "off";
        /// Threads with which each worker of mode `ddp` computes a step on the CPU.
        threads: Option<usize> = None, in 1..=1024, unset "the worker's share of the cores", also ["num_threads"];
        /// What a run of mode `ddp` may change in its first steps to find the fastest step. `--autotune` allows `bucket_mb`,
        /// `first_bucket_mb` and `threads`; the wire formats `fp16` and `bf16` are tried only if they are listed.
        autotune: Vec<Tunable> = vec![], unset "off", also ["tune", "auto_tune"];
    }

    /// `[checkpoint]`: when the run is saved, and how much is kept.
    CheckpointConfig "checkpoint" {
        /// Epochs between checkpoints; 0: only at the end. A new best evaluation is saved too (`keep_best`).
        every: usize = 1, in 0..=MANY;
        /// Optimizer steps between checkpoints.
        every_steps: usize = 0, in 0..=LARGEST_COUNT, unset "off";
        /// Newest checkpoints kept: a run can resume from one.
        keep_last: usize = 2, in 1..=MANY;
        /// Keeps the checkpoint with the best evaluation as well.
        keep_best: bool = true;
        /// What makes an evaluation the best one. `map` is the mean average precision.
        best: Option<BestBy> = None, unset "`accuracy`, with `data.label_delim` `map`", also ["monitor", "metric"];
    }

    /// `[log]`: output of the run.
    LogConfig "log" {
        /// Steps between plain progress lines, and between the training points of TensorBoard.
        every: usize = 50, in 1..=LARGEST_COUNT;
        /// Writes TensorBoard events.
        tensorboard: bool = true;
        /// Writes `timeline.json`: what each rank did when, over the run's first steps.
        timeline: bool = false, unset "off";
    }
}
