"""Cutting text into pieces: the state machines against the patterns they stand for."""

from itertools import pairwise, product

import numpy as np
import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.tokenizer_texts import CHARACTERS, corpus, data
from tokenizer import GPT2, GPT4, patterns, reference, train_from_iterator
from tokenizer.classes import CATEGORIES, SPACE, UnicodeClasses, installed_classes
from tokenizer.kernels import split as kernels
from tokenizer.kernels.words import PADDING
from tokenizer.patterns import compiled, machine_of
from tokenizer.tokenizer import decode_utf8

CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
LLAMA3 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN = LLAMA3.replace("{1,3}", "")
NANOCHAT = GPT4.replace("{1,3}", "{1,2}")
R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
PATTERNS = [GPT4, GPT2, CL100K, LLAMA3, QWEN, NANOCHAT, R50K]


def machine_split(text: bytes, pattern: str, block: int = 10_000) -> list[bytes]:
    machine = machine_of(pattern)
    assert machine is not None
    classes = installed_classes()
    # Junk before and a neighbour behind the zeros: a cut must not depend on either.
    buf = np.frombuffer(b"x'" + text + bytes(PADDING) + 8 * b"llword 12", np.uint8)
    i = n = 2
    stop = i + len(text)
    ends = [2]
    out = np.empty(block, np.int64)
    while i < stop:
        k, n = kernels.cut(buf, i, n, stop, classes.machine, classes.ascii, *machine, out)
        ends += out[:k].tolist()
        i = ends[-1]
    return [buf[a:b].tobytes() for a, b in pairwise(ends)]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(data)
@example(b"a\n  ")
@example(b" \n \n")
@example("'ſ'S 'LL".encode())
@example(b"\xe4\xb8\xad'\xe4\xb8")
def test_machines_cut_where_the_patterns_do(pattern: str, text: bytes) -> None:
    pieces = machine_split(text, pattern)
    assert b"".join(pieces) == text
    assert pieces == reference.split(text, compiled(pattern), installed_classes())


@pytest.mark.parametrize("pattern", [GPT4, QWEN, NANOCHAT])
def test_blocks_cut_every_short_text_where_the_pattern_does(pattern: str) -> None:
    machine = compiled(pattern)
    for letters in product(b"asel1 \t\n-'", repeat=4):
        for text in (
            bytes(letters),
            b"x" + bytes(letters) + b"\n x",
            b"- " + bytes(letters) + b"1",
        ):
            pieces = reference.split(text, machine, installed_classes())
            assert machine_split(text, pattern) == pieces


@pytest.mark.parametrize("pattern", [GPT4, CL100K, QWEN, NANOCHAT])
@given(st.text("aZsSeLlvrdT19 \t\v\n\r-+'_éſ１\x1c\x85", min_size=40, max_size=200))
def test_blocks_cut_mixed_texts_where_the_pattern_does(pattern: str, text: str) -> None:
    pieces = reference.split(text.encode(), compiled(pattern), installed_classes())
    assert machine_split(text.encode(), pattern) == pieces


runs = st.tuples(st.sampled_from(list("a7 \t\n-'é")), st.integers(1, 3) | st.integers(1, 70))


@pytest.mark.parametrize("pattern", [GPT4, CL100K, QWEN])
@given(st.lists(runs, max_size=30))
def test_blocks_cut_runs_of_any_length(pattern: str, parts: list[tuple[str, int]]) -> None:
    text = "".join(character * n for character, n in parts).encode()
    pieces = reference.split(text, compiled(pattern), installed_classes())
    assert machine_split(text, pattern) == pieces


def test_blocks_class_ascii_as_the_table_does() -> None:
    """By cutting every pair of characters, since that is where classes show."""
    for a, b in product(range(128), repeat=2):
        text = bytes([a, b])
        expected = reference.split(text, compiled(GPT4), installed_classes())
        assert machine_split(text, GPT4) == expected


@given(data)
def test_a_cut_does_not_depend_on_the_size_of_blocks(text: bytes) -> None:
    assert machine_split(text, GPT4, 1) == machine_split(text, GPT4, 3) == machine_split(text, GPT4)


@pytest.mark.parametrize("pattern", [GPT4, GPT2])
def test_machines_cut_real_text_where_the_patterns_do(pattern: str) -> None:
    for text in corpus()[::7]:
        raw = text.encode()
        assert machine_split(raw, pattern) == reference.split(
            raw, compiled(pattern), installed_classes()
        )


@pytest.mark.parametrize("context", ["a{}b", "'{}", " {}1", "{}{}\n", "12{}", "\n {}"])
def test_machines_know_one_character_of_every_class_in_every_context(context: str) -> None:
    starts = installed_classes().starts.tolist()
    text = "\x00!\x00".join(context.replace("{}", chr(code)) for code in starts)
    raw = reference.to_bytes(text)
    for pattern in (GPT4, GPT2):
        assert machine_split(raw, pattern) == reference.split(
            raw, compiled(pattern), installed_classes()
        )


@given(data)
def test_a_custom_pattern_loses_nothing_it_skips(text: bytes) -> None:
    for pattern in (r"[a-z]+", r"(?=a)", r"(?<=(a))b|c", r"\d"):
        assert b"".join(reference.split(text, compiled(pattern), installed_classes())) == text


def test_undecodable_bytes_are_pieces_of_their_own() -> None:
    pieces = machine_split(b"ab\xff\xfecd\xe4\xb8 x", GPT4)
    assert pieces == [b"ab", b"\xff", b"\xfe", b"cd", b"\xe4", b"\xb8", b" x"]


def test_a_run_of_characters_may_be_as_long_as_memory_is() -> None:
    """``regex`` gives up at 4.47 million repetitions."""
    for character in ("a", "é"):
        data = character.encode() * 4_500_000 + b"\xff" + character.encode()
        runs = [run.span() for run in reference.CHARACTERS.finditer(data)]
        assert runs == [(0, len(data) - 1 - len(character.encode())), (runs[0][1] + 1, len(data))]
    assert decode_utf8(data) == "é" * 4_500_000 + "\ufffdé"


def test_patterns_without_a_machine_have_none() -> None:
    for pattern in (r"\p{L}+", GPT4 + "|x", GPT4.replace("{1,3}", "{2,3}"), GPT2[:-1]):
        assert machine_of(pattern) is None


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        compiled("(")


def test_the_class_table_says_what_regex_says() -> None:
    table = installed_classes().expanded
    for code in [*range(0x500), *range(0x1F600, 0x1F610), *map(ord, CHARACTERS), 0x10FFFF]:
        category = CATEGORIES[int(table[code]) & ~SPACE]
        assert regex.match(rf"\p{{{category}}}", chr(code)), hex(code)
        assert bool(table[code] & SPACE) == bool(regex.match(r"\s", chr(code))), hex(code)


def edited(changes: dict[int, int]) -> UnicodeClasses:
    """Return the installed classes as another release of Unicode might have them."""
    table = installed_classes().expanded.copy()
    for code, other in changes.items():
        table[code] = table[other]
    starts = np.flatnonzero(np.diff(table, prepend=np.uint8(255)))
    return UnicodeClasses(starts, table[starts])


def test_frozen_classes_decide_even_where_the_installed_regex_knows_better() -> None:
    old = edited({ord("ж"): 0x0378, ord("中"): 0x0378})  # as if not yet assigned
    old = UnicodeClasses(old.starts, old.values)
    text = "ажа 中a"
    assert reference.split(text.encode(), compiled(GPT4), installed_classes()) == [
        "ажа".encode(),
        " 中a".encode(),
    ]
    cut = reference.split(text.encode(), compiled(GPT4), old)
    assert cut == ["а".encode(), "жа".encode(), " 中".encode(), b"a"]
    buf = np.frombuffer(text.encode() + bytes(PADDING), np.uint8)
    out = np.empty(20, np.int64)
    machine = machine_of(GPT4)
    assert machine is not None
    k, _ = kernels.cut(buf, 0, 0, len(text.encode()), old.machine, old.ascii, *machine, out)
    assert out[:k].tolist() == np.cumsum([len(piece) for piece in cut]).tolist()


@pytest.mark.parametrize(
    "starts, values, what",
    [([1], [0], "begin"), ([0, 5, 5], [0, 1, 2], "ascending"), ([0], [31], "category")],
)
def test_a_table_of_classes_that_is_none_is_refused(
    starts: list[int], values: list[int], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        UnicodeClasses(np.array(starts), np.array(values))


def test_a_table_that_classes_ascii_otherwise_is_refused() -> None:
    values = installed_classes().expanded[:128].copy()
    values[ord("_")] = CATEGORIES.index("Lo")
    with pytest.raises(ValueError, match="does not class ASCII as Unicode does"):
        _ = UnicodeClasses(np.arange(128), values).ascii


@pytest.mark.parametrize("pattern", [r"(a|aa)+$", "(?R)"])
def test_a_pattern_without_end_is_given_up_with_a_sentence(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    text = b"a" * 200 + b"b"
    with pytest.raises(ValueError, match="a text of 201 characters that begins with 'aaaa") as told:
        reference.split(text, compiled(pattern), installed_classes())
    assert f"pattern {pattern!r} took" in str(told.value)
    with pytest.raises(ValueError, match="possessive"):
        train_from_iterator([text], 300, pattern=pattern)


def test_a_pattern_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        compiled("(" * 3000 + ")" * 3000)
