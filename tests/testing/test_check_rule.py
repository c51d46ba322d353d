"""check_rule passes the rules that come with the engine, and finds every fault put into one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from examples.custom_layer import Scale
from fastclip.errors import CheckError, FastclipError
from fastclip.testing import RuleCheck, check_rule
from tests.testing.faulty import FAULTS, Affine

WIDE = {torch.float64: 1e-9}
LAYERS = {
    "linear-positions": (lambda: nn.Linear(6, 3), (4, 5, 6)),
    "conv": (lambda: nn.Conv1d(3, 4, 2), (4, 3, 5)),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=1), None),
    "layer-norm": (lambda: nn.LayerNorm(6), (4, 2, 6)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (4, 4, 5)),
    "affine": (lambda: Affine(6), (4, 5, 6)),
    "affine-no-bias": (lambda: Affine(6, bias=False), (4, 6)),
    "scale": (lambda: Scale(6), (4, 5, 6)),
}


def run(layer: nn.Module, shape: tuple | None, **kwargs: Any) -> RuleCheck:
    torch.manual_seed(0)
    x = torch.randint(0, 7, (4, 3)) if shape is None else torch.randn(shape)
    return check_rule(layer, x, **kwargs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layer", LAYERS)
def test_exact_rules(layer: str) -> None:
    make, shape = LAYERS[layer]
    found = run(make(), shape)
    found.raise_if_wrong()
    assert {row.dtype for row in found.rows} == {torch.float64, torch.float32}
    wide = [row for row in found.rows if row.dtype == torch.float64]
    assert all(error is None or error < 1e-10 for row in wide for error in row.errors.values())
    cases = {row.case for row in wide}
    assert {"all samples", "0 samples", "1 samples", "3 samples", "called twice"} <= cases
    assert ("without bias" in cases) == (layer in ("linear-positions", "conv", "affine", "layer-norm",
                                                   "group-norm"))  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_rules(fault: str) -> None:
    found = run(Affine(6, fault), (4, 5, 6), tolerances=WIDE)
    assert not found.ok
    with pytest.raises(CheckError, match="wrong:"):
        found.raise_if_wrong()


def test_what_is_named() -> None:
    """Faults that show in one way of calling alone are found there and nowhere else."""
    expected = {
        "stride": ({"input not contiguous"}, {"norms", "clipped sums"}),
        "shared": ({"called twice"}, {"norms", "clipped sums"}),
        "empty batch": ({"0 samples"}, set()),
    }
    for fault, (cases, what) in expected.items():
        found = run(Affine(6, fault), (4, 5, 6), tolerances=WIDE)
        wrong = [
            row
            for row in found.rows
            if row.refused or any(error is not None and error > 1e-4 for error in row.errors.values())
        ]  # fmt: skip
        assert {row.case for row in wrong} == cases, fault
        named = {
            name for row in wrong for name, e in row.errors.items() if e is not None and e > 1e-4
        }
        assert named == what, fault


def test_samples_along_the_second_axis() -> None:
    run(nn.Linear(6, 3), (2, 5, 6), batch_first=False, tolerances=WIDE).raise_if_wrong()
    run(Affine(6), (2, 5, 6), batch_first=False, tolerances=WIDE).raise_if_wrong()


def test_the_table() -> None:
    text = str(run(nn.Linear(6, 3), (4, 6), tolerances=WIDE))
    assert text.startswith("rule linear\n")
    assert "input not contiguous" in text
    assert text.endswith("ok")
    text = str(run(Affine(6, "sum only"), (4, 6), tolerances=WIDE))
    assert "float32" not in text
    (finding,) = run(Affine(6, "empty batch"), (4, 5, 6), tolerances=WIDE).findings
    assert finding.startswith("1 of 14 cases (0 samples, torch.float64): refused: ")
    (finding,) = run(Affine(6, "sum only"), (4, 6), tolerances=WIDE).findings
    assert finding == (
        "11 of 14 cases (all samples, torch.float64; 1 samples, torch.float64; ...): "
        "clipped sums off by up to 1.0e-01"
    )


def test_nothing_is_changed() -> None:
    layer = nn.Linear(6, 3).eval()
    layer.bias.requires_grad_(False)
    x = torch.randn(4, 6, requires_grad=True)
    layer(x).sum().backward()
    before = copy.deepcopy(layer.state_dict()), x.grad.clone(), layer.weight.grad.clone()
    state = torch.get_rng_state()
    check_rule(layer, x, tolerances=WIDE).raise_if_wrong()
    assert all(torch.equal(v, before[0][n]) for n, v in layer.state_dict().items())
    assert torch.equal(x.grad, before[1])
    assert torch.equal(layer.weight.grad, before[2])
    assert not layer.training
    assert [p.requires_grad for p in layer.parameters()] == [True, False]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (nn.Linear(6, 3), torch.randn(2, 6), "at least 3 samples"),
        (nn.Linear(6, 3), "text", "a tensor, got str"),
        (nn.PReLU(), torch.randn(4, 6), r"none fits PReLU .*errors\.html#layer-rule"),
    ],
)
def test_arguments(layer: nn.Module, x: Any, message: str) -> None:
    with pytest.raises(FastclipError, match=message):
        check_rule(layer, x)
