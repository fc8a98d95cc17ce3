//! Parameters of one launch: one kernel reads and writes the tensors of many parameters.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{THREADS_PER_BLOCK, aligned, all};

/// Parameters per launch. The arguments of a launch have at most 32,764 bytes (4 KiB before CUDA 12.1, which this program does not
/// support). 64 parameters of AdamW with bf16 copies take almost 5 KB: 12 bytes for each of 320 tensors and 16 for each parameter.
const MAX_PARAMETERS: usize = 64;

/// Tensors of a launch, in vectors of `N`.
pub(super) type Tensors<N> = Sequence<Box<[Vector<f32, N>]>>;

/// Arguments of one parameter in a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ParameterBlocks {
    /// Number of vectors.
    length: usize,
    /// The parameter's first block, and the next parameter's first block.
    first: usize,
    next: usize,
    pub(super) weight_decay: f32,
}

/// Parameters of one launch, each with `N` input tensors.
pub(super) struct ParameterLaunch<const N: usize> {
    pub(super) tensors: Vec<[CubeTensor; N]>,
    weight_decay: Vec<f64>,
    pub(super) vector: usize,
}

impl<const N: usize> ParameterLaunch<N> {
    /// Divides the parameters, in order, into as few launches as possible. All launches of a network but the last have
    /// [`MAX_PARAMETERS`] parameters, so there are few kernels to compile.
    pub(super) fn divide(mut parameters: Vec<([CubeTensor; N], f64)>) -> impl Iterator<Item = Self> {
        std::iter::from_fn(move || {
            let vector = vector_size(&parameters.first()?.0);
            let alike =
                parameters.iter().take(MAX_PARAMETERS).take_while(|(tensors, _)| self::vector_size(tensors) == vector);
            let rest = parameters.split_off(alike.count());
            let (tensors, weight_decay) = std::mem::replace(&mut parameters, rest).into_iter().unzip();
            Some(Self { tensors, weight_decay, vector })
        })
    }

    /// Returns the first parameter's first tensor.
    pub(super) fn tensor(&self) -> &CubeTensor {
        &self.tensors[0][0]
    }

    pub(super) fn client(&self) -> Client {
        self.tensor().client.clone()
    }

    /// Returns the tensors with an index, of all parameters.
    pub(super) fn args<T: LaunchArg<RuntimeArg = BufferArg>>(&self, index: usize) -> SequenceArg<T> {
        self.tensors.iter().map(|tensors| all(&tensors[index])).collect()
    }

    /// Returns the number of vectors of a parameter.
    fn length(&self, tensors: &[CubeTensor; N]) -> usize {
        tensors[0].meta.num_elements() / self.vector
    }

    /// Returns the number of blocks of a launch.
    pub(super) fn blocks(&self) -> usize {
        self.tensors.iter().map(|tensors| self.length(tensors).div_ceil(THREADS_PER_BLOCK)).sum()
    }

    /// Returns each parameter's blocks, and the grid.
    pub(super) fn blocks_and_grid(&self) -> (SequenceArg<ParameterBlocks>, CubeCount) {
        let mut first = 0;
        let of_parameter = |(tensors, weight_decay): (&[CubeTensor; N], &f64)| {
            let length = self.length(tensors);
            let next = first + length.div_ceil(THREADS_PER_BLOCK);
            let blocks = ParameterBlocksLaunch::new(length, first, next, *weight_decay as f32);
            first = next;
            blocks
        };
        let blocks = self.tensors.iter().zip(&self.weight_decay).map(of_parameter).collect();
        (blocks, CubeCount::Static(first as u32, 1, 1))
    }
}

/// Returns 4 if all tensors can be accessed in vectors of four elements, else 1.
fn vector_size<const N: usize>(tensors: &[CubeTensor; N]) -> usize {
    let whole = tensors[0].meta.num_elements().is_multiple_of(4) && tensors.iter().all(aligned);
    if whole { 4 } else { 1 }
}

/// Returns whether the thread belongs to the parameter, and its vector.
#[cube]
pub(super) fn thread_vector(blocks: &ParameterBlocks) -> (bool, usize) {
    let block = CUBE_POS_X as usize;
    let at = (block - min(blocks.first, block)) * THREADS_PER_BLOCK + UNIT_POS as usize;
    (block >= blocks.first && block < blocks.next && at < blocks.length, at)
}
