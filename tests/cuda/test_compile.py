"""NVRTC compiles every kernel for the GPUs that matter, with no driver and no headers.

``python -m pytest tests/cuda/test_compile.py -s`` prints the table of registers and spills,
and what a round of attention's loops is made of.
"""

import re
import struct
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest

from accel.bench.predict import PRODUCTS
from accel.cuda import attention, compiler, machine_code, sources
from accel.cuda.compiler import CompileError, compile_kernels, cubin_file, read_usage
from tests.cuda_shim import require

require.nvdisasm()

Defines = dict[str, int]
Variant = tuple[str, str, Defines]  # architecture, kernel file, macros

ARCHITECTURES = ("sm_80", "sm_90a")
SMALLER = ("sm_86", "sm_89", "sm_120")  # 99 KiB of shared memory, which attention is cut for
LIMITS = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, **dict.fromkeys(SMALLER, 99 * 1024)}
ALL = attention.OPTIONS


def of_attention(architecture: str, path: str, head: int, *options: str) -> Iterator[Variant]:
    """Yield the variants of attention on tensor cores that a GPU takes with some options."""
    on = {option: int(option in options) for option in ALL}
    ways = [
        attention.way(path, kernel, head, set(options), LIMITS[architecture])
        for kernel in ("attention_forward", "attention_dq", "attention_dkv")
    ]
    for warps in sorted({tiles.warps for tiles in ways}):
        defines = {"BF16": 1, "HEAD": head, "KEYS": ways[0].rows, "WARPS": warps, **on}
        yield architecture, f"attention_{path}", defines


def taken(architecture: str, source: str, defines: Defines) -> dict[str, attention.Tiles]:
    """Return the kernels of attention that run as a variant, and how they are cut."""
    path, options = source.removeprefix("attention_"), {o for o in ALL if defines.get(o)}
    ways = {
        kernel: attention.way(path, kernel, defines["HEAD"], options, LIMITS[architecture])
        for kernel in attention.TILES.get(path, ())
    }
    return {kernel: tiles for kernel, tiles in ways.items() if tiles.warps == defines["WARPS"]}


def variants() -> Iterator[Variant]:
    """Yield what is compiled: both types, and of attention every choice of options."""
    for architecture in ARCHITECTURES:
        for source in sources.SOURCES:
            if not source.startswith("attention_"):
                yield from ((architecture, source, {"BF16": bf16}) for bf16 in (0, 1))
    yield "sm_120", "norm", {"BF16": 1}
    for architecture, n in product(LIMITS, range(len(ALL) + 1)):
        for options in combinations(ALL, n):
            yield from of_attention(architecture, "mma", 128, *options)
    for architecture, options in product(LIMITS, ((), ALL)):
        yield from of_attention(architecture, "mma", 64, *options)
    for head, options in ((64, ()), (64, ALL), (128, ()), (128, ALL), (128, ("MASKED",))):
        yield from of_attention("sm_90a", "wgmma", head, *options)


VARIANTS = list(variants())
# Without -m slow: float32 for the newer architecture alone, and of attention on tensor cores these.
QUICK = (
    *(v for v in VARIANTS if "HEAD" not in v[2] and v[::2] != ("sm_80", {"BF16": 0})),
    *(v for options in ((), ("MASKED",), ALL) for v in of_attention("sm_80", "mma", 128, *options)),
    *of_attention("sm_90a", "mma", 128),
    *(v for options in ((), ALL) for v in of_attention("sm_120", "mma", 128, *options)),
    *of_attention("sm_80", "mma", 64),
    *of_attention("sm_90a", "wgmma", 64),
    *(v for v in VARIANTS if v[1] == "attention_wgmma" and v[2]["HEAD"] == 128),
)
SPILLING = ("attention_wgmma", "attention_dkv", 1)

# Kernels whose arrays are read and written 16 bytes at a time: how many loads and stores of these
# there are in the code. All other accesses are for edges and misaligned arrays.
WIDE = {
    "add": (2, 1), "add_bias": (1, 1), "scale": (1, 1), "dropout": (1, 1), "relu_forward": (1, 1),
    "relu_backward": (2, 1), "gelu_forward": (1, 1), "gelu_backward": (2, 1),
    "gelu_tanh_forward": (1, 1), "gelu_tanh_backward": (2, 1), "swiglu_forward": (2, 1),
    "swiglu_backward": (3, 2), "embedding_forward": (1, 1), "rope": (1, 1), "scale_into": (1, 1),
    "accumulate": (2, 1), "adamw": (4, 3), "softmax": (2, 1), "write_slots": (2, 2),
}  # fmt: skip
# Those that walk over rows more than once: as many at least.
WIDE_AT_LEAST = {
    "cross_entropy": (2, 1), "rmsnorm_forward": (5, 1), "rmsnorm_backward": (9, 3),
    "layernorm_forward": (5, 1), "layernorm_backward": (9, 5), "sum_heads": (1, 1),
    "attend_parts": (8, 0), "partial_sums": (1, 0), "copy_strided": (1, 0), "to_bf16_array": (1, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "source", "defines"),
    [pytest.param(*v, marks=[] if v in QUICK else [pytest.mark.slow]) for v in VARIANTS],
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
    run = taken(architecture, source, defines) if "HEAD" in defines else {}
    for u in usage:
        print(
            f"  {u.kernel:24} {u.registers:4} registers {u.stack:4} B stack {u.spills:4} B spilt "
            f"{u.shared:6} B shared{'' if u.kernel in run or not run else ', not run so'}"
        )
        if run and u.kernel not in run:
            continue
        # 2 registers too many for documents at the full width, out of the loop's reach
        spare = 8 if (source, u.kernel, defines.get("MASKED")) == SPILLING else 0
        assert u.spills <= spare and u.stack <= spare and not u.serial, u
    for kernel, code in machine_code.disassemble(cubin).items():
        spilling = (source, kernel, defines.get("MASKED")) == SPILLING
        if not run or kernel in run:
            check_machine_code(kernel, code, defines, run.get(kernel), spilling)


def check_machine_code(
    kernel: str,
    code: machine_code.Code,
    defines: Defines,
    tiles: attention.Tiles | None,
    spilling: bool,
) -> None:
    """Look for spills, narrow accesses, and tensor instructions too many or too few."""
    whole, a_round = machine_code.count(code), machine_code.count(machine_code.hot_loop(code))
    assert not whole.local or spilling, f"{kernel}: {whole.local} loads and stores of spills"
    wide = tuple(whole.accesses.get((what, 16), 0) for what in ("LDG", "STG"))
    assert wide == WIDE.get(kernel, wide), kernel
    assert all(n >= least for n, least in zip(wide, WIDE_AT_LEAST.get(kernel, (0, 0)), strict=True))
    most = machine_code.way(code)
    packs = sum(i.is_global and i.width == 16 for i in most)
    if kernel in WIDE:
        assert packs == sum(wide), f"{kernel}: the way that is run most is another"
    if "norm_" in kernel:  # bounds, of 64 bits, are those of a pack, not of each element
        bounds = sum(bool(re.match(r"ISETP\.(GE|GT|LE|LT).*(\.EX|64)", i.name)) for i in most)
        assert 0 < bounds <= 2 * packs, kernel
    assert bool(a_round.flops) == (tiles is not None)
    if tiles:
        print(f"  {kernel:24} {a_round}")
        # its scores and gradients of scores are rows × HEAD × tile, each product once
        products, head = PRODUCTS[kernel], defines["HEAD"]
        assert a_round.flops * tiles.warps == 2 * products * tiles.block * tiles.rows * head
        assert not a_round.local
        # tiles come 16 bytes at a time: both of them, and two floats a row for dk and dv
        copied = 2 * tiles.rows * head * 2 // 16 // (32 * tiles.warps)
        floats = {("LDGSTS", 4): 1} if kernel == "attention_dkv" else {}
        copies = {what: n for what, n in a_round.accesses.items() if what[0] == "LDGSTS"}
        assert copies == {("LDGSTS", 16): copied, **floats}, kernel
        if a_round.ldsm:  # mma.sync: a product is 16 × 8 × 16, a load four matrices of 8 × 8
            assert a_round.tensor * 4096 == a_round.flops
            # a warp loads its rows of the block's own tiles, and the products' other side whole
            loaded = tiles.own * tiles.block + tiles.warps * products * tiles.rows
            assert a_round.ldsm * 512 * tiles.warps == 2 * head * loaded


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
