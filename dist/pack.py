"""``myllm pack``: from texts to shards of token ids.

Documents are read in one process, encoded in several and written in one, in the order in which they
were read: so the packed bytes do not depend on the number of processes. Which documents are held
out for evaluation is decided by a hash of their text, so equal texts fall on the same side. Where
that leaves none, as it may of few, they are packed again, and their sizes decide as well: those are
held out whose text comes near the share that was asked for (``heldout.py``). A share that is far
from it nevertheless, as by one long document, is told at the end.

From the start and every so often the writers' state is put into a journal, beside the number of
documents done. A packing that was interrupted goes on from there, also where it packs again. The
journal goes last, so a folder that has one is unfinished and ours.
"""

import hashlib
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from accel.ahead import batches, in_order
from accel.system import unheard
from dist import manifest, shards
from dist.documents import EOS_NAMES, PIECE_BYTES, Document, Part, read_documents
from dist.heldout import holds_out, nearly_trained_on, place, too_little, unlike_others
from dist.lock import locked
from dist.manifest import Count
from dist.writer import ShardWriter, WriterState, is_shard_file
from reference.types import Array
from tokenizer.files import check_folder
from tokenizer.read import SHOWN_BAD_LINES, expand, is_stream
from tokenizer.records import is_packed

if TYPE_CHECKING:
    from tokenizer import Tokenizer

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
JOURNAL = "journal.json"
JOURNAL_FORMAT = "myllm-packing"
JOURNAL_SECONDS = 20.0
BATCH_BYTES = 1 << 20  # of text handed to a process at once
BATCH_DOCUMENTS = 512
COMPARED_BYTES = 1 << 27  # of text at most, each document of which is held against all others


class Settings(NamedTuple):
    """What decides the packed bytes, beside the texts."""

    tokenizer: str
    field: str | None = None  # of rows: where their text is, whatever else they have
    window: int = 0  # layout "truncate": tokens of the one window of a document; 0: one stream
    bos: bool = False
    heldout: float = 0.01  # fraction of the documents
    shard_tokens: int = 100_000_000
    chat: bool = False  # prompt and completion become turns of a chat
    max_chars: float | None = None  # of all texts, the held-out ones among them
    distinct: bool = False  # held-out documents that training text nearly has are dropped
    chosen: frozenset[float] = frozenset()  # places held out where the fraction leaves none

    def is_held_out(self, content: bytes) -> bool:
        """Tell whether a document is kept from training."""
        at = place(content)
        return at < self.heldout or at in self.chosen


class Encoded(NamedTuple):
    """One document, as it is written."""

    heldout: bool
    ids: Array  # (n,) of the type on disk
    predict: Array | None  # (n,) bool; None: all
    n_bytes: int
    chat: bool


class Counts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What became of the documents so far."""

    read: Count = 0
    packed: dict[Split, Count] = msgspec.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    chats: dict[Split, Count] = msgspec.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    empty: Count = 0
    near: Count = 0  # held-out documents dropped as near-duplicates
    n_bytes: Count = 0
    held_bytes: Count = 0  # of them, held out
    bad_lines: Count = 0
    silent: Count = 0  # documents of which no token is to be predicted


class Journal(manifest.Record, kw_only=True, frozen=True):
    """How far a packing is."""

    mark: str  # of what it packs, from ``fingerprint``
    counts: Counts
    writers: dict[Split, WriterState]
    chosen: tuple[float, ...] = ()  # of its settings

    def __post_init__(self) -> None:
        told = (self.counts.packed, self.counts.chats, self.writers)
        if any(set(of_splits) != set(SPLITS) for of_splits in told):
            raise ValueError(f"it does not tell of {' and '.join(SPLITS)}")


class Summary(NamedTuple):
    """What was packed."""

    documents: dict[Split, int]
    tokens: dict[Split, int]
    n_bytes: int
    bad_lines: int
    empty: int
    near: int
    silent: int


def special_id(tokenizer: "Tokenizer", *names: str) -> int:
    """Return the id of the first of these special tokens that the tokenizer has."""
    for name in names:
        if name in tokenizer.special_tokens:
            return tokenizer.special_tokens[name]
    raise ValueError(f"the tokenizer has no special token {' or '.join(names)}")


def eos_of(tokenizer: "Tokenizer") -> int:
    """Return the id that ends a text."""
    names = (*EOS_NAMES, *tokenizer.vocabulary.uses.ends)
    if not any(name in tokenizer.special_tokens for name in names):
        raise ValueError(
            f"the tokenizer has no special token that ends a text ({', '.join(EOS_NAMES)}): "
            "myllm tokenizer extend --special '<|eos|>' adds one"
        )
    return special_id(tokenizer, *names)


def ends_of(tokenizer: "Tokenizer", updates: int) -> set[int]:
    """Return the ids at which a text ends: those that others said, of a model of theirs.

    One that took ``updates`` here learned the id that is put behind texts.
    """
    said = {tokenizer.special_tokens[name] for name in tokenizer.vocabulary.uses.ends}
    return said if said and not updates else {*said, eos_of(tokenizer)}


def part_ids(tokenizer: "Tokenizer", part: Part) -> list[int]:
    """Return the ids of a stretch of a document; text can never become a control id."""
    if part.control:
        return [special_id(tokenizer, str(part.text))]
    if isinstance(part.text, bytes):
        return tokenizer.encode_bytes(part.text)
    return tokenizer.encode_ordinary(part.text)


class TooLittleHeldOut(Exception):
    """Less was held out than was to be: the journal has more documents for it, to pack again."""


class Encoder:
    """Turns documents into ids, by settings; made once in each process."""

    def __init__(self, settings: Settings) -> None:
        from tokenizer import Tokenizer

        self.settings = settings
        self.tokenizer = Tokenizer.load(settings.tokenizer)
        self.dtype = shards.dtype_for(self.tokenizer.n_vocab)
        self.eos = eos_of(self.tokenizer)
        self.bos = special_id(self.tokenizer, "<|bos|>") if settings.bos else None
        self.pad = special_id(self.tokenizer, "<|pad|>") if settings.window else None

    def encode(self, document: Document) -> Encoded:
        """Return the ids of a document, its eos behind."""
        ids: list[int] = []
        predict: list[bool] = []
        plain = all(part.predict for part in document.parts) and document.end
        if self.bos is not None:
            ids.append(self.bos)
            predict.append(plain)
        for part in document.parts:
            new = part_ids(self.tokenizer, part)
            ids += new
            predict += [part.predict] * len(new)
        ids.append(self.eos)
        predict.append(document.end)
        if self.pad is not None:
            missing = self.settings.window - len(ids)
            ids = ids[: self.settings.window] + [self.pad] * missing
            predict = predict[: self.settings.window] + [False] * missing
        return Encoded(
            self.settings.is_held_out(document.content),
            np.array(ids, self.dtype),
            None if all(predict) else np.array(predict, np.bool_),
            document.n_bytes,
            any(part.control for part in document.parts),
        )


_encoder: Encoder | None = None  # of this worker process


def _start_worker(settings: Settings) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where ``unheard`` can do nothing
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(settings)


def _end_with_parent() -> None:
    """End this process with the one that started it, also where that was killed.

    A worker that waits for work would wait for ever: it holds both ends of the queue's pipe.
    """
    parent = parent_process()
    assert parent is not None  # a worker has one
    wait([parent.sentinel])
    os._exit(1)


class _Workers(ProcessPoolExecutor):
    """Processes that encode, by settings, and whose end is ours to decide, not the terminal's."""

    def __init__(self, settings: Settings, processes: int) -> None:
        with unheard():  # what Python starts to look after semaphores
            # spawned, not forked: a fork of a process with threads may hang
            super().__init__(processes, get_context("spawn"), _start_worker, (settings,))

    def submit(self, *work: Any) -> Future[Any]:  # type: ignore[override]
        """Hand a process work, and start it if there is none."""
        with unheard():
            return super().submit(*work)


def _work(documents: list[Document]) -> list[Encoded]:
    assert _encoder is not None
    return [_encoder.encode(document) for document in documents]


def encode_all(
    documents: Iterable[Document], settings: Settings, processes: int
) -> Iterator[list[Encoded]]:
    """Yield batches of encoded documents in the order of the documents."""

    def size(document: Document) -> int:
        return sum(len(part.text) for part in document.parts)

    taken = batches(documents, size, BATCH_BYTES, BATCH_DOCUMENTS)
    if processes == 1:
        encoder = Encoder(settings)
        for batch in taken:
            yield [encoder.encode(document) for document in batch]
        return
    try:
        yield from in_order(_work, taken, processes, partial(_Workers, settings))
    except BrokenProcessPool:
        raise ChildProcessError(
            "one of the processes that encode was killed, for want of memory perhaps: give the "
            "command again, with fewer --processes"
        ) from None


def fingerprint(files: list[str], settings: Settings, tokenizer_sha256: str) -> str:
    """Return a hash of what a packing is made from, to know it again."""
    stats = [(name, os.stat(name)) for name in files if not is_stream(name)]
    told = settings._asdict() | {"chosen": sorted(settings.chosen)}
    parts: list[Any] = [told, tokenizer_sha256, PIECE_BYTES]
    parts += [[name, s.st_size, s.st_mtime_ns] for name, s in stats]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def plain_bytes(inputs: list[str]) -> int:
    """Return the bytes of text in the inputs, 0 when they cannot be known in advance."""
    found = expand(inputs)
    if any(is_packed(name) or name.lower().endswith(".parquet") for name in found.files):
        return 0
    return found.bytes_on_disk


def _first(documents: Iterator[Document], chars: float | None) -> Iterator[Document]:
    """Yield documents until they have so many characters; the last may go beyond."""
    left = math.inf if chars is None else chars
    for document in documents:
        yield document
        if chars is not None:
            left -= document.chars
        if left <= 0:
            return


def pack(
    inputs: list[str],
    out: Path,
    settings: Settings,
    *,
    processes: int = 1,
    skip_bad_lines: bool = False,
    report: Callable[[str], None] = print,
    progress: Callable[[int, int, int], None] = lambda n_bytes, tokens, done: None,
) -> Summary:
    """Pack documents into ``out/train`` and ``out/heldout``.

    Parameters
    ----------
    inputs : list of str
        Files, folders, globs, or "-".
    out : Path
    settings : Settings
    processes : int
    skip_bad_lines : bool
        Leave out lines that are no documents, and report them; else the first is an error.
    report : callable
        Is told of them, and of going on with an interrupted packing.
    progress : callable
        Is told, now and then, of the bytes of text and the tokens so far, and of the bytes on disk
        that are done: of rows these are more than their texts.

    Raises
    ------
    ValueError, OSError, ImportError
        When something cannot be read or written, or nothing was there to pack.
    """
    if not 0 <= settings.heldout < 1:
        raise ValueError(f"the held-out fraction must lie in [0, 1), got {settings.heldout}")
    if settings.max_chars is not None and not settings.max_chars > 0:
        raise ValueError(f"--max-chars must be above 0, got {settings.max_chars:g}")
    if settings.distinct and not settings.heldout:
        raise ValueError("--drop-near-duplicates drops held-out documents, but --heldout is 0")
    if not 0 <= settings.window <= settings.shard_tokens or processes < 1:
        raise ValueError(
            "--window must not be negative nor exceed --shard-tokens, and --processes must be at "
            "least 1"
        )
    if settings.chat and settings.field is not None:
        raise ValueError(
            f"--chat is for rows of prompt and completion, but --field {settings.field} reads "
            "another field alone: leave one of them out"
        )
    check_folder(out)
    for path in inputs:
        if shards.is_packed(Path(path)):
            raise ValueError(f"{path} is packed already: name the texts that it was packed from")
        if Path(path).is_dir() and out.resolve() == Path(path).resolve():
            raise ValueError(f"{out} is the folder of the texts: name another by -o")
    said: set[str] = set()

    def report_once(sentence: str) -> None:
        if sentence not in said:
            said.add(sentence)
            report(sentence)

    with locked(out, "packing"):
        try:
            return _pack(inputs, out, settings, processes, skip_bad_lines, report_once, progress)
        except TooLittleHeldOut as little:
            report(f"{little}: packing again, to hold out {settings.heldout:g} of the text")
        return _pack(inputs, out, settings, processes, skip_bad_lines, report_once, progress)


def _pack(
    inputs: list[str],
    out: Path,
    settings: Settings,
    processes: int,
    skip_bad_lines: bool,
    report: Callable[[str], None],
    progress: Callable[[int, int, int], None],
) -> Summary:
    given = expand(inputs)
    files = given.files
    if settings.distinct and given.streams:
        stream = given.streams[0]
        raise ValueError(
            f"--drop-near-duplicates reads the texts three times: give files, not {stream}"
        )
    others = [folder for folder in given.own if not out.samefile(folder)]
    for remark in given._replace(own=others).remarks():
        report(remark)
    encoder = Encoder(settings)
    tokenizer = encoder.tokenizer
    if tokenizer.loss:
        report(tokenizer.loss)
    journal = _begin(out, fingerprint(files, settings, tokenizer.sha256), report)
    settings = settings._replace(chosen=frozenset(journal.chosen))
    counts = journal.counts
    writers = {
        split: ShardWriter(out / split, tokenizer.n_vocab, settings.shard_tokens, state)
        for split, state in journal.writers.items()
    }

    bad_lines, journal_bad_lines = 0, counts.bad_lines

    def bad_line(said: str) -> None:
        nonlocal bad_lines
        bad_lines += 1
        new = bad_lines - journal_bad_lines  # the others were said the first time
        if 0 < new <= SHOWN_BAD_LINES:
            report(f"{said} (left out)")
        elif new == SHOWN_BAD_LINES + 1:
            report("further bad lines are left out and counted, but not named")

    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done = n_bytes

    def texts(bad: Callable[[str], None]) -> Iterator[Document]:
        leave_out = bad if skip_bad_lines else None
        found = read_documents(files, settings.field, leave_out, settings.chat, advance)
        return _first(found, settings.max_chars)

    near: set[int] = set()
    if settings.distinct:
        report("looking for held-out documents that training text nearly has")
        near = nearly_trained_on(lambda: texts(lambda said: None), settings.is_held_out)
    documents = itertools.islice(texts(bad_line), counts.read, None)
    saved = time.monotonic()
    with ExitStack() as stack:
        for writer in writers.values():
            stack.callback(writer.close)
        for batch in encode_all(documents, settings, processes):
            for encoded in batch:
                number, counts.read = counts.read, counts.read + 1
                if not encoded.n_bytes:
                    counts.empty += 1
                    continue
                if number in near:
                    counts.near += 1
                    continue
                if encoded.predict is not None and not encoded.predict.any():
                    counts.silent += 1
                    continue
                split = SPLITS[encoded.heldout]
                writers[split].write(encoded.ids, encoded.predict)
                counts.packed[split] += 1
                counts.chats[split] += encoded.chat
                counts.n_bytes += encoded.n_bytes
                counts.held_bytes += encoded.n_bytes * encoded.heldout
            progress(counts.n_bytes, sum(w.tokens for w in writers.values()), done)
            if time.monotonic() - saved > JOURNAL_SECONDS and not given.streams:
                counts.bad_lines = bad_lines
                states = {split: writer.state() for split, writer in writers.items()}
                manifest.write(
                    out / JOURNAL, msgspec.structs.replace(journal, counts=counts, writers=states)
                )
                saved = time.monotonic()
        if counts.silent and not counts.packed["train"]:
            instead = f"; give a larger --window than {settings.window}" if settings.window else ""
            raise ValueError(
                f"there is nothing to train on: no document has a token to be predicted{instead}"
            )
        if not counts.packed["train"] and not counts.packed["heldout"]:
            left_out = f", and {bad_lines} bad lines were left out" if bad_lines else ""
            raise ValueError(
                f"there is nothing to train on: no document has any text{left_out}; give others"
            )
        if not counts.packed["train"]:
            raise ValueError(
                f"there is nothing to train on: {counts.packed['heldout']} documents were held out "
                f"and {counts.empty} were empty; give more documents, or a smaller --heldout"
            )
        if too_little(counts.held_bytes, counts.n_bytes, settings.heldout):
            held, train = counts.packed["heldout"], counts.packed["train"]
            said = f"none of the {train} documents was held out for evaluation"
            if held:
                said = f"{counts.held_bytes:,} of {counts.n_bytes:,} bytes were held out"
            elif counts.near:
                said = f"all {counts.near} held-out documents are near-duplicates of training text"
            too_many = settings.distinct and counts.n_bytes > COMPARED_BYTES
            if not settings.chosen and not given.streams and not too_many:
                known = partial(texts, lambda said: None)
                among = unlike_others(known()) if settings.distinct else None
                chosen = holds_out(known(), settings.heldout, among)
                if any(at >= settings.heldout for at in chosen):
                    manifest.write(out / JOURNAL, _fresh(journal.mark, chosen))
                    raise TooLittleHeldOut(said)
            if not held:
                instead = ", other texts, or leave --drop-near-duplicates out"
                if not counts.near:
                    instead = f" than {settings.heldout}, or --heldout 0 to train on all"
                raise ValueError(f"{said}: give more documents, a larger --heldout{instead}")
        facts = {
            "tokenizer_sha256": tokenizer.sha256,
            "vocab_size": tokenizer.n_vocab,
            "eos": encoder.eos,
            "window": settings.window or None,
        }
        for split in reversed(SPLITS):  # the training set's manifest last: it says that all is done
            if counts.packed[split]:
                tokenizer.save(out / split / shards.TOKENIZER)
                told = {"documents": counts.packed[split], "chats": counts.chats[split]}
                writers[split].finish(**told, **facts)
            else:
                (out / split / shards.TOKENIZER).unlink(missing_ok=True)  # of an earlier start
                (out / split).rmdir()
    (out / JOURNAL).unlink(missing_ok=True)
    return Summary(
        dict(counts.packed),
        {split: writers[split].tokens for split in SPLITS},
        counts.n_bytes,
        bad_lines,
        counts.empty,
        counts.near,
        counts.silent,
    )


def kept(out: Path) -> int:
    """Return the documents that a packing which was interrupted has in its journal."""
    try:
        return manifest.read(out / JOURNAL, Journal, JOURNAL_FORMAT, "").counts.read
    except FileNotFoundError:
        return 0


def _fresh(mark: str, chosen: Iterable[float] = ()) -> Journal:
    """Return the journal of a packing that has done nothing yet."""
    return Journal(
        format=JOURNAL_FORMAT,
        mark=mark,
        counts=Counts(),
        writers={split: WriterState() for split in SPLITS},
        chosen=tuple(sorted(chosen)),
    )


def _begin(out: Path, mark: str, report: Callable[[str], None]) -> Journal:
    """Return the journal to go on from, which is on disk, in a folder that is ours to fill."""
    path = out / JOURNAL
    fresh = _fresh(mark)
    if not path.exists():
        for split in SPLITS:
            if (out / split / shards.MANIFEST).exists():
                raise ValueError(f"{out / split} is packed already; remove {out} to pack it again")
            for file in (out / split).glob("*"):
                if is_shard_file(file.name):
                    raise ValueError(
                        f"{file} was not left by an unfinished packing: move it, or choose another "
                        "folder to pack into"
                    )
        manifest.write(path, fresh)
        return fresh
    for split in SPLITS:  # written, but the packing was interrupted before its end
        (out / split / shards.MANIFEST).unlink(missing_ok=True)
    try:
        journal = manifest.read(path, Journal, JOURNAL_FORMAT, "packing from the start")
    except ValueError as error:
        report(str(error))
        journal = fresh
    if journal.mark != mark:
        report(f"{out} was begun with other inputs or settings: packing from the start")
        journal = fresh
    if journal.counts.read:
        report(f"going on after {journal.counts.read:,} documents in {out}")
    manifest.write(path, journal)
    return journal
