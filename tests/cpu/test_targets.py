"""Processors that are not at hand: what LLVM writes for them is read, and not run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        if label and re.search(rf"\s(b\.\w+|cbn?z|tbn?z)\s.*\b{label}$", code):
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


@pytest.mark.slow
@pytest.mark.parametrize("triple", ARM)
def test_kernels_are_made_for_arm_and_fill_its_registers(triple: str, tmp_path: Path) -> None:
    emitted(triple, tmp_path, "demo")
    files = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.s")}
    assert {"_product", "tile_gemm"} <= set(files) and len(files) > 20
    for name, text in files.items():
        blocks = [loop for loop in inner_loops(text) if loop.count("\tfmla") >= 24]
        wide = [loop for loop in blocks if len(re.findall(FOUR, loop)) in (24, 48)]
        if name in ("_product", "tile_gemm"):
            assert wide, name  # 6 rows of 4 vectors
        for loop in wide:
            registers = set(re.findall(r"\b[vqsd](\d+)\b", loop))
            assert len(registers) >= 29, (name, loop)
            assert "Folded" not in loop, (name, loop)  # LLVM's word for what goes to the stack
        assert not re.search(r"\bbl\s+_?(expf|exp2f)\b", text), name  # a call for each number
