"""How the flat arrays are cut: what one rank owns, and what has a sum and a CRC of its own.

AdamW steps each number by itself. A rank may own any stretch, so slices are whole blocks of
``SUM_BLOCK`` elements, a number that depends on nothing; each has a sum of squares and a CRC.

Muon steps a matrix as a whole. A matrix has one rank, which holds its momentum, so among the
matrices slices end where matrices do, and blocks begin anew with each. What is not Muon's, before
and behind them, is cut as for AdamW. No rank computes what another does, and what is computed of a
matrix does not depend on who does it: the bits are the same for any number of ranks.
"""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence

from dist.config import OptimKind
from reference.flops import muon_flops
from reference.global_norm import SUM_BLOCK
from reference.params import Layout, ParamSpec

ARRAYS = ("master", "m", "v")  # what a run keeps
Range = tuple[int, int]  # of elements, the second behind the last


class Cutting:
    """How the arrays of one layout are cut.

    Parameters
    ----------
    size : int
        Elements of the master.
    matrices : mapping
        First element -> spec of each matrix that Muon steps, side by side in this order.
    """

    def __init__(self, size: int, matrices: Mapping[int, ParamSpec] | None = None) -> None:
        self.size, self.matrices = size, dict(matrices or {})
        ends = [start + spec.size for start, spec in self.matrices.items()]
        self.muon: Range = (min(self.matrices), max(ends)) if ends else (size, size)
        self.joints = sorted({0, *self.matrices, *ends, size})  # where blocks begin anew
        self._numbers: dict[str, dict[int, int]] = {}

    @classmethod
    def of(cls, layout: Layout, kind: OptimKind) -> "Cutting":
        """Return that of a layout: Muon's are the matrices of the blocks."""
        offsets = layout.offsets.values() if kind == "muon" else ()
        return cls(layout.size, {start: spec for start, spec in offsets if spec.parts})

    def pieces(self, low: int, high: int) -> list[Range]:
        """Return a range in pieces that end where blocks begin anew."""
        inside = [joint for joint in self.joints if low < joint < high]
        return list(itertools.pairwise([low, *inside, high])) if high > low else []

    def blocks(self, low: int, high: int) -> Iterator[Range]:
        """Yield the blocks of a range, which begins with one and ends with one."""
        for start, end in self.pieces(low, high):
            for block in range(start, end, SUM_BLOCK):
                yield block, min(end, block + SUM_BLOCK)

    def around(self, low: int, high: int) -> Range:
        """Return the whole blocks that a range lies in."""
        first = self.joints[bisect.bisect(self.joints, low) - 1]
        at = bisect.bisect(self.joints, high - 1)
        last, end = self.joints[at - 1], self.joints[at]
        below = first + (low - first) // SUM_BLOCK * SUM_BLOCK
        return below, min(end, last - (last - high) // SUM_BLOCK * SUM_BLOCK)

    # ---- which elements an array of the optimizer has --------------------------------------------

    def held(self, array: str, ranges: Sequence[Range]) -> list[Range]:
        """Return what an array has of ranges of the master: v is AdamW's alone, of its elements."""
        stepped = self.matrices if array == "v" else ()
        return [(low, low if low in stepped else high) for low, high in ranges]

    def count(self, array: str) -> int:
        """Return the elements of an array."""
        return self.offset(array, self.size)

    def offset(self, array: str, element: int) -> int:
        """Return where an element of the master stands in an array: v skips what is Muon's."""
        first, last = self.muon
        return element - (last - first if array == "v" and element >= last else 0)

    def n_blocks(self, array: str) -> int:
        """Return how many blocks an array has."""
        first, last = self.muon if array == "v" else (self.size, self.size)
        pieces = self.pieces(0, self.size)
        return sum(-(-(b - a) // SUM_BLOCK) for a, b in pieces if not first <= a < last)

    def numbers(self, array: str) -> dict[int, int]:
        """Return the blocks of an array, by their first element, numbered in order."""
        if array not in self._numbers:
            first, last = self.muon if array == "v" else (self.size, self.size)
            starts = (start for start, _ in self.blocks(0, self.size))
            kept = (start for start in starts if not first <= start < last)
            self._numbers[array] = {start: number for number, start in enumerate(kept)}
        return self._numbers[array]

    # ---- what each rank owns ---------------------------------------------------------------------

    def bounds(self, layout: Layout, n_layers: int, ranks: int, *, beside: bool) -> list[list[int]]:
        """Return for each bucket W + 1 offsets that divide it among W ranks.

        With ``beside`` there are buckets to be exchanged while the backward computes. One of Muon's
        has W layers, so that each rank steps the matrices of one; the first has what is left.
        """
        if not self.matrices:
            edges = cuts(layout, n_layers, ranks) if beside else [0, self.size]
            return bounds_of_slices(edges, SUM_BLOCK, ranks)
        first, last = self.muon
        starts = [first_of(layout, layer) for layer in range(n_layers)]
        inner = starts[-ranks::-ranks] if beside else []
        edges = sorted({0, first, *inner, last, self.size})
        return [
            self._by_work(low, high, ranks)
            if low in self.matrices
            else bounds_of_slices([low, high], SUM_BLOCK, ranks)[0]
            for low, high in itertools.pairwise(edges)
        ]

    def _by_work(self, low: int, high: int, ranks: int) -> list[int]:
        """Divide a range of matrices so that each rank has about as much to multiply.

        A matrix goes to the rank in whose share of the work its middle lies.
        """
        found = [(start, muon_flops(self.matrices[start])) for start, _ in self.pieces(low, high)]
        total, before = sum(work for _, work in found), 0
        owners = []
        for _, work in found:
            owners.append((2 * before + work) * ranks // (2 * total))
            before += work
        starts = [start for start, _ in found]
        cut = (bisect.bisect_left(owners, rank) for rank in range(1, ranks))
        return [low, *((*starts, high)[i] for i in cut), high]


# ---- AdamW's -------------------------------------------------------------------------------------


def cuts(layout: Layout, n_layers: int, size: int) -> list[int]:
    """Return offsets that cut the flat array into buckets to be exchanged beside the backward.

    Between the first layer's matrices and the last decayed parameter, a bucket ends where a layer
    begins, or soon after: it has equally many whole blocks for every rank. What comes before, the
    embedding, and after, gains and biases of all layers, is finished when the backward is.
    """
    top, step = layout.n_decayed // SUM_BLOCK * SUM_BLOCK, size * SUM_BLOCK
    starts = (first_of(layout, layer) for layer in range(n_layers))
    found = {top - (top - start) // step * step for start in starts if start + step <= top}
    return sorted({0, layout.size, *found, *([top] if found else [])})


def first_of(layout: Layout, layer: int) -> int:
    """Return where the decayed parameters of a layer begin."""
    return min(
        start
        for name, (start, spec) in layout.offsets.items()
        if name.startswith(f"layers.{layer}.") and spec.decays
    )


def bounds_of_slices(cuts: Sequence[int], block: int, size: int) -> list[list[int]]:
    """Return for each bucket W + 1 offsets that divide it into ranges of whole blocks, one a rank.

    Buckets begin with whole blocks. The ranks that get more change from one to the next.
    """
    result, before = [], 0
    for low, high in itertools.pairwise(cuts):
        blocks = -(-(high - low) // block)
        ends = [(blocks * r + before) // size for r in range(size + 1)]
        result.append([min(high, low + block * end) for end in ends])
        before = (before + blocks) % size
    return result
