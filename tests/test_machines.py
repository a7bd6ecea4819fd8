"""Windows and macOS, as far as Linux can play them: see ``tests/helpers/elsewhere.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist.cli import COMMANDS
from tests.helpers import ROOT
from tests.helpers.runs import ENVIRONMENT, tables, text

SYSTEMS = ("win32", "darwin")
# what takes longer: macOS is the nearer relation of Linux
LONGER = ("win32", pytest.param("darwin", marks=pytest.mark.slow))
EXTRAS = ("cupy", "torch", "jax", "triton", "tensorboardX", "cffi")

IMPORT_ALL = """
import importlib, pkgutil, sys
import reference, accel, dist, tokenizer
count = 0
for package in (reference, accel, dist, tokenizer):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.endswith("__main__") or ".examples." in found.name:
            continue
        try:
            importlib.import_module(found.name)
        except ImportError as error:
            assert error.name and error.name.split(".")[0] in EXTRAS, (found.name, error)
        count += 1
print(count)
"""

EXPLAIN_ALL = """
from dist.cli import main
for name in COMMANDS:
    try:
        status = main([*name.split(), "--help"])
    except SystemExit as ended:
        status = ended.code
    assert not status, name
"""

COMPILE = """
import numpy as np
from pack import kernels
print(sum(kernels.total(np.arange(4.0)) for _ in range(3)))
print(type(kernels.total).__name__)
"""

KERNELS = """
from numba import prange
from accel.jit import jit

@jit(nogil=True, parallel=True)
def total(a):
    s = 0.0
    for i in prange(a.size):
        s += a[i]
    return s
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONWARNDEFAULTENCODING": "1", **more}


def elsewhere(
    system: str, *words: str, cwd: Path, status: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    helper = ROOT / "tests" / "helpers" / "elsewhere.py"
    done = subprocess.run(
        [sys.executable, helper, system, *words],
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        # what Windows writes to a pipe in, if it is not told
        env=environment(PYTHONIOENCODING="cp1252" if system == "win32" else "utf-8", **more),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_is_imported_and_every_command_explains_itself(
    system: str, tmp_path: Path
) -> None:
    code = f"EXTRAS, COMMANDS = {EXTRAS}, {list(COMMANDS)}\n{IMPORT_ALL}{EXPLAIN_ALL}"
    said = elsewhere(system, "-c", code, cwd=tmp_path, EXTRAS="").stdout
    assert int(said.split("\n")[0]) > 250
    assert said.count("usage:") >= len(COMMANDS)


@pytest.mark.parametrize("system", LONGER)
def test_a_text_becomes_a_model_that_writes(system: str, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text(i)}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = tables(tmp_path, model__vocab_size=320, model__context_length=32)
    settings["data"] = {"train": "data/train", "heldout": "data/heldout"}
    settings["train"]["steps"] = 4
    settings["run"] |= {"out": "run", "checkpoint_every": 1, "eval_every": 2, "keep": 1}
    written = [
        f"[{table}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
        for table, rows in settings.items()
    ]
    (tmp_path / "hf").mkdir()  # an empty folder may be written to
    (tmp_path / "run.toml").write_text("\n".join(written), encoding="utf-8")
    steps = [
        ["tokenizer", "train", "a.jsonl", "--vocab-size", "320", "-o", "t.tok"],
        ["tokenizer", "encode", "t.tok", "a.jsonl"],
        ["pack", "a.jsonl", "--tokenizer", "t.tok", "-o", "data", "--heldout", "0.1"],
        ["train", "run.toml", "--set", "train.decay_steps=4", "--set", "train.steps=2"],
        ["train", "run.toml", "--set", "train.decay_steps=4", "--changed"],
        ["generate", "run", "--prompt", "the", "--tokens", "3", "--backend", "reference"],
        ["eval", "run", "data/heldout", "--backend", "reference"],
        ["export", "run", "hf"],
        ["import", "hf", "-o", "again"],
    ]
    code = f"""
from accel import system
from dist.cli import main
system.PATIENCE = 0.1
reader = None
for words in {steps!r}:
    status = main(words)
    assert status == 0, (words, status)
    if words[0] == "train" and reader is None:
        reader = open("run/checkpoints/step-00000002/master.bin", "rb")
"""
    said = elsewhere(system, "-c", code, cwd=tmp_path).stdout
    assert "going on after step 2" in said and "saved run" in said, said
    left = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    # what somebody reads cannot be removed on Windows, and does not end the run there
    assert left == {"step-00000004", *(["step-00000002"] if system == "win32" else [])}


@pytest.mark.parametrize("system", LONGER)
def test_an_op_is_verified_in_processes_of_their_own(system: str, tmp_path: Path) -> None:
    words = ["verify", "--backend", "reference", "--op", "rmsnorm", "--dtype", "float32"]
    said = elsewhere(system, "-m", "dist", *words, "--jobs", "1", cwd=tmp_path).stdout
    assert "rmsnorm" in said


@pytest.mark.parametrize("system", LONGER)
def test_a_kernel_is_compiled_once_and_kept(system: str, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "pack" / "kernels.py").write_text(KERNELS, encoding="utf-8")
    for path in (tmp_path / "pack").iterdir():
        os.utime(path, (1e9, 1e9))
    more = {"MYLLM_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_THREADING_LAYER": "workqueue"}
    code = f"import sys; sys.path.append({str(tmp_path)!r})\n{COMPILE}"
    first = elsewhere(system, "-c", code, cwd=tmp_path, **more)
    again = elsewhere(system, "-c", code, cwd=tmp_path, **more)
    assert first.stdout == again.stdout == "18.0\nInTurn\n"
    assert first.stderr.count("compiling kernels") == 1 and again.stderr == ""


def test_threads_that_call_kernels_take_turns_where_the_pool_is_for_one(tmp_path: Path) -> None:
    """Numba's own message would be "Concurrent access has been detected", and the process gone."""
    code = """
import sys; sys.path.append(sys.argv[1])
import threading
import numpy as np
from accel import threads
from pack import kernels
threads.set_threads(threads.available_cores())
a = np.ones(1 << 20)
kernels.total(a)
sums = []
def work():
    for _ in range(100):
        sums.append(kernels.total(a))
both = [threading.Thread(target=work) for _ in range(4)]
for thread in both:
    thread.start()
for thread in both:
    thread.join()
print(len(sums), set(sums))
"""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "pack" / "kernels.py").write_text(KERNELS, encoding="utf-8")
    env = environment(
        NUMBA_THREADING_LAYER="workqueue", MYLLM_CACHE_DIR=str(tmp_path / "c"), MYLLM_THREADS=""
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "400 {1048576.0}\n"), done.stderr
