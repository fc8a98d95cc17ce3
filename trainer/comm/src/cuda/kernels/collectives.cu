// Collectives over windows of device memory that every rank of a host has opened. ../mod.rs explains the order of memory
// accesses, and why no slot is overwritten while it is read.
//
// source.rs prepends WORLD, MAX_SOURCES, THREADS, WIRE, the constants of layout.rs and protocol.rs, SOURCE_PARAMETERS (a pointer
// for each source tensor) and the platform (device.cuh), and appends one DEFINE_KERNEL.
//
// A thread handles the same packs in every phase and on every rank: `move_packs` assigns pack i to a block and thread. So a block
// waits only for the same block of the other ranks, never for a whole grid.

#if WIRE == WIRE_F32
#define VALUES_PER_PACK 4
#else
#define VALUES_PER_PACK 8
#endif

// The parameters of a launch: the same bytes as `LaunchParams` in layout.rs.
struct LaunchParams {
    u64 windows[MAX_WORLD];  // addresses of all ranks' windows, as this process sees them
    u64 faults;              // on the host: one word per peer
    u64 host_words;          // words on the host: the first is not zero once the job has ended, the others are those of `order`
    u64 limit_ns;            // longest wait
    u64 first;               // first element of this launch, of the bucket or of each rank's part
    u64 elements_per_rank;   // elements of one rank's part, if the caller's array has parts (reduce-scatter, all-gather)
    u64 slot_bytes;
    u32 count;           // elements of this launch, of the bucket or of each part
    u32 packs;           // packs of this launch, or of one part of it: `count` elements, the last pack padded with zeros
    u32 packs_per_rank;  // packs that one rank reduces (two-shot)
    u32 fingerprint;
    u32 rank;
    u32 root;
    u32 phases;
    float scale;
    u32 ends[MAX_SOURCES];  // elements up to the end of each source tensor
};

struct Shared {
    const float* source[MAX_SOURCES];
    u64 launch_number;  // number of this launch, from 1; equal on all ranks
    u64 slot_offset;    // position of this launch's slot in a window
    u32 failed;
};

DEVICE_INLINE float wire_to_float(u32 bits) {
#if WIRE == WIRE_F16
    return half_to_float(bits);
#else
    return bits_to_float(bits << 16);
#endif
}

// Rounds to nearest, ties to even. A NaN stays a NaN. The bits are those of the CPU's reductions (comm/src/kernels.rs).
DEVICE_INLINE u32 float_to_wire(float value) {
#if WIRE == WIRE_F16
    return float_to_half(value);
#else
    const u32 bits = float_to_bits(value);
    const u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded;
#endif
}

DEVICE_INLINE Pack encode(const float* values) {
    Pack pack;
#if WIRE == WIRE_F32
    for (u32 i = 0; i < 4; ++i) pack.word[i] = float_to_bits(values[i]);
#else
    for (u32 i = 0; i < 4; ++i) pack.word[i] = float_to_wire(values[2 * i]) | float_to_wire(values[2 * i + 1]) << 16;
#endif
    return pack;
}

DEVICE_INLINE void decode(const Pack& pack, float* values) {
#if WIRE == WIRE_F32
    for (u32 i = 0; i < 4; ++i) values[i] = bits_to_float(pack.word[i]);
#else
    for (u32 i = 0; i < 4; ++i) {
        values[2 * i] = wire_to_float(pack.word[i] & 0xffff);
        values[2 * i + 1] = wire_to_float(pack.word[i] >> 16);
    }
#endif
}

DEVICE_INLINE bool is_aligned(const void* at) { return ((u64)at & 15) == 0; }

DEVICE_INLINE Pack* slot_of(const LaunchParams& params, const Shared& shared, u32 rank) {
    return (Pack*)(params.windows[rank] + shared.slot_offset);
}

// Moves this thread's packs of [begin, end): `store(i, load(i))`. Up to UNROLL loads are in flight at once: if a thread waited for
// each load, latency would limit it and not the links.
template <u32 UNROLL, class Load, class Store>
DEVICE_INLINE void move_packs(u32 begin, u32 end, Load load, Store store) {
    const u64 stride = (u64)gridDim.x * THREADS;
    u64 i = (u64)begin + (u64)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (UNROLL - 1) * stride < end; i += UNROLL * stride) {
        Pack packs[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u) packs[u] = load((u32)(i + u * stride));
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u) store((u32)(i + u * stride), packs[u]);
    }
    for (; i < end; i += stride) store((u32)i, load((u32)i));
}

// Unroll factor of sums. A sum already has one load per rank in flight, so more ranks need less unrolling.
#define SUM_UNROLL (WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1)

// Reads the source tensors as one concatenated array. A thread must request ascending positions: `tensor` only moves forward.
struct SourceReader {
    const LaunchParams& params;
    const Shared& shared;
    u32 tensor;

    // Returns the pack of `VALUES_PER_PACK` elements from `at` on, scaled, in the wire's type; zeros from `end` on.
    DEVICE_INLINE Pack pack(u64 at, u64 end) {
        float values[VALUES_PER_PACK];
        while (tensor + 1 < MAX_SOURCES && at >= params.ends[tensor]) ++tensor;
        const u64 start = tensor == 0 ? 0 : params.ends[tensor - 1];
        const float* source = shared.source[tensor] + (at - start);
        if (at + VALUES_PER_PACK <= end && at + VALUES_PER_PACK <= params.ends[tensor] && is_aligned(source)) {
            for (u32 i = 0; i < VALUES_PER_PACK; i += 4) {
                const Pack four = load_pack((const Pack*)(source + i));
                for (u32 j = 0; j < 4; ++j) values[i + j] = bits_to_float(four.word[j]);
            }
        } else {
            for (u32 i = 0; i < VALUES_PER_PACK; ++i) values[i] = at + i < end ? load_element(at + i) : 0.0f;
        }
        // Multiplying by one would change some NaNs.
        if (params.scale != 1.0f)
            for (u32 i = 0; i < VALUES_PER_PACK; ++i) values[i] *= params.scale;
        return encode(values);
    }

    DEVICE_INLINE float load_element(u64 at) {
        u32 t = tensor;
        while (t + 1 < MAX_SOURCES && at >= params.ends[t]) ++t;
        return shared.source[t][at - (t == 0 ? 0 : params.ends[t - 1])];
    }
};

// Writes elements [at, at + VALUES_PER_PACK) of `out` from a pack, except those from `end` on.
DEVICE_INLINE void store_values(float* out, u64 at, u64 end, const Pack& pack) {
    float values[VALUES_PER_PACK];
    decode(pack, values);
    if (at + VALUES_PER_PACK <= end && is_aligned(out + at)) {
        for (u32 i = 0; i < VALUES_PER_PACK; i += 4) {
            Pack four;
            for (u32 j = 0; j < 4; ++j) four.word[j] = float_to_bits(values[i + j]);
            store_pack((Pack*)(out + at + i), four);
        }
    } else {
        for (u32 i = 0; i < VALUES_PER_PACK; ++i)
            if (at + i < end) out[at + i] = values[i];
    }
}

// Returns the sum of pack `i` over ranks, in rank order on every rank, rounded once to the wire's type.
DEVICE_INLINE Pack sum(const LaunchParams& params, const Shared& shared, u32 i) {
    Pack packs[WORLD];
    for (u32 rank = 0; rank < WORLD; ++rank) packs[rank] = load_pack(slot_of(params, shared, rank) + i);
    float total[VALUES_PER_PACK], values[VALUES_PER_PACK];
    decode(packs[0], total);
    for (u32 rank = 1; rank < WORLD; ++rank) {
        decode(packs[rank], values);
        for (u32 v = 0; v < VALUES_PER_PACK; ++v) total[v] += values[v];
    }
    return encode(total);
}

DEVICE_INLINE u64* flag_of(const LaunchParams& params, u32 owner, u32 area, u32 sender) {
    return (u64*)(params.windows[owner] + area) + (u64)blockIdx.x * MAX_WORLD + sender;
}

DEVICE_INLINE void report_fault(const LaunchParams& params, Shared& shared, u32 peer, u64 kind) {
    store_relaxed((u64*)params.faults + peer, kind | shared.launch_number << 8);
    store_relaxed((u64*)(params.windows[params.rank] + FAULTED_LAUNCH), shared.launch_number);
    raise(&shared.failed);
}

// One thread per peer: signals that this block has arrived, and waits until the peer's block has. Returns false after a fault.
DEVICE_INLINE bool device_barrier(const LaunchParams& params, Shared& shared, u32 area) {
    __syncthreads();
    if (threadIdx.x < WORLD) {
        const u32 peer = threadIdx.x;
        store_release(flag_of(params, peer, area, params.rank), shared.launch_number << FINGERPRINT_BITS | params.fingerprint);
        const u64* flag = flag_of(params, params.rank, area, peer);
        const u64 start = nanoseconds();
        for (u32 step = 1;; ++step) {
            const u64 seen = load_acquire(flag);
            if (seen >> FINGERPRINT_BITS >= shared.launch_number) {
                // A peer that is ahead has seen this rank's call and compared it.
                const bool same = (seen & ((1u << FINGERPRINT_BITS) - 1)) == params.fingerprint;
                if (seen >> FINGERPRINT_BITS == shared.launch_number && !same) report_fault(params, shared, peer, FAULT_MISMATCH);
                break;
            }
            if (step % 256 == 0) {
                if (load_relaxed((const u64*)params.host_words) != 0) {
                    report_fault(params, shared, peer, FAULT_ABORTED);
                    break;
                }
                // If this whole machine was stopped meanwhile, the flag may have arrived: check once more before the fault.
                if (nanoseconds() - start > params.limit_ns && load_acquire(flag) >> FINGERPRINT_BITS < shared.launch_number) {
                    report_fault(params, shared, peer, FAULT_TIMEOUT);
                    break;
                }
            }
        }
    }
    __syncthreads();
    return !is_raised(&shared.failed);
}

// Reads the launch's number from the rank's window, where `count_launch` counts. A number among the parameters would be the same in
// all runs of a CUDA graph.
//
// After a fault no later launch runs: queued launches must not each wait for their limit. But all blocks of the launch that has
// the fault still synchronize: the same blocks of the peers wait for them, and blocks do not all start at once.
DEVICE_INLINE bool begin_launch(const LaunchParams& params, Shared& shared) {
    if (threadIdx.x == 0) {
        const u64 own = params.windows[params.rank];
        const u64 launch_number = load_relaxed((const u64*)(own + LAUNCH_COUNT)) + 1;
        shared.launch_number = launch_number;
        shared.slot_offset = SLOTS_AT + launch_number % SLOTS * params.slot_bytes;
        shared.failed = 0;
        const u64 broken = load_relaxed((const u64*)(own + FAULTED_LAUNCH));
        if (broken != 0 && broken < launch_number) raise(&shared.failed);
    }
    __syncthreads();
    return !is_raised(&shared.failed);
}

// Counts the launch, also after a fault. The last block to end does this: all blocks have read the launch's number by then, and the
// rank's next launch starts after this one has ended.
DEVICE_INLINE void count_launch(const LaunchParams& params, const Shared& shared) {
    if (!(params.phases & PHASE_COUNT) || threadIdx.x != 0) return;
    const u64 own = params.windows[params.rank];
    u32* ended = (u32*)(own + ENDED_BLOCKS);
    if (atomic_add_relaxed(ended, 1) + 1 != gridDim.x) return;
    store_relaxed((u64*)ended, 0);
    store_relaxed((u64*)(own + LAUNCH_COUNT), shared.launch_number);
}

// Fills packs [begin, end) of this rank's slot from elements `first` to `end_of_source` of the tensors. Pack `begin` starts with
// element `first`.
DEVICE_INLINE void pack_sources(
    const LaunchParams& params, const Shared& shared, SourceReader& reader, u32 begin, u32 end, u64 first, u64 end_of_source) {
    Pack* own = slot_of(params, shared, params.rank);
    move_packs<4>(
        begin, end, [&](u32 i) { return reader.pack(first + (u64)(i - begin) * VALUES_PER_PACK, end_of_source); },
        [&](u32 i, Pack pack) { store_pack(own + i, pack); });
}

DEVICE_INLINE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }

// One-shot all-reduce: every rank sums the whole slots of all ranks. It has one barrier, so the lowest latency.
DEVICE_INLINE void one_shot_body(float* out, const LaunchParams& params, Shared& shared) {
    if (!begin_launch(params, shared)) return;
    const u64 end = params.first + params.count;
    if (params.phases & PHASE_PACK) {
        SourceReader reader{params, shared, 0};
        pack_sources(params, shared, reader, 0, params.packs, params.first, end);
    }
    if (params.phases & PHASE_BARRIER_ENTER && !device_barrier(params, shared, FILLED)) return;
    if (params.phases & PHASE_REDUCE)
        move_packs<SUM_UNROLL>(
            0, params.packs, [&](u32 i) { return sum(params, shared, i); },
            [&](u32 i, Pack pack) { store_values(out, params.first + (u64)i * VALUES_PER_PACK, end, pack); });
}

// Two-shot all-reduce: each rank sums one part, and then reads all parts. It has two barriers, but the least traffic.
DEVICE_INLINE void two_shot_body(float* out, const LaunchParams& params, Shared& shared) {
    if (!begin_launch(params, shared)) return;
    const u64 end = params.first + params.count;
    if (params.phases & PHASE_PACK) {
        SourceReader reader{params, shared, 0};
        for (u32 p = 0; p < WORLD; ++p) {
            const u32 from = min_u32(p * params.packs_per_rank, params.packs);
            const u32 to = min_u32((p + 1) * params.packs_per_rank, params.packs);
            pack_sources(params, shared, reader, from, to, params.first + (u64)from * VALUES_PER_PACK, end);
        }
    }
    if (params.phases & PHASE_BARRIER_ENTER && !device_barrier(params, shared, FILLED)) return;
    if (params.phases & PHASE_REDUCE) {
        // No other rank reads or writes this part of this rank's slot before the ranks synchronize again.
        Pack* own = slot_of(params, shared, params.rank);
        move_packs<SUM_UNROLL>(
            min_u32(params.rank * params.packs_per_rank, params.packs),
            min_u32((params.rank + 1) * params.packs_per_rank, params.packs),
            [&](u32 i) { return sum(params, shared, i); }, [&](u32 i, Pack pack) { store_pack(own + i, pack); });
    }
    if (params.phases & PHASE_BARRIER_EXIT && !device_barrier(params, shared, REDUCED)) return;
    if (params.phases & PHASE_GATHER) {
        for (u32 step = 0; step < WORLD; ++step) {
            // Each rank starts with a different owner, so that not all ranks read from the same GPU at once.
            const u32 p = (params.rank + step) % WORLD;
            const Pack* slot = slot_of(params, shared, p);
            move_packs<4>(
                min_u32(p * params.packs_per_rank, params.packs), min_u32((p + 1) * params.packs_per_rank, params.packs),
                [&](u32 i) { return load_pack(slot + i); },
                [&](u32 i, Pack pack) { store_values(out, params.first + (u64)i * VALUES_PER_PACK, end, pack); });
        }
    }
}

// Every rank gets its part of the sum. A part is `elements_per_rank` elements of the source, and `packs` packs of the slot.
DEVICE_INLINE void reduce_scatter_body(float* out, const LaunchParams& params, Shared& shared) {
    if (!begin_launch(params, shared)) return;
    if (params.phases & PHASE_PACK) {
        SourceReader reader{params, shared, 0};
        for (u32 p = 0; p < WORLD; ++p) {
            const u64 start = p * params.elements_per_rank + params.first;
            pack_sources(params, shared, reader, p * params.packs, (p + 1) * params.packs, start, start + params.count);
        }
    }
    if (params.phases & PHASE_BARRIER_ENTER && !device_barrier(params, shared, FILLED)) return;
    if (params.phases & PHASE_REDUCE)
        move_packs<SUM_UNROLL>(
            0, params.packs, [&](u32 i) { return sum(params, shared, params.rank * params.packs + i); },
            [&](u32 i, Pack pack) {
                store_values(out, params.first + (u64)i * VALUES_PER_PACK, params.first + params.count, pack);
            });
}

// Every rank gets all ranks' `elements_per_rank` elements.
DEVICE_INLINE void all_gather_body(float* out, const LaunchParams& params, Shared& shared) {
    if (!begin_launch(params, shared)) return;
    if (params.phases & PHASE_PACK) {
        SourceReader reader{params, shared, 0};
        pack_sources(params, shared, reader, 0, params.packs, params.first, params.first + params.count);
    }
    if (params.phases & PHASE_BARRIER_ENTER && !device_barrier(params, shared, FILLED)) return;
    if (params.phases & PHASE_GATHER) {
        for (u32 step = 0; step < WORLD; ++step) {
            const u32 p = (params.rank + step) % WORLD;
            const Pack* slot = slot_of(params, shared, p);
            const u64 start = p * params.elements_per_rank + params.first;
            move_packs<4>(
                0, params.packs, [&](u32 i) { return load_pack(slot + i); },
                [&](u32 i, Pack pack) { store_values(out, start + (u64)i * VALUES_PER_PACK, start + params.count, pack); });
        }
    }
}

// Every rank gets the root's elements. The NCCL route launches this kernel with this rank as root and without a barrier. Then it
// only copies: first the tensors to this rank's slot, and after NCCL's sum the slot to the output.
DEVICE_INLINE void broadcast_body(float* out, const LaunchParams& params, Shared& shared) {
    if (!begin_launch(params, shared)) return;
    const u64 end = params.first + params.count;
    if (params.phases & PHASE_PACK && params.rank == params.root) {
        SourceReader reader{params, shared, 0};
        pack_sources(params, shared, reader, 0, params.packs, params.first, end);
    }
    if (params.phases & PHASE_BARRIER_ENTER && !device_barrier(params, shared, FILLED)) return;
    if (params.phases & PHASE_GATHER) {
        const Pack* slot = slot_of(params, shared, params.root);
        move_packs<4>(
            0, params.packs, [&](u32 i) { return load_pack(slot + i); },
            [&](u32 i, Pack pack) { store_values(out, params.first + (u64)i * VALUES_PER_PACK, end, pack); });
    }
}

// Tests stores to, and loads from, every peer, since the driver's report of peer access is not reliable. First every rank writes
// to all windows. After a barrier of the host processes, every rank reads all words that were written.
DEVICE_INLINE void probe_body(float* out, const LaunchParams& params, Shared& shared) {
    if (blockIdx.x != 0 || threadIdx.x >= WORLD) return;
    const u32 peer = threadIdx.x;
    u64* words = (u64*)(params.windows[peer] + PROBE);
    if (params.phases & PHASE_PACK) store_release(words + params.rank, PROBE_TOKEN + params.rank * MAX_WORLD + peer);
    if (params.phases & PHASE_REDUCE) {
        for (u32 writer = 0; writer < WORLD; ++writer)
            if (load_acquire(words + writer) != PROBE_TOKEN + writer * MAX_WORLD + peer)
                store_relaxed((u64*)params.faults + peer, FAULT_UNREACHABLE);
    }
}

// Orders this stream and NCCL's, neither of which can wait for an event of the other (../nccl.rs). With PHASE_PACK: signals that
// all launches before this one are done. With PHASE_GATHER: waits until NCCL has summed the slot.
//
// After an abort NCCL's stream must run to its end. The host therefore sets WORD_PACKED above all launch numbers, but a launch that
// runs at that time may lower the word to its own number again. So every later launch signals too, even after a fault. Without an
// abort no launch signals after a fault: the slot is not packed, and the other ranks may still use its sum.
DEVICE_INLINE void order_body(float* out, const LaunchParams& params, Shared& shared) {
    const bool runs = begin_launch(params, shared);
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    u64* words = (u64*)params.host_words;
    if (params.phases & PHASE_PACK && (runs || load_relaxed(words) != 0)) store_release(words + WORD_PACKED, shared.launch_number);
    if (!runs) return;
    if (params.phases & PHASE_GATHER) {
        const u64 start = nanoseconds();
        for (u32 step = 1; load_acquire(words + WORD_SUMMED) < shared.launch_number; ++step) {
            if (step % 256 != 0) continue;
            if (load_relaxed(words) != 0) {
                report_fault(params, shared, params.rank, FAULT_ABORTED);
                break;
            }
            if (nanoseconds() - start > params.limit_ns && load_acquire(words + WORD_SUMMED) < shared.launch_number) {
                report_fault(params, shared, params.rank, FAULT_STALLED);
                break;
            }
        }
    }
}
