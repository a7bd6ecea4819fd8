// A token of each row of a batch, and the KV cache that it reads and extends: reference/kv.py.
//
// positions (B) int says where each row's token stands. It is read here, not by the launcher, so that
// the launches of a token are the same for every position: decode.py records them once. Strides count
// elements; along d they are one.

// PART and MORE are decode.py's: the slots that a block looks at, with as many threads for each of
// its query heads, and what a part leaves of a head beside its d sums, the greatest score and Σ exp.
constexpr int PART = 128, MORE = 2;
constexpr int TOGETHER = 4;  // loads of a thread that are under way together
constexpr int LINE = 128;    // bytes that come together into the second-level cache

// Slot positions[b] % S of k and v (B, S, Hkv, d) = the newest key and value (B, Hkv, d). A thread
// owns PACK elements of both. Grid: (blocks over Hkv·d, B).
KERNEL keep(const elem* key, i64 key_b, i64 key_h, const elem* value, i64 value_b, i64 value_h,
            elem* k, i64 k_b, i64 k_t, i64 k_h, elem* v, i64 v_b, i64 v_t, i64 v_h,
            const int* positions, int S, int Hkv, int d) {
    const int packs = (d + PACK - 1) / PACK, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= Hkv * packs) return;
    const int h = i / packs, c = i % packs * PACK, b = blockIdx.y;
    const i64 slot = positions[b] % S;
    const elem* const from[2] = {key + b * key_b + h * key_h, value + b * value_b + h * value_h};
    elem* const to[2] = {k + b * k_b + slot * k_t + h * k_h, v + b * v_b + slot * v_t + h * v_h};
    for (int which = 0; which < 2; ++which) {
        float x[PACK];
        load_pack(from[which], c, d, aligned(from[which]), x);
        store_pack(to[which], c, d, aligned(to[which]), x);
    }
}

// Softmax over the visible ones of PART slots, for some query heads of one key head: of each the
// greatest score m, l = Σ exp(s - m), and Σ exp(s - m) v, to part (B, Hq, parts, d + MORE), in the order
// (m, l, sums). Slots that nothing was written to are not looked at, and a block that has no others
// leaves nothing.
//
// PART threads have a head. As many lanes as have PACK columns each, a power of two, share a slot; of
// `width` columns, theirs together, d is `padded` to whole ones. Grid: (Hkv · groups of heads, B,
// parts). Shared memory: padded + PART + PART PACK floats a head.
KERNEL __launch_bounds__(8 * PART)
attend_parts(const elem* q, i64 q_b, i64 q_h, const elem* k, i64 k_b, i64 k_t, i64 k_h,
             const elem* v, i64 v_b, i64 v_t, i64 v_h, const float* alibi, const int* positions,
             float* part, int S, int Hq, int Hkv, int d, int window, float scale, int lanes) {
    SHARED(memory);
    const int width = lanes * PACK, padded = (d + width - 1) / width * width;
    const int heads = blockDim.x / PART, own = threadIdx.x / PART, thread = threadIdx.x % PART;
    float* const tq = (float*)memory + own * (padded + PART + PART * PACK);  // (padded), scaled
    float* const tp = tq + padded;  // (PART) scores, then their exponentials
    float* const sums = tp + PART;  // (PART / lanes, width)
    const int group = Hq / Hkv, chunks = (group + heads - 1) / heads, b = blockIdx.y;
    const int hk = blockIdx.x / chunks, within = blockIdx.x % chunks * heads + own;
    const int h = hk * group + within, u0 = blockIdx.z * PART, position = positions[b];
    if (u0 > position) return;
    const bool works = within < group;  // else there is no such head, but threads that must meet
    const int end = position < S ? position + 1 : S;  // of the slots that were written
    const elem* const keys = k + b * k_b + hk * k_h;
    const elem* const values = v + b * v_b + hk * v_h;
    // all rows are asked for before the first is waited for, a cache line a thread
    const int lines = (d * (int)sizeof(elem) + LINE - 1) / LINE;
    for (int i = threadIdx.x; i < PART * lines; i += blockDim.x) {
        const int u = u0 + i / lines, c = i % lines * (LINE / (int)sizeof(elem));
        if (u >= end) break;
        prefetch(keys + u * k_t + c);
        prefetch(values + u * v_t + c);
    }
    for (int c = thread; c < padded; c += PART)
        tq[c] = works && c < d ? scale * widen(q[b * q_b + h * q_h + c]) : 0.0f;
    const bool wide_k = k_t % PACK == 0 && aligned(keys);
    const bool wide_v = v_t % PACK == 0 && aligned(values);
    const int each = PART / lanes, first = thread / lanes, column = thread % lanes * PACK;
    sync_block();

    for (int j0 = first; j0 < PART; j0 += each * TOGETHER) {
        float score[TOGETHER] = {};
        for (int c = column; c < padded; c += width) {
            Pack16 bits[TOGETHER];
            float x[PACK], y[PACK];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int u = u0 + j0 + n * each;
                bits[n] = {};
                if (u < end) bits[n] = load_bits(keys + u * k_t, c, d, wide_k);
            }
            for (int i = 0; i < PACK; i += 4) {
                const Pack16 four = load16(tq + c + i);
                for (int m = 0; m < 4; ++m) x[i + m] = bits_to_float(four.w[m]);
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                unpack(bits[n], y);
                for (int i = 0; i < PACK; ++i) score[n] += x[i] * y[i];
            }
        }
        for (int mask = lanes / 2; mask; mask /= 2)
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) score[n] += shuffle_xor(score[n], mask);
        if (column == 0)
            for (int n = 0; n < TOGETHER; ++n) {
                const int j = j0 + n * each, u = u0 + j;
                if (j >= PART) break;
                const int away = u < end ? (position - u) % S : 0;  // positions before the token's
                const bool seen = u < end && (!window || away < window);
                const float bias = alibi && works ? alibi[h] * away : 0.0f;
                tp[j] = seen ? score[n] - bias : -INFINITY;
            }
    }
    sync_block();

    float* const out = part + (((i64)b * Hq + h) * gridDim.z + blockIdx.z) * (d + MORE);
    float top = -INFINITY, p = 0.0f;
    for (int j = 0; j < PART; j += 4) {
        const Pack16 four = load16(tp + j);
        for (int i = 0; i < 4; ++i) top = fmaxf(top, bits_to_float(four.w[i]));
    }
    if (tp[thread] != -INFINITY) p = expf(tp[thread] - top);
    sync_block();  // the scores have been read
    tp[thread] = p;
    sync_block();

    float all = 0.0f;
    for (int c0 = 0; c0 < d; c0 += width) {
        float total[PACK] = {};
        for (int j0 = first; j0 < PART; j0 += each * TOGETHER) {
            Pack16 bits[TOGETHER];
            float y[PACK];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int u = u0 + j0 + n * each;
                bits[n] = {};
                if (u < end && j0 + n * each < PART)
                    bits[n] = load_bits(values + u * v_t, c0 + column, d, wide_v);
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const float share = j0 + n * each < PART ? tp[j0 + n * each] : 0.0f;
                unpack(bits[n], y);
                if (c0 == 0) all += share;
                for (int i = 0; i < PACK; ++i) total[i] += share * y[i];
            }
        }
        for (int i = 0; i < PACK; ++i) sums[first * width + column + i] = total[i];
        sync_block();
        for (int c = thread; works && c < width && c0 + c < d; c += PART) {
            float sum = 0.0f;
            for (int n = 0; n < each; ++n) sum += sums[n * width + c];
            out[MORE + c0 + c] = sum;
        }
        sync_block();  // the sums have been read
    }
    if (column == 0) sums[first] = all;
    sync_block();
    if (works && thread == 0) {
        float l = 0.0f;
        for (int n = 0; n < each; ++n) l += sums[n];
        out[0] = top;
        out[1] = l;
    }
}

// out (B, Hq, d) = what all parts give together; those behind a row's position are not looked at.
// A thread owns a column. Grid: (Hq, B). Shared memory: parts + 32 floats.
KERNEL attend_join(const float* part, const int* positions, elem* out, int parts, int d) {
    SHARED(memory);
    float* scratch = (float*)memory;
    float* shares = scratch + 32;  // what each part counts for
    const int used = positions[blockIdx.y] / PART + 1, n = used < parts ? used : parts;
    const i64 row = (i64)blockIdx.y * gridDim.x + blockIdx.x;
    const float* const from = part + row * parts * (d + MORE);
    float top = -INFINITY, total = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) top = fmaxf(top, from[i * (d + MORE)]);
    top = block_max(top, scratch);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float m = from[i * (d + MORE)];
        shares[i] = m == -INFINITY ? 0.0f : expf(m - top);
        total += shares[i] * from[i * (d + MORE) + 1];
    }
    total = block_sum(total, scratch);  // behind its barriers all shares are there
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < n; ++i) sum += shares[i] * from[i * (d + MORE) + MORE + c];
        put(out + row * d + c, sum / total);
    }
}
