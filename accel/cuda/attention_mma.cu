// Read reference/study/tiled_attention.py first: m, l, shrink, lse and delta are its.
//
// Attention in bf16 on tensor cores (mma.sync m16n8k16), for head widths up to HEAD (64 or 128) that
// are multiples of 8; narrower ones are padded with zeros on the way into shared memory. The
// algorithm is attention.cu's (Dao et al. 2022; Dao 2023 for the loop order).
//
// Eight warps. Forward and dq: a block owns 128 queries of one head, a warp 16 of them, and walks
// over the keys KEYS at a time. dk, dv: a block owns 128 keys of one key/value head, a warp 16, and
// walks over the queries of all heads of the group 32 at a time; scores are made transposed, so that
// here too a warp's own rows are the rows of its products. Scores and probabilities stay in
// registers: the accumulators of one product are, packed to bf16, the left operand of the next.
//
// The tiles that are walked over (attention_tiles.cuh) come by cp.async into two stages, one filling
// while the other is used. Shared memory at HEAD = 128: forward 96 KiB, dq 128 KiB (96 with 32 keys at a
// time), dk/dv 97 KiB.
//
// Tiles beyond what causality and the window let the block's own rows see are not walked over, nor
// those whose range of documents does not meet the block's own: what they would add is exactly nothing.
//
// What bounds it is shared memory: a warp of 16 rows uses each fragment of the right operand once. A
// product of 16 × 64 by HEAD takes HEAD/16 · 8 mma and HEAD/16 · (1 + 4) ldmatrix.x4 of 512 bytes. The
// README counts the cycles.
#ifndef KEYS
#define KEYS 64  // rows of a tile that forward and dq walk over
#endif

constexpr int QUERIES = 32;  // rows of a tile that dk, dv walk over

// acc (16 × 8N) += a bᵀ: rows `row` … of tile a, and the 8N rows of tile b.
template <int N> DEVICE void multiply_rows(float (&acc)[N][4], u32 a, int row, u32 b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < HEAD / 16; ++k) {
        u32 left[4];
        ldmatrix<false>(left, a + place<OWN>(row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 right[4];
            ldmatrix<false>(right,
                            b + place<8 * N>(n * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
            const u32 low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
            mma_bf16(acc[2 * n], left, low);
            mma_bf16(acc[2 * n + 1], left, high);
        }
    }
}

// acc (16 × HEAD) += p b: p (16 × 8N) from registers, rounded to bf16, and the 8N rows of tile b.
template <int N>
DEVICE void multiply_columns(float (&acc)[GROUPS][4], const float (&p)[N][4], u32 b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        const u32 left[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]),
                             pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]),
                             pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < GROUPS / 2; ++n) {
            u32 right[4];
            ldmatrix<true>(right, b + place<8 * N>(k * 16 + lane % 16, 2 * n + lane / 16));
            const u32 low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
            mma_bf16(acc[2 * n], left, low);
            mma_bf16(acc[2 * n + 1], left, high);
        }
    }
}

// Grid: (Hq, B, query tiles).
KERNEL __launch_bounds__(THREADS) attention_forward(ATTENTION_PARAMETERS, elem* out, float* lse) {
    SHARED(memory);
    const u32 tq = shared_address(memory), stages = tq + OWN * PITCH;
    const u32 stage_bytes = 2 * KEYS * PITCH;  // keys, then values
    const int h = blockIdx.x, b = blockIdx.y, hk = h / (Hq / Hkv);
    const int first = query_tile() * OWN;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4 * 2;
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
    if (j < tiles) {
        fetch<KEYS>(stages, keys, k_t, j * KEYS, S, d);
        fetch<KEYS>(stages + KEYS * PITCH, values, v_t, j * KEYS, S, dv);
    }
    copy_commit();
    float o[GROUPS][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
    clear(o);
    for (int turn = 0, after; j < tiles; j = after, turn ^= 1) {
        const u32 tk = stages + turn * stage_bytes, tv = tk + KEYS * PITCH;
        after = rules.next_tile(j + 1, tiles, KEYS, least, greatest);
        if (after < tiles) {
            const u32 other = stages + (turn ^ 1) * stage_bytes;
            fetch<KEYS>(other, keys, k_t, after * KEYS, S, d);
            fetch<KEYS>(other + KEYS * PITCH, values, v_t, after * KEYS, S, dv);
        }
        copy_commit();
        copy_wait<1>();
        sync_block();  // tile j has landed
        float s[KEYS / 8][4];
        clear(s);
        multiply_rows(s, tq, row, tk);
        const int u0 = j * KEYS;
        const bool inside = rules.inside(first + row, 16, u0, KEYS);
float shrink[2];
        softmax_tile(s, m, l, shrink, rules, scale2, first + row + g, u0 + c, inside);
        rescale(o, shrink);
        multiply_columns(o, s, tv);
        sync_block();  // tile j has been read
    }
    copy_wait<0>();
    float share[2];
    finish_rows(m, l, share, lse + ((i64)b * Hq + h) * T, first + row + g, T);
    sync_block();  // with no tiles: all of the queries have landed
    store_rows(o, share, memory, row, out + ((i64)b * T * Hq + h) * dv, (i64)Hq * dv, first, T, dv);
}

// Grid: (Hq, B, query tiles).
KERNEL __launch_bounds__(THREADS)
    attention_dq(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                 const float* lse, const float* delta, elem* dq, i64 dq_b, i64 dq_t, i64 dq_h) {
    SHARED(memory);
    const u32 tq = shared_address(memory), tdo = tq + OWN * PITCH, stages = tdo + OWN * PITCH;
    const u32 stage_bytes = 2 * KEYS * PITCH;
    const int h = blockIdx.x, b = blockIdx.y, hk = h / (Hq / Hkv);
    const int first = query_tile() * OWN;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4 * 2;
    const Rules rules = ATTENTION_RULES(b, h);
    const float scale2 = scale * LOG2E;
    const int last = first + OWN < T ? first + OWN - 1 : T - 1;
    const int tiles = (rules.key_end(last + 1) + KEYS - 1) / KEYS;
    const elem* keys = k + b * k_b + hk * k_h;
    const elem* values = v + b * v_b + hk * v_h;

    fetch<OWN>(tq, q + b * q_b + h * q_h, q_t, first, T, d);
    fetch<OWN>(tdo, dout + b * dout_b + h * dout_h, dout_t, first, T, dv);
    int least = 0, greatest = 0;  // documents of the block's queries
    if (MASKED && ranges) rules.span(first + S - T, last + S - T, least, greatest);
    int j = rules.next_tile(rules.key_begin(first) / KEYS, tiles, KEYS, least, greatest);
    if (j < tiles) {
        fetch<KEYS>(stages, keys, k_t, j * KEYS, S, d);
        fetch<KEYS>(stages + KEYS * PITCH, values, v_t, j * KEYS, S, dv);
    }
    copy_commit();
    float row_lse[2], row_delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = first + row + g + 8 * half;
        const i64 at = ((i64)b * Hq + h) * T + t;
        row_lse[half] = t < T ? lse[at] * LOG2E : INFINITY;
        row_delta[half] = t < T ? delta[at] : 0.0f;
    }
    float acc[GROUPS][4];
    clear(acc);
    for (int turn = 0, after; j < tiles; j = after, turn ^= 1) {
        const u32 tk = stages + turn * stage_bytes, tv = tk + KEYS * PITCH;
        after = rules.next_tile(j + 1, tiles, KEYS, least, greatest);
        if (after < tiles) {
            const u32 other = stages + (turn ^ 1) * stage_bytes;
            fetch<KEYS>(other, keys, k_t, after * KEYS, S, d);
            fetch<KEYS>(other + KEYS * PITCH, values, v_t, after * KEYS, S, dv);
        }
        copy_commit();
        copy_wait<1>();
        sync_block();  // tile j has landed
        float s[KEYS / 8][4], dp[KEYS / 8][4];
        clear(s);
        clear(dp);
        multiply_rows(s, tq, row, tk);
        multiply_rows(dp, tdo, row, tv);
        const int u0 = j * KEYS;
        const bool inside = rules.inside(first + row, 16, u0, KEYS);
        probabilities(s, rules, scale2, inside, [&](int n, int i) {
            return Cell{first + row + g + 8 * (i / 2), u0 + n * 8 + c + i % 2, row_lse[i / 2]};
        });
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = first + row + g + 8 * (i / 2), u = u0 + n * 8 + c + i % 2;
                const float kept = DROPOUT ? rules.kept(t, u) : 1.0f;
                s[n][i] *= kept * dp[n][i] - row_delta[i / 2];
            }
        multiply_columns(acc, s, tk);
        sync_block();  // tile j has been read
    }
    copy_wait<0>();
    sync_block();  // with no tiles: all of the queries have landed
    const float factor[2] = {scale, scale};
    store_rows(acc, factor, memory, row, dq + b * dq_b + h * dq_h, dq_t, first, T, d);
}

// Grid: (Hkv, B, key tiles). The queries of all `heads` of the group are walked over one after the
// other, so a gradient is summed in one place and in one order. With heads = 1 the grid is (Hq, B, key
// tiles), and what the block's one query head gives goes to dk_parts (B, S, Hq, d) and dv_parts.
KERNEL __launch_bounds__(THREADS)
    attention_dkv(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                  const float* lse, const float* delta, elem* dk, i64 dk_b, i64 dk_t, i64 dk_h,
                  elem* dvalue, i64 dvalue_b, i64 dvalue_t, i64 dvalue_h, int heads,
                  float* dk_parts, float* dv_parts) {
    SHARED(memory);
    const u32 tk = shared_address(memory), tv = tk + OWN * PITCH, stages = tv + OWN * PITCH;
    const u32 stage_bytes = 2 * QUERIES * PITCH;  // queries, then gradients of outputs
    const u32 rows = 2 * OWN * PITCH + 2 * stage_bytes;  // where (2 stages, 2, QUERIES) floats are:
                                                         // lse, then delta
    const int h0 = blockIdx.x * heads, hk = h0 / (Hq / Hkv), b = blockIdx.y;
    const int first = key_tile() * OWN;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4 * 2;
    const float scale2 = scale * LOG2E;
    const int last = first + OWN < S ? first + OWN - 1 : S - 1;
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
        if (threadIdx.x < 2 * QUERIES) {  // whole warps: first lse, then delta
            const int t = t0 + threadIdx.x % QUERIES;
            const float* from = threadIdx.x < QUERIES ? lse : delta;
            copy_async4(tk + rows + (turn * 2 * QUERIES + threadIdx.x) * 4,
                        t < T ? from + ((i64)b * Hq + h) * T + t : from, t < T);
        }
    };

    fetch<OWN>(tk, k + b * k_b + hk * k_h, k_t, first, S, d);
    fetch<OWN>(tv, v + b * v_b + hk * v_h, v_t, first, S, dv);
    int j = next(0);
    if (j < tiles) fetch_queries(j, 0);
    copy_commit();
    float acc_k[GROUPS][4], acc_v[GROUPS][4];
    clear(acc_k);
    clear(acc_v);
    for (int turn = 0, after; j < tiles; j = after, turn ^= 1) {
        after = next(j + 1);
        if (after < tiles) fetch_queries(after, turn ^ 1);
        copy_commit();
        copy_wait<1>();
        sync_block();  // tile j has landed
        const u32 tq = stages + turn * stage_bytes, tdo = tq + QUERIES * PITCH;
        const float* row_lse = (const float*)(memory + rows) + turn * 2 * QUERIES;
        const int h = h0 + j / each, t0 = begin + j % each * QUERIES;
        const Rules rules = ATTENTION_RULES(b, h);
        float s[QUERIES / 8][4], dp[QUERIES / 8][4];  // transposed: rows are keys
        clear(s);
        clear(dp);
        multiply_rows(s, tk, row, tq);
        multiply_rows(dp, tv, row, tdo);
        const bool inside = rules.inside(t0, QUERIES, first + row, 16);
        probabilities(s, rules, scale2, inside, [&](int n, int i) {
            const int column = n * 8 + c + i % 2;
            return Cell{t0 + column, first + row + g + 8 * (i / 2), row_lse[column] * LOG2E};
        });
#pragma unroll
        for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = n * 8 + c + i % 2, u = first + row + g + 8 * (i / 2);
                const float p = s[n][i], kept = DROPOUT ? rules.kept(t0 + column, u) : 1.0f;
                s[n][i] = p * kept;
                dp[n][i] = p * (kept * dp[n][i] - row_lse[QUERIES + column]);
            }
        multiply_columns(acc_v, s, tdo);
        multiply_columns(acc_k, dp, tq);
        sync_block();  // tile j has been read
    }
    copy_wait<0>();
    if (dk_parts) {
        store_floats(acc_k, dk_parts + ((i64)b * S * Hq + h0) * d, (i64)Hq * d, first + row, S, d);
        store_floats(acc_v, dv_parts + ((i64)b * S * Hq + h0) * dv, (i64)Hq * dv, first + row, S, dv);
        return;
    }
    sync_block();  // with no tiles: all of the keys and values have landed
    const float factor[2] = {scale, scale}, one[2] = {1.0f, 1.0f};
    store_rows(acc_k, factor, memory, row, dk + b * dk_b + hk * dk_h, dk_t, first, S, d);
    store_rows(acc_v, one, memory + OWN * PITCH, row, dvalue + b * dvalue_b + hk * dvalue_h,
               dvalue_t, first, S, dv);
}
