"""The clipped sums of a model that is spread over ranks: each rank keeps those of its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.backward import guards
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.sums import ClippedSums, ShownSum, changed
from fastclip.parallel.shards import Bucket, Shards, buckets

_BUCKET = 25 * 2**20
"""Bytes of whole sums that are held, and sent, at once."""


class ShardedSums(ClippedSums):
    """As `ClippedSums`; what a pass has summed is added over all ranks before the pass ends.

    `p.summed_grad` of a parameter that the optimizer holds shows this rank's shard.

    Args:
        shards: of the model. names: the private parameters, in the same order on all ranks.
    """

    def __init__(self, shards: Shards, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._shards = shards
        held = [shards.parameters[p] for p in names]
        self.names: dict[Any, str] = {each.own: names[each.whole] for each in held}
        """Of the parameters as the optimizer holds them."""
        self.buckets = buckets(reversed(held), _BUCKET)
        self.passes = 0
        """That have been summed: a rank that has forgotten some has the sums of other rows."""
        self._parts: dict[Bucket, tuple[Tensor, int]] = {}
        self._shown: dict[Bucket, list[Tensor]] = {}

    def together(self, entries: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """All parameters, those first whose gradients were known first, whoever has entries."""
        for bucket in self.buckets:
            yield [each.whole for each in bucket.parameters]

    def exchange(self, parameters: list[nn.Parameter]) -> None:
        """The whole sums of these go to the ranks that hold the shards. All ranks come here.

        Raises:
            UnsupportedLayerError: somebody waits for gradients of these by a hook.
            StepError: the sums so far were changed, or another rank is gone.
        """
        bucket = next(b for b in self.buckets if b.parameters[0].whole is parameters[0])
        guards.check_hooks(self.names, _owns(bucket))
        self.passes += bucket is self.buckets[0]
        part = bucket.scattered([self._forget(p) for p in parameters])
        held = self._part(bucket)
        held = part if held is None else held.add_(part)
        self._parts[bucket] = held, held._version
        self._shown[bucket] = [view.as_subclass(ShownSum) for view in bucket.views(held)]
        for each, view in zip(bucket.parameters, self._shown[bucket], strict=True):
            each.own.summed_grad = view  # type: ignore[attr-defined]

    def _part(self, bucket: Bucket) -> Tensor | None:
        held, version = self._parts.get(bucket, (None, 0))
        owns = _owns(bucket)
        for own, view in zip(owns, self._shown.get(bucket, [None] * len(owns)), strict=True):
            if getattr(own, "summed_grad", None) is not view:
                raise changed(self.names[own])
        if held is not None and held._version != version:
            raise changed(" or ".join(self.names[own] for own in owns))
        return held

    def _forget(self, parameter: nn.Parameter) -> Tensor | None:
        total = self.take(parameter)
        self._held.pop(id(parameter), None)
        parameter.summed_grad = None  # type: ignore[attr-defined]
        return total

    def parts(self) -> list[Tensor]:
        """This rank's part of every bucket's sum, over all ranks that share its shards.

        Raises:
            StepError: they are not what was summed.
        """
        self._shards.check_held()
        found = []
        for bucket in self.buckets:
            part = self._part(bucket)
            if part is None:
                part = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device)
            found.append(part)
        return found

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """As the base class."""
        super().clear(parameters)
        self.passes = 0
        self._parts.clear()
        self._shown.clear()
        for own in self.names:
            own.summed_grad = None  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return bool(self._held or self._parts)


def follow_shards(keeper: BookKeeper) -> None:
    """The book-keeper of a model that has just been intercepted knows where its parameters are."""
    ranks, names = keeper.clipping.ranks, keeper.names
    if ranks is not None and ranks.shards is not None:
        keeper.sums = sums = ShardedSums(ranks.shards, names)
        keeper.calls.shards = ranks.shards
        guards.check_hooks(sums.names, sums.names)
        keeper.guard.arm({**names, **sums.names}, keeper)


def _owns(bucket: Bucket) -> list[Any]:
    return [each.own for each in bucket.parameters]
