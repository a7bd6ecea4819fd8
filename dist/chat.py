"""``myllm chat``: talk with a model, turn by turn.

Each turn is read once: the KV cache is kept, and only what is new goes through the model
(``reference.session``). When the context is full the instructions stay, and the oldest turns go.
"""

from collections.abc import Sequence

import numpy as np

from accel.help import parser
from dist.documents import ASSISTANT, END
from dist.generate import (
    Interrupts,
    Writer,
    add_sampling,
    repeat,
    sampling_of,
    show,
    warm,
    warn_of_chat,
)
from dist.pack import special_id
from dist.use import add_model, load

LEAVE = "(Ctrl-C ends a reply, Ctrl-D leaves, /new begins another conversation)"


def main(argv: Sequence[str]) -> int:
    """``myllm chat``."""
    args = parser(
        "chat",
        "Talk with a model that was trained on conversations. What you type can never become a "
        "control token.",
        'myllm chat runs/tasks --system "Answer in one word."',
    )
    add_model(args)
    args.add_argument("--system", metavar="TEXT", help="instructions that come before all turns")
    add_sampling(args)
    given = args.parse_args(argv)
    if given.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {given.tokens}")
    sampling = sampling_of(given)
    model, tokenizer = load(given)
    warm(model)
    warn_of_chat(model, tokenizer)
    end, assistant = (special_id(tokenizer, name) for name in (END, ASSISTANT))

    def begin() -> Writer:
        writer = Writer(model, tokenizer, **sampling)
        if given.system is not None:
            writer.read_turn("system", given.system)
            writer.session.keep = n = len(writer.session.ids)
            if 2 * n > writer.context:
                raise ValueError(
                    f"--system has {n} tokens, and must leave half of the context of "
                    f"{writer.context} to what is said"
                )
        return writer

    writer = begin()

    def answer(text: str, turn: int, interrupts: Interrupts) -> None:
        nonlocal writer
        if not text.strip():
            return
        if text.strip() == "/new":
            writer = begin()
            return
        writer.read_turn("user", text)
        writer.session.read([assistant])
        rng = np.random.default_rng([given.seed, turn])
        show(writer, writer.write(given.tokens, rng, ends=[end]), interrupts)
        if writer.session.ids[-1] != end:  # cut short: the reply is closed all the same
            writer.session.read([end])

    repeat(answer, LEAVE)
    return 0
