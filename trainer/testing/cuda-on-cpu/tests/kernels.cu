// NVRTC 13.2 compiles this file to kernels.ptx for sm_80. It uses what most kernels use: loops, shared memory, barriers, shuffles,
// dynamic shared memory, atomics, 16-bit floats and tensor cores.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;

extern "C" __global__ void __launch_bounds__(32) product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
    __shared__ __nv_bfloat16 copy[256];
    for (int i = threadIdx.x; i < 256; i += 32) copy[i] = a[i];
    __syncthreads();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.f);
    wmma::load_matrix_sync(left, copy, 16);
    wmma::load_matrix_sync(right, b, 16);
    wmma::mma_sync(sum, left, right, sum);
    wmma::store_matrix_sync(c, sum, 16, wmma::mem_row_major);
}

extern "C" __global__ void sum(const float* x, float* y, int n) {
    extern __shared__ float warps[];
    float v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        v += expf(x[i]) * __half2float(__float2half(x[i]));
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(~0u, v, o);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (int i = 0; i < blockDim.x / 32; i++) total += warps[i];
        atomicAdd(y, total);
    }
}

// C (16x8, row-major) = A (16x16, row-major) B (16x8, column-major), with ldmatrix and mma
extern "C" __global__ void __launch_bounds__(32) tile(const __half* a, const __half* b, float* c) {
    __shared__ __align__(16) __half sa[256], sb[128];
    unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) sa[i] = a[i];
    for (unsigned i = lane; i < 128; i += 32) sb[i] = b[i];
    __syncthreads();
    unsigned ra[4], rb[2];
    unsigned pa = __cvta_generic_to_shared(&sa[(lane % 16) * 16 + lane / 16 * 8]);
    unsigned pb = __cvta_generic_to_shared(&sb[(lane % 8) * 16 + lane / 8 % 2 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(pb));
    float d[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
