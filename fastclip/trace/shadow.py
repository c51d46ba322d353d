"""What is known of one tensor: its attribution, and how far that can be relied on."""

from __future__ import annotations

from torch import Tensor

from fastclip.trace.attribution import NONE, SEVERAL, Attribution, is_mixed

ORDER = 1
"""Its numbers depend on which number a sample has in the batch."""
MOVED = 2
"""Samples lie where data put them, each entry still of one sample."""
RANDOM = 4
"""Of no sample, and drawn anew for every entry."""
TRAINED = 8
"""Of trained tensors alone: a derived value."""
POSITIONS = 16
"""Numbers that say where moved samples lie: of one sample as an index, of several as a value."""
BY_VALUE = 32
"""The attribution holds for the values of this batch."""
LEARNED = 64
"""Trained tensors have had a part in it."""
FOREIGN = 128
"""Trained tensors that are none of the model's have had a part in it."""
STICKY = ORDER | MOVED | BY_VALUE | POSITIONS | LEARNED
"""What an operation hands on from its operands."""
_CONSTANT = RANDOM | TRAINED | FOREIGN
"""What a constant can be."""


class Shadow:
    """One tensor's.

    Args:
        sample: the attribution. flags: of those above.
        degree: k if the tensor is a sum over samples of b^k times one sample's term.
        part: of a tensor that holds some of the samples alone: how it was made, as a number.
        factor: identifies the positive number that all entries have been multiplied by, which follows
            from several samples and takes no gradient; None: there is none.
        whole: all samples of the batch are in it.

    Attributes:
        held: it follows from some sample. partial: from some samples alone. joined: of several, or of
            their order, and no sum over samples.
    """

    __slots__ = (
        "_samples", "degree", "factor", "flags", "held", "joined", "mixed", "part", "partial", "sample",
        "whole",
    )  # fmt: skip

    def __init__(
        self, sample: Attribution, flags: int = 0, degree: int | None = None,
        part: int | None = None, factor: int | None = None, whole: bool = True,
    ) -> None:  # fmt: skip
        self.sample, self.flags, self.degree = sample, flags, degree
        self.part, self.factor, self.whole = part, factor, whole
        self.mixed = is_mixed(sample)
        self.held = sample is not None
        self.partial = self.held and not whole
        self.joined = (self.mixed and degree is None) or bool(flags & ORDER)
        self._samples: frozenset[int] | None = None

    def __repr__(self) -> str:
        if self.sample is None:
            return f"constant ({self.flags})"
        of = self.sample.unique().tolist()[:9]
        return f"{list(self.sample.shape)} of {of} ({self.flags}, {self.degree})"

    @property
    def samples(self) -> frozenset[int]:
        """The numbers of the samples that are in it."""
        found = self._samples
        if found is None:
            own = () if self.sample is None else self.sample.unique().tolist()
            found = self._samples = frozenset(k for k in own if 0 <= k < SEVERAL)
        return found


class Shadows:
    """Equal shadows are one object, so that what a rule has found can be remembered by them.

    One of these serves all tracers of a process. It forgets everything when it holds too much; whoever
    still has a shadow keeps it.
    """

    MOST = 1 << 15
    """Shadows, and remembered results."""
    LARGEST = 1 << 26
    """Entries of all shadows together."""

    def __init__(self) -> None:
        self._constants = {k: Shadow(None, k) for k in range(_CONSTANT + 1) if not k & ~_CONSTANT}
        self._found: dict[tuple, Shadow] = {}
        self._entries = 0
        self.remembered: dict[tuple, tuple[list[Shadow], list[Shadow]]] = {}
        """(operator, arguments, shapes, shadows) -> what it returned, and those shadows, kept."""
        self.constant = self.of_no_sample()

    def of_no_sample(self, flags: int = 0, factor: int | None = None) -> Shadow:
        """A constant."""
        flags &= _CONSTANT
        return self._constants[flags] if factor is None else Shadow(None, flags, factor=factor)

    def of(
        self, sample: Attribution, samples: int, flags: int = 0, degree: int | None = None,
        part: int | None = None, factor: int | None = None,
    ) -> Shadow:  # fmt: skip
        """The shadow of a tensor in a batch of so many samples."""
        if sample is None or not sample.numel():
            return self.of_no_sample(flags, factor)
        content = sample.numpy().tobytes()
        key = (content, tuple(sample.shape), samples, flags, degree, part, factor)
        found = self._found.get(key)
        if found is None:
            self._make_room(sample.numel())
            # A copy: it may lie in a memory's record, which is written into.
            found = self._made(sample.clone(), samples, flags, degree, part, factor)
            self._found[key] = found
        return found

    def _make_room(self, entries: int) -> None:
        self._entries += entries
        most = max(len(self._found), len(self.remembered))
        if self._entries > self.LARGEST or most > self.MOST:
            self._found, self.remembered, self._entries = {}, {}, entries

    def _made(
        self, sample: Tensor, samples: int, flags: int, degree: int | None, part: int | None,
        factor: int | None,
    ) -> Shadow:  # fmt: skip
        values = sample.unique()
        if values.numel() == 1 and int(values[0]) == NONE:
            return self.of_no_sample(flags, factor)
        own = int(((values >= 0) & (values < SEVERAL)).sum())
        whole = own == samples or bool((values >= SEVERAL).any())
        return Shadow(sample, flags, degree, part, factor, whole)


SHADOWS = Shadows()
"""Of this process."""
