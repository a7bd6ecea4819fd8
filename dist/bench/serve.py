"""``myllm bench serve``: tokens a second when several are answered together.

The model has the size of a preset and weights drawn at random, since speed does not depend on what
they say. Answers are written by the engine of ``myllm serve`` without HTTP around it, each after a
prompt of a few tokens; what is counted is every token written, from the first to the last one's
end. Numbers of answers are measured in turn, round after round, and medians are taken.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from accel import load as load_backend
from accel.bench import report
from accel.bench.report import Row
from accel.bench.timing import rounds
from dist import config
from dist.checkpoint import State
from dist.model import Model
from dist.monitor import Memory
from dist.serve.engine import Answer, Engine, Piece
from reference.generate import Sampling
from reference.params import decoder_layout
from tokenizer import Tokenizer, train_from_iterator

TOGETHER = (1, 4, 8)
PROMPT = 16  # tokens


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    about = "Measure tokens a second of one answer at a time, and of several together."
    p = report.parser("serve", about, "serve laptop gpt2-small")
    p.add_argument("presets", nargs="*", metavar="PRESET", help="sizes of model (laptop)")
    p.add_argument("--backend", default="cpu", help="cpu (default), cuda or reference")
    p.add_argument("--compute", default="float32", help="float32 (default) or bf16")
    p.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    p.add_argument("--rounds", type=int, default=5, help="by turns (5)")
    given = report.parse(p, argv)
    if given.rounds < 1 or given.tokens < 1:
        p.error("--rounds and --tokens must be at least 1")
    parts = {
        preset: partial(_measure, preset, given.backend, given.compute, given.tokens, given.rounds)
        for preset in given.presets or ["laptop"]
    }
    title = f"{report.machine('numpy', 'numba')}: {given.backend}, {given.compute}"
    return report.run(p, given, title, parts)


def _measure(preset: str, backend: str, compute: str, tokens: int, n: int) -> Iterator[Row]:
    model = _model(preset, backend, compute)
    tokenizer = train_from_iterator(["no text is looked at"], 276)
    sides = {str(k): partial(_speed, model, tokenizer, k, tokens) for k in TOGETHER}
    taken = list(rounds(sides, n + 1))[1:]  # the first compiles what is not compiled yet
    speeds = {name: statistics.median(t[name] for t in taken) for name in sides}
    yield Row(f"{preset}, one answer at a time", speeds["1"], unit="tokens/s")
    for k in TOGETHER[1:]:
        what = f"{preset}, {k} answers together / one"
        yield Row(what, speeds[str(k)], speeds["1"], unit="tokens/s")


def _model(preset: str, backend: str, compute: str) -> Model:
    shape = config.load(preset).model
    layout = decoder_layout(shape)
    ops = load_backend(backend, compute=compute)
    params = ops.parameters(layout.views(ops.from_numpy(layout.init(0))))
    state = State(
        step=0,
        updates=0,
        position=0,
        seed=0,
        tokenizer_sha256=None,
        config={},
        monitor=Memory(),
    )
    return Model(ops, shape, params, Path(preset), state, None)


def _speed(model: Model, tokenizer: Tokenizer, together: int, tokens: int) -> float:
    """Return the tokens a second of so many answers that are written together."""
    engine = Engine(model, places=together, queue=0)
    left, done = [together], threading.Event()

    def deliver(piece: Piece) -> None:
        left[0] -= bool(piece.finish)
        if not left[0]:
            done.set()

    rng = np.random.default_rng(0)
    answers = [
        Answer(
            rng.integers(0, model.config.vocab_size, PROMPT).tolist(),
            tokenizer,
            deliver,
            limit=tokens,
            sampling=Sampling(temperature=0.8),
            rng=np.random.default_rng(k),
            ends=(),
        )
        for k in range(together)
    ]
    engine.start()
    began = time.perf_counter()
    engine.submit(answers)
    done.wait()
    seconds = time.perf_counter() - began
    engine.stop()
    if engine.failure is not None:
        raise engine.failure
    return together * tokens / seconds
