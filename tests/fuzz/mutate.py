"""Mutations: of bytes, of values in a tree of JSON or TOML, of lists of words."""

import copy
import json
import random
from typing import Any

Path = tuple[Any, ...]

NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400),
    *(-(2**31), -(2**63), -(10**400), 0.5, -0.0, 1e-320, 1e308, -1e308, 1e-9),
    *(float("nan"), float("inf"), float("-inf")),
]
# no path of these leads out of the folder that a fuzzed command runs in
TEXTS = [
    *("", "x", "\0", "../x", "../../x", "/dev/null/x", "/dev/null", ".", "..", "~", "a/b", "-"),
    *("é\u202e😀", "\ud800", "a" * 3000, "1", "nan", "true", "step-00000002", "%s", "[", "\n"),
]
JUNK = [None, True, False, *NUMBERS, *TEXTS, [], [[]], [1], ["a", 1], {}, {"a": 1}, [{"a": 1}]]
DEEP = [
    *("[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000),
    '{"a":' * 3000 + "1" + "}" * 3000,
    '{"x":' + "[" * 100_000 + "]" * 100_000 + "}",
]


def data(rng: random.Random, whole: bytes) -> bytes:
    """Flip, overwrite, cut out, put in, cut off, double or splice some bytes."""
    out = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        if not out:
            return rng.randbytes(20)
        at = rng.randrange(len(out))
        how = rng.randrange(8)
        if how <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            out[at] = rng.choice(b'\0\xff\n"\\\x80[{0-')
        elif how == 3:
            del out[at : at + rng.randrange(1, 40)]
        elif how == 4:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 5:
            del out[at:]
        elif how == 6:
            out[at:at] = out[: rng.randrange(1, 200)]
        else:
            start = rng.randrange(len(out))
            out[at : at + 16] = out[start : start + 16]
    return bytes(out)


def paths(value: Any, path: Path = ()) -> list[Path]:
    """Return the path of every value in a tree, the root's left out; long lists in part."""
    found = [path] if path else []
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    if len(children) > 40:
        children = children[:20] + children[-20:]
    for key, child in children:
        found += paths(child, (*path, key))
    return found


def tree(rng: random.Random, value: Any) -> Any:
    """Replace, take out, double, rename or add some values of a tree."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = paths(value)
        if not places:
            return rng.choice(JUNK)
        *way, last = rng.choice(places)
        parent = value
        for key in way:
            parent = parent[key]
        old = parent[last]
        how = rng.randrange(10)
        if how == 0:
            del parent[last]
        elif how == 1 and isinstance(parent, dict):
            parent[rng.choice(["zz", "", "name", "step", str(last) + "x"])] = rng.choice(JUNK)
        elif how == 2 and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(old))
        elif how == 3 and isinstance(parent, dict):
            parent[str(last) + rng.choice(["_", "é", "\ud800"])] = parent.pop(last)
        elif how <= 6 and isinstance(old, int | float) and not isinstance(old, bool):
            parent[last] = rng.choice([old + 1, old - 1, -old, old * 2, old * 1000, 0, str(old)])
        else:
            parent[last] = copy.deepcopy(rng.choice(JUNK))
    return value


def json_text(rng: random.Random, value: Any) -> bytes:
    """Return a mutated JSON text: most times of a mutated tree, else with mutated bytes."""
    how = rng.random()
    if how < 0.04:
        return rng.choice(DEEP).encode()
    if how < 0.25:
        return data(rng, json.dumps(value).encode())
    return dumped(tree(rng, value))


def dumped(value: Any) -> bytes:
    """Return the JSON of a tree, its numbers as long as they are."""
    return json.dumps(value).encode()


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if value is None:
        return "2020-01-01"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml(tables: Any) -> str:
    """Return a tree as a TOML file."""
    if not isinstance(tables, dict):
        return f"x = {toml_value(tables)}\n"
    lines = [f"{_key(k)} = {toml_value(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [
                f"[{_key(name)}]",
                *(f"{_key(k)} = {toml_value(v)}" for k, v in table.items()),
            ]
    return "\n".join(lines) + "\n"


def _key(key: object) -> str:
    return json.dumps(str(key), ensure_ascii=False)


def word(rng: random.Random) -> str:
    """Return something to stand where a number is wanted on a command line."""
    value = rng.choice(NUMBERS) if rng.random() < 0.7 else rng.choice(["", "x", "1e5", "0x10", "٣"])
    text = "9" * 5000 if value == 10**400 and rng.random() < 0.3 else f"{value}"
    return text.replace("\0", "")
