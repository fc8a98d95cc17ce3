// Sums over the rows of a tile, and the results of a batch norm before or after a convolution.

#if MOMENTS || NORM
/// Rounds to the type of the result.
__device__ __forceinline__ float as_written(float value) {
#if BF16
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value), "f"(0.0f));
    return __uint_as_float(pair & 0xffff0000u);
#else
    return value;
#endif
}

/// Adds up a column's values of all threads, in a fixed order, and returns the sums of this thread's columns. `memory` has
/// COLUMNS floats for each row of warps. All threads must call the function.
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
            for (int warps = 0; warps < ROWS / WARP_ROWS; warps++)
                sum += memory[warps * COLUMNS + column + j * 8 + lane % 4 * 2 + k];
            values[j][k] = sum;
        }
    __syncthreads();
}

/// Writes the values of the tile's columns, of which `left` are inside, after `column_sums`.
__device__ __forceinline__ void write_columns(const float (&values)[ACROSS][2], int row, int column, float *to, int left) {
    int lane = threadIdx.x % 32;
    if (row > 0 || lane > 3) return;
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int c = column + j * 8 + lane * 2 + k;
            if (c < left) to[c] = values[j][k];
        }
}
#endif

#if MOMENTS
/// Writes the mean of each column of the tile and the sum of squares around the mean. The values are first rounded to the
/// result's type, so the moments are equal to those that a pass over the result would compute. `to` is [2][columns of all
/// groups].
__device__ void write_moments(const float (&sums)[DOWN][ACROSS][4], int row, int column, int inside, float *to, int left, int all,
                              float *memory) {
    int lane = threadIdx.x % 32;
    auto value = [&](int i, int j, int half, int k) { return as_written(sums[i][j][half * 2 + k]); };
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
    write_columns(mean, row, column, to, left);
    write_columns(squares, row, column, to + all, left);
}

/// Merges the moments of `count` slots [2][columns of all groups]. Each slot has `size` rows; the last one of all `rows` may have
/// fewer. Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
__device__ void merge_moments(const float *slots, int count, int size, int rows, float *to, int left, int all) {
    int c = threadIdx.x;
    if (c >= COLUMNS || c >= left) return;
    slots += c, to += c;
    // Add up differences from the first mean: the result stays accurate if the mean is far from zero.
    float pivot = __ldcg(slots), shift = 0.0f, squares = 0.0f;
    auto weight = [&](int i) { return (float)min(size, rows - i * size); };
#pragma unroll 4
    for (int i = 1; i < count; i++) shift += weight(i) * (__ldcg(slots + (size_t)i * 2 * all) - pivot);
    float mean = pivot + shift / rows;
#pragma unroll 4
    for (int i = 0; i < count; i++) {
        float difference = __ldcg(slots + (size_t)i * 2 * all) - mean;
        squares += __ldcg(slots + (size_t)i * 2 * all + all) + weight(i) * difference * difference;
    }
    to[0] = mean, to[all] = squares;
}
#endif

#if STATISTICS
/// The batch norm after a convolution.
struct Statistics {
    /// [4][columns of all groups]: mean, reciprocal of the standard deviation, and the factor and the summand that normalise.
    float *of_batch;
    const float *weight, *bias;
    float *running_mean, *running_variance;
};

/// Writes the statistics of a batch norm from the moments [2][columns of all groups], and updates the running statistics, as
/// `write_deferred_statistics` in norm_moments.rs. Each thread has written the moments of its column itself.
__device__ void write_statistics(const float *moments, const Statistics &to, int at, int left, int all, const Sizes &s) {
    if (threadIdx.x >= COLUMNS || threadIdx.x >= left) return;
    int c = at + threadIdx.x;
    float mean = moments[c], squares = moments[all + c], count = s.rows;
    float inv_std = 1.0f / sqrtf(squares / count + s.epsilon), scale = inv_std * to.weight[c];
    to.of_batch[c] = mean, to.of_batch[all + c] = inv_std;
    to.of_batch[2 * all + c] = scale, to.of_batch[3 * all + c] = to.bias[c] - mean * scale;
    // A single row has no unbiased variance: 0.
    float variance = squares / fmaxf(count - 1.0f, 1.0f);
    to.running_mean[c] = (1.0f - s.momentum) * to.running_mean[c] + s.momentum * mean;
    to.running_variance[c] = (1.0f - s.momentum) * to.running_variance[c] + s.momentum * variance;
}
#else
struct Statistics {};
#endif

#if ADD || NORM
/// Loads the elements of two adjacent columns of images. Only the first `left` of them are inside; the others are zero.
__device__ __forceinline__ float2 load_pair(const Element *from, int left) {
    float2 pair = make_float2(0.0f, 0.0f);
    if constexpr (RESULT_VECTOR >= 2) {
        if (left <= 0) return pair;
#if BF16
        u32 both = *(const u32 *)from;
        return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
#else
        return *(const float2 *)from;
#endif
    }
#if BF16
    if (left > 0) pair.x = __uint_as_float((u32)from[0] << 16);
    if (left > 1) pair.y = __uint_as_float((u32)from[1] << 16);
#else
    if (left > 0) pair.x = from[0];
    if (left > 1) pair.y = from[1];
#endif
    return pair;
}

/// The batch norm whose output is the convolution's input.
struct Norm {
    /// The batch norm's input and output, in the layout of the result. The output is read only with FROM_OUTPUT.
    const Element *input, *output;
    /// One value per column.
    const float *mean, *inv_std, *weight, *bias;
};
#else
struct Norm {};
#endif

#if ADD
/// Adds images, from the tile's first column on.
__device__ void add_images(float (&sums)[DOWN][ACROSS][4], int row, int column, const Element *images, const Target &target,
                           int left) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = target(row + i * 16 + (lane >> 2) + half * 8);
            if (at < 0) continue;
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                int c = column + j * 8 + (lane & 3) * 2;
                float2 pair = load_pair(images + at + c, left - c);
                sums[i][j][half * 2] += pair.x, sums[i][j][half * 2 + 1] += pair.y;
            }
        }
}
#endif

#if NORM
/// Returns the gradient of an activation's input `z`, as `activation_grad` in activation.rs. For ReLU, `z` may be the output.
__device__ __forceinline__ float activation_gradient(float z, float gradient) {
#if ACTIVATION == ACTIVATION_RELU
    return z > 0.0f ? gradient : 0.0f;
#elif ACTIVATION == ACTIVATION_RELU6
    return z > 0.0f && z < 6.0f ? gradient : 0.0f;
#elif ACTIVATION == ACTIVATION_SILU
    float s = 1.0f / (1.0f + expf(-z));
    return gradient * s * (1.0f + z * (1.0f - s));
#else
    return gradient;
#endif
}

/// Writes the sums over the tile's rows of `g` and of `g x̂`, where `g` is the gradient of the activation's input and x̂ the
/// normalised input of the batch norm. The batch norm's backward pass then needs no pass over the result to compute these sums.
/// With MASKED, `g` replaces the tile. `to` is [2][columns of all groups].
__device__ void gradient_sums(float (&sums)[DOWN][ACROSS][4], int row, int column, const Norm &norm, const Target &target,
                              float *to, int first, int left, int all, float *memory) {
    int lane = threadIdx.x % 32, places[DOWN * 2];
#pragma unroll
    for (int i = 0; i < DOWN * 2; i++) places[i] = target(row + i / 2 * 16 + (lane >> 2) + i % 2 * 8);
    float sum[ACROSS][2] = {}, product[ACROSS][2] = {};
#pragma unroll
    for (int j = 0; j < ACROSS; j++) {
        int c = column + j * 8 + (lane & 3) * 2;
        float mean[2] = {}, inv_std[2] = {}, weight[2] = {}, bias[2] = {};
        for (int k = 0; k < 2; k++)
            if (c + k < left) {
                int at = first + c + k;
                mean[k] = norm.mean[at], inv_std[k] = norm.inv_std[at], weight[k] = norm.weight[at], bias[k] = norm.bias[at];
            }
#pragma unroll
        for (int i = 0; i < DOWN * 2; i++) {
            if (places[i] < 0) continue;
            float2 input = load_pair(norm.input + places[i] + first + c, left - c);
#if FROM_OUTPUT
            float2 output = load_pair(norm.output + places[i] + first + c, left - c);
#endif
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float normalised = ((k ? input.y : input.x) - mean[k]) * inv_std[k];
#if FROM_OUTPUT
                float z = k ? output.y : output.x;
#else
                float z = normalised * weight[k] + bias[k];
#endif
                float &element = sums[i / 2][j][i % 2 * 2 + k];
#if MASKED
                float g = element = as_written(activation_gradient(z, element));
#else
                float g = activation_gradient(z, as_written(element));
#endif
                sum[j][k] += g, product[j][k] += g * normalised;
            }
        }
    }
    column_sums(sum, row, column, memory);
    column_sums(product, row, column, memory);
    write_columns(sum, row, column, to + first, left);
    write_columns(product, row, column, to + all + first, left);
}

/// Number of sums for each column.
constexpr int SUMS = RESIDUAL_NORM ? 3 : 2;

/// Adds up `count` slots [SUMS][columns of all groups].
__device__ void merge_sums(const float *slots, int count, float *to, int left, int all) {
    int c = threadIdx.x;
    if (c >= COLUMNS || c >= left) return;
    float sums[SUMS] = {};
#pragma unroll 4
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int k = 0; k < SUMS; k++) sums[k] += __ldcg(slots + ((size_t)i * SUMS + k) * all + c);
#pragma unroll
    for (int k = 0; k < SUMS; k++) to[k * all + c] = sums[k];
}
#endif

#if RESIDUAL_NORM
/// The batch norm whose output was added to that of the batch norm before the convolution: the shortcut of a residual block.
struct ResidualNorm {
    /// The batch norm's input, in the layout of the result.
    const Element *input;
    /// One value per column.
    const float *mean, *inv_std, *weight;
};

/// Writes the sums of `g x̂` over the tile's rows, where x̂ is the normalised input of the residual's batch norm. The tile is `g`,
/// which is the gradient of both terms. A separate loop after `gradient_sums` takes fewer registers than one loop.
__device__ void residual_products(const float (&sums)[DOWN][ACROSS][4], int row, int column, const ResidualNorm &norm,
                                  const Target &target, float *to, int first, int left, float *memory) {
    int lane = threadIdx.x % 32;
    float product[ACROSS][2] = {};
#pragma unroll
    for (int i = 0; i < DOWN * 2; i++) {
        int at = target(row + i / 2 * 16 + (lane >> 2) + i % 2 * 8);
        if (at < 0) continue;
#pragma unroll
        for (int j = 0; j < ACROSS; j++) {
            int c = column + j * 8 + (lane & 3) * 2;
            float2 input = load_pair(norm.input + at + first + c, left - c);
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (c + k < left)
                    product[j][k] += sums[i / 2][j][i % 2 * 2 + k] *
                                     (((k ? input.y : input.x) - norm.mean[first + c + k]) * norm.inv_std[first + c + k]);
        }
    }
    column_sums(product, row, column, memory);
    write_columns(product, row, column, to + first, left);
}
#else
struct ResidualNorm {};
#endif

#if MASKED
/// Results that the backward pass of a batch norm before a convolution computes from sums.
struct NormGradientResult {
    /// The gradients of weight and bias.
    float *weight, *bias;
    /// [3][columns of all groups]: the factors of `NormGradient` for the convolution before the batch norm.
    float *factors;
};

/// Writes the results of a `Norm` or `ResidualNorm` from sums over `count` rows, [columns of all groups]. Each thread has written
/// the sums of its column itself.
template <class OneNorm>
__device__ void write_norm_gradient(const float *sums, const float *products, const OneNorm &norm, const NormGradientResult &to,
                                    int at, int left, int all, int count) {
    if (threadIdx.x >= COLUMNS || threadIdx.x >= left) return;
    int c = at + threadIdx.x;
    float sum = sums[c], product = products[c], scale = norm.inv_std[c] * norm.weight[c];
    to.bias[c] = sum, to.weight[c] = product;
    // The gradient of the input is scale (g - sum / count - x̂ product / count).
    float of_input = -scale * norm.inv_std[c] * (product / count);
    to.factors[c] = scale, to.factors[all + c] = of_input;
    to.factors[2 * all + c] = -scale * (sum / count) - of_input * norm.mean[c];
}
#else
struct NormGradientResult {};
#endif
