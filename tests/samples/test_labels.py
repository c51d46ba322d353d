"""A loss inside the model that is divided by how many labels count, which a first batch may hide."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import assert_sums, clipped_sum, make_private, per_sample_gradients, summed
from tests.refusal import refused

B, T, D, K = 4, 5, 6, 3
WEIGHTS = torch.tensor([1.0, 20.0, 5.0])
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]
COUPLED = "is part of the loss|labels that count|mixes samples|independently|whole batch"


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


def ignoring(value: int) -> Loss:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten().long(), ignore_index=value)

    return loss


def chosen(scores: Tensor, labels: Tensor) -> Tensor:
    """Those that count are taken by hand."""
    known = labels != 200
    return F.cross_entropy(scores[known], labels[known])


def measured(scores: Tensor, labels: Tensor) -> Tensor:
    """What is missing is NaN."""
    known = ~labels.isnan()
    return (scores[known] - labels[known]).square().mean()


def finite(scores: Tensor, labels: Tensor) -> Tensor:
    """What is missing lies below any measure."""
    known = (labels > -9.0).to(scores)
    return ((scores - labels).square() * known).sum() / known.sum()


def findings(scores: Tensor, labels: Tensor) -> Tensor:
    """What is not known is -1."""
    known = (labels >= 0).to(scores)
    losses = F.binary_cross_entropy_with_logits(scores, labels.clamp(min=0), reduction="none")
    return (losses * known).sum() / known.sum()


def of_rows(own: Loss) -> Loss:
    """Of one label a row."""
    return lambda scores, labels: own(scores.mean(1), labels)


def span(scores: Tensor, labels: Tensor) -> Tensor:
    """The place of an answer; one beyond the last token counts for nothing."""
    places = scores.mean(2)
    return F.cross_entropy(places, labels.clamp(0, T), ignore_index=T)


def lost_row(value: float) -> Callable[[Tensor], Tensor]:
    def lose(labels: Tensor) -> Tensor:
        labels = labels.clone()
        labels[2] = value
        return labels

    return lose


class Labeled(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(9, D), nn.Linear(D, K), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.table(ids))), labels)


def left_out(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[2, 2:] = IGNORED
    return labels


def lost(value: float) -> Callable[[Tensor], Tensor]:
    def lose(labels: Tensor) -> Tensor:
        labels = labels.clone()
        labels[2, 2:] = value
        return labels

    return lose


def one(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[2] = 1
    return labels


IDS, TOKENS = torch.arange(B * T).view(B, T) % 9, torch.arange(B * T).view(B, T) % K
REALS = torch.linspace(-1, 2, B * T * K).view(B, T, K)
CASES = {
    "255": (ignoring(255), TOKENS, lost(255)),
    "255 in a byte": (ignoring(255), TOKENS.to(torch.uint8), lost(255)),
    "-1": (ignoring(-1), TOKENS, lost(-1)),
    "by hand": (chosen, TOKENS, lost(200)),
    "NaN": (measured, REALS, lost(torch.nan)),
    "below": (finite, REALS, lost(-9)),
    "unknown": (findings, (REALS > 0).float(), lost(-1)),
    "token mean": (token_mean, TOKENS, left_out),
    "a row has none": (of_rows(F.cross_entropy), torch.arange(B) % K, lost_row(IGNORED)),
    "a row's is NaN": (of_rows(measured), REALS[:, 0], lost_row(torch.nan)),
    "a row's is -1": (of_rows(findings), (REALS[:, 0] > 0).float(), lost_row(-1)),
    "weighted": (weighted, torch.zeros(B, dtype=torch.int64), one),
    "positives": (positives, torch.zeros(B, K), one),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_of_a_later_batch(case: str) -> None:
    """It couples rows, which the first batch need not: refused there, or at once."""
    loss, first, then = CASES[case]
    private, optimizer = make_private(Labeled(loss))[1:3]
    with refused(COUPLED):
        for labels in (first, first, then(first)):
            private(IDS, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()
    with refused(COUPLED):
        private(IDS, then(first)).backward()


def test_a_place_beyond_the_last_token() -> None:
    """Which place that is changes from batch to batch."""
    private, optimizer = make_private(Labeled(span))[1:3]
    private(IDS, torch.arange(B) % T).backward()
    optimizer.step()
    optimizer.zero_grad()
    with refused(COUPLED):
        private(IDS, torch.arange(B) % T + T * (torch.arange(B) == 1)).backward()


@pytest.mark.parametrize("labels", [TOKENS, left_out(TOKENS)], ids=["all count", "some do"])
def test_a_mean_of_rows_own_means(labels: Tensor) -> None:
    private = make_private(Labeled(row_means))[1]
    private(IDS, labels).backward()
    private(IDS, left_out(TOKENS)).backward()


def test_classes_that_all_count() -> None:
    """An ordinary cross entropy inside the model, whose first batch has one class alone."""

    def mean(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.mean(1), labels)

    private, optimizer = make_private(Labeled(mean))[1:3]
    for labels in (torch.zeros(B, dtype=torch.int64), torch.arange(B) % K):
        private(IDS, labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def following(scores: Tensor, labels: Tensor) -> Tensor:
    """Each position's label is the next one's; the last has a constant that does not count."""
    return token_mean(scores, F.pad(labels, (0, 1), value=IGNORED)[:, 1:])


def own_following(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").mean(1)


def test_constants_that_do_not_count() -> None:
    """As many for each sample: exact in batches of any size, whose labels all count."""
    model = Labeled(following).double()
    own = Labeled(own_following).double()
    own.load_state_dict(model.state_dict())
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1, lr=0.0)
    for rows, length in ((4, 5), (4, 5), (2, 5), (3, 4), (4, 5)):
        batch = IDS[:rows, :length], TOKENS[:rows, :length]
        grads = per_sample_gradients(own, batch, lambda losses, target: losses)
        optimizer.zero_grad()
        private(*batch).backward()
        assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)
        optimizer.step()


@pytest.mark.parametrize(
    "then",
    [left_out, lost_row(IGNORED), lambda y: y.clone().index_fill_(1, torch.tensor(2), IGNORED)],
)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_labels_of_samples_beside_constants(steps: int, then: Callable[[Tensor], Tensor]) -> None:
    """Some of a sample's, all of it, one of each: none is made up for by the constants."""
    private, optimizer = make_private(Labeled(following))[1:3]
    for _ in range(steps):
        private(IDS, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    with refused(COUPLED):
        private(IDS, then(TOKENS)).backward()


def mse(scores: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(scores, labels)


def own_known(scores: Tensor, labels: Tensor) -> Tensor:
    """Each row's own mean over what is known."""
    known = (labels >= 0) & ~labels.isnan()
    losses = (scores - labels.nan_to_num()).square() * known
    return (losses.sum((1, 2)) / known.sum((1, 2)).clamp_min(1)).mean()


def of_one_class(scores: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return torch.where(labels.flatten() == 1, 2 * losses, losses).mean()


def rows(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(1)


ALONE = {
    "all are known": (mse, REALS, REALS.flip(0)),
    "zeros and ones": (mse, (REALS > 0).float(), (REALS < 0).float()),
    "missing": (own_known, REALS, lost(torch.nan)(REALS)),
    "unknown": (own_known, REALS, lost(-1)(REALS)),
    "a class counts twice": (of_one_class, TOKENS, TOKENS.flip(0)),
    "nothing is ignored": (ignoring(255), TOKENS, TOKENS.flip(0)),
}


@pytest.mark.parametrize("case", ALONE)
def test_rows_that_are_apart_whatever_their_labels(case: str) -> None:
    """Against each row's own loss, of the first batch and of a later one."""
    loss, *batches = ALONE[case]
    model = Labeled(loss).double()
    own, params = copy.deepcopy(model), dict(model.named_parameters())
    own.loss = lambda *given: torch.stack(
        [loss(*row) for row in zip(*map(rows, given), strict=True)]
    )
    private, optimizer = make_private(model, max_grad_norm=0.1)[1:3]
    for labels in batches:
        labels = labels.double() if labels.is_floating_point() else labels
        own.load_state_dict(model.state_dict())
        grads = per_sample_gradients(own, (IDS, labels), lambda out, _: out)
        private(IDS, labels).backward()
        assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)
        optimizer.step()
        optimizer.zero_grad()
