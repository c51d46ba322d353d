"""Layers without a rule whose output depends on more than their argument and their parameters.

Parameters are followed wherever they are used: what comes by another way than an argument (an attribute,
a closure, a list) counts as in ordinary training, or is refused where it couples the samples.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastclip.errors import FastclipError, ParameterLeakError
from fastclip.samples import runs
from tests.apart import check_exact_as_it_is, own_gradients, step
from tests.oracle import (
    DTYPES,
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    sample_loss,
    summed,
)
from tests.refusal import refused

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Layer(nn.Module):
    """x * gamma plus whatever `extra` gives, under a branch gate of its own."""

    def __init__(self, gate: float = 1.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(6))
        self.gate = nn.Parameter(torch.full((6,), gate))
        self.extra: Callable = lambda x: 0.0
        self.held: list = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma + self.gate * self.extra(x)


class Parent(nn.Module):
    """Hands something to its layer by a way that no argument shows."""

    def __init__(self, way: str, gate: float) -> None:
        super().__init__()
        self.a, self.f, self.b = nn.Linear(6, 6), Layer(gate), nn.Linear(6, 6)
        self.way = way
        if way == "list":
            self.f.held = [self.b]
            self.f.extra = lambda x: self.f.held[0](x)
        if way == "closure":
            weight = self.b.weight
            self.f.extra = lambda x: x * weight.sum(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.way == "attribute":
            scale = torch.sigmoid(self.b.weight).mean()
            self.f.extra = lambda x: x * scale
        if self.way == "from-a-layer":
            shift = self.b(x)
            self.f.extra = lambda x: shift
        if self.way == "rows":
            mask = torch.tanh(x)  # no gradient: raw data
            self.f.extra = lambda x: x * mask
        if self.way == "rows-detached":
            mask = self.b(x).detach()
            self.f.extra = lambda x: x * mask
        return self.f(h)


class Frozen(Parent):
    """The same behind a frozen gate, so that no other gradient tells."""

    def __init__(self, way: str, gate: float) -> None:
        super().__init__(way, gate)
        self.f.gate.requires_grad_(False)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("gate", [1.0, 1e-6, 0.0])
@pytest.mark.parametrize("make", [Parent, Frozen])
@pytest.mark.parametrize(
    "way", ["attribute", "list", "closure", "from-a-layer", "rows", "rows-detached"]
)
def test_by_another_way(way: str, make: type, gate: float, b: int) -> None:
    """However little of it reaches the output."""
    torch.manual_seed(1)
    check_exact_as_it_is(make(way, gate), torch.randn(b, 6))


def test_a_tensor_of_ones_own_that_needs_a_gradient() -> None:
    """It is none of the model's parameters, so its gradient would be clipped by nobody."""
    model = Parent("none", 1.0)
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    model.f.extra = lambda x: x * (scale * 2)
    with refused("outside the private model is trained", ParameterLeakError):
        check_exact_as_it_is(model, torch.randn(3, 6))


@pytest.mark.parametrize("followed", [False, True])
def test_rows_that_come_later(followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows equal at first, and a gate of 0: nothing shows but that the tensor is another. Where
    operators are followed, that is a new way, which cannot be tried on fewer rows.
    """
    if followed and not runs.FOLLOWS:
        pytest.skip("fastclip._path is not built")
    monkeypatch.setattr(runs, "FOLLOWS", followed)
    model = Parent("none", 0.0).double()
    mask = torch.ones(4, 6).double()
    held = [torch.ones(()).double()]
    model.f.extra = lambda x: x * held[0]
    x = torch.randn(4, 6).double()

    def one_by_one(m: nn.Module, row: torch.Tensor) -> torch.Tensor:
        i = next(i for i in range(4) if torch.equal(row[0], x[i]))
        held[0] = mask[i : i + 1]
        return sample_loss(m(row))

    equal = own_gradients(model, x, one_by_one)
    mask[2] = 7.0
    different = own_gradients(model, x, one_by_one)

    held[0] = torch.ones(()).double()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, lr=0.0)
    for then, grads in ((None, equal), (torch.ones_like(mask), equal), (mask, different)):
        held[0] = held[0] if then is None else then
        if followed and then is not None:
            with refused("The batch axis of the model's inputs is unknown"):
                step(private, optimizer, x)
            return
        step(private, optimizer, x)
        torch.testing.assert_close(optimizer.per_sample_norms, norms(grads))
        optimizer.zero_grad()
        backward(private, x)
        assert_sums(summed(params), clipped_sum(grads, 1.0), 1e-10)


class Constants(nn.Module):
    """What many layers hold: tables as attributes, buffers, globals, constants made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(5, 6))
        self.table = torch.linspace(0, 1, 30).view(5, 6)
        self.register_buffer("shift", torch.arange(6.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x * self.gamma
        positions = torch.arange(x.shape[1], device=x.device)[:, None] / 7
        offset = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).to(x)
        return self.last + self.table.to(x) + self.shift + positions * offset + GLOBAL.to(x)


GLOBAL = torch.linspace(-1, 1, 6)


@dtypes
@pytest.mark.parametrize("b", [1, 4, 5])
def test_constants_are_no_harm(b: int, dtype: torch.dtype) -> None:
    C = 1.0 if b == 1 else None
    check_exact(nn.Sequential(nn.Linear(6, 6), Constants()), torch.randn(b, 5, 6), dtype=dtype, C=C)


def test_nothing_of_a_transform_is_left_behind() -> None:
    """Attributes are those of one run of forward, and can be read."""
    model = nn.Sequential(nn.Linear(6, 6), Constants())
    private = make_private(model)[1]
    x = torch.randn(4, 5, 6)
    backward(private, x)
    before = model[1].calls
    private.zero_grad()
    out = private(x)
    assert model[1].calls == before + 1
    assert torch.equal(model[1].last.detach(), model[0](x).detach() * model[1].gamma.detach())
    sample_loss(out).mean().backward()
    assert model[1].calls == before + 1
    assert model[1].last.shape == x.shape


class SharedInputs(nn.Module):
    """Sets an auxiliary loss aside, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = (x * self.gamma).square().mean(1)
        return x + self.gamma


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Linear(6, 6)])
@pytest.mark.parametrize("detached", [True, False])
def test_a_loss_set_aside(first: Callable, detached: bool) -> None:
    """Beside a loss of the output, it counts for each sample."""
    layer = SharedInputs()

    def losses(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        own = sample_loss(m(x))
        return own + (layer.aside.detach() if detached else layer.aside)

    check_exact_as_it_is(nn.Sequential(first(), layer), torch.randn(4, 6), losses)


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Linear(6, 6)])
def test_nothing_but_a_loss_set_aside(first: Callable) -> None:
    layer = SharedInputs()
    private = make_private(nn.Sequential(first(), layer))[1]
    private(torch.randn(4, 6))
    with refused("without passing through the output"):
        layer.aside.mean().backward()


# Samples that depend on each other inside


class Coupled(nn.Module):
    """A branch over the batch behind a gate."""

    def __init__(self, branch: Callable, gate: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(6))
        self.gate = nn.Parameter(torch.full((6,), gate))
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma + self.gate * self.branch(x * self.gamma)


def capacity(x: torch.Tensor) -> torch.Tensor:
    """Every row of a small batch is kept; of larger ones, the first three."""
    kept = torch.arange(len(x), device=x.device) < 3
    return x * kept[:, None]


BRANCHES = {
    "centred": lambda x: x - x.mean(0),
    "normalized": lambda x: F.batch_norm(x, None, None, training=True),
    "sorted": lambda x: x.sort(0).values,
    "rolled": lambda x: x.roll(1, 0),
    "weak": lambda x: x + 0.01 * x.mean(0),
    "largest": lambda x: x / x.abs().max(),
}


@dtypes
@pytest.mark.parametrize("gate", [1.0, 1e-6, 0.0])
@pytest.mark.parametrize("branch", BRANCHES)
def test_coupled_inside(branch: str, gate: float, dtype: torch.dtype) -> None:
    """The gate hides it from the output, at first."""
    model = nn.Sequential(Coupled(BRANCHES[branch], gate)).to(dtype)
    with pytest.raises(FastclipError):
        backward(make_private(model)[1], torch.randn(4, 6, dtype=dtype))


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_coupled_where_rows_are_many(gate: float) -> None:
    """Looked at again when more come: the first rows of the batch are treated otherwise."""
    model = nn.Sequential(Coupled(capacity, gate))
    private = make_private(model)[1]
    with refused("depends on (its position in the batch|the number of samples|another sample)"):
        backward(private, torch.randn(2, 6))
        private.zero_grad()
        backward(private, torch.randn(5, 6))


def test_coupled_where_rows_differ() -> None:
    model = nn.Sequential(Coupled(lambda x: x - x.mean(0), 0.0))
    private = make_private(model)[1]
    with refused("depends on another"):
        backward(private, torch.zeros(4, 6))
        private.zero_grad()
        backward(private, torch.randn(4, 6))


def test_coupled_in_a_later_branch() -> None:
    """A branch that replaces another, at another line."""
    model = nn.Sequential(Coupled(lambda x: x, 1.0))
    private = make_private(model)[1]
    x = torch.randn(4, 6)
    backward(private, x)
    private.zero_grad()
    model[0].branch = lambda x: x - x.mean(0)
    with refused("depends on another"):
        backward(private, x)


@dtypes
def test_deep_and_apart(dtype: torch.dtype) -> None:
    """Rounding differs between a batch and its rows; that is no reason to refuse."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(32))
            self.layers = nn.Sequential(
                *[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(8)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x * self.own).softmax(-1)

    check_exact(
        Deep(), torch.randn(6, 9, 32) * 30, dtype=dtype, tol=1e-9 if dtype.itemsize > 4 else 1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_apart_in_half_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Constants()).to(dtype)
    backward(make_private(model)[1], torch.randn(4, 5, 6, dtype=dtype))
    coupled = nn.Sequential(Coupled(BRANCHES["centred"], 1.0)).to(dtype)
    private = make_private(coupled)[1]
    with pytest.raises(FastclipError):
        backward(private, torch.randn(4, 6, dtype=dtype))


class ByNumbers(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) * self.gamma


class ByItself(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.mul_(self.gamma).add_(self.gate)) * self.gamma


class ByEntry(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x += self.gate
        x[:, 2] = self.gamma[2] * x[:, 1].clone()
        x[:, 4] = self.gamma[4]
        x[:, :2] *= self.gamma[1]
        return torch.tanh(x)


@pytest.mark.parametrize("layer", [ByNumbers, ByItself, ByEntry])
def test_changed_in_place(layer: type) -> None:
    """The layer's input, or what was computed from it."""
    check_exact_as_it_is(nn.Sequential(nn.Linear(6, 6), layer()), torch.randn(4, 6))


def test_a_buffer_that_is_replaced() -> None:
    class Running(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            return (x - self.mean) * self.gamma

    with refused("Buffers"):
        backward(make_private(nn.Sequential(Running()))[1], torch.randn(4, 6))


def test_what_has_been_seen_is_not_saved(tmp_path) -> None:
    """A private model can be pickled as a whole."""
    model = nn.Sequential(nn.Linear(6, 6), Coupled(torch.tanh, 1.0))
    private = make_private(model)[1]
    backward(private, torch.randn(4, 6))
    rule = model[1]._fastclip.rule
    again = pickle.loads(pickle.dumps(rule))
    assert type(again) is type(rule)


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_under_autocast(gate: float) -> None:
    """Products in bfloat16, results in float32: their rounding is no dependence."""

    class Product(Coupled):
        def __init__(self, branch: Callable) -> None:
            super().__init__(branch, gate)
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.inner(x)).float()

    x = torch.randn(4, 6) * 10
    with torch.autocast("cpu", torch.bfloat16):
        backward(make_private(nn.Sequential(Product(torch.tanh)))[1], x)
        private = make_private(nn.Sequential(Product(lambda h: h.roll(1, 0))))[1]
        with pytest.raises(FastclipError):
            backward(private, x)
