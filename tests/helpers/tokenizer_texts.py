"""What the tokenizer's tests are fed: strategies, a corpus every machine has, a vocabulary."""

import csv
import gzip
import json
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tokenizer import Tokenizer, train_from_iterator

# Characters at which patterns decide: cases, contractions, the long s, digits of several scripts,
# every kind of white space, combining marks, surrogates, the byte order mark, emoji.
CHARACTERS = (
    "abSsTtLlVvEeRrDdMm'’ 019\t\n\r\x00\x0b\x0c\x1c\x1d\x85\xa0!?.,-_()ſK\u2028\u3000é中Жß①²٣\u0301"
    "\u200b\ufeff😀\ud800\udfff\U0001f1e9"
)
texts = st.text(st.sampled_from(CHARACTERS), max_size=60) | st.text(
    st.characters(categories=None), max_size=40
)
fragments = [
    *(b"\xe4\xb8\xad", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"),
    *(
        b"\xe0\x80\x80",
        b"\xe4\xb8",
        b"\xf0\x9f\x98",
        b"\xff",
        b"\xc3",
        b"\xc5\xbf",
        b"\xef\xbb\xbf",
    ),
    *(b"a", b"Bcd", b" ", b"    ", b"'s", b"'", b"\n", b"\r\n", b"1", b"234", b"!", b"\0"),
    *(b" a word of more than fifteen bytes", b"================", b"x" * 97),
]
data = (
    texts.map(lambda s: s.encode("utf-8", "surrogatepass"))
    | st.binary(max_size=40)
    | st.lists(st.sampled_from(fragments), max_size=14).map(b"".join)
)
words = st.dictionaries(
    st.lists(st.sampled_from(list(b"aabc ")), min_size=1, max_size=20).map(bytes)
    | st.integers(1, 30).map(lambda n: b"a" * n)
    | st.binary(min_size=1, max_size=10),
    st.integers(1, 6),
    min_size=1,
    max_size=15,
)


@lru_cache(maxsize=1)
def corpus() -> tuple[str, ...]:
    """Return about 3 MB of Python: the standard library's modules, English in their comments."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    out: list[str] = []
    for path in sorted(folder.glob("*.py")):
        out.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, out)) > 3_000_000:
            break
    return (*out, "Größe, Ελληνικά и кириллица 中文字符 日本語 한국어 ٣٤٥ नमस्ते 👩‍👩‍👧 " * 20)


@lru_cache(maxsize=1)
def small() -> Tokenizer:
    """Return a vocabulary of 3,000 ids learned from the corpus."""
    return train_from_iterator(corpus(), 3000)


def rows_of(texts: list[str], folder: Path) -> list[Path]:
    """Write files of rows in a folder, each with these texts; return their paths."""
    """Write the same texts in every format that holds several."""
    import pyarrow
    import pyarrow.parquet as parquet
    import zstandard

    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()
    (folder / "t.jsonl").write_bytes(lines)
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(lines))
    frames = [zstandard.compress(part) for part in (lines[:100], lines[100:])]
    (folder / "t.jsonl.zst").write_bytes(b"".join(frames))
    parquet.write_table(pyarrow.table({"text": texts, "n": [1] * len(texts)}), folder / "t.parquet")
    return [folder / name for name in ("t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.parquet")]


def rows_with_more_than_a_text(path: Path) -> Path:
    """Write a row with texts, a prompt, its completion and, but in CSV, a conversation."""
    row: dict[str, Any] = {"text": "the text", "prompt": "the start", "completion": "the end"}
    said = {"user": "hi", "assistant": "ho"}
    messages = [{"role": role, "content": content} for role, content in said.items()]
    row |= {"body": "the body", "messages": messages}
    match path.suffix:
        case ".jsonl":
            path.write_text(json.dumps(row))
        case ".json":
            path.write_text(json.dumps([row]))
        case ".csv":
            del row["messages"]
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([row.keys(), row.values()])
        case ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    return path
