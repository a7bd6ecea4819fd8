"""``myllm generate``: a trained model continues a text.

A text that outgrows the model's context goes on from its last half (``reference.session``).
"""

import contextlib
import io
import signal
import sys
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.help import parser
from dist.documents import ASSISTANT, END, ROLES, chat
from dist.model import Model
from dist.pack import ends_of, eos_of, part_ids, special_id
from dist.use import add_model, load, text_of
from reference.generate import Sampling
from reference.model import prefill
from reference.session import Session
from tokenizer.read import standard_input

if TYPE_CHECKING:
    from tokenizer import Tokenizer


def prompt_ids(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the ids of a text to continue, in which control tokens are letters like any others."""
    # what stands before the first token of a text in training is the end of another
    return tokenizer.encode_ordinary(text) or [eos_of(tokenizer)]


def chat_ids(tokenizer: "Tokenizer", messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of messages, whose text can never become a control id."""
    return [i for part in chat(list(messages)) for i in part_ids(tokenizer, part)]


def never_chatted(model: Model, tokenizer: "Tokenizer") -> str:
    """Return a sentence where a model is known never to have seen a chat, else "".

    Raises
    ------
    ValueError
        When its tokenizer lacks what a chat is written with.
    """
    missing = sorted({*ROLES.values(), END} - tokenizer.special_tokens.keys())
    if missing:
        raise ValueError(
            f"the tokenizer of {model.path} has no {', '.join(missing)}, which a chat needs: "
            "`myllm tokenizer extend` adds them, and the model then has to learn from chats"
        )
    if model.state.chats is not False:
        return ""
    return (
        f"{model.path} never saw a chat in training, so it does not know what to answer: fine-tune "
        "it on chats (train.init), or let it continue a text"
    )


def warn_of_chat(model: Model, tokenizer: "Tokenizer") -> None:
    """Say so on stderr where a model never saw a chat."""
    if said := never_chatted(model, tokenizer):
        print(f"myllm: {said}", file=sys.stderr)


class Writer:
    """A model with its tokenizer, that reads and writes one text.

    Parameters
    ----------
    model, tokenizer
    stop : iterable of str
        Strings before which writing ends.
    keep : int
        Of ``Session``.
    **sampling
        Fields of ``reference.generate.Sampling``.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: "Tokenizer",
        *,
        stop: Iterable[str] = (),
        keep: int = 0,
        **sampling: Any,
    ) -> None:
        self.tokenizer, self.stop, self.sampling = tokenizer, tuple(stop), sampling
        self.session = Session(model.ops, model.params, model.config, keep=keep)
        self.ends = ends_of(tokenizer, model.state.updates)
        self.context = model.config.context_length
        self.why, self.tokens, self.seconds = "", 0, 0.0  # of the last turn

    def read(self, text: str) -> None:
        """Read a text, in which control tokens are letters like any others."""
        encode = self.tokenizer.encode_ordinary
        self.session.read(encode(text) if self.session.ids else prompt_ids(self.tokenizer, text))

    def read_turn(self, role: str, text: str) -> None:
        """Read a message of a chat."""
        self.session.read(chat_ids(self.tokenizer, [{"role": role, "content": text}]))

    def write(
        self, max_new_tokens: int, rng: np.random.Generator, *, ends: Collection[int] = ()
    ) -> Generator[str, None, None]:
        """Yield a continuation piece by piece, never half a character.

        Parameters
        ----------
        ends : collection of int
            Ids that end it, beside that of a text's end.
        """
        shown = Shown(self.tokenizer, self.stop)
        ids = self.session.write(max_new_tokens, rng=rng, stop={*self.ends, *ends}, **self.sampling)
        self.tokens, began = 0, time.perf_counter()
        self.why = "interrupted"
        try:
            for token in ids:
                self.tokens += 1
                yield shown.step(token)
                if shown.stopped:
                    break
            yield shown.finish()
            written = {"stop": "it wrote the end", "length": f"{max_new_tokens} tokens were asked"}
            self.why = (
                f"stopped at {shown.stopped!r}" if shown.stopped else written[self.session.why]
            )
        finally:
            self.seconds = time.perf_counter() - began

    def account(self) -> str:
        """Return the last turn in a line: how many tokens, how fast, why it ended."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        parts = [f"{self.tokens} tokens, {speed:.0f} a second", self.why]
        if self.session.forgotten:
            parts.append(
                f"the context of {self.context} tokens was full: {self.session.forgotten} earlier "
                "ones are forgotten"
            )
        return f"({'; '.join(parts)})"


class Shown:
    """The text of a stream of tokens: never half a character, nothing of a string to stop at."""

    def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str]) -> None:
        from tokenizer import DecodeStream

        self._decoder, self._stops = DecodeStream(tokenizer), Stops(stop)
        self._n_vocab = tokenizer.n_vocab

    @property
    def stopped(self) -> str:
        """The string that ended the text; nothing follows then."""
        return self._stops.stopped

    def step(self, token: int) -> str:
        """Return what can be shown with one token more."""
        if token >= self._n_vocab:  # a model may have more ids than its tokenizer
            return ""
        return self._stops.step(self._decoder.step(token))

    def finish(self) -> str:
        """Return what was held back."""
        return self._stops.step(self._decoder.finish()) + self._stops.finish()


class Stops:
    """Text that ends before any of some strings, which may come in pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.stopped, self._held = strings, "", ""

    def step(self, text: str) -> str:
        """Return what can be shown: all but what may be the beginning of a string to stop at."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [(held.index(s), s) for s in self.strings if s in held]
        if found:
            at, self.stopped = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return held[:at]
        longest = max(map(len, self.strings), default=1) - 1
        keep = next(
            (n for n in range(min(longest, len(held)), 0, -1) if self._begins(held[-n:])), 0
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _begins(self, text: str) -> bool:
        return any(s.startswith(text) for s in self.strings)

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def warm(model: Model) -> None:
    """Compile and load what reads and writes, before a prompt is shown and a clock runs."""
    ops, config = model.ops, model.config
    n = min(4, config.context_length)
    cache = ops.kv_cache(model.params, config, 1, min(n + 1, config.context_length))
    ids = np.zeros((1, n), np.int32)
    prefill(ops, model.params, config, ops.from_numpy(ids), np.array([n]), cache)
    if n < config.context_length:
        ops.decode_step(model.params, config, ops.from_numpy(ids[0, :1]), cache, n)


def add_sampling(args: Any) -> None:
    """Add the options of sampling."""
    args.add_argument("--tokens", type=int, default=200, help="new tokens, at most (default 200)")
    args.add_argument("--temperature", type=float, default=0.8, help="0: the most likely (0.8)")
    args.add_argument("--top-k", type=int, help="choose among the k most likely")
    args.add_argument("--top-p", type=float, help="choose among the likeliest that hold p")
    args.add_argument(
        "--min-p", type=float, help="choose among those at least this times as likely as the best"
    )
    args.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: what was said becomes less likely (1)",
    )
    args.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this (repeatable)"
    )
    args.add_argument("--seed", type=int, default=0)


def sampling_of(given: Any) -> dict[str, Any]:
    """Return the fields of ``Sampling``, and the strings to stop at.

    Raises
    ------
    ValueError
        When one is out of range, or the seed is.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    fields = {name: getattr(given, name) for name in names}
    Sampling(**fields)
    if given.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {given.seed}")
    if "" in given.stop:
        raise ValueError("--stop needs a text of at least one character")
    return {**fields, "stop": given.stop}


class Interrupts:
    """Ctrl-C while people are asked and answered: it gives up the line, or ends the answer.

    It never ends the program, however early, late or often it comes.

    Attributes
    ----------
    came : bool
        Since the last line was asked for.
    """

    def __init__(self) -> None:
        self.came = self._asking = False

    def __call__(self, *_: Any) -> None:
        self.came = True
        if self._asking:
            self._asking = False  # the next one must not disturb how this one is dealt with
            raise KeyboardInterrupt

    def line(self, prompt: str) -> str | None:
        """Return a line; None: it was given up."""
        self.came, text = False, None
        with contextlib.suppress(KeyboardInterrupt):
            self._asking = True
            text = input(prompt)
            self._asking = False
        self._asking = False
        return text


def show(writer: Writer, pieces: Generator[str, None, None], interrupts: Interrupts) -> None:
    """Print what is written as it comes; Ctrl-C ends it, and nothing else."""
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pieces):
        for piece in pieces:
            print(piece, end="", flush=True)
            if interrupts.came:
                break
    print(flush=True)
    print(writer.account(), file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """``myllm generate``."""
    args = parser(
        "generate",
        "Let a trained model continue a text. Without --prompt it asks for one after the other.",
        'myllm generate runs/laptop --prompt "Once upon a time" \\\n'
        "    --temperature 0.8 --top-p 0.95",
    )
    add_model(args)
    args.add_argument("--prompt", help="the text to continue; - reads it from standard input")
    args.add_argument("--chat", action="store_true", help="the prompt is a user's turn in a chat")
    args.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (1)"
    )
    add_sampling(args)
    given = args.parse_args(argv)
    for name in ("tokens", "num_samples"):
        if getattr(given, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}"
            )
    sampling = sampling_of(given)
    model, tokenizer = load(given)
    warm(model)
    end = set()
    if given.chat:
        warn_of_chat(model, tokenizer)
        end = {special_id(tokenizer, END)}

    def answer(text: str, turn: int, interrupts: Interrupts) -> None:
        for n in range(given.num_samples):
            writer = Writer(model, tokenizer, **sampling)
            if given.chat:
                writer.read_turn("user", text)
                writer.session.read([special_id(tokenizer, ASSISTANT)])
            else:
                writer.read(text)
                print(text, end="", flush=True)
            # another seed for every prompt and every sample; the first is what generate() draws
            rng = np.random.default_rng([given.seed + turn * given.num_samples + n, 0])
            show(writer, writer.write(given.tokens, rng, ends=end), interrupts)
            if interrupts.came:
                return

    if given.prompt is not None:
        answer(text_of(given.prompt), 0, Interrupts())
        return 0
    repeat(answer, "(Ctrl-C ends an answer, Ctrl-D leaves)")
    return 0


def repeat(answer: Callable[[str, int, Interrupts], None], leave: str) -> None:
    """Answer what people type, line by line, until they leave by Ctrl-D.

    On a terminal the line can be edited and earlier ones called back. What a line cannot be
    answered for is said.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  - input() then edits lines
    typed = standard_input().isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text must not end all
    if typed:
        print(leave, file=sys.stderr)
    interrupts, turn = Interrupts(), 0
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        while True:
            text = interrupts.line("> ")
            if text is None:
                print(f"\n{leave}", file=sys.stderr)
                continue
            try:
                answer(text, turn, interrupts)
            except ValueError as error:
                print(f"myllm: {error}", file=sys.stderr)
            turn += 1
    except EOFError:
        print()
    finally:
        signal.signal(signal.SIGINT, before)
