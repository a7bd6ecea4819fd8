// Looking rows up in a table, and adding gradients up in it.

// out[n] = table[ids[n]], zeros for an id that the table (V, D) does not have: blocks along y are the
// tokens, a thread owns PACK columns.
KERNEL embedding_forward(const int* ids, const elem* table, elem* out, i64 N, i64 V, i64 D) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i >= D) return;
    const bool wide = D % PACK == 0 && aligned(table) && aligned(out);
    for (i64 n = blockIdx.y; n < N; n += gridDim.y) {
        const int id = ids[n];
        float v[PACK] = {};
        if (id >= 0 && id < V) load_pack(table + (i64)id * D, i, D, wide, v);
        store_pack(out + n * D, i, D, wide, v);
    }
}

// dtable[v] = Σ over n with ids[n] = v of dout[n], n ascending, onto what is there when
// `accumulate`. Without atomics: a block owns ROWS rows of the table and blockDim columns, reads all
// ids in order, and adds what belongs to it into shared memory, where each column is one thread's.
// All ids pass through the L2 cache once for each block; dout is read once.
// A round looks at LOOKS × blockDim ids, and a warp at LOOKS × 32 of them that follow one another, so
// that their loads are under way together and two barriers serve them all.
// Shared memory: (ROWS × blockDim) floats, then LOOKS × blockDim + 32 ints.
constexpr int ROWS = 64, LOOKS = 8;

KERNEL embedding_backward(const int* ids, const elem* dout, float* dtable, i64 N, i64 V, i64 D,
                          int accumulate) {
    SHARED(memory);
    const int width = blockDim.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    float* sums = (float*)memory;
    int* found = (int*)(sums + ROWS * width);
    int* counts = found + LOOKS * width;
    const i64 first = (i64)blockIdx.x * ROWS;
    const i64 column = (i64)blockIdx.y * width + thread;
    for (int r = 0; r < ROWS; ++r)
        sums[r * width + thread] =
            accumulate && first + r < V && column < D ? dtable[(first + r) * D + column] : 0.0f;
    for (i64 start = 0; start < N; start += LOOKS * width) {
        const int own = warp * LOOKS * 32 + lane;
        u32 votes[LOOKS];
        int count = 0;
#pragma unroll
        for (int k = 0; k < LOOKS; ++k) {
            const i64 n = start + own + k * 32;
            votes[k] = ballot(n < N && ids[n] >= first && ids[n] < first + ROWS);
            count += popcount(votes[k]);
        }
        if (lane == 0) counts[warp] = count;
        sync_block();
        int before = 0, total = 0;  // tokens of mine in earlier warps, and in all
        for (int w = 0; w < width / 32; ++w) {
            if (w < warp) before += counts[w];
            total += counts[w];
        }
        // the barrier above and this one keep found and counts apart from round to round
#pragma unroll
        for (int k = 0; k < LOOKS; ++k) {
            const u32 earlier = votes[k] & ((1u << lane) - 1);
            if (votes[k] >> lane & 1) found[before + popcount(earlier)] = own + k * 32;
            before += popcount(votes[k]);
        }
        sync_block();
        if (column < D) {
            // four loads are under way at once: a frequent token is a long chain of additions
            for (int j = 0; j < total; j += 4) {
                float d[4];
                int row[4];
                for (int k = 0; k < 4; ++k) {
                    const i64 token = start + found[j + k < total ? j + k : j];
                    row[k] = (int)(ids[token] - first);
                    d[k] = widen(dout[token * D + column]);
                }
                for (int k = 0; k < 4; ++k)
                    if (j + k < total) sums[row[k] * width + thread] += d[k];
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        if (first + r < V && column < D) dtable[(first + r) * D + column] = sums[r * width + thread];
}

// result[0]: the first n with ids[n] outside 0 … limit - 1 (N when there is none), result[1]: how
// many take part. Entries where `mask` is false are passed over. One block.
KERNEL check_ids(const int* ids, const bool* mask, i64 N, int limit, int* result) {
    SHARED(memory);
    int* firsts = (int*)memory;
    int* counts = firsts + blockDim.x;
    i64 first = N;
    int count = 0;
    for (i64 n = threadIdx.x; n < N; n += blockDim.x) {
        if (mask && !mask[n]) continue;
        ++count;
        if ((ids[n] < 0 || ids[n] >= limit) && n < first) first = n;
    }
    firsts[threadIdx.x] = (int)first;
    counts[threadIdx.x] = count;
    sync_block();
    if (threadIdx.x == 0) {
        for (int t = 1; t < (int)blockDim.x; ++t) {
            if (firsts[t] < firsts[0]) firsts[0] = firsts[t];
            counts[0] += counts[t];
        }
        result[0] = firsts[0];
        result[1] = counts[0];
    }
}
