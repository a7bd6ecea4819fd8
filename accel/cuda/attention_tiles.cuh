// Read reference/study/tiled_attention.py first: m, l, shrink and lse are its.
//
// What the attention kernels on tensor cores share: tiles in shared memory, the scores, the stores.
//
// For head widths up to HEAD (64 or 128) that are multiples of 8; narrower ones are padded with zeros
// on the way into shared memory. A warp owns 16 rows of its block's, or strips of 16 that follow each
// other.
//
// A tile is its columns 64 at a time, one panel behind the other: rows of 128 bytes, the 16-byte chunk
// c of row r at chunk c ^ (r & 7). Eight rows that are read together then lie in eight different bank
// groups. It is the layout that wgmma calls a swizzle of 128 bytes, so tiles begin at multiples of 1,024.
#ifndef HEAD
#define HEAD 128
#endif
#ifndef WARPS
#define WARPS 8  // of a block
#endif
constexpr int THREADS = 32 * WARPS, OWN = 128;  // rows of a block, unless it says otherwise
constexpr int CHUNKS = HEAD / 8;                // 16-byte chunks of a row
constexpr int PITCH = HEAD * 2;                 // bytes that a row takes
constexpr int GROUPS = HEAD / 8;                // accumulators of a 16 × HEAD result
template <int ROWS> constexpr u32 PANEL = ROWS * 128;  // bytes of 64 columns of a tile
constexpr bool BARE = !ALIBI;  // scores are products alone
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.69314718055994531f;

// The byte offset of chunk `chunk` of row `row` in a tile of ROWS rows.
template <int ROWS> DEVICE u32 place(int row, int chunk) {
    return chunk / 8 * PANEL<ROWS> + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

// Start copying rows first … first + ROWS - 1 of a strided array; zeros beyond n rows and `width`. All
// threads do it, or as many that follow each other.
template <int ROWS, int COPYING = THREADS>
DEVICE void fetch(u32 tile, const elem* from, i64 stride, int first, int n, int width) {
    constexpr int STEP = COPYING / CHUNKS;  // rows that are copied at once: a multiple of 8
    const int thread = threadIdx.x % COPYING, row = thread / CHUNKS, chunk = thread % CHUNKS;
    const int rows = chunk * 8 < width ? n - first - row : 0;  // that there are from this one on
    const elem* at = from + (i64)(first + row) * stride + chunk * 8;
    const u32 to = tile + place<ROWS>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, at += STEP * stride)
        copy_async(to + i * 128, i < rows ? at : from, i < rows);
}

template <int N> DEVICE void clear(float (&acc)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
}

// A product's accumulators rounded to bf16: the next one's left operand.
template <int N> DEVICE void pack(u32 (&to)[N][4], const float (&from)[2 * N][4]) {
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[k][i] = pack_bf16(from[2 * k + i / 2][i % 2 * 2], from[2 * k + i / 2][i % 2 * 2 + 1]);
}

// Write 16 rows of a warp, rows g and g + 8 multiplied by factor[0] and factor[1], to a strided
// array, 16 bytes at a time by way of shared memory: rows row … row + 15 of `tile`, which nobody
// reads any more.
template <int ROWS = OWN>
DEVICE void store_rows(const float (&acc)[GROUPS][4], const float (&factor)[2], unsigned char* tile,
                       int row, elem* to, i64 stride, int first, int n, int width) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < GROUPS; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *(u32*)(tile + place<ROWS>(row + g + 8 * half, c) + 4 * t) =
                pack_bf16(acc[c][2 * half] * factor[half], acc[c][2 * half + 1] * factor[half]);
    sync_warp();
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int r = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row + r < n && chunk * 8 < width)
            store16(to + (i64)(first + row + r) * stride + chunk * 8,
                    load16(tile + place<ROWS>(row + r, chunk)));
    }
}

// Write 16 rows of a warp from `first` on as they are, to rows of floats: 32 bytes of each of eight
// rows at a time.
DEVICE void store_floats(const float (&acc)[GROUPS][4], float* to, i64 stride, int first, int n,
                         int width) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + g + 8 * half;
        if (row >= n) continue;
#pragma unroll
        for (int c = 0; c < GROUPS; ++c)
            if (c * 8 < width) store8(to + row * stride + c * 8 + 2 * t, acc[c] + 2 * half);
    }
}

// The score of query t and key u in units of log 2, s·scale2, and the bias. Where there is none
// (BARE) it stays s: who takes its exponential multiplies by scale2 and subtracts in one rounding.
DEVICE float score(const Rules& rules, float s, float scale2, int t, int u) {
    return BARE ? s : s * scale2 + rules.bias(t, u) * LOG2E;
}

// The online softmax of two rows: the scores s of queries t0 and t0 + 8, and of the keys u0, u0 + 1,
// u0 + 8, u0 + 9, …, become exp(s - m), dropped out, after m has taken their maximum in and l their
// sum, this lane's part of it. `shrink` is what earlier sums are to be multiplied by. INSIDE: the rules
// forbid nothing in this tile. BARE: scale2 > 0.
template <bool INSIDE, int N>
DEVICE void softmax_of(float (&s)[N][4], float (&m)[2], float (&l)[2], float (&shrink)[2],
                       const Rules& rules, float scale2, int t0, int u0) {
    float top[4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, base[2];  // two parts of each row, for speed
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = t0 + 8 * (i / 2), u = u0 + n * 8 + i % 2;
            s[n][i] = score(rules, s[n][i], scale2, t, u);
            if (!INSIDE && !rules.allows(t, u)) s[n][i] = -INFINITY;
            top[i] = fmaxf(top[i], s[n][i]);
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = fmaxf(top[2 * half], top[2 * half + 1]);
        most = fmaxf(most, shuffle_xor(most, 1));  // the four lanes of a row
        most = fmaxf(most, shuffle_xor(most, 2));
        most = fmaxf(m[half], BARE ? most * scale2 : most);
        base[half] = most == -INFINITY ? 0.0f : most;
        shrink[half] = exp2_fast(m[half] - base[half]);
        m[half] = most;
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& x = s[n][i];
            x = exp2_fast(BARE ? fmaf(x, scale2, -base[i / 2]) : x - base[i / 2]);
            sum[i] += x;
            if (DROPOUT) x *= rules.kept(t0 + 8 * (i / 2), u0 + n * 8 + i % 2);
        }
#pragma unroll
    for (int half = 0; half < 2; ++half)
        l[half] = l[half] * shrink[half] + (sum[2 * half] + sum[2 * half + 1]);
}

template <int N>
DEVICE void softmax_tile(float (&s)[N][4], float (&m)[2], float (&l)[2], float (&shrink)[2],
                         const Rules& rules, float scale2, int t0, int u0, bool inside) {
    if (BARE && !(scale2 > 0.0f)) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] *= scale2;
        scale2 = 1.0f;
    }
    if (inside) softmax_of<true>(s, m, l, shrink, rules, scale2, t0, u0);
    else softmax_of<false>(s, m, l, shrink, rules, scale2, t0, u0);
}

struct Cell {
    int t, u;    // query and key
    float lse2;  // of the query, in units of log 2
};

template <bool INSIDE, int N, class Where>
DEVICE void probabilities_of(float (&s)[N][4], const Rules& rules, float scale2, Where where) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Cell at = where(n, i);
            float x = score(rules, s[n][i], scale2, at.t, at.u);
            x = BARE ? fmaf(x, scale2, -at.lse2) : x - at.lse2;
            s[n][i] = exp2_fast(INSIDE || rules.allows(at.t, at.u) ? x : -INFINITY);
        }
}

// Scores become probabilities, by lse: where(n, i) is the cell of s[n][i].
template <int N, class Where>
DEVICE void probabilities(float (&s)[N][4], const Rules& rules, float scale2, bool inside, Where where) {
    if (inside) probabilities_of<true>(s, rules, scale2, where);
    else probabilities_of<false>(s, rules, scale2, where);
}

// Multiply two rows by factors of their own; not at all where those of the whole warp are 1.
DEVICE void rescale(float (&o)[GROUPS][4], const float (&factor)[2]) {
    if (!ballot(factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
}

// When all keys have been seen: `share` is 1 / l of rows t0 and t0 + 8, and lse, of this head's rows,
// is written.
DEVICE void finish_rows(const float (&m)[2], const float (&l)[2], float (&share)[2], float* lse, int t0,
                        int T) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = l[half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        share[half] = sum > 0.0f ? 1.0f / sum : sum;  // a row of NaN stays NaN
        const int t = t0 + 8 * half;
        if (threadIdx.x % 4 == 0 && t < T)
            lse[t] = m[half] == -INFINITY ? INFINITY : m[half] * LN2 + logf(sum);
    }
}
