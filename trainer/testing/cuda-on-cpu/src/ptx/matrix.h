/* Tensor core instructions. Fragments are distributed over a warp's lanes as the ISA specifies (m16n8k*, ldmatrix), or lane after lane where the ISA leaves the layout open (wmma). */
enum { F16, BF16, TF32, FP32 };
OP f32 element(const u32 *words, u32 i, int kind) {
    if (kind == TF32) return as_f32(words[i] & TF32_BITS);
    if (kind == FP32) return as_f32(words[i]);
    u16 half = (u16)(words[i / 2] >> 16 * (i & 1));
    return kind == F16 ? as_f16(half) : as_bf16(half);
}
OP void set_element(u32 *words, u32 i, int kind, f32 v) {
    if (kind == FP32) words[i] = of_f32(v);
    else words[i / 2] = (words[i / 2] & ~(0xffffu << 16 * (i & 1))) | (u32)(kind == F16 ? of_f16(v) : of_bf16(v)) << 16 * (i & 1);
}
/* D (16x8) = A (16xk) B (kx8) + C */
static __attribute__((unused, noinline)) void mma_m16n8(Thread *t, u32 k, int kind, int out, u32 *d, const u32 *a, u32 na, const u32 *b, u32 nb,
                                                        const u32 *c) {
    u32 words[WORDS];
    memcpy(words, a, 4 * na), memcpy(words + 8, b, 4 * nb);
    publish(t, 0xffffffff, WORDS, words);
    u32 result[4] = {0};
    for (u32 i = 0; i < 4; i++) {
        u32 row = (t->lane >> 2) + 8 * (i >> 1), column = (t->lane & 3) * 2 + (i & 1);
        f32 sum = element(c, i, out);
        for (u32 j = 0; j < k; j++) {
            u32 lane_a, index_a, lane_b, index_b;
            if (kind == TF32) {
                lane_a = (row & 7) * 4 + (j & 3), index_a = (row >> 3) + 2 * (j >> 2);
                lane_b = column * 4 + (j & 3), index_b = j >> 2;
            } else {
                lane_a = (row & 7) * 4 + ((j & 7) >> 1), index_a = (j & 1) + 2 * (row >> 3) + 4 * (j >> 3);
                lane_b = column * 4 + ((j & 7) >> 1), index_b = (j & 1) + 2 * (j >> 3);
            }
            sum += element(t->warp->slots[lane_a], index_a, kind) * element(t->warp->slots[lane_b] + 8, index_b, kind);
        }
        set_element(result, i, out, sum);
    }
    sync_warp(t, 0xffffffff);
    memcpy(d, result, out == FP32 ? 16 : 8);
}
/* Up to four matrices of 8x8 16-bit elements; lanes 8i..8i+7 hold the row addresses of matrix i. */
static __attribute__((unused, noinline)) void ldmatrix(Thread *t, u32 count, int transposed, const u8 *row, u32 *d) {
    u64 address = (u64)row;
    u32 words[2] = {(u32)address, (u32)(address >> 32)};
    publish(t, 0xffffffff, 2, words);
    for (u32 m = 0; m < count; m++) {
        u16 pair[2];
        for (u32 i = 0; i < 2; i++) {
            u32 r = transposed ? (t->lane & 3) * 2 + i : t->lane >> 2, c = transposed ? t->lane >> 2 : (t->lane & 3) * 2 + i;
            const u32 *w = t->warp->slots[8 * m + r];
            memcpy(&pair[i], (const u8 *)((u64)w[1] << 32 | w[0]) + 2 * c, 2);
        }
        d[m] = (u32)pair[1] << 16 | pair[0];
    }
    sync_warp(t, 0xffffffff);
}
static __attribute__((unused, noinline)) void stmatrix(Thread *t, u32 count, int transposed, u8 *row, const u32 *s) {
    u64 address = (u64)row;
    u32 words[6] = {(u32)address, (u32)(address >> 32)};
    memcpy(words + 2, s, 4 * count);
    publish(t, 0xffffffff, 2 + count, words);
    u32 m = t->lane / 8, r = t->lane % 8;
    for (u32 c = 0; m < count && c < 8; c++) {
        u32 lane = transposed ? c * 4 + r / 2 : r * 4 + c / 2, half = transposed ? r & 1 : c & 1;
        u16 v = (u16)(t->warp->slots[lane][2 + m] >> 16 * half);
        memcpy(row + 2 * c, &v, 2);
    }
    sync_warp(t, 0xffffffff);
}
/* wmma fragments of rows x columns: element i of lane l has index l * (rows * columns / 32) + i in row-major order. */
OP u32 place(u32 number, u32 rows, u32 columns, u32 stride, int row_major) {
    (void)rows;
    u32 r = number / columns, c = number % columns;
    return row_major ? r * stride + c : c * stride + r;
}
static __attribute__((unused, noinline)) void wmma_load(Thread *t, u32 rows, u32 columns, int kind, int row_major, const u8 *from, u32 stride,
                                                        u32 *d, u32 n) {
    u32 each = rows * columns / LANES, size = kind == FP32 || kind == TF32 ? 4 : 2;
    memset(d, 0, 4 * n);
    for (u32 i = 0; i < each; i++) {
        const u8 *at = from + (size_t)size * place(t->lane * each + i, rows, columns, stride, row_major);
        if (size == 4) memcpy(&d[i], at, 4);
        else { u16 v; memcpy(&v, at, 2); d[i / 2] |= (u32)v << 16 * (i & 1); }
    }
    sync_warp(t, 0xffffffff);
}
static __attribute__((unused, noinline)) void wmma_store(Thread *t, u32 rows, u32 columns, int kind, int row_major, u8 *to, u32 stride,
                                                         const u32 *s) {
    u32 each = rows * columns / LANES;
    for (u32 i = 0; i < each; i++) {
        u8 *at = to + (size_t)(kind == FP32 ? 4 : 2) * place(t->lane * each + i, rows, columns, stride, row_major);
        if (kind == FP32) memcpy(at, &s[i], 4);
        else { u16 v = (u16)(s[i / 2] >> 16 * (i & 1)); memcpy(at, &v, 2); }
    }
    sync_warp(t, 0xffffffff);
}
static __attribute__((unused, noinline)) void wmma_mma(Thread *t, u32 m, u32 n, u32 k, int kind, int in, int out, u32 *d, const u32 *a, const u32 *b,
                                                       const u32 *c) {
    u32 words[WORDS];
    u32 a_each = m * k / LANES, b_each = k * n / LANES, each = m * n / LANES;
    u32 per_word = kind == TF32 ? 1 : 2;
    memcpy(words, a, 4 * (a_each / per_word)), memcpy(words + 8, b, 4 * (b_each / per_word));
    publish(t, 0xffffffff, WORDS, words);
    u32 result[8] = {0};
    for (u32 i = 0; i < each; i++) {
        u32 number = t->lane * each + i, row = number / n, column = number % n;
        f32 sum = element(c, i, in);
        for (u32 j = 0; j < k; j++) {
            u32 na = row * k + j, nb = j * n + column;
            sum += element(t->warp->slots[na / a_each], na % a_each, kind) * element(t->warp->slots[nb / b_each] + 8, nb % b_each, kind);
        }
        set_element(result, i, out, sum);
    }
    sync_warp(t, 0xffffffff);
    memcpy(d, result, out == FP32 ? 4 * each : 2 * each);
}
