"""The clipped sums of a model that is spread over ranks: each rank keeps those of its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from fastclip.backward.sums import ClippedSums, changed
from fastclip.parallel.ranks import Ranks
from fastclip.parallel.shards import Bucket, Shards, buckets

_BUCKET = 25 * 2**20
"""Bytes of whole sums that are held, and sent, at once."""


class ShardedSums(ClippedSums):
    """As `ClippedSums`; what a pass has summed is added over all ranks before the pass ends.

    `p.summed_grad` of a parameter that the optimizer holds shows this rank's shard.

    Args:
        shards: of the model. parameters: the private ones, in the same order on all ranks.
    """

    def __init__(self, shards: Shards, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._shards = shards
        self._own = {p: shards.parameters[p] for p in parameters}
        self.buckets = buckets(reversed(self._own.values()), _BUCKET)
        self._parts: dict[Bucket, tuple[Tensor, int]] = {}

    def together(self, entries: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """All parameters, those first whose gradients were known first, whoever has entries."""
        for bucket in self.buckets:
            yield [each.whole for each in bucket.parameters]

    def exchange(self, parameters: list[nn.Parameter]) -> None:
        """The whole sums of these go to the ranks that hold the shards. All ranks come here."""
        bucket = next(b for b in self.buckets if b.parameters[0].whole is parameters[0])
        part = bucket.scattered([self._forget(p) for p in parameters])
        held, version = self._parts.get(bucket, (None, 0))
        if held is None:
            held = part
        elif held._version != version:
            raise changed("the shards")
        else:
            held.add_(part)
        self._parts[bucket] = held, held._version
        for each, view in zip(bucket.parameters, bucket.views(held), strict=True):
            each.own.summed_grad = view  # type: ignore[attr-defined]

    def _forget(self, parameter: nn.Parameter) -> Tensor | None:
        total, _ = self._held.pop(parameter, (None, 0))
        parameter.summed_grad = None  # type: ignore[attr-defined]
        return total

    def parts(self) -> list[Tensor]:
        """This rank's part of every bucket's sum, over all ranks that share its shards.

        Raises:
            StepError: they are not what was summed.
        """
        found = []
        for bucket in self.buckets:
            part, version = self._parts.get(bucket, (None, 0))
            if part is None:
                part = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device)
            elif part._version != version:
                raise changed("the shards")
            found.append(part)
        return found

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """As the base class."""
        super().clear(parameters)
        self._parts.clear()
        for each in self._own.values():
            each.own.summed_grad = None  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return bool(self._held or self._parts)


def sums_of(ranks: Ranks | None, parameters: Iterable[nn.Parameter]) -> ClippedSums:
    """What holds the sums of a model that these ranks train."""
    spread = None if ranks is None else ranks.shards
    return ClippedSums() if spread is None else ShardedSums(spread, parameters)
