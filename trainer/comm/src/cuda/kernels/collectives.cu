// Collectives over windows of device memory that every rank of a host has opened. The order of memory accesses, and why no
// slot is overwritten while it is read, is argued in ../mod.rs.
//
// Before this text come (source.rs): WORLD, PARTS, THREADS, WIRE, the numbers of layout.rs and protocol.rs, PARAMETERS (a
// pointer for each source tensor) and the platform (device.cuh); after it an ENTRY.
//
// A thread handles the same packs in every phase, on every rank: pack i belongs to the block and thread that `move_packs`
// gives it to. So a block has to wait for the same block of the other ranks only, never for a whole grid.

#if WIRE == WIRE_F32
#define VALUES 4
#else
#define VALUES 8
#endif

// What one launch has to do; the same bytes as `Job` in layout.rs.
struct Job {
    u64 window[8];  // every rank's window, as this process sees it
    u64 faults;     // on the host: a word for each peer
    u64 abort;      // on the host: not zero once the job is over
    u64 limit;      // nanoseconds that a wait may take
    u64 epoch;      // number of this launch, from 1; equal on all ranks
    u64 first;      // first element of this launch, of the bucket or of each rank's part
    u64 each;       // elements of one rank's part, where parts are the caller's (reduce-scatter, all-gather)
    u64 slot;       // where in a window this launch's slot begins
    u32 count;      // elements of this launch, of the bucket or of each part
    u32 packs;      // packs of this launch, or of one part of it: `count` elements, the last pack filled up with zeros
    u32 part;       // packs that one rank reduces (two-shot)
    u32 fingerprint;
    u32 rank;
    u32 root;
    u32 phases;
    float scale;
    u32 end[PARTS];  // elements up to the end of each source tensor
};

struct Shared {
    const float* source[PARTS];
    u32 failed;
};

FN float widen(u32 bits) {
#if WIRE == WIRE_F16
    return from_half(bits);
#else
    return of_bits(bits << 16);
#endif
}

// To the nearest, ties to even; a NaN stays one. As the reductions of the CPU do it (comm/kernels.rs), to the bit.
FN u32 narrow(float value) {
#if WIRE == WIRE_F16
    return to_half(value);
#else
    const u32 bits = bits_of(value);
    const u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded;
#endif
}

FN Pack encode(const float* values) {
    Pack pack;
#if WIRE == WIRE_F32
    for (u32 i = 0; i < 4; ++i) pack.word[i] = bits_of(values[i]);
#else
    for (u32 i = 0; i < 4; ++i) pack.word[i] = narrow(values[2 * i]) | narrow(values[2 * i + 1]) << 16;
#endif
    return pack;
}

FN void decode(const Pack& pack, float* values) {
#if WIRE == WIRE_F32
    for (u32 i = 0; i < 4; ++i) values[i] = of_bits(pack.word[i]);
#else
    for (u32 i = 0; i < 4; ++i) {
        values[2 * i] = widen(pack.word[i] & 0xffff);
        values[2 * i + 1] = widen(pack.word[i] >> 16);
    }
#endif
}

FN bool is_aligned(const void* at) { return ((u64)at & 15) == 0; }

FN Pack* slot_of(const Job& job, u32 rank) { return (Pack*)(job.window[rank] + job.slot); }

// Moves the packs of [begin, end) that are this thread's: `store(i, load(i))`. Up to TURNS loads are on their way at once;
// their latency, not the links' rate, would limit a thread that waits for each.
template <u32 TURNS, class Load, class Store>
FN void move_packs(u32 begin, u32 end, Load load, Store store) {
    const u64 stride = (u64)gridDim.x * THREADS;
    u64 i = (u64)begin + (u64)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (TURNS - 1) * stride < end; i += TURNS * stride) {
        Pack packs[TURNS];
#pragma unroll
        for (u32 turn = 0; turn < TURNS; ++turn) packs[turn] = load((u32)(i + turn * stride));
#pragma unroll
        for (u32 turn = 0; turn < TURNS; ++turn) store((u32)(i + turn * stride), packs[turn]);
    }
    for (; i < end; i += stride) store((u32)i, load((u32)i));
}

// A sum has loads from every rank on their way anyway.
#define SUMS (WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1)

// Reads from many tensors as if they were one. Positions that are asked for only grow.
struct Reader {
    const Job& job;
    const Shared& shared;
    u32 tensor;

    // The pack of `VALUES` elements from `at` on, scaled, on the wire's type; from `end` on zeros.
    FN Pack pack(u64 at, u64 end) {
        float values[VALUES];
        while (tensor + 1 < PARTS && at >= job.end[tensor]) ++tensor;
        const u64 start = tensor == 0 ? 0 : job.end[tensor - 1];
        const float* source = shared.source[tensor] + (at - start);
        if (at + VALUES <= end && at + VALUES <= job.end[tensor] && is_aligned(source)) {
            for (u32 i = 0; i < VALUES; i += 4) {
                const Pack four = load_pack((const Pack*)(source + i));
                for (u32 j = 0; j < 4; ++j) values[i + j] = of_bits(four.word[j]);
            }
        } else {
            for (u32 i = 0; i < VALUES; ++i) values[i] = at + i < end ? one(at + i) : 0.0f;
        }
        // a product with one would make another NaN of some
        if (job.scale != 1.0f)
            for (u32 i = 0; i < VALUES; ++i) values[i] *= job.scale;
        return encode(values);
    }

    FN float one(u64 at) {
        u32 t = tensor;
        while (t + 1 < PARTS && at >= job.end[t]) ++t;
        return shared.source[t][at - (t == 0 ? 0 : job.end[t - 1])];
    }
};

// Writes elements [at, at + VALUES) of `out` from a pack, but none from `end` on.
FN void place(float* out, u64 at, u64 end, const Pack& pack) {
    float values[VALUES];
    decode(pack, values);
    if (at + VALUES <= end && is_aligned(out + at)) {
        for (u32 i = 0; i < VALUES; i += 4) {
            Pack four;
            for (u32 j = 0; j < 4; ++j) four.word[j] = bits_of(values[i + j]);
            store_pack((Pack*)(out + at + i), four);
        }
    } else {
        for (u32 i = 0; i < VALUES; ++i)
            if (at + i < end) out[at + i] = values[i];
    }
}

// The sum of pack `i` over ranks, in the order of ranks on every rank; rounded once, to the wire's type.
FN Pack sum(const Job& job, u32 i) {
    Pack packs[WORLD];
    for (u32 rank = 0; rank < WORLD; ++rank) packs[rank] = load_pack(slot_of(job, rank) + i);
    float total[VALUES], values[VALUES];
    decode(packs[0], total);
    for (u32 rank = 1; rank < WORLD; ++rank) {
        decode(packs[rank], values);
        for (u32 v = 0; v < VALUES; ++v) total[v] += values[v];
    }
    return encode(total);
}

FN u64* flag_of(const Job& job, u32 owner, u32 area, u32 sender) {
    return (u64*)(job.window[owner] + area) + (u64)blockIdx.x * 8 + sender;
}

FN void fault(const Job& job, Shared& shared, u32 peer, u64 kind) {
    store_relaxed((u64*)job.faults + peer, kind | job.epoch << 8);
    store_relaxed((u64*)(job.window[job.rank] + BROKEN), job.epoch);
    raise(&shared.failed);
}

// One thread a peer: says that this block is here, and waits until the peer's is. False once anything is wrong.
FN bool meet(const Job& job, Shared& shared, u32 area) {
    __syncthreads();
    if (threadIdx.x < WORLD) {
        const u32 peer = threadIdx.x;
        store_release(flag_of(job, peer, area, job.rank), job.epoch << FINGERPRINT_BITS | job.fingerprint);
        const u64* flag = flag_of(job, job.rank, area, peer);
        const u64 start = nanoseconds();
        for (u32 turn = 1;; ++turn) {
            const u64 seen = load_acquire(flag);
            if (seen >> FINGERPRINT_BITS >= job.epoch) {
                // a peer that is further on has seen this rank's call, and compared
                const bool same = (seen & ((1u << FINGERPRINT_BITS) - 1)) == job.fingerprint;
                if (seen >> FINGERPRINT_BITS == job.epoch && !same) fault(job, shared, peer, FAULT_DIFFERS);
                break;
            }
            if (turn % 256 == 0) {
                if (load_relaxed((const u64*)job.abort) != 0) {
                    fault(job, shared, peer, FAULT_ABORTED);
                    break;
                }
                // whoever was held up itself, with its whole machine, asks once more before it accuses
                if (nanoseconds() - start > job.limit && load_acquire(flag) >> FINGERPRINT_BITS < job.epoch) {
                    fault(job, shared, peer, FAULT_MISSING);
                    break;
                }
            }
        }
    }
    __syncthreads();
    return !is_raised(&shared.failed);
}

// After a fault nothing runs any more: launches that are queued already must not wait for their limit each. But all blocks of
// the launch that has it go on to meet: the same blocks of the peers wait for them, and blocks do not all begin at once.
FN bool begin(const Job& job, Shared& shared) {
    if (threadIdx.x == 0) {
        shared.failed = 0;
        const u64 broken = load_relaxed((const u64*)(job.window[job.rank] + BROKEN));
        if (broken != 0 && broken < job.epoch) raise(&shared.failed);
    }
    __syncthreads();
    return !is_raised(&shared.failed);
}

// Fills packs [begin, end) of the own slot from elements `first` to `end_of_source` of the tensors; pack `begin` is element
// `first`.
FN void fill(const Job& job, Reader& reader, u32 begin, u32 end, u64 first, u64 end_of_source) {
    Pack* own = slot_of(job, job.rank);
    move_packs<4>(
        begin, end, [&](u32 i) { return reader.pack(first + (u64)(i - begin) * VALUES, end_of_source); },
        [&](u32 i, Pack pack) { store_pack(own + i, pack); });
}

FN u32 least(u32 a, u32 b) { return a < b ? a : b; }

// Everybody reads everything: least latency.
FN void one_shot_body(float* out, const Job& job, Shared& shared) {
    if (!begin(job, shared)) return;
    const u64 end = job.first + job.count;
    if (job.phases & PHASE_PACK) {
        Reader reader{job, shared, 0};
        fill(job, reader, 0, job.packs, job.first, end);
    }
    if (job.phases & PHASE_MEET && !meet(job, shared, FILLED)) return;
    if (job.phases & PHASE_REDUCE)
        move_packs<SUMS>(
            0, job.packs, [&](u32 i) { return sum(job, i); },
            [&](u32 i, Pack pack) { place(out, job.first + (u64)i * VALUES, end, pack); });
}

// Each reduces a part, then everybody reads all parts: least traffic.
FN void two_shot_body(float* out, const Job& job, Shared& shared) {
    if (!begin(job, shared)) return;
    const u64 end = job.first + job.count;
    if (job.phases & PHASE_PACK) {
        Reader reader{job, shared, 0};
        for (u32 p = 0; p < WORLD; ++p) {
            const u32 from = least(p * job.part, job.packs);
            fill(job, reader, from, least((p + 1) * job.part, job.packs), job.first + (u64)from * VALUES, end);
        }
    }
    if (job.phases & PHASE_MEET && !meet(job, shared, FILLED)) return;
    if (job.phases & PHASE_REDUCE) {
        // nobody else reads or writes this part of the own slot before the ranks meet again
        Pack* own = slot_of(job, job.rank);
        move_packs<SUMS>(
            least(job.rank * job.part, job.packs), least((job.rank + 1) * job.part, job.packs),
            [&](u32 i) { return sum(job, i); }, [&](u32 i, Pack pack) { store_pack(own + i, pack); });
    }
    if (job.phases & PHASE_MEET_AGAIN && !meet(job, shared, REDUCED)) return;
    if (job.phases & PHASE_GATHER) {
        for (u32 turn = 0; turn < WORLD; ++turn) {
            // each begins with another peer
            const u32 p = (job.rank + turn) % WORLD;
            const Pack* slot = slot_of(job, p);
            move_packs<4>(
                least(p * job.part, job.packs), least((p + 1) * job.part, job.packs),
                [&](u32 i) { return load_pack(slot + i); },
                [&](u32 i, Pack pack) { place(out, job.first + (u64)i * VALUES, end, pack); });
        }
    }
}

// Every rank gets its part of the sum; a part is `each` elements of the source, and `packs` packs of the slot.
FN void reduce_scatter_body(float* out, const Job& job, Shared& shared) {
    if (!begin(job, shared)) return;
    if (job.phases & PHASE_PACK) {
        Reader reader{job, shared, 0};
        for (u32 p = 0; p < WORLD; ++p) {
            const u64 start = p * job.each + job.first;
            fill(job, reader, p * job.packs, (p + 1) * job.packs, start, start + job.count);
        }
    }
    if (job.phases & PHASE_MEET && !meet(job, shared, FILLED)) return;
    if (job.phases & PHASE_REDUCE)
        move_packs<SUMS>(
            0, job.packs, [&](u32 i) { return sum(job, job.rank * job.packs + i); },
            [&](u32 i, Pack pack) { place(out, job.first + (u64)i * VALUES, job.first + job.count, pack); });
}

// Every rank gets everybody's `each` elements.
FN void all_gather_body(float* out, const Job& job, Shared& shared) {
    if (!begin(job, shared)) return;
    if (job.phases & PHASE_PACK) {
        Reader reader{job, shared, 0};
        fill(job, reader, 0, job.packs, job.first, job.first + job.count);
    }
    if (job.phases & PHASE_MEET && !meet(job, shared, FILLED)) return;
    if (job.phases & PHASE_GATHER) {
        for (u32 turn = 0; turn < WORLD; ++turn) {
            const u32 p = (job.rank + turn) % WORLD;
            const Pack* slot = slot_of(job, p);
            const u64 start = p * job.each + job.first;
            move_packs<4>(
                0, job.packs, [&](u32 i) { return load_pack(slot + i); },
                [&](u32 i, Pack pack) { place(out, start + (u64)i * VALUES, start + job.count, pack); });
        }
    }
}

// Every rank gets the root's elements. With the own rank as root and no meeting: in and out of the own slot.
FN void broadcast_body(float* out, const Job& job, Shared& shared) {
    if (!begin(job, shared)) return;
    const u64 end = job.first + job.count;
    if (job.phases & PHASE_PACK && job.rank == job.root) {
        Reader reader{job, shared, 0};
        fill(job, reader, 0, job.packs, job.first, end);
    }
    if (job.phases & PHASE_MEET && !meet(job, shared, FILLED)) return;
    if (job.phases & PHASE_GATHER) {
        const Pack* slot = slot_of(job, job.root);
        move_packs<4>(
            0, job.packs, [&](u32 i) { return load_pack(slot + i); },
            [&](u32 i, Pack pack) { place(out, job.first + (u64)i * VALUES, end, pack); });
    }
}

// Whether stores to, and loads from, every peer arrive: what the driver says of peer access is not to be trusted. First every
// rank writes to all windows; once the hosts have met, every rank reads all that was written.
FN void probe_body(float* out, const Job& job, Shared& shared) {
    if (blockIdx.x != 0 || threadIdx.x >= WORLD) return;
    const u32 peer = threadIdx.x;
    u64* words = (u64*)(job.window[peer] + PROBE);
    if (job.phases & PHASE_PACK) store_release(words + job.rank, PROBE_TOKEN + job.rank * 8 + peer);
    if (job.phases & PHASE_REDUCE) {
        for (u32 writer = 0; writer < WORLD; ++writer)
            if (load_acquire(words + writer) != PROBE_TOKEN + writer * 8 + peer)
                store_relaxed((u64*)job.faults + peer, FAULT_UNREACHABLE);
    }
}
