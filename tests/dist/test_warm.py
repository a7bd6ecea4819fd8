"""Kernels that a run needs are compiled before it, each by one process, and none is missed."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import accel
import accel.cpu
from accel.jit import Store
from dist import config, mode, warm
from dist.warm import Task, work
from tests.helpers import ROOT

DEMO = config.load("demo")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path / "cache"))
    return Store(Path(warm.__file__).parent)


def test_a_task_that_another_process_has_is_waited_for_and_done_if_it_was_left(
    store: Store,
) -> None:
    done: list[str] = []
    reached = threading.Event()

    def task(name: str) -> Task:
        def call(backend: object) -> None:
            done.append(name)
            if name == "last":
                reached.set()

        return Task(name, "float32", call)

    others = store.open_lock("other's")
    fcntl.flock(others, fcntl.LOCK_EX)
    tasks = [task("first"), task("other's"), task("last")]
    shown: list[tuple[int, int]] = []
    show = lambda *numbers: shown.append(numbers)  # noqa: E731
    worker = threading.Thread(target=work, args=(tasks, store, show))
    worker.start()
    assert reached.wait(30)
    worker.join(0.2)
    assert worker.is_alive() and done == ["first", "last"]
    os.close(others)  # as a process does that was killed before it was done
    worker.join(30)
    assert done == ["first", "last", "other's"]
    assert shown == [(1, 3), (2, 3), (3, 3)]
    work(tasks, store)
    assert len(done) == 3  # not again


def test_a_task_is_not_begun_before_the_one_whose_kernels_it_needs(store: Store) -> None:
    """It would wait for them, instead of doing something else."""
    done: list[str] = []
    forward = Task("forward", "float32", lambda _: done.append("forward"))
    backward = Task("backward", "float32", lambda _: done.append("backward"), after="forward")
    other = Task("other", "float32", lambda _: done.append("other"))
    work([backward, other, forward], store)
    assert done == ["other", "forward", "backward"]


def test_attention_comes_first_and_backward_after_forward() -> None:
    tasks = warm.tasks_of(DEMO, writes=True)
    kinds = [task.name.rpartition("-")[0] for task in tasks]
    longest = [kind.startswith(warm.LONGEST) for kind in kinds]
    assert any(longest) and longest == sorted(longest, reverse=True)
    after = {kind: task.after.rpartition("-")[0] for kind, task in zip(kinds, tasks, strict=True)}
    assert after["attention_backward"] == "attention_forward"
    assert after["linear_backward"] == "linear_forward" and after["adamw"] == ""
    assert kinds[-1] == "writing"


def test_of_a_run_whose_mode_is_open_the_products_of_every_mode_are_compiled() -> None:
    open_ = config.load("demo", ["run.compute=auto"])
    tasks = warm.tasks_of(open_, writes=False)
    offered = set(accel.offered("cpu"))
    assert {task.compute for task in tasks} == offered
    assert tasks[0].compute == "bf16" or "bf16" not in offered  # which takes longest
    for name in offered:
        in_mode = warm.tasks_of(mode.in_mode(open_, name), writes=False)
        kinds = ("linear_forward", "linear_backward")
        wanted = {task.name for task in in_mode if task.name.rpartition("-")[0] in kinds}
        assert wanted and {task.name for task in tasks if task.compute == name} == wanted


def test_every_op_of_a_step_is_a_task_and_a_choice_that_changes_kernels_another_one() -> None:
    def names(run: config.RunFile, *, writes: bool = False) -> set[str]:
        return {task.name for task in warm.tasks_of(run, writes=writes)}

    plain = names(DEMO)
    kinds = {name.rpartition("-")[0] for name in plain}
    assert {
        "attention_backward",
        "linear_forward",
        "adamw",
        "square_sums",
        "swiglu_forward",
    } < kinds
    assert names(config.load("demo", ["run.compute=bf16"])).isdisjoint(plain)
    more = names(config.load("demo", ["model.dropout_attention=0.1"])) - plain
    assert {name.rpartition("-")[0] for name in more} >= {"attention_forward"}
    writing = names(DEMO, writes=True) - plain
    assert [name.rpartition("-")[0] for name in writing] == ["writing"]


def test_a_helper_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    env = {**os.environ, "MYLLM_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    helper = subprocess.Popen(
        [sys.executable, "-m", "dist.warm"], stdin=subprocess.PIPE, env=env, text=True
    )
    assert helper.stdin is not None
    helper.stdin.write(json.dumps({"run": DEMO.to_dict(), "writes": True}) + "\n")
    helper.stdin.flush()
    while not list(tmp_path.rglob("*.lock")):  # it compiles
        assert helper.poll() is None
    helper.stdin.close()
    assert helper.wait(30) == 0
    assert not [path for path in tmp_path.rglob("adamw*.lock") if path.stat().st_size]


def test_a_helper_compiles_for_one_run_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path))
    store = Store(Path(accel.cpu.__file__).parent)
    runs = {"accumulate": DEMO, "gelu_forward": config.load("demo", ["model.ffn=gelu"])}
    tasks = [task for run in runs.values() for task in warm.tasks_of(run, writes=False)]
    left = {kind: next(t for t in tasks if t.name.startswith(kind + "-")) for kind in runs}
    for name in {task.name for task in tasks} - {task.name for task in left.values()}:
        descriptor = store.open_lock(name)
        os.write(descriptor, b"done")
        os.close(descriptor)
    helper = subprocess.Popen(
        [sys.executable, "-m", "dist.warm"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert helper.stdin is not None
    for kind, run in runs.items():
        assert not warm._is_done(store, left[kind])
        helper.stdin.write(json.dumps({"run": run.to_dict(), "writes": False}) + "\n")
        helper.stdin.flush()
        while not warm._is_done(store, left[kind]):
            assert helper.poll() is None
            time.sleep(0.05)
    helper.stdin.close()
    assert helper.wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["demo", "gpt2-small"])
def test_after_it_a_step_finds_all_its_kernels(preset: str, tmp_path: Path) -> None:
    code = f"""
import dataclasses
import numpy as np
from accel import load
from accel.jit import Kernel
from dist import config, monitor, warm
from dist.comm import Solo
from dist.data import make_batch
from dist.step import Stepper, initial_weights
from reference.generate import generate
from reference.params import decoder_layout

run = config.load({preset!r}, ["run.backend=cpu", "run.compute=float32"])
warm.compile_kernels(run, writes=True)

def compiled(self, *types):
    raise AssertionError(f"{{self.py_func.__name__}} was compiled after all")

Kernel._compile_and_load = compiled
model = dataclasses.replace(
    run.model, vocab_size=300, d_model=96, n_layers=2, n_heads=6, d_head=16, d_ff=200,
    n_kv_heads=3 if run.model.n_kv_heads < run.model.n_heads else 6, context_length=64,
)
ops, layout = load("cpu"), decoder_layout(model)
weights = initial_weights(ops, layout, 0)
stepper = Stepper(ops, model, run.optim, layout, Solo(), weights, 0, run.run.recompute)
ids = np.arange(64, dtype=np.int32)
batch = make_batch([(ids, np.ones(64, np.bool_))] * 3)
if run.data.isolate_documents:
    batch = batch._replace(documents=np.zeros_like(batch.ids))
stepper.update(stepper.gradient([batch] * 4, 1, 0), 1e-3)
monitor.measure_peak(ops, Solo())
generate(ops, stepper.params, model, [[1, 2], [3]], max_new_tokens=3, temperature=1.0, seed=1)
"""
    env = {**os.environ, "MYLLM_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling kernels") == 1
