"""``myllm bench generate``: milliseconds a token, beside llama.cpp on the file that we export.

The model has the shape of a preset and weights drawn at random, since speed does not depend on what
they say. llama.cpp (``pip install llama-cpp-python``, which needs cmake) reads the GGUF file of the
same weights in the same precision, with as many threads, its own choice of kernels, and keys and
values of as many bits as here: float32, or 16 (which are float16 there). Both write one token after
the other behind a prompt, and read a prompt; they take turns, and medians are taken. What both are
asked for is the logits, no sampling.
"""

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accel import COMPUTE, READING
from accel.bench import report
from accel.bench.report import Row
from accel.bench.timing import rounds
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
Reader = Callable[[list[int]], None]  # reads so many tokens behind what it has read


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    about = "Time tokens that are written and read, beside llama.cpp if it is there."
    p = report.parser("generate", about, "generate gpt2-small myllm-1b")
    p.add_argument("presets", nargs="*", metavar="PRESET", help="sizes of model (laptop)")
    p.add_argument("--modes", default="float32,q8_0", help=f"of {', '.join((*COMPUTE, READING))}")
    p.add_argument("--tokens", type=int, default=32, help="written in a round (32)")
    p.add_argument("--rounds", type=int, default=5)
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
    prompt = min(PROMPT, shape.context_length - tokens)
    if prompt < 2:
        raise ValueError(f"{preset} has a context of {shape.context_length}: fewer --tokens")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        _write(path, shape)
        sides = {"ours": _ours(path, mode, prompt + tokens)}
        if importlib.util.find_spec("llama_cpp") is not None:
            gguf.export(Weights(path), Path(folder) / "model.gguf", KINDS[mode])
            sides["theirs"] = _llama(Path(folder) / "model.gguf", mode, prompt + tokens)
        taken = list(
            rounds({k: partial(_turn, side, prompt, tokens) for k, side in sides.items()}, n + 1)
        )
    for i, (what, bar) in enumerate((("write a token", 1.0), (f"read {prompt} tokens", 1.0))):
        # the first round compiles what is not compiled yet
        times = {k: statistics.median(turn[k][i] for turn in taken[1:]) for k in sides}
        other = times.get("theirs")
        what = f"{preset}, {mode}: {what}" + (" / llama.cpp" if other else "")
        yield Row(what, times["ours"], other, bar if other else None)


def _turn(side: Callable[[], Reader], prompt: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of a token that is written, and of a prompt that is read."""
    rng = np.random.default_rng(0)
    before, answer = (rng.integers(0, 256, n).tolist() for n in (prompt, tokens))
    read = side()
    began = time.perf_counter()
    read(before)
    read_prompt = time.perf_counter()
    for token in answer:
        read([token])
    ended = time.perf_counter()
    return (ended - read_prompt) / tokens, read_prompt - began


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
