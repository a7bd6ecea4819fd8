"""From what people have on disk to documents: the inputs of ``myllm pack``.

Files, folders, globs and ``-`` as ``tokenizer.read`` knows them: a plain file is one document, or
several where it is long (``pieces``); a file of rows has one a row: a text field, or ``prompt`` and
``completion``, which may become a chat, or chat ``messages``. A ``prompt`` with a text, not a
completion, is left out. Where people name a field, it is read and nothing else.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizer.read import Source, is_stream, opened
from tokenizer.records import fields, is_rows, rows

PIECE_BYTES = 1 << 15  # about 8,000 tokens
# of pieces, best first; the last one are spaces, and what ends a sentence where words have none
ENDS = [
    re.compile(end)
    for end in (rb"\n\s*\n", rb"\n", rb"\s", b"\\s|" + "|".join("　。．！？").encode())
]
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
# what ends a text: ours, and those of vocabularies that were imported
EOS_NAMES = ("<|eos|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class Part(NamedTuple):
    """A stretch of a document."""

    text: str | bytes  # of people: can never become a control id
    predict: bool = True  # whether the model is to learn to write it
    control: bool = False  # ``text`` is the name of a control id, put in by us


class Document(NamedTuple):
    """What is packed between two eos."""

    parts: tuple[Part, ...]
    end: bool = True  # whether the model is to learn to write the eos behind it

    @property
    def texts(self) -> list[str]:
        """The text of its parts, without those that we put in."""
        texts = [part.text for part in self.parts if not part.control]
        return [t if isinstance(t, str) else t.decode("utf-8", "replace") for t in texts]

    @property
    def chars(self) -> int:
        """Characters of its text."""
        return sum(map(len, self.texts))

    @property
    def n_bytes(self) -> int:
        """Bytes of its text."""
        return sum(
            len(t if isinstance(t, bytes) else t.encode("utf-8", "surrogatepass"))
            for t in (part.text for part in self.parts if not part.control)
        )

    @property
    def content(self) -> bytes:
        """What is hashed: all of its parts, also those that we put in."""
        texts = (part.text for part in self.parts)
        return b"\0".join(
            t.encode("utf-8", "surrogatepass") if isinstance(t, str) else t for t in texts
        )


def read_documents(
    files: list[str],
    field: str | None,
    report_bad: Callable[[str], None] | None,
    as_chat: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[Document]:
    """Yield the documents of files, in order.

    Parameters
    ----------
    files : list of str
        From ``tokenizer.read.expand``.
    field : str, optional
        Of rows: where their text is, whatever else they have.
    report_bad : callable, optional
        Takes a sentence on each line that is no document, which is left out. Without it the first
        is an error.
    as_chat : bool
        ``prompt`` and ``completion`` become the turns of a user and of the assistant.
    advance : callable
        Takes the bytes on disk that the documents so far come from, but of rows that are read all
        at once: these count at their end.

    Raises
    ------
    ValueError, OSError, ImportError
        When a file or a line cannot be read.
    """

    def bad(said: str) -> None:
        if report_bad is None:
            raise ValueError(f"{said} (--skip-bad-lines leaves such lines out)")
        report_bad(said)

    before = size = 0  # bytes of the files that are done, and of this one
    for name in files:
        before += size
        advance(before)
        size = 0 if is_stream(name) else Path(name).stat().st_size
        if not is_rows(name):
            done = before
            for text in Source([name], field, report_bad).texts():
                for piece in pieces(text):
                    done += len(piece)
                    advance(done)
                    yield Document((Part(piece),))
            continue
        with opened(name) as (file, raw):
            for where, row in rows(name, file, field, bad):
                if size and raw.tell() < size:
                    advance(before + raw.tell())
                if where == name:  # a JSON file that is one text
                    for piece in pieces(row[fields(field)[0]].encode()):
                        yield Document((Part(piece),))
                    continue
                try:
                    document = document_of(row, field, as_chat)
                except ValueError as error:
                    bad(f"{where}: {error}")
                else:
                    yield document


def pieces(text: bytes) -> Iterator[bytes]:
    """Cut a long text into documents, so that some of it can be held out.

    Each has ``PIECE_BYTES`` or a little more and ends with a paragraph (a blank line), or where
    none ends within as many more, with a line, a word, or a sentence of a script without spaces; a
    text of one word stays whole.
    """
    start = 0
    while len(text) - start > 2 * PIECE_BYTES:
        near = start + PIECE_BYTES
        tried = (e.search(text, near, near + PIECE_BYTES) for e in ENDS)
        found = next(filter(None, tried), None) or ENDS[-1].search(text, near)
        if found is None:
            break
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def document_of(
    record: Mapping[str, Any], field: str | None = None, as_chat: bool = False
) -> Document:
    """Return the document in a row: of the field that is named, or of those that are known.

    Raises
    ------
    ValueError
        When there is none in it.
    """
    text, *aside = fields(field)
    if "messages" in record and "messages" in (text, *aside):
        return Document(tuple(chat(record["messages"])), end=False)
    if aside and ("completion" in record or ("prompt" in record and text not in record)):
        prompt, completion = record.get("prompt"), record.get("completion")
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise ValueError('"prompt" and "completion" must both be strings')
        if as_chat:
            turns = zip(("user", "assistant"), (prompt, completion), strict=True)
            messages = [{"role": role, "content": said} for role, said in turns]
            return Document(tuple(chat(messages)), end=False)
        return Document((Part(prompt, predict=False), Part(completion)))
    if text in record and not isinstance(record[text], str):
        what = "null" if record[text] is None else type(record[text]).__name__
        raise ValueError(f"field {text!r} holds no text but {what}")
    if text not in record:
        known = ", ".join(map(repr, record)) or "none"
        others = ", no prompt and no messages" if aside else ""
        raise ValueError(
            f"there is no text field {text!r}{others}; it has {known} (--field names one)"
        )
    return Document((Part(record[text]),))


def chat(messages: Any) -> Iterator[Part]:
    """Yield the parts of a conversation: ``<|role|> text <|end|>`` for each message.

    The model learns to write what the assistant says, and its end.

    Raises
    ------
    ValueError
        When a message is not {"role": ..., "content": ...} with a known role.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one')
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ValueError('a message must be {"role": ..., "content": "..."}')
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"the role of a message must be one of {', '.join(ROLES)}, got {role!r}"
            )
        mine = role == "assistant"
        yield Part(ROLES[role], predict=False, control=True)
        yield Part(message["content"], predict=mine)
        yield Part(END, predict=mine, control=True)
