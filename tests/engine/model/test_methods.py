"""Methods and parts that a script calls past the forward are looked at as well."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import FastclipError
from tests.apart import B, D, T, check_exact_as_it_is, own_gradients
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused


class WithMethods(nn.Module):
    """Layers that are reached by methods other than `forward`."""

    rate = 3
    config = {"classes": 2}

    def __init__(self, t: int = T) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.head, self.table = nn.Linear(D, 2), nn.Embedding(9, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x) + self.table(torch.arange(x.shape[1])[None])

    def decode(self, h: Tensor) -> Tensor:
        return self.head(torch.tanh(h)).mean(1)

    def folded(self, x: Tensor) -> Tensor:
        return self.decode(self.body(x.flatten(0, 1)).view(x.shape))

    def mixed(self, x: Tensor) -> Tensor:
        return self.decode(self.body(x - x.mean(0)))

    @property
    def classes(self) -> int:
        return self.config["classes"]

    @staticmethod
    def double_of(x: int) -> int:
        return 2 * x


@pytest.mark.parametrize("wrap", [True, False])
def test_methods_of_the_model(wrap: bool) -> None:
    """Exact: one after the other, with what has no samples expanded."""
    model, x = WithMethods().double(), torch.randn(B, T, D).double()
    expected = clipped_sum(per_sample_gradients(model, x), 0.1)
    params = dict(model.named_parameters())
    private = make_private(model, max_grad_norm=0.1, wrap_model=wrap)[1]
    caller = private if wrap else model
    sample_loss(caller.decode(caller.encode(x))).mean().backward()
    assert_sums(summed(params), expected, 1e-10)
    assert (caller.rate, caller.config, caller.classes) == (3, {"classes": 2}, 2)
    assert caller.double_of(4) == 8
    assert caller.encode.__name__ == "encode"
    with pytest.raises(AttributeError):
        _ = caller.nothing_of_this_name
    private.cleanup()
    assert "encode" not in vars(model)


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_method_that_does_not_keep_rows_apart(wrap: bool, known: bool) -> None:
    model, x = WithMethods(), torch.randn(B, T, D)
    private = make_private(model, wrap_model=wrap)[1]
    caller = private if wrap else model
    if known:
        caller(x)
    with pytest.raises(FastclipError):
        sample_loss(caller.mixed(x)).mean().backward()


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_method_that_folds_rows(wrap: bool, known: bool) -> None:
    """Exact: its layers see other rows than those of the model's forward."""
    model, x = WithMethods().double(), torch.randn(B, T, D).double()
    grads = own_gradients(model, x, lambda m, rows: sample_loss(m.folded(rows)))
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1, wrap_model=wrap)
    caller = private if wrap else model
    if known:
        caller(x)
    sample_loss(caller.folded(x)).mean().backward()
    assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)
    assert relative_error(optimizer.per_sample_norms, norms(grads)) < 1e-10


class Trainable(WithMethods):
    """A model that trains itself, as Lightning's do: past its own forward."""

    def fit(self, x: Tensor, optimizer, steps: int) -> None:
        for _ in range(steps):
            self.step(x, optimizer)

    def step(self, x: Tensor, optimizer) -> None:
        optimizer.zero_grad()
        sample_loss(self.decode(self.encode(x))).mean().backward()
        optimizer.step()

    def step_with(self, optimizer, closure: Callable) -> None:
        optimizer.zero_grad()
        closure().backward()
        optimizer.step()

    def loss_of(self, x: Tensor, use: str = "encode") -> Tensor:
        return sample_loss(self.decode(getattr(self, use)(x))).mean()


@pytest.mark.parametrize("how", ["fit", "closure"])
def test_methods_that_train(how: str) -> None:
    """What they call is looked at, not they: nothing is trained twice, nor refused."""
    x = torch.randn(B, T, D).double()
    model = Trainable().double()
    expected = dict(copy.deepcopy(model).named_parameters())
    for _ in range(2):
        other = copy.deepcopy(model)
        for name, p in other.named_parameters():
            p.data.copy_(expected[name])
        sums = clipped_sum(per_sample_gradients(other, x), 0.1)
        for name, p in expected.items():
            p.data -= 0.1 * sums[name] / B
    engine, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    if how == "fit":
        private.fit(x, optimizer, 2)
    else:
        for _ in range(2):
            private.step_with(optimizer, lambda: private.loss_of(x))
    assert [h[2] for h in engine.accountant.history] == [2]
    found = dict(model.named_parameters())
    for name, p in expected.items():
        assert torch.allclose(found[name], p, rtol=0, atol=1e-12), name


class Using(Trainable):
    def folded_rows(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(0, 1)).view(x.shape)

    def mixed_rows(self, x: Tensor) -> Tensor:
        return self.body(x - x.mean(0))


def test_a_method_that_trains_on_what_is_not_apart() -> None:
    private, optimizer = make_private(Using())[1:3]
    x = torch.randn(B, T, D)
    with pytest.raises(FastclipError):
        private.step_with(optimizer, lambda: private.loss_of(x, "mixed_rows"))


def test_a_method_that_trains_on_folded_rows() -> None:
    model, x = Using().double(), torch.randn(B, T, D).double()
    grads = own_gradients(model, x, lambda m, rows: sample_loss(m.decode(m.folded_rows(rows))))
    params = dict(model.named_parameters())
    private, optimizer = make_private(model, max_grad_norm=0.1, lr=0.0)[1:3]
    private.step_with(optimizer, lambda: private.loss_of(x, "folded_rows"))
    expected = {name: g / B for name, g in clipped_sum(grads, 0.1).items()}
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}
    assert_sums(found, expected, 1e-10)


class Part(nn.Module):
    """A part of a model, called by itself, that folds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(x.shape)


def test_a_part_called_by_itself() -> None:
    model, x = nn.Sequential(Part(), nn.Linear(D, 2)), torch.randn(B, T, D)
    check_exact_as_it_is(model, x, lambda m, rows: sample_loss(model[1](model[0](rows))))


def test_a_part_called_by_itself_that_couples() -> None:
    class Centred(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model = nn.Sequential(Centred(), nn.Linear(D, 2))
    make_private(model)
    with refused("independently of the others"):
        model[1](model[0](torch.randn(B, T, D)))


def test_a_part_called_by_itself_is_exact() -> None:
    model, x = WithMethods().double(), torch.randn(B, D).double()
    grads = per_sample_gradients(nn.Sequential(model.body, model.head), x)
    params = dict(model.named_parameters())
    make_private(model, max_grad_norm=0.1)
    sample_loss(model.head(model.body(x))).mean().backward()
    found = [summed(params)[f"{n}.weight"] for n in ("body.0", "head")]
    expected = [clipped_sum(grads, 0.1)[f"{n}.weight"] for n in ("0.0", "1")]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
