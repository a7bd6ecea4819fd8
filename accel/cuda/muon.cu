// What stands around the products of Muon, reference/muon.py: passes over float32 matrices.

// m ← μ m + g and ahead = μ m + g, the sum as the next step would have it; g = grad_scale · grad.
// Reads 8 bytes an element and writes 8.
KERNEL nesterov(float* m, const float* grad, float* ahead, i64 n, float momentum,
                float grad_scale) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = grad_scale * grad[i];
    const float sum = momentum * m[i] + g;
    m[i] = sum;
    ahead[i] = momentum * sum + g;
}

// x ← x / max(√Σ sums, tiny): the norm stays on the device. Every block adds the sums up again, in
// their order.
KERNEL normalise(float* x, const double* sums, i64 n, i64 n_sums, float tiny) {
    SHARED(memory);
    float* factor = (float*)memory;
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (i64 j = 0; j < n_sums; ++j) total += sums[j];
        const double norm = sqrt(total);
        factor[0] = (float)(1.0 / (norm < tiny ? tiny : norm));  // NaN stays NaN
    }
    sync_block();
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor[0];
}

// y ← a y + b x.
KERNEL combine(float* y, const float* x, i64 n, float a, float b) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * y[i] + b * x[i];
}

// θ ← θ - (rate · x + decay · θ), θ the `width` columns of the master from `first`, whose rows are
// `columns` long; x (rows, width) has no gaps.
KERNEL descend(float* master, const float* x, i64 rows, i64 width, i64 columns, i64 first,
               float rate, float decay) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * width) return;
    float* theta = master + i / width * columns + first + i % width;
    *theta -= rate * x[i] + decay * *theta;
}
