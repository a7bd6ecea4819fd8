"""Which documents are held out for evaluation: by a hash of their text, of few by size as well."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set

from dist.documents import Document
from dist.duplicates import SHARED, near_duplicates, repeated


def place(content: bytes) -> float:
    """Return where the hash of a text lies between 0 and 1."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def is_held_out(content: bytes, fraction: float) -> bool:
    """Tell whether a document is kept from training, by a hash of its text."""
    return place(content) < fraction


def holds_out(
    documents: Iterable[Document], share: float, among: Set[float] | None = None
) -> frozenset[float]:
    """Return the places of documents that have about a share of the text; none if all are equal.

    It takes what fits, in the order of the hashes, and then the shortest of the others where that
    comes nearer to the share, or where nothing fits: ``among`` these places. Some are always left.
    """
    sizes: Counter[float] = Counter()
    for document in documents:
        sizes[place(document.content)] += document.n_bytes
    sizes = +sizes  # without empty ones
    free = sizes.keys() if among is None else sizes.keys() & among
    wanted = share * sizes.total()
    chosen = set()
    for at in sorted(free):
        if sizes[at] <= wanted:
            chosen.add(at)
            wanted -= sizes[at]
    rest = sorted(free - chosen, key=lambda at: (sizes[at], at))
    if rest and len(sizes) - len(chosen) > 1 and (not chosen or sizes[rest[0]] < 2 * wanted):
        chosen.add(rest[0])
    return frozenset(chosen)


def unlike_others(documents: Iterable[Document]) -> set[float]:
    """Return the places of the documents that no other nearly has; of few, all are in memory."""
    found = list(documents)
    shares = repeated([" ".join(document.texts) for document in found])
    return {place(d.content) for d, share in zip(found, shares, strict=True) if share < SHARED}


def too_little(held: int, total: int, asked: float) -> bool:
    """Whether less than a tenth of what was to be held out was, of so much in all."""
    return held < asked / 10 * total


def far_share(held: int, n_tokens: int, asked: float) -> str:
    """Return a sentence on a held-out share that is far from what was asked for, or nothing.

    It is where a side has less than half of what it was to have, or the held-out one more than
    twice as much.
    """
    share = held / n_tokens
    if not asked or (asked / 2 <= share <= 2 * asked and 1 - share >= (1 - asked) / 2):
        return ""
    return (
        f"{held:,} of {n_tokens:,} tokens were held out, {share:.2g} of them, where "
        f"--heldout asks for {asked:g}: documents are held out whole, so to come "
        "nearer give more or shorter ones, or ask for another share"
    )


def nearly_trained_on(
    documents: Callable[[], Iterator[Document]], is_held: Callable[[bytes], bool]
) -> set[int]:
    """Return the numbers of the held-out documents that training text nearly has.

    The texts are read twice: what is remembered grows with the held-out part alone.
    """
    held = {
        number: " ".join(document.texts)
        for number, document in enumerate(documents())
        if is_held(document.content)
    }
    others = (" ".join(d.texts) for d in documents() if not is_held(d.content))
    doubles = near_duplicates(list(held.values()), others)
    return {number for number, double in zip(held, doubles, strict=True) if double}
