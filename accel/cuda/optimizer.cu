// What handles the flat buffers: AdamW, the norm of the gradient, and adding micro-batches up. All
// of it is float32; a thread owns four neighbouring elements.

DEVICE void load4(const float* p, i64 i, i64 n, float (&v)[4]) {
    if (aligned(p) && i + 4 <= n) {
        const Pack16 pack = load16(p + i);
        for (int k = 0; k < 4; ++k) v[k] = bits_to_float(pack.w[k]);
    } else {
        for (int k = 0; k < 4; ++k) v[k] = i + k < n ? p[i + k] : 0.0f;
    }
}

DEVICE void store4(float* p, i64 i, i64 n, const float (&v)[4]) {
    if (aligned(p) && i + 4 <= n) {
        Pack16 pack;
        for (int k = 0; k < 4; ++k) pack.w[k] = float_to_bits(v[k]);
        store16(p + i, pack);
    } else {
        for (int k = 0; k < 4; ++k)
            if (i + k < n) p[i + k] = v[k];
    }
}

// One step of AdamW, reference/adamw.py. Reads 16 bytes and writes 12 for each parameter, and 2 for
// the bf16 copy of the first n_copied, where there is one.
// correct1 = 1/(1 - β₁ᵗ), correct2 = 1/(1 - β₂ᵗ).
KERNEL adamw(float* master, float* m, float* v, const float* grad, i64 n, i64 n_decayed, float lr,
             float beta1, float rest1, float beta2, float rest2, float eps, float weight_decay,
             float grad_scale, float correct1, float correct2, u16* copy, i64 n_copied) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) return;
    float w[4], a[4], b[4], g[4];
    load4(master, i, n, w);
    load4(m, i, n, a);
    load4(v, i, n, b);
    load4(grad, i, n, g);
    for (int k = 0; k < 4; ++k) {
        const float scaled = g[k] * grad_scale;
        a[k] = beta1 * a[k] + rest1 * scaled;
        b[k] = beta2 * b[k] + rest2 * scaled * scaled;
        float update = a[k] * correct1 / (sqrtf(b[k] * correct2) + eps);
        if (i + k < n_decayed) update += weight_decay * w[k];
        w[k] -= lr * update;
    }
    store4(master, i, n, w);
    store4(m, i, n, a);
    store4(v, i, n, b);
    if (i + 4 <= n_copied && ((u64)copy & 7) == 0) {
        u32* out = (u32*)(copy + i);
        out[0] = pack_bf16(w[0], w[1]);
        out[1] = pack_bf16(w[2], w[3]);
    } else {
        for (int k = 0; k < 4; ++k)
            if (i + k < n_copied) copy[i + k] = to_bf16(w[k]);
    }
}

KERNEL accumulate(float* dst, const float* src, i64 n) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) return;
    float a[4], b[4];
    load4(dst, i, n, a);
    load4(src, i, n, b);
    for (int k = 0; k < 4; ++k) a[k] += b[k];
    store4(dst, i, n, a);
}

KERNEL scale_into(float* dst, const float* src, i64 n, float factor) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) return;
    float a[4];
    load4(src, i, n, a);
    for (int k = 0; k < 4; ++k) a[k] *= factor;
    store4(dst, i, n, a);
}

// sums[block] = Σx² of the block's `each` elements, in double: each thread takes every blockDim-th
// element, then the threads are added up in pairs.
KERNEL square_sums(const float* x, double* sums, i64 n, i64 each) {
    SHARED(memory);
    double* scratch = (double*)memory;
    const i64 first = blockIdx.x * each;
    const i64 last = first + each < n ? first + each : n;
    double total = 0.0;
    for (i64 i = first + threadIdx.x; i < last; i += blockDim.x) total += (double)x[i] * x[i];
    scratch[threadIdx.x] = total;
    sync_block();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if ((int)threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        sync_block();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = scratch[0];
}
