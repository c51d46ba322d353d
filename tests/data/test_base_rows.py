"""Rows of nested subsets and joined data sets, held against reading them."""

from __future__ import annotations

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from fastclip.data.dataset import parts_of

N = 12
DATA = TensorDataset(torch.arange(float(N))[:, None])
OTHER = TensorDataset(-torch.arange(float(N))[:, None])
TRAIN, TEST = random_split(DATA, [8, 4], torch.Generator().manual_seed(0))


def test_whose_each_row_is() -> None:
    whole = ConcatDataset([DATA, Subset(OTHER, [5, -1, 2]), ConcatDataset([TEST, TRAIN])])
    nested = Subset(whole, torch.randperm(len(whole)).tolist())
    seen = 0
    for part in parts_of(nested):
        seen += len(part.places)
        for place, row in zip(part.places.tolist(), part.samples.tolist(), strict=True):
            assert nested[place][0].equal(part.dataset[row][0])
    assert seen == len(nested)
