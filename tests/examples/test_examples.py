"""What users copy: it stands alone, its data are split cleanly, the custom layer's rule is exact."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.processes import ROOT
from examples.custom_layer import Scale
from examples.data import digits, functions
from tests.oracle import DTYPES, check_exact, make_private, sample_loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 6)])
def test_the_custom_layer_is_exact(shape: tuple, dtype: torch.dtype) -> None:
    check_exact(
        nn.Sequential(nn.Linear(6, 6), Scale(6), nn.Tanh()), torch.randn(shape), dtype=dtype
    )


@pytest.mark.parametrize("shape", [(0, 6), (0, 4, 6)])
def test_the_custom_layer_takes_an_empty_batch(shape: tuple) -> None:
    _, private, optimizer, _ = make_private(nn.Sequential(nn.Linear(6, 6), Scale(6)))
    sample_loss(private(torch.randn(5, *shape[1:]))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    sample_loss(private(torch.randn(shape))).sum().backward()
    assert all(not p.summed_grad.any() for p in private.parameters())


def test_the_custom_layer_uses_its_rule() -> None:
    engine, private, _, _ = make_private(nn.Sequential(nn.Linear(6, 6), Scale(6)))
    sample_loss(private(torch.randn(5, 6))).mean().backward()
    assert [row.rule for row in engine.plan().rows] == ["linear", "scale"]


@pytest.mark.parametrize("data", [digits, functions])
def test_no_row_is_trained_and_tested_on(data) -> None:
    """Both splits hold every class, and no sample twice."""
    train_set, test_set, names = data()
    rows = [tuple(row.flatten().tolist()) for row in train_set.tensors[0]]
    tested = [tuple(row.flatten().tolist()) for row in test_set.tensors[0]]
    assert not set(rows) & set(tested)
    for split in (train_set, test_set):
        assert set(split.tensors[1].tolist()) == set(range(len(names)))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_can_be_copied(path: Path) -> None:
    """With its neighbors alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in found} & {"bench", "tests"}, found
