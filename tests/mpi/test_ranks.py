"""Many ranks: the same bits, and no rank ever left waiting."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from dist import checkpoint, launch
from dist.config import RunFile, from_tables
from dist.monitor import read_metrics
from dist.weights import load_master
from tests.helpers import ROOT
from tests.helpers import runs as here
from tests.helpers.processes import of_processor, of_run, run_file, start, wait_for
from tests.helpers.runs import ENVIRONMENT, digest, losses, prepare, save_run_file, with_run

pytestmark = pytest.mark.mpi


def train(config: RunFile, ranks: int, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Train on ranks, or, where one is asked for and nothing more, in this process."""
    if ranks == 1 and not environment:
        return here.train(config, *arguments), "", ""
    return start(config, ranks, *arguments, **environment).end(600)


def train_in_threads(config: RunFile, ranks: int, n: int) -> tuple[int, str, str]:
    """Train on ranks of so many threads, or, where one is asked for, in this process."""
    if ranks > 1:
        return train(config, ranks, MYLLM_THREADS=str(n))
    with here.in_threads(n):
        return train(config, 1)


def test_any_number_of_ranks_learns_the_same_bits(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__eval_every=3, model__dropout_residual=0.2)
    # of four ranks the next tests learn the same
    runs = {w: with_run(config, out=str(tmp_path / f"w{w}")) for w in (1, 2, 8)}
    for ranks, run in runs.items():
        status, _, err = train(run, ranks)
        assert status == 0, err
    assert len({digest(run) for run in runs.values()}) == 1
    assert all(losses(run) == losses(runs[1]) for run in runs.values())


# layers of three blocks of 65,536 parameters, so that each has something to send by itself
DEEP = {"model__n_layers": 3, "model__d_model": 96, "model__d_ff": 700, "train__steps": 2}


def test_what_travels_beside_the_backward_adds_up_to_the_same_bits(tmp_path: Path) -> None:
    """Whether the last leaf of a rank is its fourth, its second or its first."""
    config = prepare(tmp_path, **DEEP, train__global_batch=4, model__dropout_residual=0.2)
    found = {}
    for ranks, overlap in ((1, True), (2, True), (2, False), (4, True)):
        run = with_run(config, out=str(tmp_path / f"w{ranks}{overlap}"), overlap=overlap)
        status, _, err = train(run, ranks)
        assert status == 0, err
        steps = [record for record in read_metrics(Path(run.run.out)) if "loss" in record]
        hidden = sum(step["hidden_ms"] for step in steps)
        assert (hidden > 0) == (overlap and ranks > 1)
        found[ranks, overlap] = digest(run), [(step["loss"], step["norm"]) for step in steps]
    assert all(result == found[1, True] for result in found.values())


def test_an_mpi_that_lets_one_thread_speak_exchanges_after_the_backward(tmp_path: Path) -> None:
    config = prepare(tmp_path, **DEEP)
    status, out, err = train(config, 2, MPI4PY_RC_THREAD_LEVEL="funneled")
    assert status == 0, err
    assert "gradients travel when the backward has ended: " in out
    assert "lets one thread speak only" in out
    steps = [record for record in read_metrics(Path(config.run.out)) if "loss" in record]
    assert all(step["hidden_ms"] == 0 for step in steps)


@pytest.mark.parametrize(
    ("compute", "kind"), [("float32", "adamw"), ("bf16", "adamw"), ("bf16", "muon")]
)
def test_the_cpu_backend_learns_the_same_bits_on_any_ranks_and_threads(
    tmp_path: Path, compute: str, kind: str
) -> None:
    config = prepare(
        tmp_path,
        run__backend="cpu",
        run__compute=compute,
        optim__kind=kind,
        train__steps=4,
        model__dropout_residual=0.2,
        model__vocab_size=5000,  # more than one block, so that ranks share the embedding
        optim__embedding_rate=3.0,
    )
    digests = set()
    for ranks, n in ((1, 2), (2, 1), (4, 1)):
        run = with_run(config, out=str(tmp_path / f"w{ranks}t{n}"))
        status, _, err = train_in_threads(run, ranks, n)
        assert status == 0, err
        digests.add(digest(run))
    assert len(digests) == 1


@pytest.mark.slow
def test_ranks_that_start_together_on_a_cold_kernel_cache_do_not_race(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__backend="cpu", train__steps=2)
    runs = [with_run(config, out=str(tmp_path / name)) for name in ("cold", "warm")]
    for run in runs:
        status, _, err = train(run, 4, MYLLM_CACHE_DIR=str(tmp_path / "cache"))
        assert status == 0, err
        assert err.count("compiling kernels of accel.cpu") == (run is runs[0])
    assert digest(runs[0]) == digest(runs[1])


@pytest.mark.slow
def test_open_mpi_passes_these_tests_too(tmp_path: Path) -> None:
    """In an environment of its own: the two MPIs' packages overwrite each other's files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [*project["dependencies"], "openmpi", "pytest", "hypothesis"]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    kind = "from dist.launch import find_mpirun; print(find_mpirun()[1])"
    said = subprocess.run([python, "-c", kind], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.strip() == "openmpi", said.stderr
    words = [python, "-m", "pytest", "-q", "-m", "not slow", str(Path(__file__).parent)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "no tests ran" not in done.stdout


def test_a_run_resumes_on_other_ranks_and_threads(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__backend="cpu", run__checkpoint_every=2, run__keep=9)
    assert train(config, 2)[0] == 0
    whole = digest(config)
    latest = Path(config.run.out) / "checkpoints" / "latest"
    for ranks, n in ((4, 1), (1, 2)):
        latest.write_text("step-00000002\n")
        assert train_in_threads(config, ranks, n)[0] == 0
        assert digest(config) == whole


# prints how much of a second's wait for rank 0 each way to wait takes of a processor
WAITS = """
import time
import numpy as np
from dist.comm import start

comm = start()
flat = np.zeros(2, np.float32)
waits = {
    "broadcast": lambda: comm.broadcast(1),
    "all_gather": lambda: comm.all_gather(1),
    "barrier": comm.barrier,
    "exchange": lambda: comm.levels[0].exchange(flat, [0, 1, 2]),
}
for name, wait in waits.items():
    wait()  # so that both begin the next together
    if comm.rank == 0:
        time.sleep(1)
    before = time.process_time()
    wait()
    if comm.rank:
        print(name, time.process_time() - before, flush=True)
comm.finish()
"""


# prints the mode that each rank takes; rank 1 alone would take bf16, which the reference has not
CHOOSES = """
import sys
from dist import config, mode
from dist.comm import start
from dist.train import Trainer

comm = start()
mode.measure = lambda *_: {"float32": 1.0, "bf16": 2.0 - 1.5 * comm.rank}
taken = comm.all_gather(Trainer(config.load(sys.argv[1]), comm).config.run.compute)
if comm.rank == 0:  # mpirun may put what two ranks print into one line
    print(*taken, flush=True)
comm.finish()
"""


def said_by_two(code: str, *arguments: str) -> list[list[str]]:
    """Return the words of each line that one of two ranks prints."""
    mpirun, kind = launch.find_mpirun()
    words = launch.command(mpirun, kind, 2, [])[:-2]  # without -m dist
    environment = {**launch.environment(2), **ENVIRONMENT}
    done = subprocess.run(
        [*words, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_a_rank_that_waits_soon_leaves_its_core_to_others() -> None:
    taken = dict(said_by_two(WAITS))
    assert len(taken) == 4 and max(map(float, taken.values())) < 0.3, taken


def test_rank_0_chooses_the_mode_of_all(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__compute="auto")
    path = save_run_file(config, tmp_path / "run.toml")
    assert said_by_two(CHOOSES, str(path)) == [["float32", "float32"]]


def test_ranks_import_nothing_from_the_folder_they_are_started_in(tmp_path: Path) -> None:
    config = prepare(tmp_path, train__steps=2)
    (tmp_path / "random.py").write_text("raise SystemExit('a stranger was imported')")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "__init__.py").touch()
    path = save_run_file(config, tmp_path / "c.toml")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dist", "train", str(path), "--ranks", "2"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    config = prepare(tmp_path, train__steps=100_000)
    run = start(config, 2)
    wait_for(lambda: len(losses(config)) >= 3)
    run.process.kill()
    run.end()
    assert len(losses(config)) < 100_000


@pytest.mark.parametrize(("steps", "ranks"), [(1, 2), (1000, 2)])
def test_a_disk_that_takes_no_metrics_ends_all_ranks_with_a_sentence(
    tmp_path: Path, steps: int, ranks: int
) -> None:
    config = prepare(tmp_path, train__steps=steps)
    status, out, err = train(config, ranks, FAULT="0 metrics ENOSPC")
    assert status == 1
    assert err.count("the-file: No space left on device") == 1
    assert "Traceback" not in err
    assert "step    3/1000" not in out


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        *((0, "step"), (1, "checkpoint")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((0, "start"), (1, "start"), (1, "step"), (1, "evaluation")),
                *((0, "checkpoint"), (0, "prune"), (1, "finish")),
            )
        ),
    ],
)
def test_an_exception_on_one_rank_ends_all_and_is_shown_once(
    tmp_path: Path, where: str, rank: int
) -> None:
    config = prepare(tmp_path, run__eval_every=4, run__checkpoint_every=6)
    run = start(config, 4, FAULT=f"{rank} {where} raise")
    status, out, err = run.end()
    assert run.since_fault() < of_processor(5)
    assert status == 1
    assert err.count("RuntimeError: a fault planted") == 1, err
    assert err.count(f"myllm train: rank {rank}: a fault planted on one rank") == 1
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("rank", "where", "how"),
    [
        (1, "checkpoint", "ENOSPC"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, "checkpoint", "EROFS"), (1, "evaluation", "EIO"), (0, "step", "EIO"))
        ),
    ],
)
def test_a_disk_that_fails_one_rank_is_one_sentence_and_the_run_goes_on(
    tmp_path: Path, rank: int, where: str, how: str
) -> None:
    config = prepare(tmp_path, run__eval_every=4, run__checkpoint_every=2, train__steps=8)
    whole = with_run(config, out=str(tmp_path / "whole"))
    assert here.train(whole) == 0
    run = start(config, 2, FAULT=f"{rank} {where} {how}")
    status, _, err = run.end()
    assert run.since_fault() < of_processor(5)
    assert status == 1 and err.count(os.strerror(getattr(errno, how))) == 1, err
    assert err.startswith("myllm train: ") and "Traceback" not in err
    folder = Path(config.run.out) / "checkpoints"
    for step in checkpoint.steps(folder):
        load_master(folder / checkpoint.folder_name(step))
    assert train(config, 2)[0] == 0 and digest(config) == digest(whole)


@contextlib.contextmanager
def stopped(config: RunFile) -> Iterator[None]:
    """Let no rank of a run do anything."""
    there = of_run(run_file(config)).items()
    ranks = [psutil.Process(pid) for name, pid in there if name.startswith("rank")]
    for rank in ranks:
        rank.suspend()
    wait_for(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    yield
    for rank in ranks:
        rank.resume()


@pytest.mark.slow
def test_a_copy_of_a_run_of_two_ranks_at_any_fsync_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """What a crash of the machine leaves, whichever rank was about to fsync what."""
    config = prepare(tmp_path, run__checkpoint_every=2, run__eval_every=2, run__keep=1)
    asked, copies = tmp_path / "asked", tmp_path / "copies"
    asked.mkdir()
    copies.mkdir()
    run = start(config, 2, ASK=str(asked))
    askers: set[str] = set()
    while run.process.poll() is None:
        time.sleep(0.002)
        for ask in asked.iterdir():
            with stopped(config):
                shutil.copytree(config.run.out, copies / f"{len(list(copies.iterdir())):03d}")
            askers.add(ask.name.split("-")[0])
            ask.unlink()
    assert run.end()[0] == 0
    whole, moments = digest(config), sorted(copies.iterdir())
    assert len(askers) == 2 and len(moments) > 20
    for copy in moments:
        resumed = with_run(config, out=str(copy))
        assert here.train(resumed) == 0
        assert digest(resumed) == whole, copy


def test_a_shard_that_is_damaged_ends_all_ranks_with_a_sentence(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    path = tmp_path / "train" / "00001.bin"
    raw = bytearray(path.read_bytes())
    raw[1500] ^= 1
    path.write_bytes(raw)
    status, _, err = train(config, 2)
    assert status == 1 and "Traceback" not in err
    assert re.search(r"myllm train: rank \d: .*00001\.bin has changed since it was packed", err)


ELSEWHERE = """
import os, sys
from dist.cli import main
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.chdir(("first", "second")[rank])
sys.exit(main())
"""


@pytest.mark.parametrize("what", ["texts", "weights"])
def test_machines_with_other_copies_end_together_with_a_sentence(tmp_path: Path, what: str) -> None:
    """Rank 1 is in a folder of its own, as on a machine of its own."""
    here.write_dataset(tmp_path / "first" / "data", here.random_walk(1900))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    config = prepare(tmp_path, train__steps=2)
    begun = with_run(config, out=str(tmp_path / "first" / "init"))
    assert here.train(begun) == 0
    shutil.copytree(tmp_path / "first" / "init", tmp_path / "second" / "init")
    more = {"data__train": "data", "data__heldout": ""}
    if what == "weights":
        more |= {"train__init": "init"}
        other = replace(begun, train=replace(begun.train, lr=0.1, steps=3))
        assert here.train(with_run(other, out=str(tmp_path / "second/init")), "--changed") == 0
    else:
        shutil.rmtree(tmp_path / "second" / "data")
        here.write_dataset(tmp_path / "second" / "data", here.random_walk(1900, seed=8))
    config = from_tables(here.tables(tmp_path, **more))
    path = save_run_file(config, tmp_path / "run.toml")
    words = launch.command(*launch.find_mpirun(), 2, ["train", str(path)])
    words[words.index("-m") : words.index("train")] = ["-c", ELSEWHERE]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**launch.environment(2), **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    named = "data" if what == "texts" else "init"
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count(f"rank 1 reads another {named} than rank 0") == 1


@pytest.mark.parametrize(
    ("where", "value"),
    [("gradient", "nan"), pytest.param("loss", "inf", marks=pytest.mark.slow)],
)
def test_a_number_that_is_not_finite_on_one_rank_is_taken_on_none(
    tmp_path: Path, where: str, value: str
) -> None:
    config = prepare(tmp_path, train__global_batch=2)
    status, _, err = start(config, 2, FAULT=f"1 {where} {value}").end()
    assert status == 0, err
    steps = [r for r in read_metrics(Path(config.run.out)) if "skipped" in r]
    assert [r["step"] for r in steps if r["skipped"]] == [3] and len(steps) == 6
    weights = load_master(checkpoint.find(config.run.out))
    assert np.isfinite(weights).all()


def test_weights_that_are_spoilt_on_one_rank_end_the_run_and_its_last_good_checkpoint_is_named(
    tmp_path: Path,
) -> None:
    config = prepare(tmp_path, train__global_batch=2, run__checkpoint_every=1, run__patience=3)
    status, _, err = start(config, 2, FAULT="1 weights nan").end()
    assert status == 1 and "Traceback" not in err
    assert "in 3 steps in a row, the last of them step 5" in err
    assert (
        f"the last good checkpoint is {Path(config.run.out) / 'checkpoints/step-00000002'}" in err
    )
    assert train(config, 2)[0] == 0  # goes on from it
    whole = with_run(config, out=str(tmp_path / "whole"))
    assert train(whole, 1)[0] == 0 and digest(config) == digest(whole)


@pytest.mark.parametrize(
    "moment", [1.5, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.5, 3.0))]
)
def test_an_mpirun_that_is_killed_leaves_no_ranks(tmp_path: Path, moment: float) -> None:
    run = start(prepare(tmp_path, train__steps=100_000), 4)
    wait_for(lambda: "rank 3" in of_run(run_file(run.config)))
    time.sleep(moment)
    run.ask("mpirun", signal.SIGKILL)
    assert run.end()[0] != 0


def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    config = prepare(tmp_path, train__steps=1000)
    status, out, _ = start(config, 4, FAULT="1 step kill").end()
    assert status != 0
    assert "step    2/1000" in out and "step    4/1000" not in out


@pytest.mark.parametrize(
    "whom",
    ["all", *(pytest.param(w, marks=pytest.mark.slow) for w in ("rank 1", "mpirun", "launcher"))],
)
def test_what_is_killed_in_the_middle_of_a_checkpoint_goes_on_to_the_same_bits(
    tmp_path: Path, whom: str
) -> None:
    config = prepare(tmp_path, train__steps=12, run__checkpoint_every=2)
    whole = with_run(config, out=str(tmp_path / "whole"))
    assert train(whole, 1)[0] == 0
    run = start(config, 2, FAULT="0 checkpoint slow")  # the first to be written waits
    half = Path(config.run.out) / "checkpoints" / "step-00000002.tmp"
    wait_for(half.is_dir)
    for name, process in of_run(run_file(config)).items():
        if whom in ("all", name):
            os.kill(process, signal.SIGKILL)
    assert run.end()[0] != 0
    assert half.is_dir() and checkpoint.steps(half.parent) == []
    assert train(config, 4)[0] == 0
    assert digest(config) == digest(whole) and not half.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_a_run_that_goes_on(tmp_path: Path, number: int) -> None:
    config = prepare(tmp_path, train__steps=4000)
    run = start(config, 2)
    wait_for(lambda: len(losses(config)) >= 3)
    run.ask("launcher", number)
    status, out, err = run.end()
    assert status == 128 + number, err
    stopped = re.search(r"stopped after step (\d+)", out)
    assert stopped is not None
    steps = int(stopped[1])
    status, out, _ = train(config, 2, "--set", f"train.steps={steps + 2}", "--changed")
    assert status == 0 and f"going on after step {steps}" in out
    assert len(losses(config)) == steps + 2


def test_bad_input_is_said_once(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    (tmp_path / "train" / "00001.bin").write_bytes(b"")
    status, _, err = train(config, 4)
    assert status != 0
    assert err.count("00001.bin is empty") == 1 and "Traceback" not in err
    status, _, err = train(config, 3)
    assert status == 1 and "power of two" in err and err.count("\n") == 1


def test_with_muon_any_number_of_ranks_learns_the_same_bits_and_goes_on(tmp_path: Path) -> None:
    """Matrices of more than one block, beside the backward or after it, on more ranks than some."""
    config = prepare(tmp_path, **DEEP, optim__kind="muon", run__checkpoint_every=1, run__keep=9)
    found = {}
    for ranks, overlap in ((1, True), (2, False), (8, True)):
        run = with_run(config, out=str(tmp_path / f"w{ranks}"), overlap=overlap)
        status, _, err = train(run, ranks)
        assert status == 0, err
        steps = [record for record in read_metrics(Path(run.run.out)) if "loss" in record]
        found[ranks] = digest(run), [(step["loss"], step["norm"]) for step in steps]
    assert all(result == found[1] for result in found.values())
    resumed = with_run(config, out=str(tmp_path / "w8"))
    (Path(resumed.run.out) / "checkpoints" / "latest").write_text("step-00000001\n")
    status, _, err = train(resumed, 2)
    assert status == 0, err
    assert digest(resumed) == found[1][0]
