// RoPE on x (B, T, H, d): pairs (2j, 2j + 1) of the first `turning` heads turn by the angle whose
// cosine and sine the table holds, the other heads are copied. Backward is the same with sign = -1.
//
// table (B or 1, T, d/2, 2) float, made on the host in double: 8191·ω in float is off by 1e-4. With
// starts (B) int it is one of all positions, and row b's first token stands at starts[b].
// A block owns a token, a thread PACK elements of its H·d at a stride of the block. x is read and
// written once; the table's row is shared by all heads of the token.
KERNEL rope(const elem* x, const float* table, const int* starts, elem* y, int T, int H, int d,
            int turning, i64 table_stride, float sign) {
    const i64 token = blockIdx.x;
    const i64 width = (i64)H * d;
    const i64 b = token / T;
    const float* row = table + (starts ? (i64)starts[b] * d : b * table_stride) + token % T * d;
    const bool wide = width % PACK == 0 && aligned(x) && aligned(y);
    const i64 turned = (i64)turning * d;
    for (i64 i = (i64)threadIdx.x * PACK; i < width; i += (i64)blockDim.x * PACK) {
        float v[PACK];
        load_pack(x + token * width, i, width, wide, v);
        // d is even, and so is PACK: a pair never straddles two threads or two heads
        int pair = (int)i % d;  // its first column within its head
        for (int k = 0; k < PACK; k += 2, pair = pair + 2 == d ? 0 : pair + 2) {
            if (i + k >= turned) break;
            const float c = row[pair], s = sign * row[pair + 1];
            const float even = v[k], odd = v[k + 1];
            v[k] = even * c - odd * s;
            v[k + 1] = even * s + odd * c;
        }
        store_pack(y + token * width, i, width, wide, v);
    }
}
