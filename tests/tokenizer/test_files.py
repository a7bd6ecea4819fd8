"""Files: ours, Hugging Face's, OpenAI's: what goes out comes back, what is damaged is refused."""

import base64
import hashlib
import json
import os
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tokenizer_texts import corpus, small, words
from tokenizer import (
    GPT2,
    Tokenizer,
    Vocabulary,
    fileformat,
    files,
    from_huggingface,
    from_tiktoken,
    to_huggingface,
    to_tiktoken,
    vocabulary,
)
from tokenizer.classes import UnicodeClasses, installed_classes
from tokenizer.counting import Words
from tokenizer.interop import byte_letters
from tokenizer.kernels.train import learn_merges
from tokenizer.vocabulary import FIRST_BYTE


@given(words, st.integers(0, 40), st.sampled_from(["gpt4", "gpt2", r"\w+|\W"]))
def test_save_and_load_are_identities(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[bytes, int], n: int, pattern: str
) -> None:
    left, right, _ = learn_merges(*Words.of(counts), FIRST_BYTE, n, 1, 4096)
    vocabulary = Vocabulary.learned(left, right, pattern, installed_classes())
    folder = tmp_path_factory.mktemp("files")
    Tokenizer(vocabulary).save(folder / "t.tok")
    loaded = Tokenizer.load(folder / "t.tok")
    assert loaded.vocabulary == vocabulary
    assert loaded.sha256 == hashlib.sha256((folder / "t.tok").read_bytes()).hexdigest()

    to_huggingface(loaded, folder / "tokenizer.json")
    assert from_huggingface(folder / "tokenizer.json").vocabulary == vocabulary

    to_tiktoken(loaded, folder / "t.tiktoken")
    again = from_tiktoken(
        folder / "t.tiktoken", pattern=pattern, special_tokens=loaded.special_tokens
    )
    assert again.vocabulary.tokens == vocabulary.tokens
    to_tiktoken(again, folder / "u.tiktoken")
    assert (folder / "u.tiktoken").read_bytes() == (folder / "t.tiktoken").read_bytes()
    again.save(folder / "u.tok")
    assert Tokenizer.load(folder / "u.tok").vocabulary == again.vocabulary
    for word in counts:
        assert again.encode_bytes(word) == loaded.encode_bytes(word)


def test_imports_encode_the_corpus_to_the_same_ids(tmp_path: Path) -> None:
    to_tiktoken(small(), tmp_path / "t.tiktoken")
    to_huggingface(small(), tmp_path / "t.json")
    from_ranks = from_tiktoken(tmp_path / "t.tiktoken", special_tokens=small().special_tokens)
    to_huggingface(from_ranks, tmp_path / "u.json")  # merges derived from ranks
    expected = small().encode_batch(corpus())
    for other in (
        from_ranks,
        from_huggingface(tmp_path / "t.json"),
        from_huggingface(tmp_path / "u.json"),
    ):
        assert other.encode_batch(corpus()) == expected
        assert other.special_tokens == small().special_tokens


def odd() -> Vocabulary:
    """Return a vocabulary as imports have them: ids out of order, holes, a token no merge makes."""
    tokens = {1000 - byte: bytes([byte]) for byte in range(256)}
    a, b, c = (1000 - ord(letter) for letter in "abc")
    tokens |= {70_000: b"ab", 5: b"abc", 6: b"zzz" * 30}
    merges = np.array([[a, b], [70_000, c]], np.int32)
    return Vocabulary(tokens, merges, {"<s>": 2, "<ü>": 90_000}, GPT2, installed_classes(), True)


def test_imported_vocabularies_keep_their_ids_and_may_be_larger(tmp_path: Path) -> None:
    tokenizer = Tokenizer(odd())
    assert tokenizer.n_vocab == 90_001 and tokenizer.dtype == np.uint32
    text = "abcab" + "z" * 90 + "<ü>"
    ids = tokenizer.encode(text, allowed_special="all")
    assert ids == [*tokenizer.encode_ordinary("abcab" + "z" * 90), 90_000]
    assert tokenizer.encode_ordinary("abc") == [5] and tokenizer.encode_ordinary("z" * 90) == [6]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_to_numpy("ab").dtype == np.uint32
    tokenizer.save(tmp_path / "odd.tok")
    assert Tokenizer.load(tmp_path / "odd.tok").vocabulary == odd()
    to_huggingface(tokenizer, tmp_path / "odd.json")
    assert from_huggingface(tmp_path / "odd.json").vocabulary == odd()
    with pytest.raises(ValueError, match="ids do not follow the order of merges"):
        to_tiktoken(tokenizer, tmp_path / "odd.tiktoken")
    with pytest.raises(ValueError, match="id 3 at position 1 is not in the vocabulary"):
        tokenizer.decode([5, 3])


def test_a_merge_may_come_before_one_that_makes_its_parts(tmp_path: Path) -> None:
    """Llama 3's list has each pair of tokens that makes a third, also where ids fall."""
    tokens = {byte: bytes([byte]) for byte in range(256)}
    tokens |= {256: b"aaa", 257: b"aa", 258: b"aab", 259: b"zzz"}
    a, b = b"ab"
    merges = np.array([[a, 257], [257, a], [a, a], [257, b]], np.int32)
    tokenizer = Tokenizer(Vocabulary(tokens, merges, {"<s>": 300}, GPT2, installed_classes()))
    tokenizer.save(tmp_path / "t.tok")
    loaded = Tokenizer.load(tmp_path / "t.tok")
    assert loaded.vocabulary == tokenizer.vocabulary and loaded.sha256 == tokenizer.sha256
    assert loaded.encode_ordinary("aaaab") == tokenizer.encode_ordinary("aaaab") == [256, a, b]


@pytest.mark.parametrize("last", [300, 65_535])  # one more id would not fit 16 bits
def test_bytes_without_a_token_are_left_out(tmp_path: Path, last: int) -> None:
    lacking = b"\x04\x06\xc0\xf1"
    tokens = {byte: bytes([byte]) for byte in range(256) if byte not in lacking}
    tokens |= {256: b"!!", 257: b"!!!!"}
    merges = np.array([[33, 33], [256, 256]], np.int32)
    tokenizer = Tokenizer(Vocabulary(tokens, merges, {"<s>": last}, GPT2, installed_classes()))
    tokenizer.save(tmp_path / "t.tok")
    loaded = Tokenizer.load(tmp_path / "t.tok")
    assert loaded.vocabulary == tokenizer.vocabulary and loaded.vocabulary.lacking == lacking
    assert "no token for 4 of the 256 bytes (0x04 06 c0 f1)" in loaded.loss
    for said, ids in (
        ("a\x04b", [*b"ab"]),
        ("!\x04!", [256]),  # what stands beside it is merged
        ("\x04\x06", []),
        ("\x06!" * 16, [257] * 4),  # pieces that are remembered otherwise, or not at all
        ("\x04!" * 120, [257] * 30),
        ("\x04" * 20 + " " + "\x06" * 200, [*b" "]),
    ):
        assert loaded.encode_ordinary(said) == loaded.encode_ordinary(said) == ids
    assert loaded.encode_bytes(b"x\xc0\xf1y") == [*b"xy"]
    to_huggingface(loaded, tmp_path / "t.json")
    assert from_huggingface(tmp_path / "t.json").vocabulary == tokenizer.vocabulary
    with pytest.raises(ValueError, match="no token for byte 0x04, as tiktoken must have"):
        to_tiktoken(loaded, tmp_path / "t.tiktoken")
    content = json.loads((tmp_path / "t.json").read_text())
    content["model"]["unk_token"] = "<s>"
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no token for byte 0x04 and takes '<s>' for it"):
        from_huggingface(tmp_path / "t.json")


def test_a_lone_byte_level_without_a_pattern_goes_out_and_comes_back(tmp_path: Path) -> None:
    to_huggingface(small(), tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "use_regex": False}
    (tmp_path / "t.json").write_text(json.dumps(content))
    whole = from_huggingface(tmp_path / "t.json")
    to_huggingface(whole, tmp_path / "u.json")
    assert from_huggingface(tmp_path / "u.json").vocabulary == whole.vocabulary


def test_a_token_its_merges_do_not_give_is_reached_only_as_a_whole_piece() -> None:
    odd_one = odd()
    without = Vocabulary(
        odd_one.tokens, odd_one.merges, odd_one.special_tokens, GPT2, odd_one.classes, False
    )
    assert Tokenizer(without).encode_ordinary("z" * 90) == [1000 - ord("z")] * 90
    assert Tokenizer(without).encode_ordinary("abc") == [5]


def test_the_file_is_small_and_the_same_every_time(tmp_path: Path) -> None:
    small().save(tmp_path / "a")
    Tokenizer.load(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").stat().st_size < 40_000
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b"]


def test_the_classes_of_the_file_decide(tmp_path: Path) -> None:
    table = installed_classes().expanded.copy()
    table[ord("ж")] = table[0x0378]  # as if not yet assigned when this was trained
    starts = np.flatnonzero(np.diff(table, prepend=np.uint8(255)))
    old = UnicodeClasses(starts, table[starts])
    for pattern in ("gpt4", r"\p{L}+|\P{L}+"):
        none = np.zeros(0, np.int32)
        Tokenizer(Vocabulary.learned(none, none, pattern, old)).save(tmp_path / "old")
        loaded = Tokenizer.load(tmp_path / "old")
        assert loaded.vocabulary.classes == old != installed_classes()
        assert loaded.decode(loaded.encode_ordinary("ажа")) == "ажа"


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().save(tmp_path / "t")
    before = (tmp_path / "t").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        small().save(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_file_is_replaced_by_way_of_a_name_that_nobody_can_foresee(tmp_path: Path) -> None:
    """A link laid at a name that can be foreseen would have another file overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "t"
    for name in ("t.tmp", "t.part", ".t.tmp", ".t.part"):
        (tmp_path / name).symlink_to(victim)
    target.symlink_to(victim)
    mask = os.umask(0o027)
    try:
        files.replace_durably(target, b"new")
    finally:
        os.umask(mask)
    assert victim.read_text() == "mine" and target.read_bytes() == b"new"
    assert not target.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        files.replace_durably(tmp_path / "nowhere" / "t", b"new")
    for folder in (tmp_path, Path("."), Path("/")):
        with pytest.raises(IsADirectoryError, match="is a folder: give the name of a file"):
            files.replace_durably(folder, b"new")


def test_a_replaced_file_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def syncing(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renaming(part: Path, target: Path) -> Path:
        done.append("name")
        return replace(part, target)

    monkeypatch.setattr(files.os, "fsync", syncing)
    monkeypatch.setattr(Path, "replace", renaming)
    files.replace_durably(tmp_path / "t", b"new")
    assert done == ["file", "name", "folder"]


# --- damage


@given(st.data())
def test_any_damaged_byte_is_refused(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    whole = fileformat.to_bytes(small().vocabulary)
    at = draw.draw(st.integers(0, len(whole) - 1))
    flip = draw.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "t"
    path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"t is no tokenizer|t is damaged|version"):
        Tokenizer.load(path)
    path.write_bytes(whole[:at])
    with pytest.raises(ValueError, match=r"t is no tokenizer|t is damaged|version"):
        Tokenizer.load(path)


def resealed(change: Callable[[dict[str, object]], object]) -> bytes:
    """Return a file with another header and a right hash."""
    name, header, rest = fileformat.to_bytes(small().vocabulary)[:-32].split(b"\n", 2)
    fields = json.loads(header)
    change(fields)
    body = b"\n".join([name, json.dumps(fields).encode(), rest])
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: h.pop("pattern"), "header that cannot be read: .* missing .* `pattern`"),
        (lambda h: h.update(pattern="("), "not a regular expression"),
        (lambda h: h.update(special_tokens={"<|x|>": 7}), "'<|x|>' has the id of another"),
        (lambda h: h.update(special_tokens=[1]), r"Expected `object`.*`\$.special_tokens`"),
        (lambda h: h.update(special_tokens={"x": 10**400}), "header that cannot be read"),
        (lambda h: h.update(special_tokens={"": 2}), "a special token has no name"),
        (lambda h: h.update(has_merges="yes"), r"`\$.has_merges`"),
        (lambda h: h.update(n_vocab=5), "says n_vocab = 5"),
        (lambda h: h.update(pattern="(" * 2000), "not a regular expression"),
        (lambda h: h["sections"][1].__setitem__(2, 10**9), "past the end"),
        (lambda h: h["sections"][1].__setitem__(2, -2), r"`\$.sections\[1\]\[2\]`"),
        (lambda h: h["sections"][1].__setitem__(2, 10**30), "past the end"),
        (lambda h: h["sections"][1].__setitem__(1, "O"), "Invalid enum value 'O'"),
        (lambda h: h["sections"].pop(), "its sections are not byte_ids, merges"),
        (lambda h: h["sections"].append(h["sections"][0]), "its sections are not byte_ids"),
        (lambda h: h["sections"].__setitem__(0, ["byte_ids", "<u2", 250]), "."),
    ],
)
def test_a_valid_hash_around_nonsense_is_refused_too(
    tmp_path: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    (tmp_path / "t").write_bytes(resealed(change))
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path / "t")


def test_a_header_nested_without_end_is_refused(tmp_path: Path) -> None:
    name, _, rest = fileformat.to_bytes(small().vocabulary)[:-32].split(b"\n", 2)
    for deep in (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"[" * 100_000):
        body = b"\n".join([name, deep, rest])
        (tmp_path / "t").write_bytes(body + hashlib.sha256(body).digest())
        with pytest.raises(ValueError, match="header that cannot be read"):
            Tokenizer.load(tmp_path / "t")


def bomb(n: int) -> Vocabulary:
    """Return a vocabulary each of whose n merges doubles the last token: what no check has seen."""
    plain = Vocabulary.learned(
        np.zeros(0, np.int32), np.zeros(0, np.int32), "gpt4", installed_classes()
    )
    merges = np.array([[4, 4], *([259 + k, 259 + k] for k in range(1, n))], np.int32)
    object.__setattr__(plain, "merges", merges)
    object.__setattr__(plain, "results", np.arange(260, 260 + n, dtype=np.int32))
    object.__setattr__(plain, "special_tokens", {"<|pad|>": 260 + n})
    return plain


def test_merges_that_double_each_other_ask_for_no_more_memory_than_is_allowed(
    tmp_path: Path,
) -> None:
    """34 of them, in 22 kB, would ask for 17 GB."""
    (tmp_path / "t").write_bytes(fileformat.to_bytes(bomb(34)))
    tracemalloc.start()
    with pytest.raises(ValueError, match="token 272 has 8,192 bytes; 4,096 are allowed"):
        Tokenizer.load(tmp_path / "t")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_tokens_are_bounded_together_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").write_bytes(fileformat.to_bytes(bomb(12)))
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 256 + 2 * 4096 - 2)
    Tokenizer.load(tmp_path / "t")
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 256 + 2 * 4096 - 3)
    monkeypatch.setattr(fileformat, "Vocabulary", None)  # as they are read, not afterwards
    with pytest.raises(ValueError, match="the tokens have more than 8,445 bytes"):
        Tokenizer.load(tmp_path / "t")


@pytest.mark.parametrize("name", ["t.tiktoken", "t.json"])
def test_imported_tokens_are_bounded_too(tmp_path: Path, name: str) -> None:
    long = b"a" * 4097
    if name == "t.json":
        to_huggingface(small(), tmp_path / name)
        content = json.loads((tmp_path / name).read_text())
        content["model"]["vocab"][long.decode()] = 100_000
        (tmp_path / name).write_text(json.dumps(content))
    else:
        to_tiktoken(small(), tmp_path / name)
        with (tmp_path / name).open("ab") as file:
            file.write(base64.b64encode(long) + b" 100000\n")
    load = from_huggingface if name == "t.json" else from_tiktoken
    with pytest.raises(ValueError, match="token 100000 has 4,097 bytes; 4,096 are allowed"):
        load(tmp_path / name)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is empty"),
        (b'{"model": {}}', "import it: myllm tokenizer import"),
        (b"MyLLM tokenizer 9\nrest", "version '9' of the format; known are 1 to 3"),
        (b"\x80\x04pickle", "is no tokenizer file"),
    ],
)
def test_foreign_files_are_refused_with_a_sentence(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path / "t")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, m: t.pop(4), "merge 0 joins ids 4 and 4, which are not both tokens"),
        (lambda t, m: t.update({900: b"a"}), "ids 101 and 900 have the same bytes|same bytes"),
        (lambda t, m: t.update({900: b""}), "token 900 has no bytes"),
        (lambda t, m: t.update({-1: b"xyz"}), "must lie in 0 to"),
        (lambda t, m: m.append([4, 9999]), "merge 1 joins ids 4 and 9999"),
        (lambda t, m: m.append([5, 6]), r"merge 1 makes b'\\x01\\x02', which is no token"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    change: Callable[[dict[int, bytes], list[list[int]]], object], message: str
) -> None:
    tokens = {4 + byte: bytes([byte]) for byte in range(256)} | {260: b"\0\0"}
    merges = [[4, 4]]
    change(tokens, merges)
    with pytest.raises(ValueError, match=message):
        Vocabulary(tokens, np.array(merges, np.int32), {"<|x|>": 0}, "gpt4", installed_classes())


# --- imports that must be refused


def test_the_letters_of_bytes_are_those_of_gpt2() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256 and letters[ord(" ")] == "Ġ" and letters[ord("\n")] == "Ċ"
    assert letters[ord("a")] == "a" and letters[0] == "Ā" and letters[0xAD] == "Ń"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda j: j.update(normalizer={"type": "NFKC"}), "changes text by 'NFKC'"),
        (
            lambda j: j.update(
                normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}
            ),
            r"changes text by 'NFC' \+ 'Strip'; .* NFC alone is known",
        ),
        (lambda j: j.update(normalizer=["NFC"]), r"can be read: .*`\$.normalizer`"),
        (lambda j: j["added_tokens"][0].update(rstrip=True), "looks at what stands beside it"),
        (lambda j: j["model"].update(type="Unigram", vocab=[["a", 0.5]]), "SentencePiece"),
        (lambda j: j["model"].update(byte_fallback=True), "SentencePiece"),
        (lambda j: j["model"].update(type="WordPiece"), "a .WordPiece. model"),
        (lambda j: j["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (lambda j: j["model"]["vocab"].update({"日": 9999}), "stands for no byte"),
        (lambda j: j["model"]["vocab"].pop("a"), "."),
        (lambda j: j["model"].pop("vocab"), "no tokenizer.json that can be read"),
        (lambda j: j["model"]["vocab"].update(a=10**400), r"that can be read: .*`\$.model.vocab"),
        (lambda j: j["model"]["vocab"].update(a=1 << 40), r"that can be read: .*`\$.model.vocab"),
        (lambda j: j["model"]["vocab"].update(a=5, b=5), "two tokens have the same id"),
        (
            lambda j: j["model"]["merges"].__setitem__(0, ["a", "b", "c"]),
            r"`\$.model.merges\[0",
        ),
        (lambda j: j["model"]["merges"].__setitem__(0, "a b c"), "merge 0, 'a b c', does not join"),
        (lambda j: j["model"]["merges"].__setitem__(0, "a QQQQ"), "merge 0, 'a QQQQ', does not"),
        (lambda j: j["added_tokens"].append(j["added_tokens"][0]), "have the same content"),
        (lambda j: j["added_tokens"][0].update(content=7), r"`\$.added_tokens\[0\].content`"),
        (lambda j: j.update(pre_tokenizer={"type": "Whitespace"}), "cuts text by .Whitespace"),
        (lambda j: j.update(pre_tokenizer=None), r"can be read: .*`\$.pre_tokenizer`"),
        (lambda j: j.update(pre_tokenizer={"type": "Sequence"}), "cuts text by .Sequence"),
        (
            lambda j: j["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
            "adds a space",
        ),
        (
            lambda j: j["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
            "only an isolating Split",
        ),
        (
            lambda j: j["pre_tokenizer"]["pretokenizers"][0].update(type="Digits"),
            "only single Digits",
        ),
    ],
)
def test_foreign_tokenizers_that_would_lose_text_are_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    to_huggingface(small(), tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    change(content)
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path / "t.json")


def test_a_foreign_tokenizer_nested_without_end_is_refused(tmp_path: Path) -> None:
    for deep in ("[" * 100_000, '{"x":' + "[" * 100_000 + "]" * 100_000 + "}"):
        (tmp_path / "t.json").write_text(deep)
        with pytest.raises(ValueError, match="that can be read"):
            from_huggingface(tmp_path / "t.json")


def test_plain_byte_level_files_and_old_merges_are_read(tmp_path: Path) -> None:
    to_huggingface(small(), tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "t.json").write_text(json.dumps(content))
    imported = from_huggingface(tmp_path / "t.json").vocabulary
    assert imported.pattern == GPT2
    assert np.array_equal(imported.merges, small().vocabulary.merges)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "holds no token"),
        (b"YQ== 0\n!!! 1\n", "line 2: not a token"),
        (b"YQ== 0\nYg==\n", "line 2: not a token"),
        (b"YQ== 0\nYg== 0\n", "line 2: rank 0 has come before"),
        (b"YQ== 0\n", "no token for byte 0x00"),
    ],
)
def test_damaged_tiktoken_files_are_refused_by_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_tiktoken(tmp_path / "t")
