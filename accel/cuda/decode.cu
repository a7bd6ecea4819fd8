// A token of each row of a batch, and the KV cache that it reads and extends: reference/kv.py.
//
// positions (B) int says where each row's token stands. It is read here, not by the launcher, so that
// the launches of a token are the same for every position: decode.py records them once. Strides count
// elements; along d they are one.

// PART and MORE are decode.py's: the slots that a block looks at, one a thread, and what a part leaves
// of a query head beside its d sums, the greatest score and Σ exp.
constexpr int PART = 128, MORE = 2;
constexpr int TOGETHER = 8;  // loads of a thread that are under way together
constexpr int LINE = 128;    // bytes that come together into the second-level cache

#ifndef HEADS
#define HEADS 8  // query heads that a block serves, at most
#endif

// Slot positions[b] % S of k and v (B, S, Hkv, d) = the newest key and value (B, Hkv, d). A thread
// owns PACK elements of both. Grid: (blocks over Hkv·d, B).
KERNEL write_slots(const elem* key, i64 key_b, i64 key_h, const elem* value, i64 value_b,
                   i64 value_h, elem* k, i64 k_b, i64 k_t, i64 k_h, elem* v, i64 v_b, i64 v_t,
                   i64 v_h, const int* positions, int S, int Hkv, int d) {
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

// Softmax over the visible ones of PART slots, for up to HEADS query heads of one key head: of each
// the greatest score m, l = Σ exp(s - m), and Σ exp(s - m) v, to part (B, Hq, parts, d + MORE), in the
// order (m, l, sums). Slots that nothing was written to are not looked at, and a block that has no
// others leaves nothing.
//
// A thread has a key's scores, of all heads, so that a key is read and unpacked once; of values, as
// many lanes as have PACK columns each, a power of two, share a slot, and `width` columns are theirs
// together. Grid: (Hkv · groups of HEADS, B, parts). Shared memory: HEADS (padded + PART + PART PACK)
// floats, padded being d in steps of PACK TOGETHER.
KERNEL attend_parts(const elem* q, i64 q_b, i64 q_h, const elem* k, i64 k_b, i64 k_t, i64 k_h,
                    const elem* v, i64 v_b, i64 v_t, i64 v_h, const float* alibi,
                    const int* positions, float* part, int S, int Hq, int Hkv, int d, int window,
                    float scale, int lanes) {
    SHARED(memory);
    const int padded = (d + PACK * TOGETHER - 1) / (PACK * TOGETHER) * (PACK * TOGETHER);
    float* const tq = (float*)memory;       // (HEADS, padded), scaled, zeros behind d
    float* const tp = tq + HEADS * padded;  // (HEADS, PART) scores, then their exponentials
    float* const sums = tp + HEADS * PART;  // (PART / lanes, HEADS, width)
    const int group = Hq / Hkv, chunks = (group + HEADS - 1) / HEADS, b = blockIdx.y;
    const int hk = blockIdx.x / chunks, h0 = hk * group + blockIdx.x % chunks * HEADS;
    const int heads = (hk + 1) * group - h0 < HEADS ? (hk + 1) * group - h0 : HEADS;
    const int u0 = blockIdx.z * PART, position = positions[b], thread = threadIdx.x;
    if (u0 > position) return;
    const int end = position < S ? position + 1 : S;  // of the slots that were written
    float* const out = part + (((i64)b * Hq + h0) * gridDim.z + blockIdx.z) * (d + MORE);
    const i64 pitch = (i64)gridDim.z * (d + MORE);
    const elem* const keys = k + b * k_b + hk * k_h;
    const elem* const values = v + b * v_b + hk * v_h;
    const int u = u0 + thread;
    // a row of each is asked for before the first is waited for
    for (int c = 0; u < end && c < d; c += LINE / (int)sizeof(elem)) {
        prefetch(keys + u * k_t + c);
        prefetch(values + u * v_t + c);
    }
    for (int i = thread; i < HEADS * padded; i += PART) {
        const int h = i / padded, c = i % padded;
        tq[i] = h < heads && c < d ? scale * widen(q[b * q_b + (h0 + h) * q_h + c]) : 0.0f;
    }
    const bool wide_k = k_t % PACK == 0 && aligned(keys);
    const bool wide_v = v_t % PACK == 0 && aligned(values);
    sync_block();

    const int away = u < end ? (position - u) % S : 0;  // positions before the token's
    const bool seen = u < end && (!window || away < window);
    float score[HEADS] = {};
    for (int c0 = 0; seen && c0 < d; c0 += PACK * TOGETHER) {
        Pack16 bits[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
            bits[n] = load_bits(keys + u * k_t, c0 + n * PACK, d, wide_k);
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            float x[PACK];
            unpack(bits[n], x);
#pragma unroll
            for (int h = 0; h < HEADS; ++h)
#pragma unroll
                for (int i = 0; i < PACK; i += 4) {
                    const Pack16 four = load16(tq + h * padded + c0 + n * PACK + i);
                    for (int m = 0; m < 4; ++m) score[h] += bits_to_float(four.w[m]) * x[i + m];
                }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
        if (h < heads)
            tp[h * PART + thread] =
                seen ? score[h] - (alibi ? alibi[h0 + h] * away : 0.0f) : -INFINITY;
    sync_block();

    const int lane = thread % 32;
    for (int h = thread / 32; h < heads; h += PART / 32) {
        float top = -INFINITY, total = 0.0f;
        for (int j = lane; j < PART; j += 32) top = fmaxf(top, tp[h * PART + j]);
        top = warp_max(top);
        for (int j = lane; j < PART; j += 32) {
            const float s = tp[h * PART + j], p = s == -INFINITY ? 0.0f : expf(s - top);
            tp[h * PART + j] = p;
            total += p;
        }
        total = warp_sum(total);
        if (lane == 0) {
            out[h * pitch] = top;
            out[h * pitch + 1] = total;
        }
    }

    const int width = lanes * PACK, column = thread % lanes * PACK, each = PART / lanes;
    for (int c0 = 0; c0 < d; c0 += width) {
        sync_block();  // the exponentials are there; of columns before, the sums have been read
        float total[HEADS][PACK] = {};
        for (int j0 = thread / lanes; j0 < PART && u0 + j0 < end; j0 += each * TOGETHER) {
            Pack16 bits[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int j = j0 + n * each;
                bits[n] = {};
                if (j < PART && u0 + j < end)
                    bits[n] = load_bits(values + (u0 + j) * v_t, c0 + column, d, wide_v);
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int j = j0 + n * each;
                float x[PACK];
                unpack(bits[n], x);
#pragma unroll
                for (int h = 0; h < HEADS; ++h) {
                    const float p = h < heads && j < PART ? tp[h * PART + j] : 0.0f;
#pragma unroll
                    for (int i = 0; i < PACK; ++i) total[h][i] += p * x[i];
                }
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
#pragma unroll
            for (int i = 0; i < PACK; ++i)
                sums[(thread / lanes * HEADS + h) * width + column + i] = total[h][i];
        sync_block();
        for (int i = thread; i < heads * width; i += PART) {
            const int h = i / width, c = i % width;
            float all = 0.0f;
            for (int n = 0; n < each; ++n) all += sums[(n * HEADS + h) * width + c];
            if (c0 + c < d) out[h * pitch + MORE + c0 + c] = all;
        }
    }
}

// out (B, Hq, d) = what all parts give together; those behind a row's position are not looked at.
// A thread owns a column. Grid: (Hq, B). Shared memory: 32 floats and parts more, in whole fours, as
// the compiler reads them.
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
