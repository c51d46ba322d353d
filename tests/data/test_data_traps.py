"""Batches that are empty, placeholders or not finite."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    sample_loss,
    summed,
)


def one_ahead(loader: Any) -> Any:
    """A prefetcher."""
    iterator = iter(loader)
    held = next(iterator)
    for batch in iterator:
        yield held
        held = batch
    yield held


@pytest.mark.parametrize("ahead", [False, True])
def test_placeholder_rows_contribute_nothing(ahead: bool) -> None:
    """rand_on_empty replaces an empty batch by a row of ones.

    Args:
        ahead: batches are drawn before the first of them is used, as a prefetcher does.
    """
    model, data = mlp(), rows(16) + 5.0
    pristine, params = copy.deepcopy(model), dict(model.named_parameters())
    engine, private, optimizer, loader = make_private(
        model, max_grad_norm=0.5, batch_size=1, dataset=TensorDataset(data),
        generator=torch.Generator().manual_seed(2), poisson_sampling=True, rand_on_empty=True,
        lr=0.0,
    )  # fmt: skip
    batches = itertools.chain.from_iterable(
        one_ahead(loader) if ahead else loader for _ in range(3)
    )
    placeholders = real = 0
    for (x,) in batches:
        optimizer.zero_grad()
        backward(private, x)
        if bool((x == 1).all()):
            placeholders += 1
            assert all((p.summed_grad == 0).all() for p in params.values())
        else:
            real += 1
            expected = clipped_sum(per_sample_gradients(pristine, x), 0.5)
            assert_sums(summed(params), expected, 1e-10)
        optimizer.step()
    assert min(placeholders, real) > 2
    steps = sum(steps for _, _, steps in engine.accountant.history)
    assert steps == placeholders + real  # the empty ones are accounted, too


@pytest.mark.parametrize("poisson", [True, False])
def test_an_empty_batch_is_a_step_of_noise(poisson: bool) -> None:
    """4096 weights measure the standard deviation to 1.1%."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 3))
    engine, private, optimizer, loader = make_private(
        model, max_grad_norm=0.5, noise_multiplier=3.0, batch_size=4, poisson_sampling=poisson
    )
    if poisson:
        loader.batch_sampler.sample_rate = 0.0  # nobody is drawn
        next(iter(loader))
    labels = torch.zeros(0, dtype=torch.long)
    F.cross_entropy(private(torch.zeros(0, 64)), labels).backward()  # the mean of nothing is NaN
    assert all((p.summed_grad == 0).all() for p in model.parameters())
    optimizer.step()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model[0].weight.grad.std().item() == pytest.approx(3.0 * 0.5 / 4, rel=0.06)
    assert engine.accountant.history == [(3.0, 0.25 if poisson else 1.0, 1)]


def test_a_batch_after_an_empty_one() -> None:
    model, x = mlp(), rows(5)
    grads = per_sample_gradients(model, x)
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=1.0, lr=0.0)
    backward(private, x[:0])
    optimizer.step()
    optimizer.zero_grad()
    backward(private, x)
    assert_sums(summed(params), clipped_sum(grads, 1.0), 1e-10)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(3, 4, 3, padding=1), (0, 3, 8, 8)),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), (0, 5, 6)),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4)), (0, 4, 7)),
    ],
)
def test_no_rows_in_other_layers(make, shape: tuple) -> None:
    model = make()
    _, private, optimizer, _ = make_private(model)
    private(torch.zeros(shape)).sum().backward()
    assert optimizer.per_sample_norms.shape == (0,)
    assert all((p.summed_grad == 0).all() for p in model.parameters())


BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
NETWORKS = {
    "linear": (mlp, (5, 6)),
    "positions": (lambda: nn.Linear(6, 4).double(), (5, 9, 6)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1).double(), (5, 2, 6, 6)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)).double(), (5, 6)),
}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_sample_that_is_not_finite(network: str, bad: str, told: bool) -> None:
    """It contributes exactly zero; the others are exact; one warning, and only for who asks for it."""
    make, shape = NETWORKS[network]
    model, x = make(), torch.randn(shape, dtype=torch.float64)
    good = [0, 2, 3, 4]
    grads = per_sample_gradients(model, x[good])
    C = norms(grads).quantile(0.5).item()
    expected = clipped_sum(grads, C)
    x[1].view(-1)[0] = BAD[bad]
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, lr=0.0)
    if told:
        optimizer.warn_of_non_finite = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            backward(private, x)
            assert_sums(summed(params), expected, 1e-10)
            optimizer.step()
    about = [w for w in caught if "finite" in str(w.message).lower()]
    assert len(about) == told
    assert all("not private" in str(w.message) for w in about)


def test_only_bad_samples() -> None:
    model = mlp()
    _, private, optimizer, _ = make_private(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(private, torch.full((3, 6), float("nan"), dtype=torch.float64))
        assert all((p.summed_grad == 0).all() for p in model.parameters())
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_finite_but_too_large_to_square() -> None:
    """A norm whose square overflows float32: the contribution is finite and within C."""
    model = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    x[1] *= 1e12
    good = clipped_sum(per_sample_gradients(model, x[[0, 2]]), 1.0)
    params = dict(model.named_parameters())
    _, private, _, _ = make_private(model, max_grad_norm=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(private, x)
    sums = summed(params)
    rest = torch.cat([(sums[n].double() - good[n]).flatten() for n in params])
    assert rest.norm().item() <= 1.0 + 1e-5


def test_the_denominator_is_public() -> None:
    """The expected batch size divides, whatever the batch that came: 3 of an expected 4."""
    model, x = mlp(), rows(3)
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5, batch_size=4)
    sample_loss(private(x)).mean().backward()
    expected = summed(params)
    optimizer.step()
    for name, p in params.items():
        assert torch.allclose(p.grad, expected[name] / 4, rtol=1e-12, atol=0)


class HalfUsed(nn.Module):
    """A layer that no sample touches, of 4160 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(6, 3), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_untouched_parameters_receive_noise_too() -> None:
    """Whether a parameter was touched is a fact about the data."""
    model = HalfUsed()
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=0.5, noise_multiplier=3.0, batch_size=4
    )
    backward(private, torch.randn(4, 6))
    optimizer.step()
    assert model.idle.weight.grad.std().item() == pytest.approx(3.0 * 0.5 / 4, rel=0.06)
