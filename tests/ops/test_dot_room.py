"""How far sums of equal products are off, added up one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastclip.ops.grams import dot_room


@pytest.mark.parametrize("n", [64, 768, 3072, 16384])
def test_sums_that_no_library_is_known_to_cut(n: int) -> None:
    """Of a GPU in float32, and of float64 anywhere: nothing is measured there."""
    terms = np.linspace(1, 2, 200, dtype=np.float32)
    sums = np.zeros_like(terms)
    for _ in range(n):
        sums += terms
    exact = n * terms.astype(np.float64)
    lost = ((exact - sums) / exact / 2**-24).max()
    gpu = dot_room(n, 0, torch.empty(0, device="meta"))
    assert lost <= gpu == dot_room(n, 0, torch.empty(0, dtype=torch.float64))
    assert dot_room(n, 0, torch.empty(0)) == min(n / 4, 96 + n / 32)
    if n > 1000:  # so that the room of a CPU's float32 would not do
        assert lost > dot_room(n, 0, torch.empty(0))
