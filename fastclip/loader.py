"""An empty Poisson batch that the data loader replaces by one made-up row (rand_on_empty=True).

Such a row would differ between neighbouring data sets by up to 2C, so it must contribute nothing.
The batch itself carries the mark: its tensors are of a subclass that survives `.to(device)`,
pinning and worker processes, however far ahead batches are drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader


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
