"""A small world of valid files, made by the commands themselves, and how an input is tried in it.

An input is files laid over that world and the commands that then run there, in this process. It
passes when each command succeeds or ends by one sentence, within bounds of time and memory.
"""

import base64
import contextlib
import gzip
import importlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from dist import cli, pack
from tests.fuzz import mutate
from tests.helpers import ROOT
from tests.helpers.runs import tables
from tests.helpers.weights import GPT2, write_random
from tokenizer import patterns

SECONDS = 20.0  # of a processor, that a command may take
WAITING = 10  # times as long by the clock: a busy machine is slow, but what waits for ever is found
MEMORY = 1 << 30  # bytes that a command may ask for, beside what the process has from its imports
SENTENCE = 4000  # characters, at most, of what a command says as it gives up
TEXT = "the quick brown fox jumps over a lazy dog, 7 wizards pack boxes & say: Größe 中文\n"
RUN = tables(
    Path("data"),
    model__vocab_size=300,
    model__context_length=16,
    train__global_batch=2,
    train__steps=2,
    train__lr=0.01,
    train__warmup_steps=1,
    run__out="run",
    run__eval_windows=1,
    run__checkpoint_every=1,
)


class Input(msgspec.Struct, frozen=True):
    """What is tried: files by their path in the world, commands, settings of the environment."""

    kind: str
    files: dict[str, bytes]
    commands: list[list[str]]
    environment: dict[str, str] = {}

    def to_json(self) -> bytes:
        """Return the input as a file of the corpus."""
        files = {name: base64.b64encode(data).decode() for name, data in self.files.items()}
        fields = {**msgspec.structs.asdict(self), "files": files}
        return json.dumps(fields, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> "Input":
        """Read a file of the corpus."""
        fields = json.loads(text)
        files = {name: base64.b64decode(data) for name, data in fields["files"].items()}
        return cls(**{**fields, "files": files})


class Finding(NamedTuple):
    """What a command did that it must not."""

    place: str  # findings of one place are one fault
    detail: str


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    said: str  # on stderr


class Overtime(BaseException):
    """A command has taken too long; no handler of the project's catches it."""


class World:
    """A folder of valid files and a copy of it that inputs are tried in.

    Parameters
    ----------
    folder : Path
        An empty one, some folders below any that matters.
    """

    def __init__(self, folder: Path):
        self.clean, self.place = folder / "clean", folder / "a" / "b" / "c" / "world"

    def build(self) -> None:
        """Make the files, by the commands."""
        self.clean.mkdir(parents=True)
        with contextlib.chdir(self.clean), quiet():
            lines = [json.dumps({"text": f"{i} {TEXT * (i % 4 + 1)}"}) + "\n" for i in range(60)]
            Path("in.jsonl").write_text("".join(lines))
            Path("in.txt").write_text(TEXT * 8)
            Path("run.toml").write_text(mutate.toml(RUN))
            _archives("".join(lines).encode())
            for words in (
                "tokenizer train in.txt --vocab-size 300 -o t.tok",
                "tokenizer export t.tok -o hf.json",
                "tokenizer export t.tok -o t.tiktoken",
                "pack in.jsonl --tokenizer t.tok -o data --heldout 0.3 --processes 1",
                "train run.toml",
                "export run hf",
                "export run m.gguf --dtype q8_0",
                "import m.gguf -o kept",
            ):
                if cli.main(words.split()) != 0:
                    raise RuntimeError(f"the world cannot be made: myllm {words}")
            write_random(Path("gpt2"), replace(GPT2, d_ff=128))
            for name in ("g.gguf", "g.bin"):
                if cli.main(["export", "gpt2", name]) != 0:
                    raise RuntimeError(f"the world cannot be made: {name}")
            self._interrupted_packing()
            _kernels(Path("kernels"))

    def _interrupted_packing(self) -> None:
        class Stop(Exception):
            pass

        def stop(n_bytes: int, tokens: int, done: int) -> None:
            raise Stop

        before, pack.JOURNAL_SECONDS = pack.JOURNAL_SECONDS, 0.0
        settings = pack.Settings(tokenizer="t.tok", heldout=0.3)
        with contextlib.suppress(Stop):
            pack.pack(
                ["in.jsonl"],
                Path("half"),
                settings,
                processes=1,
                skip_bad_lines=False,
                report=lambda said: None,
                progress=stop,
            )
        pack.JOURNAL_SECONDS = before

    def restore(self) -> None:
        """Make the world as it was; the current folder may be in it."""
        shutil.rmtree(self.place.parents[2], ignore_errors=True)
        self.place.parent.mkdir(parents=True)
        shutil.copytree(self.clean, self.place, symlinks=True)

    def read(self, name: str) -> bytes:
        """Return a clean file."""
        return (self.clean / name).read_bytes()

    def files(self, pattern: str) -> list[str]:
        """Return the clean files that a glob finds, by their path in the world."""
        found = sorted(self.clean.glob(pattern))
        return [str(path.relative_to(self.clean)) for path in found if path.is_file()]

    def try_(self, tried: Input) -> list[Finding]:
        """Run an input's commands in a fresh world and return what went wrong."""
        self.restore()
        for name, data in tried.files.items():
            path = self.place / name
            if path.parent.is_dir():  # a file of the kernel cache, of another machine's corpus
                path.write_bytes(data)
        findings = []
        patterns.SECONDS = 1.0
        with contextlib.chdir(self.place), environment(tried.environment):
            for command in tried.commands:
                findings += run(command)
        return findings


def run(command: list[str]) -> list[Finding]:
    """Run a command within bounds and judge how it ended."""
    name = " ".join(command[: 2 if command[:1] in (["tokenizer"], ["pack"]) else 1])
    name = name.split(" -")[0] if command[:1] == ["pack"] else name
    try:
        with within(SECONDS), bounded_memory(), quiet() as said:
            status = _status(command)
    except Overtime as error:
        return [Finding(f"takes too long: {_place(error)}", name)]
    except BaseException as error:
        return [Finding(f"{type(error).__name__}: {_place(error)}", f"{name}: {error}"[:300])]
    text = said.getvalue()
    last = text.strip().rpartition("\n")[2]
    if "Traceback" in text:
        return [Finding(f"prints a traceback: {name}", text[-300:])]
    if status == 0:
        return []
    if status not in (1, 2) or not last.startswith("myllm "):
        return [Finding(f"ends with status {status} and no sentence: {name}", text[-300:])]
    if "not enough memory" in last and "plan" not in name and "train" not in name:
        return [Finding(f"asks for too much memory: {name}", last[:300])]
    if len(last) > SENTENCE + sum(map(len, command)):  # what was asked for may be quoted
        return [Finding(f"says {SENTENCE} characters and more: {name}", last[:300])]
    return []


def _status(command: list[str]) -> int:
    if command == ["kernel"]:
        return _try_kernel()
    try:
        return cli.main(command)
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else 1


def _place(error: BaseException) -> str:
    """Return the deepest place of the project's own that an exception came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(str(ROOT)) and "/tests/" not in f.filename]
    frame = (own or frames)[-1]
    name = frame.filename.removeprefix(f"{ROOT}/")
    return f"{name}:{frame.lineno} {frame.name}"


# --- bounds


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``Overtime`` in what takes longer, or waits much longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Overtime

    limits = {signal.ITIMER_PROF: seconds, signal.ITIMER_REAL: WAITING * seconds}
    before = {n: signal.signal(n, late) for n in (signal.SIGPROF, signal.SIGALRM)}
    for timer, limit in limits.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer in limits:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process take ``MEMORY`` more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep what is printed; give what is said on stderr."""
    before = sys.stdin, sys.stdout, sys.stderr
    said = io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
    sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8"), said
    try:
        yield said
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _archives(lines: bytes) -> None:
    """Write the texts as other formats hold them."""
    import pyarrow
    import pyarrow.parquet as parquet
    import zstandard

    Path("in.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    Path("in.jsonl.zst").write_bytes(zstandard.compress(lines))
    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    parquet.write_table(pyarrow.table({"text": texts}), "in.parquet")


# --- kernels


def _kernels(folder: Path) -> None:
    """Write a package with a kernel and fill its cache."""
    folder.mkdir()
    (folder / "tiny.py").write_text(
        "from accel.jit import jit\n\n\n@jit\ndef twice(x):\n    return 2 * x\n"
    )
    _try_kernel()


def _try_kernel() -> int:
    """Load the kernel of this folder anew, from the cache in it, and see that it is right."""
    from accel import jit

    before = dict(os.environ)
    os.environ["MYLLM_CACHE_DIR"] = str(Path("cache").absolute())
    sys.path.insert(0, str(Path("kernels").absolute()))
    sys.modules.pop("tiny", None)
    jit._stores.pop(Path("kernels").absolute(), None)
    try:
        tiny: Any = importlib.import_module("tiny")
        return 0 if tiny.twice(21) == 42 else 3
    finally:
        sys.path.pop(0)
        os.environ.clear()
        os.environ.update(before)
