// Read reference/study/tiled_attention.py first: lse and delta are its.
//
// What the attention kernels share: who may see whom, the bias, the dropout, and their parameters.
//
// Arrays are (B, T, H, d) with any strides but one along d; strides count elements: q_b, q_t, q_h are
// those of q along B, T and H. The launcher finds parameters by their names. lse is (B, Hq, T) float:
// the natural logarithm of Σ exp of a row's scores, +inf for a row that sees nothing, which makes all
// its probabilities exp(s - lse) zero. delta is (B, Hq, T) float: Σ dout·out.

// A grid is (heads, B, tiles). The hardware hands blocks out in the order x, y, z, so those of one
// tile, all about equally long, come one after the other; of causal attention the longest come first,
// the last tile of queries and the first of keys, and the shortest fill the gaps at the end. The first
// `rising` of them come in the reverse of that order: order.py says why.
DEVICE int key_tile(u32 rising = 0) {
    const u32 z = blockIdx.z;
    return z < rising ? rising - 1 - z : z;
}
DEVICE int query_tile(u32 rising = 0) { return gridDim.z - 1 - key_tile(rising); }

// What a variant is compiled for; what is off costs nothing.
#ifndef MASKED
#define MASKED 1  // there may be a key mask or documents
#endif
#ifndef ALIBI
#define ALIBI 1
#endif
#ifndef DROPOUT
#define DROPOUT 1
#endif

constexpr int RANGE = 32;  // positions whose documents are summed up in a pair of ranges

// The parameters that the forward, dq and dk/dv kernels begin with.
#define ATTENTION_PARAMETERS                                                                    \
    const elem *q, i64 q_b, i64 q_t, i64 q_h, const elem *k, i64 k_b, i64 k_t, i64 k_h,         \
        const elem *v, i64 v_b, i64 v_t, i64 v_h, const float *alibi, const bool *key_mask,     \
        const int *documents, const int *ranges, int T, int S, int Hq, int Hkv, int d, int dv,  \
        int behind, int ahead, float scale, int dropping, float keep_scale, u32 threshold,      \
        u32 sample, u32 step, u32 site, u32 k0, u32 k1

// The rules of one (batch, query head). Query t stands at position t + S - T and sees the keys from
// `behind` positions before it to `ahead` after it, if the other rules allow: causal attention has
// ahead = 0, a window w behind = w - 1, and what has no limit reaches over all.
struct Rules {
    const bool* key_mask;  // (S) of this batch, or null
    const int* documents;  // (S) of this batch, or null
    const int* ranges;     // (tiles of RANGE, 2) least and greatest of them, or null
    float slope;
    int T, S, behind, ahead, dropping;
    float keep_scale;
    u32 threshold, sample, step, site, k0, k1;
    u64 first_bit;  // index of (head, 0, 0) among the (Hq, T, S) bits of the sample

    DEVICE bool allows(int t, int u) const {
        // one comparison without a branch: a distance below -ahead wraps. With masks it would take
        // registers that dk, dv by mma.sync have not.
        if (!MASKED)
            return (t < T) & (u < S) & ((u32)(t + S - T - u + ahead) <= (u32)(behind + ahead));
        if (t >= T || u >= S) return false;
        const int distance = t + S - T - u;
        if (distance > behind || -distance > ahead) return false;
        if (key_mask && !key_mask[u]) return false;
        return !documents || documents[u] == documents[t + S - T];
    }

    // Whether all of n queries from t on may see all of m keys from u on, as far as positions and the
    // ranges of documents tell.
    DEVICE bool inside(int t, int n, int u, int m) const {
        if (t + n > T || u + m > S || t + n - 1 + S - T - u > behind ||
            u + m - 1 - (t + S - T) > ahead)
            return false;
        return !MASKED || (!key_mask && (!documents || together(t + S - T, n, u, m)));
    }

    // Whether n positions from p on and m from u on are all of one document.
    DEVICE bool together(int p, int n, int u, int m) const {
        int least, greatest, low, high;
        if (!ranges) return false;
        span(p, p + n - 1, least, greatest);
        span(u, u + m - 1, low, high);
        return least == greatest && low == least && high == least;
    }

    // The range of keys that queries first … end - 1 can see, by position: keys_of in
    // reference/visibility.py.
    DEVICE int key_begin(int first) const { return within(first + S - T - behind, S); }
    DEVICE int key_end(int end) const { return within(end + S - T + ahead, S); }

    // The range of queries that can see keys first … end - 1: queries_of.
    DEVICE int query_begin(int first) const { return within(first - (S - T) - ahead, T); }
    DEVICE int query_end(int end) const { return within(end - (S - T) + behind, T); }

    DEVICE static int within(int x, int n) { return x < 0 ? 0 : x < n ? x : n; }

    // The least and the greatest document of positions first … last.
    DEVICE void span(int first, int last, int& least, int& greatest) const {
        least = ranges[first / RANGE * 2], greatest = ranges[first / RANGE * 2 + 1];
        for (int i = first / RANGE + 1; i <= last / RANGE; ++i) {
            if (ranges[2 * i] < least) least = ranges[2 * i];
            if (ranges[2 * i + 1] > greatest) greatest = ranges[2 * i + 1];
        }
    }

    // Whether positions first … last have no document between least and greatest: nothing passes
    // between them and what those two were taken of, in whatever order documents come.
    DEVICE bool apart(int least, int greatest, int first, int last) const {
        if (!MASKED || !ranges) return false;
        int low, high;
        span(first, last, low, high);
        return low > greatest || high < least;
    }

    // The first tile of keys from j on, each `keys` long, that is not apart from least … greatest.
    DEVICE int next_tile(int j, int tiles, int keys, int least, int greatest) const {
        for (; j < tiles; ++j) {
            const int end = j * keys + keys < S ? j * keys + keys : S;
            if (!apart(least, greatest, j * keys, end - 1)) break;
        }
        return j;
    }

    // What ALiBi adds to the score: nothing without it, as the slope is 0 then.
    DEVICE float bias(int t, int u) const { return -slope * (float)(t + S - T - u); }

    // What dropout multiplies the probability by.
    DEVICE float kept(int t, int u) const {
        if (!dropping) return 1.0f;
        const u64 i = first_bit + (u64)t * (u64)S + (u64)u;
        const Words words = philox((u32)(i >> 2), sample, step, site, k0, k1);
        const u32 which = (u32)i & 3;
        const u32 word = which == 0   ? words.w[0]
                         : which == 1 ? words.w[1]
                         : which == 2 ? words.w[2]
                                      : words.w[3];
        return word >= threshold ? keep_scale : 0.0f;
    }
};

#define ATTENTION_RULES(b, h)                                                                  \
    Rules {                                                                                    \
        key_mask ? key_mask + (i64)(b) * S : nullptr,                                          \
            documents ? documents + (i64)(b) * S : nullptr,                                    \
            ranges ? ranges + (i64)(b) * ((S + RANGE - 1) / RANGE) * 2 : nullptr,              \
            alibi ? alibi[h] : 0.0f, T, S, behind, ahead, dropping, keep_scale, threshold,     \
            sample + (u32)(b), step, site, k0, k1, (u64)(h) * (u64)T * (u64)S                  \
    }
