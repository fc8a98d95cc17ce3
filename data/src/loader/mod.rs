//! Batches of a data set. Images are sharded over ranks, decoded if they are not in memory, augmented, normalised and assembled
//! ahead of time.

mod batch;
mod check;
mod prefetch;
mod resize;

use std::sync::Arc;

pub use batch::{Batch, Mix};
use rayon::{ThreadPool, ThreadPoolBuilder};
pub use resize::ResizeStage;

use crate::augment::{Augment, MixConfig, Pipeline};
use crate::sampler::{epoch_order, repetitions, resize_repeating, weighted_draws};
use crate::{DataError, Dataset, ImageShape, LabelSets};

/// The batches that a loader yields, the rank that gets them, and the resources that assemble them.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderConfig {
    /// Samples of a step on all ranks.
    pub global_batch: usize,
    /// Rank of this worker, below `world_size`.
    pub rank: usize,
    /// World size: the number of workers that share the data.
    pub world_size: usize,
    /// Permutes the samples in each epoch; otherwise the data set's own order is used.
    pub shuffle: bool,
    /// Leaves out the epoch's last batch if it is smaller than the others.
    pub drop_last: bool,
    /// Seed of order, augmentation and mixing.
    pub seed: u64,
    /// Augmentations of each image.
    pub augment: Vec<Augment>,
    /// Mean of each channel, `[C]`, for pixels scaled to [0, 1].
    pub mean: Vec<f32>,
    /// Standard deviation of each channel, `[C]`, for pixels scaled to [0, 1].
    pub std: Vec<f32>,
    /// Mixup with lambda ~ Beta(alpha, alpha).
    pub mixup: Option<f64>,
    /// Cutmix with lambda ~ Beta(alpha, alpha). With mixup as well, each batch uses one of the two.
    pub cutmix: Option<f64>,
    /// Threads that assemble batches.
    pub workers: usize,
    /// Batches kept ready ahead of the consumer. With 0, a batch is assembled when the consumer asks for it.
    pub prefetch: usize,
    /// For evaluation: each sample once, in the data set's order, only normalised. `shuffle`, `drop_last`, `augment`, `mixup`,
    /// `cutmix` and `sampler_weights` have no effect, but [`Loader::new`] checks them.
    pub evaluation: bool,
    /// Weight with which an image of each class is drawn, `[classes]`: an epoch draws as many images as there are, with
    /// replacement (PyTorch's `WeightedRandomSampler`). Empty: each image once.
    pub sampler_weights: Vec<f64>,
    /// Weight of each class in [`Batch::global_weight`], `[classes]`. Empty: every image counts 1.
    pub class_weights: Vec<f64>,
    /// Whether the loader augments and normalises the pixels on the host. If false, batches hold only each image's augmentation
    /// parameters, for a device that holds the data set and augments there; such a loader cannot mix images or change their
    /// colours.
    pub pixels: bool,
    /// How to handle an encoded image that cannot be read or decoded.
    pub on_error: OnError,
    /// For evaluation: each image as ten crops of its file's pixels (torchvision's `TenCrop`).
    pub ten_crop: bool,
    /// Progressive resizing: the sizes to which augmented images are resized, by ascending epoch. Later epochs have images of
    /// the full size. Ignored by `evaluation`.
    pub resize_stages: Vec<ResizeStage>,
}

impl LoaderConfig {
    /// Returns the shape of an epoch's images: `shape`, or that of the epoch's stage of [`Self::resize_stages`].
    pub fn shape_in(&self, epoch: usize, shape: ImageShape) -> ImageShape {
        let stage = self.resize_stages.iter().find(|stage| epoch <= stage.last_epoch && !self.evaluation);
        stage.map_or(shape, |stage| stage.resized(shape))
    }
}

/// How a loader handles an encoded image that cannot be read or decoded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnError {
    /// The batch is an error.
    #[default]
    Fail,
    /// The sample gets the pixels of another image of its class (multi-label: with the same classes): the next one in the data
    /// set that can be decoded, where the first image follows the last. The sample's id, label and augmentation stay, so that
    /// batches, orders and weights do not change.
    Replace,
}

impl Default for LoaderConfig {
    /// One rank, 128 samples per step, shuffled, not augmented, grey images in [0, 1].
    fn default() -> Self {
        Self {
            global_batch: 128,
            rank: 0,
            world_size: 1,
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
            evaluation: false,
            sampler_weights: Vec::new(),
            class_weights: Vec::new(),
            pixels: true,
            on_error: OnError::Fail,
            ten_crop: false,
            resize_stages: Vec::new(),
        }
    }
}

/// Yields the batches of a data set, epoch after epoch.
///
/// Step `s` of an epoch takes the positions `s * global_batch..` of the epoch's order. Rank `r` takes every `world_size`-th of
/// these positions, starting with the `r`-th. If `world_size` divides the batch, a rank's samples are those of PyTorch's
/// `DistributedSampler`. A smaller last batch is padded with samples from the epoch's front until all ranks have equally
/// many; `drop_last` leaves it out instead. `evaluation` pads nothing, so ranks may differ in their number of samples and batches.
///
/// Pixels depend on the seed, the epoch and the sample alone (mixing also on the batch, and weighted sampling on how often the
/// epoch has drawn the sample before), not on threads, prefetching or the world size.
pub struct Loader {
    shared: Arc<LoaderState>,
    pool: Arc<ThreadPool>,
    /// Samples of all ranks in an epoch, padding included.
    total: usize,
    batches: usize,
}

/// The data that the loader's threads share.
struct LoaderState {
    dataset: Arc<Dataset>,
    config: LoaderConfig,
    pipeline: Pipeline,
    mixing: MixConfig,
    shape: ImageShape,
}

impl Loader {
    /// Makes a loader and starts its threads.
    ///
    /// # Errors
    /// An impossible configuration for this data set, or threads that cannot be started.
    pub fn new(dataset: Arc<Dataset>, config: LoaderConfig) -> Result<Self, DataError> {
        let shape = dataset.shape;
        check::check(&config, &dataset)?;
        let pipeline = Pipeline::new(&config.augment, &config.mean, &config.std, shape)?;
        let mixing = MixConfig::new(config.mixup, config.cutmix)?;
        let total = epoch_total(&config, dataset.len());
        if total == 0 {
            let cause =
                format!("drop_last leaves nothing of {} samples in batches of {}", dataset.len(), config.global_batch);
            return Err(DataError::new("", cause, format!("use at most {} samples per batch", dataset.len()))
                .at("global_batch"));
        }
        let batches = total.div_ceil(config.global_batch);
        // Exact evaluation: if the last batch has fewer samples than ranks, the last ranks have no such batch.
        let last = total - (batches - 1) * config.global_batch;
        let batches = if config.rank < last { batches } else { batches - 1 };
        let pool = ThreadPoolBuilder::new()
            .num_threads(config.workers)
            .thread_name(|thread| format!("loader-{thread}"))
            .build()
            .map_err(|error| {
                let cause = format!("cannot start {} threads: {error}", config.workers);
                let hint = "use fewer, or raise the limit on processes (ulimit -u)";
                // The input is right, and the limit may leave room later.
                DataError { is_transient: true, ..DataError::new("", cause, hint) }.at("workers")
            })?;
        let shared = Arc::new(LoaderState { dataset, config, pipeline, mixing, shape });
        Ok(Self { shared, pool: Arc::new(pool), total, batches })
    }

    /// Returns the number of images of the data set.
    pub fn dataset_len(&self) -> usize {
        self.shared.dataset.len()
    }

    /// Returns a checksum (CRC-32C) of an evaluation's inputs: the number of images, their labels, image size, normalisation, and
    /// the pixels of up to 16 images, evenly spaced. An image that cannot be read counts as empty.
    ///
    /// Checkpoints contain the checksum. So it is the same whether images are decoded in each epoch or in memory.
    pub fn eval_checksum(&self) -> u32 {
        self.checksum(self.shared.dataset.label_sets.as_ref())
    }

    /// Returns the checksum that older versions computed for a multi-label data set, without its labels. `None` for other data sets.
    pub fn eval_checksum_without_label_sets(&self) -> Option<u32> {
        self.shared.dataset.label_sets.as_ref().map(|_| self.checksum(None))
    }

    fn checksum(&self, label_sets: Option<&LabelSets>) -> u32 {
        const IMAGES: usize = 16;
        let (dataset, config) = (&self.shared.dataset, &self.shared.config);
        let ImageShape { channels, height, width } = dataset.shape;
        let sizes = [dataset.len(), channels, height, width].into_iter().flat_map(|size| (size as u64).to_le_bytes());
        let normalisation = config.mean.iter().chain(&config.std).flat_map(|value| value.to_le_bytes());
        let labels = dataset.labels.iter().flat_map(|label| label.to_le_bytes());
        // The length of a set separates it from the next one.
        let sets = label_sets.into_iter().flat_map(LabelSets::iter);
        let sets = sets.flat_map(|set| {
            let len = (set.len() as u64).to_le_bytes();
            len.into_iter().chain(set.iter().flat_map(|class| class.to_le_bytes()))
        });
        let facts: Vec<u8> = sizes.chain(normalisation).chain(labels).chain(sets).collect();
        let images = (0..dataset.len()).step_by(dataset.len().div_ceil(IMAGES).max(1));
        images.fold(crc32c::crc32c(&facts), |crc, image| {
            crc32c::crc32c_append(crc, &dataset.pixels(image).unwrap_or_default())
        })
    }

    /// Returns the number of samples of a batch over all ranks. The last batch of an epoch may have fewer.
    pub fn global_batch(&self) -> usize {
        self.shared.config.global_batch
    }

    /// Returns the pipeline that augments and normalises the images.
    pub fn pipeline(&self) -> &Pipeline {
        &self.shared.pipeline
    }

    /// Returns this rank's number of batches in an epoch. It is the same on all ranks unless the configuration is `evaluation`.
    pub fn batches_per_epoch(&self) -> usize {
        self.batches
    }

    /// Returns the batches of `epoch` from `first_batch` on, in order. Epochs count from
    /// [`FIRST_EPOCH`](crate::sampler::FIRST_EPOCH) = 1; epoch `e` has the order of PyTorch's sampler after `set_epoch(e)`. An
    /// epoch continued in the middle yields the same batches as an uninterrupted one. A `first_batch` beyond the epoch's end
    /// yields none.
    ///
    /// The threads start at once and keep `prefetch` batches ready. Dropping the iterator stops them.
    ///
    /// # Panics
    /// The iterator panics if a loader thread panicked, with the same message.
    ///
    /// # Errors
    /// A batch is an error if an image of it cannot be decoded. It names the batch's first such image.
    pub fn epoch(
        &self,
        epoch: usize,
        first_batch: usize,
    ) -> impl ExactSizeIterator<Item = Result<Batch, DataError>> + Send + use<> {
        let LoaderState { dataset, config, .. } = &*self.shared;
        let len = dataset.len();
        let weighted = !config.sampler_weights.is_empty() && !config.evaluation;
        let mut order = if weighted {
            let weight = |&label: &u16| config.sampler_weights[usize::from(label)];
            let weights: Vec<f64> = dataset.labels.iter().map(weight).collect();
            weighted_draws(&weights, len, config.seed.wrapping_add(epoch as u64))
        } else {
            // Loader::new has checked that a u32 can number the samples.
            epoch_order(len as u32, config.shuffle && !config.evaluation, config.seed, epoch)
        };
        let mut repetitions = if weighted { repetitions(&order, len) } else { Vec::new() };
        resize_repeating(&mut order, self.total);
        resize_repeating(&mut repetitions, if weighted { self.total } else { 0 });
        let epoch = batch::EpochBatches { shared: Arc::clone(&self.shared), epoch, order, repetitions };
        let first = first_batch.min(self.batches);
        let work = move |index| epoch.batch(index);
        prefetch::Prefetch::new(Arc::clone(&self.pool), first, self.batches, config.prefetch, work)
    }
}

/// Returns the number of samples of all ranks in an epoch: whole batches and a smaller last batch. The last batch is kept
/// (`evaluation`), dropped (`drop_last`), or padded until all ranks have equally many, up to a whole batch if the world size does
/// not divide the batch.
fn epoch_total(config: &LoaderConfig, len: usize) -> usize {
    let rest = len % config.global_batch;
    let whole = len - rest;
    if config.evaluation {
        len
    } else if config.drop_last {
        whole
    } else {
        whole + rest.next_multiple_of(config.world_size).min(config.global_batch)
    }
}
