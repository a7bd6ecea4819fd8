"""NVRTC compiles every kernel for the GPUs that matter, with no driver and no headers.

``python -m pytest tests/cuda/test_compile.py -s`` prints the table of registers and spills.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from accel.cuda import compiler, sources
from accel.cuda.compiler import CompileError, compile_kernels, cubin_file, read_usage
from tests.cuda_shim import require

require.nvrtc()

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


@pytest.mark.parametrize(("architecture", "source", "defines"), VARIANTS, ids=str)
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
        assert (u.spills, u.stack, u.serial) == (0, 0, False), u


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
