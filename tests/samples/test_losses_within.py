"""Losses that a model computes itself, and what else it returns that belongs to no one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import (
    assert_sums,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

B, T, D, V = 6, 5, 4, 7

Loss = Callable[[Tensor, Tensor], Tensor]


def mean_over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_in_rows(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    known = labels != -100
    return losses.sum(1) / known.sum(1)


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    z = logits.mean(1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 0], labels[:, 0], weight=torch.linspace(0.1, 3, V).to(logits))


COUPLED: dict[str, Loss] = {
    "tokens": mean_over_tokens,
    "contrastive": contrastive,
    "classes": weighted,
    "balanced": lambda logits, labels: (p := logits.softmax(-1).mean((0, 1))) @ p,
    "statistic": lambda logits, labels: logits.softmax(-1).mean((0, 1)),
    "detached": lambda logits, labels: (x := logits.square().mean()) / x.detach(),
}


class Language(nn.Module):
    def __init__(self, loss: Loss, alone: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.loss, self.alone = (
            nn.Embedding(V, D),
            nn.Linear(D, V),
            loss,
            alone,
        )

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.table(ids))
        if labels is None:
            return {"logits": logits}
        loss = self.loss(logits, labels)
        return loss if self.alone else {"loss": loss, "logits": logits}

    def training_step(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.table(ids)), labels)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, V, (B, T))
    return ids, ids.masked_fill(torch.arange(T) > torch.arange(B)[:, None] % T, -100)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("case", COUPLED)
def test_a_loss_that_couples_rows(case: str, alone: bool) -> None:
    """Refused where it is part of the loss, and only there."""
    model, (ids, labels) = Language(COUPLED[case], alone), batch()
    private = make_private(model)[1]
    for _ in range(2):
        with refused("return one loss per sample|batch axis of the model's inputs"):
            out = private(ids, labels)
            (out if alone else out["loss"]).sum().backward()
    if not alone:
        private(ids, labels)["logits"].square().mean().backward()


@pytest.mark.parametrize("case", COUPLED)
def test_in_a_method(case: str) -> None:
    model, (ids, labels) = Language(COUPLED[case]), batch()
    private = make_private(model)[1]
    with refused("return one loss per sample|batch axis of the model's inputs"):
        private.training_step(ids, labels).sum().backward()


@pytest.mark.parametrize("alone", [True, False])
def test_a_mean_of_rows_is_exact(alone: bool) -> None:
    ids, labels = batch()
    model = Language(lambda *given: mean_in_rows(*given).mean(), alone).double()
    own = Language(mean_in_rows, alone=True).double()
    own.load_state_dict(model.state_dict())
    grads = per_sample_gradients(own, (ids, labels), lambda losses, target: losses)
    params = dict(model.named_parameters())
    private = make_private(model, max_grad_norm=0.5)[1]
    out = private(ids, labels)
    (out if alone else out["loss"]).backward()
    assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-10)


def test_equal_lengths_are_exact() -> None:
    """A mean over tokens is one over rows where all have as many."""
    ids, model = batch()[0], Language(mean_over_tokens).double()
    own = Language(lambda a, b: F.cross_entropy(a.mT, b, reduction="none").mean(1), True).double()
    own.load_state_dict(model.state_dict())
    grads = per_sample_gradients(own, (ids, ids), lambda losses, target: losses)
    params = dict(model.named_parameters())
    private = make_private(model, max_grad_norm=0.5)[1]
    private(ids, ids)["loss"].backward()
    assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-10)


def test_scores_of_rows_against_rows() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.layer(x)
            return z, z @ z.T

    private = make_private(Scores())[1]
    with refused("return one loss per sample"):
        F.cross_entropy(private(torch.randn(B, D))[1], torch.arange(B)).backward()


class Features(nn.Module):
    """As of LLaVA: what it returns beside the logits are the features of each row, of which these are
    made, and nothing says that they are of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        rows = self.vision(x).unbind(0)
        return {"logits": self.head(torch.stack(rows).tanh()).mean(1), "features": rows}


def row_features(out: dict[str, Any]) -> Tensor:
    return torch.stack([row.square().mean() for row in out["features"]])


@pytest.mark.parametrize("with_logits", [False, True])
def test_returned_tensors_of_which_the_loss_is_made(with_logits: bool) -> None:
    def losses(out: dict[str, Any], _: Any) -> Tensor:
        return row_features(out) + (out["logits"].sin().sum(1) if with_logits else 0)

    torch.manual_seed(0)
    model = Features()
    check_exact(model, torch.randn(B, T, D), losses, dtype=torch.float64)


class Folded(nn.Module):
    """Its layers see several rows a sample, and what it returns has no axis of samples."""

    def __init__(self, loss: Callable[..., Tensor], time_major: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))
        self.loss, self.time_major = loss, time_major

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_major else x
        z = self.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.loss(z.transpose(0, 1) if self.time_major else z, *given)


def two_views(z: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(z[:, :2].flatten(0, 1), dim=1)
    scores = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    return F.cross_entropy(scores, torch.arange(len(z)) ^ 1)


def weighted_frames(z: Tensor, weights: Tensor) -> Tensor:
    return (z.square().mean(2) * weights).sum() / weights.sum()


@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("loss", [two_views, weighted_frames])
def test_a_folded_loss_that_couples_rows(loss: Callable[..., Tensor], time_major: bool) -> None:
    private = make_private(Folded(loss, time_major).double())[1]
    x, weights = torch.randn(B, T, D), torch.rand(B, T)
    for _ in range(2):
        with refused("return one loss per sample"):
            private(x.double(), weights.double()).backward()


@pytest.mark.parametrize("time_major", [True, False])
def test_a_folded_mean_of_rows_is_exact(time_major: bool) -> None:
    model = Folded(lambda z: z.sin().square().mean(), time_major).double()
    own = Folded(lambda z: z.sin().square().mean((1, 2)), time_major).double()
    own.load_state_dict(model.state_dict())
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    for rows in (B, 4, 9):
        x = torch.randn(rows, T, D, dtype=torch.float64)
        grads = per_sample_gradients(own, x, lambda losses, target: losses)
        optimizer.zero_grad()
        private(x).backward()
        assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)


class FoldedLanguage(Language):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.table(ids).flatten(0, 1)).unflatten(0, ids.shape)
        assert labels is not None
        return self.loss(logits, labels), logits


def test_folded_labels_that_do_not_count_come_later() -> None:
    """The first batch has none of them, and only what is folded says so."""
    ids, labels = batch()
    model = FoldedLanguage(mean_over_tokens)
    model.table.requires_grad_(False)
    private = make_private(model)[1]
    private(ids, ids)[0].backward()
    with refused("return one loss per sample|labels that count"):
        private(ids, labels)[0].backward()


class Beside(nn.Module):
    """It returns what is made of parameters alone beside the rows, as CLIP its scale."""

    def __init__(self, made: Callable[[nn.Linear], Tensor], rows: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.made, self.rows = nn.Linear(D, D), nn.Linear(D, 3), made, rows

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.made(self.layer)
        return self.head(torch.tanh(self.layer(x))), made.expand(len(x)) if self.rows else made


MADE: dict[str, Callable[[nn.Linear], Tensor]] = {
    "a scale": lambda layer: layer.bias[0].exp(),
    "a parameter": lambda layer: layer.bias,
    "norms of weights": lambda layer: layer.weight.norm(dim=1),
    "a divergence": lambda layer: (layer.weight.square() - layer.weight.exp()).sum() / 100,
}


@pytest.mark.parametrize("case", MADE)
def test_values_of_parameters_beside_the_rows(case: str) -> None:
    """They may be returned. As a term of the loss without samples they are a penalty, whose gradient
    is added once; as a factor of the samples' they raise an error.
    """
    torch.manual_seed(0)
    model, x = Beside(MADE[case]).double(), torch.randn(B, D).double()
    check_exact(model, x, lambda out, _: out[0].sin().sum(1), dtype=torch.float64)
    plain = Beside(MADE[case]).double()
    _, private, optimizer, _ = make_private(model, batch_size=B, dataset_size=6 * B)
    for _ in range(4):
        plain.load_state_dict(model.state_dict())
        sums = clipped_sum(per_sample_gradients(plain, x, lambda out, _: out[0].sin().sum(1)), 1.0)
        plain(x)[1].mean().backward()
        optimizer.zero_grad()
        out = private(x)
        (out[0].sin().sum(1).mean() + out[1].mean()).backward()
        optimizer.step()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            penalty = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(p.grad, sums[name] / B + penalty, rtol=1e-9, atol=1e-12)
        plain.zero_grad()
    out = private(x)
    with refused("errors.html#untracked-use"):
        (out[0].square().mean() * out[1].mean()).backward()


def test_a_value_of_parameters_once_a_row() -> None:
    torch.manual_seed(0)
    model = Beside(MADE["a scale"], rows=True)
    check_exact(
        model,
        torch.randn(B, D),
        lambda out, _: (out[0] * out[1][:, None]).sum(1),
        dtype=torch.float64,
    )
