"""Where numbers of a tensor lie: a sparse one has no memory of its own, but is made of dense ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip._torch import coo_indices, coo_values


def parts_of(x: Tensor) -> list[Tensor]:
    """The dense tensors that hold the numbers of `x`; one that is dense holds its own."""
    if x.layout == torch.strided:
        return [x]
    with torch.no_grad():
        if x.layout == torch.sparse_coo:
            return [coo_indices(x), coo_values(x)]
        if x.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [x.crow_indices(), x.col_indices(), x.values()]
        if x.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x]
