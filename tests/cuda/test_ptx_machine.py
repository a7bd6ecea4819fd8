"""The interpreter of PTX against numbers worked out by hand, and what it refuses to run."""

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, to_bf16
from tests.ptx.parse import PtxError, parse
from tests.ptx.program import Program

require.shim()
require.nvrtc()  # not of it, but run where it is: the machine takes 15 seconds to compile

REGISTERS = """
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;
    .reg .f32 %f<8>;
    .reg .f64 %fd<8>;
"""
# a thread's address in the last array, where it leaves its 32-bit result: [%rd1]
OWN = """
    ld.param.u64 %rd1, [k_param_{last}];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
"""


def run(
    body: str, *arrays: Any, threads: int = 32, shared: int = 0, order: str = "forward"
) -> None:
    """Run instructions over arrays, the pointers to which are the kernel's parameters."""
    declared = ", ".join(f".param .u64 k_param_{i}" for i in range(len(arrays)))
    lines = body.replace(";", ";\n")
    text = f".extern .shared .align 16 .b8 memory[];\n.visible .entry k({declared})\n{{\n"
    text += f"{REGISTERS}{lines}\n ret;\n}}\n"
    memory = [np.lib.array_utils.byte_bounds(a) for a in arrays]
    Program(parse(text)["k"]).launch(
        (1, 1, 1),
        threads,
        shared,
        b"".join(int(a.ctypes.data).to_bytes(8, "little") for a in arrays),
        [(int(a), int(b)) for a, b in memory],
        order=ORDERS[order],
        seed=1,
        early=order == "reverse",
    )


def result(body: str, *arrays: Any, threads: int = 32, **how: Any) -> Any:
    """Return what each thread stores at [%rd1]."""
    out = np.zeros(threads, np.uint32)
    run(OWN.format(last=len(arrays)) + body, *arrays, out, threads=threads, **how)
    return out


KIND = {"s": "i", "u": "u", "b": "u", "f": "f", "p": "u"}
REGISTER = {16: "%rs", 32: "%r", 64: "%rd"}


def value_of(opcode: str, kinds: str, *values: Any) -> Any:
    """Return what an opcode gives; ``kinds``: the types of the result and the operands."""
    types = kinds.split()
    arrays, body = [], ""

    def register(kind: str, i: int) -> str:
        if kind == "pred":
            return f"%p{i}"
        prefix = {"f32": "%f", "f64": "%fd"}.get(kind) or REGISTER[int(kind[1:])]
        return f"{prefix}{i}"

    for i, (kind, value) in enumerate(zip(types[1:], values, strict=True), 3):
        arrays.append(np.full(1, value, f"{KIND[kind[0]]}{int(kind[1:]) // 8}"))
        body += f"ld.param.u64 %rd15, [k_param_{i - 3}];"
        body += f"ld.global.{kind} {register(kind, i)}, [%rd15];"
    told = types[0]
    operands = [register(kind, i) for i, kind in enumerate(["", *types[1:]], 2) if kind]
    body += f"{opcode} {', '.join([register(told, 2), *operands])};"
    if told == "pred":
        body += "selp.u32 %r2, 1, 0, %p2;"
    kind = "u32" if told == "pred" else told
    out = np.zeros(1, f"{KIND[kind[0]]}{int(kind[1:]) // 8}")
    body += f"ld.param.u64 %rd15, [k_param_{len(arrays)}];"
    body += f"st.global.{kind} [%rd15], {register(kind, 2)};"
    run(body, *arrays, out)
    return out[0]


LEAST, MOST = -(2**31), 2**31 - 1
INTEGERS = [
    ("add.s32", "s32 s32 s32", (MOST, 1), LEAST),
    ("sub.s64", "s64 s64 s64", (-(2**63), 1), 2**63 - 1),
    ("mul.lo.s32", "s32 s32 s32", (-7, 65_537), -458_759),
    ("mul.lo.s64", "s64 s64 s64", (2**40 + 1, 2**30), 2**30),
    ("mul.wide.s32", "s64 s32 s32", (-3, MOST), -3 * MOST),
    ("mul.wide.u32", "u64 u32 u32", (2**32 - 3, 2**32 - 1), (2**32 - 3) * (2**32 - 1)),
    ("mul.wide.u16", "u32 u16 u16", (65_535, 65_535), 65_535**2),
    ("mul.hi.u32", "u32 u32 u32", (2**32 - 1, 2**31), 2**31 - 1),
    ("mad.lo.s32", "s32 s32 s32 s32", (-3, 5, 7), -8),
    ("div.s32", "s32 s32 s32", (-7, 2), -3),
    ("div.u32", "u32 u32 u32", (2**32 - 7, 2), 2**31 - 4),
    ("div.s64", "s64 s64 s64", (-7, 2), -3),
    ("rem.s32", "s32 s32 s32", (-7, 4), -3),
    ("rem.u32", "u32 u32 u32", (2**32 - 7, 4), 1),
    ("min.s32", "s32 s32 s32", (-1, 1), -1),
    ("max.u32", "u32 u32 u32", (2**32 - 1, 1), 2**32 - 1),
    ("neg.s64", "s64 s64", (5,), -5),
    ("shl.b32", "u32 u32 u32", (3, 31), 2**31),
    ("shl.b32", "u32 u32 u32", (3, 32), 0),
    ("shr.u32", "u32 u32 u32", (2**31, 33), 0),
    ("shr.s32", "s32 s32 u32", (-8, 1), -4),
    ("shr.s32", "s32 s32 u32", (-8, 40), -1),
    ("shr.s64", "s64 s64 u32", (-(2**40), 40), -1),
    ("shr.u64", "u64 u64 u32", (2**63, 63), 1),
    ("popc.b32", "u32 u32", (0xF00F0001,), 9),
    ("bfi.b32", "u32 u32 u32 u32 u32", (0xABC, 0xFFFFFFFF, 4, 8), 0xFFFFFBCF),
    ("bfi.b32", "u32 u32 u32 u32 u32", (0xF, 0, 30, 4), 0xC0000000),
    ("cvt.s64.s32", "s64 s32", (-5,), -5),
    ("cvt.u64.u32", "u64 u32", (2**32 - 5,), 2**32 - 5),
    ("cvt.u32.u64", "u32 u64", (2**40 + 9,), 9),
    ("setp.lt.s32", "pred s32 s32", (-1, 1), 1),
    ("setp.lt.u32", "pred u32 u32", (2**32 - 1, 1), 0),
    ("setp.ge.s64", "pred s64 s64", (-(2**40), -(2**40)), 1),
    ("setp.gt.u64", "pred u64 u64", (2**63, 1), 1),
    ("setp.ne.s16", "pred s16 s16", (-1, -1), 0),
]


@pytest.mark.parametrize(("opcode", "kinds", "values", "expected"), INTEGERS)
def test_integers(opcode: str, kinds: str, values: Any, expected: int) -> None:
    assert int(value_of(opcode, kinds, *values)) == expected


NAN, INF = math.nan, math.inf
FLOATS = [
    ("min.f32", (NAN, 2.0), 2.0),
    ("max.f32", (2.0, NAN), 2.0),
    ("max.f32", (-0.0, 0.0), 0.0),
    ("min.f32", (0.0, -0.0), -0.0),
    ("copysign.f32", (-3.0, 5.0), -5.0),  # the sign of the first, the size of the second
    ("cvt.sat.f32.f32", (NAN,), 0.0),
    ("cvt.sat.f32.f32", (1.5,), 1.0),
    ("cvt.rzi.f32.f32", (-2.7,), -2.0),
    ("ex2.approx.ftz.f32", (-INF,), 0.0),
    ("ex2.approx.ftz.f32", (0.0,), 1.0),
    ("ex2.approx.ftz.f32", (-140.0,), 0.0),  # a subnormal result is flushed
    ("rcp.approx.ftz.f32", (-0.0,), -INF),
    ("div.approx.f32", (1.0, 2.0**127), 0.0),  # beyond 2¹²⁶
    ("div.rn.f32", (1.0, 3.0), float(np.float32(1) / np.float32(3))),
    ("sqrt.rn.f32", (2.0,), float(np.sqrt(np.float32(2)))),
    ("fma.rn.f32", (1 + 2.0**-23, 1 + 2.0**-23, -1 - 2.0**-22), 2.0**-46),  # rounded once
]


@pytest.mark.parametrize(("opcode", "values", "expected"), FLOATS)
def test_floats(opcode: str, values: Any, expected: float) -> None:
    got = float(value_of(opcode, " ".join(["f32"] * (len(values) + 1)), *values))
    assert got == expected and math.copysign(1, got) == math.copysign(1, expected)


@pytest.mark.parametrize("opcode", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_with_nan(opcode: str) -> None:
    for a, b in ((NAN, 1.0), (1.0, NAN), (NAN, NAN)):
        assert value_of(f"setp.{opcode}.f32", "pred f32 f32", a, b) == 0
        assert value_of(f"setp.{opcode}u.f32", "pred f32 f32", a, b) == 1


def test_fma_towards_minus_infinity_is_the_greatest_float_below() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        a, b, c = (rng.standard_normal(3) * 2.0 ** rng.integers(-30, 30, 3)).astype(np.float32)
        got = value_of("fma.rm.f32", "f32 f32 f32 f32", a, b, c)
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        assert Fraction(float(got)) <= exact < Fraction(float(np.nextafter(got, np.float32(INF))))


def test_approximations_keep_to_their_tables_and_use_them_up() -> None:
    off = set()
    for x in np.linspace(-20, 5, 60, dtype=np.float32):
        exact = np.float32(2.0 ** float(x))
        got = value_of("ex2.approx.ftz.f32", "f32 f32", x)
        off.add(int(got.view(np.int32)) - int(exact.view(np.int32)))
    assert off == {-2, -1, 0, 1, 2}


def test_bf16_is_rounded_to_even_and_the_first_number_is_the_upper_half() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F818001, 0x7F7FFFFF], np.uint32).view(np.float32)
    for x in (*ties, np.float32(NAN), np.float32(-INF)):
        (bits,) = to_bf16(np.array([x]))
        assert value_of("cvt.rn.bf16.f32", "u16 f32", x) == bits
        pair = value_of("cvt.rn.bf16x2.f32", "u32 f32 f32", x, np.float32(1))
        assert int(pair) == int(bits) << 16 | 0x3F80


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("ld.global.s32 %rd5, [%rd4]; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r2, %rd5;", 2**32 - 1),
        ("ld.global.u32 %rd5, [%rd4]; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r2, %rd5;", 0),
        ("ld.global.s8 %r2, [%rd4];", 2**32 - 5),
        ("ld.global.u8 %r2, [%rd4];", 251),
        ("ld.global.u16 %r2, [%rd4];", 65_531),
    ],
)
def test_loads_extend_by_their_type(load: str, expected: int) -> None:
    body = f"ld.param.u64 %rd4, [k_param_0]; {load} st.global.u32 [%rd1], %r2;"
    assert result(body, np.array([-5], np.int32))[0] == expected


# ---- lanes that part and meet --------------------------------------------------------------------

SUM_TO_LANE = """
    mov.u32 %r2, 0; mov.u32 %r3, 0;
$again:
    setp.ge.u32 %p1, %r3, %r1;
    @%p1 bra $done;
    add.s32 %r3, %r3, 1;
    add.s32 %r2, %r2, %r3;
    bra.uni $again;
$done:
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_runs_as_often_as_each_lane_wants_and_lanes_meet_behind_it(order: str) -> None:
    body = "mov.u32 %r7, 31; mov.u32 %r8, -1; shfl.sync.bfly.b32 %r4|%p2, %r2, 1, %r7, %r8;"
    got = result(SUM_TO_LANE + body + "st.global.u32 [%rd1], %r4;", threads=64, order=order)
    sums = np.arange(64) * (np.arange(64) + 1) // 2
    np.testing.assert_array_equal(got, sums.reshape(32, 2)[:, ::-1].ravel())


@pytest.mark.parametrize(
    ("mode", "b", "c", "lane"),
    [
        ("bfly", 16, 31, lambda i: i ^ 16),
        ("bfly", 16, 16 << 8 | 31, lambda i: i ^ 16 if i >= 16 else i),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("down", 3, 31, lambda i: i + 3 if i < 29 else i),
        ("up", 3, 24 << 8, lambda i: i - 3 if i % 8 >= 3 else i),
        ("down", 3, 24 << 8 | 31, lambda i: i + 3 if i % 8 < 5 else i),
        ("idx", 5, 31, lambda i: 5),
        ("idx", 5, 24 << 8 | 31, lambda i: i // 8 * 8 + 5),
    ],
)
def test_shuffles(mode: str, b: int, c: int, lane: Any) -> None:
    body = f"shfl.sync.{mode}.b32 %r2, %r1, {b}, {c}, -1; st.global.u32 [%rd1], %r2;"
    assert result(body).tolist() == [lane(i) for i in range(32)]


def test_halves_of_a_warp_meet_by_their_masks() -> None:
    body = """
        setp.lt.u32 %p1, %r1, 16; setp.eq.u32 %p3, %r1, 3;
        @%p1 bra $low;
        vote.sync.ballot.b32 %r2, %p3, 0xffff0000;
        bra.uni $end;
    $low:
        vote.sync.ballot.b32 %r2, %p3, 0x0000ffff;
    $end:
        st.global.u32 [%rd1], %r2;"""
    assert result(body).tolist() == [8] * 16 + [0] * 16


def test_a_barrier_of_some_warps() -> None:
    """Warps 0 and 1 meet at one barrier, 2 and 3 at another; each reads what its mate wrote."""
    body = """
        mov.u32 %r5, memory; shl.b32 %r6, %r1, 2; add.s32 %r6, %r6, %r5;
        st.shared.u32 [%r6], %r1;
        shr.u32 %r7, %r1, 6; add.s32 %r7, %r7, 1;
        bar.sync %r7, 64;
        xor.b32 %r8, %r1, 32; shl.b32 %r8, %r8, 2; add.s32 %r8, %r8, %r5;
        ld.shared.u32 %r9, [%r8]; st.global.u32 [%rd1], %r9;"""
    for order in ORDERS:
        got = result(body, threads=128, shared=512, order=order)
        assert got.tolist() == [i ^ 32 for i in range(128)]


@pytest.mark.parametrize("order", ORDERS)
def test_who_arrives_at_a_barrier_goes_on_and_who_waits_reads_what_was_written(order: str) -> None:
    """Warp 0 fills a place that warp 1 empties, twice."""
    body = """
        mov.u32 %r5, memory; and.b32 %r6, %r1, 31; shl.b32 %r6, %r6, 2; add.s32 %r6, %r6, %r5;
        mov.u32 %r3, 0; mov.u32 %r9, 0; add.s32 %r4, %r1, 100; mov.u32 %r7, 2;
        setp.lt.u32 %p1, %r1, 32;
        @%p1 bra $fill;
    $empty:
        bar.sync 1, 64;
        ld.shared.u32 %r8, [%r6]; add.s32 %r9, %r9, %r8;
        bar.arrive %r7, 64;
        add.s32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 2;
        @%p2 bra $empty;
        bra.uni $end;
    $fill:
        st.shared.u32 [%r6], %r4; shl.b32 %r4, %r4, 4;
        bar.arrive 1, 64;
        bar.sync %r7, 64;
        add.s32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 2;
        @%p2 bra $fill;
    $end:
        st.global.u32 [%rd1], %r9;"""
    got = result(body, threads=64, shared=128, order=order)
    assert got.tolist() == [0] * 32 + [(i + 100) * 17 for i in range(32)]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("ld.global.u32 %r2, [%rd1+128];", "of no array that the kernel was given"),
        ("st.global.u32 [%rd1+2], %r2;", "is no multiple of 4"),
        ("ld.shared.u32 %r2, [memory+64];", "4 bytes there are beyond the block's 64"),
        ("ld.param.u32 %r2, [k_param_0+8];", "not of one parameter"),
        ("setp.eq.u32 %p1, %r1, 3; @%p1 ret; bar.sync 0;", "after lanes of the warp have ended"),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 bra $x; bar.sync 0; ret; $x: bar.sync 0;", "for ever"),
        ("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0; @%p1 ret; bar.sync 1;", "never reach"),
        ("bar.sync 16;", "barriers 0 to 15, not 16"),
        ("bar.sync 1, 33;", "a barrier of 33 threads"),
        ("bar.arrive 1;", "does not say of how many threads"),
        ("bar.arrive 1, 64;", "warps have come to barrier 1, where nobody waits"),
        ("bar.arrive 1, 64; bar.sync 1, 64;", "a warp comes twice to barrier 1 before it is over"),
        (
            "setp.lt.u32 %p1, %r1, 32; selp.u32 %r2, 64, 96, %p1; bar.sync 1, %r2;",
            "barrier 1 has 64 threads and 96",
        ),
        ("shfl.sync.idx.b32 %r2, %r1, 0, 31, 0x7fffffff;", "whose mask is 7fffffff"),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 bra.uni $x; $x: mov.u32 %r2, 0;", "bra.uni parts a warp"),
        ("$x: bra.uni $x;", "does not end"),
        ("add.s32 %r2, %r1, %rd1;", "operand 2 has 64 bits, not 32"),
        ("mov.u32 %r2, %nonsense;", "'%nonsense' is not understood"),
        ("tanh.approx.f32 %f1, %f2;", "no opcode is called tanh.approx.f32"),
        ("bra.uni $nowhere;", r"no label \$nowhere"),
        ("cp.async.cg.shared.global [memory], [%rd4], 8;", "cp.async of 8 bytes"),
        (
            "ld.param.u64 %rd4, [k_param_0]; cp.async.ca.shared.global [memory], [%rd4], 4;"
            "cp.async.commit_group;",
            "ends with asynchronous copies that it has not waited for",
        ),
    ],
)
def test_what_is_wrong_or_undefined_is_refused(body: str, says: str) -> None:
    body = body.replace("$x: ", "\n$x:\n")
    with pytest.raises(PtxError, match=says):
        result(body, threads=64 if re.search("never reach|and 96", says) else 32, shared=64)


@pytest.mark.parametrize(("pending", "landed"), [(1, 1), (0, 2)])
def test_copies_land_at_the_wait_that_covers_them(pending: int, landed: int) -> None:
    source = np.array([11, 22], np.uint32)
    body = f"""
        ld.param.u64 %rd4, [k_param_0];
        cp.async.ca.shared.global [memory], [%rd4], 4;
        cp.async.commit_group;
        cp.async.ca.shared.global [memory+4], [%rd4+4], 4;
        cp.async.commit_group;
        cp.async.wait_group {pending};
        ld.shared.u32 %r2, [memory]; ld.shared.u32 %r3, [memory+4];
        and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 0; selp.u32 %r5, %r2, %r3, %p1;
        st.global.u32 [%rd1], %r5;
        cp.async.wait_all;"""
    for order, there in (("forward", landed), ("reverse", 2)):
        got = result(body, source, shared=8, order=order)[:2].tolist()
        assert got == [11, 22 if there == 2 else 0xFFFFFFFF]
