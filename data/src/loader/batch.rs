//! One batch: what it holds and how it is put together.

use std::sync::Arc;

use rayon::prelude::*;

use super::Shared;
use crate::ImageShape;
use crate::augment::Decision;

/// One rank's share of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Normalised pixels, `[B, C, H, W]`; none of a loader that leaves them to a device ([`super::LoaderConfig::pixels`]).
    pub images: Vec<f32>,
    /// What is to be done to each image, `[B]`, where `images` is left out; else none.
    pub decisions: Vec<Decision>,
    /// Class of each image, `[B]`.
    pub labels: Vec<i32>,
    /// What the images were mixed with; none without mixup and cutmix.
    pub mix: Option<Mix>,
    /// Position of each image in the data set, `[B]`.
    pub ids: Vec<u32>,
    /// Epoch, from 0.
    pub epoch: usize,
    /// Batch of the epoch, from 0.
    pub index: usize,
    /// Samples of this step on all ranks together.
    pub global_len: usize,
    /// Shape of each image.
    pub shape: ImageShape,
}

impl Batch {
    /// Images in the batch.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// True when there is no image; the loader never yields such a batch.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }
}

/// The partners that the images of a batch were mixed with.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// Class of each image's partner, `[B]`.
    pub labels: Vec<i32>,
    /// Weight of the image's own label, in [0, 1]; the partner's has the rest.
    pub lambda: f32,
}

/// The images of a batch under construction.
enum Pixels {
    /// Augmented and normalised.
    Done(Vec<f32>),
    /// What a device is to do to each.
    Decided(Vec<Decision>),
}

/// Images that one task augments at least: below that, handing tasks out costs more than it gains.
const MIN_IMAGES: usize = 16;

/// The batches of one epoch, any of which can be put together at any time.
pub(super) struct Epoch {
    pub(super) shared: Arc<Shared>,
    pub(super) epoch: usize,
    /// Samples of all ranks in the epoch's order.
    pub(super) order: Vec<u32>,
}

impl Epoch {
    /// Puts batch `index` together, on the pool that it is called on.
    pub(super) fn batch(&self, index: usize) -> Batch {
        let Shared { config, shape, .. } = &*self.shared;
        let start = index * config.global_batch;
        let global = &self.order[start..self.order.len().min(start + config.global_batch)];
        let mine = || global.iter().copied().skip(config.rank).step_by(config.world);
        // The partner is the same position of the reversed global batch, whichever rank that is on.
        let partners = || global.iter().rev().copied().skip(config.rank).step_by(config.world);
        let ids: Vec<u32> = mine().collect();
        if !config.pixels {
            let decisions = ids.iter().map(|&id| self.decision(id)).collect();
            return self.assemble(index, global.len(), ids, Pixels::Decided(decisions), None);
        }
        let mut images = vec![0.0; ids.len() * shape.len()];
        let chunks = images.par_chunks_mut(shape.len()).with_min_len(MIN_IMAGES);
        let mixing =
            if config.exact { None } else { self.shared.mixing.decide(config.seed, self.epoch, index, *shape) };
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
        let (images, decisions) = match pixels {
            Pixels::Done(images) => (images, Vec::new()),
            Pixels::Decided(decisions) => (Vec::new(), decisions),
        };
        let (labels, shape) = (self.labels(&ids), self.shared.shape);
        Batch { images, decisions, labels, mix, ids, epoch: self.epoch, index, global_len, shape }
    }

    fn labels(&self, ids: &[u32]) -> Vec<i32> {
        ids.iter().map(|&id| i32::from(self.shared.dataset.labels[id as usize])).collect()
    }

    /// What happens to sample `id` in this epoch.
    fn decision(&self, id: u32) -> Decision {
        let Shared { config, pipeline, .. } = &*self.shared;
        if config.exact { Decision::default() } else { pipeline.decide(config.seed, self.epoch, id) }
    }

    /// Writes sample `id` as this epoch sees it.
    fn image(&self, id: u32, out: &mut [f32]) {
        let Shared { dataset, pipeline, .. } = &*self.shared;
        pipeline.apply(dataset.image(id as usize), &self.decision(id), out);
    }
}
