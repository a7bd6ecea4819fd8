"""Files that hold many texts, one a row: JSON lines, JSON lists, CSV and TSV, Parquet."""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

Bad = Callable[[str], None]  # takes a sentence on a row that cannot be read; raises, or goes on
Row = tuple[str, dict[str, Any]]  # where it stands, and its fields
Fields = tuple[str, ...]  # that are read, that of the text first

PACKED = (".gz", ".zst")
TEXT = "text"  # the field of a row's text, where people name none
# what a row may have beside its text: a conversation, or a task and what is wanted
ASIDE = ("messages", "prompt", "completion")
_BEGINS_A_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\"]")  # of objects or texts
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of such a byte


def is_rows(name: str) -> bool:
    """Tell whether a file holds rows, packed or not."""
    return _ending(name) in READERS


def rows(name: str, file: IO[bytes], field: str | None, bad: Bad) -> Iterator[Row]:
    """Yield the rows of a file, in order.

    Parameters
    ----------
    name : str
        The file; what it holds is told by how its name ends.
    file : binary file
        Its content, unpacked; Parquet is read by name.
    field : str, optional
        Where the text of a row is; without it ``TEXT``, or what stands ``ASIDE``, and a JSON file
        that is no list of objects or texts, and no object with such a field, is one text, as is: a
        row whose place is the file's name alone. What begins as a list of such must be one.
    bad : callable
        Is given a sentence on each row that cannot be read.

    Raises
    ------
    ValueError, OSError, ImportError
        When the file as a whole cannot be read, or has no column for the text.
    """
    return READERS[_ending(name)](name, file, fields(field), bad)


def fields(named: str | None) -> Fields:
    """Return the fields of a row that are read: where people name one, it alone."""
    return (TEXT, *ASIDE) if named is None else (named,)


def contents(row: dict[str, Any], field: str | None) -> list[Any]:
    """Return what people wrote in a row: in its messages, its prompt and completion, or its text.

    Where a field is named it is only that one. What is no string is not as it should be.
    """
    messages = row.get("messages") if "messages" in fields(field) else None
    if isinstance(messages, list):
        return [m.get("content") if isinstance(m, dict) else None for m in messages]
    if field is None and "completion" in row:
        return [row.get("prompt"), row["completion"]]
    return [row.get(fields(field)[0])]


def _json_lines(name: str, file: IO[bytes], wanted: Fields, bad: Bad) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers too long, nesting too deep
            bad(f"{where}: no JSON: {error}")
            continue
        if isinstance(row, dict):
            yield where, _told(row, wanted)
        else:
            bad(f"{where}: no JSON object but {type(row).__name__}")


def _told(row: dict[str, Any], wanted: Fields) -> dict[str, Any]:
    """Return a row without what is null in it beside its text, as other rows have it."""
    return {key: value for key, value in row.items() if value is not None or key == wanted[0]}


def _json_list(name: str, file: IO[bytes], wanted: Fields, bad: Bad) -> Iterator[Row]:
    text = file.read()
    named = len(wanted) == 1
    content = None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_object(text.lstrip().partition(b"\n")[0]):  # JSON Lines by another name
            yield from _json_lines(name, io.BytesIO(text), wanted, bad)
            return
        if named or _BEGINS_A_LIST.match(text):
            if text.strip():
                bad(f"{name}: no JSON: {error}")
            return
    items = content if isinstance(content, list) else [content]
    texts = sum(isinstance(item, str) for item in items)
    if texts and not named and texts == sum(item is not None for item in items):
        items = [{TEXT: item} for item in items]
    if named or (any(isinstance(item, dict) for item in items) and _are_rows(content, wanted)):
        for number, row in enumerate(items, 1):
            where = f"{name}, item {number}"
            if isinstance(row, dict):
                yield where, _told(row, wanted)
            else:
                bad(f"{where}: no JSON object but {type(row).__name__}")
        return
    try:
        yield name, {wanted[0]: text.decode()}
    except UnicodeDecodeError as error:
        bad(f"{name}: byte 0x{text[error.start]:02x} at {error.start} is no UTF-8")


def _are_rows(content: Any, wanted: Fields) -> bool:
    """Tell whether JSON is a list, or one row by itself: an object with a text or messages."""
    known = [content.get(key) for key in wanted] if isinstance(content, dict) else [""]
    return any(isinstance(value, str | list) for value in known)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _csv(name: str, file: IO[bytes], wanted: Fields, bad: Bad) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    # strict: else a quote that never closes takes in all rows behind it
    table = csv.reader(lines, delimiter="\t" if _ending(name) == ".tsv" else ",", strict=True)
    began = 1
    try:
        columns = next(table, None)
        if columns is None:  # an empty file, which has no rows
            return
        _check_columns(name, columns, wanted)
        began = table.line_num + 1
        for values in table:
            where = f"{name}, line {table.line_num}"
            began = table.line_num + 1
            broken = _NO_UTF8.search("".join(values))
            if broken:
                bad(f"{where}: byte 0x{ord(broken[0]) - 0xDC00:02x} is no UTF-8")
            elif len(values) == len(columns):
                yield where, _filled(dict(zip(columns, values, strict=True)), wanted)
            elif values:
                bad(f"{where}: {len(values)} values for {len(columns)} columns")
    except csv.Error as error:
        raise ValueError(
            f"{name}: {error}, in the row that begins on line {began}: is a quote never closed?"
        ) from None
    finally:
        lines.detach()


def _filled(row: dict[str, Any], wanted: Fields) -> dict[str, Any]:
    """Return a row without empty messages, and beside a text without an empty completion."""
    gone = ("messages", "completion") if row.get(wanted[0]) else ("messages",)
    return {key: value for key, value in row.items() if value or key not in gone}


def _parquet(name: str, file: IO[bytes], wanted: Fields, bad: Bad) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ImportError(f"{name}: reading Parquet needs pyarrow: pip install pyarrow") from None
    import pyarrow

    try:
        if not os.path.getsize(name):  # no rows, as in other files
            return
        table = parquet.ParquetFile(name)
        columns = list(table.schema_arrow.names)
        _check_columns(name, columns, wanted)
        number = 0
        for batch in table.iter_batches(columns=[c for c in columns if c in wanted]):
            for row in batch.to_pylist():
                number += 1
                yield f"{name}, row {number}", _told(row, wanted)
    except (pyarrow.ArrowException, OSError) as error:  # OSError: also of damaged columns
        said = " ".join(str(error).split())  # of several lines
        raise ValueError(f"{name} is no Parquet file that can be read: {said}") from None


def _check_columns(name: str, columns: list[str], wanted: Fields) -> None:
    if not set(wanted) & set(columns):
        have = ", ".join(map(repr, columns)) or "none"
        raise ValueError(
            f"{name}: no column {wanted[0]!r}; its columns: {have} (--field names one)"
        )
    for field in wanted:
        if columns.count(field) > 1:
            raise ValueError(
                f"{name}: {columns.count(field)} columns are called {field!r}: rename all but one"
            )


def is_packed(name: str) -> bool:
    """Tell whether a file has to be unpacked, by how its name ends."""
    return name.lower().endswith(PACKED)


def _ending(name: str) -> str:
    """Return how the name of the unpacked file ends, small."""
    name = name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


READERS: dict[str, Callable[[str, IO[bytes], Fields, Bad], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
