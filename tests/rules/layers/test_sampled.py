"""Grad samplers that were registered with Opacus, for layers that cannot be followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import opacus.grad_sample
import pytest
import torch
from opacus.grad_sample import GradSampleModule, register_grad_sampler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.errors import GraphError, ParameterLeakError, UnsupportedLayerError
from fastclip.rules import KeptRecord, LayerRule, find_rule, register_rule
from fastclip.testing import check_rule
from tests.oracle import DTYPES, backward, check_exact, make_private
from tests.refusal import refused
from tests.units import scattered


class Product(torch.autograd.Function):
    """x W^T + c, which nothing can follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() + c

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, w = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        return g @ w, rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0)


class Mapped(nn.Module):
    def __init__(self, d: int = 6, p: int = 6) -> None:
        super().__init__()
        self.w, self.c = nn.Parameter(torch.randn(p, d)), nn.Parameter(torch.randn(p))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return gain * Product.apply(x, self.w, self.c)


class Masked(Mapped):
    """A second input, one number a sample, and random numbers."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return Product.apply(x, self.w, self.c) * mask


class Twice(nn.Module):
    """One layer, called with an argument by keyword and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), Mapped()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(self.first(x))))


class Folded(Twice):
    """Positions as rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(self.first(x).flatten(0, 1))
        return rows.unflatten(0, x.shape[:2]).tanh()


class TimeMajor(Twice):
    """Positions before samples, in one axis or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Mapped(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.layer(self.first(x).transpose(0, 1)).tanh()
        rows = self.other(turned.flatten(0, 1))
        return rows.unflatten(0, turned.shape[:2]).transpose(0, 1)


class Checkpointed(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Around(Twice):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Masked()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x), (x.detach() > 0).to(x.dtype).amax(-1, keepdim=True))


def by_position(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict:
    g, x = (t.unsqueeze(1).flatten(1, -2) for t in (backprops, activations[0]))
    return {layer.w: torch.einsum("btp,btd->bpd", g, x), layer.c: g.sum(1)}


def masked(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict:
    x, mask = activations
    return by_position(layer, [x], backprops * mask)


@pytest.fixture(autouse=True)
def samplers() -> Iterator[dict]:
    """Registered for a test, and gone after it."""
    found = GradSampleModule.GRAD_SAMPLERS
    before = dict(found)
    register_grad_sampler(Mapped)(by_position)
    register_grad_sampler(Masked)(masked)
    yield found
    found.clear()
    found.update(before)


def with_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), Mapped(), nn.Tanh(), Mapped(6, 3))
    model[1].c.requires_grad_(False)
    model[3].w.requires_grad_(False)
    return model


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "first": (lambda: nn.Sequential(Mapped(), nn.Tanh(), nn.Linear(6, 3)), (7, 6)),
    "last": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Mapped(6, 3)), (7, 6)),
    "alone": (Mapped, (7, 6)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 6), Mapped(), nn.Tanh()), (7, 5, 6)),
    "twice": (Twice, (7, 6)),
    "folded": (Folded, (7, 5, 6)),
    "time-major": (TimeMajor, (7, 5, 6)),
    "checkpoint": (Checkpointed, (7, 6)),
    "frozen": (with_frozen, (7, 6)),
    "two-inputs": (Around, (7, 6)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_exact(case: str, loss_reduction: str, dtype: torch.dtype) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    check_exact(make(), torch.randn(shape), dtype=dtype, loss_reduction=loss_reduction)


def test_arguments_by_keyword() -> None:
    """The layer gets them; the sampler, as with Opacus, does not."""

    class Model(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x), gain=1.0)

    check_exact(Model(), torch.randn(7, 6), dtype=torch.float64)


def test_it_agrees_with_opacus() -> None:
    """Its gradients of a mean, which Opacus multiplies by the number of samples."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), Mapped(6, 3)).double(), torch.randn(7, 6).double()
    theirs = GradSampleModule(model, loss_reduction="mean")
    theirs(x).square().sum(1).mean().backward()
    expected = [p.grad_sample.sum(0) for p in model.parameters()]
    theirs.to_standard_module()
    _, private, _, _ = make_private(model, max_grad_norm=1e6)
    private(x).square().sum(1).mean().backward()
    for p, own in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.summed_grad, own, rtol=1e-10, atol=1e-10)


def test_the_rule_is_checked_as_any_other() -> None:
    engine = make_private(nn.Sequential(nn.Linear(6, 6), Mapped()))[0]
    assert {row.rule for row in engine.plan().rows} == {"linear", "grad_sampler"}
    check_rule(Mapped(), torch.randn(4, 5, 6)).raise_if_wrong()


class Known(Mapped):
    """One with a rule of fastclip's, too."""


class KnownRule(LayerRule):
    name = "known"
    parameter_names = ("w", "c")

    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        return x @ module.w.t() + module.c, (x, module.w)

    def backward(self, call: Any) -> Tensor | None:
        x, w = call.saved
        if call.wants("w"):
            call.record("w", KeptRecord(torch.einsum("bp,bd->bpd", call.g, x)))
        if call.wants("c"):
            call.record("c", KeptRecord(call.g))
        return call.g @ w if call.needs_input_grad else None


def test_whose_rule_it_is(samplers: dict) -> None:
    """A rule of fastclip's wins; Opacus' own samplers are not asked; nor is that of a base class."""

    def other(*_: Any) -> dict:
        raise AssertionError

    register_rule(Known)(KnownRule)
    register_grad_sampler([Known, nn.Linear])(other)
    assert find_rule(Known()).name == "known"
    assert find_rule(nn.Linear(2, 2)).name == "linear"
    check_exact(nn.Sequential(nn.Linear(6, 6), Known()), torch.randn(7, 6), dtype=torch.float64)
    assert opacus.grad_sample.compute_linear_grad_sample.__module__.startswith("opacus.")
    samplers[Twice] = opacus.grad_sample.compute_linear_grad_sample
    assert find_rule(Twice()) is None
    subclass = type("Subclass", (Mapped,), {})
    assert find_rule(subclass()) is None
    with refused("errors.html#untracked-use", ParameterLeakError):
        backward(make_private(nn.Sequential(subclass()))[1], torch.randn(7, 6))


def test_a_layer_with_trained_parts_or_a_forward_of_its_own_is_followed() -> None:
    register_grad_sampler(Twice)(by_position)
    assert find_rule(Twice()) is None
    layer = Mapped()
    layer.forward = lambda x: torch.tanh(x @ layer.w.t() + layer.c)
    assert find_rule(layer) is None


def left_out(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict:
    return {layer.w: by_position(layer, activations, backprops)[layer.w]}


def summed_up(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict:
    return {p: g.sum(0) for p, g in by_position(layer, activations, backprops).items()}


def by_name(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict:
    return {"w": by_position(layer, activations, backprops)[layer.w]}


def as_a_list(layer: Any, activations: list[Tensor], backprops: Tensor) -> list:
    return [*by_position(layer, activations, backprops).values()]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (left_out, r"1 \(Mapped\).*no gradients of c\. Return"),
        (summed_up, r"1 \(Mapped\).*of w of shape \[6, 6\].*\[7, 6, 6\].*Return"),
        (by_name, r"1 \(Mapped\).*not its parameters\. Return"),
        (as_a_list, r"1 \(Mapped\).*returned a list\. Return"),
    ],
)
def test_what_is_returned_is_checked(sampler: Any, said: str) -> None:
    register_grad_sampler(Mapped)(sampler)
    _, private, _, _ = make_private(nn.Sequential(nn.Linear(6, 6), Mapped()))
    with refused(said, GraphError):
        backward(private, torch.randn(7, 6))


def test_what_it_cannot_be_given() -> None:
    class Model(Twice):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how, self.layer = how, Masked()

        def forward(self, x: Tensor) -> Tensor:
            if self.how == "number":
                return self.layer(self.first(x), 2.0)
            if self.how == "keyword":
                return self.layer(x=self.first(x), mask=x[:, :1])
            return self.layer(self.first(x), self.first(x)[:, :1])

    said = {"number": "are all tensors", "keyword": "positional", "gradient": "needs a gradient"}
    for how, words in said.items():
        _, private, _, _ = make_private(Model(how))
        with refused(words, UnsupportedLayerError):
            backward(private, torch.randn(7, 6))


class Mixing(Product):
    """Divides its gradient by that of the batch."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, *others = Product.backward(ctx, g)
        return x / g.norm(), *others


def test_a_backward_that_mixes_samples() -> None:
    class Model(Mapped):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return Mixing.apply(x, self.w, self.c)

    register_grad_sampler(Model)(by_position)
    _, private, _, _ = make_private(nn.Sequential(nn.Linear(6, 6), Model()))
    with refused("depends on another sample"):
        backward(private, torch.randn(7, 6))


def test_units_are_sums_of_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Mapped())
    check_exact(Folded(), torch.randn(12, 5, 6), dtype=torch.float64, units=scattered)
    check_exact(model, torch.randn(12, 6), dtype=torch.float64, units=scattered)
