"""Which stretches of a line are free: the arithmetic of an arena, whatever its memory is."""

import bisect


class FreeList:
    """Free intervals, given out by best fit: the shortest that is long enough, the first of many.

    Parameters
    ----------
    length : int
        Free to begin with, from 0 on.
    """

    def __init__(self, length: int = 0) -> None:
        # (start, length), sorted, never adjacent
        self._free: list[tuple[int, int]] = [(0, length)] if length else []

    def __len__(self) -> int:
        return len(self._free)

    def take(self, size: int) -> int | None:
        """Return the start of an interval taken; None if no free one is long enough."""
        fits = [(length, start) for start, length in self._free if length >= size]
        if not fits:
            return None
        length, start = min(fits)
        i = bisect.bisect_left(self._free, (start, length))
        if length == size:
            del self._free[i]
        else:
            self._free[i] = (start + size, length - size)
        return start

    def take_at(self, start: int, size: int) -> bool:
        """Take this interval if all of it is free; return whether it was."""
        i = bisect.bisect(self._free, start, key=lambda free: free[0]) - 1
        if i < 0 or sum(self._free[i]) < start + size:
            return False
        low, length = self._free[i]
        parts = (low, start - low), (start + size, low + length - start - size)
        self._free[i : i + 1] = [part for part in parts if part[1]]
        return True

    def intervals(self) -> list[tuple[int, int]]:
        """Return (start, length) of all that is free, in order."""
        return list(self._free)

    def give(self, start: int, size: int) -> tuple[int, int]:
        """Make an interval free, and join it to its neighbours; return what they come to."""
        i = bisect.bisect_left(self._free, (start, size))
        if i < len(self._free) and start + size == self._free[i][0]:
            size += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == start:
            before = self._free.pop(i - 1)
            start, size = before[0], before[1] + size
            i -= 1
        self._free.insert(i, (start, size))
        return start, size
