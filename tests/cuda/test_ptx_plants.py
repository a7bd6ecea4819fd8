"""Bugs planted in the GPU's own bodies of the primitives: asm strings, intrinsics, widths.

The shim has other bodies for these, so it cannot see them; the interpreter of PTX must. A plant is
caught when a case is off by the rule, when two orders differ, or when the interpreter stops. One
that leaves the compiler's output as it is, to the letter, is no bug of that code.

``python -m pytest tests/cuda/test_ptx_plants.py -s -m "slow or not slow"`` prints how each shows.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16, sources
from tests.cuda_shim import require
from tests.helpers.cuda_cases import (
    attention_by_the_rule,
    attention_cases,
    by_the_rule,
    cases,
    long_attention_cases,
    rounded,
    run_backend,
)
from tests.ptx.device import PtxDevice
from tests.ptx.parse import PtxError

require.shim()
require.nvrtc()

MMA, WGMMA = "attention_mma", "attention_wgmma"
BY = {  # kernel file -> precision, ops
    "elementwise": ("bf16", ("add", "swiglu", "linear")),
    "norm": ("float32", ("rmsnorm",)),
    "embedding": ("float32", ("embedding",)),
}


class Plant(NamedTuple):
    old: str
    new: str
    source: str = MMA  # whose cases run
    file: str = "device.cuh"
    kernel: str = ""  # of the file, where the text occurs in several
    everywhere: bool = False  # that the text occurs
    wide: bool = False  # heads of 128, which have two panels


def clobber(before: str, after: str = "") -> Plant:
    """Return the plant that takes "memory" from an asm statement."""
    return Plant(f'{before}: "memory"{after}', before.rstrip(" \n") + after)


def group(old: str, new: str) -> Plant:
    """Return a plant among the products of a warpgroup."""
    return Plant(old, new, WGMMA, "warpgroup.cuh")


def said(text: str) -> str:
    """Return an asm statement without operands."""
    return f'asm volatile("{text};" ::: "memory");'


ROWS = '"=r"(r[3])\n                     : "r"(address)\n                     '
ASYNC = '"r"(valid ? {0} : 0)\n                 '

PLANTS = {
    # mma: every operand
    "mma: a1 and a2 swapped": Plant("{%4,%5,%6,%7}", "{%4,%6,%5,%7}"),
    "mma: a0 and a1 swapped": Plant("{%4,%5,%6,%7}", "{%5,%4,%6,%7}"),
    "mma: halves of a swapped": Plant("{%4,%5,%6,%7}", "{%6,%7,%4,%5}"),
    "mma: b0 and b1 swapped": Plant("{%8,%9}", "{%9,%8}"),
    "mma: b0 twice": Plant("{%8,%9}", "{%8,%8}"),
    "mma: columns of d swapped": Plant("{%0,%1,%2,%3}, {%4", "{%1,%0,%3,%2}, {%4"),
    "mma: rows of d swapped": Plant("{%0,%1,%2,%3}, {%4", "{%2,%3,%0,%1}, {%4"),
    "mma: columns of c swapped": Plant("{%0,%1,%2,%3};", "{%1,%0,%3,%2};"),
    "mma: rows of c swapped": Plant("{%0,%1,%2,%3};", "{%2,%3,%0,%1};"),
    "mma: c is a": Plant("{%0,%1,%2,%3};", "{%4,%5,%6,%7};"),
    "mma: registers of a in another order": Plant('"r"(a[0]), "r"(a[1])', '"r"(a[1]), "r"(a[0])'),
    "mma: one register of b": Plant('"r"(b[1])', '"r"(b[0])'),
    "mma: d0 not read": Plant('"+f"(d[0])', '"=f"(d[0])'),
    "mma: d3 not read": Plant('"+f"(d[3])', '"=f"(d[3])'),
    # ldmatrix
    "ldmatrix: .trans lost": Plant("x4.trans.shared", "x4.shared"),
    "ldmatrix: .trans too many": Plant("x4.shared", "x4.trans.shared"),
    "ldmatrix: two matrices swapped": Plant("x4.shared.b16 {%0,%1,", "x4.shared.b16 {%1,%0,"),
    "ldmatrix: two transposed ones swapped": Plant(
        "x4.trans.shared.b16 {%0,%1,%2", "x4.trans.shared.b16 {%0,%2,%1"
    ),
    "ldmatrix: the next chunk": Plant(
        "x4.shared.b16 {%0,%1,%2,%3}, [%4]", "x4.shared.b16 {%0,%1,%2,%3}, [%4+16]"
    ),
    "ldmatrix: the next row, transposed": Plant(
        "trans.shared.b16 {%0,%1,%2,%3}, [%4]", "trans.shared.b16 {%0,%1,%2,%3}, [%4+128]"
    ),
    "ldmatrix: not at a multiple of 16": Plant(
        "x4.shared.b16 {%0,%1,%2,%3}, [%4]", "x4.shared.b16 {%0,%1,%2,%3}, [%4+2]"
    ),
    "ldmatrix: no clobber": clobber(ROWS, ");\n}"),
    "ldmatrix: no clobber, transposed": clobber(ROWS, ");\n    else"),
    "ldmatrix: neither volatile nor clobber": Plant(
        'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"\n'
        f'                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), {ROWS}: "memory");',
        'asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"\n'
        f'                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), {ROWS});',
    ),
    # cp.async and its groups
    "cp.async: all bytes always": Plant("16, %2;", "16;"),
    "cp.async: zeros where there is something": Plant("valid ? 16 : 0", "valid ? 0 : 16"),
    "cp.async: half a chunk": Plant("valid ? 16 : 0", "valid ? 8 : 0"),
    "cp.async: too many bytes": Plant("valid ? 16 : 0", "valid ? 32 : 0"),
    "cp.async: to the next chunk": Plant("[%0], [%1], 16", "[%0+16], [%1], 16"),
    "cp.async: from the next chunk": Plant("[%0], [%1], 16", "[%0], [%1+16], 16"),
    "cp.async: no clobber": clobber(ASYNC.format(16), ");"),
    "cp.async of 4: all bytes always": Plant("4, %2;", "4;"),
    "cp.async of 4: zeros": Plant("valid ? 4 : 0", "0"),
    "cp.async of 4: from the next": Plant("[%0], [%1], 4", "[%0], [%1+4], 4"),
    "cp.async of 4: to the next": Plant("[%0], [%1], 4", "[%0+4], [%1], 4"),
    "cp.async of 4: no clobber": clobber(ASYNC.format(4), ");"),
    "commit: left out": Plant('asm volatile("cp.async.commit_group;" ::: "memory");', ""),
    "commit: no clobber": Plant('commit_group;" ::: "memory"', 'commit_group;" ::'),
    "wait: one group more may fly": Plant('"n"(STILL_FLYING)', '"n"(STILL_FLYING + 1)'),
    "wait: left out": Plant('"cp.async.wait_group %0;"', '""'),
    "wait: no clobber": clobber('"n"(STILL_FLYING) '),
    **{
        f"wait count of {kernel}": Plant(
            f"copy_wait<0>();\n        sync_block();  // {what}",
            f"copy_wait<1>();\n        sync_block();  // {what}",
            file="attention_mma.cu",
            kernel=kernel,
        )
        for kernel, what in (
            ("attention_forward", "keys"),
            ("attention_dq", "the values"),
            ("attention_dkv", "tile j"),
        )
    },
    # shuffles and votes
    "shfl: mask of half a warp": Plant("__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0xffffu"),
    "shfl: mask without a lane": Plant(
        "__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0xfffffffeu", "norm"
    ),
    "shfl: twice the offset": Plant("x, mask); }", "x, 2 * mask); }"),
    "shfl: half the offset": Plant("x, mask); }", "x, mask / 2); }", "norm"),
    "shfl: segments of 16 lanes": Plant("x, mask); }", "x, mask, 16); }", "norm"),
    "shfl: down": Plant("__shfl_xor_sync", "__shfl_down_sync"),
    "shfl: up": Plant("__shfl_xor_sync", "__shfl_up_sync"),
    "shfl: by number": Plant("__shfl_xor_sync(0xffffffffu, x", "__shfl_sync(0xffffffffu, x"),
    "ballot: mask of half a warp": Plant(
        "__ballot_sync(0xffffffffu", "__ballot_sync(0xffffu", "embedding"
    ),
    "ballot: of the contrary": Plant(
        "__ballot_sync(0xffffffffu, x)", "__ballot_sync(0xffffffffu, !x)", "embedding"
    ),
    "popcount: leading zeros": Plant("__popc(x)", "__clz(x)", "embedding"),
    # conversions and approximations
    "pack: halves swapped": Plant('"f"(high), "f"(low)', '"f"(low), "f"(high)'),
    "pack: operands swapped": Plant(
        "bf16x2.f32 %0, %1, %2", "bf16x2.f32 %0, %2, %1", "elementwise"
    ),
    "pack: one number twice": Plant("bf16x2.f32 %0, %1, %2", "bf16x2.f32 %0, %1, %1"),
    "pack: cut off": Plant("cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32", "elementwise"),
    "to_bf16: cut off": Plant("cvt.rn.bf16.f32", "cvt.rz.bf16.f32", "elementwise"),
    "exp2: logarithm": Plant("ex2.approx.ftz.f32", "lg2.approx.ftz.f32"),
    "exp2: of the negative": Plant(
        'ftz.f32 %0, %1;" : "=f"(r) : "f"(x)', 'ftz.f32 %0, %1;" : "=f"(r) : "f"(-x)'
    ),
    "divide: swapped": Plant("__fdividef(a, b)", "__fdividef(b, a)", "elementwise"),
    # memory
    "a generic address for one of shared memory": Plant(
        "(u32)__cvta_generic_to_shared(p)", "(u32)(u64)p"
    ),
    "two floats swapped": Plant("make_float2(v[0], v[1])", "make_float2(v[1], v[0])"),
    "no clobber anywhere": Plant(': "memory"', "", everywhere=True),
    # products of a warpgroup
    "wgmma: the left operand's descriptor for the right one's": group("%64, %65, p", "%65, %64, p"),
    "wgmma: one descriptor twice": group("%32, %33, p", "%33, %33, p"),
    "wgmma: right operand transposed": group("%64, %65, p, 1, 1, 0, 0", "%64, %65, p, 1, 1, 0, 1"),
    "wgmma: right operand not transposed": group("%36, p, 1, 1, 1", "%36, p, 1, 1, 0"),
    "wgmma: the negative product": group("%36, p, 1, 1, 1", "%36, p, -1, 1, 1"),
    "wgmma: the left operand's registers swapped": group(
        "{%32,%33,%34,%35}, %36", "{%33,%32,%34,%35}, %36"
    ),
    "wgmma: accumulators swapped": group(
        '%62,%63}, "\n        "%64, %65', '%63,%62}, "\n        "%64, %65'
    ),
    "wgmma: scores added to what was there": group("p, %66, 0", "p, 1, 0"),
    "wgmma: nothing added": group("p, %37, 0", "p, 0, 0"),
    "wgmma: added the wrong way round": group("setp.ne.b32 p, %34", "setp.eq.b32 p, %34"),
    "wgmma: one accumulator's register not read": Plant(
        '"+f"(d[i][3])', '"=f"(d[i][3])', WGMMA, "warpgroup.cuh"
    ),
    "barrier: no wait": group('"bar.sync %0, %1;"', '""'),
    "barrier: no arrival": group('"bar.arrive %0, %1;"', '""'),
    "barrier: the first one always": group("bar.sync %0", "bar.sync 1"),
    "barrier: of a warpgroup": group(
        'bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS)',
        'bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS / 2)',
    ),
    "barrier: no clobber": Plant(
        '"n"(THREADS) : "memory"', '"n"(THREADS)', WGMMA, "warpgroup.cuh", everywhere=True
    ),
    "wgmma: no proxy fence": group(said("fence.proxy.async.shared::cta"), ""),
    "wgmma: no fence": group(said("wgmma.fence.sync.aligned"), ""),
    "wgmma: no commit": group(said("wgmma.commit_group.sync.aligned"), ""),
    "wgmma: no wait": group('"wgmma.wait_group.sync.aligned %0;"', '""'),
    "wgmma: one group more may fly": group('"n"(STILL_FLYING)', '"n"(STILL_FLYING + 1)'),
    "wgmma: no clobber of the proxy fence": group('shared::cta;" ::: "memory"', 'shared::cta;" ::'),
    "wgmma: no clobber of the fence": group(
        'wgmma.fence.sync.aligned;" ::: "memory"', 'wgmma.fence.sync.aligned;" ::'
    ),
    "wgmma: no clobber of the wait": group('"n"(STILL_FLYING) : "memory"', '"n"(STILL_FLYING)'),
    "wgmma: no clobber anywhere": Plant(': "memory"', "", WGMMA, "warpgroup.cuh", everywhere=True),
    "descriptor: another swizzle": Plant(
        "(u64)1 << 62", "(u64)2 << 62", WGMMA, "attention_wgmma.cu"
    ),
    "descriptor: groups of eight rows too near": Plant(
        "(u64)(1024 >> 4) << 32", "(u64)(512 >> 4) << 32", WGMMA, "attention_wgmma.cu"
    ),
    "descriptor: panels at no distance": Plant(
        "(u64)(panels >> 4) << 16 |", "", WGMMA, "attention_wgmma.cu", wide=True
    ),
    "uniform: another lane's": Plant(
        "__shfl_sync(0xffffffffu, x, 0)", "__shfl_sync(0xffffu, x, 0)", WGMMA
    ),
}
QUICK = (
    "mma: a1 and a2 swapped",
    "mma: rows of c swapped",
    "ldmatrix: .trans lost",
    "ldmatrix: no clobber",
    "cp.async: all bytes always",
    "wait: one group more may fly",
    "wait: no clobber",
    "shfl: mask without a lane",
    "shfl: segments of 16 lanes",
    "pack: operands swapped",
    "wgmma: no proxy fence",
)
# What the cases cannot show, and why.
SURVIVE = {
    "cp.async of 4: all bytes always": "the rules hide rows beyond the last, whatever their lse is"
}


def runs(plant: Plant) -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, precision, case) of what runs a kernel file, the shortest first."""
    if plant.source in (MMA, WGMMA):
        widths = ((128, 128),) if plant.wide else ((16, 40),)
        for case in (*attention_cases(widths), *long_attention_cases(((64, 64),))):
            if any(case[1].endswith(what) for what in ("causal", ", more keys", "long full")):
                yield ops_bf16, "bf16", case
    else:
        dtype, names = BY[plant.source]
        module = ops_bf16 if dtype == "bf16" else ops
        yield from ((module, dtype, case) for case in cases() if case[0] in names)


def edited(plant: Plant) -> list[PtxDevice]:
    """Return devices with the plant, whose copies land late and early."""
    text = sources.text_of(plant.file)
    old, new = plant.old, plant.new
    if plant.kernel:
        (text,) = re.findall(rf"^KERNEL[^;{{]*?\b{plant.kernel}\(.*?^}}", text, re.M | re.S)
    found = text.count(old)
    assert found == 1 or (found and plant.everywhere), f"{plant.file}: {found} times {old!r}"
    edit = (text, text.replace(old, new))
    edits = {plant.file: [edit]}
    return [
        PtxDevice(
            order,
            early=order == "reverse",
            edits=edits,
            edited=plant.source,
            warpgroups=plant.source == WGMMA,
        )
        for order in ("forward", "reverse")
    ]


def caught(plant: Plant) -> str | None:
    """Return how a plant shows, or None."""
    machines = edited(plant)
    for module, dtype, case in runs(plant):
        op, what, arrays, options = case
        results = []
        for machine in machines:
            before = devices.use(machine)
            try:
                given = rounded(arrays) if dtype == "bf16" else arrays
                got = run_backend(module, op, given, options)
                if plant.source in (MMA, WGMMA):
                    rule = attention_by_the_rule(case, got)
                else:
                    rule = by_the_rule(module, case, dtype, got=got)
                for name, closeness in rule.items():
                    if not closeness.ok:
                        return f"{op}, {what}: {name} is off"
                results.append(got)
            except PtxError as error:
                return str(error)
            finally:
                devices.use(before)
        for a, b in zip(*results, strict=True):
            if not np.array_equal(a, b, equal_nan=True):
                return f"{op}, {what}: the order shows"
    return None


def changes_nothing(plant: Plant) -> bool:
    """Return whether the compiler writes the same code with and without the plant."""
    defines = {"BF16": int(plant.source not in BY or BY[plant.source][0] == "bf16")}
    if plant.source not in BY:
        keys = 64 if plant.source == MMA else 128
        defines |= {"HEAD": 64, "KEYS": keys, "ALIBI": 0, "MASKED": 0, "DROPOUT": 0}
    texts = [
        re.sub(r"\.loc.*|\.file.*|\.b8 .*", "", machine.ptx(plant.source, defines))
        for machine in (PtxDevice(warpgroups=plant.source == WGMMA), edited(plant)[0])
    ]
    return texts[0] == texts[1]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLANTS],
)
def test_a_plant_is_caught(name: str) -> None:
    how = caught(PLANTS[name])
    if how is None and changes_nothing(PLANTS[name]):
        how = "nothing: the compiler writes the same code"
    print(f"\n{name}: {how or SURVIVE.get(name, 'survives')}")
    assert (how is None) == (name in SURVIVE), how or f"{name}: no test sees it"
    assert "no opcode is called" not in str(how) and "NVRTC refuses" not in str(how), how


@pytest.mark.parametrize(
    ("type_", "wrong"),
    [
        ("i64", np.int32),
        ("int", np.int64),
        ("u32", np.uint64),
        ("float", np.float64),
        ("int", np.float32),
        ("float", np.int32),
    ],
)
def test_an_argument_of_another_width_or_kind_is_refused(
    type_: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.C_TYPES, type_, wrong)
    sources.signature.cache_clear()
    before = devices.use(PtxDevice())
    try:
        x = ops.from_numpy(np.ones((1, 2, 1, 4), np.float32))
        with pytest.raises(PtxError, match=r"argument \d+ (has|is) .* and the kernel reads"):
            ops.attention_forward(x, x, x)
    finally:
        devices.use(before)
        sources.signature.cache_clear()
