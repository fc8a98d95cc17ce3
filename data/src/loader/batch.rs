//! One batch: its contents and its assembly.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::Shared;
use crate::ImageShape;
use crate::augment::AugmentParams;

/// One rank's share of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Normalised pixels, `[B, C, H, W]`. Empty if a device augments the images ([`super::LoaderConfig::pixels`]).
    pub images: Vec<f32>,
    /// Augmentation parameters of each image for that device, `[B]`. Empty if `images` is not.
    pub params: Vec<AugmentParams>,
    /// Class of each image, `[B]`.
    pub labels: Vec<i32>,
    /// The partners that the images were mixed with; none without mixup and cutmix.
    pub mix: Option<Mix>,
    /// Position of each image in the data set, `[B]`.
    pub ids: Vec<u32>,
    /// How often the epoch has drawn each image before, `[B]`. Empty unless the sampler has weights.
    pub draws: Vec<u32>,
    /// Epoch, from [`FIRST_EPOCH`](crate::sampler::FIRST_EPOCH) = 1.
    pub epoch: usize,
    /// Index of the batch in the epoch, from 0.
    pub index: usize,
    /// Number of samples of this step on all ranks.
    pub global_len: usize,
    /// Sum of the class weights of these samples' labels, the same bits on all ranks. The number of samples without class
    /// weights, and for mixed images, whose targets are probabilities.
    pub global_weight: f64,
    /// Shape of each image.
    pub shape: ImageShape,
}

impl Batch {
    /// Returns the number of images in the batch.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Repeats the last image until there are `len` images, for devices that prepare for each size of a batch. Results of the
    /// repeated images mean nothing.
    pub fn padded(mut self, len: usize) -> Self {
        let (one, missing) = (self.shape.len(), len.saturating_sub(self.len()));
        if self.is_empty() || missing == 0 {
            return self;
        }
        for _ in 0..missing {
            self.images.extend_from_within(self.images.len().saturating_sub(one)..);
        }
        let last = |count: usize| count.saturating_sub(1)..count;
        for _ in 0..missing {
            self.params.extend_from_within(last(self.params.len()));
            self.labels.extend_from_within(last(self.labels.len()));
            self.ids.extend_from_within(last(self.ids.len()));
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
enum Pixels {
    /// Augmented and normalised.
    Done(Vec<f32>),
    /// The parameters with which a device augments each image.
    OnDevice(Vec<AugmentParams>),
}

/// Minimum number of images per task. Smaller tasks cost more to schedule than they save.
const MIN_IMAGES: usize = 16;

/// The batches of one epoch. Any batch can be assembled at any time.
pub(super) struct Epoch {
    pub(super) shared: Arc<Shared>,
    pub(super) epoch: usize,
    /// Samples of all ranks, in the epoch's order.
    pub(super) order: Vec<u32>,
    /// Number of earlier draws of the same sample, for each element of `order`. Empty if the sampler has no weights.
    pub(super) draws: Vec<u32>,
}

impl Epoch {
    /// Assembles batch `index` on the pool of the calling thread.
    pub(super) fn batch(&self, index: usize) -> Batch {
        let Shared { config, shape, .. } = &*self.shared;
        let start = index * config.global_batch;
        let global = start..self.order.len().min(start + config.global_batch);
        // Positions in the epoch's order.
        let mine: Vec<usize> = global.clone().skip(config.rank).step_by(config.world).collect();
        if !config.pixels {
            let params = mine.iter().map(|&position| self.params(position)).collect();
            return self.assemble(index, global, &mine, Pixels::OnDevice(params), None);
        }
        let mut images = vec![0.0; mine.len() * shape.len()];
        let chunks = images.par_chunks_mut(shape.len()).with_min_len(MIN_IMAGES);
        let mixing =
            if config.exact { None } else { self.shared.mixing.params(config.seed, self.epoch, index, *shape) };
        let mix = match mixing {
            None => {
                chunks.zip(&mine).for_each(|(out, &position)| self.image(position, out));
                None
            }
            Some(mixing) => {
                // The partner has the same position in the reversed global batch. It may belong to another rank.
                let partners: Vec<usize> = global.clone().rev().skip(config.rank).step_by(config.world).collect();
                let scratch = || vec![0.0; shape.len()];
                chunks.zip(&mine).zip(&partners).for_each_init(scratch, |scratch, ((out, &position), &partner)| {
                    self.image(position, out);
                    self.image(partner, scratch);
                    mixing.apply(out, scratch, *shape);
                });
                Some(Mix { labels: self.labels(&partners), lambda: mixing.lambda() })
            }
        };
        self.assemble(index, global, &mine, Pixels::Done(images), mix)
    }

    fn assemble(&self, index: usize, global: Range<usize>, mine: &[usize], pixels: Pixels, mix: Option<Mix>) -> Batch {
        let (images, params) = match pixels {
            Pixels::Done(images) => (images, Vec::new()),
            Pixels::OnDevice(params) => (Vec::new(), params),
        };
        let weights = &self.shared.config.class_weights;
        let global_len = global.len();
        let global_weight = match weights.is_empty() || mix.is_some() {
            true => global_len as f64,
            false => global.map(|position| weights[usize::from(self.label(position))]).sum(),
        };
        let ids = mine.iter().map(|&position| self.order[position]).collect();
        let draws = if self.draws.is_empty() { Vec::new() } else { mine.iter().map(|&at| self.draws[at]).collect() };
        let (labels, shape, epoch) = (self.labels(mine), self.shared.shape, self.epoch);
        Batch { images, params, labels, mix, ids, draws, epoch, index, global_len, global_weight, shape }
    }

    /// Returns the class of the image at a position of the order.
    fn label(&self, position: usize) -> u16 {
        self.shared.dataset.labels[self.order[position] as usize]
    }

    fn labels(&self, positions: &[usize]) -> Vec<i32> {
        positions.iter().map(|&position| i32::from(self.label(position))).collect()
    }

    /// Returns the augmentation parameters of the sample at a position of the order.
    fn params(&self, position: usize) -> AugmentParams {
        let Shared { config, pipeline, .. } = &*self.shared;
        if config.exact {
            return AugmentParams::default();
        }
        let draw = self.draws.get(position).copied().unwrap_or(0);
        pipeline.params_of_draw(config.seed, self.epoch, self.order[position], draw)
    }

    /// Writes the sample at a position of the order with this epoch's augmentation to `out`, `[C, H, W]`.
    fn image(&self, position: usize, out: &mut [f32]) {
        let Shared { dataset, pipeline, .. } = &*self.shared;
        pipeline.apply(dataset.image(self.order[position] as usize), &self.params(position), out);
    }
}
