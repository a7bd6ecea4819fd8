// Kernels that follow strides: broadcast addition, its backward, and copies of views. The launcher
// has folded neighbouring axes together, so that at most four are left. Strides count elements.

// out (s0, s1, s2, s3), contiguous, = a + b, where a repeated axis has stride 0. A thread owns one
// element; neighbours in a warp are neighbours in memory.
KERNEL add_broadcast(const elem* a, const elem* b, elem* out, i64 s0, i64 s1, i64 s2, i64 s3,
                     i64 a0, i64 a1, i64 a2, i64 a3, i64 b0, i64 b1, i64 b2, i64 b3) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s0 * s1 * s2 * s3) return;
    const i64 i3 = i % s3, i2 = i / s3 % s2, i1 = i / (s3 * s2) % s1, i0 = i / (s3 * s2 * s1);
    const float x = widen(a[i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3]);
    const float y = widen(b[i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3]);
    put(out + i, x + y);
}

// out, over the kept axes k0 … k2, = Σ of x over the summed axes r0 … r3, in their order. x has the
// strides p… along the kept axes and q… along the summed ones. A thread owns one output.
KERNEL sum_axes(const elem* x, elem* out, i64 k0, i64 k1, i64 k2, i64 p0, i64 p1, i64 p2, i64 r0,
                i64 r1, i64 r2, i64 r3, i64 q0, i64 q1, i64 q2, i64 q3) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= k0 * k1 * k2) return;
    const i64 i2 = i % k2, i1 = i / k2 % k1, i0 = i / (k2 * k1);
    const elem* from = x + i0 * p0 + i1 * p1 + i2 * p2;
    float total = 0.0f;
    for (i64 j0 = 0; j0 < r0; ++j0)
        for (i64 j1 = 0; j1 < r1; ++j1)
            for (i64 j2 = 0; j2 < r2; ++j2)
                for (i64 j3 = 0; j3 < r3; ++j3)
                    total += widen(from[j0 * q0 + j1 * q1 + j2 * q2 + j3 * q3]);
    put(out + i, total);
}

// y (s0, s1, s2, s3), of strides b…, = x, of strides a…. Along s3 both are contiguous; a thread owns
// PACK elements of it.
KERNEL copy_strided(const elem* x, elem* y, i64 s0, i64 s1, i64 s2, i64 s3, i64 a0, i64 a1, i64 a2,
                    i64 b0, i64 b1, i64 b2) {
    const i64 packs = (s3 + PACK - 1) / PACK;
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s0 * s1 * s2 * packs) return;
    const i64 i3 = i % packs * PACK, i2 = i / packs % s2;
    const i64 i1 = i / (packs * s2) % s1, i0 = i / (packs * s2 * s1);
    const elem* from = x + i0 * a0 + i1 * a1 + i2 * a2;
    elem* to = y + i0 * b0 + i1 * b1 + i2 * b2;
    float v[PACK];
    load_pack(from, i3, s3, aligned(from), v);
    store_pack(to, i3, s3, aligned(to), v);
}

// The same for elements of one byte, such as masks, one a thread and any strides.
KERNEL copy_bytes(const bool* x, bool* y, i64 s0, i64 s1, i64 s2, i64 s3, i64 a0, i64 a1, i64 a2,
                  i64 a3, i64 b0, i64 b1, i64 b2, i64 b3) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s0 * s1 * s2 * s3) return;
    const i64 i3 = i % s3, i2 = i / s3 % s2, i1 = i / (s3 * s2) % s1, i0 = i / (s3 * s2 * s1);
    y[i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3] = x[i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3];
}
