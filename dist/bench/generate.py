"""``myllm bench generate``: milliseconds a token, beside llama.cpp on the file that we export.

The model has the shape of a preset and weights drawn at random, since speed does not depend on what
they say. llama.cpp (``pip install llama-cpp-python``, which needs cmake) reads the GGUF file of the
same weights in the same precision, with as many threads, its own choice of kernels, and keys and
values of as many bits as here: float32, or 16 (which are float16 there). Both write one token after
the other behind a prompt, and read a prompt; medians are taken. What both are asked for is the
logits, no sampling.

Each side has a process of its own, since both would share one library for threads, and its
settings. They write a few tokens in turn: some seconds later memory may be half as fast.
"""

import contextlib
import importlib.util
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accel import COMPUTE, READING
from accel.bench import report
from accel.bench.report import Row
from accel.bench.timing import clocked, rounds
from accel.threads import threads
from dist import config
from dist.convert import gguf
from dist.convert.commands import KINDS
from dist.model import load_model
from dist.weights import Part, Weights, write_weights
from reference.config import Config
from reference.model import prefill
from reference.params import decoder_layout
from reference.types import Array
from tokenizer import train_from_iterator

PROMPT = 512  # tokens
TURN = 4  # tokens that one side writes before the other writes as many
Reader = Callable[[list[int]], None]  # reads so many tokens behind what it has read
Ask = Callable[..., float]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    about = "Time tokens that are written and read, beside llama.cpp if it is there."
    p = report.parser("generate", about, "generate gpt2-small myllm-1b")
    p.add_argument("presets", nargs="*", metavar="PRESET", help="sizes of model (laptop)")
    p.add_argument("--modes", default="float32,q8_0", help=f"of {', '.join((*COMPUTE, READING))}")
    p.add_argument("--tokens", type=int, default=32, help="written in a round, by fours (32)")
    p.add_argument("--rounds", type=int, default=5, help="by turns (5)")
    given = report.parse(p, argv)
    modes = given.modes.split(",")
    if given.rounds < 1 or given.tokens < 1:
        p.error("--rounds and --tokens must be at least 1")
    if unknown := [mode for mode in modes if mode not in (*COMPUTE, READING)]:
        p.error(f"no mode {unknown[0]!r}; known: {', '.join((*COMPUTE, READING))}")
    parts = {
        f"{preset}, {mode}": partial(_measure, preset, mode, given.tokens, given.rounds)
        for preset in given.presets or ["laptop"]
        for mode in modes
    }
    peer = "no llama-cpp-python"
    if importlib.util.find_spec("llama_cpp") is not None:
        import llama_cpp

        peer = f"llama-cpp-python {llama_cpp.__version__}"
    title = f"{report.machine('numpy', 'numba')}, {peer}, {threads()} threads"
    return report.run(p, given, title, parts)


def _measure(preset: str, mode: str, tokens: int, n: int) -> Iterator[Row]:
    shape = config.load(preset).model
    turns = -(-tokens // TURN)
    prompt = min(PROMPT, shape.context_length - turns * TURN)
    if prompt < 2:
        raise ValueError(f"{preset} has a context of {shape.context_length}: fewer --tokens")
    rng = np.random.default_rng(0)
    before, answer = (rng.integers(0, 256, n).tolist() for n in (prompt, TURN))
    reading: list[dict[str, float]] = []
    writing: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path, length = Path(folder) / "model", prompt + turns * TURN
        _write(path, shape)
        sides = {"ours": stack.enter_context(_process(_ours, path, mode, length))}
        if importlib.util.find_spec("llama_cpp") is not None:
            file = Path(folder) / "model.gguf"
            gguf.export(Weights(path), file, KINDS[mode])
            sides["theirs"] = stack.enter_context(_process(_llama, file, mode, length))
        whole = {k: partial(ask, [before], anew=True) for k, ask in sides.items()}
        one_by_one = {k: partial(ask, [[token] for token in answer]) for k, ask in sides.items()}
        for turn, read in enumerate(rounds(whole, n + 1)):
            written = list(rounds(one_by_one, turns))
            if turn:  # the first compiles what is not compiled yet
                reading.append(read)
                writing += [{k: seconds / TURN for k, seconds in one.items()} for one in written]
    for what, taken in (("write a token", writing), (f"read {prompt} tokens", reading)):
        what = f"{preset}, {mode}: {what}"
        ours, *other = (statistics.median(one[k] for one in taken) for k in sides)
        if not other:
            yield Row(what, ours)
            continue
        ratios = sorted(one["ours"] / one["theirs"] for one in taken)
        quarter = len(ratios) // 4
        note = f"half of the turns {ratios[quarter]:.2f} – {ratios[-1 - quarter]:.2f}"
        yield Row(f"{what} / llama.cpp", ours, other[0], 1.0, note=note)


@contextlib.contextmanager
def _process(make: Callable[..., Callable[[], Reader]], *arguments: Any) -> Iterator[Ask]:
    """Start a process for one side; yield what has it read pieces of ids and returns the seconds.

    With ``anew=True`` they are the first of a text, else they go on with the last one.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, make, *arguments), daemon=True)
    process.start()
    there.close()

    def ask(pieces: list[list[int]], *, anew: bool = False) -> float:
        try:
            here.send((pieces, anew))
            return float(here.recv())
        except (EOFError, OSError):
            raise ValueError("the process of one side has ended, as it says above") from None

    try:
        yield ask
    finally:
        here.close()
        process.join()


def _answer(there: Any, make: Callable[..., Callable[[], Reader]], *arguments: Any) -> None:
    begin = make(*arguments)
    read = begin()
    with contextlib.suppress(EOFError):
        while True:
            pieces, anew = there.recv()
            if anew:
                read = begin()
            there.send(clocked(partial(_read_all, read, pieces)))


def _read_all(read: Reader, pieces: list[list[int]]) -> None:
    for ids in pieces:
        read(ids)


def _write(path: Path, shape: Config) -> None:
    """Write a checkpoint with weights drawn at random, and a tokenizer."""
    layout = decoder_layout(shape)
    views = layout.views(layout.init(0))
    tokenizer = train_from_iterator([__doc__ or ""], 300)  # llama.cpp refuses one without merges

    def fill(part: Part, out: Array) -> None:
        out[...] = views[part.name][part.low : part.high]

    write_weights(path, shape, fill, tokenizer)


def _ours(path: Path, mode: str, length: int) -> Callable[[], Reader]:
    model = load_model(path, "cpu", mode)
    ops, params, shape = model.ops, model.params, model.config

    def begin() -> Reader:
        cache, done = ops.kv_cache(params, shape, 1, length), [0]

        def read(ids: list[int]) -> None:
            if len(ids) == 1:
                ops.decode_step(params, shape, np.array(ids, np.int32), cache, done[0])
            else:
                prefill(ops, params, shape, np.array([ids], np.int32), np.array([len(ids)]), cache)
            done[0] += len(ids)

        return read

    return begin


def _llama(path: Path, mode: str, length: int) -> Callable[[], Reader]:
    import llama_cpp

    number = llama_cpp.GGML_TYPE_F16 if mode == "bf16" else llama_cpp.GGML_TYPE_F32
    kept: dict[str, Any] = {"type_k": number, "type_v": number, "n_ctx": length, "n_batch": PROMPT}
    n = {"n_threads": threads(), "n_threads_batch": threads()}
    model = llama_cpp.Llama(str(path), verbose=False, **n, **kept)

    def begin() -> Reader:
        model.reset()
        return model.eval

    return begin
