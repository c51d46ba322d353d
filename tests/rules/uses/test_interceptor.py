"""Uses that are written in unusual ways: exact, or refused, and never something else in silence."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.apart import check_exact_as_it_is, step
from tests.oracle import (
    assert_sums,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused

aten = torch.ops.aten


class Model(nn.Module):
    """A layer, a vector and a matrix, used as the case says."""

    def __init__(self, use: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 5))
        self.lin, self.use = nn.Linear(5, 5), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def batch() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def filled(m: Model, x: Tensor) -> Tensor:
    kept = torch.zeros(5, dtype=x.dtype)
    aten.copy_.default(kept, m.w)
    return m.lin(x) * kept


def multiplied(m: Model, x: Tensor) -> Tensor:
    h = m.lin(x)
    aten.mul_.Tensor(h, m.w)
    return h


def multiplied_view(m: Model, x: Tensor) -> Tensor:
    h = m.lin(x)
    aten.mul_.Tensor(h[:, :3], m.w[:3])
    return h


@pytest.mark.parametrize("use", [filled, multiplied, multiplied_view])
def test_overloads_of_aten_that_change_in_place(use: Callable) -> None:
    check_exact_as_it_is(Model(use), batch())


def builtins(m: Model, x: Tensor) -> Tensor:
    return operator.matmul(operator.mul(x, m.w), m.v)


def added_up(m: Model, x: Tensor) -> Tensor:
    return sum(x[:, i, None] * w for i, w in enumerate(m.v)) * sum([m.w, m.w])


@pytest.mark.parametrize("use", [builtins, added_up])
def test_built_in_functions_that_an_interpreter_specializes(use: Callable) -> None:
    """In Python 3.11 another instruction runs them, once the line has run some times."""
    check_exact_as_it_is(Model(use), batch())


def typed(m: Model, x: Tensor) -> Tensor:
    h = m.lin(x)
    return h @ (m.v - m.v.mT).tanh().to(h) * m.w.type_as(h) + h.type_as(m.w)


def as_one_sample(m: Model, x: Tensor) -> Tensor:
    h = m.lin(x)
    return h * (2 * m.w).view_as(h[0]) + m.v.sum(0).reshape_as(x[:1])


def as_samples(m: Model, x: Tensor) -> Tensor:
    h = m.lin(x)
    each, h = torch.broadcast_tensors(m.v, h[:, None])
    return (each * h).sum(1) + m.w.tanh().expand_as(h[:, 0])


@pytest.mark.parametrize("use", [typed, as_one_sample, as_samples])
def test_functions_that_take_a_shape_or_a_type_of_samples(use: Callable) -> None:
    """What they return of a parameter is of no sample."""
    check_exact_as_it_is(Model(use), batch())
    private = make_private(Model(use))[1]
    sample_loss(private(batch())).mean().backward()
    assert private.grad_state.calls.layouts["forward"].proven


@pytest.mark.parametrize("function", [torch.div, torch.atan2])
def test_a_value_changed_after_it_was_used(function: Callable) -> None:
    """Its numbers at the time of the use are gone, and the gradient asks for them."""

    def use(m: Model, x: Tensor) -> Tensor:
        weight = m.w * 2
        out = function(x, weight)
        weight.mul_(2)
        return out

    _, private, optimizer, _ = make_private(Model(use))
    with refused("changed in place after this use.*clone"):
        step(private, optimizer, batch())


def test_a_value_changed_after_a_use_whose_gradient_does_not_ask() -> None:
    def use(m: Model, x: Tensor) -> Tensor:
        weight = m.w * 2
        out = x * weight
        weight.mul_(2)
        return out + weight

    check_exact_as_it_is(Model(use), batch())


DERIVED: dict[str, Callable[[Model], Tensor]] = {
    "square": lambda m: m.v**2,
    "product": lambda m: m.v * m.w,
    "normalized": lambda m: nn.functional.normalize(m.v),
    "softplus": lambda m: nn.functional.softplus(m.v),
    "low rank": lambda m: m.v[:, :2] @ m.v[:2],
    "sine": lambda m: m.v.sin(),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_parameter_changed_between_the_passes(name: str) -> None:
    """A value of it is computed again by nobody, and the way back asks for what it was."""

    def changed(m: Model, x: Tensor) -> Tensor:
        loss = sample_loss(m(x)).mean()
        with torch.no_grad():
            model.v.mul_(3)
        return loss

    model = Model(lambda m, x: m.lin(x) @ DERIVED[name](m))
    with pytest.raises(RuntimeError, match="inplace"):
        changed(model, batch()).backward()
    _, private, _, _ = make_private(model)
    with refused("changed in place after a value had been computed.*clone"):
        changed(private, batch()).backward()


def test_a_parameter_changed_between_the_passes_where_no_gradient_asks() -> None:
    """exp keeps its own result, and a transposed matrix nothing."""
    model = Model(lambda m, x: m.lin(x) * m.w.exp() @ m.v.T)
    grads = per_sample_gradients(model, batch())
    params = dict(model.named_parameters())
    _, private, _, _ = make_private(model)
    loss = sample_loss(private(batch())).mean()
    with torch.no_grad():
        model.w.mul_(3)
    loss.backward()
    assert_sums(summed(params), clipped_sum(grads, 1.0), 1e-5)


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.sigmoid])
def test_a_derived_value_changed_after_it_was_used(function: Callable) -> None:
    """The use's own gradient does not ask for it; the way back to the parameter does."""

    def use(m: Model, x: Tensor) -> Tensor:
        value = function(m.w)
        out = m.lin(x) + value
        value.mul_(2)
        return out

    model = Model(use)
    with pytest.raises(RuntimeError, match="inplace"):
        sample_loss(model(batch())).mean().backward()
    _, private, optimizer, _ = make_private(model)
    with refused("changed in place after a value had been computed.*clone"):
        step(private, optimizer, batch())


def test_a_derived_value_changed_before_it_is_used() -> None:
    def use(m: Model, x: Tensor) -> Tensor:
        value = (m.w * 2).mul_(m.v[0]).add_(1)
        return m.lin(x) * value.pow(2)

    check_exact_as_it_is(Model(use), batch())


def test_a_hook_on_a_value_computed_from_parameters() -> None:
    def use(m: Model, x: Tensor) -> Tensor:
        weight = m.w * 2
        weight.register_hook(lambda g: g * 0)
        return m.lin(x) * weight

    _, private, optimizer, _ = make_private(Model(use))
    with refused("hook on the gradient.*would not run"):
        step(private, optimizer, batch())


def test_frozen_while_a_value_was_computed() -> None:
    def use(m: Model, x: Tensor) -> Tensor:
        m.w.requires_grad_(False)
        weight = m.w * m.v
        m.w.requires_grad_(True)
        return m.lin(x) @ weight

    check_exact_as_it_is(Model(use), batch())


def test_frozen_after_a_value_was_computed() -> None:
    def use(m: Model, x: Tensor) -> Tensor:
        m.w.requires_grad_(True)
        weight = m.w * 2
        m.w.requires_grad_(False)
        return m.lin(x) * weight

    _, private, optimizer, _ = make_private(Model(use))
    with refused("was frozen .* after a value"):
        step(private, optimizer, batch())


class Twice(nn.Module):
    """One function of torch's own, with one parameter, twice in a line: along two axes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.head = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        first, other = F.embedding(ids, self.w), F.embedding(ids.T, self.w).transpose(0, 1)
        return self.head((first * other).sum(1))


def test_functions_are_known_by_who_calls_them() -> None:
    """Not by a line of torch.nn.functional: of both it is known where the samples are."""
    ids = torch.randint(0, 7, (5, 3), generator=torch.Generator().manual_seed(1))
    private = make_private(Twice())[1]
    sample_loss(private(ids)).mean().backward()
    layout = private.grad_state.calls.layouts["forward"]
    assert not layout.moved
    found = [batch_axis.axis for use, batch_axis in layout.batch_axes.items() if use != "head"]
    assert sorted(found) == [0, 1]
    check_exact(Twice(), ids, dtype=torch.float64)
