// Read reference/study/tiled_attention.py first: m, l, lse and delta are its.
//
// Attention for any head widths and either element type, in float arithmetic: tiles of shared
// memory and one lane per key. This is the strict path and the plain statement of the algorithm
// (Dao et al. 2022); attention_mma.cu is the fast one.
//
// A tile is QUERIES × KEYS scores; a block has four warps of four queries each, and lane j of a warp
// has key j. Forward keeps for each query the maximum m and sum l of exp(s - m) over the keys so
// far, and rescales its output when m grows.

constexpr int QUERIES = 16, KEYS = 32, WARPS = 4, ROWS = QUERIES / WARPS;

// Copy `count` rows of width `width` from a strided array into shared memory, zeros from `n` on.
DEVICE void load_rows(float* to, int pitch, const elem* from, i64 stride, int first, int count,
                      int n, int width) {
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
        const int row = i / width, column = i % width;
        to[row * pitch + column] =
            first + row < n ? widen(from[(first + row) * stride + column]) : 0.0f;
    }
}

DEVICE float dot(const float* a, const float* b, int n) {
    float total = 0.0f;
    for (int i = 0; i < n; ++i) total += a[i] * b[i];
    return total;
}

// Grid: (Hq, B, query tiles). Shared memory: QUERIES (d + dv + KEYS + 1) +
// KEYS (d + 1 + dv) floats.
KERNEL attention_forward(ATTENTION_PARAMETERS, elem* out, float* lse) {
    SHARED(memory);
    float* tq = (float*)memory;                // (QUERIES, d)
    float* tk = tq + QUERIES * d;              // (KEYS, d + 1): lanes read rows, so pad
    float* tv = tk + KEYS * (d + 1);           // (KEYS, dv)
    float* to = tv + KEYS * dv;                // (QUERIES, dv), each element one lane's
    float* tp = to + QUERIES * dv;             // (QUERIES, KEYS + 1)
    const int h = blockIdx.x, b = blockIdx.y, group = Hq / Hkv;
    const int first = query_tile() * QUERIES;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * ROWS;
    const Rules rules = ATTENTION_RULES(b, h);
    load_rows(tq, d, q + b * q_b + h * q_h, q_t, first, QUERIES, T, d);
    float m[ROWS], l[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        m[r] = -INFINITY;
        l[r] = 0.0f;
        for (int c = lane; c < dv; c += 32) to[(row0 + r) * dv + c] = 0.0f;
    }
    const int end = rules.key_end(first + QUERIES < T ? first + QUERIES : T);
    for (int u0 = rules.key_begin(first) / KEYS * KEYS; u0 < end; u0 += KEYS) {
        sync_block();  // the tiles have been read
        load_rows(tk, d + 1, k + b * k_b + h / group * k_h, k_t, u0, KEYS, S, d);
        load_rows(tv, dv, v + b * v_b + h / group * v_h, v_t, u0, KEYS, S, dv);
        sync_block();
        const int u = u0 + lane;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = row0 + r, t = first + row;
            const bool may = rules.allows(t, u);
            float s = -INFINITY;
            if (may) s = scale * dot(tq + row * d, tk + lane * (d + 1), d) + rules.bias(t, u);
            const float top = fmaxf(m[r], warp_max(s));
            const float p = may ? expf(s - top) : 0.0f;
            const float shrink = m[r] == -INFINITY ? 0.0f : expf(m[r] - top);
            l[r] = l[r] * shrink + warp_sum(p);
            m[r] = top;
            tp[row * (KEYS + 1) + lane] = may ? p * rules.kept(t, u) : 0.0f;
            sync_warp();
            for (int c = lane; c < dv; c += 32) {
                float total = to[row * dv + c] * shrink;
                for (int j = 0; j < KEYS; ++j) total += tp[row * (KEYS + 1) + j] * tv[j * dv + c];
                to[row * dv + c] = total;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int t = first + row0 + r;
        if (t >= T) break;
        const float share = l[r] > 0.0f ? 1.0f / l[r] : l[r];  // a row of NaN stays NaN
        for (int c = lane; c < dv; c += 32)
            put(out + (((i64)b * T + t) * Hq + h) * dv + c, to[(row0 + r) * dv + c] * share);
        if (lane == 0)
            lse[((i64)b * Hq + h) * T + t] = m[r] == -INFINITY ? INFINITY : m[r] + logf(l[r]);
    }
}

// ranges[b, i] = the least and the greatest of documents[b, 32·i …] (S): a thread owns a pair.
KERNEL document_ranges(const int* documents, int* ranges, i64 pairs, int S) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    const int each = (S + RANGE - 1) / RANGE, first = (int)(i % each) * RANGE;
    const int* own = documents + i / each * S;
    int least = own[first], greatest = own[first];
    for (int u = first + 1; u < first + RANGE && u < S; ++u) {
        if (own[u] < least) least = own[u];
        if (own[u] > greatest) greatest = own[u];
    }
    ranges[2 * i] = least;
    ranges[2 * i + 1] = greatest;
}

// delta = Σ dout·out over a row: as many lanes a row, a power of two, as have PACK columns each, or a
// warp. Grid: (blocks over T·Hq rows, B).
KERNEL attention_delta(const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h, const elem* out,
                       float* delta, int T, int Hq, int dv, int lanes) {
    const int b = blockIdx.y, row = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    const int lane = threadIdx.x % lanes, t = row / Hq, h = row % Hq;
    const bool wide = (dout_b | dout_t | dout_h | dv) % PACK == 0 && aligned(dout) && aligned(out);
    float total = 0.0f;
    if (t < T) {
        const elem* from = dout + b * dout_b + t * dout_t + h * dout_h;
        for (int c = lane * PACK; c < dv; c += lanes * PACK) {
            float x[PACK], y[PACK];
            load_pack(from, c, dv, wide, x);
            load_pack(out + ((i64)b * T * Hq + row) * dv, c, dv, wide, y);
            for (int k = 0; k < PACK; ++k) total += x[k] * y[k];
        }
    }
    for (int mask = lanes / 2; mask; mask /= 2) total += shuffle_xor(total, mask);
    if (lane == 0 && t < T) delta[((i64)b * Hq + h) * T + t] = total;
}

// to = factor · Σ of part over the query heads of a group, in their order: part (B, S, Hq, width), a
// thread a pack of a row of `to` (B, S, Hkv, width), of which there are B·S·Hkv; width % PACK == 0.
KERNEL sum_heads(const float* part, elem* to, i64 to_b, i64 to_t, i64 to_h, i64 rows, int S, int Hkv,
                 int group, int width, float factor) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK, row = i / width;
    if (row >= rows) return;
    const int c = (int)(i % width);
    float total[PACK] = {};
    for (int g = 0; g < group; ++g)
        for (int k = 0; k < PACK; k += 4) {
            const Pack16 four = load16(part + (row * group + g) * width + c + k);
            for (int j = 0; j < 4; ++j) total[k + j] += bits_to_float(four.w[j]);
        }
    for (int k = 0; k < PACK; ++k) total[k] *= factor;
    const i64 u = row / Hkv % S, b = row / Hkv / S;
    store_pack(to + b * to_b + u * to_t + row % Hkv * to_h, c, width, true, total);
}

// One query against one key: what it adds to dv (p·κ) and to dq, dk (ds).
struct Slopes {
    float p, ds;
};

DEVICE Slopes slopes(const Rules& rules, int t, int u, const float* qr, const float* kr,
                     const float* dor, const float* vr, int d, int dv, float scale, float lse,
                     float delta) {
    if (!rules.allows(t, u)) return {0.0f, 0.0f};
    const float p = expf(scale * dot(qr, kr, d) + rules.bias(t, u) - lse);
    const float kept = rules.kept(t, u);
    return {p * kept, p * (kept * dot(dor, vr, dv) - delta)};
}

// Grid: (Hq, B, query tiles). Shared memory: QUERIES (2 d + dv + KEYS + 1) +
// KEYS (d + 1 + dv + 1) floats.
KERNEL attention_dq(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                    const float* lse, const float* delta, elem* dq, i64 dq_b, i64 dq_t, i64 dq_h) {
    SHARED(memory);
    float* tq = (float*)memory;          // (QUERIES, d)
    float* tdq = tq + QUERIES * d;       // (QUERIES, d), each element one lane's
    float* tdo = tdq + QUERIES * d;      // (QUERIES, dv)
    float* tk = tdo + QUERIES * dv;      // (KEYS, d + 1)
    float* tv = tk + KEYS * (d + 1);     // (KEYS, dv + 1)
    float* tds = tv + KEYS * (dv + 1);   // (QUERIES, KEYS + 1)
    const int h = blockIdx.x, b = blockIdx.y, group = Hq / Hkv;
    const int first = query_tile() * QUERIES;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * ROWS;
    const Rules rules = ATTENTION_RULES(b, h);
    load_rows(tq, d, q + b * q_b + h * q_h, q_t, first, QUERIES, T, d);
    load_rows(tdo, dv, dout + b * dout_b + h * dout_h, dout_t, first, QUERIES, T, dv);
    for (int i = threadIdx.x; i < QUERIES * d; i += blockDim.x) tdq[i] = 0.0f;
    const int end = rules.key_end(first + QUERIES < T ? first + QUERIES : T);
    for (int u0 = rules.key_begin(first) / KEYS * KEYS; u0 < end; u0 += KEYS) {
        sync_block();  // the tiles have been read
        load_rows(tk, d + 1, k + b * k_b + h / group * k_h, k_t, u0, KEYS, S, d);
        load_rows(tv, dv + 1, v + b * v_b + h / group * v_h, v_t, u0, KEYS, S, dv);
        sync_block();
        for (int r = 0; r < ROWS; ++r) {
            const int row = row0 + r, t = first + row;
            const i64 at = ((i64)b * Hq + h) * T + t;
            const Slopes x =
                slopes(rules, t, u0 + lane, tq + row * d, tk + lane * (d + 1), tdo + row * dv,
                       tv + lane * (dv + 1), d, dv, scale, t < T ? lse[at] : 0.0f,
                       t < T ? delta[at] : 0.0f);
            tds[row * (KEYS + 1) + lane] = x.ds;
            sync_warp();
            for (int c = lane; c < d; c += 32) {
                float total = tdq[row * d + c];
                for (int j = 0; j < KEYS; ++j)
                    total += tds[row * (KEYS + 1) + j] * tk[j * (d + 1) + c];
                tdq[row * d + c] = total;
            }
        }
    }
    sync_block();
    for (int r = 0; r < ROWS; ++r) {
        const int t = first + row0 + r;
        if (t >= T) break;
        for (int c = lane; c < d; c += 32)
            put(dq + b * dq_b + t * dq_t + h * dq_h + c, scale * tdq[(row0 + r) * d + c]);
    }
}

// Grid: (Hkv, B, key tiles). The block loops over the query heads of its group, so the gradients of
// a shared key are summed in one place and in one order. Shared memory: KEYS (2 d + 2 dv + 2) +
// QUERIES (d + dv + 2 (KEYS + 1)) floats.
KERNEL attention_dkv(ATTENTION_PARAMETERS, const elem* dout, i64 dout_b, i64 dout_t, i64 dout_h,
                     const float* lse, const float* delta, elem* dk, i64 dk_b, i64 dk_t, i64 dk_h,
                     elem* dvalue, i64 dvalue_b, i64 dvalue_t, i64 dvalue_h) {
    SHARED(memory);
    float* tk = (float*)memory;                // (KEYS, d + 1)
    float* tv = tk + KEYS * (d + 1);           // (KEYS, dv + 1)
    float* tdk = tv + KEYS * (dv + 1);         // (KEYS, d), each element one lane's
    float* tdv = tdk + KEYS * d;               // (KEYS, dv), the same
    float* tq = tdv + KEYS * dv;               // (QUERIES, d)
    float* tdo = tq + QUERIES * d;             // (QUERIES, dv)
    float* tp = tdo + QUERIES * dv;            // (QUERIES, KEYS + 1)
    float* tds = tp + QUERIES * (KEYS + 1);    // (QUERIES, KEYS + 1)
    const int hk = blockIdx.x, b = blockIdx.y, group = Hq / Hkv, first = key_tile() * KEYS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = warp * ROWS;
    const int key0 = warp * (KEYS / WARPS);
    load_rows(tk, d + 1, k + b * k_b + hk * k_h, k_t, first, KEYS, S, d);
    load_rows(tv, dv + 1, v + b * v_b + hk * v_h, v_t, first, KEYS, S, dv);
    for (int i = threadIdx.x; i < KEYS * d; i += blockDim.x) tdk[i] = 0.0f;
    for (int i = threadIdx.x; i < KEYS * dv; i += blockDim.x) tdv[i] = 0.0f;
    for (int h = hk * group; h < (hk + 1) * group; ++h) {
        const Rules rules = ATTENTION_RULES(b, h);
        const int end = rules.query_end(first + KEYS < S ? first + KEYS : S);
        for (int t0 = rules.query_begin(first) / QUERIES * QUERIES; t0 < end; t0 += QUERIES) {
            sync_block();  // the tiles have been read
            load_rows(tq, d, q + b * q_b + h * q_h, q_t, t0, QUERIES, T, d);
            load_rows(tdo, dv, dout + b * dout_b + h * dout_h, dout_t, t0, QUERIES, T, dv);
            sync_block();
            for (int r = 0; r < ROWS; ++r) {
                const int row = row0 + r, t = t0 + row;
                const i64 at = ((i64)b * Hq + h) * T + t;
                const Slopes x =
                    slopes(rules, t, first + lane, tq + row * d, tk + lane * (d + 1),
                           tdo + row * dv, tv + lane * (dv + 1), d, dv, scale,
                           t < T ? lse[at] : 0.0f, t < T ? delta[at] : 0.0f);
                tp[row * (KEYS + 1) + lane] = x.p;
                tds[row * (KEYS + 1) + lane] = x.ds;
            }
            sync_block();
            for (int j = key0; j < key0 + KEYS / WARPS; ++j) {
                for (int c = lane; c < d; c += 32)
                    for (int r = 0; r < QUERIES; ++r)
                        tdk[j * d + c] += tds[r * (KEYS + 1) + j] * tq[r * d + c];
                for (int c = lane; c < dv; c += 32)
                    for (int r = 0; r < QUERIES; ++r)
                        tdv[j * dv + c] += tp[r * (KEYS + 1) + j] * tdo[r * dv + c];
            }
        }
    }
    sync_block();  // with no tiles: the gradients have been cleared
    for (int j = key0; j < key0 + KEYS / WARPS && first + j < S; ++j) {
        const i64 u = first + j;
        for (int c = lane; c < d; c += 32)
            put(dk + b * dk_b + u * dk_t + hk * dk_h + c, scale * tdk[j * d + c]);
        for (int c = lane; c < dv; c += 32)
            put(dvalue + b * dvalue_b + u * dvalue_t + hk * dvalue_h + c, tdv[j * dv + c]);
    }
}
