"""Ranks that go through one model together: each draw is cut into as many physical batches on all.

Where parameters are spread over ranks, every forward and backward pass gathers them from all. A rank
that has drawn fewer rows than another one, and cuts them into fewer parts (BatchMemoryManager), goes on
with parts without rows, which contribute nothing.
"""

from __future__ import annotations

from typing import Any

from opacus.utils.batch_memory_manager import BatchSplittingSampler

from fastclip.data.iteration import samplers_around
from fastclip.errors import ArgumentError
from fastclip.parallel.ranks import Ranks


class Filling:
    """How many parts without rows are still to come after those of the draw in hand.

    Args:
        placeholders: parts without rows are handed out as a placeholder row.
    """

    def __init__(self, ranks: Ranks, placeholders: bool) -> None:
        self._ranks, self._placeholders = ranks, placeholders
        self.left = 0

    def drawn(self, rows: int, who: Any) -> None:
        """This rank has drawn so many rows. All ranks come here.

        Args:
            who: the iterator of the DataLoader that draws.
        """
        cuts = [
            s.max_batch_size for s in samplers_around(who) if isinstance(s, BatchSplittingSampler)
        ]
        parts = max(1, -(-rows // min(cuts, default=max(rows, 1))))
        most = self._ranks.most(parts)
        self.left = most - parts
        if most > 1 and self._placeholders:
            raise ArgumentError(
                "BatchMemoryManager on a model that is spread over ranks (fully_shard) hands out "
                "batches without rows, so that all ranks go through the model equally often; omit "
                "rand_on_empty"
            )


def filling_of(ranks: Ranks | None, placeholders: bool) -> Filling | None:
    """What fills up the draws of these ranks, where they need it."""
    return None if ranks is None or ranks.shards is None else Filling(ranks, placeholders)
