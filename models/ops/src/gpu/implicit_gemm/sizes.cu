// Types that all products of a kernel share.

typedef unsigned int u32;
typedef unsigned short u16;

// Values of PASS, INPUT_ACTIVATION and ACTIVATION, in the order of `Pass` and `Activation` in source.rs.
#define FORWARD 0
#define DATA_GRADIENT 1
#define WEIGHT_GRADIENT 2
#define ACTIVATION_RELU 1
#define ACTIVATION_RELU6 2
#define ACTIVATION_SILU 3

/// Division by an argument of the kernel, computed as a multiplication by the reciprocal.
struct Division {
    u32 divisor, factor, shift;
    __device__ u32 operator()(u32 n) const { return divisor == 1 ? n : __umulhi(n, factor) >> shift; }
};

/// Sizes in elements; channels and columns (in WEIGHT_GRADIENT also rows) are those of one group. With DIAGONAL, several narrow
/// groups are one group, and the last one may have fewer: `sizes_of` in conv.cu.
struct Sizes {
    int rows, columns, channels, groups;
    /// Channels of all groups: of the images of windows, and of the other side.
    int all_channels, other_channels;
    /// Images that windows are taken from; elements from one row of channels to the next.
    int height, width, pitch;
    /// Images of the other side: the result, or in WEIGHT_GRADIENT the gradient of the output.
    int other_height, other_width, other_pitch;
    /// Output pixels in WEIGHT_GRADIENT, input pixels in DATA_GRADIENT.
    int pixels;
    int padding[2];
    /// Width and height of the grid of pixels that the rows (in WEIGHT_GRADIENT: the depth) enumerate.
    Division across, down;
    /// Output pixels per piece in WEIGHT_GRADIENT.
    int piece;
    /// Tiles of rows and of columns.
    int tiles[2];
    /// Number of blocks whose parts one block merges, see `merge_parts`.
    int parts_per_merge;
    /// Blocks of the product.
    u32 blocks;
    /// With STATISTICS: the epsilon that is added to the variance, and the weight of this batch in the running statistics.
    float epsilon, momentum;
};

/// Sizes of a kernel's products.
template <int COUNT> struct AllSizes {
    Sizes of[COUNT];
};
