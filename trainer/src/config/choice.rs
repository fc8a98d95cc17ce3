//! Words that a key can be set to, one enum a key.

use std::fmt::Debug;

/// One word out of a fixed list.
pub trait Choice: Copy + PartialEq + Debug + 'static {
    /// Every choice, in the order in which users are shown them.
    const ALL: &'static [Self];

    /// The word in the TOML.
    fn name(self) -> &'static str;

    /// The choice of that word.
    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|choice| choice.name() == name)
    }
}

/// An enum of words: the variants, their words, `Display`, `Serialize` and [`Choice`] from one list.
macro_rules! choices {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl Choice for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }
    };
}

choices! {
    /// What `train.batch_size` counts.
    BatchScope {
        /// Samples of one step over all workers: the same training whatever the world size.
        Global = "global",
        /// Samples of one step on each worker: the global batch grows with the world.
        PerWorker = "per_worker",
    }
}

choices! {
    /// Number format of activations and gradients.
    Precision {
        /// 32-bit floats.
        F32 = "f32",
        /// bfloat16 with 32-bit master weights; needs a GPU.
        Bf16 = "bf16",
    }
}

choices! {
    /// The optimizer's name, without its parameters.
    OptimizerName {
        /// Stochastic gradient descent with momentum.
        Sgd = "sgd",
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
    }
}

choices! {
    /// How the learning rate grows with the number of workers.
    LrScale {
        /// As written.
        None = "none",
        /// Times the world size (Goyal et al. 2017).
        Linear = "linear",
        /// Times the root of the world size.
        Sqrt = "sqrt",
    }
}

choices! {
    /// The schedule's name, without its parameters.
    ScheduleName {
        /// Half a cosine from lr to 0.
        Cosine = "cosine",
        /// PyTorch's `OneCycleLR`.
        OneCycle = "one-cycle",
        /// Times gamma at each milestone.
        MultiStep = "multi-step",
        /// lr throughout.
        Constant = "constant",
    }
}

choices! {
    /// The shape of one-cycle's two slopes.
    Anneal {
        /// Straight lines.
        Linear = "linear",
        /// Half cosines.
        Cos = "cos",
    }
}

choices! {
    /// How many devices take part in a step, and how.
    Mode {
        /// One process, one device.
        Single = "single",
        /// One process that replicates the model every step (`DataParallel`).
        Dp = "dp",
        /// A process a device (`DistributedDataParallel`).
        Ddp = "ddp",
    }
}

choices! {
    /// What carries gradients between workers.
    Backend {
        /// The best that all workers can reach each other by.
        Auto = "auto",
        /// Shared memory of one machine.
        Shm = "shm",
        /// TCP sockets.
        Tcp = "tcp",
        /// Our CUDA kernels over peer access.
        Cuda = "cuda",
        /// NVIDIA's library.
        Nccl = "nccl",
        /// The system's MPI.
        Mpi = "mpi",
    }
}

choices! {
    /// Format of gradients on the wire.
    Compression {
        /// 32-bit floats.
        None = "none",
        /// IEEE half precision.
        Fp16 = "fp16",
        /// bfloat16.
        Bf16 = "bf16",
    }
}

choices! {
    /// What batch norm does across workers.
    BatchNormPolicy {
        /// Nothing: each worker has its own statistics.
        Local = "local",
        /// Rank 0's running statistics go to all.
        Broadcast = "broadcast",
        /// Running statistics are averaged before an evaluation.
        Reduce = "reduce",
        /// Statistics of the global batch in every forward pass.
        Sync = "sync",
    }
}
