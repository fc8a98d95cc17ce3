// Computes one tile of a product and its epilogue.

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
constexpr int STAGED = BF16 && PASS != WEIGHT_GRADIENT ? ROWS * (COLUMNS + 8) * 2 : 0;
constexpr int MEMORY = STAGES * STAGE > STAGED ? STAGES * STAGE : STAGED;

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

/// Computes a tile. The block number counts tiles of rows fastest, then tiles of columns, groups, and classes or pieces.
__device__ __forceinline__ void product(Pointers p, u32 block, const Sizes &sizes, unsigned char *memory) {
    u32 tiles_at = __cvta_generic_to_shared(memory);
    int row_tile = block % sizes.tiles[0], column_tile = block / sizes.tiles[0] % sizes.tiles[1];
    int which = block / (sizes.tiles[0] * sizes.tiles[1]);
    int first_row = row_tile * ROWS, first_column = column_tile * COLUMNS;
    [[maybe_unused]] int group = which % sizes.groups, part = which / sizes.groups;
    // The group's first channels of the images of windows, and of the other side.
    int channel = group * sizes.channels, other = group * (PASS == WEIGHT_GRADIENT ? sizes.rows : sizes.columns);
    const Sizes s = sizes_of(sizes, group);
    int warp = threadIdx.x / 32;
    int row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS, column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS;
    float sums[DOWN][ACROSS][4] = {};
    // Columns of the whole result; this tile's first column; columns of the group from there on.
    [[maybe_unused]] int all = s.other_channels, at = other + first_column, left = s.columns - first_column;
    // Input channels of a filter.
    [[maybe_unused]] int filter_channels = DIAGONAL ? BLOCK_IN : PASS == DATA_GRADIENT ? s.columns : s.channels;

#if PASS == WEIGHT_GRADIENT
    int start = part * s.piece, end = min(start + s.piece, s.pixels);
    p.images += channel;
    p.other += other;
    OutputPixels pixels(p.other, s, first_row, start, end, p.norm_on_load<OutputPixelsNorm>(other, s.other_channels));
    TransposedWindows windows(p.images, s, first_column, start, end, p.norm_on_load<TransposedWindowsNorm>(channel, s.all_channels));
    multiply(sums, pixels, windows, (end - start + DEPTH - 1) / DEPTH, tiles_at);
    size_t to = (size_t)other * TAPS * filter_channels;
#if SPLIT
    size_t step = (size_t)s.other_channels * TAPS * filter_channels;
    write(sums, row, column, p.parts + part * step + to, PieceTarget{s, first_row}, memory, first_column);
    int parts = (s.pixels + s.piece - 1) / s.piece, runs = runs_of(parts, s.parts_per_merge);
    int tile = (group * s.tiles[1] + column_tile) * s.tiles[0] + row_tile;
    u32 *counters = p.counters + tile * (runs + 1);
    merge_parts(part, parts, s.parts_per_merge, counters, (u32 *)memory, [&](int slot, int count, int, int result) {
        float *sum = result == parts + runs ? p.result + to : p.parts + result * step + to;
        add_slots(p.parts + slot * step + to, count, step, sum, first_row, first_column, s);
    });
#else
    write(sums, row, column, p.result + to, PieceTarget{s, first_row}, memory, first_column);
#endif
#elif PASS == FORWARD
    Taps taps = {{0, 0}, {KERNEL_DOWN, KERNEL_ACROSS}};
    int depth = TAPS * s.channels, origin[2] = {-s.padding[0], -s.padding[1]};
    p.images += channel;
    p.other += other * TAPS * filter_channels;
    Windows windows(p.images, s, taps, origin, first_row, p.norm_on_load<WindowsNorm>(channel, s.all_channels));
    Filters filters(p.other, s, depth, first_column);
    multiply(sums, windows, filters, (depth + DEPTH - 1) / DEPTH, tiles_at);
#if BIAS
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int c = first_column + column + j * 8 + threadIdx.x % 4 * 2 + k % 2;
            float b = c < s.columns ? p.bias[other + c] : 0.0f;
#pragma unroll
            for (int i = 0; i < DOWN; i++) sums[i][j][k] += b;
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
    float *moments = p.parts + (size_t)row_tile * 2 * all + at;
    write_moments(sums, row, column, min(s.rows - first_row, ROWS), moments, left, all, (float *)memory);
#endif
    write(sums, row, column, p.result + other, Target{s, s.rows, first_row, {0, 0}}, (Element *)memory, first_column);
#if MOMENTS
    int runs = runs_of(s.tiles[0], s.parts_per_merge);
    u32 *counters = p.counters + (group * s.tiles[1] + column_tile) * (runs + 1);
    merge_parts(row_tile, s.tiles[0], s.parts_per_merge, counters, (u32 *)memory, [&](int slot, int count, int size, int result) {
        int first = slot == s.tiles[0] ? 0 : slot * ROWS, rows = min(count * size * ROWS, s.rows - first);
        float *to = result == s.tiles[0] + runs ? p.totals : p.parts + (size_t)result * 2 * all;
        merge_moments(p.parts + (size_t)slot * 2 * all + at, count, size * ROWS, rows, to + at, left, all);
#if STATISTICS
        if (to == p.totals) write_statistics(p.totals, p.statistics, at, left, all, s);
#endif
    });
#endif
#else
    // The class of the input pixels (see mod.rs), and its taps: only these connect the pixels with output pixels.
    int place[2] = {part / STRIDE_ACROSS, part % STRIDE_ACROSS}, origin[2];
    Taps taps;
    constexpr int STRIDE[2] = {STRIDE_DOWN, STRIDE_ACROSS}, KERNEL[2] = {KERNEL_DOWN, KERNEL_ACROSS};
    for (int i = 0; i < 2; i++) {
        taps.first[i] = (place[i] + s.padding[i]) % STRIDE[i];
        taps.count[i] = taps.first[i] < KERNEL[i] ? (KERNEL[i] - taps.first[i] + STRIDE[i] - 1) / STRIDE[i] : 0;
        origin[i] = (place[i] + s.padding[i] - taps.first[i]) / STRIDE[i];
    }
    if (!taps.count[0] || !taps.count[1]) taps.count[0] = taps.count[1] = 0;
    int depth = taps.count[0] * taps.count[1] * s.channels;
    p.images += channel;
    p.other += channel * TAPS * filter_channels;
    Windows windows(p.images, s, taps, origin, first_row, p.norm_on_load<WindowsNorm>(channel, s.all_channels));
    TransposedFilters filters(p.other, s, taps, first_column);
    multiply(sums, windows, filters, (depth + DEPTH - 1) / DEPTH, tiles_at);
    Target target{s, s.rows, first_row, {place[0], place[1]}};
#if ADD
    add_images(sums, row, column, p.addend + at, target, left);
#endif
#if NORM
    int tile = part * s.tiles[0] + row_tile, tiles = s.tiles[0] * STRIDE_DOWN * STRIDE_ACROSS;
    int runs = runs_of(tiles, s.parts_per_merge);
    float *slot = p.parts + (size_t)tile * SUMS * all;
    gradient_sums(sums, row, column, p.norm, target, slot, at, left, all, (float *)memory);
#if RESIDUAL_NORM
    residual_products(sums, row, column, p.residual_norm, target, slot + 2 * all, at, left, (float *)memory);
#endif
#endif
    write(sums, row, column, p.result + other, target, (Element *)memory, first_column);
#if NORM
    u32 *counters = p.counters + (group * s.tiles[1] + column_tile) * (runs + 1);
    merge_parts(tile, tiles, s.parts_per_merge, counters, (u32 *)memory, [&](int slot, int count, int, int result) {
        float *to = result == tiles + runs ? p.totals : p.parts + (size_t)result * SUMS * all;
        merge_sums(p.parts + (size_t)slot * SUMS * all + at, count, to + at, left, all);
#if MASKED
        if (to == p.totals) write_norm_gradient(to, to + all, p.norm, p.gradient_result, at, left, all, s.pixels);
#endif
#if RESIDUAL_NORM
        if (to == p.totals) write_norm_gradient(to, to + 2 * all, p.residual_norm, p.residual_result, at, left, all, s.pixels);
#endif
    });
#endif
#endif
}
