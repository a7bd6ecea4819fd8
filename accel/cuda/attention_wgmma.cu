// Read reference/study/tiled_attention.py first: m, l, shrink, lse and delta are its.
//
// Attention in bf16 by Hopper's products of a warpgroup (warpgroup.cuh): blocks of 128 rows and two
// warpgroups with 64 each, and attention_mma.cu's arithmetic. A product reads its right operand, and scores
// their left one, from shared memory once for 64 rows; probabilities and gradients of scores are left
// operands in registers. What is overlapped follows FlashAttention-3 (Shah et al. 2024, sections 3.1
// and 3.2):
//
//   forward   the next tile's scores are asked for before this tile's o += p v, and their softmax is
//             taken while the latter runs, and while the other warpgroup's products do
//   dq        a tile's dq += ds k runs while the next one's scores and dp are asked for; p is taken
//             while dp runs, ds while the other warpgroup's products do
//   dk, dv    the same by both warpgroups at once, and ds is taken while dv += p do runs
//
// In the forward and for dq the warpgroups ask for products in turns, so that one's exponentials are
// taken while the tensor cores are the other's. A turn is passed on by barriers at which who arrives
// does not wait. The first warpgroup copies keys, the second one values, by cp.async, so far ahead that
// what has landed, and what has been read, are known to the other from the turn before:
//
//   a turn     passed on when   it says that its warpgroup has read        copied meanwhile    stages
//   forward i  all is asked     keys up to i, values up to i - 1           keys, values i + 2    3
//   dq i       s is there       keys, values up to i - 1                   keys, values i + 2    4
//
// Turn i of the forward is that of the scores of tile i + 1 and of the values of tile i. The second
// warpgroup's turn i comes after the first one's, and before the first one's turn i + 1. For dk, dv
// tiles come one ahead into three stages, with one barrier of the block a tile. Shared memory at HEAD =
// 128: forward 224 KiB (128 with 64 keys at a time), dq 192 KiB, dk/dv 161.5 KiB.
#ifndef KEYS
#define KEYS 128  // rows of a tile that the forward walks over; 64 where options take registers
#endif

constexpr int DQ_KEYS = 64;        // rows of a tile that dq walks over
constexpr int QUERIES = KEYS / 2;  // rows of a tile that dk, dv walk over
constexpr bool PLENTY = !MASKED && !ALIBI && !DROPOUT;  // of registers for dk, dv: options take them

// What tells wgmma where 16 columns of some rows lie (`panels` 0), or 16 rows of some columns: panels
// of 64 columns are `panels` bytes apart. Groups of eight rows are 1,024 bytes apart, swizzled by 128
// bytes. PTX ISA, "Matrix Descriptor Format".
DEVICE u64 descriptor(u32 address, u32 panels) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(panels >> 4) << 16 | address >> 4;
}

// Ask for acc (64 × 8N) = a bᵀ: 64 rows of a block's own tile from byte a on, and the 8N rows of tile b.
template <int N> DEVICE void ask_rows(float (&acc)[N][4], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < HEAD / 16; ++k) {
        const u32 column = k % 4 * 32;
        wgmma_rows(acc, descriptor(a + k / 4 * PANEL<OWN> + column, 0),
                   descriptor(b + k / 4 * PANEL<8 * N> + column, 0), k > 0);
    }
}

// Ask for acc (64 × HEAD) += p b: p (64 × 16N) from registers, and the 16N rows of tile b.
template <int N>
DEVICE void ask_columns(float (&acc)[GROUPS][4], const u32 (&p)[N][4], u32 b) {
#pragma unroll
    for (int k = 0; k < N; ++k)
        wgmma_columns(acc, p[k], descriptor(b + k * 16 * 128, PANEL<16 * N>));
}

// All copies of this thread have landed, and after a barrier products may read them.
DEVICE void landed() {
    copy_wait<0>();
    fence_async();
}

// The turns of the block's two warpgroups, 0 and 1: wait for one's own, give the other its own.
DEVICE void my_turn(u32 group) { barrier_wait<THREADS>(1 + group); }
DEVICE void pass_on(u32 group) { barrier_arrive<THREADS>(2 - group); }

// Grid: (Hq, B, query tiles).
KERNEL __launch_bounds__(THREADS, 1)
    attention_forward(ATTENTION_PARAMETERS, elem* out, float* lse, u32 rising) {
    SHARED(memory);
    const u32 stage = KEYS * PITCH;
    const u32 tq = shared_address(memory), tk = tq + OWN * PITCH, tv = tk + 3 * stage;
    const int h = blockIdx.x, b = blockIdx.y, hk = h / (Hq / Hkv);
    const int first = query_tile(rising) * OWN;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4 * 2;
    const u32 group = uniform(threadIdx.x / 128), own = tq + group * 64 * 128;
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
    float o[GROUPS][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f}, shrink[2];
    clear(o);
    landed();
    sync_block();
    if (j < tiles) {
        float s[KEYS / 8][4];
        u32 p[KEYS / 16][4];
        auto softmax = [&](int tile) {
            const int u0 = tile * KEYS;
            const bool inside = rules.inside(first + row, 16, u0, KEYS);
            softmax_tile(s, m, l, shrink, rules, scale2, first + row + g, u0 + c, inside);
        };
        auto copy = [&](u32 to, int tile) {  // its keys by one warpgroup, its values by the other
            fetch<KEYS, THREADS / 2>((group ? tv : tk) + to, group ? values : keys, group ? v_t : k_t,
                                     tile * KEYS, S, group ? dv : d);
        };
        wgmma_fence();
        ask_rows(s, own, tk);
        wgmma_commit();
        int after = rules.next_tile(j + 1, tiles, KEYS, least, greatest);
        if (group) copy(0, j);
        if (after < tiles) copy(stage, after);
        copy_commit();
        wgmma_wait<0>();
        softmax(j);
        pack(p, s);
        landed();
        if (group == 1) pass_on(group);  // the first turn is the other's
        u32 now = 0, next = stage, free = 2 * stage;  // stages: of p's tile, of the next one, to copy to
        while (after < tiles) {
            my_turn(group);
            wgmma_fence();
            ask_rows(s, own, tk + next);
            wgmma_commit();
            ask_columns(o, p, tv + now);
            wgmma_commit();
            pass_on(group);
            const int later = rules.next_tile(after + 1, tiles, KEYS, least, greatest);
            if (later < tiles) copy(free, later);
            copy_commit();
            wgmma_wait<1>();  // the next scores
            softmax(after);
            landed();
            wgmma_wait<0>();
            rescale(o, shrink);
            pack(p, s);
            const u32 read = now;
            after = later, now = next, next = free, free = read;
        }
        my_turn(group);  // the last values
        wgmma_fence();
        ask_columns(o, p, tv + now);
        wgmma_commit();
        if (group == 0) pass_on(group);
        wgmma_wait<0>();
    }
    float share[2];
    finish_rows(m, l, share, lse + ((i64)b * Hq + h) * T, first + row + g, T);
    // the queries, whose place is used again, were last read before the last turn
    store_rows(o, share, memory, row, out + ((i64)b * T * Hq + h) * dv, (i64)Hq * dv, first, T, dv);
}

// Grid: (Hq, B, query tiles).
KERNEL __launch_bounds__(THREADS, 1)
    attention_dq(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                 const float* lse, const float* delta, elem* dq, i64 dq_b, i64 dq_t, i64 dq_h,
                 u32 rising) {
    SHARED(memory);
    const u32 tq = shared_address(memory), tdo = tq + OWN * PITCH, tk = tdo + OWN * PITCH;
    const u32 stage = DQ_KEYS * PITCH, tv = tk + 4 * stage;
    const int h = blockIdx.x, b = blockIdx.y, hk = h / (Hq / Hkv);
    const int first = query_tile(rising) * OWN;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4 * 2;
    const u32 group = uniform(threadIdx.x / 128), own = group * 64 * 128;
    const Rules rules = ATTENTION_RULES(b, h);
    const float scale2 = scale * LOG2E;
    const int last = first + OWN < T ? first + OWN - 1 : T - 1;
    const int tiles = (rules.key_end(last + 1) + DQ_KEYS - 1) / DQ_KEYS;
    const elem* keys = k + b * k_b + hk * k_h;
    const elem* values = v + b * v_b + hk * v_h;

    fetch<OWN>(tq, q + b * q_b + h * q_h, q_t, first, T, d);
    fetch<OWN>(tdo, dout + b * dout_b + h * dout_h, dout_t, first, T, dv);
    int least = 0, greatest = 0;  // documents of the block's queries
    if (MASKED && ranges) rules.span(first + S - T, last + S - T, least, greatest);
    int j = rules.next_tile(rules.key_begin(first) / DQ_KEYS, tiles, DQ_KEYS, least, greatest);
    auto copy = [&](u32 to, int tile) {  // its keys by one warpgroup, its values by the other
        fetch<DQ_KEYS, THREADS / 2>((group ? tv : tk) + to, group ? values : keys, group ? v_t : k_t,
                                    tile * DQ_KEYS, S, group ? dv : d);
    };
    int after = tiles;
    if (j < tiles) {
        after = rules.next_tile(j + 1, tiles, DQ_KEYS, least, greatest);
        copy(0, j);
        if (after < tiles) copy(stage, after);
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
    u32 ds[DQ_KEYS / 16][4];
    clear(acc);
    landed();
    if (group == 1) pass_on(group);  // the first turn is the other's
    for (u32 now = 0; j < tiles; now = (now + stage) % (4 * stage)) {  // where tile j is
        my_turn(group);
        float s[DQ_KEYS / 8][4], dp[DQ_KEYS / 8][4];
        wgmma_fence();
        ask_rows(s, tq + own, tk + now);
        wgmma_commit();
        ask_rows(dp, tdo + own, tv + now);
        wgmma_commit();
        const int later = rules.next_tile(after + 1, tiles, DQ_KEYS, least, greatest);
        if (later < tiles) copy((now + 2 * stage) % (4 * stage), later);
        copy_commit();
        wgmma_wait<1>();  // the scores, and dq of the tile before
        pass_on(group);
        const int u0 = j * DQ_KEYS;
        const bool inside = rules.inside(first + row, 16, u0, DQ_KEYS);
        probabilities(s, rules, scale2, inside, [&](int n, int i) {
            return Cell{first + row + g + 8 * (i / 2), u0 + n * 8 + c + i % 2, row_lse[i / 2]};
        });
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = first + row + g + 8 * (i / 2), u = u0 + n * 8 + c + i % 2;
                const float kept = DROPOUT ? rules.kept(t, u) : 1.0f;
                s[n][i] *= kept * dp[n][i] - row_delta[i / 2];
            }
        pack(ds, s);
        wgmma_fence();
        ask_columns(acc, ds, tk + now);
        wgmma_commit();
        landed();
        j = after, after = later;
    }
    my_turn(group);  // all of the warpgroup have read its queries
    if (group == 0) pass_on(group);
    wgmma_wait<0>();
    const float factor[2] = {scale, scale};
    store_rows(acc, factor, memory, row, dq + b * dq_b + h * dq_h, dq_t, first, T, d);
}

// Grid: (Hkv, B, key tiles). The queries of all `heads` of the group are walked over one after the
// other, so a gradient is summed in one place and in one order. With heads = 1 the grid is (Hq, B, key
// tiles), and what the block's one query head gives goes to dk_parts (B, S, Hq, d) and dv_parts.
KERNEL __launch_bounds__(THREADS, 1)
    attention_dkv(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                  const float* lse, const float* delta, elem* dk, i64 dk_b, i64 dk_t, i64 dk_h,
                  elem* dvalue, i64 dvalue_b, i64 dvalue_t, i64 dvalue_h, int heads,
                  float* dk_parts, float* dv_parts, u32 rising) {
    SHARED(memory);
    const u32 tk = shared_address(memory), tv = tk + OWN * PITCH, stages = tv + OWN * PITCH;
    const u32 stage_bytes = 2 * QUERIES * PITCH;  // queries, then gradients of outputs
    const u32 rows = 2 * OWN * PITCH + 3 * stage_bytes;  // where (3 stages, 2, QUERIES) floats are:
                                                         // lse, then delta
    const int h0 = blockIdx.x * heads, hk = h0 / (Hq / Hkv), b = blockIdx.y;
    const int first = key_tile(MASKED ? 0 : rising) * OWN;  // no register for it
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4 * 2;
    const u32 own = uniform(threadIdx.x / 128) * 64 * 128;
    const float scale2 = scale * LOG2E;
    const int last = first + OWN < S ? first + OWN - 1 : S - 1;
    const Rules shared_rules = ATTENTION_RULES(b, h0);
    const int begin = shared_rules.query_begin(first) / QUERIES * QUERIES;
    const int end = shared_rules.query_end(last + 1);

    // The queries of head h from t0 on; behind the last of them is h = h0 + heads.
    struct Tile {
        int h, t0;
    };
    // The first tile from one on, or after it, that has one of the documents of the block's keys.
    auto next = [&](Tile at, bool after) {
        int least = 0, greatest = 0;  // not kept, for want of registers
        if (MASKED && ranges) shared_rules.span(first, last, least, greatest);
        for (;; after = true) {
            if (after) at.t0 += QUERIES;
            if (at.t0 >= end) at.h = begin < end ? at.h + 1 : h0 + heads, at.t0 = begin;
            const int t1 = at.t0 + QUERIES < T ? at.t0 + QUERIES : T;
            if (at.h == h0 + heads ||
                !shared_rules.apart(least, greatest, at.t0 + S - T, t1 - 1 + S - T))
                return at;
        }
    };

    // Start on a tile: its rows of q and dout, and their lse and delta; rows beyond T are hidden by
    // the rules.
    auto fetch_queries = [&](const Tile& tile, int turn) {
        const u32 stage = stages + turn * stage_bytes;
        fetch<QUERIES>(stage, q + b * q_b + tile.h * q_h, q_t, tile.t0, T, d);
        fetch<QUERIES>(stage + QUERIES * PITCH, dout + b * dout_b + tile.h * dout_h, dout_t, tile.t0, T,
                       dv);
        if (threadIdx.x < 2 * QUERIES) {  // whole warps: first lse, then delta
            const int t = tile.t0 + threadIdx.x % QUERIES;
            const float* from = threadIdx.x < QUERIES ? lse : delta;
            copy_async4(tk + rows + (turn * 2 * QUERIES + threadIdx.x) * 4,
                        t < T ? from + ((i64)b * Hq + tile.h) * T + t : from, t < T);
        }
    };

    fetch<OWN>(tk, k + b * k_b + hk * k_h, k_t, first, S, d);
    fetch<OWN>(tv, v + b * v_b + hk * v_h, v_t, first, S, dv);
    Tile tile = next(Tile{h0, begin}, false);
    if (tile.h < h0 + heads) fetch_queries(tile, 0);
    copy_commit();
    float acc_k[GROUPS][4], acc_v[GROUPS][4];
    u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
    clear(acc_k);
    clear(acc_v);
    for (int turn = 0; tile.h < h0 + heads;) {
        const Tile after = next(tile, true);
        const int next_turn = turn == 2 ? 0 : turn + 1;
        landed();
        sync_block();  // this tile; the one before but one has been read
        if (after.h < h0 + heads) fetch_queries(after, next_turn);
        copy_commit();
        const u32 tq = stages + turn * stage_bytes, tdo = tq + QUERIES * PITCH;
        const float* row_lse = (const float*)(memory + rows) + turn * 2 * QUERIES;
        const int t0 = tile.t0;
        const Rules rules = ATTENTION_RULES(b, tile.h);
        const bool inside = rules.inside(t0, QUERIES, first + row, 16);
        float s[QUERIES / 8][4], dp[QUERIES / 8][4];  // transposed: rows are keys
        wgmma_fence();
        ask_rows(s, tk + own, tq);
        wgmma_commit();
        ask_rows(dp, tv + own, tdo);
        wgmma_commit();
        float lse2[QUERIES / 8][2];  // read while the scores are made, where registers are left
#pragma unroll
        for (int n = 0; PLENTY && n < QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) lse2[n][i] = row_lse[n * 8 + c + i] * LOG2E;
        wgmma_wait<1>();  // the scores, and what the tile before gave
        probabilities(s, rules, scale2, inside, [&](int n, int i) {
            const int column = n * 8 + c + i % 2;
            return Cell{t0 + column, first + row + g + 8 * (i / 2),
                        PLENTY ? lse2[n][i % 2] : row_lse[column] * LOG2E};
        });
        if (DROPOUT) wgmma_wait<0>();
#pragma unroll
        for (int n = 0; DROPOUT && n < QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = n * 8 + c + i % 2, u = first + row + g + 8 * (i / 2);
                const float kept = rules.kept(t0 + column, u), pi = s[n][i];
                s[n][i] = pi * kept;
                dp[n][i] = pi * (kept * dp[n][i] - row_lse[QUERIES + column]);
            }
        pack(p, s);
        wgmma_fence();
        ask_columns(acc_v, p, tdo);
        wgmma_commit();
        if (!DROPOUT) wgmma_wait<1>();  // dp
#pragma unroll
        for (int n = 0; !DROPOUT && n < QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                dp[n][i] = s[n][i] * (dp[n][i] - row_lse[QUERIES + n * 8 + c + i % 2]);
        pack(ds, dp);
        wgmma_fence();
        ask_columns(acc_k, ds, tq);
        wgmma_commit();
        tile = after, turn = next_turn;
    }
    wgmma_wait<0>();
    landed();  // with no tiles: all of the keys and values
    sync_block();  // they have been read
    if (dk_parts) {
        store_floats(acc_k, dk_parts + ((i64)b * S * Hq + h0) * d, (i64)Hq * d, first + row, S, d);
        store_floats(acc_v, dv_parts + ((i64)b * S * Hq + h0) * dv, (i64)Hq * dv, first + row, S, dv);
        return;
    }
    const float factor[2] = {scale, scale}, one[2] = {1.0f, 1.0f};
    store_rows(acc_k, factor, memory, row, dk + b * dk_b + hk * dk_h, dk_t, first, S, d);
    store_rows(acc_v, one, memory + OWN * PITCH, row, dvalue + b * dvalue_b + hk * dvalue_h,
               dvalue_t, first, S, dv);
}
