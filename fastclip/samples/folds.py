"""Samples that are folded with other dimensions, by the lengths of the model's inputs.

In [b * n, d] sample i has n entries in a row, in [n * b, d] every b-th: no shape tells which. Nor does
one look tell it of other lengths, with which a dimension that was of one entry may have grown on the
samples' other side. But dimensions do not shrink where lengths grow: what is of one entry in longer rows
is so in shorter ones; and it is not two where there are less than twice as many entries a sample as in
shorter rows, since those within have not become fewer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from fastclip.errors import BatchSizeError, where
from fastclip.samples.aside import Lengths
from fastclip.samples.place import Place, called

_Seen = dict[Lengths, dict[int, Place]]


class Folds:
    """Where the samples are in what is folded, by layer or use.

    What is known is known of a name, whatever the model's state and the way it is called.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}
        """By the inputs' lengths, and the number of entries a sample."""

    def __bool__(self) -> bool:
        return bool(self._seen)

    def copy(self) -> Folds:
        """What is known now."""
        twin = Folds()
        twin.put_back(self)
        return twin

    def put_back(self, earlier: Folds) -> None:
        """What was known then is so still."""
        for name, seen in earlier._seen.items():
            own = self._seen.setdefault(name, {})
            for lengths, folds in seen.items():
                own[lengths] = own.get(lengths, {}) | folds

    def facts(self) -> set[tuple[Hashable, Hashable]]:
        """What was seen of every layer and use."""
        return {
            (name, (lengths, fact))
            for name, seen in self._seen.items()
            for lengths, folds in seen.items()
            for fact in folds.items()
        }

    def note(self, name: Hashable, place: Place, known: Iterable[int], lengths: Lengths) -> None:
        """A sample had so many entries there, with inputs of these lengths.

        Raises:
            BatchSizeError: in an earlier call they lay in another order, or would have been taken to.
        """
        seen = self._seen.setdefault(name, {})
        for each in known:
            folded = place.fold(2 * each, 2)
            if folded is None:
                continue
            found = Place(place.axis, *folded)
            told = self.find(name, each, lengths)
            if told not in (None, found) or not all(map(found.like, _places(seen))):
                raise BatchSizeError(
                    f"{where(called(name))}: its rows are those of the samples in another order than in "
                    "an earlier call (sample by sample, or time by time), so whose they are depends on "
                    "how the model is called; keep one layout (permute the dimensions before they are "
                    "flattened), or use a module of its own for each"
                )
            seen.setdefault(lengths, {})[each] = found

    def has(self, name: Hashable, lengths: Lengths) -> bool:
        """It was seen with inputs of these lengths."""
        return lengths in self._seen.get(name, {})

    def find(self, name: Hashable, each: int, lengths: Lengths) -> Place | None:
        """Where the samples are, of which each has so many entries; None if that is not known."""
        seen = self._seen.get(name, {})
        return seen.get(lengths, {}).get(each) or _between(seen, each, lengths)


def _between(seen: _Seen, each: int, lengths: Lengths) -> Place | None:
    """What rows of other lengths tell: all of them had their samples outermost, or all innermost."""
    folded = [place for place in _places(seen) if not place.plain]
    orders = {place.order for place in folded}
    if orders not in ({1}, {-1}):
        return None
    for others, known in seen.items():
        longer = max(known) >= each and _reach(others, lengths)
        # one layer may run several times: which of these was this one?
        fewer = [number for number in known if number <= each]
        if longer or (fewer and each < 2 * min(fewer) and _reach(lengths, others)):
            return Place(folded[0].axis, *((1, each) if orders == {1} else (each, 1)))
    return None


def _places(seen: _Seen) -> Iterator[Place]:
    return (place for folds in seen.values() for place in folds.values())


def _reach(longer: Lengths, shorter: Lengths) -> bool:
    """Whether no input is longer along any axis in `shorter`."""
    return [*map(len, longer)] == [*map(len, shorter)] and all(
        size >= other
        for a, b in zip(longer, shorter, strict=True)
        for size, other in zip(a, b, strict=True)
    )
