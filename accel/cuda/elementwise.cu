// Element-wise kernels. A thread owns PACK neighbouring elements: one 16-byte load and store each,
// so a kernel moves exactly the bytes of its arrays and runs at the speed of memory.

template <class F> DEVICE void map(const elem* x, elem* y, i64 n, F f) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= n) return;
    float v[PACK];
    load_pack(x, i, n, aligned(x), v);
    for (int k = 0; k < PACK; ++k) v[k] = f(v[k]);
    store_pack(y, i, n, aligned(y), v);
}

template <class F> DEVICE void map2(const elem* a, const elem* b, elem* y, i64 n, F f) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= n) return;
    float v[PACK], w[PACK];
    load_pack(a, i, n, aligned(a), v);
    load_pack(b, i, n, aligned(b), w);
    for (int k = 0; k < PACK; ++k) v[k] = f(v[k], w[k]);
    store_pack(y, i, n, aligned(y), v);
}

KERNEL add(const elem* a, const elem* b, elem* y, i64 n) {
    map2(a, b, y, n, [](float p, float q) { return p + q; });
}

// y (N, O) += bias (O). Blocks along x cover a row, along y the rows.
KERNEL add_bias(elem* y, const float* bias, i64 N, i64 O) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= O) return;
    const bool wide = O % PACK == 0 && aligned(y);
    for (i64 r = blockIdx.y; r < N; r += gridDim.y) {
        float v[PACK];
        load_pack(y + r * O, i, O, wide, v);
        for (int k = 0; k < PACK; ++k)
            if (i + k < O) v[k] += bias[i + k];
        store_pack(y + r * O, i, O, wide, v);
    }
}

KERNEL scale(const elem* x, elem* y, i64 n, float factor) {
    map(x, y, n, [=](float v) { return factor * v; });
}

KERNEL relu_forward(const elem* x, elem* y, i64 n) {
    map(x, y, n, [](float v) { return v > 0.0f || v != v ? v : 0.0f; });  // NaN stays NaN
}

KERNEL relu_backward(const elem* x, const elem* dy, elem* dx, i64 n) {
    map2(x, dy, dx, n, [](float v, float d) { return v > 0.0f ? d : 0.0f; });
}

// GELU, y = x Φ(x); Φ by erfc, since 1 + erf cancels for very negative x.
DEVICE float normal_cdf(float x) { return 0.5f * erfcf(-0.70710678118654752f * x); }

KERNEL gelu_forward(const elem* x, elem* y, i64 n) {
    map(x, y, n, [](float v) { return v * normal_cdf(v); });
}

KERNEL gelu_backward(const elem* x, const elem* dy, elem* dx, i64 n) {
    map2(x, dy, dx, n, [](float v, float d) {
        const float density = 0.39894228040143268f * expf(-0.5f * v * v);
        return d * (normal_cdf(v) + v * density);
    });
}

// GELU's tanh form: h = tanh(c (x + a x³)), y = ½ x (1 + h).
constexpr float TANH_C = 0.79788456080286536f, TANH_A = 0.044715f;

DEVICE float gelu_h(float x) { return tanhf(TANH_C * (x + TANH_A * x * x * x)); }

KERNEL gelu_tanh_forward(const elem* x, elem* y, i64 n) {
    map(x, y, n, [](float v) { return 0.5f * v * (1.0f + gelu_h(v)); });
}

KERNEL gelu_tanh_backward(const elem* x, const elem* dy, elem* dx, i64 n) {
    map2(x, dy, dx, n, [](float v, float d) {
        const float h = gelu_h(v);
        const float inner = TANH_C * (1.0f + 3.0f * TANH_A * v * v);
        return d * (0.5f * (1.0f + h) + 0.5f * v * (1.0f - h * h) * inner);
    });
}

// 1/(1 + exp(-x)) with neither overflow nor cancellation: no exponent is positive. For bf16 the GPU's
// own exponential and quotient, to a few units of float's last place, are exact enough, and IEEE's
// would take longer than the memory.
DEVICE float sigmoid(float x) {
#if BF16
    const float e = exp2_fast(-1.4426950408889634f * fabsf(x));
    return divide_fast(x < 0.0f ? e : 1.0f, 1.0f + e);
#else
    const float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
#endif
}

// SwiGLU: row r of x is [gate (F), up (F)]. Blocks along x cover a row, along y the rows.
KERNEL swiglu_forward(const elem* x, elem* y, i64 rows, i64 F) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= F) return;
    const bool wide = F % PACK == 0 && aligned(x) && aligned(y);
    for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
        float gate[PACK], up[PACK];
        load_pack(x + r * 2 * F, i, F, wide, gate);
        load_pack(x + r * 2 * F + F, i, F, wide, up);
        for (int k = 0; k < PACK; ++k) gate[k] *= sigmoid(gate[k]) * up[k];
        store_pack(y + r * F, i, F, wide, gate);
    }
}

KERNEL swiglu_backward(const elem* x, const elem* dy, elem* dx, i64 rows, i64 F) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= F) return;
    const bool wide = F % PACK == 0 && aligned(x) && aligned(dy) && aligned(dx);
    for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
        float gate[PACK], up[PACK], d[PACK];
        load_pack(x + r * 2 * F, i, F, wide, gate);
        load_pack(x + r * 2 * F + F, i, F, wide, up);
        load_pack(dy + r * F, i, F, wide, d);
        for (int k = 0; k < PACK; ++k) {
            const float s = sigmoid(gate[k]);
            const float dgate = d[k] * up[k] * s * (1.0f + gate[k] * (1.0f - s));
            up[k] = d[k] * gate[k] * s;
            gate[k] = dgate;
        }
        store_pack(dx + r * 2 * F, i, F, wide, gate);
        store_pack(dx + r * 2 * F + F, i, F, wide, up);
    }
}

// Dropout: element i of sample b owns word i % 4 of the counter (i / 4, sample + b, step, site);
// it is zeroed where the word is below the threshold. Blocks along y are the samples, each of them
// every gridDim.y-th.
KERNEL dropout(const elem* x, elem* y, i64 size, u32 batch, float keep_scale, u32 threshold,
               u32 sample, u32 step, u32 site, u32 k0, u32 k1) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= size) return;
    const bool wide = size % PACK == 0 && aligned(x) && aligned(y);
    for (u32 b = blockIdx.y; b < batch; b += gridDim.y) {
        const i64 row = (i64)b * size;
        float v[PACK];
        load_pack(x + row, i, size, wide, v);
        for (int k = 0; k < PACK; k += 4) {
            const Words words = philox((u32)((i + k) / 4), sample + b, step, site, k0, k1);
            for (int j = 0; j < 4; ++j)
                v[k + j] = words.w[j] >= threshold ? keep_scale * v[k + j] : 0.0f;
        }
        store_pack(y + row, i, size, wide, v);
    }
}

// Conversions between float and bfloat16, four elements a thread; the arrays are the kernel's types
// whatever `elem` is.
KERNEL to_bf16_array(const float* x, u16* y, i64 n) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n && aligned(x) && ((u64)y & 7) == 0) {
        const Pack16 v = load16(x + i);
        u32* out = (u32*)(y + i);
        out[0] = pack_bf16(bits_to_float(v.w[0]), bits_to_float(v.w[1]));
        out[1] = pack_bf16(bits_to_float(v.w[2]), bits_to_float(v.w[3]));
    } else {
        for (i64 j = i; j < i + 4 && j < n; ++j) y[j] = to_bf16(x[j]);
    }
}

KERNEL to_f32_array(const u16* x, float* y, i64 n) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (i64 j = i; j < i + 4 && j < n; ++j) y[j] = from_bf16(x[j]);
}
