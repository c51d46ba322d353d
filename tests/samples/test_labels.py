"""A loss inside the model that is divided by how many labels count, which a first batch may hide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.samples.ignored import IGNORED, Numbers
from fastclip.samples.mixed_outputs import _void
from tests.oracle import make_private
from tests.refusal import refused

B, T, D, K = 4, 5, 6, 3
WEIGHTS = torch.tensor([1.0, 20.0, 5.0])
Loss = Callable[[Tensor, Tensor], Tensor]


def token_mean(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def row_means(scores: Tensor, labels: Tensor) -> Tensor:
    """Each row's own mean over its labels that count."""
    losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)).mean()


def weighted(scores: Tensor, labels: Tensor) -> Tensor:
    scores = scores.mean(1)
    return F.cross_entropy(scores, labels, weight=WEIGHTS) + 1e-3 * scores.square().sum(1).mean()


def positives(scores: Tensor, labels: Tensor) -> Tensor:
    """Divided by how many there are."""
    own = F.binary_cross_entropy_with_logits(scores.mean(1), labels, reduction="sum")
    return own / labels.sum().clamp_min(1)


class Labelled(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(9, D), nn.Linear(D, K), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.table(ids))), labels)


def left_out(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[2, 2:] = IGNORED
    return labels


def one(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[2] = 1
    return labels


IDS, TOKENS = torch.arange(B * T).view(B, T) % 9, torch.arange(B * T).view(B, T) % K
CASES = {
    "token mean": (token_mean, TOKENS, left_out),
    "weighted": (weighted, torch.zeros(B, dtype=torch.int64), one),
    "positives": (positives, torch.zeros(B, K), one),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_of_a_later_batch(case: str) -> None:
    """The first batch couples no rows, and trains; the second does."""
    loss, first, then = CASES[case]
    private, optimizer = make_private(Labelled(loss))[1:3]
    for _ in range(2):
        private(IDS, first).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        loss = private(IDS, then(first))
        with refused("is part of the loss"):
            loss.backward()
        optimizer.zero_grad()
    private(IDS, first).backward()
    optimizer.step()


@pytest.mark.parametrize("labels", [TOKENS, left_out(TOKENS)], ids=["all count", "some do"])
def test_a_mean_of_rows_own_means(labels: Tensor) -> None:
    private = make_private(Labelled(row_means))[1]
    private(IDS, labels).backward()
    private(IDS, left_out(TOKENS)).backward()


def test_classes_that_all_count() -> None:
    """An ordinary cross entropy inside the model, whose first batch has one class alone."""

    def mean(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.mean(1), labels)

    private, optimizer = make_private(Labelled(mean))[1:3]
    for labels in (torch.zeros(B, dtype=torch.int64), torch.arange(B) % K):
        private(IDS, labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_nobody_contributes_through_what_is_void() -> None:
    """What stands for a refusal where labels lie on a device."""
    for held in (False, True):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(partial(_void, torch.tensor(held)))
        (2 * x).sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isnan().all()) == held


def test_a_number_of_a_row_is_none() -> None:
    """On a device, what looks up -100 would end the process."""
    table, ids = torch.randn(9, 2), torch.tensor([3, IGNORED])
    with Numbers():
        for use in (
            lambda: F.embedding(ids, table), lambda: table[ids], lambda: table.index_select(0, ids),
            lambda: F.cross_entropy(table[:2], ids, ignore_index=0),
        ):  # fmt: skip
            with pytest.raises(IndexError, match=str(IGNORED)):
                use()
        assert torch.isfinite(F.cross_entropy(table[:2, :], torch.tensor([1, IGNORED])))
