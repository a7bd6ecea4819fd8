// Rows of logits: the loss and its gradient in place, and softmax. A block owns a row, a thread PACK
// of its entries at a stride of the block. The row is read twice (maximum and sum of exponentials in
// one pass, online) and written once. At V = 65,536 a row is 128 KiB, and the 1,056 rows that 132
// multiprocessors have under way are 138 MB: the second read comes from memory, too.

struct TopSum {
    float top, sum;  // max z and Σ exp(z - top)
};

DEVICE TopSum row_top_sum(const elem* z, i64 V, bool wide, float* scratch) {
    float top = -INFINITY, sum = 0.0f;
    for (i64 i = (i64)threadIdx.x * PACK; i < V; i += (i64)blockDim.x * PACK) {
        float v[PACK];
        load_pack(z, i, V, wide, v);
        float higher = top;
        for (int k = 0; k < PACK; ++k)
            if (i + k < V) higher = fmaxf(higher, v[k]);
        if (higher == -INFINITY) continue;  // only -inf so far: no weight
        sum *= expf(top - higher);
        top = higher;
        for (int k = 0; k < PACK; ++k)
            if (i + k < V) sum += expf(v[k] - top);
    }
    const float all = block_max(top, scratch);
    return {all, block_sum(top == -INFINITY ? 0.0f : sum * expf(top - all), scratch)};
}

// losses[row] = lse(z) - z[target]; with `gradient` the logits become softmax(z) - onehot(target).
// Rows that are masked, or have no such target, have no loss and a gradient of zero, and so has what
// lies behind the V logits of a row, which begins `width` after the one before.
KERNEL cross_entropy(elem* logits, const int* targets, const bool* mask, float* losses, i64 V,
                     i64 width, int gradient) {
    SHARED(memory);
    float* scratch = (float*)memory;
    const i64 row = blockIdx.x;
    elem* z = logits + row * width;
    const bool wide = width % PACK == 0 && aligned(logits);
    const bool counts = (!mask || mask[row]) && targets[row] >= 0 && targets[row] < V;
    float top = 0.0f, sum = 1.0f;
    const int target = counts ? targets[row] : -1;
    if (counts) {
        const TopSum all = row_top_sum(z, V, wide, scratch);
        top = all.top;
        sum = all.sum;
    }
    if (threadIdx.x == 0) losses[row] = counts ? top + logf(sum) - widen(z[target]) : 0.0f;
    if (!gradient) return;
    sync_block();  // the target's logit has been read
    const float share = counts ? 1.0f / sum : 0.0f;
    for (i64 i = (i64)threadIdx.x * PACK; i < width; i += (i64)blockDim.x * PACK) {
        float v[PACK];
        if (counts) load_pack(z, i, V, wide, v);
        for (int k = 0; k < PACK; ++k) {
            v[k] = counts && i + k < V ? expf(v[k] - top) * share : 0.0f;
            if (i + k == target) v[k] -= 1.0f;
        }
        store_pack(z, i, width, wide, v);
    }
}

KERNEL softmax(const elem* x, elem* y, i64 V) {
    SHARED(memory);
    float* scratch = (float*)memory;
    const elem* z = x + blockIdx.x * V;
    const bool wide = V % PACK == 0 && aligned(x) && aligned(y);
    const TopSum all = row_top_sum(z, V, wide, scratch);
    for (i64 i = (i64)threadIdx.x * PACK; i < V; i += (i64)blockDim.x * PACK) {
        float v[PACK];
        load_pack(z, i, V, wide, v);
        for (int k = 0; k < PACK; ++k) v[k] = expf(v[k] - all.top) / all.sum;
        store_pack(y + blockIdx.x * V, i, V, wide, v);
    }
}
