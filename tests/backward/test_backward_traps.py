"""Backward passes that would, unnoticed, clip wrongly or not at all: exact, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused

EXACT = 1e-10


class Case:
    """A private model, the oracle's gradients for one batch, and the sums it should give."""

    def __init__(self, model: nn.Module | None = None, x: torch.Tensor | None = None, **kwargs):
        self.model = mlp() if model is None else model
        self.x = rows() if x is None else x
        grads = per_sample_gradients(self.model, self.x)
        self.C = norms(grads).median().item()
        self.norms, self.expected = norms(grads), clipped_sum(grads, self.C)
        self.params = dict(self.model.named_parameters())
        everything = {"dataset": TensorDataset(self.x), "batch_size": len(self.x)}
        made = make_private(self.model, max_grad_norm=self.C, **(everything | kwargs))
        self.engine, self.private, self.optimizer, self.loader = made
        next(iter(self.loader))  # at q = 1 Poisson sampling draws all of x

    def nothing_written(self) -> bool:
        """No sum and no gradient on any parameter."""
        return all(p.grad is None and p.summed_grad is None for p in self.params.values())

    def assert_exact(self) -> None:
        """The sums are those of one pass over the batch, and autograd wrote nothing."""
        assert relative_error(self.optimizer.per_sample_norms, self.norms) <= EXACT
        assert_sums(summed(self.params), self.expected, EXACT)
        assert all(p.grad is None for p in self.params.values())


def test_second_backward_over_one_forward() -> None:
    case = Case()
    loss = sample_loss(case.private(case.x)).mean()
    loss.backward(retain_graph=True)
    with refused("paused|Add the losses|once"):
        loss.backward()


def test_two_losses_over_one_forward() -> None:
    """Each alone would be clipped to C: together a sample could contribute 2C."""
    case = Case()
    out = case.private(case.x)
    out[:, 0].square().mean().backward(retain_graph=True)
    with refused("paused|Add the losses|once"):
        out[:, 1:].square().mean().backward()


def test_gradient_of_the_input_writes_nothing() -> None:
    case = Case()
    twin = mlp()
    twin.load_state_dict(case.model.state_dict())
    x = case.x.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(sample_loss(twin(x)).mean(), x)
    (ours,) = torch.autograd.grad(sample_loss(case.private(x)).mean(), x)
    assert relative_error(ours, theirs) <= EXACT
    assert case.nothing_written()
    backward(case.private, case.x)
    case.assert_exact()


def test_gradient_of_a_weight_is_not_to_be_had() -> None:
    """autograd.grad would hand out an unclipped gradient."""
    case = Case()
    loss = sample_loss(case.private(case.x)).mean()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, case.model[0].weight)
    assert case.nothing_written()


def test_paused() -> None:
    """Adversarial inputs: any number of passes that contribute nothing."""
    case = Case(poisson_sampling=True)
    with case.engine.paused():
        for _ in range(2):
            x = case.x.clone().requires_grad_()
            sample_loss(case.private(x)).mean().backward()
            assert x.grad.abs().sum() > 0
    assert case.nothing_written()
    backward(case.private, case.x)
    case.assert_exact()


class FailOnce(Function):
    """Identity whose first backward raises."""

    armed = True

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> torch.Tensor:
        if FailOnce.armed:
            FailOnce.armed = False
            raise ArithmeticError("on purpose")
        return g


class Fragile(nn.Module):
    """Fails between its two layers: one of them has been recorded by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, act, second = self.layers
        return second(FailOnce.apply(act(first(x))))


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("poisson", [True, False])
def test_exception_in_backward(clear: bool, poisson: bool) -> None:
    FailOnce.armed = False
    case = Case(Fragile(), poisson_sampling=poisson)
    case.private(rows(4))  # a model that is known by then: its first look asks for gradients, too
    FailOnce.armed = True
    with pytest.raises(ArithmeticError, match="on purpose"):
        backward(case.private, 7.0 * rows(4))  # other data, another batch size
    assert not FailOnce.armed
    if clear:
        case.optimizer.zero_grad()
    backward(case.private, case.x)
    case.assert_exact()


class Checkpointed(nn.Module):
    """Four layers, some of them recomputed in backward."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.first = nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for name in ("middle", "head"):
            part = getattr(self, name)
            if self.where in (name, "both"):
                x = checkpoint(part, x, use_reentrant=self.reentrant)
            else:
                x = part(x)
        return x


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["middle", "head", "both"])
@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 6)])
def test_checkpointing(shape: tuple, where: str, reentrant: bool, dtype: torch.dtype) -> None:
    check_exact(Checkpointed(where, reentrant), torch.randn(shape), dtype=dtype)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph() -> None:
    case = Case()
    backward(case.private, case.x, create_graph=True)
    case.assert_exact()
    for p in case.params.values():
        assert not p.summed_grad.requires_grad
        assert p.summed_grad.grad_fn is None


def test_a_copy_uses_its_own_weights() -> None:
    case = Case()
    before = case.private(case.x).detach()
    twin = copy.deepcopy(case.private)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(-0.5)
    changed = mlp()
    changed.load_state_dict(case.model.state_dict())
    with torch.no_grad():
        for p in changed.parameters():
            p.mul_(-0.5)
    assert torch.allclose(twin(case.x), changed(case.x), rtol=1e-12)
    assert torch.equal(case.private(case.x), before)
    assert not torch.allclose(twin(case.x), before)


def test_a_copy_keeps_its_gradients_to_itself() -> None:
    case = Case()
    twin = copy.deepcopy(case.private)
    backward(twin, case.x)
    assert case.nothing_written()
    for p in twin.parameters():
        assert p.grad is not None or p.summed_grad is not None
    backward(case.private, case.x)
    case.assert_exact()


class Leaky(nn.Module):
    """Uses the embedding's matrix past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.middle(self.table(ids))), self.table.weight)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_a_parameter_used_outside_its_module(loss_reduction: str) -> None:
    """Both uses of the matrix are of one sample."""
    ids = torch.randint(7, (4, 5))
    check_exact(Leaky(), ids, dtype=torch.float64, loss_reduction=loss_reduction)


def test_other_forwards_in_between() -> None:
    """Evaluation, a discarded forward and a forward without gradients leave no trace."""
    case = Case()
    case.private(rows(3))
    losses = sample_loss(case.private(case.x))
    with torch.no_grad():
        case.private(rows(2))
    case.private.eval()
    with torch.no_grad():
        case.private(rows(7))
    case.private.train()
    losses.mean().backward()
    case.assert_exact()


class Siamese(nn.Module):
    """Two views of each sample through one network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.net(y).sin()


def test_two_forwards_under_one_loss() -> None:
    net, x, y = mlp(), rows(), rows()
    grads = per_sample_gradients(Siamese(net), (x, y))
    C = norms(grads).median().item()
    params = {f"net.{n}": p for n, p in net.named_parameters()}
    _, private, optimizer, _ = make_private(net, max_grad_norm=C)
    sample_loss(private(x) * private(y).sin()).mean().backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= EXACT
    assert_sums(summed(params), clipped_sum(grads, C), EXACT)
