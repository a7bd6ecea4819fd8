// Sums over rows in a fixed order, for the gradients of gains, shifts and biases: first each block
// sums a range of rows that depends on the shape alone, then the few partial rows are summed.

// partial (P, D) float from x (N, D): block (c, p) sums rows p·rows_each … of its columns; a thread
// owns PACK columns. x is read once.
KERNEL partial_sums(const elem* x, float* partial, i64 N, i64 D, i64 rows_each) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= D) return;
    const bool wide = D % PACK == 0 && aligned(x);
    const i64 first = blockIdx.y * rows_each;
    const i64 last = first + rows_each < N ? first + rows_each : N;
    float total[PACK] = {};
    for (i64 r = first; r < last; r += 4) {  // four rows are under way at once
        Pack16 rows[4];
        for (int k = 0; k < 4; ++k)
            if (r + k < last) rows[k] = load_bits(x + (r + k) * D, i, D, wide);
        for (int k = 0; k < 4; ++k) {
            if (r + k >= last) break;
            float v[PACK];
            unpack(rows[k], v);
            for (int j = 0; j < PACK; ++j) total[j] += v[j];
        }
    }
    for (int k = 0; k < PACK; ++k)
        if (i + k < D) partial[blockIdx.y * D + i + k] = total[k];
}

// out (first), then more (D - first) = Σ of partial (P, D) over its rows, onto what is there when
// `accumulate`. A block owns 32 columns, a lane each; each warp takes every row of its number modulo
// their number, and their sums are added in the order of warps. Shared memory: a float a thread.
KERNEL sum_rows(const float* partial, float* out, float* more, i64 P, i64 D, i64 first,
                int accumulate) {
    SHARED(memory);
    float* sums = (float*)memory;  // (warps, 32)
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const i64 i = (i64)blockIdx.x * 32 + lane;
    float total = 0.0f;
    if (i < D)
#pragma unroll 4  // loads under way at once
        for (i64 p = warp; p < P; p += warps) total += partial[p * D + i];
    sums[threadIdx.x] = total;
    sync_block();
    if (warp > 0 || i >= D) return;
    float* to = i < first ? out + i : more + (i - first);
    total = accumulate ? *to : 0.0f;
    for (int w = 0; w < warps; ++w) total += sums[w * 32 + lane];
    *to = total;
}
