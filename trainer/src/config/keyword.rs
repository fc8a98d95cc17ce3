//! Words that a key can be set to, one enum per key.

use std::fmt::{Debug, Display};

use super::key::{KeyValue, Range};
use super::suggest;
use super::value::{RawValue, ValueError};

/// One word out of a fixed list.
pub trait Keyword: Copy + PartialEq + Debug + Display + 'static {
    /// Every choice, in the order in which users are shown them.
    const ALL: &'static [Self];

    /// Returns the word in the TOML, and the names of this choice in other trainers.
    fn names(self) -> (&'static str, &'static [&'static str]);

    /// Returns the word in the TOML.
    fn name(self) -> &'static str {
        self.names().0
    }

    /// Returns the choice whose word is `name`.
    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|choice| choice.name() == name)
    }
}

impl<T: Keyword> KeyValue for T {
    const TYPE: &'static str = String::TYPE;

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        let word = raw.string()?;
        Self::from_name(&word).ok_or_else(|| {
            let names: Vec<suggest::Name> = Self::ALL.iter().map(|choice| choice.names()).collect();
            ValueError::new(format!("unknown value {word:?}")).hint(suggest::hint("choices", &word, &names))
        })
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.name().into())
    }

    fn choices() -> Vec<&'static str> {
        Self::ALL.iter().map(|choice| choice.name()).collect()
    }
}

/// Declares enums of words: variants, words and aliases, `Display` and [`Keyword`] from one list.
macro_rules! keywords {
    ($(
        $(#[$about:meta])*
        $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal $(also $($alias:literal)+)?,)+ }
    )+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl Keyword for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn names(self) -> (&'static str, &'static [&'static str]) {
                match self {
                    $(Self::$variant => ($word, &[$($($alias),+)?]),)+
                }
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    )+};
}

keywords! {
    /// When images in files are decoded.
    Decode {
        /// Once, at the start; the decoded images stay in memory.
        Memory = "memory" also "ram" "cache",
        /// In each epoch, when a batch needs them.
        Epoch = "epoch" also "lazy" "disk",
    }

    /// What happens if an image cannot be decoded.
    OnError {
        /// The run ends with an error.
        Error = "error" also "raise" "fail",
        /// The next image of its class replaces it.
        Skip = "skip" also "ignore" "warn",
    }

    /// What `train.batch_size` counts.
    BatchScope {
        /// Samples of one step over all workers: the same training whatever the world size.
        Global = "global",
        /// Samples of one step on each worker: the global batch grows with the world size.
        PerWorker = "per_worker",
    }

    /// Number format of activations and gradients.
    Precision {
        /// 32-bit floats.
        F32 = "f32" also "float32",
        /// bfloat16 with 32-bit master weights.
        Bf16 = "bf16" also "bfloat16" "float16",
    }

    /// Test-time augmentation of evaluations.
    Tta {
        /// None.
        None = "none",
        /// The mean of the logits of an image and its mirror image.
        Flip = "flip" also "mirror" "hflip",
    }

    /// What makes an evaluation the best one.
    BestBy {
        /// The highest accuracy: top-1, of images with several classes the exact match.
        Accuracy = "accuracy" also "top1" "acc",
        /// The highest mean of the classes' recalls.
        BalancedAccuracy = "balanced-accuracy" also "balanced_accuracy" "balanced",
        /// The highest mean average precision, of images with several classes.
        MeanAveragePrecision = "map" also "mAP" "mean-average-precision",
        /// The lowest loss.
        Loss = "loss" also "val_loss",
    }

    /// Which optimizer.
    OptimizerKind {
        /// PyTorch's `SGD`.
        Sgd = "sgd",
        /// PyTorch's `AdamW`: Adam with decoupled weight decay.
        AdamW = "adamw",
        /// PyTorch's `Muon` for the weights of hidden layers, `AdamW` for all other parameters.
        Muon = "muon",
    }

    /// How the learning rate grows with the number of workers.
    LrScale {
        /// As written.
        None = "none",
        /// The linear scaling rule (Goyal et al. 2017): `lr` times the growth of the global batch. The growth is the number of
        /// workers with `batch_scope = "per_worker"`, and 1 otherwise.
        Linear = "linear",
        /// `lr` times the square root of the growth of the global batch.
        Sqrt = "sqrt",
    }

    /// The learning rate over the run.
    ScheduleKind {
        /// Warm-up, then half a cosine from `lr` to 0.
        Cosine = "cosine",
        /// PyTorch's `OneCycleLR` with `cycle_momentum=False`: up from lr/div, down to lr/div/final_div.
        OneCycle = "one-cycle",
        /// Warm-up, then `lr`, which is multiplied by `gamma` at each milestone.
        MultiStep = "multi-step",
        /// Warm-up, then `lr`.
        Constant = "constant",
    }

    /// The shape of one-cycle's two slopes.
    Anneal {
        /// Straight lines.
        Linear = "linear",
        /// Half cosines.
        Cos = "cos",
    }

    /// How many devices take part in a step, and how.
    Mode {
        /// One process, one device.
        Single = "single",
        /// One process that replicates the model every step (`DataParallel`).
        Dp = "dp",
        /// One process per device (`DistributedDataParallel`).
        Ddp = "ddp",
    }

    /// Communication backend of the gradients.
    Backend {
        /// The fastest transport that connects all workers.
        Auto = "auto",
        /// Shared memory of one machine.
        Shm = "shm",
        /// TCP sockets.
        Tcp = "tcp",
        /// Custom CUDA kernels over peer access.
        Cuda = "cuda",
        /// NVIDIA's library.
        Nccl = "nccl",
        /// The system's MPI.
        Mpi = "mpi",
    }

    /// Format of gradients on the wire.
    Compression {
        /// 32-bit floats.
        None = "none",
        /// IEEE half precision.
        Fp16 = "fp16",
        /// bfloat16.
        Bf16 = "bf16",
    }

    /// A setting that `parallel.autotune` may change.
    Tunable {
        /// `parallel.bucket_mb`.
        BucketMb = "bucket_mb" also "bucket",
        /// `parallel.first_bucket_mb`.
        FirstBucketMb = "first_bucket_mb" also "first_bucket",
        /// `parallel.threads`.
        Threads = "threads",
        /// `parallel.compression = "fp16"`.
        Fp16 = "fp16" also "half" "compression",
        /// `parallel.compression = "bf16"`.
        Bf16 = "bf16" also "bfloat16",
    }

    /// What batch norm does across workers.
    BatchNormPolicy {
        /// Nothing: each worker has its own statistics.
        Local = "local",
        /// Rank 0's running statistics are broadcast to all ranks.
        Broadcast = "broadcast",
        /// Running statistics are averaged before an evaluation.
        Reduce = "reduce",
        /// Statistics of the global batch in every forward pass (PyTorch's `SyncBatchNorm`).
        Sync = "sync",
    }
}
