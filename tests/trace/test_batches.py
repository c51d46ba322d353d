"""What a loop does with the batch before the model, and with numbers that Python has read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.errors import GraphError
from tests.oracle import assert_sums
from tests.trace.run import Run, clipped, rows


def cut_and_mixed(x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], dtype=torch.bool)
    mask[1:3] = True
    return torch.where(mask, x.roll(1, 0), x)


def halves(x: Tensor) -> Tensor:
    a, b = x.split(len(x) // 2)
    return torch.cat([0.9 * a + 0.1 * b, 0.9 * b + 0.1 * a])


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "cut and mixed": cut_and_mixed,
    "halves": halves,
    "centered": lambda x: x - x.mean(0),
    "interpolated": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "scaled by the largest": lambda x: x / x.abs().amax(),
    "numbered": lambda x: x * torch.arange(1.0, len(x) + 1)[:, None],
    "scaled by NumPy": lambda x: torch.from_numpy(x.numpy() / x.numpy().max()),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_before_the_model(name: str) -> None:
    """Dry runs judge the model, not what it is given."""
    run = Run()
    for x, y in run.loader:
        with pytest.raises(GraphError, match=r"before the model: .* at test_batches\.py:"):
            run.loss(MIXED[name](x), y).backward()
        break


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "centered in itself": lambda x: x - x.mean(1, keepdim=True),
    "noisy": lambda x: x + torch.randn_like(x),
    "scaled by constants": lambda x: x / torch.tensor([1.0, 2, 3, 4]),
    "copied by NumPy": lambda x: torch.from_numpy(x.numpy().copy()),
}


@pytest.mark.parametrize("name", OWN)
def test_own_before_the_model(name: str) -> None:
    run = Run()
    for x, y in run.loader:
        x = OWN[name](x)
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
    run.check_traced(verdict="path" if name == "copied by NumPy" else "proven")


# Numbers that Python gives to a loss

Loss = Callable[[Tensor, Tensor], Tensor]
SIZES = 8, 7, 8
"""Of the batches."""


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def with_weights(weights: Callable[[Tensor], Tensor]) -> Loss:
    return lambda z, y: (each(z, y) * weights(y)).mean()


def by_counts(y: Tensor) -> Tensor:
    labels = y.tolist()
    return torch.tensor([1 / (1 + labels.count(k)) for k in range(3)], dtype=torch.float64)[y]


def by_counts_of_numpy(y: Tensor) -> Tensor:
    return torch.from_numpy(1 / (1 + np.bincount(y.numpy(), minlength=3)))[y]


def of_each_label(y: Tensor) -> Tensor:
    labels = y.tolist()
    return torch.tensor([1 / (1 + labels.count(k)) for k in labels], dtype=torch.float64)


def normalized_in_numpy(z: Tensor, y: Tensor) -> Tensor:
    scores = z.detach()[:, 0].numpy()
    return (each(z, y) * torch.from_numpy((scores - scores.mean()) / scores.std())).mean()


def above_the_median(z: Tensor, y: Tensor) -> Tensor:
    own = each(z, y)
    return (own * (own >= own.detach().median().item() + 0.001)).mean()


def counted_by_python(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).sum() / (100 + 3 * sum(k == 1 for k in y.tolist()))


# loss_reduction, loss
READ: dict[str, tuple[str, Loss]] = {
    "one over a count": ("sum", lambda z, y: each(z, y).sum() * (1 / (1.5 + y.sum().item()))),
    "a tensor of a count": (
        "sum",
        lambda z, y: each(z, y).sum() / torch.tensor(3.7 + y.sum().item()),
    ),
    "as many as a mask selects": ("sum", lambda z, y: each(z, y).sum() / len(y[y > 0])),
    "a count of a list": ("sum", counted_by_python),
    "weights of classes, by a list": ("mean", with_weights(by_counts)),
    "weights of classes, by numpy": ("mean", with_weights(by_counts_of_numpy)),
    "weights of samples, by a list": ("mean", with_weights(of_each_label)),
    "normalized in numpy": ("mean", normalized_in_numpy),
    "a threshold": ("mean", above_the_median),
    "through a detached factor": (
        "mean",
        lambda z, y: (each(z, y) * (z.detach()[:, 0] * (0.3 + y.double().mean().item()))).mean(),
    ),
}


def parts(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Batches that are parts of one tensor."""
    x, y = rows().tensors
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(5))]
    sizes = (*sizes, len(x) - sum(sizes))
    return list(zip(x.split(sizes), y.split(sizes), strict=True))[:-1]


def steps(run: Run, loss: Loss, exact: Loss | None = None, sizes: tuple[int, ...] = SIZES) -> None:
    for part, labels in parts(sizes):
        run.optimizer.zero_grad()
        loss(run.model(part), labels).backward()
        if exact is not None:
            run.check_sums(part, labels)
        run.optimizer.step()


@pytest.mark.parametrize("name", READ)
def test_read_numbers(name: str) -> None:
    reduction, loss = READ[name]
    with pytest.raises(GraphError, match=r"number|mixes samples|constant") as caught:
        steps(Run(loss_reduction=reduction), loss)
    assert "test_batches.py:" in str(caught.value)
    assert len(str(caught.value).split()) <= 40


def logged(z: Tensor, y: Tensor) -> Tensor:
    right = (z.argmax(1) == y).sum().item() / len(y)
    loss = 0.5 * F.cross_entropy(z, y) + 0.5 * F.cross_entropy(z, y)
    return loss if right >= 0 else 2 * loss


def logged_by_class(z: Tensor, y: Tensor) -> Tensor:
    """Numbers that change from batch to batch, none of which reaches the loss."""
    own = each(z, y)
    for k in sorted(set(y.tolist())):
        assert own[y == k].mean().item() * (1 + k) > 0
    return own.mean()


def annealed() -> Loss:
    met: list[float] = []

    def loss(z: Tensor, y: Tensor) -> Tensor:
        met.append(0.001 * len(met))
        return F.cross_entropy(z, y) + met[-1] * 0 * z.pow(2).sum(1).mean()

    return loss


# of which each is the mean of the samples' losses
PLAIN: dict[str, Loss] = {
    "logged": logged,
    "annealed": annealed(),
    "logged by class": logged_by_class,
    "over their number": lambda z, y: each(z, y).sum() / len(y),
    "times one over their number": lambda z, y: each(z, y).sum() * (1 / len(y)),
    "each over their number": lambda z, y: (each(z, y) / len(y)).sum(),
    "weights of their number": lambda z, y: (
        each(z, y) * torch.full((len(y),), 1 / len(y), dtype=torch.float64)
    ).sum(),
    "over all entries": lambda z, y: (each(z, y)[:, None].expand_as(z)).sum() / z.numel(),
    "labels by numpy": lambda z, y: F.cross_entropy(z, torch.from_numpy(y.numpy().copy())),
    "labels by a list": lambda z, y: F.cross_entropy(z, torch.tensor(y.tolist())),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers(name: str) -> None:
    """Also where an earlier run has left results of the same operations."""
    for _ in range(2):
        steps(Run(), PLAIN[name], exact=PLAIN[name])


# Weights that follow the size of the batch: what another batch shows

WEIGHED: dict[str, tuple[str, Loss]] = {
    "a sum and a mean": ("mean", lambda z, y: each(z, y).sum() + each(z, y).mean()),
    "each over their number, and a mean": ("mean", lambda z, y: (each(z, y) / len(y)).mean()),
    "each times their number, and a mean": ("mean", lambda z, y: (each(z, y) * len(y)).mean()),
    "in proportion to their number": ("mean", lambda z, y: F.cross_entropy(z, y) * (len(y) / 10)),
    "over a constant": ("mean", lambda z, y: each(z, y).sum() / 8),
    "a mean, times a constant": ("sum", lambda z, y: F.cross_entropy(z, y) * 8),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_weights_that_follow_the_size(name: str) -> None:
    reduction, loss = WEIGHED[name]
    with pytest.raises(GraphError, match="over the batch") as caught:
        steps(Run(loss_reduction=reduction), loss)
    assert "None" not in str(caught.value)


# Gradients that the loop gives for the samples' losses


def given(gradient: Callable[[int], Tensor], sizes: tuple[int, ...] = (8, 8)) -> Run:
    run = Run(loss_reduction="sum")
    for part, labels in parts(sizes):
        run.optimizer.zero_grad()
        own = each(run.model(part), labels)
        weights = gradient(len(part))
        own.backward(weights)
        assert_sums(run.sums, clipped(run.plain, part, labels, weights), 1e-10)
        run.optimizer.step()
    return run


def test_gradients_that_were_there_are_the_samples_own() -> None:
    held = iter(torch.rand(2, 8, generator=torch.Generator().manual_seed(3)).double().unbind())
    given(lambda n: next(held)).check_traced()


def test_one_gradient_for_all_samples() -> None:
    given(lambda n: torch.ones(n, dtype=torch.float64)).check_traced()


def test_gradients_by_position() -> None:
    with pytest.raises(GraphError, match="position"):
        given(lambda n: torch.arange(1.0, n + 1, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [(8, 8), (8, 7), (7, 8)])
def test_gradients_that_are_met_again_are_by_position(sizes: tuple[int, ...]) -> None:
    kept = torch.arange(1.0, 9, dtype=torch.float64)
    with pytest.raises(GraphError, match="position"):
        given(lambda n: kept[:n], sizes)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 7), (7, 8)])
def test_weights_that_are_met_again_are_by_position(sizes: tuple[int, ...]) -> None:
    kept = torch.arange(1.0, 9, dtype=torch.float64)
    loss = with_weights(lambda y: kept[: len(y)])
    with pytest.raises(GraphError, match="position"):
        steps(Run(), loss, sizes=sizes)


def test_gradients_that_follow_from_all_samples() -> None:
    run, (x, y) = Run(loss_reduction="sum"), rows().tensors
    own = each(run.model(x[:8]), y[:8])
    with pytest.raises(GraphError, match="mixes samples"):
        own.backward(own.detach().softmax(0))
