"""Backward passes over batches of which no data loader has told: which rows they hold is not known.

The fast mode refuses them under Poisson sampling. Opacus' modes take them, as Opacus does (batches of
the loader that was given to make_private, made by hand, kept), and without Poisson sampling every mode
does, for as long as the returned loader was never iterated over; what they release is accounted for
what it is.
"""

from __future__ import annotations

from fastclip.errors import say


class UnknownPasses:
    """Those of one private model.

    Formal guarantee: a row is once in a pass at most, and clipped at C in each, so that a release of n
    such passes, and of known draws beside them, is a Gaussian mechanism of q = 1 whose noise multiplier
    is divided by n (by n + 1). Nothing is amplified: a row may be in every one.
    """

    def __init__(self) -> None:
        self.gathered = 0
        """In the logical batch that is being gathered."""
        self.released = 0
        """In the one that was released last."""
        self._said = False

    def release(self) -> None:
        """A real step has used up the logical batch."""
        self.released, self.gathered = self.gathered, 0

    def say(self, rate: float | None) -> None:
        """Warn once why epsilon is larger than of draws, and name the way out.

        Args:
            rate: of Poisson draws; None: without them, where a step joins several such passes.
        """
        if self._said:
            return
        self._said = True
        why = (
            "a row may be in each of those that one step joins: these steps are accounted with the "
            "noise multiplier over their number"
            if rate is None
            else "their rows are no Poisson sample: these steps are accounted at a sampling rate of 1, "
            f"not of {rate:.4g}"
        )
        say(
            "steps are taken on batches that the data loader returned by make_private has not drawn "
            f"(nobody has iterated over it), so {why}, which makes epsilon far larger; iterate over the "
            "data loader that make_private returned, and use each of its batches once"
        )
