r"""Read texts: files, folders, globs, standard input; plain or rows of texts; gzip, Zstandard.

A file is what its name says: one of ``records.py`` holds rows, each with a text in one field, or a
conversation; any other is one text. ``.gz`` or ``.zst`` after that is unpacked on the way. Of a
folder or a glob, what is no text is passed over.

A row that has no text in the field, or a line that is no UTF-8, is **bad**: an error that names
file and line, unless the caller has a place to report it to and goes on without the line.
"""

import codecs
import glob
import gzip
import io
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import regex

from tokenizer.files import LOCK
from tokenizer.records import PACKED, contents, fields, is_packed, is_rows, rows

SHOWN_BAD_LINES = 20  # of those that are left out; more are counted
BLOCK_BYTES = 1 << 23
_TAIL = 1 << 16
_PACKED_BYTES = 1 << 14  # read at once of a .zst
_LOOK = 1 << 13  # bytes in which a file that is no text shows a NUL
OTHERWISE_PACKED = (".xz", ".bz2")
MARKS = {  # UTF-32's is UTF-16's and more
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}

# Between an ASCII letter and a space no piece of the GPT-4 and GPT-2 patterns goes on, and neither
# looks back or ahead across it: two halves cut here have the pieces of the whole.
_SAFE_CUT = regex.compile(rb"[A-Za-z](?=[ \n])")

Report = Callable[[str], None]


@dataclass
class Source:
    """Where texts come from.

    Parameters
    ----------
    paths : sequence of str
        Files, folders (all files below, by name, but hidden ones and those of folders that are
        MyLLM's own), globs, or ``-``, standard input.
    field : str, optional
        The field of a row that holds the text, whatever else the row has; without it "text", where
        the row has no messages, and no prompt and completion.
    report_bad : callable, optional
        Takes a sentence on each bad line, which is then left out. Without it the first is an error.
    advance : callable, optional
        Takes the bytes read from disk so far, for a progress bar.
    """

    paths: Sequence[str]
    field: str | None = None
    report_bad: Report | None = None
    advance: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.inputs = expand(self.paths)
        self.files = self.inputs.files
        self._before = 0  # bytes of the files that are read to the end

    @property
    def total_bytes(self) -> int:
        """Bytes on disk of all files; 0 if a stream is among them."""
        return self.inputs.bytes_on_disk

    def texts(self, *, cut_freely: bool = False) -> Iterator[bytes]:
        """Yield the texts of all files as UTF-8.

        Parameters
        ----------
        cut_freely : bool
            Plain files may come in parts of some MB, cut where no piece of a built-in pattern can
            cross; else each comes as a whole.
        """
        for name in self.files:
            with opened(name) as (file, raw):
                if is_rows(name):
                    for number, (where, row) in enumerate(rows(name, file, self.field, self._bad)):
                        yield from self._texts_of(row, where)
                        if number % 256 == 255:
                            self._advance(name, raw)
                else:
                    yield from self._plain(file, raw, name, cut_freely)
            self._advance(name, None)

    def _plain(self, file: IO[bytes], raw: IO[bytes], name: str, cut: bool) -> Iterator[bytes]:
        held: list[bytes] = []
        line, mark = 1, codecs.BOM_UTF8  # a byte order mark, as some editors begin a file with
        while True:
            block, mark = file.read(BLOCK_BYTES).removeprefix(mark), b""
            self._advance(name, raw)
            if cut and len(block) == BLOCK_BYTES:  # else it is the last
                tail = max(0, len(block) - _TAIL)
                found = None  # the last one, of a line if there is one, so that lines stay whole
                for each in _SAFE_CUT.finditer(block, tail):
                    at_line = block.startswith(b"\n", each.end())
                    if at_line or found is None or not block.startswith(b"\n", found.end()):
                        found = each
                if found is None:
                    held.append(block)
                    continue
                held.append(block[: found.end()])
                rest = [block[found.end() :]]
            elif block:
                held.append(block)
                continue
            else:
                rest = []
            text = b"".join(held)
            held = rest
            newlines = text.count(b"\n")
            text = self._checked(text, name, line)
            line += newlines
            if text:
                yield text
            if not block:
                return

    def _checked(self, text: bytes, name: str, line: int) -> bytes:
        """Return the text without its lines that are no UTF-8."""
        try:
            text.decode()
            return text
        except UnicodeDecodeError:
            pass
        good = []
        for number, part in enumerate(io.BytesIO(text), line):
            try:
                part.decode()
                good.append(part)
            except UnicodeDecodeError as error:
                where = f"{_show(name)}, line {number}"
                self._bad(f"{where}: byte 0x{part[error.start]:02x} at {error.start} is no UTF-8")
        return b"".join(good)

    def _texts_of(self, row: dict[str, Any], where: str) -> Iterator[bytes]:
        values = contents(row, self.field)
        if values and all(isinstance(value, str) for value in values):
            yield from (value.encode("utf-8", "surrogatepass") for value in values)
        elif isinstance(row.get("messages"), list) and "messages" in fields(self.field):
            self._bad(f"{where}: a message's 'content' is no text, or there is no message")
        elif self.field is None and "completion" in row:
            self._bad(f"{where}: 'prompt' and 'completion' must be texts")
        elif (field := fields(self.field)[0]) in row:
            self._bad(f"{where}: field {field!r} is no text")
        else:
            have = ", ".join(map(repr, row)) or "none"
            self._bad(f"{where}: no field {field!r}; its fields: {have}")

    def _bad(self, sentence: str) -> None:
        if self.report_bad is None:
            raise ValueError(f"{sentence} (--skip-bad-lines leaves such lines out)")
        self.report_bad(sentence)

    def _advance(self, name: str, raw: IO[bytes] | None) -> None:
        if raw is None and not is_stream(name):
            self._before += Path(name).stat().st_size
        if self.advance is not None:
            self.advance(self._before + (raw.tell() if raw is not None and raw.seekable() else 0))


class Inputs(NamedTuple):
    """What paths, folders and globs stand for."""

    files: list[str]
    passed_over: dict[str, str]  # of folders and globs: what is no text, and what it is
    links: list[str]  # in folders: to other folders, or to nothing
    own: list[str]  # in folders: those that MyLLM wrote, of packed texts and runs

    @property
    def streams(self) -> list[str]:
        """Those of the files that can be read once only."""
        return [name for name in self.files if is_stream(name)]

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all files; 0 if a stream is among them."""
        return 0 if self.streams else sum(Path(name).stat().st_size for name in self.files)

    def remarks(self) -> Iterator[str]:
        """Yield a sentence on what is not read, or is perhaps not wanted as it is."""
        for what in dict.fromkeys(self.passed_over.values()):
            names = [name for name, found in self.passed_over.items() if found == what]
            yield f"passed over, as {what}: {_some(names)}"
        if self.links:
            yield f"not followed: {_some(self.links, 'link')}; name what to read there as well"
        if self.own:
            yield f"passed over, as written by MyLLM: {_some(self.own, 'folder')}"
        pages = [name for name in self.files if name.lower().endswith((".html", ".htm"))]
        if pages:
            yield f"HTML is read as it stands, with its tags: {_some(pages)}"
        again = Counter(os.path.realpath(name) for name in self.files if not is_stream(name))
        again -= Counter(set(again))
        if again:
            yield f"given more than once, and read as often: {_some(list(again))}"


def expand(paths: Sequence[str]) -> Inputs:
    """Return the files that paths, folders and globs stand for.

    Raises
    ------
    ValueError
        If one of them stands for no file, or is itself a file that is no text, or standard input
        is to be read twice.
    """
    files: list[str] = []
    passed_over: dict[str, str] = {}
    links: list[str] = []
    own: list[str] = []
    for path in paths:
        here: list[Path] = []  # what a folder or a glob has
        if path == "-":
            found = ["-"]
        elif Path(path).is_dir():
            here = sorted(_below(path))
            found = [str(p) for p in here if p.is_file()]
            links += [str(p) for p in here if p.is_symlink() and not p.is_file()]
            own += [str(p) for p in here if p.is_dir() and not p.is_symlink()]
        elif Path(path).exists():
            found = [path]
        else:
            names = sorted(glob.glob(path, recursive=True))
            here = [Path(name) for name in names]
            found = [name for name in names if Path(name).is_file()]
        odd = [p for p in here if not (p.is_file() or p.is_dir() or p.is_symlink())]
        pipes = {str(p): "a pipe or device, which has to be named by itself" for p in odd}
        other = {n: what for n in found if not is_stream(n) and (what := instead_of_text(n))}
        if list(other) == [path]:
            raise ValueError(f"{path!r} is {other[path]}")
        if len(other) == len(found):
            what = "is no file, folder or glob of files"
            if found or Path(path).is_dir():
                what = "holds no text" if found else "holds no file"
            why = "; ".join(["", *Inputs([], other | pipes, links, own).remarks()])
            raise ValueError(f"{path!r} {what}{why}")
        files += [name for name in found if name not in other]
        passed_over |= other | pipes
    if files.count("-") > 1:
        raise ValueError("- is given twice, but standard input can be read once")
    return Inputs(files, passed_over, links, own)


def _below(folder: str) -> Iterator[Path]:
    """Yield files and links in a folder and those below, but what is hidden.

    Of a folder below that MyLLM wrote, by its lock, it yields the folder alone.
    """

    def fail(error: OSError) -> None:  # else a folder that cannot be read would be left out
        raise error

    for where, folders, names in os.walk(folder, onerror=fail):
        lock = Path(where, LOCK)
        if where != folder and lock.is_file() and not lock.stat().st_size:
            folders[:], names = [], []
            yield Path(where)
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [name for name in folders if Path(where, name).is_symlink()]
        yield from (Path(where, name) for name in names if not name.startswith("."))


def is_stream(name: str) -> bool:
    """Tell whether this is no file on disk but standard input or a pipe, which is read once."""
    return name == "-" or not Path(name).is_file()


def instead_of_text(name: str) -> str:
    """Return what a file is that can be no text, by its name and how it begins; else nothing."""
    if is_archive(name):
        return "an archive, which has to be unpacked first"
    if name.lower().endswith((*OTHERWISE_PACKED, *(f".parquet{ending}" for ending in PACKED))):
        return "packed in a way that is not read here, and has to be unpacked first"
    if name.lower().endswith(".parquet"):
        return ""
    try:
        with opened(name) as (file, _):
            head = file.read(_LOOK)
    except (ValueError, ImportError):  # it cannot be unpacked, which reading it says
        return ""
    for form, marks in MARKS.items():
        if head.startswith(marks):
            return f"{form}, which has to be saved as UTF-8"
    no_text = b"\0" in head or head.startswith(b"%PDF-")
    return "no text" if no_text and not is_rows(name) else ""


def is_archive(name: str) -> bool:
    """Tell whether a file holds others, by how its name ends."""
    endings = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".7z", ".rar")
    return name.lower().endswith(endings)


def is_plain(name: str) -> bool:
    """Tell whether a file is one text, as it lies on disk."""
    return not (is_rows(name) or is_packed(name))


def _some(names: Sequence[str], what: str = "file") -> str:
    """Return how many there are of what, and the first of them."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} {what}{'s' * (len(names) > 1)} ({', '.join(names[:3])}{more})"


def _show(name: str) -> str:
    return "standard input" if name == "-" else name


def standard_input() -> IO[bytes]:
    """Return standard input.

    Raises
    ------
    ValueError
        If this process was started without one.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed: name a file, or send a text")
    return sys.stdin.buffer


@contextmanager
def opened(name: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, unpacking it; give the unpacked stream and the one that counts bytes on disk."""
    if name == "-":
        stdin = standard_input()
        yield stdin, stdin
        return
    with open(name, "rb") as raw:
        try:
            if name.lower().endswith(".gz"):
                with gzip.open(raw) as file:
                    yield file, raw  # type: ignore[misc]
            elif name.lower().endswith(".zst"):
                try:
                    import zstandard
                except ImportError:
                    raise ImportError(
                        f"{name}: unpacking Zstandard needs zstandard: pip install zstandard"
                    ) from None
                try:
                    yield io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor())), raw
                except zstandard.ZstdError as error:
                    raise ValueError(f"{name} cannot be unpacked: {error}") from None
            else:
                yield raw, raw
        except EOFError:
            raise ValueError(f"{name} cannot be unpacked: it is cut short") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{name} cannot be unpacked: {error}") from None


class _Frames(io.RawIOBase):
    """Zstandard frames, one after the other, unpacked; EOFError where the last one is cut short.

    The package's own ``stream_reader`` takes a file that is cut short for one that ends there.
    """

    def __init__(self, raw: IO[bytes], decompressor: Any):
        self._raw = raw
        self._decompressor = decompressor
        self._frame: Any = None  # that has begun and has not ended
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._raw.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError
                return 0
            frame = self._frame or self._decompressor.decompressobj()
            self._unpacked = memoryview(frame.decompress(self._packed))
            self._packed = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        n = min(len(buffer), len(self._unpacked))
        buffer[:n] = self._unpacked[:n]
        self._unpacked = self._unpacked[n:]
        return n
