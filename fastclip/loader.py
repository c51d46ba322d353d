"""An empty Poisson batch that the data loader replaces by one made-up row (rand_on_empty=True).

Such a row would differ between neighbouring data sets by up to 2C, so it must contribute nothing.
The batch itself carries the mark: its tensors are of a subclass that survives `.to(device)`,
pinning and worker processes, however far ahead batches are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from fastclip.logical_batch import LogicalBatch


class MadeUpRow(Tensor):
    """A tensor of a made-up batch; what is computed from it is one, too."""


def mark_made_up_rows(loader: DataLoader) -> None:
    """Make `loader` mark the batches that it makes up."""
    loader.collate_fn = _Marking(loader.collate_fn)


def unmark(inputs: Any) -> tuple[Any, bool]:
    """A model's inputs as ordinary tensors, and whether they were made up."""
    found = False

    def plain(leaf: Any) -> Any:
        nonlocal found
        if not isinstance(leaf, MadeUpRow):
            return leaf
        found = True
        return leaf.as_subclass(torch.Tensor)

    return tree_map(plain, inputs), found


class _Marking:
    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, batch: list[Any]) -> Any:
        collated = self.collate(batch)
        if batch:
            return collated

        def mark(leaf: Any) -> Any:
            return leaf.as_subclass(MadeUpRow) if isinstance(leaf, Tensor) else leaf

        return tree_map(mark, collated)


def watch_draws(loader: DataLoader, batch: LogicalBatch, poisson: bool) -> None:
    """Tell `batch` when an iteration begins and a logical batch is drawn.

    BatchMemoryManager splits what the loader's batch sampler draws, so the sampler is the one place
    that sees the borders of logical batches. It keeps its type: a subclass of it takes its place.
    """
    sampler = loader.batch_sampler
    if sampler is None:
        return
    kind: Any = type(sampler)
    plain = unwatched(sampler)

    def watched(self: Any) -> Iterator[list[int]]:
        batch.begin_drawing()
        for drawn in kind.__iter__(self):
            batch.draw()
            yield drawn

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (plain, self.__dict__)  # a copy reports to nobody

    methods = {"__iter__": watched, "__reduce_ex__": reduce, "unwatched": plain}
    try:
        sampler.__class__ = type(plain.__name__, (kind,), methods)
    except TypeError:  # a type that cannot be replaced: no borders are seen
        return
    batch.lockstep = poisson and loader.num_workers == 0


def unwatched(sampler: Any) -> type:
    """The type of a sampler, whoever is told of its draws."""
    return getattr(type(sampler), "unwatched", type(sampler))


def _rebuild(kind: Any, state: dict[str, Any]) -> Any:
    sampler = kind.__new__(kind)
    sampler.__dict__.update(state)
    return sampler
