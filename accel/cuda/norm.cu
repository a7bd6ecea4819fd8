// RMSNorm and LayerNorm. A block owns a row at a time, a thread PACK columns of it at a stride of
// the block; sums are over the block in a fixed order, in float.
//
// Forward reads x and writes y: 2·D·sizeof(elem) bytes a row from and to memory. Backward reads x,
// dy and, where it is given, plus, the gradient that x receives from elsewhere, and writes dx. Its
// blocks stay for many rows and sum up Σ dy·n (and Σ dy) of their rows; each column belongs to one
// thread. Where a thread has no more than one pack of a row (`once`), what it has read and its sums
// stay in registers; of wider rows it reads again, from the L1 cache, and its sums are in shared
// memory. While it is at a row, the next one comes into the L2 cache.
// Element k of pack j lies at k·packs + j, so that the lanes of a warp, on neighbouring packs, are on
// neighbouring banks. The partial sums leave as one row per block, for reduce.cu. How rows are dealt
// out depends on their number and width alone.

template <class F> DEVICE void columns(i64 D, F f) {
    for (i64 i = (i64)threadIdx.x * PACK; i < D; i += (i64)blockDim.x * PACK) f(i);
}

// Elements i … i + PACK - 1 of an array of D floats, zeros from D on. `wide`: D % PACK == 0, and the
// array is aligned.
DEVICE void load_floats(const float* from, i64 i, i64 D, bool wide, float (&v)[PACK]) {
    if (wide) {
        for (int k = 0; k < PACK; k += 4) {
            const Pack16 four = load16(from + i + k);
            for (int j = 0; j < 4; ++j) v[k + j] = bits_to_float(four.w[j]);
        }
    } else {
        for (int k = 0; k < PACK; ++k) v[k] = i + k < D ? from[i + k] : 0.0f;
    }
}

DEVICE bool one_pack(i64 D) { return D <= (i64)blockDim.x * PACK; }

// The block's sums of the columns of pack i / PACK: the element k of `sums`, laid out as said above.
DEVICE float& sum_of(float* sums, i64 i, i64 D, int k) {
    const int packs = (int)((D + PACK - 1) / PACK);
    return sums[k * packs + (int)i / PACK];
}

// Write the block's sums of D columns to a row of floats.
DEVICE void store_sums(float* to, float* sums, i64 i, i64 D, bool wide) {
    if (wide) {
        for (int k = 0; k < PACK; k += 4) {
            Pack16 four;
            for (int j = 0; j < 4; ++j) four.w[j] = float_to_bits(sum_of(sums, i, D, k + j));
            store16(to + i + k, four);
        }
    } else {
        for (int k = 0; k < PACK; ++k)
            if (i + k < D) to[i + k] = sum_of(sums, i, D, k);
    }
}

// Grid: one block a row. stats (N): the reciprocal root mean square.
KERNEL rmsnorm_forward(const elem* x, const float* gain, elem* y, float* rstd, i64 D, float eps) {
    SHARED(memory);
    float* scratch = (float*)memory;
    const i64 row = blockIdx.x;
    const bool wide = D % PACK == 0 && aligned(x) && aligned(y);
    const bool floats = D % PACK == 0 && aligned(gain);
    const bool once = one_pack(D);
    float squares = 0.0f, v[PACK], g[PACK];
    columns(D, [&](i64 i) {
        if (once) load_floats(gain, i, D, floats, g);  // under way while x is waited for
        load_pack(x + row * D, i, D, wide, v);
        for (int k = 0; k < PACK; ++k) squares += v[k] * v[k];
    });
    const float r = 1.0f / sqrtf(block_sum(squares, scratch) / (float)D + eps);
    columns(D, [&](i64 i) {
        if (!once) {
            load_floats(gain, i, D, floats, g);
            load_pack(x + row * D, i, D, wide, v);
        }
        for (int k = 0; k < PACK; ++k) v[k] = v[k] * r * g[k];
        store_pack(y + row * D, i, D, wide, v);
    });
    if (threadIdx.x == 0) rstd[row] = r;
}

// dx = plus + r (dn - n mean(dn n)), dn = dy g, n = x r; plus may be null. partial (gridDim.x, D)
// receives Σ dy n of the block's rows. Shared memory: 64 floats, and D rounded up to whole packs.
KERNEL rmsnorm_backward(const elem* dy, const elem* x, const float* gain, const float* rstd,
                        const elem* plus, elem* dx, float* partial, i64 N, i64 D) {
    SHARED(memory);
    float* scratch = (float*)memory;
    float* dgain = scratch + 64;
    const bool wide =
        D % PACK == 0 && aligned(dy) && aligned(x) && aligned(dx) && aligned(plus);
    const bool floats = D % PACK == 0 && aligned(gain) && aligned(partial);
    const bool once = one_pack(D);
    Pack16 of_dy, of_x, of_plus = {};  // kept as bits, in half of the registers
    float d[PACK], v[PACK], more[PACK], g[PACK], mine[PACK] = {};
    columns(D, [&](i64 i) {
        load_floats(gain, i, D, floats, g);
        for (int k = 0; k < PACK; ++k) sum_of(dgain, i, D, k) = 0.0f;
    });
    float r = rstd[blockIdx.x];
    int odd = 0;  // rows take turns with two scratches, so that one barrier a row will do
    for (i64 row = blockIdx.x; row < N; row += gridDim.x, odd = 1 - odd) {
        const i64 next = row + gridDim.x < N ? row + gridDim.x : row;
        const float next_r = rstd[next];
        float along = 0.0f;
        columns(D, [&](i64 i) {
            prefetch(dy + next * D + i);
            prefetch(x + next * D + i);
            if (plus) prefetch(plus + next * D + i);
            of_dy = load_bits(dy + row * D, i, D, wide);
            of_x = load_bits(x + row * D, i, D, wide);
            if (once && plus) of_plus = load_bits(plus + row * D, i, D, wide);
            if (!once) load_floats(gain, i, D, floats, g);
            unpack(of_dy, d);
            unpack(of_x, v);
            for (int k = 0; k < PACK; ++k) {
                const float n = v[k] * r;
                along += d[k] * g[k] * n;
                (once ? mine[k] : sum_of(dgain, i, D, k)) += d[k] * n;
            }
        });
        const float mean = block_sum_into(along, scratch + 32 * odd) / (float)D;
        columns(D, [&](i64 i) {
            if (!once) {
                of_dy = load_bits(dy + row * D, i, D, wide);
                of_x = load_bits(x + row * D, i, D, wide);
                if (plus) of_plus = load_bits(plus + row * D, i, D, wide);
                load_floats(gain, i, D, floats, g);
            }
            unpack(of_dy, d);
            unpack(of_x, v);
            unpack(of_plus, more);
            float to[PACK];
            for (int k = 0; k < PACK; ++k)
                to[k] = more[k] + r * (d[k] * g[k] - v[k] * r * mean);
            store_pack(dx + row * D, i, D, wide, to);
        });
        r = next_r;
    }
    columns(D, [&](i64 i) {
        for (int k = 0; once && k < PACK; ++k) sum_of(dgain, i, D, k) = mine[k];
        store_sums(partial + blockIdx.x * D, dgain, i, D, floats);
    });
}

// Grid: one block a row. The variance is that of the centred row, so that a large mean costs no
// digits.
KERNEL layernorm_forward(const elem* x, const float* gain, const float* bias, elem* y, float* mean,
                         float* rstd, i64 D, float eps) {
    SHARED(memory);
    float* scratch = (float*)memory;
    const i64 row = blockIdx.x;
    const bool wide = D % PACK == 0 && aligned(x) && aligned(y);
    const bool floats = D % PACK == 0 && aligned(gain) && aligned(bias);
    const bool once = one_pack(D);
    float total = 0.0f, squares = 0.0f, v[PACK];
    columns(D, [&](i64 i) {
        load_pack(x + row * D, i, D, wide, v);
        for (int k = 0; k < PACK; ++k) total += v[k];
    });
    const float m = block_sum(total, scratch) / (float)D;
    columns(D, [&](i64 i) {
        if (!once) load_pack(x + row * D, i, D, wide, v);
        const int there = i + PACK < D ? PACK : (int)(D - i);
        for (int k = 0; k < PACK; ++k)
            if (k < there) squares += (v[k] - m) * (v[k] - m);
    });
    const float r = 1.0f / sqrtf(block_sum(squares, scratch) / (float)D + eps);
    columns(D, [&](i64 i) {
        float g[PACK], b[PACK];
        load_floats(gain, i, D, floats, g);
        load_floats(bias, i, D, floats, b);
        if (!once) load_pack(x + row * D, i, D, wide, v);
        for (int k = 0; k < PACK; ++k) v[k] = (v[k] - m) * r * g[k] + b[k];
        store_pack(y + row * D, i, D, wide, v);
    });
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

// dx = plus + r (dn - mean(dn) - n mean(dn n)); plus may be null. partial (gridDim.x, 2, D) receives
// Σ dy n and Σ dy. Shared memory: 128 floats, and twice D rounded up to whole packs.
KERNEL layernorm_backward(const elem* dy, const elem* x, const float* gain, const float* mean,
                          const float* rstd, const elem* plus, elem* dx, float* partial, i64 N,
                          i64 D) {
    SHARED(memory);
    float* scratch = (float*)memory;
    float* dgain = scratch + 128;
    float* dbias = dgain + (D + PACK - 1) / PACK * PACK;
    const bool wide =
        D % PACK == 0 && aligned(dy) && aligned(x) && aligned(dx) && aligned(plus);
    const bool floats = D % PACK == 0 && aligned(gain) && aligned(partial);
    const bool once = one_pack(D);
    Pack16 of_dy, of_x, of_plus = {};  // kept as bits, in half of the registers
    float d[PACK], v[PACK], more[PACK], g[PACK], gains[PACK] = {}, shifts[PACK] = {};
    columns(D, [&](i64 i) {
        load_floats(gain, i, D, floats, g);
        for (int k = 0; k < PACK; ++k)
            sum_of(dgain, i, D, k) = sum_of(dbias, i, D, k) = 0.0f;
    });
    float m = mean[blockIdx.x], r = rstd[blockIdx.x];
    int odd = 0;  // as in rmsnorm_backward
    for (i64 row = blockIdx.x; row < N; row += gridDim.x, odd = 1 - odd) {
        const i64 next = row + gridDim.x < N ? row + gridDim.x : row;
        const float next_m = mean[next], next_r = rstd[next];
        float along = 0.0f, sum = 0.0f;
        columns(D, [&](i64 i) {
            prefetch(dy + next * D + i);
            prefetch(x + next * D + i);
            if (plus) prefetch(plus + next * D + i);
            of_dy = load_bits(dy + row * D, i, D, wide);
            of_x = load_bits(x + row * D, i, D, wide);
            if (once && plus) of_plus = load_bits(plus + row * D, i, D, wide);
            if (!once) load_floats(gain, i, D, floats, g);
            unpack(of_dy, d);
            unpack(of_x, v);
            for (int k = 0; k < PACK; ++k) {
                const float n = (v[k] - m) * r;
                along += d[k] * g[k] * n;
                sum += d[k] * g[k];
                (once ? gains[k] : sum_of(dgain, i, D, k)) += d[k] * n;
                (once ? shifts[k] : sum_of(dbias, i, D, k)) += d[k];
            }
        });
        block_sums_into(along, sum, scratch + 64 * odd);
        const float mean_along = along / (float)D, mean_dn = sum / (float)D;
        columns(D, [&](i64 i) {
            if (!once) {
                of_dy = load_bits(dy + row * D, i, D, wide);
                of_x = load_bits(x + row * D, i, D, wide);
                if (plus) of_plus = load_bits(plus + row * D, i, D, wide);
                load_floats(gain, i, D, floats, g);
            }
            unpack(of_dy, d);
            unpack(of_x, v);
            unpack(of_plus, more);
            float to[PACK];
            for (int k = 0; k < PACK; ++k)
                to[k] = more[k] + r * (d[k] * g[k] - mean_dn - (v[k] - m) * r * mean_along);
            store_pack(dx + row * D, i, D, wide, to);
        });
        m = next_m, r = next_r;
    }
    columns(D, [&](i64 i) {
        for (int k = 0; once && k < PACK; ++k)
            sum_of(dgain, i, D, k) = gains[k], sum_of(dbias, i, D, k) = shifts[k];
        store_sums(partial + blockIdx.x * 2 * D, dgain, i, D, floats);
        store_sums(partial + (blockIdx.x * 2 + 1) * D, dbias, i, D, floats);
    });
}
