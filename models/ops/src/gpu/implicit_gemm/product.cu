// The product of two sequences of tiles on tensor cores.

__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
}

__device__ __forceinline__ void load_transposed_matrices(u32 (&to)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
}

__device__ __forceinline__ u32 load_word(u32 at) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at));
    return value;
}

/// Loads 16 rows of 32 bytes of depth. `row` is the first row; `step` selects the half of the tile's depth.
template <bool INNER, int WIDE> __device__ __forceinline__ void load_left(u32 (&to)[4], u32 tile, int row, int step) {
    int lane = threadIdx.x % 32, matrix = lane >> 3;
    if constexpr (INNER) {
        load_matrices(to, tile + inner(row + (lane & 7) + (matrix & 1) * 8, step * 2 + (matrix >> 1)));
    } else if constexpr (sizeof(Element) == 2) {
        load_transposed_matrices(to, tile + outer<WIDE>(step * 16 + (lane & 7) + (matrix >> 1) * 8, row / 8 + (matrix & 1)));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int m = row + (lane >> 2) + (i & 1) * 8;
            to[i] = load_word(tile + outer<WIDE>(step * 8 + (lane & 3) + (i >> 1) * 4, m / 4) + m % 4 * 4);
        }
    }
}

/// Loads two times 8 columns of 32 bytes of depth, as `load_left`.
template <bool INNER> __device__ __forceinline__ void load_right(u32 (&to)[4], u32 tile, int column, int step) {
    int lane = threadIdx.x % 32, matrix = lane >> 3;
    if constexpr (INNER) {
        load_matrices(to, tile + inner(column + (lane & 7) + (matrix >> 1) * 8, step * 2 + (matrix & 1)));
    } else if constexpr (sizeof(Element) == 2) {
        load_transposed_matrices(to, tile + outer<COLUMNS>(step * 16 + (lane & 7) + (matrix & 1) * 8, column / 8 + (matrix >> 1)));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int n = column + (lane >> 2) + (i >> 1) * 8;
            to[i] = load_word(tile + outer<COLUMNS>(step * 8 + (lane & 3) + (i & 1) * 4, n / 4) + n % 4 * 4);
        }
    }
}

__device__ __forceinline__ void round_to_tf32(u32 (&values)[4]) {
#if !BF16
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(values[i]) : "f"(__uint_as_float(values[i])));
#endif
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#endif
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Multiplies two sequences of tiles. While one pair of tiles is multiplied, the next STAGES - 1 pairs are being copied. Each
/// thread applies the batch norm (see prologue.cu) to the elements that it has copied itself, so this needs no barrier of its own.
template <class Left, class Right>
__device__ __forceinline__ void multiply(float (&sums)[DOWN][ACROSS][4], Left left, Right right, int tiles, u32 memory) {
    constexpr bool LEFT_INNER = PASS != WEIGHT_GRADIENT, RIGHT_INNER = PASS == FORWARD;
    int warp = threadIdx.x / 32;
    int row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS, column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS;
    for (int stage = 0; stage < STAGES - 1; stage++) {
        left.skip(), right.skip();
        if (stage < tiles) left.load(memory + stage * STAGE_BYTES), right.load(memory + stage * STAGE_BYTES + LEFT);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    int from = 0, to = STAGES - 1;
    for (int tile = 0; tile < tiles; tile++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        left.apply_norm(memory + from * STAGE_BYTES), right.apply_norm(memory + from * STAGE_BYTES + LEFT);
        __syncthreads();
        left.skip(), right.skip();
        if (tile + STAGES - 1 < tiles) left.load(memory + to * STAGE_BYTES), right.load(memory + to * STAGE_BYTES + LEFT);
        asm volatile("cp.async.commit_group;" ::: "memory");
        u32 at = memory + from * STAGE_BYTES;
#pragma unroll
        for (int step = 0; step < 2; step++) {
            u32 a[DOWN][4], b[ACROSS / 2][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
                load_left<LEFT_INNER, ROWS>(a[i], at, row + i * 16, step);
                round_to_tf32(a[i]);
            }
#pragma unroll
            for (int j = 0; j < ACROSS / 2; j++) {
                load_right<RIGHT_INNER>(b[j], at + LEFT, column + j * 16, step);
                round_to_tf32(b[j]);
            }
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++) multiply_add(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
        from = from + 1 == STAGES ? 0 : from + 1;
        to = to + 1 == STAGES ? 0 : to + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}
