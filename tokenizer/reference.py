"""Byte-level byte-pair encoding, written to be read: the plain layer the kernels are held to.

Byte-pair encoding (Gage, 1994; Sennrich, Haddow and Birch, "Neural Machine Translation of Rare
Words with Subword Units", 2016) starts from single symbols and repeats one step: count all pairs of
neighbours, and make the most frequent pair a new symbol. Taken over bytes (Radford et al.,
"Language Models are Unsupervised Multitask Learners", 2019) nothing is ever unknown. Merges do not
cross words: a pattern cuts the text first, so that ``dog.`` and ``dog!`` do not become tokens.

Four ideas, in the order they are used:

1. ``split``: bytes -> words (pieces), by a regular expression;
2. ``count``: how often each distinct word occurs, all that training needs to know of a text;
3. ``train``: words and counts -> merges, in the order they were learned;
4. ``encode_word``: one word -> ids, by replaying the merges, the earliest learned first.

Ten merges of a poem, one by one, and a word that it does not have::

    python -m tokenizer.reference
"""

import heapq
import os
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import regex

from tokenizer.classes import UnicodeClasses, installed_classes
from tokenizer.patterns import GPT4, matches

MAX_TOKEN_BYTES = 4096  # every merge may double a token: some end must be set

Pair = tuple[int, int]
Word = TypeVar("Word", bound=Sequence[int])

# Well-formed UTF-8 (Unicode 16.0, table 3-7), and lone surrogates beside it: a Python str may hold
# them, so they must survive. Bytes that do not match are no character, and each becomes a piece.
# They are repeated by the thousand: of 4.4 million repetitions ``regex`` keeps no account.
CHARACTERS = regex.compile(
    rb"(?:(?:[\x00-\x7f]++|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}"
    rb"|\xf4[\x80-\x8f][\x80-\xbf]{2}){1,4096}+)++"
)


def to_bytes(text: str) -> bytes:
    """Return the UTF-8 bytes of a str, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def split(data: bytes, pattern: "regex.Pattern[str]", classes: UnicodeClasses) -> list[bytes]:
    """Cut bytes into pieces that concatenate to them again.

    Each run of whole characters is cut by the pattern as a text of its own; each byte that belongs
    to no character is a piece; and so is what the pattern skips.
    """
    pieces = []
    end = 0
    for run in CHARACTERS.finditer(data):
        pieces += [data[i : i + 1] for i in range(end, run.start())]
        pieces += split_text(run.group().decode("utf-8", "surrogatepass"), pattern, classes)
        end = run.end()
    return pieces + [data[i : i + 1] for i in range(end, len(data))]


def split_text(
    text: str, pattern: "regex.Pattern[str]", classes: UnicodeClasses
) -> Iterator[bytes]:
    """Cut a text of whole characters by the pattern, under the frozen Unicode classes."""
    seen = text.translate(classes.substitutes) if classes.substitutes else text
    end = 0
    for match in matches(pattern, seen):
        for start, stop in ((end, match.start()), match.span()):
            if start < stop:
                yield to_bytes(text[start:stop])
        end = max(end, match.end())
    if end < len(text):
        yield to_bytes(text[end:])


def count(
    texts: Iterable[str], pattern: "regex.Pattern[str]", classes: UnicodeClasses
) -> Counter[bytes]:
    """Count the words of all texts."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(split(to_bytes(text), pattern, classes))
    return counts


def train(
    words: Mapping[Word, int],
    n_merges: int,
    *,
    first_id: int = 0,
    n_symbols: int = 256,
    min_count: int = 1,
    max_length: int = MAX_TOKEN_BYTES,
) -> list[Pair]:
    """Learn merges from words and their counts.

    The pair with the highest count is merged next; among equal counts, the smallest pair of ids.

    Parameters
    ----------
    words : mapping
        Word, as bytes or other small integers, -> how often it occurs.
    n_merges : int
        How many merges to learn; fewer are returned when no pair is left.
    first_id, n_symbols : int
        Byte b has the id ``first_id + b``; the k-th merge makes ``first_id + n_symbols + k``.
    min_count : int
        Pairs that occur less often are not merged.
    max_length : int
        Pairs that hold more symbols of the first kind, together, are not merged.

    Returns
    -------
    merges : list
        The pairs of ids, in the order learned.
    """
    # Counts of pairs are kept up to date rather than recounted: a merge changes only the words that
    # contain the pair, and in them only its neighbours. The heap is lazy: an entry whose count has
    # changed since it was pushed is pushed back with the count of now.
    ids = [[first_id + byte for byte in word] for word in words]
    weights = list(words.values())
    counts: defaultdict[Pair, int] = defaultdict(int)
    where: defaultdict[Pair, set[int]] = defaultdict(set)  # words that contain, or contained, it
    for w, symbols in enumerate(ids):
        for pair in pairwise(symbols):
            counts[pair] += weights[w]
            where[pair].add(w)

    heap = [(-n, pair) for pair, n in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    length = [1] * n_symbols  # of the symbol first_id + i
    while heap and len(merges) < n_merges:
        negative, pair = heapq.heappop(heap)
        if counts[pair] != -negative:
            if counts[pair] >= min_count:
                heapq.heappush(heap, (-counts[pair], pair))
            continue
        if -negative < min_count:
            break
        new = first_id + n_symbols + len(merges)
        merges.append(pair)
        length.append(sum(length[symbol - first_id] for symbol in pair))
        born = set()
        for w in where.pop(pair):
            before = ids[w]
            after = ids[w] = merge(before, pair, new)
            for old in pairwise(before):
                counts[old] -= weights[w]
            for now in pairwise(after):
                counts[now] += weights[w]
                where[now].add(w)
                if new in now and sum(length[i - first_id] for i in now) <= max_length:
                    born.add(now)
        for now in born:
            heapq.heappush(heap, (-counts[now], now))
    return merges


def merge(symbols: Sequence[int], pair: Pair, new: int) -> list[int]:
    """Replace every occurrence of ``pair``, from left to right, by ``new``."""
    out: list[int] = []
    i = 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def encode_word(
    word: bytes, byte_ids: Sequence[int], ranks: Mapping[Pair, tuple[int, int]]
) -> list[int]:
    """Encode one word: of all pairs present, merge the one with the lowest rank, and again.

    Parameters
    ----------
    word : bytes
        A piece, as ``split`` gives it.
    byte_ids : sequence
        The 256 ids of single bytes; one without a token, -1, is left out.
    ranks : mapping
        Pair of ids -> its rank, and the id it becomes.
    """
    return encode_symbols([byte_ids[byte] for byte in word if byte_ids[byte] >= 0], ranks)


def encode_symbols(symbols: list[int], ranks: Mapping[Pair, tuple[int, int]]) -> list[int]:
    """Merge the pair of lowest rank, the leftmost among equals, until none is left."""
    symbols = list(symbols)
    while len(symbols) > 1:
        present = [ranks[pair] + (pair,) for pair in pairwise(symbols) if pair in ranks]
        if not present:
            break
        rank, new, _ = min(present)
        # Pairs of one rank make the same token (a vocabulary of ranks alone may have several);
        # the leftmost goes first.
        for i in range(len(symbols) - 1):
            if ranks.get((symbols[i], symbols[i + 1]), (None,))[0] == rank:
                symbols[i : i + 2] = [new]
                break
    return symbols


def composed(data: bytes) -> bytes:
    """Return bytes with what is text among them in Unicode's normal form C (UAX #15).

    Characters that have several spellings get one: the composed one, and marks in one order. What
    is assigned keeps its form in all later versions of Unicode.
    """
    if data.isascii():
        return data
    return CHARACTERS.sub(_composed_run, data)


def _composed_run(run: "regex.Match[bytes]") -> bytes:
    text = run[0].decode("utf-8", "surrogatepass")
    return unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")


# --- seen one by one -----------------------------------------------------------------------------

POEM = """\
slow is the tide and slower the sand
low is the light on the lowest land
wide is the water and wider the bay
and the wind, the wind has widened the day
"""


def main() -> None:
    """Learn ten merges of the poem and print what each does to it; then encode another word."""
    words = count([POEM], regex.compile(GPT4), installed_classes())
    merges = train(words, 10)
    texts = [bytes([byte]).decode("latin-1") for byte in range(256)]  # of each id, as it is read
    ids = {word: list(word) for word in words}
    print(f"{POEM}\n{len(POEM)} bytes are {words.total()} words, {len(words)} different:")
    print(" ", *(f"{word.decode()!r}·{n}" for word, n in words.most_common(6)), "…\n")
    print("  merge  most frequent pair   times   new id   tokens of the poem")
    for k, pair in enumerate(merges):
        pairs: Counter[Pair] = Counter()
        for word, n in words.items():
            for found in pairwise(ids[word]):
                pairs[found] += n
        texts.append(texts[pair[0]] + texts[pair[1]])
        ids = {word: merge(symbols, pair, 256 + k) for word, symbols in ids.items()}
        left, right = (repr(texts[i]) for i in pair)
        n_tokens = sum(n * len(ids[word]) for word, n in words.items())
        print(f"{k + 1:>5}    {left + ' + ' + right:<20}{pairs[pair]:>5}{256 + k:>9}{n_tokens:>11}")

    ranks = {pair: (k, 256 + k) for k, pair in enumerate(merges)}
    print("\nThe word ' slowest', which the poem does not have, by the merges in their order:\n")
    before: list[int] = []
    for k in range(len(merges) + 1):
        known = {pair: new for pair, new in ranks.items() if new[0] < k}
        symbols = encode_word(b" slowest", range(256), known)
        if symbols != before:
            shown = " · ".join(texts[i] for i in symbols).replace(" ", "\u2423", 1)
            print(f"  after {k:>2} merges   {shown}")
        before = symbols
    print("  ids              ", *before)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # its reader (head, say) has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
