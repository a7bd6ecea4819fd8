// Integers, predicates, comparisons and bits: sections 9.7.1, 9.7.6 and 9.7.8.
#pragma once
#include <algorithm>

#include "machine.h"

// 9.7.1.1-4: add, sub, mul, mad; sums and the low half of products wrap (-fwrapv).
// 9.7.1.8-9: div, rem. Division by zero is "unspecified, machine-specific": all bits set here. The
// least number by -1 wraps. 9.7.1.11-13: neg, min, max.
template <class T> T divide(T a, T b) {
    if (b == 0) return (T)~(T)0;
    return b == (T)-1 && (T)-1 < 0 ? (T)(-a) : (T)(a / b);
}
template <class T> T remainder(T a, T b) {
    if (b == 0) return a;
    return b == (T)-1 && (T)-1 < 0 ? (T)0 : (T)(a % b);
}

template <class T> void arithmetic(Family& all, const char* const (&names)[9]) {
    all.push_back(op<[](T a, T b) -> T { return (T)(a + b); }>(names[0]));
    all.push_back(op<[](T a, T b) -> T { return (T)(a - b); }>(names[1]));
    all.push_back(op<[](T a, T b) -> T { return (T)(a * b); }>(names[2]));
    all.push_back(op<[](T a, T b, T c) -> T { return (T)(a * b + c); }>(names[3]));
    all.push_back(op<[](T a, T b) -> T { return divide(a, b); }>(names[4]));
    all.push_back(op<[](T a, T b) -> T { return remainder(a, b); }>(names[5]));
    all.push_back(op<[](T a, T b) -> T { return std::min(a, b); }>(names[6]));
    all.push_back(op<[](T a, T b) -> T { return std::max(a, b); }>(names[7]));
    all.push_back(op<[](T a) -> T { return (T)(-a); }>(names[8]));
}
#define ARITHMETIC(T)                                                                          \
    arithmetic<T>(all, {"add." #T, "sub." #T, "mul.lo." #T, "mad.lo." #T, "div." #T, "rem." #T, \
                        "min." #T, "max." #T, "neg." #T})

// 9.7.6.2: setp. 9.7.6.3: selp d, a, b, p is a where p, else b.
#define COMPARE(T)                                                   \
    all.push_back(op<[](T a, T b) { return a == b; }>("setp.eq." #T)); \
    all.push_back(op<[](T a, T b) { return a != b; }>("setp.ne." #T)); \
    all.push_back(op<[](T a, T b) { return a < b; }>("setp.lt." #T));  \
    all.push_back(op<[](T a, T b) { return a <= b; }>("setp.le." #T)); \
    all.push_back(op<[](T a, T b) { return b < a; }>("setp.gt." #T));  \
    all.push_back(op<[](T a, T b) { return a >= b; }>("setp.ge." #T))

#define SELECT(T, name) \
    all.push_back(op<[](T a, T b, bool p) -> T { return p ? a : b; }>("selp." name))

// 9.7.8.1-4: and, or, xor, not.
#define LOGIC(T, name)                                                       \
    all.push_back(op<[](T a, T b) -> T { return (T)(a & b); }>("and." name)); \
    all.push_back(op<[](T a, T b) -> T { return (T)(a | b); }>("or." name));  \
    all.push_back(op<[](T a, T b) -> T { return (T)(a ^ b); }>("xor." name))

// 9.7.8.8-9: shl and shr take a shift of more than the width as the width; shr of a signed type
// fills with the sign.
template <class T> T left(T a, u32 n) { return n >= sizeof(T) * 8 ? (T)0 : (T)(a << n); }
template <class T> T right(T a, u32 n) {
    return (T)(a >> std::min<u32>(n, sizeof(T) * 8 - 1) >> (n >= sizeof(T) * 8 ? 1 : 0));
}

// 9.7.1.20: bfi f, a, b, c, d puts d bits of a into b from bit c on.
inline u32 insert_bits(u32 a, u32 b, u32 c, u32 d) {
    const u32 pos = c & 0xff, len = d & 0xff;
    for (u32 i = 0; i < len && pos + i <= 31; ++i)
        b = (b & ~(1u << (pos + i))) | (a >> i & 1) << (pos + i);
    return b;
}

inline Family integers() {
    Family all;
    ARITHMETIC(s16);
    ARITHMETIC(u16);
    ARITHMETIC(s32);
    ARITHMETIC(u32);
    ARITHMETIC(s64);
    ARITHMETIC(u64);
    // 9.7.1.3: mul.wide has a result of twice the width, mul.hi is its upper half
    all.push_back(op<[](u16 a, u16 b) -> u32 { return (u32)a * b; }>("mul.wide.u16"));
    all.push_back(op<[](s16 a, s16 b) -> s32 { return (s32)a * b; }>("mul.wide.s16"));
    all.push_back(op<[](u32 a, u32 b) -> u64 { return (u64)a * b; }>("mul.wide.u32"));
    all.push_back(op<[](s32 a, s32 b) -> s64 { return (s64)a * b; }>("mul.wide.s32"));
    all.push_back(op<[](u32 a, u32 b) -> u32 { return ((u64)a * b >> 32); }>("mul.hi.u32"));
    all.push_back(op<[](s32 a, s32 b) -> s32 { return (s32)((s64)a * b >> 32); }>("mul.hi.s32"));
    // 9.7.1.4
    all.push_back(
        op<[](s32 a, s32 b, s64 c) -> s64 { return (s64)a * b + c; }>("mad.wide.s32"));
    all.push_back(
        op<[](u32 a, u32 b, u64 c) -> u64 { return (u64)a * b + c; }>("mad.wide.u32"));
    // 9.7.1.14-15
    all.push_back(op<[](u32 a) -> u32 { return __builtin_popcount(a); }>("popc.b32"));
    all.push_back(op<[](u32 a) -> u32 { return a ? __builtin_clz(a) : 32; }>("clz.b32"));
    all.push_back(op<[](u32 a, u32 b, u32 c, u32 d) { return insert_bits(a, b, c, d); }>("bfi.b32"));
    COMPARE(s16);
    COMPARE(u16);
    COMPARE(s32);
    COMPARE(u32);
    COMPARE(s64);
    COMPARE(u64);
    all.push_back(op<[](u16 a, u16 b) { return a == b; }>("setp.eq.b16"));
    all.push_back(op<[](u32 a, u32 b) { return a == b; }>("setp.eq.b32"));
    all.push_back(op<[](u64 a, u64 b) { return a == b; }>("setp.eq.b64"));
    all.push_back(op<[](u16 a, u16 b) { return a != b; }>("setp.ne.b16"));
    all.push_back(op<[](u32 a, u32 b) { return a != b; }>("setp.ne.b32"));
    all.push_back(op<[](u64 a, u64 b) { return a != b; }>("setp.ne.b64"));
    SELECT(u16, "b16");
    SELECT(u16, "u16");
    SELECT(u16, "s16");
    SELECT(u32, "b32");
    SELECT(u32, "u32");
    SELECT(u32, "s32");
    SELECT(u32, "f32");
    SELECT(u64, "b64");
    SELECT(u64, "u64");
    SELECT(u64, "s64");
    SELECT(u64, "f64");
    LOGIC(bool, "pred");
    LOGIC(u16, "b16");
    LOGIC(u32, "b32");
    LOGIC(u64, "b64");
    all.push_back(op<[](bool a) { return !a; }>("not.pred"));
    all.push_back(op<[](u16 a) -> u16 { return (u16)~a; }>("not.b16"));
    all.push_back(op<[](u32 a) -> u32 { return ~a; }>("not.b32"));
    all.push_back(op<[](u64 a) -> u64 { return ~a; }>("not.b64"));
    all.push_back(op<[](u16 a, u32 n) { return left(a, n); }>("shl.b16"));
    all.push_back(op<[](u32 a, u32 n) { return left(a, n); }>("shl.b32"));
    all.push_back(op<[](u64 a, u32 n) { return left(a, n); }>("shl.b64"));
    all.push_back(op<[](u16 a, u32 n) { return right(a, n); }>("shr.u16"));
    all.push_back(op<[](s16 a, u32 n) { return right(a, n); }>("shr.s16"));
    all.push_back(op<[](u32 a, u32 n) { return right(a, n); }>("shr.u32"));
    all.push_back(op<[](s32 a, u32 n) { return right(a, n); }>("shr.s32"));
    all.push_back(op<[](u64 a, u32 n) { return right(a, n); }>("shr.u64"));
    all.push_back(op<[](s64 a, u32 n) { return right(a, n); }>("shr.s64"));
    return all;
}
