"""Character-level BPE with an end-of-word marker, as it entered machine translation.

Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016),
algorithm 1: a word is its characters and a marker that ends it, so that ``est`` at the end of
``lowest`` and in ``estate`` are different tokens, and text can be put together again up to the
width of its white space. Each merge adds one symbol: after K merges ``|V| = |V0| + K``.

Unlike byte-level BPE, a character never seen in training has no token.
"""

from collections.abc import Mapping

from tokenizer import reference

END = "</w>"


class CharacterBPE:
    """Symbols and merges.

    Parameters
    ----------
    characters : list of str
        The first symbols: the marker, then the characters.
    merges : list of pairs
        Pairs of ids in the order learned; each adds the symbol of both together.
    """

    def __init__(self, characters: list[str], merges: list[reference.Pair]):
        self.symbols = list(characters)
        for a, b in merges:
            self.symbols.append(self.symbols[a] + self.symbols[b])
        self._ids = {character: i for i, character in enumerate(characters)}
        self._ranks = {pair: (k, len(characters) + k) for k, pair in enumerate(merges)}

    def encode(self, word: str) -> list[int | None]:
        """Return the ids of a word; None for each character that training has not seen."""
        out: list[int | None] = []
        known: list[int] = []  # since the last unknown character
        for character in word:
            if character in self._ids:
                known.append(self._ids[character])
            else:
                out += [*reference.encode_symbols(known, self._ranks), None]
                known = []
        return out + reference.encode_symbols([*known, self._ids[END]], self._ranks)

    def decode(self, ids: list[int | None], unknown: str = "\ufffd") -> str:
        """Return the words of ids, each marker as a space."""
        text = "".join(unknown if i is None else self.symbols[i] for i in ids)
        return text.replace(END, " ").removesuffix(" ")


def train(words: Mapping[str, int], n_merges: int) -> CharacterBPE:
    """Learn from words and how often each occurs.

    Ties go to the smallest pair of ids; ids are the marker, then the characters by code point.
    """
    characters = [END, *sorted({character for word in words for character in word})]
    ids = {character: i for i, character in enumerate(characters)}
    coded = {(*(ids[character] for character in word), 0): n for word, n in words.items()}
    return CharacterBPE(characters, reference.train(coded, n_merges, n_symbols=len(characters)))
