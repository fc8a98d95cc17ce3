//! The random parameters of a sample's augmentation. They are a pure function of (seed, epoch, sample id), so a loader
//! thread, another rank and a GPU all apply the same ones.

use super::random::{CounterRng, Purpose, mix64};
use super::{Augment, Operation, Pipeline, auto_augment, policy};
use crate::decode::Region;

/// Augmentation parameters of one sample in one epoch. The window is moved first, then mirrored, then the operations are
/// applied, then the image is cut. The default changes nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AugmentParams {
    /// Rows by which the crop's window moves down, from `-padding` to `padding`.
    pub dy: i32,
    /// Columns by which the crop's window moves right, from `-padding` to `padding`.
    pub dx: i32,
    /// Whether left and right are exchanged.
    pub flip: bool,
    /// Whether top and bottom are exchanged.
    pub vertical_flip: bool,
    /// Operations on the cropped and flipped image, in this order. A device that only gathers cannot apply them.
    pub operations: Vec<Operation>,
    /// The rectangle that is cut out of the cropped and flipped image.
    pub cut: Option<Rect>,
}

/// A rectangle of pixels: rows `top..bottom`, columns `left..right`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rect {
    /// First row.
    pub top: usize,
    /// Row after the last.
    pub bottom: usize,
    /// First column.
    pub left: usize,
    /// Column after the last.
    pub right: usize,
}

impl Rect {
    /// Makes a rectangle of `size` (rows, columns) around `centre`, clipped to `bounds`. The centre of an even size is the
    /// pixel below and right of the middle.
    pub(crate) fn around(centre: (usize, usize), size: (usize, usize), bounds: (usize, usize)) -> Self {
        let span = |centre: usize, size: usize, bound: usize| {
            let end = (centre + size).saturating_sub(size / 2).min(bound);
            (centre.saturating_sub(size / 2), end)
        };
        let (top, bottom) = span(centre.0, size.0, bounds.0);
        let (left, right) = span(centre.1, size.1, bounds.1);
        Self { top, bottom, left, right }
    }

    /// Returns the number of pixels inside.
    pub fn area(&self) -> usize {
        (self.bottom - self.top) * (self.right - self.left)
    }
}

/// Each draw has its own counter, so adding one augmentation does not change the parameters of another.
mod draw {
    pub(super) const CROP_Y: u64 = 0;
    pub(super) const CROP_X: u64 = 1;
    pub(super) const FLIP: u64 = 2;
    pub(super) const CUT_Y: u64 = 3;
    pub(super) const CUT_X: u64 = 4;
}

/// Returns the seed for a draw of a sample. `repetition` is the number of earlier draws of the sample in the epoch.
fn seed_of_repetition(seed: u64, repetition: u32) -> u64 {
    if repetition == 0 { seed } else { mix64(seed ^ mix64(u64::from(repetition))) }
}

impl Pipeline {
    /// Draws the augmentation parameters of sample `id` in `epoch` (torchvision: `get_params`). `repetition` is how often
    /// the epoch has drawn the sample before. Samples that a weighted sampler draws again have other parameters.
    pub fn params_of_repetition(&self, seed: u64, epoch: usize, id: u32, repetition: u32) -> AugmentParams {
        self.params(seed_of_repetition(seed, repetition), epoch, id)
    }

    /// Draws the region that [`Augment::RandomResizedCrop`] cuts out of an image of `height` x `width` pixels, for a sample as in
    /// [`Pipeline::params_of_repetition`]. None without this augmentation.
    pub(crate) fn resized_crop_of_repetition(
        &self,
        (seed, epoch, id, repetition): (u64, usize, u32, u32),
        (height, width): (usize, usize),
    ) -> Option<Region> {
        let scale = self.augment.iter().find_map(|augment| match *augment {
            Augment::RandomResizedCrop { scale } => Some(scale),
            _ => None,
        })?;
        let mut stream =
            CounterRng::new(seed_of_repetition(seed, repetition), Purpose::ResizedCrop, epoch as u64, u64::from(id));
        Some(policy::resized_crop(|| stream.next_unit(), scale, (height, width)))
    }

    /// Draws the augmentation parameters of sample `id` in `epoch` (torchvision: `get_params`).
    pub fn params(&self, seed: u64, epoch: usize, id: u32) -> AugmentParams {
        let stream_of = |purpose| CounterRng::new(seed, purpose, epoch as u64, u64::from(id));
        let (stream, operations) = (stream_of(Purpose::Sample), stream_of(Purpose::Operations));
        let mut params = AugmentParams::default();
        for augment in &self.augment {
            match *augment {
                Augment::Crop { padding, .. } => {
                    let offset = |counter| stream.below(counter, 2 * padding as u32 + 1) as i32 - padding as i32;
                    (params.dy, params.dx) = (offset(draw::CROP_Y), offset(draw::CROP_X));
                }
                // The region depends on the size of the image, see `resized_crop_of_repetition`.
                Augment::RandomResizedCrop { .. } => {}
                Augment::Flip => params.flip = stream.below(draw::FLIP, 2) == 1,
                Augment::AlternatingFlip => {
                    let flipped_in_even_epochs =
                        CounterRng::new(seed, Purpose::Orientation, 0, u64::from(id)).below(draw::FLIP, 2) == 1;
                    params.flip = flipped_in_even_epochs ^ (epoch % 2 == 1);
                }
                Augment::VerticalFlip => params.vertical_flip = stream_of(Purpose::VerticalFlip).below(0, 2) == 1,
                // Before the operations of a policy, in whatever order the configuration has them.
                Augment::Rotation { degrees } => {
                    params.operations.insert(0, policy::rotation(&stream_of(Purpose::Rotation), degrees));
                }
                Augment::TrivialAugment => params.operations.extend(policy::trivial_augment(&operations)),
                Augment::RandAugment { magnitude } => {
                    params.operations.extend(policy::rand_augment(&operations, magnitude, self.shape));
                }
                Augment::AutoAugment { policy } => {
                    params.operations.extend(auto_augment::auto_augment(&operations, policy, self.shape));
                }
                Augment::ColorJitter { strength, hue } => {
                    params.operations.extend(policy::color_jitter(&operations, strength, hue));
                }
                Augment::RandomErasing { probability } => {
                    params.cut = policy::random_erasing(&stream_of(Purpose::Erasing), probability, self.shape);
                }
                Augment::Cutout { size } => {
                    let (height, width) = (self.shape.height, self.shape.width);
                    let y = stream.below(draw::CUT_Y, height as u32) as usize;
                    let x = stream.below(draw::CUT_X, width as u32) as usize;
                    params.cut = Some(Rect::around((y, x), (size, size), (height, width)));
                }
            }
        }
        params
    }
}
