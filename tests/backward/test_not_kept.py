"""Per-sample gradients of the fast mode: none, which is an error that says what to read."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastclip
from fastclip.errors import GradSampleError
from tests.oracle import backward, make_private
from tests.refusal import refused

READS: list[Callable[[Tensor], object]] = [
    lambda g: g.reshape(4, -1).norm(dim=1),
    lambda g: torch.stack([g]).sum(),
    lambda g: torch.linalg.vector_norm(g),
    lambda g: g**2,
    lambda g: 2 * g,
    lambda g: g[0],
    lambda g: len(g),
    lambda g: g.shape,
    lambda g: sum(row.norm() for row in g),
]


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_them_is_told(read: Callable[[Tensor], object]) -> None:
    model = nn.Linear(6, 3)
    _, private, optimizer, _ = make_private(model)
    backward(private, torch.randn(4, 6))
    with refused("per_sample_norms", GradSampleError):
        read(model.weight.grad_sample)
    optimizer.step()


def test_asking_whether_there_are_any_is_no_error() -> None:
    model = nn.Linear(6, 3)
    _, private, optimizer, _ = make_private(model)
    assert model.weight.grad_sample is None
    backward(private, torch.randn(4, 6))
    kept = model.weight.grad_sample
    optimizer.zero_grad()
    assert model.weight.grad_sample is None
    assert not kept
    assert not isinstance(kept, Tensor)
    assert not hasattr(kept, "shape")
    assert "not kept" in repr(kept)


def test_copies_and_files_hold_nothing_of_ours() -> None:
    """A file of the model needs no fastclip to be read."""
    model = nn.Linear(6, 3)
    private = make_private(model)[1]
    backward(private, torch.randn(4, 6))
    assert copy.deepcopy(private)._module.weight is not model.weight
    assert not pickle.loads(pickle.dumps(model.weight.grad_sample))
    file = io.BytesIO()
    torch.save(fastclip.unwrap(private).state_dict(), file)
    assert b"fastclip" not in file.getvalue()
