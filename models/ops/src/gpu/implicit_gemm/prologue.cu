// Tiles in shared memory, and batch norm applied to their elements between the copy from global memory and the product.

#if BF16
typedef u16 Element;
#else
typedef float Element;
#endif

/// Elements of a chunk of 16 bytes, the unit of shared memory's layout.
constexpr int CHUNK = 16 / sizeof(Element);
/// Depth of a tile: four chunks.
constexpr int DEPTH = 4 * CHUNK;
/// Each warp computes WARP_ROWS x 32 elements, as products of 16 x 8 elements.
constexpr int WARP_COLUMNS = 32;
constexpr int THREADS = ROWS / WARP_ROWS * (COLUMNS / WARP_COLUMNS) * 32;
constexpr int DOWN = WARP_ROWS / 16;
constexpr int ACROSS = WARP_COLUMNS / 8;
constexpr int TAPS = KERNEL_DOWN * KERNEL_ACROSS;
/// Bytes of a pair of tiles: the left tile, the right one and, with NORM_GRADIENT, one like the left tile with the batch norm's
/// input.
constexpr int LEFT = ROWS * 64, BOTH = LEFT + COLUMNS * 64, STAGE_BYTES = BOTH + (NORM_GRADIENT ? LEFT : 0);

/// Which of a thread's chunks are inside the images, for the tiles that are in shared memory. The others must stay zero. Only an
/// operand with a batch norm needs this.
template <int LOADS, class NormOnLoad> struct Inside {
    static_assert(!NormOnLoad::ANY || LOADS * STAGES <= 32, "a bit for each chunk");
    u32 bits = 0;
    /// Makes room for a tile.
    __device__ void skip() { bits = LOADS < 32 ? bits << LOADS % 32 : 0; }
    __device__ void add(int chunk, bool inside) { bits |= (u32)inside << chunk % 32; }
    /// Returns whether a chunk of the oldest tile is inside.
    __device__ bool of_oldest(int chunk) const { return bits >> ((STAGES - 2) * LOADS + chunk) % 32 & 1; }
};

__device__ __forceinline__ void read_chunk(float (&to)[CHUNK], u32 at) {
    u32 words[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BF16
        to[i * 2] = __uint_as_float(words[i] << 16), to[i * 2 + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
        to[i] = __uint_as_float(words[i]);
#endif
    }
}

__device__ __forceinline__ void write_chunk(u32 at, const float (&from)[CHUNK]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BF16
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(from[i * 2 + 1]), "f"(from[i * 2]));
#else
        words[i] = __float_as_uint(from[i]);
#endif
    }
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void load_factors(float (&to)[CHUNK], const float *from) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        float4 four = __ldg((const float4 *)(from + i));
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

template <int COUNT> __device__ __forceinline__ void copy(u32 to, const Element *from, bool inside);

template <class One, class Other> constexpr bool same = false;
template <class One> constexpr bool same<One, One> = true;

/// Leaves an operand as it is.
struct NoNorm {
    static constexpr bool ANY = false;
    __device__ void copy_other(u32, int, bool) {}
    struct Factors {
        __device__ Factors(const NoNorm &, int) {}
        __device__ void apply(u32) const {}
    };
};

#if NORMALISE
/// Applies a batch norm and its activation to images: one factor and one summand per channel.
struct Normalisation {
    static constexpr bool ANY = true;
    const float *scale, *shift;
    __device__ void copy_other(u32, int, bool) {}

    /// The factors of a chunk's channels.
    struct Factors {
        float scale[CHUNK], shift[CHUNK];

        __device__ Factors(const Normalisation &of, int channel) {
            load_factors(scale, of.scale + channel), load_factors(shift, of.shift + channel);
        }

        __device__ void apply(u32 at) const {
            float values[CHUNK];
            read_chunk(values, at);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                float z = values[i] * scale[i] + shift[i];
#if INPUT_ACTIVATION == ACTIVATION_RELU
                // NaN stays NaN.
                z = z < 0.0f ? 0.0f : z;
#elif INPUT_ACTIVATION == ACTIVATION_RELU6
                z = z < 0.0f ? 0.0f : z > 6.0f ? 6.0f : z;
#elif INPUT_ACTIVATION == ACTIVATION_SILU
                z = z / (1.0f + expf(-z));
#endif
                values[i] = z;
            }
            write_chunk(at, values);
        }
    };
};
#endif

#if NORM_GRADIENT
/// Computes the gradient of a convolution's output from the gradient of the batch norm's output (before the activation) and from
/// the batch norm's input, the convolution's output: three factors per channel.
struct NormGradient {
    static constexpr bool ANY = true;
    /// The batch norm's input, in the layout of the gradient.
    const Element *input;
    /// [3][all].
    const float *factors;
    int all;
    __device__ void copy_other(u32 to, int at, bool inside) { copy<CHUNK>(to + BOTH, input + at, inside); }

    /// The factors of a chunk's channels.
    struct Factors {
        float gradient[CHUNK], input[CHUNK], constant[CHUNK];

        __device__ Factors(const NormGradient &of, int channel) {
            const float *from = of.factors + channel;
            load_factors(gradient, from), load_factors(input, from + of.all), load_factors(constant, from + 2 * of.all);
        }

        __device__ void apply(u32 at) const {
            float values[CHUNK], inputs[CHUNK];
            read_chunk(values, at), read_chunk(inputs, at + BOTH);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) values[i] = values[i] * gradient[i] + (inputs[i] * input[i] + constant[i]);
            write_chunk(at, values);
        }
    };
};
#endif

// The batch norm of each operand (operands.cu).
#if PASS == FORWARD && NORMALISE
typedef Normalisation WindowsNorm;
#elif PASS == DATA_GRADIENT && NORM_GRADIENT
typedef NormGradient WindowsNorm;
#else
typedef NoNorm WindowsNorm;
#endif
#if PASS == WEIGHT_GRADIENT && NORMALISE
typedef Normalisation TransposedWindowsNorm;
#else
typedef NoNorm TransposedWindowsNorm;
#endif
#if PASS == WEIGHT_GRADIENT && NORM_GRADIENT
typedef NormGradient OutputPixelsNorm;
#else
typedef NoNorm OutputPixelsNorm;
#endif
