/* Runtime of translated kernels: conversions, the threads of a block as fibers of one CPU thread, warp operations. */
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef unsigned __int128 u128;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64; typedef __int128 s128;
typedef float f32; typedef double f64; typedef _Float16 f16;
#define OP static inline __attribute__((always_inline, unused))

OP f32 as_f32(u32 bits) { f32 v; memcpy(&v, &bits, 4); return v; }
OP u32 of_f32(f32 v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
OP f64 as_f64(u64 bits) { f64 v; memcpy(&v, &bits, 8); return v; }
OP u64 of_f64(f64 v) { u64 bits; memcpy(&bits, &v, 8); return bits; }
OP f32 as_f16(u16 bits) { f16 v; memcpy(&v, &bits, 2); return (f32)v; }
OP u16 of_f16(f32 x) { f16 v = (f16)x; u16 bits; memcpy(&bits, &v, 2); return bits; }
OP u16 of_f16_from_f64(f64 x) { f16 v = (f16)x; u16 bits; memcpy(&bits, &v, 2); return bits; }
OP f32 as_bf16(u16 bits) { return as_f32((u32)bits << 16); }
OP u16 of_bf16(f32 x) { /* Rounds to nearest, ties to even. */
    u32 b = of_f32(x);
    return (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
/* TF32_BITS: those of a number that remain; all of them with CUDA_ON_CPU_TF32=exact. */
#ifdef TF32_EXACT
#define TF32_BITS 0xffffffff
#else
#define TF32_BITS 0xffffe000
#endif
OP u32 of_tf32(f32 x) { u32 b = of_f32(x); return (b & 0x7f800000) == 0x7f800000 ? b : (b + (~TF32_BITS + 1) / 2) & TF32_BITS; }

/* Conversions to integers as in cvt: out-of-range values saturate, NaN becomes zero. (For 64-bit types PTX returns another value for NaN, which is not reproduced.) */
#define TO_INT(T, LOW, HIGH) OP T to_##T(f64 v) { return isnan(v) ? 0 : v <= (f64)(LOW) ? (LOW) : v >= (f64)(HIGH) ? (HIGH) : (T)v; }
TO_INT(s8, INT8_MIN, INT8_MAX) TO_INT(u8, 0, UINT8_MAX) TO_INT(s16, INT16_MIN, INT16_MAX) TO_INT(u16, 0, UINT16_MAX)
TO_INT(s32, INT32_MIN, INT32_MAX) TO_INT(u32, 0, UINT32_MAX) TO_INT(s64, INT64_MIN, INT64_MAX) TO_INT(u64, 0, UINT64_MAX)
OP f32 saturate(f32 v) { return v > 0 ? v < 1 ? v : 1 : 0; }
/* Return the operand that is not NaN. -0 and +0 are not distinguished. */
OP f64 min_num(f64 a, f64 b) { return isnan(a) ? b : isnan(b) ? a : a < b ? a : b; }
OP f64 max_num(f64 a, f64 b) { return isnan(a) ? b : isnan(b) ? a : a > b ? a : b; }
OP f64 min_nan(f64 a, f64 b) { return isnan(a) || isnan(b) ? NAN : a < b ? a : b; }
OP f64 max_nan(f64 a, f64 b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }

OP u64 shift_left(u64 v, u32 n, u32 bits) { return n >= bits ? 0 : v << n; }
OP u64 shift_right(u64 v, u32 n, u32 bits) { return n >= bits ? 0 : v >> n; }
OP s64 shift_right_signed(s64 v, u32 n, u32 bits) { return v >> (n >= bits ? bits - 1 : n); }
OP u32 funnel(u32 low, u32 high, u32 n, int left, int wrap) {
    u64 both = (u64)high << 32 | low;
    n = wrap ? n & 31 : n > 32 ? 32 : n;
    return left ? (u32)(both << n >> 32) : (u32)(both >> n);
}
OP u32 permute(u32 a, u32 b, u32 how) {
    u64 both = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = how >> 4 * i & 15, byte = (u32)(both >> 8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << 8 * i;
    }
    return out;
}
OP u64 bit_field(u64 v, u32 at, u32 n, u32 bits, int is_signed) {
    at &= 255, n &= 255;
    if (n == 0) return 0;
    u64 out = at >= bits ? 0 : v >> at;
    if (n < bits) out &= (1ull << n) - 1;
    u32 top = at + n - 1 < bits - 1 ? at + n - 1 : bits - 1;
    if (is_signed && v >> top & 1 && n < bits) out |= ~((1ull << n) - 1);
    if (is_signed && at >= bits) out = v >> (bits - 1) & 1 ? ~0ull : 0;
    return out;
}
OP u64 bit_insert(u64 a, u64 b, u32 at, u32 n, u32 bits) {
    at &= 255, n &= 255;
    u64 mask = n >= 64 ? ~0ull : (1ull << n) - 1;
    return at >= bits ? b : (b & ~(mask << at)) | ((a & mask) << at);
}
OP u32 reverse_bits(u32 v) { u32 out = 0; for (int i = 0; i < 32; i++) out |= (v >> i & 1) << (31 - i); return out; }
OP u32 highest_bit(u64 v) { return v ? 63 - __builtin_clzll(v) : 0xffffffff; }
OP u32 lop3(u32 a, u32 b, u32 c, u32 table) {
    u32 out = 0;
    if (table & 1) out |= ~a & ~b & ~c;
    if (table & 2) out |= ~a & ~b & c;
    if (table & 4) out |= ~a & b & ~c;
    if (table & 8) out |= ~a & b & c;
    if (table & 16) out |= a & ~b & ~c;
    if (table & 32) out |= a & ~b & c;
    if (table & 64) out |= a & b & ~c;
    if (table & 128) out |= a & b & c;
    return out;
}
OP u32 dot4(u32 a, u32 b, u32 c, int sa, int sb) {
    for (int i = 0; i < 4; i++) {
        s32 x = a >> 8 * i & 255, y = b >> 8 * i & 255;
        c += (u32)((sa ? (s8)x : x) * (sb ? (s8)y : y));
    }
    return c;
}
OP u64 nanoseconds(void) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec; }

/* ---- threads ---- */
enum { LANES = 32, WORDS = 16, BARRIERS = 16, STACK = 65536 };
typedef struct Block Block;
typedef struct Warp { u32 waiting[LANES]; u32 released, live; u32 slots[LANES][WORDS]; } Warp;
typedef struct Thread { Block *block; Warp *warp; void *sp; u32 tid[3], linear, lane, done, polls; } Thread;
typedef void (*Body)(Thread *);
struct Block {
    u32 ntid[3], nctaid[3], ctaid[3], threads, live, static_bytes, dynamic_bytes, fibers;
    u8 *shared;
    const u8 *params;
    Body body;
    Thread *all;
    void *main;
    u32 arrived[BARRIERS], generation[BARRIERS];
};

__attribute__((naked, noinline, unused)) static void switch_to(void **from, void *to) {
    __asm__("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp, (%rdi); mov %rsi, %rsp;"
            "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
static __thread Thread *starting;

/* Switches to the next fiber of the block. */
static __attribute__((unused, noinline)) void yield_fiber(Thread *t) {
    Block *b = t->block;
    if (!b->fibers) return;
    for (u32 i = 1; i < b->threads; i++) {
        Thread *next = &b->all[(t->linear + i) % b->threads];
        if (next->done) continue;
        starting = next;
        switch_to(&t->sp, next->sp);
        return;
    }
}
static __attribute__((unused, noinline)) void fiber_main(void) {
    Thread *t = starting;
    t->block->body(t);
    t->done = 1;
    t->block->live--;
    t->warp->live &= ~(1u << t->lane);
    Block *b = t->block;
    void *unused;
    for (u32 i = 1; i < b->threads; i++) {
        Thread *next = &b->all[(t->linear + i) % b->threads];
        if (next->done) continue;
        starting = next;
        switch_to(&unused, next->sp);
    }
    switch_to(&unused, b->main);
    __builtin_unreachable();
}
/* Yields in polling loops: the writer may be another thread of the block or another process. */
OP void poll_memory(Thread *t) {
    if (++t->polls % 16) return;
    yield_fiber(t);
    if (t->polls % 1024 == 0) sched_yield();
}

static __attribute__((unused, noinline)) void barrier(Thread *t, u32 id, u32 count) {
    Block *b = t->block;
    u32 generation = b->generation[id];
    b->arrived[id]++;
    for (;;) {
        if (b->generation[id] != generation) return;
        if (b->arrived[id] >= (count ? count : b->live)) {
            b->arrived[id] = 0;
            b->generation[id]++;
            return;
        }
        yield_fiber(t);
    }
}
static __attribute__((unused, noinline)) void sync_warp(Thread *t, u32 mask) {
    Warp *w = t->warp;
    w->waiting[t->lane] = mask;
    for (;;) {
        if (w->released >> t->lane & 1) {
            w->released &= ~(1u << t->lane);
            return;
        }
        u32 all = mask & w->live, there = 0;
        for (u32 i = 0; i < LANES; i++) there |= (u32)(w->waiting[i] == mask) << i;
        if ((all & ~there) == 0) {
            for (u32 i = 0; i < LANES; i++) if (all >> i & 1) w->waiting[i] = 0;
            w->released |= all;
            continue;
        }
        yield_fiber(t);
    }
}
/* Each lane publishes words. Lanes may read each other's `slots` until `sync_warp` is called again. */
OP void publish(Thread *t, u32 mask, u32 n, const u32 *words) {
    for (u32 i = 0; i < n; i++) t->warp->slots[t->lane][i] = words[i];
    sync_warp(t, mask);
}

OP u32 shuffle(Thread *t, char mode, u32 v, u32 b, u32 c, u32 mask, u8 *inside) {
    publish(t, mask, 1, &v);
    u32 lane = t->lane, segment = c >> 8 & 31, clamp = c & 31, max = (lane & segment) | (clamp & ~segment), min = lane & segment, from;
    b &= 31;
    int ok;
    switch (mode) {
        case 'u': from = lane - b; ok = (s32)(lane - b) >= (s32)max; break;
        case 'd': from = lane + b; ok = from <= max; break;
        case 'b': from = lane ^ b; ok = from <= max; break;
        default: from = min | (b & ~segment); ok = from <= max; break;
    }
    u32 out = ok ? t->warp->slots[from & 31][0] : v;
    if (inside) *inside = (u8)ok;
    sync_warp(t, mask);
    return out;
}
OP u32 ballot(Thread *t, u32 p, u32 mask) {
    publish(t, mask, 1, &p);
    u32 out = 0;
    for (u32 i = 0; i < LANES; i++) if (mask >> i & 1 && t->warp->live >> i & 1) out |= (u32)(t->warp->slots[i][0] != 0) << i;
    sync_warp(t, mask);
    return out;
}
OP u32 reduce_lanes(Thread *t, char how, int is_signed, u32 v, u32 mask) {
    publish(t, mask, 1, &v);
    u32 out = v, first = 1;
    for (u32 i = 0; i < LANES; i++) {
        if (!(mask & t->warp->live & 1u << i)) continue;
        u32 x = t->warp->slots[i][0];
        if (first) { out = x, first = 0; continue; }
        switch (how) {
            case '+': out += x; break;
            case '&': out &= x; break;
            case '|': out |= x; break;
            case '^': out ^= x; break;
            case '<': out = is_signed ? ((s32)x < (s32)out ? x : out) : x < out ? x : out; break;
            default: out = is_signed ? ((s32)x > (s32)out ? x : out) : x > out ? x : out;
        }
    }
    sync_warp(t, mask);
    return out;
}

/* The order of a grid's blocks: `first`, `first + stride`, … modulo their number. With CUDA_ON_CPU_SHUFFLE=SEED it is another one for
   each launch and each process. */
static void order_of(u64 blocks, u64 *first, u64 *stride) {
    static u64 launches;
    const char *seed = getenv("CUDA_ON_CPU_SHUFFLE");
    *first = 0, *stride = 1;
    if (!seed || !*seed || blocks < 2) return;
    u64 r = strtoull(seed, 0, 10) + ((u64)getpid() << 32) + __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    r = (r ^ r >> 30) * 0xbf58476d1ce4e5b9ull, r = (r ^ r >> 27) * 0x94d049bb133111ebull, r ^= r >> 31; /* splitmix64 */
    *first = r % blocks;
    for (u64 s = r >> 32;; s++) {
        u64 a = *stride = 1 + s % (blocks - 1), b = blocks;
        while (b) { u64 rest = a % b; a = b, b = rest; }
        if (a == 1) return;
    }
}

/* Runs a grid's blocks one after another. `stacks` has STACK bytes for each of 1024 threads. Kernels that other processes wait for
   run them `in_order`, as GPUs start them: such kernels may wait for the same block of another process. */
static __attribute__((unused)) void run_grid(Body body, u32 fibers, u32 in_order, const u8 *params, const u32 *grid, const u32 *ntid,
                                             u32 static_bytes, u32 dynamic, u8 *stacks) {
    u32 threads = ntid[0] * ntid[1] * ntid[2], warps = (threads + LANES - 1) / LANES;
    Block b = {.threads = threads, .static_bytes = static_bytes, .dynamic_bytes = dynamic, .params = params, .body = body, .fibers = fibers};
    size_t bytes = (static_bytes + dynamic + 1023) / 1024 * 1024 + 1024;
    b.shared = aligned_alloc(1024, bytes);
    b.all = calloc(threads, sizeof(Thread));
    Warp *all_warps = calloc(warps, sizeof(Warp));
    if (!b.shared || !b.all || !all_warps) abort();
    memcpy(b.ntid, ntid, 12), memcpy(b.nctaid, grid, 12);
    for (u32 i = 0; i < threads; i++) {
        u32 x = i % ntid[0], y = i / ntid[0] % ntid[1], z = i / ntid[0] / ntid[1];
        b.all[i] = (Thread){.block = &b, .warp = &all_warps[i / LANES], .tid = {x, y, z}, .linear = i, .lane = i % LANES};
    }
    u64 blocks = (u64)grid[0] * grid[1] * grid[2], at = 0, stride = 1;
    if (!in_order) order_of(blocks, &at, &stride);
    for (u64 n = 0; n < blocks; n++, at = (at + stride) % blocks) {
        b.ctaid[0] = at % grid[0], b.ctaid[1] = at / grid[0] % grid[1], b.ctaid[2] = at / grid[0] / grid[1];
        memset(b.shared, 0xff, bytes); /* As on a GPU, shared memory is not zero. */
        if (!fibers) {
            for (u32 i = 0; i < threads; i++) body(&b.all[i]);
            continue;
        }
        b.live = threads;
        memset(b.arrived, 0, sizeof b.arrived);
        for (u32 i = 0; i < warps; i++) {
            u32 lanes = threads - i * LANES;
            memset(&all_warps[i], 0, offsetof(Warp, slots));
            all_warps[i].live = lanes >= LANES ? 0xffffffff : (1u << lanes) - 1;
        }
        for (u32 i = 0; i < threads; i++) {
            void **top = (void **)(stacks + (size_t)(i + 1) * STACK) - 2;
            top[0] = (void *)fiber_main;
            memset(top - 6, 0, 6 * sizeof *top);
            b.all[i].sp = top - 6, b.all[i].done = 0;
        }
        starting = &b.all[0];
        switch_to(&b.main, b.all[0].sp);
    }
    free(b.shared), free(b.all), free(all_warps);
}

/* mbarrier objects: pending arrivals of the phase (20 bits), expected arrivals of a phase (20 bits), phase parity (bit 63). */
OP u64 mbarrier_arrive(u64 *at, u32 count) {
    u64 old, new;
    memcpy(&old, at, 8);
    u64 expected = old >> 20 & 0xfffff, pending = (old & 0xfffff) - count;
    new = (old & ~0xfffffull) | (pending & 0xfffff);
    if (pending == 0) new = (old >> 63 ? 0 : 1ull << 63) | expected << 20 | expected;
    memcpy(at, &new, 8);
    return old;
}
OP void mbarrier_init(u64 *at, u32 count) { u64 v = (u64)count << 20 | count; memcpy(at, &v, 8); }
OP u32 mbarrier_phase(const u64 *at) { u64 v; memcpy(&v, at, 8); return (u32)(v >> 63); }
