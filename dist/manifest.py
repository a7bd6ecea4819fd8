"""Manifests: JSON files of a declared form, sealed by a checksum of their own.

What a file may hold is a ``Record``: the names, types and ranges of its fields. ``read`` accepts
nothing else, so those who use it check nothing. The checksum is the SHA-256 of the record without
it, written compactly with sorted keys; it does not depend on how the file is laid out.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from tokenizer.files import replace_durably

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:  # where pip could not come; the same numbers, a tenth as fast
    from zlib import crc32 as crc32

SEALED_SINCE = 2  # format_version; files of version 1 have no checksum and are read all the same
NEWEST = 3  # of what older readers cannot make anything of

Crc = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Record(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What every manifest begins with."""

    format: str
    format_version: int = SEALED_SINCE
    checksum: str = ""

    @property
    def sealed(self) -> bool:
        """Whether the file has a checksum that its values were held to."""
        return self.format_version >= SEALED_SINCE


R = TypeVar("R", bound=Record)


def _checksum(tables: dict[str, Any]) -> str:
    rest = {key: value for key, value in tables.items() if key != "checksum"}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def write(path: Path, record: Record) -> None:
    """Write a manifest durably and whole, or not at all.

    A mapping that may be absent is left out when it is empty: older readers do not know it.
    """
    tables = msgspec.to_builtins(record)
    for field in msgspec.structs.fields(record):
        if field.default_factory is dict and not tables[field.name]:
            del tables[field.name]
    tables["checksum"] = _checksum(tables)
    replace_durably(path, msgspec.json.format(msgspec.json.encode(tables), indent=0) + b"\n")


def read(path: Path, kind: type[R], name: str, advice: str) -> R:
    """Return the record in a file.

    Parameters
    ----------
    path : Path
    kind : type
        The form it must have.
    name : str
        What its ``format`` must say.
    advice : str
        What to do about a damaged one, for the message.

    Raises
    ------
    ValueError, OSError
        When it cannot be read, is damaged, or is no such record of this version.
    """
    data = path.read_bytes()
    try:
        tables = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {advice}") from error
    if not isinstance(tables, dict) or tables.get("format") != name:
        raise ValueError(f"{path} is not a manifest of the format {name}; {advice}")
    version = tables.get("format_version")
    if not (isinstance(version, int) and 1 <= version <= NEWEST):
        raise ValueError(
            f"{path} has version {version!r} of the format {name}, and this version of MyLLM reads "
            f"1 to {NEWEST}; use a newer MyLLM, or {advice}"
        )
    if version >= SEALED_SINCE and tables.get("checksum") != _checksum(tables):
        raise ValueError(
            f"{path} has changed since it was written (its checksum differs); {advice}"
        )
    try:
        return msgspec.convert(tables, kind)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {advice}") from error
