// Computes one tile of a product and its epilogue: the kernel's entry (`ConvKernel::source` in source.rs) calls `product`. See
// mod.rs for the passes, the layout and the tiles. models/ops/tests/conv_lowering.rs compiles all variants without a GPU,
// benches/gpu_check/convolutions.rs and deferred.rs compare the results with the CPU's.

#if PASS == WEIGHT_GRADIENT
typedef float Result;
#else
typedef Element Result;
#endif

/// Memory of a product. Pointers that the product's macros do not need are null.
struct Pointers {
    /// Images of the windows; in DATA_GRADIENT the output's gradient.
    const Element *images;
    /// The weight or, in WEIGHT_GRADIENT, the output's gradient.
    const Element *other;
    const float *bias;
    Result *result;
    /// With MOMENTS, NORM or SPLIT: the partial results of all blocks, their merged result, and counters that are zero. See
    /// `merge_parts`.
    float *parts, *totals;
    u32 *counters;
    /// With ADD: images that are added to the result.
    const Element *addend;
    /// With NORM, see `gradient_sums`.
    Norm norm;
    /// With NORMALISE: factor and summand of each channel of the images.
    const float *scale, *shift;
    /// With NORM_GRADIENT, see `NormGradient`.
    const Element *norm_input;
    const float *factors;
    /// With STATISTICS, see `write_statistics`.
    Statistics statistics;
    /// With MASKED, see `write_norm_gradient`.
    NormGradientResult gradient_result;
    /// With RESIDUAL_NORM, see `residual_products`.
    ResidualNorm residual_norm;
    NormGradientResult residual_result;

    /// Returns the batch norms of operands whose first channel is `first` of `all`.
    template <class NormOnLoad> __device__ NormOnLoad norm_on_load(int first, int all) const {
#if NORMALISE
        if constexpr (same<NormOnLoad, Normalisation>) return {scale + first, shift + first};
#endif
#if NORM_GRADIENT
        if constexpr (same<NormOnLoad, NormGradient>) return {norm_input + first, factors + first, all};
#endif
        if constexpr (same<NormOnLoad, NoNorm>) return {};
    }
};

/// Bytes of shared memory.
constexpr int OUTPUT_TILE_BYTES = BF16 && PASS != WEIGHT_GRADIENT ? ROWS * (COLUMNS + 8) * 2 : 0;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES > OUTPUT_TILE_BYTES ? STAGES * STAGE_BYTES : OUTPUT_TILE_BYTES;

/// Returns the sizes of a group. With DIAGONAL, the last one may have fewer channels than the others.
__device__ __forceinline__ Sizes sizes_of(Sizes s, int group) {
#if DIAGONAL
    s.channels = min(s.channels, s.all_channels - group * s.channels);
#if PASS == WEIGHT_GRADIENT
    s.rows = min(s.rows, s.other_channels - group * s.rows);
    s.columns = TAPS * s.channels;
#else
    s.columns = min(s.columns, s.other_channels - group * s.columns);
#endif
#endif
    return s;
}

/// A block's part of the product. The block number counts tiles of rows fastest, then tiles of columns, groups, and classes or
/// pieces.
struct Block {
    int row_tile, column_tile, first_row, first_column;
    /// `part`: the class in DATA_GRADIENT, the piece in WEIGHT_GRADIENT.
    int group, part;
    /// The group's first channels of the images of windows, and of the other side.
    int channel, other;
    /// First row and column of the thread's warp in the tile.
    int row, column;

    __device__ __forceinline__ Block(u32 block, const Sizes &sizes) {
        row_tile = block % sizes.tiles[0], column_tile = block / sizes.tiles[0] % sizes.tiles[1];
        int which = block / (sizes.tiles[0] * sizes.tiles[1]);
        first_row = row_tile * ROWS, first_column = column_tile * COLUMNS;
        group = which % sizes.groups, part = which / sizes.groups;
        channel = group * sizes.channels, other = group * (PASS == WEIGHT_GRADIENT ? sizes.rows : sizes.columns);
        int warp = threadIdx.x / 32;
        row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS, column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS;
    }
};

// Each pass has one function: it multiplies the operands (operands.cu, product.cu), applies the epilogue (moments.cu), writes the
// tile (write.cu), and merges what several blocks have computed (merge_parts.cu). `s` are the sizes of the block's group.
#if PASS == FORWARD
__device__ __forceinline__ void compute_tile(Pointers p, const Block &b, const Sizes &s, unsigned char *memory) {
    float sums[DOWN][ACROSS][4] = {};
    // Columns of the whole result; this tile's first column; columns of the group from there on.
    [[maybe_unused]] int all = s.other_channels, at = b.other + b.first_column, left = s.columns - b.first_column;
    // Input channels of a filter.
    int filter_channels = DIAGONAL ? BLOCK_IN : s.channels;
    Taps taps = {{0, 0}, {KERNEL_DOWN, KERNEL_ACROSS}};
    int depth = TAPS * s.channels, origin[2] = {-s.padding[0], -s.padding[1]};
    p.images += b.channel;
    p.other += b.other * TAPS * filter_channels;
    Windows windows(p.images, s, taps, origin, b.first_row, p.norm_on_load<WindowsNorm>(b.channel, s.all_channels));
    Filters filters(p.other, s, depth, b.first_column);
    multiply(sums, windows, filters, (depth + DEPTH - 1) / DEPTH, __cvta_generic_to_shared(memory));
#if BIAS
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int c = b.first_column + b.column + j * 8 + threadIdx.x % 4 * 2 + k % 2;
            float bias = c < s.columns ? p.bias[b.other + c] : 0.0f;
#pragma unroll
            for (int i = 0; i < DOWN; i++) sums[i][j][k] += bias;
        }
#endif
#if RELU
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            // NaN stays NaN.
            for (int k = 0; k < 4; k++) sums[i][j][k] = sums[i][j][k] < 0.0f ? 0.0f : sums[i][j][k];
#endif
#if MOMENTS
    float *moments = p.parts + (size_t)b.row_tile * 2 * all + at;
    write_moments(sums, b.row, b.column, min(s.rows - b.first_row, ROWS), moments, left, all, (float *)memory);
#endif
    write(sums, b.row, b.column, p.result + b.other, Target{s, s.rows, b.first_row, {0, 0}}, (Element *)memory, b.first_column);
#if MOMENTS
    int runs = runs_of(s.tiles[0], s.parts_per_merge);
    u32 *counters = p.counters + (b.group * s.tiles[1] + b.column_tile) * (runs + 1);
    merge_parts(b.row_tile, s.tiles[0], s.parts_per_merge, counters, (u32 *)memory, [&](int slot, int count, int size, int result) {
        int first = slot == s.tiles[0] ? 0 : slot * ROWS, rows = min(count * size * ROWS, s.rows - first);
        float *to = result == s.tiles[0] + runs ? p.totals : p.parts + (size_t)result * 2 * all;
        merge_moments(p.parts + (size_t)slot * 2 * all + at, count, size * ROWS, rows, to + at, left, all);
#if STATISTICS
        if (to == p.totals) write_statistics(p.totals, p.statistics, at, left, all, s);
#endif
    });
#endif
}
#elif PASS == DATA_GRADIENT
__device__ __forceinline__ void compute_tile(Pointers p, const Block &b, const Sizes &s, unsigned char *memory) {
    float sums[DOWN][ACROSS][4] = {};
    // As in FORWARD.
    [[maybe_unused]] int all = s.other_channels, at = b.other + b.first_column, left = s.columns - b.first_column;
    int filter_channels = DIAGONAL ? BLOCK_IN : s.columns;
    // The class of the input pixels (see mod.rs), and its taps: only these connect the pixels with output pixels.
    int place[2] = {b.part / STRIDE_ACROSS, b.part % STRIDE_ACROSS}, origin[2];
    Taps taps;
    constexpr int STRIDE[2] = {STRIDE_DOWN, STRIDE_ACROSS}, KERNEL[2] = {KERNEL_DOWN, KERNEL_ACROSS};
    for (int i = 0; i < 2; i++) {
        taps.first[i] = (place[i] + s.padding[i]) % STRIDE[i];
        taps.count[i] = taps.first[i] < KERNEL[i] ? (KERNEL[i] - taps.first[i] + STRIDE[i] - 1) / STRIDE[i] : 0;
        origin[i] = (place[i] + s.padding[i] - taps.first[i]) / STRIDE[i];
    }
    if (!taps.count[0] || !taps.count[1]) taps.count[0] = taps.count[1] = 0;
    int depth = taps.count[0] * taps.count[1] * s.channels;
    p.images += b.channel;
    p.other += b.channel * TAPS * filter_channels;
    Windows windows(p.images, s, taps, origin, b.first_row, p.norm_on_load<WindowsNorm>(b.channel, s.all_channels));
    TransposedFilters filters(p.other, s, taps, b.first_column);
    multiply(sums, windows, filters, (depth + DEPTH - 1) / DEPTH, __cvta_generic_to_shared(memory));
    Target target{s, s.rows, b.first_row, {place[0], place[1]}};
#if ADD
    add_images(sums, b.row, b.column, p.addend + at, target, left);
#endif
#if NORM
    int tile = b.part * s.tiles[0] + b.row_tile, tiles = s.tiles[0] * STRIDE_DOWN * STRIDE_ACROSS;
    int runs = runs_of(tiles, s.parts_per_merge);
    float *slot = p.parts + (size_t)tile * SUMS * all;
    gradient_sums(sums, b.row, b.column, p.norm, target, slot, at, left, all, (float *)memory);
#if RESIDUAL_NORM
    residual_products(sums, b.row, b.column, p.residual_norm, target, slot + 2 * all, at, left, (float *)memory);
#endif
#endif
    write(sums, b.row, b.column, p.result + b.other, target, (Element *)memory, b.first_column);
#if NORM
    u32 *counters = p.counters + (b.group * s.tiles[1] + b.column_tile) * (runs + 1);
    merge_parts(tile, tiles, s.parts_per_merge, counters, (u32 *)memory, [&](int slot, int count, int, int result) {
        float *to = result == tiles + runs ? p.totals : p.parts + (size_t)result * SUMS * all;
        merge_sums(p.parts + (size_t)slot * SUMS * all + at, count, to + at, left, all);
#if MASKED
        if (to == p.totals) write_norm_gradient(to, to + all, p.norm, p.gradient_result, at, left, all, s.pixels);
#endif
#if RESIDUAL_NORM
        if (to == p.totals)
            write_norm_gradient(to, to + 2 * all, p.residual_norm, p.residual_result, at, left, all, s.pixels);
#endif
    });
#endif
}
#else
__device__ __forceinline__ void compute_tile(Pointers p, const Block &b, const Sizes &s, unsigned char *memory) {
    float sums[DOWN][ACROSS][4] = {};
    // As in FORWARD.
    int filter_channels = DIAGONAL ? BLOCK_IN : s.channels;
    int start = b.part * s.piece, end = min(start + s.piece, s.pixels);
    p.images += b.channel;
    p.other += b.other;
    OutputPixels pixels(p.other, s, b.first_row, start, end, p.norm_on_load<OutputPixelsNorm>(b.other, s.other_channels));
    TransposedWindows windows(p.images, s, b.first_column, start, end,
                              p.norm_on_load<TransposedWindowsNorm>(b.channel, s.all_channels));
    multiply(sums, pixels, windows, (end - start + DEPTH - 1) / DEPTH, __cvta_generic_to_shared(memory));
    size_t to = (size_t)b.other * TAPS * filter_channels;
#if SPLIT
    size_t step = (size_t)s.other_channels * TAPS * filter_channels;
    write(sums, b.row, b.column, p.parts + b.part * step + to, PieceTarget{s, b.first_row}, memory, b.first_column);
    int parts = (s.pixels + s.piece - 1) / s.piece, runs = runs_of(parts, s.parts_per_merge);
    int tile = (b.group * s.tiles[1] + b.column_tile) * s.tiles[0] + b.row_tile;
    u32 *counters = p.counters + tile * (runs + 1);
    merge_parts(b.part, parts, s.parts_per_merge, counters, (u32 *)memory, [&](int slot, int count, int, int result) {
        float *sum = result == parts + runs ? p.result + to : p.parts + result * step + to;
        add_slots(p.parts + slot * step + to, count, step, sum, b.first_row, b.first_column, s);
    });
#else
    write(sums, b.row, b.column, p.result + to, PieceTarget{s, b.first_row}, memory, b.first_column);
#endif
}
#endif

/// Computes the part of the product of block number `number`. `memory` has SHARED_BYTES bytes of shared memory.
__device__ __forceinline__ void product(Pointers p, u32 number, const Sizes &sizes, unsigned char *memory) {
    Block block(number, sizes);
    compute_tile(p, block, sizes_of(sizes, block.group), memory);
}
