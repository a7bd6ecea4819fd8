// Floating point: section 9.7.3, its comparisons (9.7.6.2) and its conversions (9.7.9.21).
//
// Approximate instructions are as far off as their tables allow: by how many units in the last place
// follows from the bits of the result alone, so that it is the same in any order of threads, and a
// kernel that counts on more shows.
#pragma once
#include <cmath>
#include <limits>

#include "machine.h"

inline f32 flush(f32 x) {  // .ftz: subnormals are zeros of the same sign
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

// x, off by -ulps ... ulps, by a hash of its bits.
inline f32 approximately(f32 x, int ulps) {
    if (!std::isnormal(x)) return x;
    u32 bits = get<u32>(put(x)), hash = bits * 2654435761u;
    const f32 moved = get<f32>(bits + (hash >> 16) % (2 * ulps + 1) - ulps);
    return std::isnormal(moved) ? moved : x;
}

// 9.7.3.6: fma rounds once. Towards minus infinity: the product is exact in double, the sum is exact as
// two doubles, and the nearest float is moved down where it is above.
inline f32 fma_down(f32 a, f32 b, f32 c) {
    const f64 p = (f64)a * b, s = p + c;
    if (!std::isfinite(s)) return (f32)s;
    const f64 t = s - p, low = (p - (s - t)) + (c - t);
    const f32 r = (f32)s;
    return r > s || (r == s && low < 0) ? std::nextafter(r, -std::numeric_limits<f32>::infinity()) : r;
}

// 9.7.3.11-12: of one NaN the other operand is the result, and -0 is less than +0.
inline f32 least(f32 a, f32 b) {
    if (std::isnan(a)) return std::isnan(b) ? get<f32>(0x7fffffffu) : b;
    if (std::isnan(b)) return a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline f32 greatest(f32 a, f32 b) {
    if (std::isnan(a)) return std::isnan(b) ? get<f32>(0x7fffffffu) : b;
    if (std::isnan(b)) return a;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}

// 9.7.3.8: div.approx is a times 1/b, 2 ulp off at most for |b| from 2^-126 to 2^126. Beyond, 0, or NaN
// where a is infinite.
inline f32 divide_approximately(f32 a, f32 b) {
    if (std::isfinite(b) && std::fabs(b) > 0x1p126f)
        return std::isinf(a) ? std::nanf("") : std::copysign(0.0f, a * b);
    return approximately(a / b, 2);
}

// 9.7.3.21, its table: exact for infinities, zeros and NaN; 2 ulp off at most elsewhere.
inline f32 exp2_approximately(f32 a) {
    a = flush(a);
    if (a == 0.0f) return 1.0f;
    return flush(approximately((f32)std::exp2((f64)a), 2));
}

// 9.7.3.20: an absolute error of 2^-22 between 1/2 and 2, a relative one of 2^-22 elsewhere.
inline f32 log2_approximately(f32 a) { return approximately((f32)std::log2((f64)flush(a)), 1); }

// 9.7.3.13: rcp.approx.ftz is 1 ulp off at most; 1/±0 is an infinity.
inline f32 reciprocal_approximately(f32 a) { return flush(approximately(1.0f / flush(a), 1)); }

// 9.7.9.21: cvt.rn to bf16, ties to even; NaN becomes 0x7fff.
inline u16 to_bf16(f32 x) {
    if (std::isnan(x)) return 0x7fff;
    const u32 bits = get<u32>(put(x)), low = bits & 0xffff, half = 0x8000;
    u32 high = bits >> 16;
    if (low > half || (low == half && (high & 1))) ++high;
    return (u16)high;
}

// 9.7.9.21: cvt.rz to bf16 cuts off.
inline u16 cut_to_bf16(f32 x) { return std::isnan(x) ? 0x7fff : (u16)(get<u32>(put(x)) >> 16); }

// 9.7.9.21: .sat clamps to 0 ... 1, and NaN to 0.
inline f32 saturate(f32 x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }

// 9.7.6.2, table of comparisons: NaN makes the ordered ones false, those with a u true.
#define COMPARE_FLOATS(T)                                                                       \
    all.push_back(op<[](T a, T b) { return a == b; }>("setp.eq." #T));                          \
    all.push_back(op<[](T a, T b) { return a < b || b < a; }>("setp.ne." #T));                  \
    all.push_back(op<[](T a, T b) { return a < b; }>("setp.lt." #T));                           \
    all.push_back(op<[](T a, T b) { return a <= b; }>("setp.le." #T));                          \
    all.push_back(op<[](T a, T b) { return b < a; }>("setp.gt." #T));                           \
    all.push_back(op<[](T a, T b) { return a >= b; }>("setp.ge." #T));                          \
    all.push_back(op<[](T a, T b) { return !(a < b || b < a); }>("setp.equ." #T));              \
    all.push_back(op<[](T a, T b) { return !(a == b); }>("setp.neu." #T));                      \
    all.push_back(op<[](T a, T b) { return !(a >= b); }>("setp.ltu." #T));                      \
    all.push_back(op<[](T a, T b) { return !(b < a); }>("setp.leu." #T));                       \
    all.push_back(op<[](T a, T b) { return !(a <= b); }>("setp.gtu." #T));                      \
    all.push_back(op<[](T a, T b) { return !(a < b); }>("setp.geu." #T));                       \
    all.push_back(op<[](T a, T b) { return !std::isnan(a) && !std::isnan(b); }>("setp.num." #T)); \
    all.push_back(op<[](T a, T b) { return std::isnan(a) || std::isnan(b); }>("setp.nan." #T))

// 9.7.3.3-5, 8, 15: without a modifier and with .rn, to the nearest. (The assembler may join add.f32
// and mul.f32 that have no modifier to an fma: 9.7.3.3. That is not done here.)
#define NEAREST(T)                                                              \
    all.push_back(op<[](T a, T b) { return a + b; }>("add." #T));               \
    all.push_back(op<[](T a, T b) { return a + b; }>("add.rn." #T));            \
    all.push_back(op<[](T a, T b) { return a - b; }>("sub." #T));               \
    all.push_back(op<[](T a, T b) { return a - b; }>("sub.rn." #T));            \
    all.push_back(op<[](T a, T b) { return a * b; }>("mul." #T));               \
    all.push_back(op<[](T a, T b) { return a * b; }>("mul.rn." #T));            \
    all.push_back(op<[](T a, T b, T c) { return std::fma(a, b, c); }>("fma.rn." #T)); \
    all.push_back(op<[](T a, T b) { return a / b; }>("div.rn." #T));            \
    all.push_back(op<[](T a) { return T(1) / a; }>("rcp.rn." #T));              \
    all.push_back(op<[](T a) { return std::sqrt(a); }>("sqrt.rn." #T));         \
    all.push_back(op<[](T a) { return std::fabs(a); }>("abs." #T));             \
    all.push_back(op<[](T a) { return -a; }>("neg." #T));                       \
    all.push_back(op<[](T a, T b) { return std::copysign(b, a); }>("copysign." #T))  // 9.7.3.2

inline Family floats() {
    Family all;
    NEAREST(f32);
    NEAREST(f64);
    COMPARE_FLOATS(f32);
    COMPARE_FLOATS(f64);
    all.push_back(op<[](f32 a, f32 b) { return least(a, b); }>("min.f32"));
    all.push_back(op<[](f32 a, f32 b) { return greatest(a, b); }>("max.f32"));
    all.push_back(op<[](f32 a, f32 b, f32 c) { return fma_down(a, b, c); }>("fma.rm.f32"));
    all.push_back(op<[](f32 a, f32 b) { return divide_approximately(a, b); }>("div.approx.f32"));
    all.push_back(op<[](f32 a) { return exp2_approximately(a); }>("ex2.approx.ftz.f32"));
    all.push_back(op<[](f32 a) { return log2_approximately(a); }>("lg2.approx.ftz.f32"));
    all.push_back(op<[](f32 a) { return reciprocal_approximately(a); }>("rcp.approx.ftz.f32"));
    // 9.7.9.21: .rzi to an integral value towards zero
    all.push_back(op<[](f32 a) { return std::trunc(a); }>("cvt.rzi.f32.f32"));
    all.push_back(op<[](f32 a) { return saturate(a); }>("cvt.sat.f32.f32"));
    all.push_back(op<[](f32 a) -> f64 { return a; }>("cvt.f64.f32"));
    all.push_back(op<[](f64 a) -> f32 { return (f32)a; }>("cvt.rn.f32.f64"));
    all.push_back(op<[](s32 a) -> f32 { return (f32)a; }>("cvt.rn.f32.s32"));
    all.push_back(op<[](u32 a) -> f32 { return (f32)a; }>("cvt.rn.f32.u32"));
    all.push_back(op<[](s64 a) -> f32 { return (f32)a; }>("cvt.rn.f32.s64"));
    all.push_back(op<[](s32 a) -> f64 { return a; }>("cvt.rn.f64.s32"));
    all.push_back(op<[](s64 a) -> f64 { return (f64)a; }>("cvt.rn.f64.s64"));
    all.push_back(op<[](f32 a) { return to_bf16(a); }>("cvt.rn.bf16.f32"));
    all.push_back(op<[](f32 a) { return cut_to_bf16(a); }>("cvt.rz.bf16.f32"));
    // of two inputs the first is the upper half of the result
    all.push_back(op<[](f32 a, f32 b) -> u32 {
        return (u32)to_bf16(a) << 16 | to_bf16(b);
    }>("cvt.rn.bf16x2.f32"));
    all.push_back(op<[](f32 a, f32 b) -> u32 {
        return (u32)cut_to_bf16(a) << 16 | cut_to_bf16(b);
    }>("cvt.rz.bf16x2.f32"));
    return all;
}
