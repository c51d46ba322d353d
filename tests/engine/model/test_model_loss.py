"""model_loss="per_sample" for criteria and for models of one's own; what its errors say."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError
from fastclip.losses import per_sample_cross_entropy
from tests.oracle import assert_sums, clipped_sum, norms, per_sample_gradients, summed
from tests.oracle import make_private as privately
from tests.refusal import refused

SAMPLES, TOKENS, CLASSES = 5, 4, 3
WEIGHT = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Of which 4, 3, 1, 0 and 2 count."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, TOKENS, 6), torch.randint(0, CLASSES, (SAMPLES, TOKENS))
    for i, count in enumerate((4, 3, 1, 0, 2)):
        y[i, count:] = -100
    return x.double(), y


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, CLASSES).double()


class Own(nn.Module):
    """Computes its loss itself, of all tokens of a batch."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss = linear(), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x).flatten(0, 1), y.flatten())


def check(
    model: nn.Module, run: Callable[[Any], torch.Tensor], weight: Any = None, **asked
) -> None:
    """`run` of a private model backwards, against one sample at a time."""
    x, y = tokens()
    net = model.net if isinstance(model, Own) else model
    grads = per_sample_gradients(net, x, lambda z, _: torch.zeros(len(z)) + 0 * z.sum())
    losses = per_sample_cross_entropy
    for i in range(SAMPLES):
        twin = copy.deepcopy(net)
        losses(twin(x[i : i + 1]), y[i : i + 1], weight=weight).sum().backward()
        for name, p in twin.named_parameters():
            grads[name][i] = p.grad
    threshold = norms(grads).quantile(0.5).item()
    _, private, optimizer, _ = privately(
        model, max_grad_norm=threshold, model_loss="per_sample", lr=0.0, **asked
    )
    for _ in range(3):
        optimizer.zero_grad()
        run(private).backward()
        found = summed(dict(net.named_parameters()))
        assert_sums(found, clipped_sum(grads, threshold), 1e-10)
        optimizer.step()


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_criterion(kind: type[nn.Module], weight: Any) -> None:
    """Flattened tokens, of a criterion that stays the user's object."""
    criterion = kind(weight=weight)
    x, y = tokens()

    def run(model: nn.Module) -> torch.Tensor:
        z = model(x).flatten(0, 1)
        return criterion(z if kind is nn.CrossEntropyLoss else z.log_softmax(1), y.flatten())

    check(linear(), run, weight, criterion=criterion)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_a_loss_inside_of_the_model(loss: Any) -> None:
    x, y = tokens()
    check(Own(loss), lambda model: model(x, y))


def test_a_criterion_is_itself_again() -> None:
    """In evaluation, and after cleanup."""
    criterion = nn.CrossEntropyLoss()
    model, (x, y) = linear(), tokens()
    own = criterion(model(x).flatten(0, 1), y.flatten()).item()
    _, private, _, _ = privately(model, model_loss="per_sample", criterion=criterion)
    trained = criterion(private(x).flatten(0, 1), y.flatten())
    expected = per_sample_cross_entropy(model(x), y).mean().item()
    assert trained.item() == pytest.approx(expected, rel=1e-12)
    with torch.no_grad():
        assert criterion(private(x).flatten(0, 1), y.flatten()).item() == pytest.approx(own)
    private.cleanup()
    assert criterion(model(x).flatten(0, 1), y.flatten()).item() == pytest.approx(own)
    assert "forward" not in vars(criterion)


def test_one_label_a_sample_is_said_nothing_of() -> None:
    criterion, model = nn.CrossEntropyLoss(), linear()
    _, private, _, _ = privately(model, model_loss="per_sample", criterion=criterion)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(private(torch.randn(4, 6).double()), torch.tensor([0, 1, 2, 1])).backward()
    assert summed(dict(model.named_parameters()))["bias"].norm() > 0


@pytest.mark.parametrize(
    ("asked", "way_out"),
    [
        ({"model_loss": "mean"}, "per_sample"),
        ({"loss_reduction": "sum"}, "loss_reduction"),
        ({"grad_sample_mode": "hooks"}, "grad_sample_mode"),
    ],
)
def test_arguments(asked: dict[str, str], way_out: str) -> None:
    model = linear()
    with refused(way_out, ArgumentError):
        FastPrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(8, 6)), batch_size=4),
            noise_multiplier=1.0, max_grad_norm=1.0, **{"model_loss": "per_sample", **asked},
        )  # fmt: skip


def by_hand(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over tokens that no function of torch computes."""
    counted = y != -100
    return (F.cross_entropy(z, y, reduction="none") * counted).sum() / counted.sum()


def test_a_loss_that_is_not_known_is_refused() -> None:
    x, y = tokens()
    _, private, _, _ = privately(Own(by_hand), model_loss="per_sample")
    with refused("does not know this loss|return one loss per sample"):
        private(x, y).backward()


def test_labels_that_are_not_of_all_samples_alike() -> None:
    """Tokens that were left out before the loss."""
    x, y = tokens()

    class Sparse(Own):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.net(x)[y != -100], y[y != -100])

    for kept in (slice(0, 5), slice(0, 2)):  # 10 tokens of 5 samples, 7 of 2
        _, private, _, _ = privately(Sparse(F.cross_entropy), model_loss="per_sample")
        with refused("7 labels for 2 samples, which model_loss='per_sample' cannot replace"):
            private(x[kept], y[kept]).backward()


def outside(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return by_hand(z.flatten(0, 1), y.flatten())


def ignoring(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("loss", "fix"),
    [
        (outside, r"test_model_loss\.py:\d+.*public denominator, len\(batch\) times"),
        (ignoring, r"test_model_loss\.py:\d+.*model_loss=\"per_sample\""),
    ],
)
def test_a_mean_over_tokens_outside(loss: Callable, fix: str) -> None:
    """The line of the loss, and what to divide by instead."""
    x, y = tokens()
    _, private, _, _ = privately(linear())
    with refused(fix):
        loss(private(x), y).backward()


def test_the_public_denominator_serves() -> None:
    """What the error says to do: each sample's gradient is that of its sum over max_length."""
    (x, y), model = tokens(), linear()
    counted = y != -100

    def loss(z: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(z.transpose(1, 2), y, reduction="none") * counted
        return each.sum() / (len(x) * TOKENS)

    grads = per_sample_gradients(model, x, lambda z, _: torch.zeros(len(z)) + 0 * z.sum())
    for i in range(SAMPLES):
        twin = copy.deepcopy(model)
        own = F.cross_entropy(twin(x[i]), y[i], reduction="none") * counted[i]
        (own.sum() / TOKENS).backward()
        for name, p in twin.named_parameters():
            grads[name][i] = p.grad
    _, private, _, _ = privately(model, max_grad_norm=0.1)
    loss(private(x)).backward()
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 0.1), 1e-10)
