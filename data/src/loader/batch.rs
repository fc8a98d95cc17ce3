//! One batch: its contents and its assembly.

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
    /// Epoch, from [`FIRST_EPOCH`](crate::sampler::FIRST_EPOCH) = 1.
    pub epoch: usize,
    /// Index of the batch in the epoch, from 0.
    pub index: usize,
    /// Number of samples of this step on all ranks.
    pub global_len: usize,
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
}

impl Epoch {
    /// Assembles batch `index` on the pool of the calling thread.
    pub(super) fn batch(&self, index: usize) -> Batch {
        let Shared { config, shape, .. } = &*self.shared;
        let start = index * config.global_batch;
        let global = &self.order[start..self.order.len().min(start + config.global_batch)];
        let mine = || global.iter().copied().skip(config.rank).step_by(config.world);
        // The partner has the same position in the reversed global batch. It may belong to another rank.
        let partners = || global.iter().rev().copied().skip(config.rank).step_by(config.world);
        let ids: Vec<u32> = mine().collect();
        if !config.pixels {
            let params = ids.iter().map(|&id| self.params(id)).collect();
            return self.assemble(index, global.len(), ids, Pixels::OnDevice(params), None);
        }
        let mut images = vec![0.0; ids.len() * shape.len()];
        let chunks = images.par_chunks_mut(shape.len()).with_min_len(MIN_IMAGES);
        let mixing =
            if config.exact { None } else { self.shared.mixing.params(config.seed, self.epoch, index, *shape) };
        let mix = match mixing {
            None => {
                chunks.zip(&ids).for_each(|(out, &id)| self.image(id, out));
                None
            }
            Some(mixing) => {
                let partners: Vec<u32> = partners().collect();
                let scratch = || vec![0.0; shape.len()];
                chunks.zip(&ids).zip(&partners).for_each_init(scratch, |scratch, ((out, &id), &partner)| {
                    self.image(id, out);
                    self.image(partner, scratch);
                    mixing.apply(out, scratch, *shape);
                });
                Some(Mix { labels: self.labels(&partners), lambda: mixing.lambda() })
            }
        };
        self.assemble(index, global.len(), ids, Pixels::Done(images), mix)
    }

    fn assemble(&self, index: usize, global_len: usize, ids: Vec<u32>, pixels: Pixels, mix: Option<Mix>) -> Batch {
        let (images, params) = match pixels {
            Pixels::Done(images) => (images, Vec::new()),
            Pixels::OnDevice(params) => (Vec::new(), params),
        };
        let (labels, shape) = (self.labels(&ids), self.shared.shape);
        Batch { images, params, labels, mix, ids, epoch: self.epoch, index, global_len, shape }
    }

    fn labels(&self, ids: &[u32]) -> Vec<i32> {
        ids.iter().map(|&id| i32::from(self.shared.dataset.labels[id as usize])).collect()
    }

    /// Returns the augmentation parameters of sample `id` in this epoch.
    fn params(&self, id: u32) -> AugmentParams {
        let Shared { config, pipeline, .. } = &*self.shared;
        if config.exact { AugmentParams::default() } else { pipeline.params(config.seed, self.epoch, id) }
    }

    /// Writes sample `id` with this epoch's augmentation to `out`, `[C, H, W]`.
    fn image(&self, id: u32, out: &mut [f32]) {
        let Shared { dataset, pipeline, .. } = &*self.shared;
        pipeline.apply(dataset.image(id as usize), &self.params(id), out);
    }
}
