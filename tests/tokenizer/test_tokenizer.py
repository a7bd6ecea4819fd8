"""The tokenizer: lossless, safe, streaming, the same by every road."""

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tokenizer_texts import corpus, data, small, texts, words
from tokenizer import GPT4, DecodeStream, Tokenizer, Vocabulary, reference, train_from_iterator
from tokenizer.classes import installed_classes
from tokenizer.counting import Words
from tokenizer.kernels.train import learn_merges
from tokenizer.patterns import compiled
from tokenizer.tokenizer import ROOM
from tokenizer.vocabulary import FIRST_BYTE


def plain_encode(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Encode by the reference layer alone."""
    vocabulary = tokenizer.vocabulary
    left, right, rank, new = (x.tolist() for x in vocabulary.ranked_pairs())
    ranks = {(a, b): (r, i) for a, b, r, i in zip(left, right, rank, new, strict=True)}
    pieces = reference.split(text, compiled(vocabulary.pattern), vocabulary.classes)
    byte_ids = vocabulary.byte_ids.tolist()
    return [i for piece in pieces for i in reference.encode_word(piece, byte_ids, ranks)]


@given(data)
def test_any_bytes_come_back(raw: bytes) -> None:
    assert small().decode_bytes(small().encode_bytes(raw)) == raw


@given(texts)
def test_any_str_comes_back(text: str) -> None:
    assert small().decode(small().encode_ordinary(text)) == text
    assert small().decode(small().encode(text, disallowed_special=())) == text
    assert small().decode(small().encode_to_numpy(text, disallowed_special=())) == text


@pytest.mark.parametrize(
    "text",
    ["", "\0", "\ufeffbom", "\ud800", "\udc80\ud800", " " * 1_000_000, "\n" * 1000, "é" * 5000],
    ids=["empty", "NUL", "BOM", "surrogate", "two surrogates", "1 MB of spaces", "lines", "é"],
)
def test_the_texts_that_break_tokenizers_come_back(text: str) -> None:
    ids = small().encode_ordinary(text)
    assert small().decode(ids) == text
    assert small().decode(ids, errors="strict") == text


def test_every_byte_and_every_pair_of_bytes_comes_back() -> None:
    pairs = bytes(b for first in range(256) for second in range(256) for b in (first, second))
    assert small().decode_bytes(small().encode_bytes(pairs)) == pairs


def replay(tokenizer: Tokenizer, piece: bytes) -> list[int]:
    """Encode a piece by replaying all merges in the order they were learned."""
    symbols = [FIRST_BYTE + byte for byte in piece]
    assert tokenizer.vocabulary.merges is not None
    for k, (a, b) in enumerate(tokenizer.vocabulary.merges.tolist()):
        symbols = reference.merge(symbols, (a, b), FIRST_BYTE + 256 + k)
    return symbols


@given(words, st.integers(1, 40))
def test_all_ways_to_encode_a_piece_agree(counts: dict[bytes, int], n_merges: int) -> None:
    """Scan, heap, cache, the reference and replaying merges; short, long and longer pieces."""
    left, right, _ = learn_merges(*Words.of(counts), FIRST_BYTE, n_merges, 1, 4096)
    pattern = r"(?s:.+)"  # no machine: the piece is the whole text
    tokenizer = Tokenizer(Vocabulary.learned(left, right, pattern, installed_classes()))
    for word in counts:
        text = "".join(map(chr, word)).encode()
        for piece in (text, text * 3, (text * 100)[:97], (text * 100)[:200], (text * 40)[:300]):
            try:
                piece.decode()
            except UnicodeDecodeError:
                continue
            expected = replay(tokenizer, piece)
            assert plain_encode(tokenizer, piece) == expected
            assert tokenizer.encode_bytes(piece) == expected
            assert tokenizer.encode_bytes(piece) == expected  # now from the cache
    for i, token in tokenizer.vocabulary.tokens.items():
        if token.isascii():
            assert tokenizer.encode_bytes(token) == [i]


def test_every_token_of_a_trained_vocabulary_is_unique_and_encodes_to_itself() -> None:
    vocabulary = small().vocabulary
    assert len(set(vocabulary.tokens.values())) == len(vocabulary.tokens)
    for i, token in vocabulary.tokens.items():
        assert replay(small(), token) == [i]
        if token.isascii():
            assert small().encode_bytes(token) == [i]


@given(data)
def test_kernels_encode_as_the_reference_does(raw: bytes) -> None:
    assert small().encode_bytes(raw) == plain_encode(small(), raw)


def test_kernels_encode_real_text_as_the_reference_does() -> None:
    for text in corpus()[::25]:
        assert small().encode_ordinary(text) == plain_encode(small(), text.encode())


def test_one_text_many_texts_threads_and_arrays_agree() -> None:
    many = [*corpus(), "", "x", *corpus()[0].splitlines()]
    one_by_one = [small().encode_ordinary(text) for text in many]
    for n_threads in (1, 2, 5):
        assert small().encode_batch(many, num_threads=n_threads) == one_by_one
        arrays = small().encode_batch_to_numpy(iter(many), num_threads=n_threads)
        assert [array.tolist() for array in arrays] == one_by_one
        assert all(array.dtype == np.uint16 for array in arrays)


def test_a_tokenizer_may_be_used_by_many_threads() -> None:
    expected = [small().encode_ordinary(text) for text in corpus()[:20]]
    wrong: list[int] = []

    def work(k: int) -> None:
        for text, ids in zip(corpus()[:20], expected, strict=True):
            if small().encode_ordinary(text) != ids or small().decode(ids) != text:
                wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_vocabulary_with_a_custom_pattern_works_alike() -> None:
    tokenizer = train_from_iterator(corpus()[:30], 600, pattern=r"\p{Lu}?\p{Ll}+|\p{N}|\s+")
    raw = corpus()[3].encode() + b"\xff\xe4\xb8" + "\ud800".encode("utf-8", "surrogatepass")
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(raw)) == raw
    assert tokenizer.encode_bytes(raw[:3000]) == plain_encode(tokenizer, raw[:3000])
    texts = list(corpus()[:5])
    assert tokenizer.encode_batch(texts) == [tokenizer.encode_ordinary(text) for text in texts]


# --- special tokens


@given(texts, st.sampled_from(["<|system|>", "<|pad|>", "<|end|>", "<|reserved_11|>"]))
def test_ordinary_text_never_becomes_a_special_id(text: str, name: str) -> None:
    special = set(small().special_tokens.values())
    hostile = text + name + text
    assert not special & set(small().encode_ordinary(hostile))
    assert not special & set(small().encode(hostile, disallowed_special=()))
    assert not special & set(small().encode_bytes(reference.to_bytes(hostile)))
    assert small().decode(small().encode_ordinary(hostile)) == hostile


def test_a_special_token_in_a_text_is_an_error_that_names_it_and_its_place() -> None:
    with pytest.raises(ValueError, match=r"special token '<\|user\|>' at character 3"):
        small().encode("ab <|user|>")
    with pytest.raises(ValueError, match=r"'<\|end\|>' at character 8"):
        small().encode("<|user|><|end|>", allowed_special={"<|user|>"})
    with pytest.raises(ValueError, match=r"'<\|end\|>'"):
        small().encode_batch(["fine", "<|end|>"])


def test_allowed_special_tokens_become_their_ids() -> None:
    ids = small().special_tokens
    text = "<|user|>hi<|end|><|end|>"
    expected = [ids["<|user|>"], *small().encode_ordinary("hi"), ids["<|end|>"], ids["<|end|>"]]
    assert small().encode(text, allowed_special="all") == expected
    assert small().encode_batch([text, "a"], allowed_special="all")[0] == expected
    one = small().encode(text, allowed_special={"<|end|>"}, disallowed_special=())
    assert one[-2:] == expected[-2:] and ids["<|user|>"] not in one
    only = small().encode("<|pad|><|end|>", disallowed_special={"<|user|>"})
    assert not set(ids.values()) & set(only)
    assert small().decode(expected) == text


def test_an_unknown_special_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'<\|nobody\|>' is not a special token; known: .*<\|bos"):
        small().encode("text", allowed_special={"<|nobody|>"})


# --- decoding


@given(st.lists(st.integers(0, 2999), max_size=60), st.sampled_from(["replace", "ignore"]))
def test_a_stream_adds_up_to_the_whole(ids: list[int], errors: str) -> None:
    stream = DecodeStream(small(), errors)
    assert "".join([*map(stream.step, ids), stream.finish()]) == small().decode(ids, errors)


@given(data, st.sampled_from(["replace", "ignore", "backslashreplace"]))
def test_a_stream_of_single_bytes_adds_up_to_the_whole(raw: bytes, errors: str) -> None:
    ids = [FIRST_BYTE + byte for byte in raw]
    stream = DecodeStream(small(), errors)
    assert "".join([*map(stream.step, ids), stream.finish()]) == small().decode(ids, errors)


@given(texts)
def test_a_stream_of_valid_text_never_shows_half_a_character(text: str) -> None:
    stream = DecodeStream(small())
    shown = ""
    for byte in reference.to_bytes(text):
        shown += stream.step(FIRST_BYTE + byte)
        assert text.startswith(shown)
    assert shown == text and stream.finish() == ""


@given(st.binary(max_size=30))
def test_decoding_replaces_as_python_does(raw: bytes) -> None:
    ids = [FIRST_BYTE + byte for byte in raw]
    if b"\xed" not in raw:  # lone surrogates are kept here, and replaced there
        assert small().decode(ids) == raw.decode("utf-8", "replace")


def test_strict_decoding_names_the_byte() -> None:
    ids = small().encode_bytes(b"caf\xc3\xa9 \xff!")
    with pytest.raises(ValueError, match="byte 6 of the decoded bytes, 0xff, is no text"):
        small().decode(ids, errors="strict")
    with pytest.raises(ValueError, match="errors must be 'strict'"):
        small().decode(ids, errors="guess")


@pytest.mark.parametrize("kind", [list, np.array, lambda ids: np.array(ids, np.int32)])
@pytest.mark.parametrize("bad", [3000, -1, 70_000])
def test_an_unknown_id_is_an_error_that_names_it_and_its_place(kind: type, bad: int) -> None:
    with pytest.raises(ValueError, match=rf"id {bad} at position 2 is not in the vocabulary"):
        small().decode_bytes(kind([5, 6, bad, 7]))


def test_ids_that_are_no_ids_are_refused() -> None:
    for bad in (["a"], [1.5], [None]):
        with pytest.raises(ValueError, match="at position 1 is not in the vocabulary"):
            small().decode_bytes([5, *bad])  # type: ignore[list-item]
    for huge in ([1 << 40], np.array([1 << 40])):
        with pytest.raises(ValueError, match="id 1099511627776 at position 0"):
            small().decode_bytes(huge)
    with pytest.raises(ValueError, match="one row of integers, got float64"):
        small().decode_bytes(np.zeros(3))


def test_numpy_ids_of_any_integer_type_decode() -> None:
    for dtype in (np.uint16, np.uint32, np.int64, np.uint64):
        assert small().decode(np.array(small().encode_ordinary("text"), dtype)) == "text"
    assert small().decode([]) == ""


def test_what_is_no_str_is_refused() -> None:
    for encode in (small().encode, small().encode_ordinary, small().encode_to_numpy):
        with pytest.raises(ValueError, match="a text must be a str, got bytes"):
            encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got one str"):
        small().encode_batch("one text")
    with pytest.raises(ValueError, match="ids must be integers, got bytes"):
        small().decode(b"abcd")


# --- no pathological input


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"a" * 1_000_000,
        lambda: b" " * 1_000_000,
        lambda: os.urandom(1_000_000),
        lambda: "日".encode() * 300_000,
        lambda: bytes(np.random.default_rng(0).integers(97, 123, 1_000_000, np.uint8)),
    ],
    ids=["one letter", "spaces", "random bytes", "one CJK character", "random letters"],
)
def test_a_million_bytes_of_anything_come_back(make: Callable[[], bytes]) -> None:
    """Work that grew with the square of the text would keep this test busy for hours."""
    raw = make()
    assert small().decode_bytes(small().encode_bytes(raw)) == raw


def test_texts_larger_and_smaller_than_a_threads_room_are_encoded_alike() -> None:
    large = os.urandom(ROOM + 1)
    expected = small().encode_bytes(b"some text")
    for raw in (large, b"some text", large[:-1], large[: ROOM - 64], b""):
        assert small().decode_bytes(small().encode_bytes(raw)) == raw
        assert small().encode_bytes(b"some text") == expected


def test_gpt4_is_the_default_pattern() -> None:
    assert small().vocabulary.pattern == GPT4


@pytest.mark.parametrize(
    "raw", [b"\xe0\x80", b"\xf0\x80", b"\xf4\x90", b"\xff", b"\x80", b"\xc3a", b"\xe4\xb8a"]
)
def test_a_stream_shows_at_once_what_can_never_be_whole(raw: bytes) -> None:
    stream = DecodeStream(small())
    shown = "".join(stream.step(FIRST_BYTE + byte) for byte in raw)
    assert shown == raw.decode("utf-8", "replace") and stream.finish() == ""
