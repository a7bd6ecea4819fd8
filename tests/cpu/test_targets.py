"""Processors that are not at hand: what LLVM writes for them is read, and not run."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel.cpu.simd import STEPS
from tests.helpers import ROOT

ARM = {
    "aarch64-unknown-linux-gnu": {"cpu": "neoverse-n1", "features": "+neon,+fullfp16,+dotprod"},
    "arm64-apple-macosx": {"cpu": "apple-m1", "features": "+neon,+fullfp16,+dotprod,+sha3"},
}

FOUR = r"\tfmla(?:\tv\d+\.4s|\.4s\t)"  # as Linux writes it, and as Apple does


def emitted(triple: str, folder: Path, *presets: str) -> str:
    """Have the assembly of kernels written to a folder; return what was said of bf16."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.emitting", triple, str(folder), *presets],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "MYLLM_BF16": "",  # not the one for tests
            "NUMBA_CPU_NAME": ARM[triple]["cpu"],
            "NUMBA_CPU_FEATURES": ARM[triple]["features"],
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def inner_loops(assembly: str) -> list[str]:
    """Return the loops of one block: from a label to the branch back to it."""
    loops, label, lines = [], "", list[str]()
    for line in assembly.splitlines():
        found = re.match(r"\.?(LBB\w+):", line)
        if found:
            label, lines = found[1], []
        lines.append(line)
        code = re.split("//|;", line)[0].rstrip()
        if label and re.search(rf"\s(b\.\w+|cbn?z|tbn?z|j\w+)\s.*\b{label}$", code):
            loops.append("\n".join(lines))
    return loops


@pytest.mark.parametrize("triple", ARM)
def test_bf16_is_refused_in_a_sentence_where_the_processor_lacks_it(
    triple: str, tmp_path: Path
) -> None:
    said = emitted(triple, tmp_path)
    architecture = triple.split("-")[0]
    assert said.startswith("the backend 'cpu' computes in bf16 on processors with AMX-BF16")
    assert f"this one ({architecture}) has neither; use compute='float32'" in said


TILE = """
from numba import njit, types
from accel.cpu import simd
kernel = njit(nogil=True)(simd.tile_gemm.py_func)
p, i = types.CPointer(types.float32), types.int64
kernel.compile((i, i, i, p, i, i, p, i, p, i, types.boolean, p, i))
print(next(iter(kernel.inspect_asm().values())))
"""
X86 = {  # features, and the rows and the vectors of the register blocks
    "haswell": ("+avx,+avx2,+fma", [(6, 2)]),
    "skylake-avx512": (
        "+avx,+avx2,+fma,+avx512f,+avx512vl,+avx512bw,+avx512dq",
        [(6, 4), (8, 2), (6, 2)],
    ),
}


def made_for(processor: str, code: str, **more: str) -> str:
    """Return what a script prints that compiles for a processor of ``X86``."""
    named = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": X86[processor][0], **more}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **named},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="made for its own kind")
@pytest.mark.parametrize("processor", X86)
def test_a_tile_s_loop_has_no_instruction_that_it_does_not_need(processor: str) -> None:
    # two threads of one core share what it can decode, and a cloud's machines are such threads
    said = made_for(processor, TILE)
    found = [re.findall(r"^\t([a-z]\w+)", loop, re.M) for loop in inner_loops(said)]
    for rows, vectors in X86[processor][1]:
        products = STEPS * rows * vectors  # those of a turn
        loops = [loop for loop in found if loop.count("vfmadd231ps") == products]
        assert loops
        for loop in loops:
            assert loop.count("prefetcht1") == 1
            needed = products + STEPS * (vectors + rows)  # and what they multiply is loaded
            # pointers of each step, the line ahead and its pointer, a count, the jump; and two of
            # eight pointers to rows have no register
            assert len(loop) - needed <= 2 * STEPS + 4 + 2 * (rows == 8), loop


PROBABILITIES = """
from numba import types
from accel.cpu.attention_tiles import score_gradients
p, i = types.CPointer(types.float32), types.int64
score_gradients.compile((p, p, p, p, types.float32, i, i))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="made for its own kind")
def test_kernels_use_the_widest_vectors_where_llvm_prefers_half_of_them(tmp_path: Path) -> None:
    kept = {"MYLLM_CACHE_DIR": str(tmp_path), "NUMBA_DUMP_ASSEMBLY": "1"}
    said = made_for("skylake-avx512", PROBABILITIES, **kept)
    loops = [loop for loop in inner_loops(said) if "vpslld" in loop and "%zmm" in loop]
    assert loops and not any("%ymm" in loop for loop in loops)


EXPONENTIALS = """
from numba import njit, types
from accel.cpu import activations, kernels
f, i = types.float32, types.int64
for function, count in ((activations._swiglu_forward, 4), (activations._gelu_forward, 3)):
    kernel = njit(**kernels.EACH)(function.py_func)
    kernel.compile((f, f, *[i] * count))
    print(next(iter(kernel.inspect_asm().values())))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="made for its own kind")
def test_constants_of_exponentials_are_not_fetched_anew_for_each_number() -> None:
    loops = [loop for loop in inner_loops(made_for("haswell", EXPONENTIALS)) if "vpslld" in loop]
    assert len(loops) == 2  # none of them by calls, a number each
    for loop in loops:
        assert loop.count("(%rsp)") >= 3, loop
        assert loop.count("broadcast") <= 1, loop  # what turns a sign is no float32


@pytest.mark.slow
@pytest.mark.parametrize("triple", ARM)
def test_kernels_are_made_for_arm_and_fill_its_registers(triple: str, tmp_path: Path) -> None:
    emitted(triple, tmp_path, "demo")
    files = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.s")}
    assert {"_product", "tile_gemm"} <= set(files) and len(files) > 20
    for name, text in files.items():
        blocks = [loop for loop in inner_loops(text) if loop.count("\tfmla") >= 24]
        wide = [loop for loop in blocks if len(re.findall(FOUR, loop)) in (24, 24 * STEPS)]
        if name in ("_product", "tile_gemm"):
            assert wide, name  # 6 rows of 4 vectors
        for loop in wide:
            registers = set(re.findall(r"\b[vqsd](\d+)\b", loop))
            assert len(registers) >= 29, (name, loop)
            assert "Folded" not in loop, (name, loop)  # LLVM's word for what goes to the stack
        assert not re.search(r"\bbl\s+_?(expf|exp2f)\b", text), name  # a call for each number
