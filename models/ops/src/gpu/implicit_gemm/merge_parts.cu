// Results of which many blocks compute parts. The last of these blocks merges the parts, so no second launch is needed.

/// Returns true in the last of the `count` blocks that call this function with `counter`. The counter is zero before and
/// afterwards. The last block sees everything that the other blocks wrote before their calls. All threads of a block must call
/// the function; `arrived` is a word of their shared memory.
__device__ __forceinline__ bool is_last(u32 *counter, u32 count, u32 *arrived) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *arrived = atomicAdd(counter, 1u);
        if (*arrived == count - 1) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return *arrived == count - 1;
}

/// Returns the number of runs of `per_merge` parts, the last of which may be shorter.
__device__ __forceinline__ int runs_of(int parts, int per_merge) { return (parts + per_merge - 1) / per_merge; }

/// Merges the parts of `parts` blocks; this block has written `part`. There are two levels, because one block alone would read
/// for too long: the last block of each run of `per_merge` blocks merges the run's parts, and the last of these blocks merges the
/// runs. The order of sums is fixed, so the result does not depend on which block is last.
///
/// `merge(slot, count, size, to)` merges `count` slots from `slot` on, each of `size` parts, to the slot `to`. Slots are
/// numbered: all parts, then one slot per run, then the result. `counters` has one counter per run and one more. `word` is in
/// shared memory.
template <class Merge> __device__ __forceinline__ void merge_parts(int part, int parts, int per_merge, u32 *counters,
                                                                      u32 *word, Merge merge) {
    int runs = runs_of(parts, per_merge), run = part / per_merge, inside = min(per_merge, parts - run * per_merge);
    if (!is_last(counters + run, inside, word)) return;
    merge(run * per_merge, inside, 1, runs == 1 ? parts + runs : parts + run);
    if (runs == 1 || !is_last(counters + runs, runs, word)) return;
    merge(parts, runs, per_merge, parts + runs);
}

#if PASS == WEIGHT_GRADIENT
/// Adds up a tile of `count` slots, in order. `slots` and `to` point to the weight gradient of a group; slots are `step` elements
/// apart.
__device__ void add_slots(const float *slots, int count, size_t step, float *to, int first_row, int first_column, const Sizes &s) {
    for (int e = threadIdx.x * 4; e < ROWS * COLUMNS; e += THREADS * 4) {
        int row = first_row + e / COLUMNS, column = first_column + e % COLUMNS;
        if (row >= s.rows) break;
        if ((DIAGONAL ? BLOCK_IN : s.columns) % 4 == 0) {
            int at = weight_at(row, column, s);
            if (at < 0) continue;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int i = 0; i < count; i++) {
                float4 value = __ldcg((const float4 *)(slots + i * step + at));
                sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
            }
            *(float4 *)(to + at) = sum;
        } else {
            for (int k = 0; k < 4; k++) {
                int at = weight_at(row, column + k, s);
                if (at < 0) continue;
                float sum = 0.0f;
                for (int i = 0; i < count; i++) sum += __ldcg(slots + i * step + at);
                to[at] = sum;
            }
        }
    }
}
#endif
