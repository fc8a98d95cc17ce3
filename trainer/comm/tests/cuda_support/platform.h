// What device.cuh defines, for threads of a CPU: a block is a set of threads with a barrier. Accesses that are ordered on the
// device are atomic here, all others are plain, so that ThreadSanitizer sees a race wherever the order does not hold.
#define DEVICE_INLINE inline

DEVICE_INLINE void store_release(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
DEVICE_INLINE u64 load_acquire(const u64* at) {
    const u64 value = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    std::this_thread::yield();
    return value;
}
DEVICE_INLINE u64 load_relaxed(const u64* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
DEVICE_INLINE void store_relaxed(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
DEVICE_INLINE u32 atomic_add_relaxed(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
DEVICE_INLINE void raise(u32* flag) { __atomic_store_n(flag, 1u, __ATOMIC_RELAXED); }
DEVICE_INLINE bool is_raised(const u32* flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0; }
DEVICE_INLINE u64 nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

DEVICE_INLINE u32 float_to_bits(float value) { u32 bits; std::memcpy(&bits, &value, 4); return bits; }
DEVICE_INLINE float bits_to_float(u32 bits) { float value; std::memcpy(&value, &bits, 4); return value; }
DEVICE_INLINE float half_to_float(u32 bits) {
    _Float16 half;
    unsigned short b = bits;
    std::memcpy(&half, &b, 2);
    return (float)half;
}
DEVICE_INLINE u32 float_to_half(float value) {
    const _Float16 half = (_Float16)value;
    unsigned short b;
    std::memcpy(&b, &half, 2);
    return b;
}

DEVICE_INLINE Pack load_pack(const Pack* at) {
    if (((u64)at & 15) != 0) std::abort();  // as the device would
    return *at;
}
DEVICE_INLINE void store_pack(Pack* at, Pack pack) {
    if (((u64)at & 15) != 0) std::abort();
    *at = pack;
}

#define blockIdx (emulator::here.block)
#define threadIdx (emulator::here.thread)
#define gridDim (emulator::here.grid)
#define __syncthreads() pthread_barrier_wait(emulator::here.barrier)

// Parameters come as cuLaunchKernel takes them: an array of pointers to them.
#define DEFINE_KERNEL(name)                                                                             \
    static void name##_entry(void** parameters, void* memory) {                                         \
        Shared& shared = *(Shared*)memory;                                                              \
        float* out = *(float**)parameters[0];                                                           \
        if (threadIdx.x == 0)                                                                           \
            for (u32 i = 0; i < MAX_SOURCES; ++i) shared.source[i] = *(const float**)parameters[1 + i]; \
        const LaunchParams& params = *(const LaunchParams*)parameters[1 + MAX_SOURCES];                 \
        name##_body(out, params, shared);                                                               \
        count_launch(params, shared);                                                                   \
    }                                                                                                   \
    static emulator::Kernel name##_kernel{name##_entry, sizeof(Shared), THREADS, MAX_SOURCES};
