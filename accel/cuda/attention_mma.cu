// Read reference/study/tiled_attention.py first: m, l, shrink, lse and delta are its.
//
// Attention in bf16 on tensor cores (mma.sync m16n8k16), for head widths up to HEAD (64 or 128) that
// are multiples of 8; narrower ones are padded with zeros on the way into shared memory. The
// algorithm is attention.cu's (Dao et al. 2022; Dao 2023 for the loop order).
//
// Forward and dq: a block owns 128 queries of one head and walks over tiles of keys. dk, dv: a block
// owns 16 keys a warp of one key/value head, and walks over the queries of all heads of the group 32 at
// a time; scores are made transposed, so that here too a warp's own rows are the rows of its products.
// Scores and probabilities stay in registers: the accumulators of one product are, packed to bf16, the
// left operand of the next.
//
// What bounds it is shared memory, and waiting. A fragment of the right operand is loaded once for all
// rows of a warp: a product of 16 × 64 by HEAD takes HEAD/16 · 8 mma and HEAD/16 · (1 + 4) ldmatrix.x4
// of 512 bytes, one of 32 rows twice the mma and HEAD/16 · (2 + 4). So a block of the forward and of dq
// has four warps of two strips where two such blocks fit a multiprocessor, so that what one waits for
// the other hides; else eight warps of a strip each. dk, dv keep two sums, for whose second strips there
// are no registers. The README counts the cycles, attention.py says which way is taken where.
//
// The tiles that are walked over (attention_tiles.cuh) come by cp.async. Forward and dq have room for one
// of keys and one of values: while the block reads the one the other may come. dk, dv have two stages:
// one is filled while the other is used, and one barrier a tile vouches for both.
//
// Tiles beyond what causality and the window let the block's own rows see are not walked over, nor
// those whose range of documents does not meet the block's own: what they would add is exactly nothing.
#ifndef KEYS
#define KEYS 64  // rows of a tile that the forward walks over, or 32
#endif

constexpr int BLOCKS = 8 / WARPS;   // that share a multiprocessor
constexpr int DQ_KEYS = 8 * WARPS;  // rows of a tile that dq walks over
constexpr int QUERIES = 32;         // rows of a tile that dk, dv walk over
constexpr int OF_QUERIES = OWN / 16 / WARPS, OF_KEYS = 1;  // a warp's strips of its block's own rows
constexpr int OWN_KEYS = 16 * WARPS * OF_KEYS;

// Each of a warp's strips of 16 rows.
#define STRIP _Pragma("unroll") for (int strip = 0; strip < STRIPS; ++strip)

// The place of the chunk `chunk`, which is even, and `rows`, a multiple of 8, beyond the one at `at`,
// which is of chunk 0 or 1: of a tile of ROWS rows.
template <int ROWS> DEVICE u32 onward(u32 at, int rows, int chunk) {
    return (at ^ (chunk % 8 << 4)) + chunk / 8 * PANEL<ROWS> + rows * 128;
}

template <int STRIPS, int N> DEVICE void clear(float (&acc)[STRIPS][N][4]) {
    STRIP clear(acc[strip]);
}

// acc (16 · STRIPS × 8N) += a bᵀ: rows `row` … of tile a, and the 8N rows of tile b.
template <int STRIPS, int N>
DEVICE void multiply_rows(float (&acc)[STRIPS][N][4], u32 a, int row, u32 b) {
    const int lane = threadIdx.x % 32;
    constexpr int OWNED = 16 * STRIPS * WARPS;
    const u32 left_at = a + place<OWNED>(row + lane % 16, lane / 16);
    const u32 right_at = b + place<8 * N>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < HEAD / 16; ++k) {
        u32 left[STRIPS][4];
        STRIP ldmatrix<false>(left[strip], onward<OWNED>(left_at, 16 * strip, 2 * k));
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 right[4];
            ldmatrix<false>(right, onward<8 * N>(right_at, 16 * n, 2 * k));
            const u32 low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
            STRIP {
                mma_bf16(acc[strip][2 * n], left[strip], low);
                mma_bf16(acc[strip][2 * n + 1], left[strip], high);
            }
        }
    }
}

// acc (16 · STRIPS × HEAD) += p b: p (16 · STRIPS × 16N) from registers, and the 16N rows of tile b.
template <int STRIPS, int N>
DEVICE void multiply_columns(float (&acc)[STRIPS][GROUPS][4], const u32 (&p)[STRIPS][N][4], u32 b) {
    const int lane = threadIdx.x % 32;
    const u32 right_at = b + place<16 * N>(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
        for (int n = 0; n < GROUPS / 2; ++n) {
            u32 right[4];
            ldmatrix<true>(right, onward<16 * N>(right_at, 16 * k, 2 * n));
            const u32 low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
            STRIP {
                mma_bf16(acc[strip][2 * n], p[strip][k], low);
                mma_bf16(acc[strip][2 * n + 1], p[strip][k], high);
            }
        }
}

// Start copying lse and, behind it, delta of the queries first … first + ROWS - 1 of a head, whose floats
// begin at `head`; zeros beyond T.
template <int ROWS>
DEVICE void fetch_floats(u32 to, const float* lse, const float* delta, i64 head, int first, int T) {
#pragma unroll
    for (int begin = 0; begin < 2 * ROWS; begin += THREADS) {
        const int i = begin + threadIdx.x, t = first + i % ROWS;
        const float* from = i < ROWS ? lse : delta;
        if (i < 2 * ROWS) copy_async4(to + 4 * i, t < T ? from + head + t : from, t < T);
    }
}

// Grid: (Hq, B, query tiles).
KERNEL __launch_bounds__(THREADS, BLOCKS)
    attention_forward(ATTENTION_PARAMETERS, elem* out, float* lse, u32 rising) {
    constexpr int STRIPS = OF_QUERIES;
    SHARED(memory);
    const u32 tq = shared_address(memory), tk = tq + OWN * PITCH, tv = tk + KEYS * PITCH;
    const int h = blockIdx.x, b = blockIdx.y, hk = h / (Hq / Hkv);
    const int first = query_tile(rising) * OWN;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * STRIPS;
    const int g = lane / 4, c = lane % 4 * 2;
    const Rules rules = ATTENTION_RULES(b, h);
    const float scale2 = scale * LOG2E;
    const int last = first + OWN < T ? first + OWN - 1 : T - 1;
    const int tiles = (rules.key_end(last + 1) + KEYS - 1) / KEYS;
    const elem* keys = k + b * k_b + hk * k_h;
    const elem* values = v + b * v_b + hk * v_h;

    fetch<OWN>(tq, q + b * q_b + h * q_h, q_t, first, T, d);
    int least = 0, greatest = 0;  // documents of the block's queries
    if (MASKED && ranges) rules.span(first + S - T, last + S - T, least, greatest);
    int j = rules.next_tile(rules.key_begin(first) / KEYS, tiles, KEYS, least, greatest);
    if (j < tiles) fetch<KEYS>(tk, keys, k_t, j * KEYS, S, d);
    copy_commit();
    float o[STRIPS][GROUPS][4], m[STRIPS][2], l[STRIPS][2];
    clear(o);
    STRIP m[strip][0] = m[strip][1] = -INFINITY, l[strip][0] = l[strip][1] = 0.0f;
    while (j < tiles) {
        copy_wait<0>();
        sync_block();  // keys of tile j have landed, and values been read
        fetch<KEYS>(tv, values, v_t, j * KEYS, S, dv);
        copy_commit();
        float s[STRIPS][KEYS / 8][4];
        u32 p[STRIPS][KEYS / 16][4];
        clear(s);
        multiply_rows(s, tq, row, tk);
        const int u0 = j * KEYS;
        const bool inside = rules.inside(first + row, 16 * STRIPS, u0, KEYS);
        STRIP {
            const int t = first + row + 16 * strip + g;
            float shrink[2];
            softmax_tile(s[strip], m[strip], l[strip], shrink, rules, scale2, t, u0 + c, inside);
            // seldom does a row find a greater score than all before
            rescale(o[strip], shrink);
            pack(p[strip], s[strip]);
        }
        j = rules.next_tile(j + 1, tiles, KEYS, least, greatest);
        copy_wait<0>();
        sync_block();  // the values have landed, and the keys have been read
        if (j < tiles) fetch<KEYS>(tk, keys, k_t, j * KEYS, S, d);
        copy_commit();
        multiply_columns(o, p, tv);
    }
    copy_wait<0>();
    sync_block();  // with no tiles: all of the queries have landed
    STRIP {
        const int at = row + 16 * strip;
        float share[2];
        finish_rows(m[strip], l[strip], share, lse + ((i64)b * Hq + h) * T, first + at + g, T);
        store_rows(o[strip], share, memory, at, out + ((i64)b * T * Hq + h) * dv, (i64)Hq * dv, first, T,
                   dv);
    }
}

// Grid: (Hq, B, query tiles).
KERNEL __launch_bounds__(THREADS, BLOCKS)
    attention_dq(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                 const float* lse, const float* delta, elem* dq, i64 dq_b, i64 dq_t, i64 dq_h,
                 u32 rising) {
    constexpr int STRIPS = OF_QUERIES;
    SHARED(memory);
    const u32 tq = shared_address(memory), tdo = tq + OWN * PITCH;
    const u32 tk = tdo + OWN * PITCH, tv = tk + DQ_KEYS * PITCH;
    const u32 floats = 2 * (OWN + DQ_KEYS) * PITCH;  // where (2, OWN) of them are: lse, then delta
    const int h = blockIdx.x, b = blockIdx.y, hk = h / (Hq / Hkv);
    const int first = query_tile(DROPOUT ? 0 : rising) * OWN;  // no register for it
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * STRIPS;
    const int g = lane / 4, c = lane % 4 * 2;
    const Rules rules = ATTENTION_RULES(b, h);
    const float scale2 = scale * LOG2E;
    const int last = first + OWN < T ? first + OWN - 1 : T - 1;
    const int tiles = (rules.key_end(last + 1) + DQ_KEYS - 1) / DQ_KEYS;
    const elem* keys = k + b * k_b + hk * k_h;
    const elem* values = v + b * v_b + hk * v_h;

    fetch<OWN>(tq, q + b * q_b + h * q_h, q_t, first, T, d);
    fetch<OWN>(tdo, dout + b * dout_b + h * dout_h, dout_t, first, T, dv);
    fetch_floats<OWN>(tq + floats, lse, delta, ((i64)b * Hq + h) * T, first, T);
    int least = 0, greatest = 0;  // documents of the block's queries
    if (MASKED && ranges) rules.span(first + S - T, last + S - T, least, greatest);
    int j = rules.next_tile(rules.key_begin(first) / DQ_KEYS, tiles, DQ_KEYS, least, greatest);
    if (j < tiles) fetch<DQ_KEYS>(tk, keys, k_t, j * DQ_KEYS, S, d);
    copy_commit();
    const float* row_lse = (const float*)(memory + floats) + row + g;  // there is no register to keep it
    float acc[STRIPS][GROUPS][4];
    clear(acc);
    while (j < tiles) {
        copy_wait<0>();
        sync_block();  // keys of tile j have landed, and values been read
        fetch<DQ_KEYS>(tv, values, v_t, j * DQ_KEYS, S, dv);
        copy_commit();
        float s[STRIPS][DQ_KEYS / 8][4], dp[STRIPS][DQ_KEYS / 8][4];
        u32 ds[STRIPS][DQ_KEYS / 16][4];
        clear(s);
        clear(dp);
        multiply_rows(s, tq, row, tk);
        copy_wait<0>();
        sync_block();  // the values have landed
        multiply_rows(dp, tdo, row, tv);
        const int u0 = j * DQ_KEYS;
        const bool inside = rules.inside(first + row, 16 * STRIPS, u0, DQ_KEYS);
        STRIP {
            const int t0 = first + row + 16 * strip + g;
            const float* of = row_lse + 16 * strip;
            probabilities(s[strip], rules, scale2, inside, [&](int n, int i) {
                return Cell{t0 + 8 * (i / 2), u0 + n * 8 + c + i % 2, of[8 * (i / 2)] * LOG2E};
            });
#pragma unroll
            for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int t = t0 + 8 * (i / 2), u = u0 + n * 8 + c + i % 2;
                    const float kept = DROPOUT ? rules.kept(t, u) : 1.0f;
                    s[strip][n][i] *= kept * dp[strip][n][i] - of[OWN + 8 * (i / 2)];
                }
            pack(ds[strip], s[strip]);
        }
        j = rules.next_tile(j + 1, tiles, DQ_KEYS, least, greatest);
        multiply_columns(acc, ds, tk);
        sync_block();  // the keys have been read
        if (j < tiles) fetch<DQ_KEYS>(tk, keys, k_t, j * DQ_KEYS, S, d);
        copy_commit();
    }
    copy_wait<0>();
    sync_block();  // with no tiles: all of the queries have landed
    const float factor[2] = {scale, scale};
    STRIP store_rows(acc[strip], factor, memory, row + 16 * strip, dq + b * dq_b + h * dq_h, dq_t, first,
                     T, d);
}

// Grid: (Hkv, B, key tiles). The queries of all `heads` of the group are walked over one after the
// other, so a gradient is summed in one place and in one order. With heads = 1 the grid is (Hq, B, key
// tiles), and what the block's one query head gives goes to dk_parts (B, S, Hq, d) and dv_parts.
KERNEL __launch_bounds__(THREADS, BLOCKS)
    attention_dkv(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                  const float* lse, const float* delta, elem* dk, i64 dk_b, i64 dk_t, i64 dk_h,
                  elem* dvalue, i64 dvalue_b, i64 dvalue_t, i64 dvalue_h, int heads,
                  float* dk_parts, float* dv_parts) {
    constexpr int STRIPS = OF_KEYS;
    SHARED(memory);
    const u32 tk = shared_address(memory), tv = tk + OWN_KEYS * PITCH, stages = tv + OWN_KEYS * PITCH;
    const u32 stage_bytes = 2 * QUERIES * PITCH;  // queries, then gradients of outputs
    // where (2 stages, 2, QUERIES) of them are: lse, then delta
    const u32 floats = 2 * OWN_KEYS * PITCH + 2 * stage_bytes;
    const int h0 = blockIdx.x * heads, hk = h0 / (Hq / Hkv), b = blockIdx.y;
    const int first = key_tile() * OWN_KEYS;  // another order would make the loop slower
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * STRIPS;
    const int g = lane / 4, c = lane % 4 * 2;
    const float scale2 = scale * LOG2E;
    const int last = first + OWN_KEYS < S ? first + OWN_KEYS - 1 : S - 1;
    const Rules shared_rules = ATTENTION_RULES(b, h0);
    const int begin = shared_rules.query_begin(first) / QUERIES * QUERIES;
    const int end = shared_rules.query_end(last + 1);
    const int each = begin < end ? (end - begin + QUERIES - 1) / QUERIES : 0;  // tiles of a head
    const int tiles = heads * each;

    int least = 0, greatest = 0;  // documents of the block's keys
    if (MASKED && ranges) shared_rules.span(first, last, least, greatest);
    // The first tile of queries from j on that has one of them.
    auto next = [&](int j) {
        for (; j < tiles; ++j) {
            const int t0 = begin + j % each * QUERIES, t1 = t0 + QUERIES < T ? t0 + QUERIES : T;
            if (!shared_rules.apart(least, greatest, t0 + S - T, t1 - 1 + S - T)) break;
        }
        return j;
    };

    // Start on tile j: its rows of q and dout, and their lse and delta; rows beyond T are hidden by
    // the rules.
    auto fetch_queries = [&](int j, int turn) {
        const int h = h0 + j / each, t0 = begin + j % each * QUERIES;
        const u32 stage = stages + turn * stage_bytes;
        fetch<QUERIES>(stage, q + b * q_b + h * q_h, q_t, t0, T, d);
        fetch<QUERIES>(stage + QUERIES * PITCH, dout + b * dout_b + h * dout_h, dout_t, t0, T, dv);
        fetch_floats<QUERIES>(tk + floats + turn * 2 * QUERIES * 4, lse, delta, ((i64)b * Hq + h) * T,
                              t0, T);
    };

    fetch<OWN_KEYS>(tk, k + b * k_b + hk * k_h, k_t, first, S, d);
    fetch<OWN_KEYS>(tv, v + b * v_b + hk * v_h, v_t, first, S, dv);
    int j = next(0);
    if (j < tiles) fetch_queries(j, 0);
    copy_commit();
    float acc_k[STRIPS][GROUPS][4], acc_v[STRIPS][GROUPS][4];
    clear(acc_k);
    clear(acc_v);
    for (int turn = 0, after; j < tiles; j = after, turn ^= 1) {
        copy_wait<0>();
        sync_block();  // tile j has landed, and the one before has been read
        after = next(j + 1);
        if (after < tiles) fetch_queries(after, turn ^ 1);
        copy_commit();
        const u32 tq = stages + turn * stage_bytes, tdo = tq + QUERIES * PITCH;
        const float* row_lse = (const float*)(memory + floats) + turn * 2 * QUERIES;
        const int h = h0 + j / each, t0 = begin + j % each * QUERIES;
        const Rules rules = ATTENTION_RULES(b, h);
        float s[STRIPS][QUERIES / 8][4], dp[STRIPS][QUERIES / 8][4];  // transposed: rows are keys
        u32 p[STRIPS][QUERIES / 16][4], ds[STRIPS][QUERIES / 16][4];
        clear(s);
        clear(dp);
        multiply_rows(s, tk, row, tq);
        multiply_rows(dp, tv, row, tdo);
        const bool inside = rules.inside(t0, QUERIES, first + row, 16 * STRIPS);
        STRIP {
            const int u0 = first + row + 16 * strip + g;
            probabilities(s[strip], rules, scale2, inside, [&](int n, int i) {
                const int column = n * 8 + c + i % 2;
                return Cell{t0 + column, u0 + 8 * (i / 2), row_lse[column] * LOG2E};
            });
#pragma unroll
            for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = n * 8 + c + i % 2, u = u0 + 8 * (i / 2);
                    const float pi = s[strip][n][i], kept = DROPOUT ? rules.kept(t0 + column, u) : 1.0f;
                    s[strip][n][i] = pi * kept;
                    dp[strip][n][i] = pi * (kept * dp[strip][n][i] - row_lse[QUERIES + column]);
                }
            pack(p[strip], s[strip]);
            pack(ds[strip], dp[strip]);
        }
        multiply_columns(acc_v, p, tdo);
        multiply_columns(acc_k, ds, tq);
    }
    copy_wait<0>();
    if (dk_parts) {
        STRIP {
            const int at = first + row + 16 * strip;
            store_floats(acc_k[strip], dk_parts + ((i64)b * S * Hq + h0) * d, (i64)Hq * d, at, S, d);
            store_floats(acc_v[strip], dv_parts + ((i64)b * S * Hq + h0) * dv, (i64)Hq * dv, at, S, dv);
        }
        return;
    }
    sync_block();  // with no tiles: all of the keys and values have landed
    const float factor[2] = {scale, scale}, one[2] = {1.0f, 1.0f};
    STRIP {
        const int at = row + 16 * strip;
        store_rows<OWN_KEYS>(acc_k[strip], factor, memory, at, dk + b * dk_b + hk * dk_h, dk_t, first, S,
                             d);
        store_rows<OWN_KEYS>(acc_v[strip], one, memory + OWN_KEYS * PITCH, at,
                             dvalue + b * dvalue_b + hk * dvalue_h, dvalue_t, first, S, dv);
    }
}
