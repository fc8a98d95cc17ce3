// The machine's primitives for the collectives. The tests replace this file with one that defines them for C++ threads.
#define DEVICE_INLINE __device__ __forceinline__

// A thread that acquires the word sees everything that this thread, and the threads of its last __syncthreads, wrote before.
DEVICE_INLINE void store_release(u64* at, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

DEVICE_INLINE u64 load_acquire(const u64* at) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

// For words that order no other access. Each call reads memory again and never a stale value from a cache, so a word can be polled.
DEVICE_INLINE u64 load_relaxed(const u64* at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

DEVICE_INLINE void store_relaxed(u64* at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Relaxed atomic add. Returns the old value.
DEVICE_INLINE u32 atomic_add_relaxed(u32* at, u32 value) { return atomicAdd(at, value); }

// A word in the block's shared memory.
DEVICE_INLINE void raise(volatile u32* flag) { *flag = 1; }
DEVICE_INLINE bool is_raised(const volatile u32* flag) { return *flag != 0; }

DEVICE_INLINE u64 nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

DEVICE_INLINE float half_to_float(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

DEVICE_INLINE u32 float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE_INLINE u32 float_to_bits(float value) { return __float_as_uint(value); }
DEVICE_INLINE float bits_to_float(u32 bits) { return __uint_as_float(bits); }

// 16 bytes in one access; `at` is aligned to 16 bytes. In program order, like the words above, and never from the non-coherent
// cache.
DEVICE_INLINE Pack load_pack(const Pack* at) {
    Pack pack;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(at)
                 : "memory");
    return pack;
}

DEVICE_INLINE void store_pack(Pack* at, Pack pack) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(pack.word[0]), "r"(pack.word[1]),
                 "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
}

#define DEFINE_KERNEL(name)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                               \
        name(float* out, SOURCE_PARAMETERS, const __grid_constant__ LaunchParams params) { \
        __shared__ Shared shared;                                                          \
        if (threadIdx.x == 0) {                                                            \
            COPY_SOURCE_POINTERS                                                           \
        }                                                                                  \
        name##_body(out, params, shared);                                                  \
        count_launch(params, shared);                                                      \
    }
