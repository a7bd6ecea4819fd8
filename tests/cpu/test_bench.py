"""``myllm bench cpu`` runs, and its table says what it measured."""

import argparse
import dataclasses
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel import load, waiting
from accel.bench import bandwidth, cpu, llmc, report, scaling, timing
from accel.bench.cases import BY_BYTES, small_ops
from accel.bench.report import Row
from accel.bench.training import SMALL, Training
from accel.cpu import memory
from accel.threads import available_cores, team, threads
from dist import cli
from reference.presets import GPT2_SMALL
from tests.helpers.weights import write_random


def test_it_measures_and_writes_a_table_and_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shallow = dataclasses.replace(SMALL, n_layers=1)
    monkeypatch.setattr(cpu, "SMALL", shallow)
    monkeypatch.setattr(cpu, "STEPS", [cpu.STEPS[0]._replace(config=shallow)])
    monkeypatch.setattr(cpu, "peers", lambda: None)
    table, chart = tmp_path / "table.md", tmp_path / "chart.svg"
    parts = ["--parts", "share,few,decode"]
    command = ["--quick", *parts, "--table", str(table), "--chart", str(chart)]
    assert cpu.main(command) == 0
    text = table.read_text()
    assert text.strip().endswith("|") and text.strip() in capsys.readouterr().out
    [share] = [line for line in text.splitlines() if "outside products" in line]
    assert 0 < float(share.split("|")[4]) < math.inf
    assert text.count("decode a token, float32") == 2 and text.count("set to one thread") == 11
    assert chart.read_text().count("<svg") == 1


def test_the_time_within_functions_is_theirs_and_what_they_call() -> None:
    def inner() -> None:
        time.sleep(0.03)

    def outer() -> None:
        inner()
        time.sleep(0.02)
        inner()

    inside, whole = timing.within(outer, inner)
    assert 0.06 <= inside and inside + 0.02 <= whole
    assert timing.within(outer, outer)[0] >= 0.08
    with pytest.raises(ValueError, match="never was not called"):
        timing.within(outer, inner, never)


def never() -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--parts", "step,steps"], "no part 'steps'"),
        (["--table", "nowhere/x.md"], "no folder nowhere"),
        (["--chart", "x.gif"], "a .png or .svg file"),
        (["--scaling", "--threads", "1"], "--scaling takes every number of threads"),
        (["--llmc", "."], "--parts llmc and --llmc DIR"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cpu.main(["--quick", *arguments])
    assert why in capsys.readouterr().err


def test_a_result_that_is_wrong_ends_its_part_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(bench: cpu.Bench) -> list[Row]:
        timing.check("an op", float("nan"), 1.0)
        return []

    monkeypatch.setitem(cpu.PARTS, "ops", wrong)
    monkeypatch.setitem(cpu.PARTS, "decode", lambda bench: [Row("a token", 0.001)])
    assert cpu.main(["--quick", "--parts", "ops,decode"]) == 1
    said = capsys.readouterr()
    assert "an op differs" in said.err and "a token" in said.out


def arguments(table: Path) -> argparse.Namespace:
    return report.parse(report.parser("x", "", "x"), ["--table", str(table)])


def test_a_row_is_in_the_table_before_the_next_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"

    def measure() -> Iterator[Row]:
        for what in ("one", "two"):
            yield Row(what, 1.0)
            assert f"| {what} " in table.read_text() and f"| {what} " in capsys.readouterr().out

    parser = report.parser("x", "", "x")
    assert report.run(parser, arguments(table), "here", {"part": measure}) == 0


def test_an_interruption_keeps_what_was_measured_and_says_so_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"

    def measure() -> Iterator[Row]:
        yield Row("one", 1.0)
        raise KeyboardInterrupt

    parts = {"first": measure, "second": lambda: pytest.fail("it went on")}
    assert report.run(report.parser("x", "", "x"), arguments(table), "here", parts) == 130
    assert table.read_text().splitlines()[-1].startswith("| one ")
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"myllm bench x: interrupted after 1 row, which {table} keeps"


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("time", 1.0, 2.0, 0.5), "≤ 0.50 met"),
        (Row("time", 1.1, 2.0, 0.5), "≤ 0.50 MISSED"),
        (Row("speed", 6.9, 2.0, 3.5, "MB/s"), "≥ 3.50 MISSED"),
        (Row("speed", 7.0, 2.0, 3.5, "MB/s"), "≥ 3.50 met"),
        (Row("start", 2.9, bar=3.0), "≤ 3,000 ms met"),
        (Row("share", 0.021, bar=0.02, unit="%"), "≤ 2.00 % MISSED"),
    ],
)
def test_a_promise_is_kept_or_missed(row: Row, verdict: str) -> None:
    assert verdict in str(row)


def test_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=take)
    monkeypatch.setattr(timing, "time", clock)
    functions = {"a": lambda: take(0.002), "b": lambda: take(0.5)}
    times = timing.alternate(functions, sample=0.02, want=3, budget=0)
    assert times == pytest.approx({"a": 0.002, "b": 0.5})


def test_the_chart_names_every_row_with_a_ratio(tmp_path: Path) -> None:
    report.chart([Row("one", 1.0, 4.0, 0.35), Row("another", 1.0)], tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert "<!-- one -->" in text and "<!-- another -->" not in text


def test_samples_that_waited_for_a_core_are_left_out() -> None:
    clean = [(1.0, 0.0), (2.0, 0.01), (3.0, 0.02)]
    assert timing._median([*clean, (9.0, 0.5), (9.0, 0.5)]) == 2.0
    assert timing._median([(9.0, 0.9), (1.0, 0.1), (2.0, 0.2), (3.0, 0.3)]) == 2.0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (638 * 2**20, "B", "638 MiB"),
        (7.5e-5, "s", "0.075 ms"),
        (1.0265, "s", "1,026 ms"),
        (18.74, "s", "18.7 s"),
        (0.0117, "%", "1.17 %"),
        (155.2, "MB/s", "155 MB/s"),
    ],
)
def test_quantities_have_three_digits(value: float, unit: str, text: str) -> None:
    assert report._quantity(value, unit) == text


# ---- llm.c ---------------------------------------------------------------------------------------

# Speaks as llm.c's train_gpt2.c does, and holds its files to their headers.
LIKE_LLMC = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int *head(const char *name, int magic, int version) {
    static int header[256];
    FILE *file = fopen(name, "rb");
    if (!file || fread(header, 4, 256, file) != 256) { printf("no %s\\n", name); exit(1); }
    if (header[0] != magic || header[1] != version) { printf("bad %s\\n", name); exit(1); }
    fclose(file);
    return header;
}
int main() {
    double losses[] = {LOSSES};
    if (head("gpt2_124M.bin", 20240326, 3)[7] != PADDED) { printf("not padded\\n"); return 1; }
    if (head("dev/data/tinyshakespeare/TRAIN", 20240520, 1)[2] != 257) return 1;
    printf("num_parameters: 1\\nval loss 1\\n");
    for (int step = 0; step < COUNT; step++)
        printf("step %d: train loss %f (took %f ms)\\n", step, losses[step], 250.0);
    fprintf(stderr, "out of steps\\n");
    if (COUNT > 40) pause();
    return 3;
}
"""
TINY_GPT2 = dataclasses.replace(
    GPT2_SMALL, vocab_size=150, n_layers=2, d_model=32, n_heads=2, n_kv_heads=2, d_head=16, d_ff=128
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc on this machine")
    folder = tmp_path / "llm.c"
    folder.mkdir()
    return folder


def write_program(folder: Path, losses: list[float], count: int = 41) -> None:
    text = LIKE_LLMC.replace("LOSSES", ", ".join(map(str, losses))).replace("COUNT", str(count))
    text = text.replace("TRAIN", llmc.TRAIN)
    (folder / "train_gpt2.c").write_text(text.replace("PADDED", "256"))


def true_losses(n: int) -> list[float]:
    """Return the losses of steps as the reference takes them, by llm.c's settings."""
    model = Training(load("reference"), TINY_GPT2, llmc.B, llmc.T)
    tokens = np.random.default_rng(0).integers(0, 150, llmc.B * llmc.T + 1).astype(np.int32)
    model.settings = llmc.SETTINGS
    model.take(tokens[:-1].reshape(llmc.B, llmc.T), tokens[1:].reshape(llmc.B, llmc.T))
    return [model.step() for _ in range(n)]


def test_llm_c_s_trainer_is_built_fed_and_timed(checkout: Path) -> None:
    write_program(checkout, [*true_losses(2), 9.9])
    [row] = llmc.compare(checkout, ["float32"], quick=True, config=TINY_GPT2)
    assert row.theirs == 0.25 and row.ours > 0 and row.bar == 0.16


@pytest.mark.parametrize(
    ("losses", "count", "why"),
    [
        ([1.0, 1.0], 41, "our loss of step 0, float32, differs from llm.c's"),
        ([1.0, 1.0], 1, r"llm.c's trainer ended early \(status 3\): out of steps"),
    ],
)
def test_another_loss_or_an_early_end_is_not_timed(
    checkout: Path, losses: list[float], count: int, why: str
) -> None:
    write_program(checkout, losses, count)
    with pytest.raises(ValueError, match=why):
        next(llmc.compare(checkout, ["float32"], quick=True, config=TINY_GPT2))


def test_a_step_that_learns_otherwise_is_not_timed(checkout: Path) -> None:
    first, second = true_losses(2)
    write_program(checkout, [first, second * 1.01])
    with pytest.raises(ValueError, match="our loss of step 1, float32, differs"):
        next(llmc.compare(checkout, ["float32"], quick=True, config=TINY_GPT2))


def test_without_llm_c_or_a_compiler_a_sentence_says_so(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--parts", "llmc", "--llmc", str(checkout)]
    assert cpu.main(words) == 1
    assert "has no train_gpt2.c: give --llmc a checkout of https" in capsys.readouterr().err
    (checkout / "train_gpt2.c").write_text("int main( {")
    assert cpu.main(words) == 1
    assert "did not compile" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert cpu.main(words) == 1
    assert "there is no C compiler to build llm.c with" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cpu.main(["--parts", "llmc"])
    assert "--llmc DIR" in capsys.readouterr().err


def test_its_checkpoint_is_the_one_that_is_exported(tmp_path: Path) -> None:
    views = write_random(tmp_path / "mine", TINY_GPT2)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "exported.bin")]) == 0
    llmc.write_checkpoint(tmp_path / "ours.bin", TINY_GPT2, views)
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "exported.bin").read_bytes()


# ---- scaling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "counts", "divisions"),
    [
        (1, [1], [(1, 1)]),
        (2, [1, 2], [(1, 2), (2, 1)]),
        (6, [1, 2, 4, 6], [(1, 6), (2, 3)]),
        (64, [1, 2, 4, 8, 16, 32, 64], [(2**i, 2 ** (6 - i)) for i in range(7)]),
    ],
)
def test_scaling_goes_up_to_all_cores(
    cores: int, counts: list[int], divisions: list[tuple[int, int]]
) -> None:
    assert scaling.counts(cores) == counts
    assert scaling.divisions(cores) == divisions


def test_scaling_prints_threads_and_ranks_by_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cpu, "offered", lambda backend: ["float32"])
    monkeypatch.setattr(scaling, "available_cores", lambda: 4)
    monkeypatch.setattr(scaling, "set_threads", asked.append)

    def taken(functions: dict[str, Callable[[], object]], **how: object) -> dict[str, float]:
        times = {}
        for name, call in functions.items():
            call()
            times[name] = 0.02 / asked[-1] ** 0.5
        return times

    monkeypatch.setattr(scaling, "alternate", taken)
    work = scaling.Work("some work", 3.0, "GB/s", lambda: None)
    monkeypatch.setattr(scaling, "step_work", lambda mode: work)
    monkeypatch.setattr(scaling, "op_works", lambda ops: iter(()))
    speeds = {1: 100.0, 2: 90.0, 4: 70.0}
    monkeypatch.setattr(scaling, "together", lambda mode, ranks, each, seconds: speeds[ranks])
    assert cpu.main(["--scaling", "--quick"]) == 0
    cells = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    rows = {cell[1]: cell[2:] for cell in cells if len(cell) > 4}
    assert rows["some work, 1 / 1 threads"][:3] == ["150 GB/s", "150 GB/s", "1.00"]
    assert rows["some work, 2 / 1 threads"][2] == "1.41"
    four = rows["some work, 4 / 1 threads"]
    assert (four[0], four[2], four[-2]) == ("300 GB/s", "2.00", "50% of 4")
    assert rows["a step, 12.6 M, float32, 4 × 1 / 1 × 4"][:3] == [
        "70.0 tokens/s",
        "100 tokens/s",
        "0.70",
    ]
    assert asked[-1] == threads()  # as before


@pytest.mark.slow  # two processes train a model of 12.6 M
def test_ranks_train_at_the_same_time() -> None:
    if available_cores() < 2:
        pytest.skip("one core has one rank")
    one = scaling.together("float32", 1, 1, 1.0)
    two = scaling.together("float32", 2, 1, 1.0)
    assert 0 < one and one < two < 3 * one
    with pytest.raises(ValueError, match="ended before it had trained"):
        scaling.together("float16", 1, 1, 1.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_steps_of_a_mode_are_held_to_pytorch_s_apart_from_another_mode_s(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {
        "ours float32": 3.0, "float32 eager": 4.0, "float32 compiled": 3.5,
        "ours bf16": 1.0, "bf16 eager": 2.5, "bf16 compiled": 2.0,
    }  # fmt: skip
    timed: list[list[str]] = []

    def step_of(name: str) -> Callable[[], str]:
        return lambda: name

    def training(mode: str, *given: Any) -> SimpleNamespace:
        nothing = dict.fromkeys(("initial", "ids", "targets"))
        return SimpleNamespace(step=step_of(f"ours {mode}"), check=lambda *_: None, **nothing)

    def peer(*given: Any, kind: str, compiled: bool = False) -> SimpleNamespace:
        name = f"{kind} {'compiled' if compiled else 'eager'}"
        return SimpleNamespace(step=step_of(name), gradient=lambda: (0.0, {}))

    def alternate(functions: dict[str, Callable[[], str]], **how: Any) -> dict[str, float]:
        timed.append([function() for function in functions.values()])
        return {side: seconds[function()] for side, function in functions.items()}

    monkeypatch.setattr(cpu, "load", lambda backend, compute: compute)
    monkeypatch.setattr(cpu, "Training", training)
    monkeypatch.setattr(cpu, "alternate", alternate)
    bench = cpu.Bench(
        ["float32", "bf16"], SimpleNamespace(Peer=peer), quick=True, compiled=compiled
    )
    rows = [(row.ours, row.theirs, row.bar) for row in bench.step(cpu.STEPS[0], compiled)]
    best = 2.0 if compiled else 2.5
    in_float32 = [(3.0, 4.0, 0.8), (3.0, 3.5, 0.93)][: 1 + compiled]
    assert rows == [*in_float32, (1.0, 4.0, 0.25), (1.0, best, 0.68)]
    assert [[name for name in names if "ours" in name] for names in timed] == [
        ["ours float32"],
        ["ours bf16"],
    ]


def test_beside_busy_processes_a_step_is_held_to_a_fair_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def begun(*args: Any, **how: Any) -> subprocess.Popen[bytes]:
        counting.append(start(*args, **how))
        return counting[-1]

    @contextmanager
    def training(*args: Any, **environment: str) -> Iterator[Callable[[], float]]:
        def speed() -> float:
            running = sum(process.poll() is None for process in counting)
            return 1024 / {0: 0.04, 1: 0.09, 2: 0.1}[running] / (2 if environment else 1)

        yield speed

    monkeypatch.setattr(subprocess, "Popen", begun)
    monkeypatch.setattr(scaling, "training", training)
    monkeypatch.setattr(scaling, "threads", lambda: 2)
    idle, one, two = scaling.busy(quick=True)
    assert len(counting) == 3 and all(process.poll() is not None for process in counting)
    assert [row.ours for row in (idle, one, two)] == pytest.approx([0.04, 0.09, 0.1])
    # three and four that compute share two cores
    assert [row.theirs for row in (idle, one, two)] == pytest.approx([0.08, 0.06, 0.08])
    assert [row.bar for row in (idle, one, two)] == [1.03, 1.5, 1.5]
    assert two.note == "waiting as GNU does 200 ms"


def test_what_is_timed_gives_no_memory_back_and_has_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a first step does, which then pays for page faults."""
    given: list[int] = []
    monkeypatch.setattr(memory, "_arena", memory.Arena())
    monkeypatch.setattr(memory, "PLANNED", 8 << 20)
    monkeypatch.setattr(memory, "give_back", lambda *where: given.append(where[-1]))
    ops = load("cpu")

    def call() -> None:
        for _ in range(2):
            memory.empty(16 << 20, np.uint8)

    monkeypatch.setattr(waiting, "fair", lambda n: 1)
    with timing.settled(ops, call):
        assert team() == threads()
        assert given  # by the step before
        given.clear()
        for _ in range(3):
            call()
    assert not given


# ---- bytes ---------------------------------------------------------------------------------------


def test_bytes_moved_are_those_of_the_arrays_read_and_written() -> None:
    ops = load("reference")
    for case in small_ops([(16, 64)]):
        if case.op not in BY_BYTES:
            continue
        found = case.forward(ops)()
        out = found[0] if isinstance(found, tuple) else found
        to, fro = bandwidth.moved(case)
        large = [array for array in case.arrays if array.size == out.size]
        if case.op == "embedding":
            ids, table = case.arrays
            assert to == ids.nbytes + out.nbytes + table[ids].nbytes
            assert fro == ids.nbytes + out.nbytes + table.nbytes
        else:
            assert to == sum(array.nbytes for array in large) + out.nbytes
            # dout, dx, and x where the backward reads it
            reads_x = case.op in ("relu", "rmsnorm", "layernorm")
            assert fro == (0 if case.op in ("add", "softmax") else (2 + reads_x) * out.nbytes)


def test_every_op_bound_by_memory_has_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bandwidth, "PARAMETERS", 5000)
    monkeypatch.setattr(bandwidth, "FAR", 8e6)
    monkeypatch.setattr(bandwidth, "small_ops", lambda: small_ops([(16, 64)]))
    assert cpu.main(["--quick", "--parts", "bytes"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "/ a copy" in line]
    named = [" ".join(line.split()[1:3]) for line in lines]
    two = ("scale", "relu", "embedding", "rmsnorm", "layernorm")
    assert sorted(named) == sorted(
        ["adamw 12.6", "add forward", "softmax forward"]
        + [f"{op} {way}" for op in two for way in ("forward", "backward")]
        + [f"{op} backward," for op in ("rmsnorm", "layernorm")]
    )
    assert all("GB/s" in line and "≥ 0.90" in line for line in lines)


def test_of_three_visits_to_an_op_the_middle_ratio_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    once = ("add forward", lambda: None, 1e9)
    seconds = iter([0.5, 2.0, 0.25])
    monkeypatch.setattr(bandwidth, "calls", lambda ops, cases: iter([once]))
    monkeypatch.setattr(bandwidth, "copies", lambda n_bytes: {f"{n_bytes} in pieces": None})
    monkeypatch.setattr(
        bandwidth,
        "alternate",
        lambda calls, **how: {**dict.fromkeys(calls, 1.0), "op": next(seconds)},
    )
    (row,) = bandwidth.rows(load("cpu"), quick=False)
    assert row.ours == 2.0
