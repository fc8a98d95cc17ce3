// Writes a tile to the result.

/// Positions of a tile's elements in the result.
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

    /// Returns the offset of a row's element, or -1 if the column is outside.
    __device__ int element(int at, int column) const { return column < s.columns ? at + column : -1; }
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
                int first = target.element(at, c);
                if constexpr (RESULT_VECTOR >= 2) {
                    if (first >= 0) *(float2 *)(to + first) = make_float2(pair[0], pair[1]);
                } else {
                    int second = target.element(at, c + 1);
                    if (first >= 0) to[first] = pair[0];
                    if (second >= 0) to[second] = pair[1];
                }
            }
        }
}
#endif

#if PASS == WEIGHT_GRADIENT
/// Returns the offset of an element in the weight gradient of a group, or -1 outside. With DIAGONAL, only the blocks of the
/// diagonal are results, [out, taps, BLOCK_IN].
__device__ __forceinline__ int weight_at(int row, int column, const Sizes &s) {
    if (row >= s.rows || column >= s.columns) return -1;
#if DIAGONAL
    int tap = column / s.channels, channel = column - tap * s.channels;
    return row / BLOCK_OUT == channel / BLOCK_IN ? (row * TAPS + tap) * BLOCK_IN + channel % BLOCK_IN : -1;
#else
    return row * s.columns + column;
#endif
}

/// Positions of a tile's elements in a piece of a weight gradient.
struct PieceTarget {
    const Sizes &s;
    int first_row;
    __device__ int operator()(int row) const { return row + first_row < s.rows ? row + first_row : -1; }
    __device__ int element(int row, int column) const { return weight_at(row, column, s); }
};
#endif
