"""The thread that runs the model: it writes many answers at once, and takes more as they come."""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dist.generate import Shown
from dist.model import Model
from reference.batch import Batch, Row
from reference.generate import Sampling, sample
from reference.types import Array

if TYPE_CHECKING:
    from tokenizer import Tokenizer


class Token(NamedTuple):
    """What was written, and how likely it was before any setting of sampling."""

    id: int
    log_p: float
    best: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities


class Piece(NamedTuple):
    """What one step adds to an answer."""

    text: str  # may be empty: half a character, or what may be the beginning of a stop string
    token: Token | None = None  # None: it only ends the answer
    finish: str = ""  # why the answer ends here: "stop", "length", or "error"; "": it goes on
    error: str = ""


class Answer(Row):
    """A text that is continued for somebody.

    Parameters
    ----------
    ids : sequence of int
        What is to be continued.
    limit : int
        Tokens to be written, at most.
    ends : collection of int
        Ids that end it.
    stop : sequence of str
        Strings before which it ends.
    best : int
        How many of the likeliest tokens are reported of each; -1: no log-probabilities at all.
    deliver : callable
        Takes each ``Piece``, in the engine's thread.
    """

    def __init__(
        self,
        ids: Sequence[int],
        tokenizer: "Tokenizer",
        deliver: Callable[[Piece], None],
        *,
        limit: int,
        sampling: Sampling,
        rng: np.random.Generator,
        ends: Collection[int],
        stop: Sequence[str] = (),
        best: int = -1,
    ) -> None:
        super().__init__(ids)
        self.deliver, self.sampling, self.rng, self.best = deliver, sampling, rng, best
        self.left, self.ends = limit, ends
        self._shown = Shown(tokenizer, stop)

    def take(self, logits: Array) -> Piece:
        """Choose the next token by its logits (V,), append it, and return what it adds."""
        try:
            chosen = sample(logits, self.rng, said=self.ids, **vars(self.sampling))
        except ValueError as error:
            return Piece("", finish="error", error=str(error))
        if chosen in self.ends:
            return Piece(self._shown.finish(), finish="stop")
        self.ids.append(chosen)
        self.left -= 1
        token = _token(logits, chosen, self.best)
        text = self._shown.step(chosen)
        if self._shown.stopped:
            return Piece(text, token, finish="stop")
        if not self.left:
            text += self._shown.finish()
            return Piece(text, token, finish="stop" if self._shown.stopped else "length")
        return Piece(text, token)


def _token(logits: Array, chosen: int, n_best: int) -> Token:
    if n_best < 0:
        return Token(chosen, 0.0, [])
    z = logits.astype(np.float64)
    log_p = z - z.max()
    log_p -= np.log(np.exp(log_p).sum())
    best = np.argsort(-log_p, kind="stable")[:n_best].tolist() if n_best else []
    return Token(chosen, float(log_p[chosen]), [(i, float(log_p[i])) for i in best])


class Full(Exception):
    """There is no room for more answers; the message is for whoever asked."""


class Engine:
    """Writes answers, ``places`` at a time; ``queue`` more may wait.

    Parameters
    ----------
    model : Model
    places, queue : int
    ended : callable
        Is called, in the engine's thread, when that ends; ``failure`` then says why, if it failed.
    """

    def __init__(
        self, model: Model, *, places: int, queue: int, ended: Callable[[], None] = lambda: None
    ) -> None:
        self.batch = Batch(model.ops, model.params, model.config, places)
        self.capacity = places + queue
        self.failure: BaseException | None = None
        self._ended = ended
        self._changed = threading.Condition()  # guards what follows
        self._open: set[Answer] = set()  # neither finished nor left
        self._asked: list[Answer] = []  # since the last step
        self._left: list[Answer] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, answers: Sequence[Answer]) -> None:
        """Begin some answers, all or none.

        Raises
        ------
        Full
            When there is no room for them.
        """
        with self._changed:
            if self._ending:
                raise Full("this server is ending")
            if len(self._open) + len(answers) > self.capacity:
                raise Full(
                    f"this server is busy with {len(self._open)} answers and takes "
                    f"{self.capacity} at most: try again in a moment"
                )
            self._open.update(answers)
            self._asked += answers
            self._changed.notify()

    def leave(self, answers: Sequence[Answer]) -> None:
        """Give up answers that nobody waits for any more; those that are finished stay so."""
        with self._changed:
            self._left += answers
            self._changed.notify()

    def busy(self) -> int:
        """Return how many answers are being written or wait."""
        with self._changed:
            return len(self._open)

    def stop(self) -> None:
        """End the thread after the step under way; answers that are not finished get an error."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        from accel.threads import set_threads, threads  # imports Numba

        set_threads(threads())  # of this thread, too: Numba keeps a number for each
        try:
            while self._admit():
                for row, logits in self.batch.step():
                    assert isinstance(row, Answer)
                    piece = row.take(logits)
                    if piece.finish:
                        self.batch.leave(row)
                        with self._changed:
                            self._open.discard(row)
                    row.deliver(piece)
        except BaseException as error:
            self.failure = error
        with self._changed:
            self._ending = True
            unfinished, self._open = self._open, set()
        said = "this server is ending" if self.failure is None else f"it failed: {self.failure}"
        for answer in unfinished:
            answer.deliver(Piece("", finish="error", error=said))
        self._ended()

    def _admit(self) -> bool:
        """Wait for something to do and let answers come and go; return False when all ends."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ending or self._asked or self._left or len(self.batch)
            )
            for answer in self._asked:
                self.batch.join(answer)
            for answer in self._left:
                if answer in self._open:
                    self._open.discard(answer)
                    self.batch.leave(answer)
            self._asked, self._left = [], []
            return not self._ending
