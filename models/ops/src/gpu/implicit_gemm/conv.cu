// The kernel: one tile of a convolution.

/// Where the rows of a tile lie in the result.
struct Target {
    const Sizes &s;
    int rows, first_row, place[2];

    /// Returns the offset of a row's channels, or -1 if the row is outside.
    __device__ int operator()(int row) const {
        row += first_row;
        if (row >= rows) return -1;
        if constexpr (PASS == FORWARD) return row * s.other_pitch;
        u32 line = s.across(row), image = s.down(line);
        int y = (line - image * s.down.divisor) * STRIDE_DOWN + place[0];
        int x = (row - line * s.across.divisor) * STRIDE_ACROSS + place[1];
        if (y >= s.other_height || x >= s.other_width) return -1;
        return ((image * s.other_height + y) * s.other_width + x) * s.other_pitch;
    }
};

#if BF16 && PASS != WEIGHT_GRADIENT
/// Rounds a tile to bf16 and writes it, through shared memory so that each row is written in long pieces.
__device__ void write(const float (&sums)[DOWN][ACROSS][4], int row, int column, u16 *to, const Target &target, u16 *memory,
                      int first_column) {
    constexpr int PITCH = COLUMNS + 8;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 pair;
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sums[i][j][half * 2 + 1]), "f"(sums[i][j][half * 2]));
                int at = (row + i * 16 + (lane >> 2) + half * 8) * PITCH + column + j * 8 + (lane & 3) * 2;
                *(u32 *)(memory + at) = pair;
            }
    __syncthreads();
    constexpr int PER_ROW = COLUMNS / RESULT_VECTOR, STEP = THREADS / PER_ROW;
    int c = threadIdx.x % PER_ROW * RESULT_VECTOR;
    if (first_column + c >= target.s.columns) return;
    for (int r = threadIdx.x / PER_ROW; r < ROWS; r += STEP) {
        int at = target(r);
        if (at < 0) continue;
        const u16 *from = memory + r * PITCH + c;
        u16 *result = to + (at + first_column + c);
        if constexpr (RESULT_VECTOR == 8) *(uint4 *)result = *(const uint4 *)from;
        else if constexpr (RESULT_VECTOR == 4) *(uint2 *)result = *(const uint2 *)from;
        else if constexpr (RESULT_VECTOR == 2) *(u32 *)result = *(const u32 *)from;
        else *result = *from;
    }
}
#else
/// Writes a tile. Four threads write 32 bytes of a row.
template <class Place>
__device__ void write(const float (&sums)[DOWN][ACROSS][4], int row, int column, float *to, const Place &target, void *,
                      int first_column) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = target(row + i * 16 + (lane >> 2) + half * 8);
            if (at < 0) continue;
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                int c = first_column + column + j * 8 + (lane & 3) * 2;
                const float *pair = &sums[i][j][half * 2];
                if constexpr (RESULT_VECTOR >= 2) {
                    if (c < target.s.columns) *(float2 *)(to + at + c) = make_float2(pair[0], pair[1]);
                } else {
                    if (c < target.s.columns) to[at + c] = pair[0];
                    if (c + 1 < target.s.columns) to[at + c + 1] = pair[1];
                }
            }
        }
}
#endif

#if MOMENTS
/// Adds up a column's values of all threads, in a fixed order, and returns the sums of this thread's columns. `memory` has COLUMNS
/// floats for each row of warps. All threads call it.
__device__ void column_sums(float (&values)[ACROSS][2], int row, int column, float *memory) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) values[j][k] += __shfl_xor_sync(~0u, values[j][k], step);
            if (lane < 4) memory[row / WARP_ROWS * COLUMNS + column + j * 8 + lane * 2 + k] = values[j][k];
        }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float sum = 0.0f;
#pragma unroll
            for (int warps = 0; warps < ROWS / WARP_ROWS; warps++) sum += memory[warps * COLUMNS + column + j * 8 + lane % 4 * 2 + k];
            values[j][k] = sum;
        }
    __syncthreads();
}

/// Writes the mean of each column of the tile and the sum of squares around it, of the values as they are rounded: the moments of a
/// piece, as batch norm's first pass over the result would find them. `to` is [2][columns of all groups].
__device__ void write_moments(const float (&sums)[DOWN][ACROSS][4], int row, int column, int inside, float *to, int left, int all,
                              float *memory) {
    int lane = threadIdx.x % 32;
    auto value = [&](int i, int j, int half, int k) {
        float sum = sums[i][j][half * 2 + k];
#if BF16
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sum), "f"(0.0f));
        sum = __uint_as_float(pair & 0xffff0000u);
#endif
        return sum;
    };
    float mean[ACROSS][2] = {}, squares[ACROSS][2] = {};
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (row + i * 16 + (lane >> 2) + half * 8 < inside)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
#pragma unroll
                    for (int k = 0; k < 2; k++) mean[j][k] += value(i, j, half, k);
    column_sums(mean, row, column, memory);
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) mean[j][k] /= inside;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (row + i * 16 + (lane >> 2) + half * 8 < inside)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        float difference = value(i, j, half, k) - mean[j][k];
                        squares[j][k] += difference * difference;
                    }
    column_sums(squares, row, column, memory);
    if (row > 0 || lane > 3) return;
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int c = column + j * 8 + lane * 2 + k;
            if (c < left) to[c] = mean[j][k], to[all + c] = squares[j][k];
        }
}
#endif

/// Rows of a piece of a weight gradient.
struct PieceRows {
    const Sizes &s;
    int first_row;
    __device__ int operator()(int row) const { return row + first_row < s.rows ? (row + first_row) * s.columns : -1; }
};

/// `images` are the images of the windows (in DATA_GRADIENT the output's gradient), `other` the weight or, in WEIGHT_GRADIENT,
/// the output's gradient. Grid: tiles of rows, tiles of columns, groups times classes or pieces.
extern "C" __global__ void __launch_bounds__(THREADS) NAME(const Element *images, const Element *other,
#if BIAS
                                                           const float *bias,
#endif
#if PASS == WEIGHT_GRADIENT
                                                           float *result,
#else
                                                           Element *result,
#endif
#if MOMENTS
                                                           float *moments,
#endif
                                                           const __grid_constant__ Sizes s) {
    constexpr int STAGED = BF16 && PASS != WEIGHT_GRADIENT ? ROWS * (COLUMNS + 8) * 2 : 0;
    __shared__ alignas(128) unsigned char memory[STAGES * STAGE > STAGED ? STAGES * STAGE : STAGED];
    u32 tiles_at = __cvta_generic_to_shared(memory);
    int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * COLUMNS;
    [[maybe_unused]] int group = blockIdx.z % s.groups, part = blockIdx.z / s.groups;
    int warp = threadIdx.x / 32;
    int row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS, column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS;
    float sums[DOWN][ACROSS][4] = {};

#if PASS == WEIGHT_GRADIENT
    int start = part * s.piece, end = min(start + s.piece, s.pixels);
    images += group * s.channels;
    other += group * s.rows;
    result += (size_t)(part * s.groups + group) * s.rows * s.columns;
    OutputPixels left(other, s, first_row, start, end);
    TurnedWindows right(images, s, first_column, start, end);
    multiply(sums, left, right, (end - start + DEPTH - 1) / DEPTH, tiles_at);
    write(sums, row, column, result, PieceRows{s, first_row}, memory, first_column);
#elif PASS == FORWARD
    constexpr int TAPS = KERNEL_DOWN * KERNEL_ACROSS;
    Taps taps = {{0, 0}, {KERNEL_DOWN, KERNEL_ACROSS}};
    int depth = TAPS * s.channels, origin[2] = {-s.padding[0], -s.padding[1]};
    images += group * s.channels;
    other += group * s.columns * depth;
    result += group * s.columns;
    Windows left(images, s, taps, origin, first_row);
    Filters right(other, s, depth, first_column);
    multiply(sums, left, right, (depth + DEPTH - 1) / DEPTH, tiles_at);
#if BIAS
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int c = first_column + column + j * 8 + threadIdx.x % 4 * 2 + k % 2;
            float b = c < s.columns ? bias[group * s.columns + c] : 0.0f;
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
    int all = s.groups * s.columns;
    write_moments(sums, row, column, min(s.rows - first_row, ROWS), moments + (size_t)blockIdx.x * 2 * all + group * s.columns + first_column,
                  s.columns - first_column, all, (float *)memory);
#endif
    write(sums, row, column, result, Target{s, s.rows, first_row, {0, 0}}, (Element *)memory, first_column);
#else
    // Class of the input pixels, and their taps: those that reach an output pixel.
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
    images += group * s.channels;
    other += group * s.channels * KERNEL_DOWN * KERNEL_ACROSS * s.columns;
    result += group * s.columns;
    Windows left(images, s, taps, origin, first_row);
    TurnedFilters right(other, s, taps, first_column);
    multiply(sums, left, right, (depth + DEPTH - 1) / DEPTH, tiles_at);
    write(sums, row, column, result, Target{s, s.rows, first_row, {place[0], place[1]}}, (Element *)memory, first_column);
#endif
}
