//! Batches of a data set in memory: sharded over ranks, augmented, normalised, and put together ahead of time.

mod batch;
mod prefetch;

use std::sync::Arc;

pub use batch::{Batch, Mix};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::augment::{Augment, Mixing, Pipeline};
use crate::sampler::{DistributedSampler, epoch_order, resize_repeating};
use crate::{DataError, Dataset, ImageShape};

/// What a loader yields, to whom, and with which means.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderConfig {
    /// Samples of a step on all ranks together.
    pub global_batch: usize,
    /// This worker, below `world`.
    pub rank: usize,
    /// Number of workers that share the data.
    pub world: usize,
    /// A new permutation each epoch, instead of the data set's own order.
    pub shuffle: bool,
    /// Leaves out the epoch's last batch where it is smaller than the others.
    pub drop_last: bool,
    /// Seed of order, augmentation and mixing.
    pub seed: u64,
    /// Changes made to each image.
    pub augment: Vec<Augment>,
    /// Mean of each channel, of pixels scaled to [0, 1].
    pub mean: Vec<f32>,
    /// Standard deviation of each channel, of pixels scaled to [0, 1].
    pub std: Vec<f32>,
    /// Mixup with lambda ~ Beta(alpha, alpha).
    pub mixup: Option<f64>,
    /// Cutmix with lambda ~ Beta(alpha, alpha); with mixup as well, each batch takes one of the two.
    pub cutmix: Option<f64>,
    /// Threads that put batches together.
    pub workers: usize,
    /// Batches kept ready ahead of the consumer; with 0, a batch is put together when it is asked for.
    pub prefetch: usize,
    /// For evaluation: each sample once, in the data set's order, as it is. `shuffle`, `drop_last`, `augment`,
    /// `mixup` and `cutmix` have no part in it.
    pub exact: bool,
    /// Augments and normalises the images; else batches hold only what is to be done to each, for a device that has the
    /// data set and does it there. Such a loader mixes nothing.
    pub pixels: bool,
}

impl Default for LoaderConfig {
    /// One rank, 128 samples a step, shuffled, not augmented, grey images left in [0, 1].
    fn default() -> Self {
        Self {
            global_batch: 128,
            rank: 0,
            world: 1,
            shuffle: true,
            drop_last: false,
            seed: 0,
            augment: Vec::new(),
            mean: vec![0.0],
            std: vec![1.0],
            mixup: None,
            cutmix: None,
            workers: 1,
            prefetch: 2,
            exact: false,
            pixels: true,
        }
    }
}

/// Yields the batches of a data set, epoch after epoch.
///
/// Step `s` of an epoch is the positions `s * global_batch..` of the epoch's order, and rank `r` takes every `world`-th
/// of them from the `r`-th on: where `world` divides the batch, that is what `DistributedSampler` gives the rank. A last
/// batch that is smaller is filled up by samples from the epoch's front until every rank has equally many, or left
/// out by `drop_last`. With `exact` nothing is filled up, and ranks may differ in how many samples and batches they
/// get.
///
/// Pixels depend on the seed, the epoch and the sample alone (mixing also on the batch), not on threads, prefetching
/// or the world size.
pub struct Loader {
    shared: Arc<Shared>,
    pool: Arc<ThreadPool>,
    /// Samples of all ranks in an epoch.
    total: usize,
    batches: usize,
}

/// What the threads that put batches together need.
struct Shared {
    dataset: Arc<Dataset>,
    config: LoaderConfig,
    pipeline: Pipeline,
    mixing: Mixing,
    shape: ImageShape,
}

impl Loader {
    /// A loader with threads of its own.
    ///
    /// # Errors
    /// A configuration that makes no sense for this data set, or threads that cannot be started.
    pub fn new(dataset: Arc<Dataset>, config: LoaderConfig) -> Result<Self, DataError> {
        let shape = dataset.shape;
        check_dataset(&dataset)?;
        DistributedSampler::new(
            dataset.len(),
            config.rank,
            config.world,
            config.shuffle,
            config.seed,
            config.drop_last,
        )?;
        check_config(&config)?;
        let pipeline = Pipeline::new(&config.augment, &config.mean, &config.std, shape)?;
        let mixing = Mixing::new(config.mixup, config.cutmix)?;
        let total = epoch_total(&config, dataset.len());
        if total == 0 {
            let cause =
                format!("drop_last leaves nothing of {} samples in batches of {}", dataset.len(), config.global_batch);
            return Err(
                DataError::new("", cause, format!("use at most {} samples a batch", dataset.len())).at("global_batch")
            );
        }
        let batches = total.div_ceil(config.global_batch);
        // Exact evaluation: a last batch with fewer samples than ranks has none for the last ranks.
        let last = total - (batches - 1) * config.global_batch;
        let batches = if config.rank < last { batches } else { batches - 1 };
        let pool = ThreadPoolBuilder::new()
            .num_threads(config.workers)
            .thread_name(|thread| format!("loader-{thread}"))
            .build()
            .map_err(|error| {
                let cause = format!("cannot start {} threads: {error}", config.workers);
                DataError::new("", cause, "use fewer, or raise the limit on processes (ulimit -u)").at("workers")
            })?;
        let shared = Arc::new(Shared { dataset, config, pipeline, mixing, shape });
        Ok(Self { shared, pool: Arc::new(pool), total, batches })
    }

    /// What decides on the augmentation and carries it out.
    pub fn pipeline(&self) -> &Pipeline {
        &self.shared.pipeline
    }

    /// Batches that this rank gets in an epoch. The same on all ranks unless the configuration is `exact`.
    pub fn batches_per_epoch(&self) -> usize {
        self.batches
    }

    /// Samples that all ranks get together in an epoch, those counted twice that fill a last batch up.
    pub fn samples_per_epoch(&self) -> usize {
        self.total
    }

    /// The configuration.
    pub fn config(&self) -> &LoaderConfig {
        &self.shared.config
    }

    /// The data set.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.shared.dataset
    }

    /// The batches of `epoch` from `first_batch` on, in order. Those from the middle of an epoch equal those that an
    /// uninterrupted epoch has there; a `first_batch` beyond the epoch's end leaves none.
    ///
    /// The threads start at once and keep `prefetch` batches ready. Dropping the iterator stops them.
    ///
    /// # Panics
    /// The iterator panics where a loader thread panicked, with the same message.
    pub fn epoch(&self, epoch: usize, first_batch: usize) -> impl ExactSizeIterator<Item = Batch> + Send + use<> {
        let Shared { dataset, config, .. } = &*self.shared;
        // Loader::new checked that samples can be numbered.
        let mut order = epoch_order(dataset.len() as u32, config.shuffle && !config.exact, config.seed, epoch);
        resize_repeating(&mut order, self.total);
        let epoch = batch::Epoch { shared: Arc::clone(&self.shared), epoch, order };
        let first = first_batch.min(self.batches);
        let work = move |index| epoch.batch(index);
        prefetch::Prefetch::new(Arc::clone(&self.pool), first, self.batches, config.prefetch, work)
    }
}

/// Samples of all ranks in an epoch: whole batches, and a last one that is dropped, or filled up until every rank has
/// equally many (as far as a batch goes, where the world does not divide it), or left as it is.
fn epoch_total(config: &LoaderConfig, len: usize) -> usize {
    let rest = len % config.global_batch;
    let whole = len - rest;
    if config.exact {
        len
    } else if config.drop_last {
        whole
    } else {
        whole + rest.next_multiple_of(config.world).min(config.global_batch)
    }
}

fn check_dataset(dataset: &Dataset) -> Result<(), DataError> {
    let (images, pixels, shape) = (dataset.len(), dataset.images.len(), dataset.shape);
    if images == 0 {
        return Err(DataError::new("", "the data set has no image", "check its folder").at(dataset.name.as_str()));
    }
    if images.checked_mul(shape.len()) != Some(pixels) {
        let cause = format!("{pixels} bytes of pixels for {images} images of {shape}");
        return Err(DataError::new("", cause, "every image has to have the same shape").at(dataset.name.as_str()));
    }
    Ok(())
}

fn check_config(config: &LoaderConfig) -> Result<(), DataError> {
    let LoaderConfig { global_batch, world, .. } = *config;
    let at_least_one = |name: &str| DataError::new("", "0 is too few", "use at least 1").at(name);
    if global_batch == 0 {
        return Err(at_least_one("global_batch"));
    }
    if config.workers == 0 {
        return Err(at_least_one("workers"));
    }
    if !config.pixels && (config.mixup.is_some() || config.cutmix.is_some()) {
        let cause = "images that are mixed with each other are put together by the loader";
        return Err(DataError::new("", cause, "leave the pixels to the loader, or mix nothing").at("pixels"));
    }
    if global_batch < world {
        let cause = format!("{global_batch} samples a step cannot be shared by {world} workers");
        return Err(DataError::new("", cause, format!("use at least {world}, or fewer workers")).at("global_batch"));
    }
    Ok(())
}
