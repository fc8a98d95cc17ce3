//! One batch: its contents and its assembly.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::resize::resize;
use super::{LoaderState, OnError};
use crate::augment::AugmentParams;
use crate::{DataError, EncodedImages, ImageShape, TEN_CROP};

/// One rank's share of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Normalised pixels, `[B, C, H, W]`; with ten crops `[B, 10, C, H, W]`. Empty if a device augments the images
    /// ([`super::LoaderConfig::pixels`]).
    pub images: Vec<f32>,
    /// Views of each image in `images`: 1, or [`TEN_CROP`].
    pub views: usize,
    /// Augmentation parameters of each image, `[B]`, if a device augments the images. Otherwise empty.
    pub params: Vec<AugmentParams>,
    /// Class of each image, `[B]`.
    pub labels: Vec<i32>,
    /// 1 for each class that an image has and 0 for the others, row-major `[B, classes]`. Empty unless the data set is
    /// multi-label.
    pub multi_hot: Vec<f32>,
    /// The partners that the images were mixed with; none without mixup and cutmix.
    pub mix: Option<Mix>,
    /// Position of each image in the data set, `[B]`.
    pub ids: Vec<u32>,
    /// How often the epoch has drawn each image before, `[B]`. Empty unless the sampler has weights.
    pub repetitions: Vec<u32>,
    /// Epoch, from [`FIRST_EPOCH`](crate::sampler::FIRST_EPOCH) = 1.
    pub epoch: usize,
    /// Index of the batch in the epoch, from 0.
    pub index: usize,
    /// Number of samples of this step on all ranks.
    pub global_len: usize,
    /// Sum of the class weights of these samples' labels, the same bits on all ranks. Without class weights, and for mixed
    /// images (whose targets are probabilities), the number of samples.
    pub global_weight: f64,
    /// The images of the batch and of its partners that another image of their class replaces, each with its mistake
    /// ([`OnError::Replace`]).
    pub replaced: Vec<DataError>,
    /// Shape of each image in `images`.
    pub shape: ImageShape,
}

impl Batch {
    /// Returns the number of images in the batch.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Repeats the last image until there are `len` images, for devices that compile or tune kernels for each batch size. The
    /// caller must ignore the results of the repeated images.
    pub fn padded(mut self, len: usize) -> Self {
        let (one, missing) = (self.views * self.shape.len(), len.saturating_sub(self.len()));
        let classes = self.multi_hot.len() / self.len().max(1);
        if self.is_empty() || missing == 0 {
            return self;
        }
        for _ in 0..missing {
            self.images.extend_from_within(self.images.len().saturating_sub(one)..);
            self.multi_hot.extend_from_within(self.multi_hot.len() - classes..);
        }
        let last = |count: usize| count.saturating_sub(1)..count;
        for _ in 0..missing {
            self.params.extend_from_within(last(self.params.len()));
            self.labels.extend_from_within(last(self.labels.len()));
            self.ids.extend_from_within(last(self.ids.len()));
            self.repetitions.extend_from_within(last(self.repetitions.len()));
            if let Some(mix) = &mut self.mix {
                mix.labels.extend_from_within(last(mix.labels.len()));
            }
        }
        self
    }

    /// Returns true when there is no image. The loader never yields such a batch.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }
}

/// The partners that the images of a batch were mixed with.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// Class of each image's partner, `[B]`.
    pub labels: Vec<i32>,
    /// Weight of the image's own label, in [0, 1]; the partner's label has the rest.
    pub lambda: f32,
}

/// The images of a batch during assembly.
enum AugmentedPixels {
    /// Augmented and normalised.
    Done(Vec<f32>),
    /// The parameters with which a device augments each image.
    OnDevice(Vec<AugmentParams>),
}

/// Minimum number of images in memory per task. Smaller tasks cost more to schedule than they save. An encoded image is a task
/// of its own, because decoding takes longer.
const MIN_IMAGES_PER_TASK: usize = 16;

/// Maximum number of images that are tried in place of one that cannot be decoded. If all of them fail, the whole data set
/// is probably damaged.
const MAX_REPLACEMENTS: usize = 100;

/// The batches of one epoch. Any batch can be assembled at any time.
pub(super) struct EpochBatches {
    pub(super) shared: Arc<LoaderState>,
    pub(super) epoch: usize,
    /// Samples of all ranks, in the epoch's order.
    pub(super) order: Vec<u32>,
    /// Number of earlier draws of the same sample, for each element of `order`. Empty if the sampler has no weights.
    pub(super) repetitions: Vec<u32>,
}

impl EpochBatches {
    /// Assembles batch `index` on the pool of the calling thread.
    ///
    /// # Errors
    /// The first image of the batch that cannot be decoded.
    pub(super) fn batch(&self, index: usize) -> Result<Batch, DataError> {
        let LoaderState { config, shape, dataset, .. } = &*self.shared;
        let start = index * config.global_batch;
        let global = start..self.order.len().min(start + config.global_batch);
        // Positions in the epoch's order.
        let mine: Vec<usize> = global.clone().skip(config.rank).step_by(config.world_size).collect();
        if !config.pixels {
            let params = mine.iter().map(|&position| self.params(position)).collect();
            return Ok(self.assemble(index, global, &mine, AugmentedPixels::OnDevice(params), None));
        }
        let one = self.views() * shape.len();
        let mut images = vec![0.0; mine.len() * one];
        let per_task = if dataset.encoded.is_some() { 1 } else { MIN_IMAGES_PER_TASK };
        let chunks = images.par_chunks_mut(one).with_min_len(per_task);
        let mixing =
            if config.evaluation { None } else { self.shared.mixing.params(config.seed, self.epoch, index, *shape) };
        let mut mix = None;
        // Collected, so that the first mistake in order is reported.
        let decoded: Vec<Result<Replaced, DataError>> = match mixing {
            None => chunks.zip(&mine).map(|(out, &position)| self.image(position, out)).collect(),
            Some(mixing) => {
                // The partner has the same position in the reversed global batch. It may belong to another rank.
                let partners: Vec<usize> = global.clone().rev().skip(config.rank).step_by(config.world_size).collect();
                mix = Some(Mix { labels: self.labels(&partners), lambda: mixing.lambda() });
                let scratch = || vec![0.0; shape.len()];
                let mixed =
                    chunks.zip(&mine).zip(&partners).map_init(scratch, |scratch, ((out, &position), &partner)| {
                        let mut replaced = self.image(position, out)?;
                        replaced.extend(self.image(partner, scratch)?);
                        mixing.apply(out, scratch, *shape);
                        Ok(replaced)
                    });
                mixed.collect()
            }
        };
        let mut replaced = Vec::new();
        for one in decoded {
            replaced.extend(one?);
        }
        let smaller = config.shape_in(self.epoch, *shape);
        let images = if smaller == *shape { images } else { resize(&images, *shape, smaller) };
        let batch = self.assemble(index, global, &mine, AugmentedPixels::Done(images), mix);
        Ok(Batch { replaced, shape: smaller, ..batch })
    }

    fn assemble(
        &self,
        index: usize,
        global: Range<usize>,
        mine: &[usize],
        pixels: AugmentedPixels,
        mix: Option<Mix>,
    ) -> Batch {
        let (images, params) = match pixels {
            AugmentedPixels::Done(images) => (images, Vec::new()),
            AugmentedPixels::OnDevice(params) => (Vec::new(), params),
        };
        let weights = &self.shared.config.class_weights;
        let global_len = global.len();
        let global_weight = match weights.is_empty() || mix.is_some() {
            true => global_len as f64,
            false => global.map(|position| weights[usize::from(self.label(position))]).sum(),
        };
        let ids = mine.iter().map(|&position| self.order[position]).collect();
        let repetitions = if self.repetitions.is_empty() {
            Vec::new()
        } else {
            mine.iter().map(|&at| self.repetitions[at]).collect()
        };
        let (labels, shape, epoch) = (self.labels(mine), self.shared.shape, self.epoch);
        let (multi_hot, replaced) = (self.multi_hot(mine), Vec::new());
        Batch {
            images,
            params,
            views: self.views(),
            labels,
            multi_hot,
            mix,
            ids,
            repetitions,
            epoch,
            index,
            global_len,
            global_weight,
            replaced,
            shape,
        }
    }

    /// Returns the number of views of each image.
    fn views(&self) -> usize {
        if self.shared.config.ten_crop { TEN_CROP } else { 1 }
    }

    /// Returns the class of the image at a position of the order.
    fn label(&self, position: usize) -> u16 {
        self.shared.dataset.labels[self.order[position] as usize]
    }

    fn labels(&self, positions: &[usize]) -> Vec<i32> {
        positions.iter().map(|&position| i32::from(self.label(position))).collect()
    }

    /// Returns [`Batch::multi_hot`] of the samples at positions of the order.
    fn multi_hot(&self, positions: &[usize]) -> Vec<f32> {
        let dataset = &self.shared.dataset;
        let Some(sets) = &dataset.label_sets else { return Vec::new() };
        let classes = dataset.classes.len();
        let mut rows = vec![0.0; positions.len() * classes];
        for (row, &position) in rows.chunks_exact_mut(classes).zip(positions) {
            sets.of(self.order[position] as usize).iter().for_each(|&class| row[usize::from(class)] = 1.0);
        }
        rows
    }

    /// Returns the augmentation parameters of the sample at a position of the order.
    fn params(&self, position: usize) -> AugmentParams {
        let LoaderState { config, pipeline, .. } = &*self.shared;
        if config.evaluation {
            return AugmentParams::default();
        }
        let repetition = self.repetitions.get(position).copied().unwrap_or(0);
        pipeline.params_of_repetition(config.seed, self.epoch, self.order[position], repetition)
    }

    /// Writes the views of the sample at a position of the order with this epoch's augmentation to `out`, `[views, C, H, W]`.
    fn image(&self, position: usize, out: &mut [f32]) -> Result<Replaced, DataError> {
        let LoaderState { dataset, pipeline, shape, .. } = &*self.shared;
        let (id, params) = (self.order[position] as usize, self.params(position));
        let Some(encoded) = &dataset.encoded else {
            pipeline.apply(dataset.image(id), &params, out);
            return Ok(Vec::new());
        };
        let mut pixels = vec![0; out.len()];
        let replaced = match self.decode(encoded, position, id, &mut pixels) {
            Ok(()) => Vec::new(),
            Err(error) => vec![self.replace(encoded, position, error, &mut pixels)?],
        };
        for (pixels, out) in pixels.chunks_exact(shape.len()).zip(out.chunks_exact_mut(shape.len())) {
            pipeline.apply(pixels, &params, out);
        }
        Ok(replaced)
    }

    /// Decodes image `id` for the sample at a position of the order.
    fn decode(&self, encoded: &EncodedImages, position: usize, id: usize, pixels: &mut [u8]) -> Result<(), DataError> {
        let LoaderState { config, pipeline, .. } = &*self.shared;
        if config.ten_crop {
            return encoded.decode_ten_crops(id, pixels);
        }
        if config.evaluation {
            return encoded.decode(id, pixels);
        }
        let repetition = self.repetitions.get(position).copied().unwrap_or(0);
        let sample = (config.seed, self.epoch, self.order[position], repetition);
        encoded.decode_window(id, |height, width| pipeline.resized_crop_of_repetition(sample, (height, width)), pixels)
    }

    /// Decodes the next image of the same class in place of one that failed with `error`, and returns that error.
    fn replace(
        &self,
        encoded: &EncodedImages,
        position: usize,
        error: DataError,
        pixels: &mut [u8],
    ) -> Result<DataError, DataError> {
        let LoaderState { config, dataset, .. } = &*self.shared;
        // An image of another size is a mistake of the configuration, and after an error of the system the same image may be
        // readable.
        if config.on_error == OnError::Fail || !error.is_bad_image {
            return Err(error);
        }
        let id = self.order[position] as usize;
        let others = (id + 1..dataset.len()).chain(0..id).filter(|&other| dataset.same_labels(id, other));
        let mut tried = 0;
        for other in others.take(MAX_REPLACEMENTS) {
            if self.decode(encoded, position, other, pixels).is_ok() {
                return Ok(error);
            }
            tried += 1;
        }
        let others = if tried == 1 { "1 other image".to_owned() } else { format!("{tried} other images") };
        let cause = format!("{}; {others} of its class cannot be decoded either", error.cause);
        Err(DataError { cause, ..error })
    }
}

/// The mistakes of images that others replace: none or one for each image that was decoded.
type Replaced = Vec<DataError>;
