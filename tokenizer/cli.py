"""``myllm tokenizer ...``: train, encode, decode, info, export, import, compare."""

import argparse
import dataclasses
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from accel.help import parser as command_parser
from tokenizer import (
    Tokenizer,
    from_huggingface,
    from_tiktoken,
    to_huggingface,
    to_tiktoken,
    train_from_iterator,
)
from tokenizer.arrays import Array
from tokenizer.fileformat import NAME
from tokenizer.files import make_room, replace_durably
from tokenizer.patterns import machine_of
from tokenizer.read import SHOWN_BAD_LINES, Source, is_plain, standard_input
from tokenizer.tokenizer import decode_utf8
from tokenizer.vocabulary import CONTROLS, FIRST_SPECIALS, MIN_VOCAB


def train(argv: Sequence[str]) -> int:
    """Train a tokenizer on files and write it."""
    parser = command_parser(
        "tokenizer train",
        "Learn a byte-level BPE vocabulary from text.",
        "myllm tokenizer train corpus/ more.jsonl.gz --vocab-size 65536 -o my.tok",
    )
    _add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="276 to 65536")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    parser.add_argument("--pattern", default="gpt4", help="gpt4, gpt2 or a regular expression")
    parser.add_argument("--min-count", type=int, default=2, help="least count of a merged pair")
    parser.add_argument(
        "--max-chars",
        type=float,
        metavar="N",
        help="from each of PATHS texts until it gave its share of so many",
    )
    parser.add_argument("--threads", type=int, default=None, help="threads that count words")
    options = parser.parse_args(argv)
    if options.max_chars is not None and not options.max_chars > 0:
        parser.error("--max-chars must be above 0")
    make_room(options.output, NAME)
    start = time.monotonic()
    with _reading(options) as source:
        tokenizer = train_from_iterator(
            _some(_sample(source, options.max_chars, options.pattern in ("gpt4", "gpt2"))),
            options.vocab_size,
            pattern=options.pattern,
            min_count=options.min_count,
            num_threads=options.threads,
        )
    tokenizer.save(options.output)
    print(
        f"{options.output}: {tokenizer.n_vocab:,} ids, {_n_merges(tokenizer):,} merges, "
        f"{time.monotonic() - start:.1f} s"
    )
    if tokenizer.n_vocab < options.vocab_size:
        print(
            f"smaller than the {options.vocab_size:,} asked for: no further pair of neighbours "
            f"occurs {options.min_count} times or more in these texts",
            file=sys.stderr,
        )
    return 0


def _sample(source: Source, chars: float | None, cut_freely: bool) -> Iterator[bytes]:
    """Yield texts: all, or from each path until they have its share of so many characters."""
    if chars is None:
        yield from source.texts(cut_freely=cut_freely)
        return
    advance, before = source.advance or (lambda done: None), 0
    for path in source.paths:
        left = chars / len(source.paths)
        # what is passed over counts as read
        one = dataclasses.replace(source, paths=[path], advance=partial(_behind, advance, before))
        before += one.total_bytes
        for text in one.texts(cut_freely=cut_freely):
            yield text
            left -= len(text.decode("utf-8", "surrogatepass"))
            if left <= 0:
                break


def _behind(advance: Callable[[int], None], before: int, done: int) -> None:
    advance(before + done)


def _some(texts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield texts, and refuse to end without any."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise ValueError("the texts are empty: there is nothing to learn from")


def encode(argv: Sequence[str]) -> int:
    """Print the ids of texts, a line for each text."""
    parser = command_parser(
        "tokenizer encode",
        "Encode text: a line of ids for each text (each file; each line of .jsonl).",
        'myllm tokenizer encode my.tok --text "Hello, world"',
    )
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    _add_inputs(parser, "*")
    parser.add_argument("--text", help="encode this text instead of files")
    parser.add_argument(
        "--allow-special", action="store_true", help="names of special tokens become their ids"
    )
    parser.add_argument("-o", "--output", metavar="FILE.npy", help="write all ids as one array")
    options = parser.parse_intermixed_args(argv)
    if options.text is not None and options.paths:
        parser.error("give --text or PATHS, not both")
    if options.output is not None and not options.output.endswith(".npy"):
        parser.error("--output writes a NumPy array: name it FILE.npy")
    tokenizer = Tokenizer.load(options.tokenizer)
    if options.output is not None:
        make_room(options.output, np.lib.format.MAGIC_PREFIX)
    rows = []
    for text in _texts_to_encode(options):
        if options.allow_special:
            ids = tokenizer.encode(decode_utf8(text, "strict"), allowed_special="all")
        else:
            ids = tokenizer.encode_bytes(text)
        if options.output is None:
            print(*ids)
        else:
            rows.append(np.array(ids, tokenizer.dtype))
    if options.output is not None:
        array = np.concatenate([np.zeros(0, tokenizer.dtype), *rows])
        written = io.BytesIO()
        np.save(written, array)
        replace_durably(Path(options.output), written.getvalue())
        print(f"{options.output}: {array.size:,} ids, {array.dtype}")
    return 0


def _texts_to_encode(options: argparse.Namespace) -> Iterator[bytes]:
    """Yield texts as they are: what is no UTF-8 can be encoded as well."""
    if options.text is not None:
        yield options.text.encode("utf-8", "surrogateescape")
        return
    for name in options.paths or ["-"]:
        if name == "-":
            yield standard_input().read()
        elif Path(name).is_file() and is_plain(name):
            yield Path(name).read_bytes()
        else:
            with _reading(argparse.Namespace(**{**vars(options), "paths": [name]})) as source:
                yield from source.texts()


def decode(argv: Sequence[str]) -> int:
    """Write the bytes that ids stand for."""
    parser = command_parser(
        "tokenizer decode",
        "Decode ids, separated by white space or in a .npy file, into bytes on standard output.",
        "myllm tokenizer encode my.tok notes.txt \\\n"
        "    | myllm tokenizer decode my.tok > same.txt",
    )
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    parser.add_argument("paths", nargs="*", metavar="IDS", help="files; standard input if none")
    options = parser.parse_args(argv)
    tokenizer = Tokenizer.load(options.tokenizer)
    for name in options.paths or ["-"]:
        for where, ids in _ids_of(name):
            try:
                sys.stdout.buffer.write(tokenizer.decode_bytes(ids))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    sys.stdout.buffer.flush()
    return 0


def _ids_of(name: str) -> Iterator[tuple[str, list[int] | Array]]:
    if name.endswith(".npy"):
        try:
            yield name, np.load(name, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{name} is no NumPy array of ids: {error}") from None
        return
    shown = "standard input" if name == "-" else name
    file = standard_input() if name == "-" else open(name, "rb")
    with file:
        for number, line in enumerate(file, 1):
            where = f"{shown}, line {number}"
            try:
                yield where, [int(word) for word in line.split()]
            except ValueError:
                bad = next(word for word in line.split() if not _is_id(word))
                shown_word = bad[:40].decode("utf-8", "backslashreplace")
                raise ValueError(f"{where}: {shown_word!r} is no id") from None


def _is_id(word: bytes) -> bool:
    try:
        int(word)
    except ValueError:  # also for more digits than Python reads
        return False
    return True


def info(argv: Sequence[str]) -> int:
    """Print what a tokenizer is, and how well it does on texts."""
    parser = command_parser(
        "tokenizer info",
        "Show a tokenizer: size, special ids, longest tokens; with PATHS, bytes per token on them.",
        "myllm tokenizer info my.tok held-out.txt",
    )
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    _add_inputs(parser, "*")
    parser.add_argument("--longest", type=int, default=10, metavar="K", help="tokens to list")
    options = parser.parse_intermixed_args(argv)
    tokenizer = Tokenizer.load(options.tokenizer)
    vocabulary = tokenizer.vocabulary
    machine = "a state machine" if machine_of(vocabulary.pattern) else "regex"
    print(f"file            {options.tokenizer}")
    print(f"sha256          {tokenizer.sha256}")
    print(f"ids             {tokenizer.n_vocab:,} ({tokenizer.dtype})")
    print(f"merges          {_n_merges(tokenizer):,}")
    print(f"pattern         {vocabulary.pattern}   (cut by {machine})")
    if tokenizer.loss:
        print(f"loss            {tokenizer.loss}")
    print("special tokens")
    for name, i in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1]):
        print(f"  {i:>8}  {name}")
    if vocabulary.uses.ends:
        print(f"a model stops at {', '.join(vocabulary.uses.ends)}")
    print("longest tokens")
    longest = sorted(vocabulary.tokens.items(), key=lambda item: (-len(item[1]), item[0]))
    for i, token in longest[: options.longest]:
        print(f"  {i:>8}  {len(token):>4} bytes  {token.decode('utf-8', 'backslashreplace')!r}")
    if options.paths:
        n_bytes = n_tokens = n_words = 0
        with _reading(options) as source:
            for text in source.texts():
                n_bytes += len(text)
                n_tokens += len(tokenizer.encode_bytes(text))
                n_words += len(text.split())
        if n_tokens == 0:
            raise ValueError("the texts are empty: there is nothing to measure")
        print(f"on these texts  {n_bytes:,} bytes, {n_tokens:,} tokens")
        print(f"fertility       {n_bytes / n_tokens:.3f} bytes per token", end="")
        print(f", {n_tokens / n_words:.3f} tokens per word" if n_words else "")
    return 0


def export(argv: Sequence[str]) -> int:
    """Write a tokenizer in the format of others."""
    parser = command_parser(
        "tokenizer export",
        "Write a tokenizer for Hugging Face (FILE.json) or tiktoken (FILE.tiktoken).",
        "myllm tokenizer export my.tok -o tokenizer.json",
    )
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    options = parser.parse_args(argv)
    writers = {".json": to_huggingface, ".tiktoken": to_tiktoken}
    writer = writers.get(Path(options.output).suffix)
    if writer is None:
        parser.error("--output must end in .json or .tiktoken, which says the format")
    tokenizer = Tokenizer.load(options.tokenizer)
    make_room(options.output, b"")
    writer(tokenizer, options.output)
    print(f"{options.output}: {tokenizer.n_vocab:,} ids")
    if writer is to_tiktoken:
        print(
            f"the file holds no pattern and no special tokens; give tiktoken.Encoding these:\n"
            f"pat_str={tokenizer.vocabulary.pattern!r}\n"
            f"special_tokens={tokenizer.special_tokens!r}"
        )
        if tokenizer.vocabulary.nfc:
            print("and bring every text to NFC first: unicodedata.normalize('NFC', text)")
    return 0


def import_(argv: Sequence[str]) -> int:
    """Make a tokenizer of a file of others."""
    parser = command_parser(
        "tokenizer import",
        "Read Hugging Face's tokenizer.json or a .tiktoken file; ids stay as they are.",
        "myllm tokenizer import tokenizer.json -o theirs.tok",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    parser.add_argument("--pattern", default="gpt4", help="of a .tiktoken file, which has none")
    parser.add_argument(
        "--special", action="append", default=[], metavar="NAME=ID", help="of a .tiktoken file"
    )
    options = parser.parse_args(argv)
    if options.file.endswith(".json"):
        tokenizer = from_huggingface(options.file)
    elif options.file.endswith(".tiktoken"):
        specials = {}
        for entry in options.special:
            name, _, number = entry.rpartition("=")
            if not name or not number.isdecimal():
                parser.error(f"--special takes NAME=ID, got {entry!r}")
            specials[name] = int(number)
        tokenizer = from_tiktoken(options.file, pattern=options.pattern, special_tokens=specials)
    else:
        parser.error("FILE must end in .json or .tiktoken, which says the format")
    make_room(options.output, NAME)
    tokenizer.save(options.output)
    print(f"{options.output}: {tokenizer.n_vocab:,} ids")
    if tokenizer.loss:
        print(tokenizer.loss)
    return 0


def extend(argv: Sequence[str]) -> int:
    """Add special tokens to a tokenizer, after its last id."""
    parser = command_parser(
        "tokenizer extend",
        "Add special tokens after the last id: those of a chat and <|pad|>, unless others are "
        "named, which an imported vocabulary has not got. All other ids stay as they are.",
        "myllm tokenizer extend smollm/tokenizer.myllm -o chat.tok",
    )
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    parser.add_argument(
        "--special", action="append", metavar="NAME", help="may be given many times"
    )
    options = parser.parse_args(argv)
    old = Tokenizer.load(options.tokenizer).vocabulary
    wanted = dict.fromkeys(options.special or (FIRST_SPECIALS[0], *CONTROLS[:4]))
    new = [name for name in wanted if name not in old.special_tokens]
    if not new:
        raise ValueError(f"{options.tokenizer} has {', '.join(wanted)} already")
    specials = dict(old.special_tokens) | {name: old.n_vocab + i for i, name in enumerate(new)}
    tokenizer = Tokenizer(dataclasses.replace(old, special_tokens=specials))
    make_room(options.output, NAME)
    tokenizer.save(options.output)
    print(f"{options.output}: {tokenizer.n_vocab:,} ids")
    for name in new:
        print(f"  {specials[name]:>8}  {name}")
    return 0


def compare(argv: Sequence[str]) -> int:
    """Print a table of ways to cut text into tokens, measured on one text."""
    from tokenizer.study.compare import table

    parser = command_parser(
        "tokenizer compare",
        "Train byte BPE, character BPE, unigram LM and word level on one text and compare them.",
        "myllm tokenizer compare book.txt --vocab-size 2000",
    )
    _add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, default=2000, metavar="N")
    parser.add_argument("--limit", type=int, default=200_000, metavar="BYTES", help="use the first")
    options = parser.parse_args(argv)
    if options.vocab_size < MIN_VOCAB:
        parser.error(f"--vocab-size must be at least {MIN_VOCAB}")
    with _reading(options) as source:
        data = b""
        for text in source.texts():
            data += text
            if len(data) >= options.limit:
                break
    print(table(data[: options.limit].decode("utf-8", "ignore"), options.vocab_size))
    return 0


# --- shared by the subcommands


def _add_inputs(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    parser.add_argument(
        "paths",
        nargs=nargs,
        metavar="PATHS",
        help="text files, folders, globs; rows of .jsonl, .json, .csv, .tsv, .parquet; each also "
        ".gz or .zst; - is stdin",
    )
    parser.add_argument(
        "--field",
        help="field or column of rows that holds the text, whatever else they have (default: "
        "messages, or prompt and completion, or text)",
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="report lines that cannot be read and go on"
    )


def _n_merges(tokenizer: Tokenizer) -> int:
    merges = tokenizer.vocabulary.merges
    return len(tokenizer.vocabulary.tokens) - 256 if merges is None else len(merges)


@contextmanager
def _reading(options: argparse.Namespace) -> Iterator[Source]:
    """Give the source of texts that the options describe, with progress and a report at the end."""
    n_bad = 0

    def report(sentence: str) -> None:
        nonlocal n_bad
        n_bad += 1
        if n_bad <= SHOWN_BAD_LINES:
            print(f"left out: {sentence}", file=sys.stderr)

    source = Source(
        options.paths, options.field, report_bad=report if options.skip_bad_lines else None
    )
    for remark in source.inputs.remarks():
        print(remark, file=sys.stderr)
    with _progress(source.total_bytes) as advance:
        source.advance = advance
        yield source
    if n_bad > SHOWN_BAD_LINES:
        print(f"... and {n_bad - SHOWN_BAD_LINES:,} more", file=sys.stderr)
    if n_bad:
        print(f"{n_bad:,} lines were left out", file=sys.stderr)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes read and the time left: a bar on a terminal, elsewhere a line now and then."""
    if sys.stderr.isatty():
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("reading"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=total or None)
            yield lambda done: bar.update(task, completed=done)
        return
    start = said = time.monotonic()

    def advance(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= 5 and done:
            said = now
            left = f" of {total / 1e6:,.0f} MB, {(total - done) / done * (now - start):,.0f} s left"
            print(f"reading: {done / 1e6:,.0f} MB{left if total else ''}", file=sys.stderr)

    yield advance
