//! The kernel's source for each convolution, and its arguments. This file uses no part of burn, so that tests can compile the
//! source without a GPU.

/// Bytes of shared memory that a kernel may declare statically. A multiprocessor has more, but more needs dynamic shared memory,
/// which cubecl does not request for a kernel in CUDA C++.
const STATIC_SHARED: usize = 48 << 10;

/// A product of a convolution. The terms are those of the module's documentation. The order is that of the macros in `sizes.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    DataGradient,
    WeightGradient,
}

/// A block's part of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Rows of each warp. A warp has 32 columns.
    warp_rows: usize,
    /// Number of tiles of both operands in shared memory, if [`STATIC_SHARED`] has room for them.
    stages: usize,
}

impl Tile {
    const LARGE: Self = Self { rows: 128, columns: 128, warp_rows: 64, stages: 3 };
    const MEDIUM: Self = Self { rows: 128, columns: 64, warp_rows: 64, stages: 4 };
    const SMALL: Self = Self { rows: 64, columns: 64, warp_rows: 32, stages: 4 };
    const NARROW: Self = Self { rows: 128, columns: 32, warp_rows: 32, stages: 4 };

    #[allow(dead_code, reason = "for tests")]
    pub(super) const ALL: [Self; 4] = [Self::LARGE, Self::MEDIUM, Self::SMALL, Self::NARROW];

    /// Chooses the tile for `products` products of this size. It depends on nothing else, so all GPUs choose the same.
    ///
    /// `narrow`: images are read in accesses of few bytes. Each thread then reads many rows, which takes registers.
    pub(super) fn choose(rows: usize, columns: usize, products: usize, narrow: bool) -> Self {
        /// Number of blocks that occupies most of a large GPU's multiprocessors.
        const BLOCKS: usize = 96;
        let enough = |tile: Self, blocks: usize| tile.blocks(rows, columns) * products >= blocks;
        if columns <= 32 && !narrow {
            Self::NARROW
        } else if columns > 64 && !narrow && enough(Self::LARGE, 2 * BLOCKS) {
            Self::LARGE
        } else if !narrow && enough(Self::MEDIUM, BLOCKS) {
            Self::MEDIUM
        } else {
            Self::SMALL
        }
    }

    /// Chooses the tile for a weight gradient, whose pieces make up for a small number of tiles.
    pub(super) fn of_weight_gradient(rows: usize, columns: usize, narrow: bool) -> Self {
        match narrow || rows <= 64 {
            true => Self::SMALL,
            false if columns <= 32 => Self::NARROW,
            false if columns <= 64 => Self::MEDIUM,
            false => Self::LARGE,
        }
    }

    pub(super) fn blocks(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.rows) * columns.div_ceil(self.columns)
    }

    /// Returns this tile, or a smaller one if `other` has fewer threads: two products in one launch have equal blocks.
    pub(super) fn beside(self, other: Self) -> Self {
        if self.threads() > other.threads() { Self::MEDIUM } else { self }
    }

    pub(super) fn threads(self) -> u32 {
        (self.rows / self.warp_rows * (self.columns / 32) * 32) as u32
    }
}

/// A batch norm whose output is a convolution's input: its backward pass needs sums over the input's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct NormSums {
    pub(super) activation: Activation,
    /// Whether the activation's derivative is computed from the batch norm's output, not from its input.
    pub(super) from_output: bool,
    /// Whether the result is the gradient of the activation's input, not of its output. The kernel then computes everything of the
    /// batch norm's backward pass that needs all rows.
    pub(super) masked: bool,
    /// Whether the kernel does the same for a second batch norm, whose output was added to that of the first.
    pub(super) residual: bool,
}

/// An activation that the kernel can compute, with its derivative: `INPUT_ACTIVATION` of `prologue.cu` and `ACTIVATION` of
/// `moments.cu`. The order is that of the macros in `sizes.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Activation {
    Identity,
    Relu,
    Relu6,
    Silu,
}

/// Everything that the source of a product depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ConvProduct {
    pub(super) pass: Pass,
    pub(super) tile: Tile,
    /// Whether elements are bf16; otherwise they are f32.
    pub(super) bf16: bool,
    pub(super) window: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) dilation: [usize; 2],
    /// The input and output channels of each group, if several groups are one product.
    pub(super) diagonal: Option<[usize; 2]>,
    /// Elements per access to the windows' images, to the other operand and to the result.
    pub(super) vectors: [usize; 3],
    pub(super) bias: bool,
    pub(super) relu: bool,
    /// Whether the moments of the result's columns are computed too.
    pub(super) moments: bool,
    /// Whether the statistics of the batch norm that follows are computed from the moments.
    pub(super) statistics: bool,
    /// The activation of a batch norm that is applied to the images while they are read.
    pub(super) input: Option<Activation>,
    /// Whether the output's gradient is computed from the gradient of the batch norm that follows, while it is read.
    pub(super) norm_gradient: bool,
    /// Whether a weight gradient is a sum of several pieces.
    pub(super) split: bool,
    /// Whether other images are added to a data gradient.
    pub(super) add: bool,
    /// Whether the sums over a data gradient are computed too.
    pub(super) norm: Option<NormSums>,
}

impl ConvProduct {
    /// Returns the names of the product's buffers: members of `Pointers` in `conv.cu`.
    pub(super) fn buffers(&self) -> Vec<&'static str> {
        let merges = self.moments || self.split || self.norm.is_some();
        let masked = self.norm.is_some_and(|norm| norm.masked);
        let residual = self.norm.is_some_and(|norm| norm.residual);
        let named = [
            (true, "images"),
            (true, "other"),
            (self.bias, "bias"),
            (true, "result"),
            (merges, "parts"),
            (self.moments || self.norm.is_some(), "totals"),
            (merges, "counters"),
            (self.add, "addend"),
            (self.norm.is_some(), "norm.input"),
            (self.norm.is_some_and(|norm| norm.from_output), "norm.output"),
            (self.norm.is_some(), "norm.mean"),
            (self.norm.is_some(), "norm.inv_std"),
            (self.norm.is_some(), "norm.weight"),
            (self.norm.is_some(), "norm.bias"),
            (masked, "gradient_result.weight"),
            (masked, "gradient_result.bias"),
            (masked, "gradient_result.factors"),
            (residual, "residual_norm.input"),
            (residual, "residual_norm.mean"),
            (residual, "residual_norm.inv_std"),
            (residual, "residual_norm.weight"),
            (residual, "residual_result.weight"),
            (residual, "residual_result.bias"),
            (residual, "residual_result.factors"),
            (self.statistics, "statistics.of_batch"),
            (self.statistics, "statistics.weight"),
            (self.statistics, "statistics.bias"),
            (self.statistics, "statistics.running_mean"),
            (self.statistics, "statistics.running_variance"),
            (self.input.is_some(), "scale"),
            (self.input.is_some(), "shift"),
            (self.norm_gradient, "norm_input"),
            (self.norm_gradient, "factors"),
        ];
        named.into_iter().filter(|(present, _)| *present).map(|(_, name)| name).collect()
    }

    /// Returns the number of pairs of tiles in shared memory. With `norm_gradient`, a pair has a third tile.
    fn stages(&self) -> usize {
        let Tile { rows, columns, stages, .. } = self.tile;
        let bytes = 64 * (rows + columns + if self.norm_gradient { rows } else { 0 });
        stages.min(STATIC_SHARED / bytes)
    }

    /// Returns the product's code, in a namespace.
    fn text(&self, namespace: &str) -> String {
        let Self { pass, tile, bf16, window, stride, dilation, vectors, bias, relu, moments, split, add, .. } = *self;
        let Self { diagonal, statistics, input, norm_gradient, norm, .. } = *self;
        let [block_in, block_out] = diagonal.unwrap_or([1, 1]);
        let numbers = [
            ("BF16", usize::from(bf16)),
            ("PASS", pass as usize),
            ("ROWS", tile.rows),
            ("COLUMNS", tile.columns),
            ("WARP_ROWS", tile.warp_rows),
            ("STAGES", self.stages()),
            ("KERNEL_DOWN", window[0]),
            ("KERNEL_ACROSS", window[1]),
            ("STRIDE_DOWN", stride[0]),
            ("STRIDE_ACROSS", stride[1]),
            ("DILATION_DOWN", dilation[0]),
            ("DILATION_ACROSS", dilation[1]),
            ("DIAGONAL", usize::from(diagonal.is_some())),
            ("BLOCK_IN", block_in),
            ("BLOCK_OUT", block_out),
            ("VECTOR", vectors[0]),
            ("OTHER_VECTOR", vectors[1]),
            ("RESULT_VECTOR", vectors[2]),
            ("BIAS", usize::from(bias)),
            ("RELU", usize::from(relu)),
            ("MOMENTS", usize::from(moments)),
            ("STATISTICS", usize::from(statistics)),
            ("NORMALISE", usize::from(input.is_some())),
            ("INPUT_ACTIVATION", input.map_or(0, |activation| activation as usize)),
            ("NORM_GRADIENT", usize::from(norm_gradient)),
            ("SPLIT", usize::from(split)),
            ("ADD", usize::from(add)),
            ("NORM", usize::from(norm.is_some())),
            ("ACTIVATION", norm.map_or(0, |norm| norm.activation as usize)),
            ("FROM_OUTPUT", usize::from(norm.is_some_and(|norm| norm.from_output))),
            ("MASKED", usize::from(norm.is_some_and(|norm| norm.masked))),
            ("RESIDUAL_NORM", usize::from(norm.is_some_and(|norm| norm.residual))),
        ];
        let mut text = format!("namespace {namespace} {{\n");
        for (name, value) in numbers {
            text += &format!("#undef {name}\n#define {name} {value}\n");
        }
        text += concat!(
            include_str!("prologue.cu"),
            include_str!("operands.cu"),
            include_str!("product.cu"),
            include_str!("write.cu"),
            include_str!("moments.cu"),
            include_str!("merge_parts.cu"),
            include_str!("conv.cu")
        );
        text + "}\n"
    }
}

/// A kernel: one product, or two independent products that run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ConvKernel {
    pub(super) first: ConvProduct,
    pub(super) second: Option<ConvProduct>,
}

impl ConvKernel {
    pub(super) fn products(&self) -> impl Iterator<Item = ConvProduct> {
        [Some(self.first), self.second].into_iter().flatten()
    }

    pub(super) fn entry_point(&self) -> &'static str {
        match (self.second, self.first.pass) {
            (Some(_), _) => "conv_gradients",
            (None, Pass::Forward) => "conv_forward",
            (None, Pass::DataGradient) => "conv_data_gradient",
            (None, Pass::WeightGradient) => "conv_weight_gradient",
        }
    }

    /// Returns the threads of a block. Both products have the same number.
    pub(super) fn threads(&self) -> u32 {
        self.first.tile.threads()
    }

    /// Returns the source. The first product runs in the first blocks; its sizes contain their number.
    pub(super) fn source(&self) -> String {
        let mut source = include_str!("sizes.cu").to_owned();
        let (mut parameters, mut bodies, mut memory, mut count) = (String::new(), Vec::new(), Vec::new(), 0);
        for (product, namespace) in self.products().zip(["first", "second"]) {
            source += &product.text(namespace);
            let mut body = format!("{namespace}::Pointers p = {{}};\n");
            for name in product.buffers() {
                parameters += &format!("void *p{count}, ");
                body += &format!("p.{name} = (decltype(p.{name}))p{count};\n");
                count += 1;
            }
            bodies.push(body);
            memory.push(format!("{namespace}::SHARED_BYTES"));
        }
        let (name, threads) = (self.entry_point(), self.threads());
        // Minimum number of resident blocks per multiprocessor. Without a minimum, ptxas spills registers of small tiles to fit
        // more blocks. A kernel of both gradients wants up to 183 registers per thread. With 128, some of these kernels spill a
        // few, but 16 warps are resident instead of 8: on an H200, a step of ResNet-18 takes 3.2 ms instead of 3.6 (bf16).
        let blocks = if self.second.is_some() { 512 / threads } else { threads / 128 };
        let bytes = memory.join(" > ")
            + &memory.get(1).map_or(String::new(), |second| format!(" ? first::SHARED_BYTES : {second}"));
        source += &format!(
            "extern \"C\" __global__ void __launch_bounds__({threads}, {blocks}) \
             {name}({parameters}const __grid_constant__ AllSizes<{}> s) {{\n\
             __shared__ alignas(128) unsigned char memory[{bytes}];\n",
            bodies.len()
        );
        match &bodies[..] {
            [only] => source += &format!("{only}first::product(p, blockIdx.x, s.of[0], memory);\n}}\n"),
            [one, other] => {
                source += &format!(
                    "if (blockIdx.x < s.of[0].blocks) {{\n{one}first::product(p, blockIdx.x, s.of[0], memory);\n}} else {{\n\
                     {other}second::product(p, blockIdx.x - s.of[0].blocks, s.of[1], memory);\n}}\n}}\n"
                );
            }
            _ => unreachable!("a kernel has one or two products"),
        }
        source
    }
}

/// Division of numbers below 2^31 by multiplication: `Division` of `sizes.cu`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Division {
    divisor: u32,
    factor: u32,
    shift: u32,
}

impl Division {
    /// Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994.
    pub(super) fn by(divisor: usize) -> Self {
        let divisor = divisor as u32;
        if divisor <= 1 {
            return Self { divisor: 1, factor: 0, shift: 0 };
        }
        let bits = u32::BITS - (divisor - 1).leading_zeros();
        let factor = (1_u64 << (31 + bits)).div_ceil(u64::from(divisor)) as u32;
        Self { divisor, factor, shift: bits - 1 }
    }

    /// Divides as the kernel does.
    #[allow(dead_code, reason = "for tests")]
    pub(super) fn apply(self, n: u32) -> u32 {
        if self.divisor == 1 { n } else { ((u64::from(n) * u64::from(self.factor)) >> 32) as u32 >> self.shift }
    }
}

/// `Sizes` of `sizes.cu`.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Sizes {
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) channels: u32,
    pub(super) groups: u32,
    pub(super) all_channels: u32,
    pub(super) other_channels: u32,
    pub(super) height: u32,
    pub(super) width: u32,
    pub(super) pitch: u32,
    pub(super) other_height: u32,
    pub(super) other_width: u32,
    pub(super) other_pitch: u32,
    pub(super) pixels: u32,
    pub(super) padding: [u32; 2],
    pub(super) across: Division,
    pub(super) down: Division,
    pub(super) piece: u32,
    pub(super) tiles: [u32; 2],
    pub(super) parts_per_merge: u32,
    pub(super) blocks: u32,
    pub(super) epsilon: f32,
    pub(super) momentum: f32,
}
