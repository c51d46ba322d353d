"""automatic(gamma=0): every gradient but 0 contributes with length C, and never with more."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip import GradScaler, clipping, ops
from fastclip.clipping import Automatic, Clipping, PerLayer, Quantile
from fastclip.ops.planner import Planner
from fastclip.ops.units import UnitSamples
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.units import unit_samples

C = 0.7
WEIGHTS = torch.tensor([1.0, 1e-6, 0.0, 1e6, 1e-12], dtype=torch.float64)
"""Of the rows' losses: the third row has no gradient."""


class Text(nn.Module):
    """A table, a norm, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.inner = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.inner(self.norm(self.table(ids))).tanh())


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "rows": (mlp, rows),
    "sequences": (mlp, lambda: torch.randn(5, 4, 6, dtype=torch.float64)),
    "text": (Text, lambda: torch.randint(0, 9, (5, 4))),
    "images": (images, lambda: torch.randn(5, 2, 4, 4, dtype=torch.float64)),
}


def weighted(output: Tensor, weights: Tensor) -> Tensor:
    return weights * sample_loss(output)


def directions(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """g / |g| of every sample, 0 for 0."""
    size = norms(grads)
    scale = torch.where(size > 0, 1 / size, 0.0)
    return {name: torch.einsum("b,b...->b...", scale, g) for name, g in grads.items()}


def contributed(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], c: float | list[float] = C,
    strategy: Clipping | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The clipped sums of one pass of a copy of the model; `loss` is of the outputs."""
    model, strategy = copy.deepcopy(model), strategy or clipping.automatic(0)
    _, private, _, _ = make_private(model, max_grad_norm=c, clipping=strategy, loss_reduction="sum")
    loss(private(x)).backward()
    return summed(dict(model.named_parameters()))


def length(sums: dict[str, Tensor]) -> float:
    return torch.stack([s.double().norm() for s in sums.values()]).norm().item()


# Against one sample at a time


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_of_directions(name: str, reduction: str) -> None:
    build, inputs = MODELS[name]
    model, x = build().double(), inputs()
    grads = per_sample_gradients(model, (x,), lambda out, _: sample_loss(out))
    grads = {n: torch.einsum("b,b...->b...", WEIGHTS, g) for n, g in grads.items()}
    expected = {n: C * g.sum(0) for n, g in directions(grads).items()}
    twin = copy.deepcopy(model)
    _, private, optimizer, _ = make_private(
        twin, max_grad_norm=C, clipping="automatic", gamma=0, loss_reduction=reduction
    )
    losses = weighted(private(x), WEIGHTS)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    assert_sums(summed(dict(twin.named_parameters())), expected, 1e-9)
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-9
    assert optimizer.sensitivity == C


@pytest.mark.parametrize("name", MODELS)
def test_each_sample_alone(name: str) -> None:
    """Its direction with length C, whatever it is multiplied by; the one without a gradient, nothing."""
    build, inputs = MODELS[name]
    model, x = build().double(), inputs()
    expected = directions(per_sample_gradients(model, (x,), lambda out, _: sample_loss(out)))
    for i, weight in enumerate(WEIGHTS.tolist()):
        sums = contributed(model, x[i : i + 1], lambda out, w=weight: w * sample_loss(out).sum())
        if not weight:
            assert all(not s.any() for s in sums.values())
            continue
        assert abs(length(sums) - C) <= 1e-9 * C
        assert length(sums) <= C
        assert_sums(sums, {n: C * e[i] for n, e in expected.items()}, 1e-9)


def test_layers() -> None:
    """Each layer's own direction with its own length."""
    model, x, c = mlp(), rows(), [0.3, 1.0, 0.7, 0.2]
    grads = per_sample_gradients(model, x)
    expected = {
        name: own * directions({name: g})[name].sum(0)
        for (name, g), own in zip(grads.items(), c, strict=True)
    }
    strategy = Clipping(Automatic(0.0), PerLayer())
    assert_sums(contributed(model, x, lambda o: sample_loss(o).sum(), c, strategy), expected, 1e-9)


def test_units() -> None:
    """The direction of the mean of a unit's rows."""
    model, x, owner = mlp(), rows(5), [0, 1, 0, 2, 1]
    units: UnitSamples = unit_samples(owner, "mean")
    expected = directions(per_sample_gradients(model, x, units=units))
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, clipping=clipping.automatic(0))
    optimizer.grad_state.batch.next_units = units
    sample_loss(private(x)).mean().backward()
    sums = summed(dict(model.named_parameters()))
    assert_sums(sums, {n: C * e.sum(0) for n, e in expected.items()}, 1e-9)


# Bounded in the arithmetic in use


POWERS = range(-44, 31, 2)


@pytest.mark.parametrize("memory_factor", [0.0, 1e9], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_from_tiny_to_huge(name: str, memory_factor: float) -> None:
    """Length C while squares of the norm hold its digits, never more, never NaN."""
    build, inputs = MODELS[name]
    model, x = build().float(), inputs()[:1]
    x = x if x.dtype == torch.int64 else x.float()
    size = norms(per_sample_gradients(model, (x,), lambda out, _: sample_loss(out))).item()
    twin = copy.deepcopy(model)
    _, private, optimizer, _ = make_private(
        twin, max_grad_norm=C, clipping=clipping.automatic(0), loss_reduction="sum"
    )
    private.grad_state.planner = Planner(memory_factor)
    seen = {}
    for power in POWERS:
        optimizer.zero_grad()
        (sample_loss(private(x)).sum() * (10.0**power / size)).backward()
        seen[power] = length(summed(dict(twin.named_parameters())))
        assert seen[power] <= C
    for power in POWERS:
        if -8 <= power <= 16:
            assert seen[power] >= C * (1 - 2e-4), power  # a Gram's rounding bound takes up to 1e-4
    assert seen[30] == 0.0  # as for every strategy: its squares are infinite
    assert seen[-12] > 0.1 * C


class Products(nn.Module):
    """sum_i w_i x_i, whose gradient is x itself."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).sum(1)


def test_many_squares_that_underflow() -> None:
    """A million entries whose squares are 0 hide behind one, and the loss's scale multiplies them."""
    scale = 2.0**-24
    x = torch.full((2, 1 << 20), 2.6e-23 / scale)
    x[:, 0] = 1e-21 / scale
    assert ops.row_norm_sq(x * scale)[0].sqrt() < 0.1 * (x[0].double() * scale).norm()
    assert (x[0].double().norm()) > 4e-13  # which would contribute 4 C
    model = Products(1 << 20)
    _, private, _, _ = make_private(
        model, max_grad_norm=C, clipping=clipping.automatic(0), loss_reduction="sum"
    )
    losses = private(x) * torch.tensor([1.0, 0.0])
    GradScaler(init_scale=scale).scale(losses.sum()).backward()
    assert 0 < length({"": model.weight.summed_grad}) <= C


def test_types_that_are_mixed() -> None:
    """A float32 layer's squares underflow where a float64 layer's do not."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coarse, self.fine = Products(4), Products(4, torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.coarse(x * 1e-25).double() + self.fine(x.double() * 1e-29)

    model, x = Mixed(), torch.tensor([[1.0, 2.0, -1.0, 0.5]])
    sums = contributed(model, x, lambda out: out.sum())
    assert 0 < length(sums) <= C


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["model", "autocast"])
@pytest.mark.parametrize("name", ["rows", "sequences", "images"])
def test_half_precision(name: str, whole: bool, dtype: torch.dtype) -> None:
    """Norms and sums are float32's: scales beyond float16's 65,504 multiply no 16-bit number."""
    build, inputs = MODELS[name]
    model, x = build().to(dtype if whole else torch.float32), inputs()[:1]
    x = x.to(dtype if whole else torch.float32)
    for weight in (1.0, 2.0**-20, 0.0):
        with torch.autocast("cpu", dtype, enabled=not whole):
            sums = contributed(model, x, lambda out, w=weight: w * sample_loss(out.float()).sum())
        found = length(sums)
        assert found <= C
        assert found >= C * (1 - 2e-4) or not weight
        assert found == 0 or weight


# Norms to scales, without an engine


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scales(dtype: torch.dtype, normalized: bool) -> None:
    """0 for 0, for inf and for NaN, finite for what underflows, and C / n for the rest."""
    strategy = Clipping(Automatic(0.0, normalized))
    most = 1.0 if normalized else C
    n = torch.tensor([0.0, 5e-324, 1e-45, 1e-30, 1e-9, 1.0, 1e9, math.inf, math.nan], dtype=dtype)
    scales, _ = ops.clip_scale(n.square()[None], strategy, strategy.initial(C, 1))
    assert torch.isfinite(scales).all()
    assert scales[[0, -2, -1]].tolist() == [0.0, 0.0, 0.0]
    parts = (scales.double() * n.double()).nan_to_num(0.0, posinf=0.0)
    assert (parts <= most).all()
    assert torch.allclose(parts[4:7], torch.full_like(parts[4:7], most), rtol=1e-5)
    wide = 1e-11 if dtype == torch.float64 else 1.0
    assert abs(parts[3].item() - most) <= wide * most
    own, _ = ops.clip_scale(torch.zeros(2, 3, dtype=dtype), strategy, strategy.initial(C, 1))
    assert own.tolist() == [0.0, 0.0, 0.0]


def test_raised_by_what_is_lost() -> None:
    """A norm of 0 stays; another is never below what may have underflown, of each type's own."""
    norm_sq = torch.tensor([[0.0, 1e-300, 1.0], [0.0, 0.0, math.nan]], dtype=torch.float64)
    raised = ops.with_lost(norm_sq, (1 << 20, 1 << 20), (torch.float64, torch.float32))
    assert raised[:, 0].tolist() == [0.0, 0.0]
    assert raised[0, 1] == pytest.approx(1e-300, rel=0.1)
    assert raised[1, 1] >= 2**20 * torch.finfo(torch.float32).tiny
    assert raised[0, 2] == 1.0
    assert raised[1, 2].isnan()


def test_thresholds_that_move_still_bound() -> None:
    """C follows noisy counts; contributions have the length that it had."""
    strategy = Clipping(Automatic(0.0), Quantile("above", lower=0.1))
    model, x = mlp(), rows(6)
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, clipping=strategy)
    for _ in range(3):
        expected = directions(per_sample_gradients(_plain(model), x))
        optimizer.zero_grad()
        sample_loss(private(x)).mean().backward()
        c = optimizer.sensitivity.item()
        sums = summed(dict(model.named_parameters()))
        assert_sums(sums, {n: c * e.sum(0) for n, e in expected.items()}, 1e-9)
        optimizer.step()
    assert c != C


def _plain(model: nn.Module) -> nn.Module:
    twin = mlp()
    twin.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    return twin
