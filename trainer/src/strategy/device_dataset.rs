//! A data set that stays on the device as uint8. The device crops, flips, cuts out and normalises the images of a batch.
//!
//! The CPU draws each image's augmentation with the loader's code ([`Pipeline::params`]). The device only gathers bytes and
//! looks up their values in the loader's table. It computes no floats, so the pixels equal the loader's pixels bit for bit on
//! any device.
//!
//! ```text
//! index  = first pixel of the image + channel + row + column              [B, C, H, W], a sum of four small tensors
//! pixel  = images[index] · shown                                          0 outside the image
//! value  = table[(pixel + 256 · channel + 1) · kept]                      entry 0 of the table is the mean, 0.0
//! ```

use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData};
use data::{
    Dataset, ImageShape,
    augment::{AugmentParams, Pipeline, SourceLine},
    loader::Batch,
};
use ops::{GatherLines, gather_images};

use crate::text;

/// The data sets of a run on one device.
#[derive(Debug)]
pub struct DeviceDatasets {
    /// Training images.
    pub train: DeviceDataset,
    /// Images of the evaluations during the run.
    pub eval: DeviceDataset,
}

/// One data set on one device.
#[derive(Debug)]
pub struct DeviceDataset {
    /// All pixels, uint8.
    images: Tensor<1, Int>,
    /// 0, then the normalised value of each channel's 256 pixel values, `[1 + 256 · C]`.
    table: Tensor<1>,
    /// Offset of each channel's pixels from the image's first pixel, `[1, C, 1, 1]`.
    planes: Tensor<4, Int>,
    /// Offset of each channel's values in the table, `[1, C, 1, 1]`.
    tables: Tensor<4, Int>,
    shape: ImageShape,
    pipeline: Pipeline,
    device: Device,
}

/// The source row (or column) of each row (or column) of the batch's images, `[B · side]`.
#[derive(Default)]
struct SourceIndices {
    /// Offset of the source from the image's first pixel.
    offsets: Vec<i32>,
    /// 1 if the source is inside the image, otherwise 0.
    shown: Vec<i32>,
    /// 1 if the row or column crosses the cut-out rectangle, otherwise 0.
    cut: Vec<i32>,
}

impl SourceIndices {
    fn push(&mut self, line: SourceLine, step: usize) {
        self.offsets.push((line.source.unwrap_or(0) * step) as i32);
        self.shown.push(i32::from(line.source.is_some()));
        self.cut.push(i32::from(line.cut));
    }
}

impl DeviceDataset {
    /// Returns the reason why a data set cannot be kept on a device with `max_bytes` for it, or `None` if it can.
    pub fn refusal(dataset: &Dataset, max_bytes: u64) -> Option<String> {
        if dataset.encoded.is_some() {
            return Some("the images are decoded in each epoch".into());
        }
        let bytes = dataset.all_pixels().len();
        if bytes as u64 > max_bytes {
            let [images, most] = [bytes as u64, max_bytes].map(text::bytes);
            return Some(format!("the images take {images}, and the GPU may hold a data set of {most}"));
        }
        // Indices are 32-bit numbers.
        (i32::try_from(bytes).is_err()).then(|| format!("{bytes} bytes of images are more than {}", i32::MAX))
    }

    /// Copies the pixels of `dataset` to `device` (without autodiff). The pixels are at most 2^31 - 1 bytes
    /// ([`DeviceDataset::refusal`] checks this). `pipeline` is the loader's pipeline.
    pub fn new(dataset: &Dataset, pipeline: Pipeline, device: &Device) -> Self {
        let shape = dataset.shape;
        let plane = shape.height * shape.width;
        let each = |step: usize, first: usize| {
            let values = (0..shape.channels).map(|channel| (channel * step + first) as i32).collect();
            integers(values, [1, shape.channels, 1, 1], device)
        };
        let table: Vec<f32> = std::iter::once(0.0).chain(pipeline.values()).collect();
        let length = dataset.all_pixels().len();
        Self {
            images: Tensor::from_data(TensorData::new(dataset.all_pixels().to_vec(), [length]), (device, DType::U8)),
            table: Tensor::from_floats(table.as_slice(), device),
            planes: each(plane, 0),
            tables: each(256, 1),
            shape,
            pipeline,
            device: device.clone(),
        }
    }

    /// Returns the pixels, f32 `[B, C, H, W]`, of a batch that the loader made without pixels.
    ///
    /// # Panics
    /// The batch belongs to another data set, or already has pixels.
    pub fn batch(&self, batch: &Batch) -> Tensor<4> {
        let lines = self.lines(batch);
        let on_device = TensorData::new(lines.values().to_vec(), [lines.values().len()]);
        let on_device = Tensor::from_data(on_device, (&self.device, DType::I32));
        match gather_images(&self.images, &self.table, &on_device, lines.shape()) {
            Some(images) => images,
            None => self.gather_with_burn(&batch.ids, &batch.params),
        }
    }

    /// Returns the source rows and columns of a batch's pixels, for [`DeviceDataset::gather`].
    ///
    /// # Panics
    /// As [`DeviceDataset::batch`].
    pub fn lines(&self, batch: &Batch) -> GatherLines {
        assert!(batch.images.is_empty(), "the loader has made the pixels already");
        assert_eq!(batch.shape, self.shape, "images of another data set");
        assert_eq!(batch.ids.len(), batch.params.len(), "one set of parameters per image");
        let ImageShape { channels, height, width } = self.shape;
        let mut lines = GatherLines::new([channels, height, width]);
        for (&id, params) in batch.ids.iter().zip(&batch.params) {
            let line = |line: SourceLine| (line.source, line.cut);
            let (rows, columns) = (self.pipeline.rows(params), self.pipeline.columns(params));
            lines.push(id as usize * self.shape.len(), rows.map(line), columns.map(line));
        }
        lines
    }

    /// Gathers the pixels at the rows and columns `lines`: f32 with the shape `shape`, `[B, C, H, W]`. `lines` are the
    /// [`GatherLines::values`] on the device.
    /// Returns `None` if the device has no kernel for this.
    pub fn gather(&self, lines: &Tensor<1, Int>, shape: [usize; 4]) -> Option<Tensor<4>> {
        gather_images(&self.images, &self.table, lines, shape)
    }

    /// Computes the pixels of [`DeviceDataset::batch`] with burn's operations.
    fn gather_with_burn(&self, ids: &[u32], params: &[AugmentParams]) -> Tensor<4> {
        let ImageShape { channels, height, width } = self.shape;
        let (mut rows, mut columns) = (SourceIndices::default(), SourceIndices::default());
        for params in params {
            self.pipeline.rows(params).for_each(|line| rows.push(line, width));
            self.pipeline.columns(params).for_each(|line| columns.push(line, 1));
        }
        let batch = ids.len();
        let (tall, wide) = ([batch, 1, height, 1], [batch, 1, 1, width]);
        let tensor = |values: Vec<i32>, shape: [usize; 4]| integers(values, shape, &self.device);
        let first = ids.iter().map(|&id| (id as usize * self.shape.len()) as i32).collect();

        let index = tensor(first, [batch, 1, 1, 1]) + tensor(rows.offsets, tall);
        let index = index + tensor(columns.offsets, wide) + self.planes.clone();
        let count = batch * self.shape.len();
        let pixels = self.images.clone().select(0, index.reshape([count])).cast(IntDType::I32);
        let mut pixels = pixels.reshape([batch, channels, height, width]);
        if rows.shown.contains(&0) || columns.shown.contains(&0) {
            pixels = pixels * (tensor(rows.shown, tall) * tensor(columns.shown, wide));
        }
        let mut keys = pixels + self.tables.clone();
        if rows.cut.contains(&1) {
            let kept = (tensor(rows.cut, tall) * tensor(columns.cut, wide)).neg().add_scalar(1);
            keys = keys * kept;
        }
        self.table.clone().select(0, keys.reshape([count])).reshape([batch, channels, height, width])
    }
}

/// Makes a tensor of 32-bit integers. The device's default integer type may be another one.
fn integers(values: Vec<i32>, shape: [usize; 4], device: &Device) -> Tensor<4, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use data::{
        augment::{Augment, Fill},
        loader::{Loader, LoaderConfig},
    };

    use super::*;

    fn dataset(shape: ImageShape, count: usize) -> Dataset {
        Dataset {
            name: "formula".into(),
            images: (0..count * shape.len()).map(|i| (i * 197 + i / 7 + 3) as u8).collect(),
            encoded: None,
            label_sets: None,
            shared: None,
            labels: (0..count).map(|i| (i % 10) as u16).collect(),
            shape,
            classes: (0..10).map(|class| class.to_string()).collect(),
        }
    }

    /// Compares the pixels of two loaders of one data set: one loader makes the pixels, the other leaves them to the device.
    fn assert_same_pixels(shape: ImageShape, config: LoaderConfig) {
        let set = Arc::new(dataset(shape, 37));
        let config = LoaderConfig {
            global_batch: 8,
            seed: 11,
            mean: (0..shape.channels).map(|c| 0.4 + 0.05 * c as f32).collect(),
            std: (0..shape.channels).map(|c| 0.2 + 0.01 * c as f32).collect(),
            ..config
        };
        let host = Loader::new(Arc::clone(&set), config.clone()).unwrap();
        let left = Loader::new(Arc::clone(&set), LoaderConfig { pixels: false, ..config.clone() }).unwrap();
        let on_device = DeviceDataset::new(&set, left.pipeline().clone(), &Device::flex());
        let mut seen = 0;
        for epoch in 1..4 {
            for (done, decided) in host.epoch(epoch, 0).zip(left.epoch(epoch, 0)) {
                let (done, decided) = (done.unwrap(), decided.unwrap());
                assert_eq!((&done.ids, &done.labels), (&decided.ids, &decided.labels));
                let pixels = on_device.batch(&decided).into_data().try_into_vec::<f32>().unwrap();
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&pixels),
                    bits(&done.images),
                    "{:?}, epoch {epoch}, batch {}",
                    config.augment,
                    done.index
                );
                seen += done.len();
            }
        }
        assert!(seen >= 3 * 37, "{seen} images");
    }

    #[test]
    fn the_device_makes_the_loaders_pixels_for_every_augmentation() {
        let crop = |fill| Augment::Crop { padding: 3, fill };
        let (flips, cutout) = ([Augment::Flip, Augment::AlternatingFlip], Augment::Cutout { size: 5 });
        for shape in [ImageShape { channels: 3, height: 9, width: 9 }, ImageShape { channels: 1, height: 7, width: 12 }]
        {
            for augment in [
                vec![],
                vec![crop(Fill::Zero)],
                vec![crop(Fill::Reflect)],
                vec![flips[0]],
                vec![flips[1]],
                vec![Augment::VerticalFlip],
                vec![cutout],
                vec![crop(Fill::Zero), flips[0], cutout],
                vec![crop(Fill::Reflect), flips[1], Augment::VerticalFlip, cutout],
            ] {
                assert_same_pixels(shape, LoaderConfig { augment, ..LoaderConfig::default() });
            }
            let augment = vec![crop(Fill::Zero), flips[0], cutout];
            assert_same_pixels(shape, LoaderConfig { augment, evaluation: true, ..LoaderConfig::default() });
        }
    }

    #[test]
    fn a_data_set_that_does_not_fit_is_refused() {
        let set = dataset(ImageShape { channels: 1, height: 4, width: 4 }, 10);
        assert_eq!(DeviceDataset::refusal(&set, 160), None);
        assert!(DeviceDataset::refusal(&set, 159).unwrap().contains("take 160 B"));
    }

    #[test]
    fn a_loader_that_mixes_images_must_make_the_pixels() {
        let set = Arc::new(dataset(ImageShape { channels: 1, height: 4, width: 4 }, 10));
        let config = LoaderConfig { global_batch: 5, mixup: Some(0.2), pixels: false, ..LoaderConfig::default() };
        let error = Loader::new(set, config).err().expect("refused");
        assert!(error.to_string().contains("mixed"), "{error}");
    }
}
