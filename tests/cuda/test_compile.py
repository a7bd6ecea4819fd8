"""NVRTC compiles every kernel for the GPUs that matter, with no driver and no headers.

``python -m pytest tests/cuda/test_compile.py -s`` prints the table of registers and spills,
and what a round of attention's loops is made of.
"""

import re
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from accel.bench.predict import PRODUCTS, WARPS
from accel.cuda import attention, compiler, machine_code, sources
from accel.cuda.compiler import CompileError, compile_kernels, cubin_file, read_usage
from tests.cuda_shim import require

require.nvdisasm()

Defines = dict[str, int]


ARCHITECTURES = ("sm_80", "sm_90a")
SMALLER = ("sm_86", "sm_89", "sm_120")  # 99 KiB of shared memory, so attention has its small tiles


def attention_variant(head: int, keys: int, options: int) -> Defines:
    """Return the macros of attention on tensor cores with all options on or off."""
    rules = dict.fromkeys(("MASKED", "ALIBI", "DROPOUT"), options)
    return {"BF16": 1, "HEAD": head, "KEYS": keys, **rules}


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield (architecture, kernel file, macros): all combinations, or the extremes."""
    for architecture in ARCHITECTURES:
        for source in sources.SOURCES:
            if source == "attention_mma":
                for head, options in product((64, 128), (0, 1)):
                    yield architecture, source, attention_variant(head, 64, options)
            elif source != "attention_wgmma":
                yield from ((architecture, source, {"BF16": bf16}) for bf16 in (0, 1))
    for architecture in SMALLER:
        yield architecture, "attention_mma", attention_variant(128, 32, 1)
    yield "sm_86", "attention_mma", attention_variant(128, 32, 0)
    yield "sm_120", "norm", {"BF16": 1}
    for head, (options, keys) in product((64, 128), ((0, 128), (1, 64))):
        yield "sm_90a", "attention_wgmma", attention_variant(head, keys, options)
    yield "sm_90a", "attention_wgmma", attention_variant(128, 128, 0) | {"MASKED": 1}


VARIANTS = list(variants())
# With -m slow: of attention on tensor cores every other combination, of mma.sync for Hopper, which
# has wgmma, all but one; float32 for the older architecture, and of those with less shared memory
# all but the newest.
ALIKE = (
    ("sm_80", "attention_mma", attention_variant(64, 64, 1)),
    ("sm_80", "attention_mma", attention_variant(128, 64, 0)),
    *(("sm_90a", "attention_mma", attention_variant(head, 64, 1)) for head in (64, 128)),
    ("sm_90a", "attention_mma", attention_variant(64, 64, 0)),
    ("sm_90a", "attention_wgmma", attention_variant(64, 64, 1)),
    *(v for v in VARIANTS if v[0] in SMALLER[:2]),
    *(v for v in VARIANTS if v[0] == "sm_80" and v[2] == {"BF16": 0}),
)
SPILLING = ("attention_wgmma", "attention_dkv", 1)

# Kernels whose arrays are read and written 16 bytes at a time: how many loads and stores of these
# there are in the code. All other accesses are for edges and misaligned arrays.
WIDE = {
    "add": (2, 1), "add_bias": (1, 1), "scale": (1, 1), "dropout": (1, 1), "relu_forward": (1, 1),
    "relu_backward": (2, 1), "gelu_forward": (1, 1), "gelu_backward": (2, 1),
    "gelu_tanh_forward": (1, 1), "gelu_tanh_backward": (2, 1), "swiglu_forward": (2, 1),
    "swiglu_backward": (3, 2), "embedding_forward": (1, 1), "rope": (1, 1), "scale_into": (1, 1),
    "accumulate": (2, 1), "adamw": (4, 3), "softmax": (2, 1),
}  # fmt: skip
# Those that walk over rows more than once: as many at least.
WIDE_AT_LEAST = {
    "cross_entropy": (2, 1), "rmsnorm_forward": (5, 1), "rmsnorm_backward": (9, 3),
    "layernorm_forward": (5, 1), "layernorm_backward": (9, 5), "sum_heads": (1, 1),
    "partial_sums": (1, 0), "copy_strided": (1, 0), "to_bf16_array": (1, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "source", "defines"),
    [pytest.param(*v, marks=[pytest.mark.slow] if v in ALIKE else []) for v in VARIANTS],
    ids=str,
)
def test_every_kernel_compiles_and_keeps_to_its_registers(
    architecture: str, source: str, defines: Defines
) -> None:
    texts = sources.parts(source)
    cubin, usage = compile_kernels(sources.join(texts), source, architecture, defines)
    assert cubin.startswith(b"\x7fELF")
    assert sorted(u.kernel for u in usage) == sorted(sources.kernels(texts[f"{source}.cu"]))
    print(f"\n{source} {architecture} {defines}")
    for u in usage:
        print(
            f"  {u.kernel:24} {u.registers:4} registers {u.stack:4} B stack {u.spills:4} B spilt "
            f"{u.shared:6} B shared"
        )
        # 2 registers too many for documents at the full width, out of the loop's reach
        spare = 8 if (source, u.kernel, defines.get("MASKED")) == SPILLING else 0
        assert u.spills <= spare and u.stack <= spare and not u.serial, u
    tiles = attention.WGMMA if source == "attention_wgmma" else attention.MMA
    for kernel, code in machine_code.disassemble(cubin).items():
        spilling = (source, kernel, defines.get("MASKED")) == SPILLING
        check_machine_code(kernel, code, defines, tiles, spilling)


def check_machine_code(
    kernel: str, code: machine_code.Code, defines: Defines, tiles: Any, spilling: bool
) -> None:
    """Look for spills, narrow accesses, and tensor instructions too many or too few."""
    whole, a_round = machine_code.count(code), machine_code.count(machine_code.hot_loop(code))
    assert not whole.local or spilling, f"{kernel}: {whole.local} loads and stores of spills"
    wide = tuple(whole.accesses.get((what, 16), 0) for what in ("LDG", "STG"))
    assert wide == WIDE.get(kernel, wide), kernel
    assert all(n >= least for n, least in zip(wide, WIDE_AT_LEAST.get(kernel, (0, 0)), strict=True))
    taken = machine_code.way(code)
    packs = sum(i.is_global and i.width == 16 for i in taken)
    if kernel in WIDE:
        assert packs == sum(wide), f"{kernel}: the way that is run most is another"
    if "norm_" in kernel:  # bounds, of 64 bits, are those of a pack, not of each element
        bounds = sum(bool(re.match(r"ISETP\.(GE|GT|LE|LT).*(\.EX|64)", i.name)) for i in taken)
        assert 0 < bounds <= 2 * packs, kernel
    assert bool(a_round.flops) == ("HEAD" in defines)
    if a_round.flops:
        print(f"  {kernel:24} {a_round}")
        # its scores and gradients of scores are rows × HEAD × tile, each product once
        rows = a_round.flops * WARPS // (2 * PRODUCTS[kernel] * attention.OWN * defines["HEAD"])
        assert rows in tiles[kernel].rows
        assert (
            a_round.flops * WARPS == 2 * PRODUCTS[kernel] * attention.OWN * rows * defines["HEAD"]
        )
        assert not a_round.local
        # tiles come 16 bytes at a time: both of them, and two floats a row for dk and dv
        threads = 32 * WARPS
        copied = 2 * rows * defines["HEAD"] * 2 // 16 // threads
        floats = {("LDGSTS", 4): 1} if kernel == "attention_dkv" else {}
        copies = {what: n for what, n in a_round.accesses.items() if what[0] == "LDGSTS"}
        assert copies == {("LDGSTS", 16): copied, **floats}, kernel
        if tiles is attention.MMA:  # a product is 16 × 8 × 16, a load four matrices of 8 × 8
            assert a_round.tensor * 4096 == a_round.flops
            # a warp loads its rows of the block's own tiles, and the products' other side whole
            loaded = tiles[kernel].own * attention.OWN + WARPS * PRODUCTS[kernel] * rows
            assert a_round.ldsm * 512 * WARPS == 2 * defines["HEAD"] * loaded


def test_the_whole_file_is_kept() -> None:
    """CuPy's binding cuts off the last byte, which nvdisasm and readelf miss."""
    cubin, _ = compile_kernels(
        sources.join(sources.parts("reduce")), "reduce", "sm_80", {"BF16": 0}
    )
    headers, sections = struct.unpack_from("<QQ", cubin, 32)
    sizes = struct.unpack_from("<4H", cubin, 54)
    assert len(cubin) >= max(headers + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])


def test_spills_and_narrow_accesses_are_seen() -> None:
    text = (
        sources.text_of("device.cuh")
        + """
KERNEL narrow(const float* x, float* y, int n) {
    float kept[64];
    for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
    for (int i = 0; i < n; ++i) y[i] = kept[(i * n) % 64];
}"""
    )
    cubin, _ = compile_kernels(text, "narrow", "sm_80", {})
    found = machine_code.count(machine_code.disassemble(cubin)["narrow"])
    assert found.local and set(found.accesses) == {("LDG", 4), ("STG", 4)}


def test_a_stack_is_seen() -> None:
    text = (
        sources.text_of("device.cuh")
        + """
KERNEL stacked(float* x, int n) {
    float kept[64];
    for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
    for (int i = 0; i < n; ++i) x[i] = kept[(i * n) % 64];
}"""
    )
    (usage,) = compile_kernels(text, "stacked", "sm_80", {})[1]
    assert usage.stack >= 256


def test_products_that_the_assembler_serializes_are_seen() -> None:
    text = sources.text_of("device.cuh") + sources.text_of("warpgroup.cuh")
    text += """
KERNEL touched(float* y, u64 tile) {
    float d[8][4] = {};
    wgmma_fence();
    wgmma_rows(d, tile, tile, true);
    TOUCH
    wgmma_rows(d, tile, tile, true);
    wgmma_commit();
    wgmma_wait<0>();
    for (int n = 0; n < 8; ++n)
        for (int i = 0; i < 4; ++i) y[n * 4 + i] = d[n][i];
}"""
    for touch, serial in (("", False), ("for (int i = 0; i < 4; ++i) d[0][i] += y[i];", True)):
        (usage,) = compile_kernels(text.replace("TOUCH", touch), "touched", "sm_90a", {})[1]
        assert usage.serial == serial


def test_sources_and_files_agree() -> None:
    on_disk = {path.stem for path in sources.FOLDER.glob("*.cu")}
    assert on_disk == set(sources.SOURCES)
    for source in sources.SOURCES:
        assert sources.kernels(sources.text_of(f"{source}.cu")), f"{source}.cu defines no kernel"


def test_no_kernel_includes_a_header_or_adds_floats_atomically() -> None:
    for source in sources.SOURCES:
        for name, text in sources.parts(source).items():
            includes = [line for line in text.splitlines() if line.startswith("#include")]
            header = {"device.cuh": "shim", "warpgroup.cuh": "warpgroup"}.get(name)
            assert includes == ([f'#include "{header}.h"'] if header else []), name
            assert "atomic" not in text.replace("no float atomics", "").replace(
                "Without atomics", ""
            ).replace("no atomics", ""), name


def test_a_faulty_kernel_is_refused_with_the_compiler_s_words() -> None:
    text = sources.text_of("device.cuh") + "\nKERNEL broken(float* x) { x[0] = nonsense; }"
    with pytest.raises(CompileError, match=r'refuses broken\.cu for sm_80:\n(.|\n)*"nonsense"'):
        compile_kernels(text, "broken", "sm_80", {})


def test_machine_code_is_kept_by_all_that_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path))
    first = cubin_file("reduce", "sm_80", {"BF16": 0})
    assert first.read_bytes().startswith(b"\x7fELF") and tmp_path in first.parents
    written = first.stat().st_mtime_ns
    assert cubin_file("reduce", "sm_80", {"BF16": 0}).stat().st_mtime_ns == written
    others = [
        cubin_file("reduce", "sm_80", {"BF16": 1}),
        cubin_file("reduce", "sm_90a", {"BF16": 0}),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(sources, "text_of", _with_a_comment)
        others.append(cubin_file("reduce", "sm_80", {"BF16": 0}))
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-fmad=false"))
    others.append(cubin_file("reduce", "sm_80", {"BF16": 0}))
    assert len({first, *others}) == 5
    assert len(list(first.parent.iterdir())) == 5  # nothing half written lies about


def _with_a_comment(name: str) -> str:
    return (sources.FOLDER / name).read_text(encoding="utf-8") + "\n// changed\n"


def test_a_report_that_is_not_understood_is_not_taken_for_no_spills() -> None:
    with pytest.raises(CompileError, match="not as expected"):
        read_usage("ptxas info : Compiling entry function 'k' for 'sm_80'\nptxas info : whatever")
