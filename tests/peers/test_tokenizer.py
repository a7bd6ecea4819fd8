"""Exported vocabularies in the real packages: the same ids over the whole corpus, both ways."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.hard_texts import HARD, SPELLINGS
from tests.helpers.tokenizer_texts import corpus, small, texts
from tokenizer import GPT2, Tokenizer, from_huggingface, to_huggingface, train_from_iterator
from tokenizer.interop import from_tiktoken, to_tiktoken
from tokenizer.reference import composed

os.environ["TOKENIZERS_PARALLELISM"] = "false"
tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")


# cl100k_base's of today, Kimi K2's, and others with classes in classes
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
UPPER, LOWER = (rf"[\p{{{c}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for c in ("Lu}\\p{Lt", "Ll"))
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SETS = [
    r"[a-m&&[^ei]]+",
    r"[^a-m&&e-z]+",
    r"[^\s[a-c]]+",
    r"[[a-e]l-p[0-4]]+",
    r"[[a-z]&&[^[b-d]&&[c-f]]x]+",
    r"[]a]+|[^]a]+",
    r"[\p{L}&&\p{Lu}\p{Lo}]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
]
ODD = [
    "Hello World, helloWorld HELLOworld 中文ABC中 don't 12345 1234567 don'T can'ſ 12",
    "abcdefgh mnop xyz ]a[&|-~ 0123456789 aaaaab aabb abla laal llll ... a&&b (a|b) x²y³¼½ ¹1",
    "ab\u200dc \u200c \U0001f600\U0001f601x face09 \u0661\u0662\u0663\u0664 \t x  ",
]


def valid(text: str) -> str:
    """Return the text without lone surrogates, which the packages do not take."""
    return "".join(c for c in text if not "\ud800" <= c <= "\udfff")


def as_tiktoken(tokenizer: Tokenizer, folder: Path) -> "tiktoken.Encoding":
    from tiktoken.load import load_tiktoken_bpe

    to_tiktoken(tokenizer, folder / "t.tiktoken")
    return tiktoken.Encoding(
        "ours",
        pat_str=tokenizer.vocabulary.pattern,
        mergeable_ranks=load_tiktoken_bpe(str(folder / "t.tiktoken")),
        special_tokens=tokenizer.special_tokens,
        explicit_n_vocab=tokenizer.n_vocab,
    )


def as_huggingface(tokenizer: Tokenizer, folder: Path) -> "tokenizers.Tokenizer":
    to_huggingface(tokenizer, folder / "t.json")
    return tokenizers.Tokenizer.from_file(str(folder / "t.json"))


@pytest.mark.parametrize("pattern", ["gpt4", "gpt2"])
def test_both_packages_give_our_ids_over_the_whole_corpus(pattern: str, tmp_path: Path) -> None:
    ours = train_from_iterator(corpus(), 5000, pattern=pattern)
    openai, face = as_tiktoken(ours, tmp_path), as_huggingface(ours, tmp_path)
    for text in corpus():
        ids = ours.encode_ordinary(text)
        assert openai.encode_ordinary(text) == ids
        assert openai.decode(ids) == text
    encoded = face.encode_batch([*corpus()], add_special_tokens=False)
    assert [e.ids for e in encoded] == ours.encode_batch(corpus(), disallowed_special=())
    assert face.get_vocab_size() == ours.n_vocab


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, object]:
    folder = tmp_path_factory.mktemp("packages")
    return as_tiktoken(small(), folder), as_huggingface(small(), folder)


@given(texts)
def test_both_packages_give_our_ids_on_hostile_text(
    packages: tuple["tiktoken.Encoding", "tokenizers.Tokenizer"], text: str
) -> None:
    openai, face = packages
    text = valid(text)
    assert openai.encode_ordinary(text) == small().encode_ordinary(text)
    assert face.encode(text, add_special_tokens=False).ids == small().encode_ordinary(text)


@given(texts)
def test_special_tokens_mean_what_they_mean_to_tiktoken(
    packages: tuple["tiktoken.Encoding", "tokenizers.Tokenizer"], text: str
) -> None:
    openai, _ = packages
    text = f"<|user|>{valid(text)}<|end|><|end|"
    for arguments in (
        {"allowed_special": "all"},
        {"disallowed_special": ()},
        {"allowed_special": {"<|user|>"}, "disallowed_special": ()},
        {"allowed_special": {"<|user|>", "<|end|>"}},
        {"disallowed_special": {"<|pad|>"}},
    ):
        assert small().encode(text, **arguments) == openai.encode(text, **arguments)  # type: ignore[arg-type]
    for arguments in ({}, {"allowed_special": {"<|user|>"}}, {"disallowed_special": {"<|end|>"}}):
        for encode in (openai.encode, small().encode):
            with pytest.raises(ValueError):
                encode(text, **arguments)


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_vocabulary_trained_by_hugging_face_is_imported_with_its_ids(
    pattern: str, tmp_path: Path
) -> None:
    from tokenizers import Regex, models, pre_tokenizers, trainers

    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "gpt4":
        split = pre_tokenizers.Split(Regex(small().vocabulary.pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    theirs.train_from_iterator(corpus()[::3], trainer)
    theirs.save(str(tmp_path / "theirs.json"))
    ours = from_huggingface(tmp_path / "theirs.json")
    assert ours.special_tokens == {"<s>": 0, "</s>": 1}
    for text in corpus():
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, allowed_special="all") == expected


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?s:.+)",
        r"\S+|\s++$|\s",
        r"(?s)a.|(?-s:.+)|\n",
        r"\A\s+|[^\s$^]+|[$^]+|\s",
        r"\p{^L}+|\p{L}+",
        r"\p{N}{1,3}+|\p{L}+|\s++$|\s|[^\s\p{L}\p{N}]++",
        r"(?:\d|a{1,2}+){2,3}+ ?|b{,1}c|[a-f[x-z]]{2}+|l{2}?|.",
        r"\w+|[^\w\s]+|\s",
        r"[\W\d]+|\U0001f600|\pL",
        KIMI,
        *SETS,
    ],
)
def test_a_pattern_in_both_dialects_gives_our_ids(pattern: str, tmp_path: Path) -> None:
    ours = Tokenizer(dataclasses.replace(small().vocabulary, pattern=pattern))
    face = as_huggingface(ours, tmp_path)
    again = from_huggingface(tmp_path / "t.json")
    for text in (*HARD, *ODD, " \na \n\n b$\n^c \n", "a\nb ", *corpus()[:3]):
        ids = ours.encode(text, allowed_special="all")
        assert face.encode(text, add_special_tokens=False).ids == ids, ascii(text)
        assert again.encode(text, allowed_special="all") == ids, ascii(text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{N}{1,3}+|\p{L}+|\s++\z|\s",
        r"(?:\d|a{1,2}+){2,3}+ ?|b{,1}c|[a-f[x-z]]{2}+|l{2}?|.",
        r"(?>\p{N}{1,3})|(?>\p{N}{1,3})+|(?>(?>a{1,2})b{2})|(?>la{2})",
        r"\w+|[^\w\s]+",
        r"[\W\d]+|\x{1F600}|[\x{4e00}-\x{9fff}]",
        KIMI,
        *SETS,
    ],
)
def test_a_pattern_in_hugging_face_s_dialect_gives_its_ids(pattern: str, tmp_path: Path) -> None:
    from tokenizers import Regex, pre_tokenizers

    face = as_huggingface(small(), tmp_path)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    face.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    face.save(str(tmp_path / "t.json"))
    ours = from_huggingface(tmp_path / "t.json")
    for text in (*HARD, *ODD, *corpus()[:3]):
        ids = ours.encode(text, allowed_special="all")
        assert face.encode(text, add_special_tokens=False).ids == ids, ascii(text)


@pytest.mark.parametrize("pattern", [KIMI, CL100K, *(rf"{one}|[\S\s]" for one in SETS)])
def test_a_pattern_of_tiktoken_gives_its_ids(pattern: str, tmp_path: Path) -> None:
    given = dataclasses.replace(small().vocabulary, pattern=pattern)
    openai = as_tiktoken(Tokenizer(given), tmp_path)
    ours = from_tiktoken(tmp_path / "t.tiktoken", pattern=pattern)
    for text in (*HARD, *ODD, *corpus()[:3]):
        text = valid(text)
        assert ours.encode_ordinary(text) == openai.encode_ordinary(text), ascii(text)


def test_cl100k_goes_to_hugging_face_and_comes_back(tmp_path: Path) -> None:
    ours = Tokenizer(dataclasses.replace(small().vocabulary, pattern=CL100K))
    face = as_huggingface(ours, tmp_path)
    for text in (*HARD, *ODD, *corpus()[:3]):
        ids = ours.encode(text, allowed_special="all")
        assert face.encode(text, add_special_tokens=False).ids == ids, ascii(text)
    assert from_huggingface(tmp_path / "t.json").vocabulary == ours.vocabulary


def test_a_text_that_is_never_cut_gives_hugging_face_s_ids(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    theirs = as_huggingface(small(), tmp_path)
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.save(str(tmp_path / "theirs.json"))
    ours = from_huggingface(tmp_path / "theirs.json")
    face = as_huggingface(ours, tmp_path)
    for text in (*HARD, "a\n\nb \n", *(text[:2000] for text in corpus()[:3])):
        ids = ours.encode(text, allowed_special="all")
        assert theirs.encode(text, add_special_tokens=False).ids == ids, ascii(text)
        assert face.encode(text, add_special_tokens=False).ids == ids, ascii(text)


def test_bytes_that_the_corpus_lacked_are_left_out_as_hugging_face_does(tmp_path: Path) -> None:
    """Its trainer gives tokens to the bytes that it sees alone, unless told: SmolLM's has 235."""
    from tokenizers import models, pre_tokenizers, trainers

    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<s>"], show_progress=False)
    theirs.train_from_iterator(["".join(map(chr, range(32, 127))) * 3, *corpus()[:9]], trainer)
    theirs.save(str(tmp_path / "theirs.json"))
    ours = from_huggingface(tmp_path / "theirs.json")
    assert b"\x04" in ours.vocabulary.lacking and ours.loss
    beside = [f"{a}\x04{b}" for a in ("!", "the", " \n") for b in ("!", "m", "\n ", "\x06" * 40)]
    for text in (*HARD, *SPELLINGS, *beside, *("".join(beside) + "!\x04" * n for n in (5, 90))):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, allowed_special="all") == expected, ascii(text)


def test_each_pair_that_makes_a_token_may_be_a_merge(tmp_path: Path) -> None:
    """As transformers makes Llama 3's list from ranks: merges come before those of their parts."""
    vocabulary = small().vocabulary
    left, right, _, _ = dataclasses.replace(vocabulary, merges=None).ranked_pairs()
    pairs = np.stack([left, right], axis=1)[::-1]  # the last tokens first
    every = dataclasses.replace(vocabulary, merges=pairs, whole_pieces=True)
    Tokenizer(every).save(tmp_path / "t.tok")
    ours = Tokenizer.load(tmp_path / "t.tok")
    face = as_huggingface(ours, tmp_path)
    for text in (*HARD, *corpus()[::9]):
        ids = ours.encode(text, allowed_special="all")
        assert face.encode(text, add_special_tokens=False).ids == ids, ascii(text)


def test_text_is_made_nfc_as_hugging_face_makes_it(tmp_path: Path) -> None:
    """Its normalizer alone, and ids through a whole tokenizer with special tokens."""
    nfc = tokenizers.normalizers.NFC()
    ours = Tokenizer(dataclasses.replace(small().vocabulary, nfc=True))
    face = as_huggingface(ours, tmp_path)
    for text in (*SPELLINGS, *HARD):
        assert composed(text.encode()).decode() == nfc.normalize_str(text), ascii(text)
        ids = ours.encode(text, allowed_special="all")
        assert face.encode(text, add_special_tokens=False).ids == ids, ascii(text)
    assert sum(ours.encode_ordinary(t) != small().encode_ordinary(t) for t in SPELLINGS) > 4


def test_a_vocabulary_trained_by_rustbpe_is_imported_with_its_ids(tmp_path: Path) -> None:
    rustbpe = pytest.importorskip("rustbpe")
    theirs = rustbpe.Tokenizer()
    theirs.train_from_iterator(iter(corpus()[::3]), 3000, pattern=small().vocabulary.pattern)
    ranks = {bytes(token): rank for token, rank in theirs.get_mergeable_ranks()}
    encoding = tiktoken.Encoding(
        "theirs", pat_str=theirs.get_pattern(), mergeable_ranks=ranks, special_tokens={}
    )
    import base64

    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (tmp_path / "t.tiktoken").write_bytes(b"".join(lines))
    ours = from_tiktoken(tmp_path / "t.tiktoken", pattern=theirs.get_pattern())
    for text in corpus():
        assert ours.encode_ordinary(text) == encoding.encode_ordinary(text)


def test_gpt2_is_the_pattern_hugging_face_builds_in() -> None:
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours = train_from_iterator([], 276, pattern=GPT2)
    for text in corpus()[::20]:
        spans = [span for _, span in level.pre_tokenize_str(text)]
        pieces = ours._pattern.findall(text)
        assert [text[a:b] for a, b in spans] == pieces
