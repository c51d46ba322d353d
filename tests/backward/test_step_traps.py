"""step() and zero_grad() in an order that would release a gradient twice, or drop it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

from fastclip.errors import FastclipError
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
from tests.refusal import refused

EXACT = 1e-10


def one_pass(private: nn.Module, optimizer, x: torch.Tensor, *, skip: bool) -> None:
    """One physical batch, as BatchMemoryManager announces it, up to its step."""
    optimizer.signal_skip_step(skip)
    backward(private, x)
    optimizer.step()


def test_zero_grad_inside_a_split_batch() -> None:
    """The sum already holds the samples of this backward: clearing would not undo it alone."""
    _, private, optimizer, _ = make_private(mlp())
    one_pass(private, optimizer, rows(3), skip=True)
    optimizer.zero_grad()
    backward(private, rows(2))
    with refused("step"):
        optimizer.zero_grad()


@pytest.mark.parametrize("through", ["optimizer", "model"])
def test_zero_grad_after_a_skipped_step(through: str) -> None:
    """It keeps the sums, and the rest of the logical batch is added to them."""
    model, x = mlp(), rows(7)
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    expected = clipped_sum(grads, C)
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, batch_size=4)
    start = {n: p.detach().clone() for n, p in params.items()}
    one_pass(private, optimizer, x[:3], skip=True)
    first = summed(params)
    (optimizer if through == "optimizer" else private).zero_grad()
    assert all(torch.equal(p.summed_grad, first[n]) for n, p in params.items())
    assert all(torch.equal(p, start[n]) for n, p in params.items())  # nothing was released
    one_pass(private, optimizer, x[3:], skip=False)
    assert_sums(summed(params), expected, EXACT)
    for name, p in params.items():
        assert torch.allclose(p.grad, expected[name] / 4, rtol=1e-9, atol=1e-14)
    optimizer.zero_grad()
    assert all(p.summed_grad is None for p in params.values())


def test_step_twice() -> None:
    _, private, optimizer, _ = make_private(mlp())
    backward(private, rows(4))
    optimizer.step()
    with refused("zero_grad|backward"):
        optimizer.step()


def test_step_without_zero_grad() -> None:
    """The second step would release the first batch again."""
    _, private, optimizer, _ = make_private(mlp())
    backward(private, rows(4))
    optimizer.step()
    with refused("zero_grad"):
        backward(private, rows(4))
        optimizer.step()


def test_step_without_backward() -> None:
    optimizer = make_private(mlp())[2]
    with refused("backward"):
        optimizer.step()


def test_accumulation_under_poisson_sampling() -> None:
    """A second pass may hold the same samples: each would contribute up to 2C."""
    engine, private, _, loader = make_private(
        mlp(), poisson_sampling=True, dataset=TensorDataset(rows(4))
    )
    next(iter(loader))  # all of them, at q = 1
    backward(private, rows(4))
    with refused("BatchMemoryManager|optimizer.step"):
        backward(private, rows(4))
    assert engine.accountant.history == []


def test_accumulation_without_poisson_sampling() -> None:
    """Both batches count, in the sums and in the denominator."""
    model, x = mlp(), rows(8)
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    expected = clipped_sum(grads, C)
    params = dict(model.named_parameters())
    engine, private, optimizer, _ = make_private(
        model, max_grad_norm=C, batch_size=4, dataset_size=16
    )
    backward(private, x[:4])
    backward(private, x[4:])
    assert optimizer.accumulated_iterations == 2
    assert_sums(summed(params), expected, EXACT)
    optimizer.step()
    for name, p in params.items():
        assert torch.allclose(p.grad, expected[name] / 8, rtol=1e-9, atol=1e-14)
    assert engine.accountant.history == [(0.0, 1.0, 1)]  # nothing is amplified


def trained(split: int | None) -> tuple[dict, list]:
    """Weights after two epochs of Poisson batches, and the physical batch sizes.

    Args:
        split: largest physical batch; None leaves the logical batches whole.
    """
    torch.manual_seed(3)
    model = mlp()
    data = TensorDataset(rows(24))
    generator = torch.Generator().manual_seed(5)
    _, private, optimizer, loader = make_private(
        model, max_grad_norm=0.7, batch_size=8, dataset=data, generator=generator,
        poisson_sampling=True, lr=0.3,
    )  # fmt: skip
    sizes = []

    def epoch(batches) -> None:
        for (x,) in batches:
            sizes.append(len(x))
            optimizer.zero_grad()
            sample_loss(private(x)).mean().backward()
            optimizer.step()

    for _ in range(2):
        if split is None:
            epoch(loader)
            continue
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=split, optimizer=optimizer
        ) as small:
            epoch(small)
    return {n: p.detach().clone() for n, p in model.named_parameters()}, sizes


@pytest.mark.parametrize("split", [1, 3])
def test_batch_memory_manager(split: int) -> None:
    whole, sizes = trained(None)
    parts, part_sizes = trained(split)
    assert max(sizes) > 2 * split  # some logical batch is split more than once
    assert max(part_sizes) <= split
    assert sum(part_sizes) == sum(sizes)
    assert_sums(parts, whole, EXACT)


SIGMA, EXPECTED = 2.0, 4


class Wide(nn.Module):
    """4096 weights, enough to measure the standard deviation of their noise to 1.1%."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def noise_of_step(model: Wide, optimizer) -> torch.Tensor:
    """What the step added to the sum."""
    weight = model.layer.weight
    before = weight.summed_grad.clone()
    optimizer.step()
    return weight.grad * EXPECTED - before


def test_threshold_changed_inside_a_logical_batch() -> None:
    """It takes effect at the next one; the noise belongs to the thresholds that clipped."""
    model, x = Wide(), torch.randn(6, 64)
    grads = per_sample_gradients(model, x)
    assert norms(grads).min() > 1.0  # all are clipped, at either threshold
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=1.0, noise_multiplier=SIGMA, batch_size=EXPECTED, lr=0.0
    )
    one_pass(private, optimizer, x[:2], skip=True)
    optimizer.zero_grad()
    optimizer.max_grad_norm = 0.1
    optimizer.signal_skip_step(False)
    backward(private, x[2:])
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 1.0), 1e-5)
    assert noise_of_step(model, optimizer).std().item() == pytest.approx(SIGMA * 1.0, rel=0.06)

    optimizer.zero_grad()
    backward(private, x)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 0.1), 1e-5)
    assert noise_of_step(model, optimizer).std().item() == pytest.approx(SIGMA * 0.1, rel=0.06)


def test_threshold_changed_between_backward_and_step() -> None:
    """The sum was clipped at the old one, and so is its noise."""
    model = Wide()
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=1.0, noise_multiplier=SIGMA, batch_size=EXPECTED
    )
    backward(private, torch.randn(4, 64))
    optimizer.max_grad_norm = 1e-3
    assert noise_of_step(model, optimizer).std().item() == pytest.approx(SIGMA, rel=0.06)


def test_a_copy_of_the_weights_is_enough_to_repeat_a_step() -> None:
    """Without noise nothing but weights and batch decides: two engines agree bit for bit."""
    first, x = mlp(), rows(4)
    second = copy.deepcopy(first)
    for model in (first, second):
        _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
        backward(private, x)
        optimizer.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("in_the_optimizer", [True, False])
def test_unfreezing_after_make_private(in_the_optimizer: bool) -> None:
    """A layer that was frozen then is not clipped: it must not be trained, or be refused."""
    model, x = mlp(), rows(4)
    everything = list(model.parameters())
    model[0].requires_grad_(False)
    _, private, optimizer, _ = make_private(
        model, optimizer_params=everything if in_the_optimizer else None
    )
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    with contextlib.suppress(FastclipError):
        backward(private, x)
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_parameter_groups() -> None:
    """Each with its own learning rate; one norm over all of them."""
    model, x = mlp(), rows(4)
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    expected = clipped_sum(grads, C)
    params = dict(model.named_parameters())
    before = {n: p.detach().clone() for n, p in params.items()}
    rates = {"2": 0.5, "0": 0.1}
    groups = [{"params": list(model[int(i)].parameters()), "lr": lr} for i, lr in rates.items()]
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, optimizer_params=groups)
    backward(private, x)
    optimizer.step()
    for name, p in params.items():
        moved = before[name] - rates[name[0]] * expected[name] / 4
        assert torch.allclose(p, moved, rtol=1e-10, atol=1e-12)
