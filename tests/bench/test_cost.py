"""What a step costs, counted: the counter itself, and limits that a heavier step would pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import cost
from bench.cost import Cost, compare, held_now, most_held, step_cost
from bench.workloads import CLASSES, WORKLOADS, Workload
from fastclip.ops import half_gram, per_sample_gradients
from fastclip.ops.dispatch import LOOPS, has_loops, use_backend
from fastclip.ops.grams import gram_dots

FLOAT = 4  # bytes


def counted(function: Callable[[], Any]) -> dict[str, int]:
    return dict(step_cost(function).total)


def test_a_product() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    size = FLOAT * (3 * 5 + 5 * 7 + 3 * 7)
    assert counted(lambda: a @ b) == {
        "flops": 2 * 3 * 5 * 7, "bytes": size, "calls": 1, "allocations": 1,
    }  # fmt: skip


def test_views_cost_nothing_and_an_expanded_tensor_once() -> None:
    x = torch.randn(4, 1)
    assert counted(lambda: x.view(2, 2).t()[:1]) == {}
    assert counted(lambda: x.expand(4, 100).neg())["bytes"] == FLOAT * (4 + 400)


def test_in_place_and_empty() -> None:
    x = torch.randn(10)
    assert counted(lambda: x.mul_(2)) == {
        "flops": 0, "bytes": 2 * 10 * FLOAT, "calls": 1, "allocations": 0,
    }  # fmt: skip
    assert counted(lambda: torch.empty(10))["bytes"] == 0


def test_backward_passes_are_counted_and_places_are_told() -> None:
    model = nn.Linear(3, 2)
    with Cost() as seen:
        model(torch.randn(4, 3)).sum().backward()
    assert seen.total["flops"] == 2 * 2 * 4 * 3 * 2  # out, and the weight's gradient
    assert set(seen.places) == {""}
    assert sum(place["bytes"] for place in seen.places.values()) == seen.total["bytes"]


def test_the_most_that_is_held_at_once() -> None:
    size = 1000 * FLOAT
    assert most_held(lambda: torch.ones(1000) + torch.ones(1000).neg(), held_now()) == 3 * size


def test_what_others_let_go_meanwhile_is_not_subtracted() -> None:
    left = [torch.ones(1000)]
    built = held_now()

    def step() -> None:
        left.clear()
        torch.ones(500)

    assert most_held(step, built) == 500 * FLOAT


@pytest.mark.parametrize(("lets_go", "most"), [(True, 1), (False, 2)])
def test_what_a_step_leaves_is_held_in_the_next(lets_go: bool, most: int) -> None:
    left: list[torch.Tensor] = []

    def step() -> None:
        if lets_go:
            left.clear()
        left[:] = [torch.ones(1000)]

    built = held_now()
    assert most_held(step, built) == most * 1000 * FLOAT


@pytest.mark.skipif(not has_loops("wide_gram"), reason="fastclip._C has no products here")
def test_loops_of_the_extension() -> None:
    """They are one call each, with their operands' and results' bytes."""
    b, t, d, p = 4, 3, 5, 7
    a, g = torch.randn(b, t, d), torch.randn(b, t, p)
    gram = half_gram(a)
    found = step_cost(lambda: (per_sample_gradients(a, g), half_gram(a), gram_dots(gram, g)))
    places = found.places
    assert places["linear.per_sample_gradients"]["flops"] == 2 * b * t * d * p
    assert places["grams.half_gram"]["flops"] == b * t * (t + 1) * d
    sizes = (b * t * (d + p) + b * p * d) * FLOAT, (b * t * d + b * t * t) * FLOAT
    assert places["linear.per_sample_gradients"]["bytes"] >= sizes[0]
    assert places["grams.half_gram"]["bytes"] == sizes[1]
    loops = LOOPS.keys() - {"draw_normals", "secure_normals"}  # which are operators of torch
    assert set(cost.LOOP_FLOPS) == loops | {"layer_norm_backward", "group_norm_backward"}
    assert found.total["flops"] == 2 * b * t * d * p + b * t * (t + 1) * (d + p)


# At 8 rows a step, as measured and a little more: FLOPs, bytes, calls, memory held at once. What a
# convolution of torch copies inside itself is not counted, what the product in its place copies is.
LIMITS = {
    "reference": {
        "resnet18": (1.80, 1.64, 2.95, 1.12),
        "bert": (1.16, 1.41, 2.30, 1.05),
        "vit": (1.07, 1.73, 2.55, 1.10),
    },
    "auto": {
        "resnet18": (1.04, 1.32, 2.47, 1.12),
        "bert": (1.09, 1.28, 2.10, 1.05),
        "vit": (1.02, 1.40, 2.10, 1.07),
    },
}


@pytest.mark.extras
@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", LIMITS)
@pytest.mark.parametrize("workload", LIMITS["auto"])
def test_no_step_gets_heavier(workload: str, backend: str) -> None:
    """Ratios to the same step without privacy. Lower the limits when a step gets lighter."""
    if backend == "auto" and not has_loops("wide_gram"):
        pytest.skip("fastclip._C has no products here")
    with use_backend(backend):
        row = compare(workload, 8)
    found = tuple(row["ratio"][kind] for kind in ("flops", "bytes", "calls", "held"))
    assert all(map(float.__le__, found, LIMITS[backend][workload])), (found, row["places"])


@pytest.mark.extras
def test_a_short_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    small = Workload("small", lambda: nn.Linear(6, CLASSES), lambda n: torch.randn(n, 6))
    monkeypatch.setitem(WORKLOADS, "bert", small)
    cost.main(["--workloads", "bert", "--where", "--out", str(tmp_path / "cost.json")])
    (row,) = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert row["batch_size"] == small.batch_size
    assert row["non_private"]["flops"] > 0
    assert row["non_private"]["held"] > 0
    assert "noise_finalize" in capsys.readouterr().out
