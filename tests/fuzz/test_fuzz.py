"""Whatever a file or a number holds, the commands succeed or say why not, in one sentence.

What once did otherwise lies in ``corpus``. ``python -m tests.fuzz`` looks for more.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import world as fuzzing
from tests.fuzz.__main__ import CORPUS, temporary
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.world import Input, World
from tests.helpers import ROOT

FRESH = 20  # inputs of each kind


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    folder = temporary()
    made = World(folder)
    made.build()
    yield made
    fuzzing.shutil.rmtree(folder)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_once_failed_ends_in_a_sentence(world: World, path: Path) -> None:
    assert world.try_(Input.from_json(path.read_bytes())) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutated_inputs_end_in_a_sentence(world: World, kind: Kind) -> None:
    for i in range(FRESH):
        tried = kind(random.Random(f"{kind.__name__}/{i}"), world)
        assert world.try_(tried) == [], tried


def test_an_input_is_the_same_as_a_file_of_the_corpus() -> None:
    tried = Input("x", {"a/b": b"\xff\0"}, [["plan", "\ud800"]], {"A": "1"})
    assert Input.from_json(tried.to_json()) == tried


def test_the_harness_knows_every_way_to_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(how: str) -> int:
        if how == "memory":
            return len(bytearray(8 << 30))
        if how == "time":
            while True:
                pass
        if how == "wait":
            time.sleep(60)
        if how == "traceback":
            print("Traceback (most recent call last):", file=sys.stderr)
        if how == "long":
            print("myllm " + "x" * 5000, file=sys.stderr)
            return 1
        if how == "status":
            return 3
        return {}["missing"] if how == "escape" else 0

    monkeypatch.setattr(fuzzing, "SECONDS", 0.2)
    monkeypatch.setattr(fuzzing.cli, "main", lambda command: fail(command[0]))
    expected = {
        "memory": "MemoryError: ",
        "time": "takes too long: ",
        "wait": "takes too long: ",
        "traceback": "prints a traceback: ",
        "long": "says 4000 characters",
        "status": "ends with status 3 and no sentence",
        "escape": "KeyError: ",
    }
    for how, place in expected.items():
        (finding,) = world.try_(Input("x", {}, [[how]]))
        assert finding.place.startswith(place)
    assert world.try_(Input("x", {}, [["nothing"]])) == []


def test_a_process_that_dies_is_a_finding(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from tests.fuzz import workers

workers.drawn = lambda rng, world: os.kill(os.getpid(), 11)

if __name__ == "__main__":
    worker = workers.Worker(Path(sys.argv[1]))
    worker.start("seed")
    print(worker.hear()[0].place)
"""
    (tmp_path / "dies.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "dies.py", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "ends the process with status -11\n", done.stderr
