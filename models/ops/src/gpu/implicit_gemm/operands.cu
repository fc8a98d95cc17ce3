// The operands of a convolution as a matrix product: tiles in shared memory and how they are filled. See mod.rs for the terms.

/// Address of a 16-byte chunk of a tile whose rows are contiguous along the depth. The chunk's index is XORed with the row
/// (swizzled), so that eight rows of a column of chunks are in different banks.
__device__ __forceinline__ int inner(int row, int chunk) { return row * 64 + ((chunk ^ row >> 1 & 3) << 4); }

/// Address of a chunk of a tile [DEPTH][WIDE] whose rows are contiguous along the tile's width, swizzled too.
template <int WIDE> __device__ __forceinline__ int outer(int depth, int chunk) {
    constexpr int CHUNKS = WIDE / CHUNK;
#if BF16
    int turn = CHUNKS >= 8 ? depth & 7 : depth >> 1 & 3;
#else
    int turn = (depth & 3) << 1;
#endif
    return depth * CHUNKS * 16 + ((chunk ^ turn) << 4);
}

/// Copies COUNT elements to shared memory without waiting; zeros if `inside` is false.
template <int COUNT> __device__ __forceinline__ void copy(u32 to, const Element *from, bool inside) {
    constexpr int BYTES = COUNT * sizeof(Element);
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
    } else if constexpr (BYTES >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(inside ? BYTES : 0)
                     : "memory");
    } else {
        u16 v = inside ? *(const u16 *)from : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
    }
}

/// The taps that a block sums over.
struct Taps {
    int first[2], count[2];
};

/// Pixels of windows, a tile [ROWS][DEPTH]: left operand of FORWARD and DATA_GRADIENT.
struct Windows {
    static constexpr int PER_ROW = DEPTH / VECTOR, STEP = THREADS / PER_ROW, LOADS = ROWS / STEP;
    using NormOnLoad = WindowsNorm;
    const Element *images;
    const Sizes &s;
    const Taps &taps;
    /// Each row's first tap: offset in the images and coordinates.
    int at[LOADS], y[LOADS], x[LOADS];
    /// This thread's position along the depth: tap and channel. `carry_to_next_tap` carries surplus channels over to the next tap.
    int down = 0, across = 0, channel;
    NormOnLoad norm_on_load;
    /// Channel of the next tile that `apply_norm` gets.
    int norm_channel;
    Inside<LOADS, WindowsNorm> insides;

    __device__ Windows(const Element *images, const Sizes &s, const Taps &taps, const int *origin, int first_row, NormOnLoad norm)
        : images(images), s(s), taps(taps), norm_on_load(norm) {
        static_assert(!NormOnLoad::ANY || VECTOR == CHUNK, "batch norm is applied to whole chunks");
        channel = norm_channel = threadIdx.x % PER_ROW * VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int row = first_row + threadIdx.x / PER_ROW + i * STEP;
            u32 line = s.across(row), image = s.down(line);
            y[i] = (line - image * s.down.divisor) * (PASS == FORWARD ? STRIDE_DOWN : 1) + origin[0];
            x[i] = (row - line * s.across.divisor) * (PASS == FORWARD ? STRIDE_ACROSS : 1) + origin[1];
            at[i] = (((int)image * s.height + y[i]) * s.width + x[i]) * s.pitch;
            // Outside for every tap.
            if (row >= s.rows) y[i] = -(1 << 28);
        }
        carry_to_next_tap();
    }

    __device__ void carry_to_next_tap() {
        while (channel >= s.channels && down < taps.count[0]) {
            channel -= s.channels;
            if (++across == taps.count[1]) across = 0, down++;
        }
    }

    __device__ void load(u32 tile) {
        constexpr int DIRECTION = PASS == FORWARD ? 1 : -1;
        int dy = down * DILATION_DOWN * DIRECTION, dx = across * DILATION_ACROSS * DIRECTION;
        int offset = (dy * s.width + dx) * s.pitch + channel;
        int place = threadIdx.x % PER_ROW * VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int row = threadIdx.x / PER_ROW + i * STEP;
            bool inside = down < taps.count[0] && (u32)(y[i] + dy) < (u32)s.height && (u32)(x[i] + dx) < (u32)s.width;
            u32 to = tile + inner(row, place / CHUNK) + place % CHUNK * sizeof(Element);
            copy<VECTOR>(to, inside ? images + (at[i] + offset) : images, inside);
            norm_on_load.copy_other(to, inside ? at[i] + offset : 0, inside);
            insides.add(i, inside);
        }
        channel += DEPTH;
        carry_to_next_tap();
    }

    __device__ void skip() { insides.skip(); }

    __device__ void apply_norm(u32 tile) {
        if constexpr (NormOnLoad::ANY) {
            while (norm_channel >= s.channels) norm_channel -= s.channels;
            NormOnLoad::Factors factors(norm_on_load, norm_channel);
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (insides.of_oldest(i)) factors.apply(tile + inner(threadIdx.x / PER_ROW + i * STEP, threadIdx.x % PER_ROW));
            norm_channel += DEPTH;
        }
    }
};

/// Filters, a tile [COLUMNS][DEPTH]: right operand of FORWARD. With DIAGONAL, those of a narrow group are a block of the diagonal,
/// and the other elements of the tile are zero.
struct Filters {
    static constexpr int PER_ROW = DEPTH / OTHER_VECTOR, STEP = THREADS / PER_ROW, LOADS = (COLUMNS + STEP - 1) / STEP;
    const Element *weight;
    const Sizes &s;
    int first_column, k, depth;
    /// With DIAGONAL: tap and channel at `k`.
    int tap = 0, channel;

    __device__ Filters(const Element *weight, const Sizes &s, int depth, int first_column)
        : weight(weight), s(s), first_column(first_column), k(threadIdx.x % PER_ROW * OTHER_VECTOR), depth(depth), channel(k) {
        carry_to_next_tap();
    }

    __device__ void carry_to_next_tap() {
#if DIAGONAL
        while (channel >= s.channels && tap < TAPS) channel -= s.channels, tap++;
#endif
    }

    __device__ void load(u32 tile) {
        int place = threadIdx.x % PER_ROW * OTHER_VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int row = threadIdx.x / PER_ROW + i * STEP, column = first_column + row;
            if (COLUMNS % STEP && row >= COLUMNS) break;
            bool inside = column < s.columns && k < depth;
#if DIAGONAL
            inside = inside && channel / BLOCK_IN == column / BLOCK_OUT;
            int at = (column * TAPS + tap) * BLOCK_IN + channel % BLOCK_IN;
#else
            int at = column * depth + k;
#endif
            u32 to = tile + inner(row, place / CHUNK) + place % CHUNK * sizeof(Element);
            copy<OTHER_VECTOR>(to, inside ? weight + at : weight, inside);
        }
        k += DEPTH, channel += DEPTH;
        carry_to_next_tap();
    }

    __device__ void skip() {}
    __device__ void apply_norm(u32) {}
};

/// Filters, a tile [DEPTH][COLUMNS]: right operand of DATA_GRADIENT. The depth counts taps and output channels. With DIAGONAL as
/// `Filters`.
struct TransposedFilters {
    static constexpr int PER_ROW = COLUMNS / OTHER_VECTOR, STEP = THREADS / PER_ROW, LOADS = (DEPTH + STEP - 1) / STEP;
    const Element *weight;
    const Sizes &s;
    const Taps &taps;
    int column;
    int down[LOADS] = {}, across[LOADS] = {}, channel[LOADS];

    __device__ TransposedFilters(const Element *weight, const Sizes &s, const Taps &taps, int first_column)
        : weight(weight), s(s), taps(taps), column(first_column + threadIdx.x % PER_ROW * OTHER_VECTOR) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            channel[i] = threadIdx.x / PER_ROW + i * STEP;
            carry_to_next_tap(i);
        }
    }

    __device__ void carry_to_next_tap(int i) {
        while (channel[i] >= s.channels && down[i] < taps.count[0]) {
            channel[i] -= s.channels;
            if (++across[i] == taps.count[1]) across[i] = 0, down[i]++;
        }
    }

    __device__ void load(u32 tile) {
        int place = threadIdx.x % PER_ROW * OTHER_VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int row = threadIdx.x / PER_ROW + i * STEP;
            if (DEPTH % STEP && row >= DEPTH) break;
            bool inside = down[i] < taps.count[0] && column < s.columns;
            int y = taps.first[0] + down[i] * STRIDE_DOWN, x = taps.first[1] + across[i] * STRIDE_ACROSS;
            int filter = (channel[i] * KERNEL_DOWN + y) * KERNEL_ACROSS + x;
#if DIAGONAL
            inside = inside && channel[i] / BLOCK_OUT == column / BLOCK_IN;
            int at = filter * BLOCK_IN + column % BLOCK_IN;
#else
            int at = filter * s.columns + column;
#endif
            u32 to = tile + outer<COLUMNS>(row, place / CHUNK) + place % CHUNK * sizeof(Element);
            copy<OTHER_VECTOR>(to, inside ? weight + at : weight, inside);
            channel[i] += DEPTH;
            carry_to_next_tap(i);
        }
    }

    __device__ void skip() {}
    __device__ void apply_norm(u32) {}
};

/// Pixels of the output's gradient, a tile [DEPTH][ROWS]: left operand of WEIGHT_GRADIENT.
struct OutputPixels {
    static constexpr int PER_ROW = ROWS / OTHER_VECTOR, STEP = THREADS / PER_ROW, LOADS = (DEPTH + STEP - 1) / STEP;
    using NormOnLoad = OutputPixelsNorm;
    const Element *images;
    const Sizes &s;
    int channel, pixel, end;
    NormOnLoad norm_on_load;
    Inside<LOADS, OutputPixelsNorm> insides;

    __device__ OutputPixels(const Element *images, const Sizes &s, int first_row, int pixel, int end, NormOnLoad norm)
        : images(images), s(s), channel(first_row + threadIdx.x % PER_ROW * OTHER_VECTOR), pixel(pixel), end(end),
          norm_on_load(norm) {
        static_assert(!NormOnLoad::ANY || OTHER_VECTOR == CHUNK, "batch norm is applied to whole chunks");
    }

    __device__ void load(u32 tile) {
        int place = threadIdx.x % PER_ROW * OTHER_VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int row = threadIdx.x / PER_ROW + i * STEP;
            if (DEPTH % STEP && row >= DEPTH) break;
            bool inside = pixel + row < end && channel < s.rows;
            u32 to = tile + outer<ROWS>(row, place / CHUNK) + place % CHUNK * sizeof(Element);
            int at = inside ? (pixel + row) * s.other_pitch + channel : 0;
            copy<OTHER_VECTOR>(to, images + at, inside);
            norm_on_load.copy_other(to, at, inside);
            insides.add(i, inside);
        }
        pixel += DEPTH;
    }

    __device__ void skip() { insides.skip(); }

    __device__ void apply_norm(u32 tile) {
        if constexpr (NormOnLoad::ANY) {
            if (channel >= s.rows) return;
            NormOnLoad::Factors factors(norm_on_load, channel);
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (insides.of_oldest(i))
                    factors.apply(tile + outer<ROWS>(threadIdx.x / PER_ROW + i * STEP, threadIdx.x % PER_ROW));
        }
    }
};

/// Pixels of windows, a tile [DEPTH][COLUMNS]: right operand of WEIGHT_GRADIENT. A column is a tap and a channel.
struct TransposedWindows {
    static constexpr int PER_ROW = COLUMNS / VECTOR, STEP = THREADS / PER_ROW, LOADS = (DEPTH + STEP - 1) / STEP;
    using NormOnLoad = TransposedWindowsNorm;
    const Element *images;
    const Sizes &s;
    int dy, dx, channel, pixel, end;
    bool is_column;
    NormOnLoad norm_on_load;
    Inside<LOADS, TransposedWindowsNorm> insides;

    __device__ TransposedWindows(const Element *images, const Sizes &s, int first_column, int pixel, int end, NormOnLoad norm)
        : images(images), s(s), pixel(pixel), end(end), norm_on_load(norm) {
        static_assert(!NormOnLoad::ANY || VECTOR == CHUNK, "batch norm is applied to whole chunks");
        int column = first_column + threadIdx.x % PER_ROW * VECTOR, tap = column / s.channels;
        is_column = column < s.columns;
        channel = column - tap * s.channels;
        dy = tap / KERNEL_ACROSS * DILATION_DOWN - s.padding[0];
        dx = tap % KERNEL_ACROSS * DILATION_ACROSS - s.padding[1];
    }

    __device__ void load(u32 tile) {
        int place = threadIdx.x % PER_ROW * VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int row = threadIdx.x / PER_ROW + i * STEP;
            if (DEPTH % STEP && row >= DEPTH) break;
            u32 line = s.across(pixel + row), image = s.down(line);
            int y = (line - image * s.down.divisor) * STRIDE_DOWN + dy;
            int x = (pixel + row - line * s.across.divisor) * STRIDE_ACROSS + dx;
            bool inside = is_column && pixel + row < end && (u32)y < (u32)s.height && (u32)x < (u32)s.width;
            int at = ((image * s.height + y) * s.width + x) * s.pitch + channel;
            u32 to = tile + outer<COLUMNS>(row, place / CHUNK) + place % CHUNK * sizeof(Element);
            copy<VECTOR>(to, inside ? images + at : images, inside);
            insides.add(i, inside);
        }
        pixel += DEPTH;
    }

    __device__ void skip() { insides.skip(); }

    __device__ void apply_norm(u32 tile) {
        if constexpr (NormOnLoad::ANY) {
            if (!is_column) return;
            NormOnLoad::Factors factors(norm_on_load, channel);
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (insides.of_oldest(i))
                    factors.apply(tile + outer<COLUMNS>(threadIdx.x / PER_ROW + i * STEP, threadIdx.x % PER_ROW));
        }
    }
};

