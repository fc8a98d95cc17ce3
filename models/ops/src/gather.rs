//! Batches of images from a data set in a GPU's memory: gathered, cropped, flipped, cut and normalised in one launch.

use burn::tensor::{Int, Tensor};

use crate::dispatch::SMALLER_BATCH;

/// For each image of a batch: its position in the data set, and the source row or column of each of its rows and columns.
#[derive(Debug, Clone)]
pub struct GatherLines {
    shape: [usize; 4],
    /// For each image: the index of its first pixel, then its rows and its columns as [`line`] encodes them.
    values: Vec<i32>,
}

impl GatherLines {
    /// Starts a batch of images of `channels`, `height` and `width`.
    pub fn new([channels, height, width]: [usize; 3]) -> Self {
        Self { shape: [0, channels, height, width], values: Vec::new() }
    }

    /// Returns the batch's shape, `[B, C, H, W]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Returns, for each image, the index of its first pixel, its rows and its columns.
    pub fn values(&self) -> &[i32] {
        &self.values
    }

    /// Adds an image whose first pixel is `first`. A line is the source row or column (`None` outside of the image), and whether
    /// the line is cut. A pixel is cut out if both its row and its column are cut.
    ///
    /// # Panics
    /// When the number of lines is not the number of the image's rows and columns, or `first` is 2^31 or more.
    pub fn push(
        &mut self,
        first: usize,
        rows: impl Iterator<Item = (Option<usize>, bool)>,
        columns: impl Iterator<Item = (Option<usize>, bool)>,
    ) {
        self.shape[0] += 1;
        self.values.push(i32::try_from(first).expect("a data set on a GPU has fewer than 2^31 bytes"));
        self.values.extend(rows.chain(columns).map(|(source, cut)| line(source, cut)));
        let [batch, _, height, width] = self.shape;
        assert_eq!(self.values.len(), batch * (1 + height + width), "a line for each row and column");
    }
}

/// Encodes a line: the last bit is 1 if the line is cut, the other bits are its index, -1 outside of the image.
fn line(source: Option<usize>, cut: bool) -> i32 {
    source.map_or(-1, |source| source as i32) * 2 + i32::from(cut)
}

/// Returns a batch's images, f32 `[B, C, H, W]`, on a GPU; `None` on devices without this kernel.
///
/// A pixel of value `v` in channel `c` becomes `table[1 + 256 * c + v]`. Outside of the image, `v` is 0. A pixel that is cut out
/// becomes `table[0]`. No float is computed, so the result is the same on every device.
///
/// # Shapes
/// - `pixels`: uint8, images `[C, H, W]` one after the other
/// - `table`: `[1 + 256 * C]`
/// - `lines`: those of [`GatherLines::values`] on the device, `[B * (1 + H + W)]`
/// - `shape`: `[B, C, H, W]`
///
/// # Panics
/// When the batch has 2^31 elements or more: the kernel counts in 32 bits.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there is no kernel"))]
pub fn gather_images(
    pixels: &Tensor<1, Int>,
    table: &Tensor<1>,
    lines: &Tensor<1, Int>,
    shape: [usize; 4],
) -> Option<Tensor<4>> {
    let elements = shape.iter().product::<usize>();
    assert!(elements < 1 << 31, "a batch of {elements} pixel values: the kernel counts up to 2^31: {SMALLER_BATCH}");
    #[cfg(feature = "cuda")]
    return crate::gpu::gather_images(pixels, table, lines, shape);
    #[cfg(not(feature = "cuda"))]
    None
}
