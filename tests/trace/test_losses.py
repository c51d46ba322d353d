"""Losses outside the model: which couple samples, where, and what weight a sample has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trace.standalone import Traced, traced

B, K, T = 6, 4, 5
Loss = Callable[[Tensor, Any], Tensor]


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CLASSES = torch.randint(K, (B,), generator=drawn())
BINARY = torch.tensor([1.0, 0, 1, 1, 0, 0])
REAL = torch.rand(B, generator=drawn(1))
SOFT = torch.rand(B, K, generator=drawn(2)).softmax(1)
TOKENS = torch.randint(K, (B, T), generator=drawn(3))
PADDED = TOKENS.clone()
PADDED[0, 3:] = -100
ONE_IGNORED = CLASSES.clone()
ONE_IGNORED[2] = -100
WEIGHTS = torch.rand(B, generator=drawn(4)) + 0.1
TIMES = torch.rand(B, generator=drawn(5)), torch.tensor([1.0, 0, 1, 1, 0, 1])
OF_CLASSES = torch.tensor([1.0, 2, 3, 4])


def rows(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="none")


def tokens(o: Tensor) -> Tensor:
    return o.view(len(o), T, -1)


def of_tokens(reduction: str) -> Loss:
    return lambda o, y: F.cross_entropy(tokens(o).flatten(0, 1), y.flatten(), reduction=reduction)


def token_losses(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(tokens(o).transpose(1, 2), y, reduction="none")


def mean_in_row(o: Tensor, y: Tensor) -> Tensor:
    kept = y != -100
    return (token_losses(o, y).sum(1) / kept.sum(1).clamp(min=1)).mean()


def dice_of_row(o: Tensor, y: Tensor) -> Tensor:
    p = o.sigmoid()
    return (1 - 2 * (p * y[:, None]).sum(1) / (p.sum(1) + y + 1e-6)).mean()


def focal(o: Tensor, y: Tensor) -> Tensor:
    each = rows(o, y)
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def loop(o: Tensor, y: Tensor) -> Tensor:
    return sum(F.cross_entropy(o[i : i + 1], y[i : i + 1]) for i in range(len(o))) / len(o)


def gaussian(o: Tensor, y: Tensor) -> Tensor:
    return (0.5 * (o[:, 1] + (o[:, 0] - y) ** 2 / o[:, 1].exp())).mean()


def connectionist(o: Tensor, y: Tensor) -> Tensor:
    scores, full = tokens(o).transpose(0, 1).log_softmax(-1), torch.full((len(o),), T)
    two = torch.full((len(o),), 2)
    return F.ctc_loss(scores, y[:, :2].clamp(min=1), full, two, reduction="sum")


def quantiles(o: Tensor, y: Tensor) -> Tensor:
    d = y - o[:, 0]
    return torch.maximum(0.9 * d, -0.1 * d).mean()


def one_by_one(o: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(z, k) for z, k in zip(tokens(o), y, strict=True)]).mean()


def margins(o: Tensor, y: Tensor) -> Tensor:
    true = o.gather(1, y[:, None])
    return F.relu(1 + o - true).sum(1).mean()


def next_tokens(o: Tensor, y: Tensor) -> Tensor:
    scores = tokens(o)[:, :-1].reshape(-1, K)
    return F.cross_entropy(scores, y[:, 1:].reshape(-1), reduction="sum") / len(o)


# accepted: outputs of the network, target, loss, degree
ORDINARY: dict[str, tuple[int, Any, Loss, int | None]] = {
    "cross entropy, mean": (K, CLASSES, F.cross_entropy, -1),
    "cross entropy, sum": (K, CLASSES, lambda o, y: F.cross_entropy(o, y, reduction="sum"), 0),
    "cross entropy, sum / b": (
        K,
        CLASSES,
        lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o),
        -1,
    ),
    "probabilities": (K, SOFT, F.cross_entropy, -1),
    "label smoothing": (K, CLASSES, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), -1),
    "tokens of each row, a mean, some ignored": (T * K, PADDED, one_by_one, -1),
    "all rows, sorted": (K, CLASSES, lambda o, y: rows(o, y).sort()[0].mean(), -1),
    "squares, sum": (1, REAL, lambda o, y: F.mse_loss(o[:, 0], y, reduction="sum"), 0),
    "squares, mean": (1, REAL, lambda o, y: F.mse_loss(o[:, 0], y), -1),
    "squares of [b, k]": (K, SOFT, F.mse_loss, -1),
    "squares by hand": (1, REAL, lambda o, y: ((o[:, 0] - y) ** 2).mean(), -1),
    "absolute": (1, REAL, lambda o, y: F.l1_loss(o[:, 0], y), -1),
    "smooth absolute": (1, REAL, lambda o, y: F.smooth_l1_loss(o[:, 0], y), -1),
    "huber": (1, REAL, lambda o, y: F.huber_loss(o[:, 0], y, reduction="sum"), 0),
    "logits, constant pos_weight": (
        1,
        BINARY,
        lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y, pos_weight=torch.tensor(3.0)),
        -1,
    ),
    "probabilities of one class": (
        1,
        BINARY,
        lambda o, y: F.binary_cross_entropy(o[:, 0].sigmoid(), y, reduction="sum"),
        0,
    ),
    "rows, mean": (K, CLASSES, lambda o, y: rows(o, y).mean(), -1),
    "rows, own weights": (K, (CLASSES, WEIGHTS), lambda o, d: (rows(o, d[0]) * d[1]).mean(), -1),
    "focal": (K, CLASSES, focal, -1),
    "dice of each row": (1, BINARY, dice_of_row, -1),
    "tokens, mean in each row": (T * K, PADDED, mean_in_row, -1),
    "tokens, mean, all count": (T * K, TOKENS, of_tokens("mean"), -1),
    "tokens, sum, some ignored": (T * K, PADDED, of_tokens("sum"), 0),
    "next tokens": (T * K, TOKENS, next_tokens, -1),
    "divergence": (
        K,
        SOFT,
        lambda o, y: F.kl_div(F.log_softmax(o, 1), y, reduction="batchmean"),
        -1,
    ),
    "poisson": (1, REAL, lambda o, y: F.poisson_nll_loss(o[:, 0], y), -1),
    "gaussian": (2, REAL, gaussian, -1),
    "multi margin": (K, CLASSES, F.multi_margin_loss, -1),
    "margins by hand": (K, CLASSES, margins, -1),
    "many labels": (
        K,
        SOFT,
        lambda o, y: F.multilabel_soft_margin_loss(o, (y > 0.3).to(o)),
        -1,
    ),
    "hinge": (1, BINARY, lambda o, y: F.relu(1 - (2 * y - 1) * o[:, 0]).mean(), -1),
    "soft margin": (1, BINARY, lambda o, y: F.soft_margin_loss(o[:, 0], 2 * y - 1), -1),
    "cosine": (
        K,
        SOFT,
        lambda o, y: F.cosine_embedding_loss(o, y, torch.ones(len(o))),
        -1,
    ),
    "quantiles": (1, REAL, quantiles, -1),
    "row by row": (K, CLASSES, loop, -1),
    "outputs' own penalty": (
        K,
        CLASSES,
        lambda o, y: F.cross_entropy(o, y) + 0.1 * o.pow(2).sum(1).mean(),
        -1,
    ),
    "ctc, sum": (T * K, TOKENS, connectionist, 0),
    "triplets from the data": (
        K,
        (SOFT, SOFT.flip(1)),
        lambda o, d: F.triplet_margin_loss(o, d[0], d[1]),
        -1,
    ),
    "log cosh": (1, REAL, lambda o, y: torch.log(torch.cosh(o[:, 0] - y)).sum(), 0),
    "scaled": (K, CLASSES, lambda o, y: 128.0 * F.cross_entropy(o, y), -1),
}


def dice(o: Tensor, y: Tensor) -> Tensor:
    p = o.sigmoid()
    return 1 - 2 * (p * y[:, None]).sum() / (p.sum() + y.sum() + 1e-6)


def in_batch_negatives(o: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(o, dim=1)
    return F.cross_entropy(z @ z.roll(1, 1).T / 0.1, torch.arange(len(o)))


def sorted_risk(o: Tensor, d: Any) -> Tensor:
    order = d[0].argsort(descending=True)
    r = o[order, 0]
    return -((r - r.logcumsumexp(0)) * d[1][order]).sum() / d[1].sum()


def risk_matrix(o: Tensor, d: Any) -> Tensor:
    r = o[:, 0]
    at_risk = d[0][None] >= d[0][:, None]
    return -((r - (at_risk * r.exp()[None]).sum(1).log()) * d[1]).mean()


def hardest_triplets(o: Tensor, y: Tensor) -> Tensor:
    d, same = torch.cdist(o, o), y[:, None] == y[None]
    return F.relu((d * same).amax(1) - (d + same * 9).amin(1) + 1).mean()


def mixed_up(o: Tensor, y: Tensor) -> Tensor:
    return 0.7 * F.cross_entropy(o, y) + 0.3 * F.cross_entropy(o, y[torch.randperm(len(y))])


def balanced(o: Tensor, y: Tensor) -> Tensor:
    w = (len(y) - y.sum()) / y.sum()
    return F.binary_cross_entropy_with_logits(o[:, 0], y, pos_weight=w)


def even_load(o: Tensor, y: Tensor) -> Tensor:
    p = o.softmax(1).mean(0)
    return F.cross_entropy(o, y) + (p * p.log()).sum()


def spread(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o[:, 0], y) + F.relu(1 - o.std(0)).mean()


def above_mean(o: Tensor, y: Tensor) -> Tensor:
    each = rows(o, y)
    return torch.where(each > each.mean(), 2 * each, each).sum()


def squared_by_itself(o: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(o[:, 0], y)
    return loss * loss.detach()


def supervised_contrast(o: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(o, dim=1)
    s, same = z @ z.T, (y[:, None] == y[None]).to(o)
    return -(s.log_softmax(1) * same).sum(1).mean()


def cross_correlation(o: Tensor, y: Tensor) -> Tensor:
    z = (o - o.mean(0)) / (o.std(0) + 1e-3)
    c = z.T @ z / len(o)
    return (c - torch.eye(K)).pow(2).sum() + 0 * y.sum()


def correlation(o: Tensor, y: Tensor) -> Tensor:
    a, b = o[:, 0] - o[:, 0].mean(), y - y.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-6)


def two_counts(o: Tensor, y: Tensor) -> Tensor:
    """Each class divided by its own count."""
    each = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
    return (each * y).sum() / y.sum() + (each * (1 - y)).sum() / (1 - y).sum()


def balanced_terms(o: Tensor, y: Tensor) -> Tensor:
    """Two terms of every sample, each divided by another count."""
    each = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
    some, others = y.sum(), (1 - y).sum()
    first = each.sum() / some
    second = o[:, 0].square().sum() / others
    return first + second


def one_path(o: Tensor, y: Tensor) -> Tensor:
    """A count on one of two terms."""
    each = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
    return (each * y).sum() / y.sum() + each.mean()


def numbered(o: Tensor, y: Tensor) -> Tensor:
    return (rows(o, y) * torch.arange(1.0, len(o) + 1)).mean()


def ranked(o: Tensor, y: Tensor) -> Tensor:
    """The best score of one class over the worst of another."""
    s = o[:, 0]
    return F.relu(1 - s.masked_fill(y == 0, 99).amin() + s.masked_fill(y == 1, -99).amax())


def discrepancy(o: Tensor, y: Tensor) -> Tensor:
    k = torch.exp(-(torch.cdist(o, o) ** 2))
    return k.mean() - k.diag().mean() + 0 * y.sum()


def divided_by_learned(o: Tensor, y: Tensor) -> Tensor:
    return rows(o, y).sum() / o.detach().abs().sum()


COUPLED: dict[str, tuple[int, Any, Loss, str]] = {
    "dice of the batch": (1, BINARY, dice, "div"),
    "in-batch negatives": (K, CLASSES, in_batch_negatives, "mm"),
    "risk, sorted": (1, TIMES, sorted_risk, ""),
    "risk, matrix": (1, TIMES, risk_matrix, ""),
    "[b, 1] and [b]": (1, REAL, F.mse_loss, "mse_loss"),
    "hardest triplets": (K, CLASSES, hardest_triplets, "_cdist_forward"),
    "mixup": (K, CLASSES, mixed_up, ""),
    "pos_weight of the batch": (1, BINARY, balanced, ""),
    "three hardest rows": (K, CLASSES, lambda o, y: rows(o, y).topk(3)[0].mean(), "topk"),
    "even load": (K, CLASSES, even_load, ""),
    "spread of the batch": (K, REAL, spread, ""),
    "above the mean": (K, CLASSES, above_mean, ""),
    "three hardest rows, sorted": (
        K,
        CLASSES,
        lambda o, y: rows(o, y).sort(descending=True)[0][:3].mean(),
        "",
    ),
    "means of two classes": (
        1,
        BINARY,
        lambda o, y: o[y == 0].mean() - o[y == 1].mean(),
        "",
    ),
    "largest row": (K, CLASSES, lambda o, y: rows(o, y).max(), "max"),
    "root of the mean": (1, REAL, lambda o, y: F.mse_loss(o[:, 0], y).sqrt(), ""),
    "times itself": (1, REAL, squared_by_itself, ""),
    "supervised contrast": (K, CLASSES, supervised_contrast, ""),
    "cross-correlation": (K, CLASSES, cross_correlation, ""),
    "correlation": (1, REAL, correlation, ""),
    "a count for each class": (1, BINARY, two_counts, ""),
    "a count in one term": (1, BINARY, one_path, ""),
    "numbered weights": (K, CLASSES, numbered, ""),
    "ranked": (1, BINARY, ranked, ""),
    "discrepancy": (K, CLASSES, discrepancy, "_cdist_forward"),
    "over what is learned": (K, CLASSES, divided_by_learned, ""),
    "log of the mean": (K, CLASSES, lambda o, y: F.cross_entropy(o, y).log(), ""),
    "first two rows": (K, CLASSES, lambda o, y: F.cross_entropy(o[:2], y[:2]), ""),
    "target of the batch": (1, REAL, lambda o, y: F.mse_loss(o[:, 0], y - y.mean()), ""),
    "median row": (K, CLASSES, lambda o, y: rows(o, y).median(), "median"),
    "softmax over rows": (K, CLASSES, lambda o, y: (rows(o, y).softmax(0) * rows(o, y)).sum(), ""),
}


def masked_mean(o: Tensor, y: Tensor) -> Tensor:
    kept = (y != -100).to(o)
    return (token_losses(o, y) * kept).sum() / kept.sum()


def masked_mean_clamped(o: Tensor, y: Tensor) -> Tensor:
    kept = y != -100
    each = token_losses(o, y).masked_fill(~kept, 0.0)
    return each.sum() / kept.sum().clamp(min=1)


def chosen(o: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    at = (y.flatten() != -100).nonzero().squeeze(1)
    return tokens(o).flatten(0, 1)[at], y.flatten().index_select(0, at)


FACTORS: dict[str, tuple[int, Any, Loss]] = {
    "tokens, mean, some ignored": (T * K, PADDED, of_tokens("mean")),
    "tokens, masked mean": (T * K, PADDED, masked_mean),
    "tokens, masked mean, clamped": (T * K, PADDED, masked_mean_clamped),
    "tokens that a mask selects": (
        T * K,
        PADDED,
        lambda o, y: token_losses(o, y)[y != -100].mean(),
    ),
    "tokens that a mask selects, flat": (
        T * K,
        PADDED,
        lambda o, y: torch.masked_select(token_losses(o, y), y != -100).mean(),
    ),
    "tokens that are chosen by number": (
        T * K,
        PADDED,
        lambda o, y: F.cross_entropy(*chosen(o, y)),
    ),
    "squares of rows that a mask selects": (
        1,
        (REAL, BINARY),
        lambda o, d: F.mse_loss(o[:, 0][d[1] > 0], d[0][d[1] > 0]),
    ),
    "one label ignored": (K, ONE_IGNORED, F.cross_entropy),
    "weights of classes": (
        K,
        CLASSES,
        lambda o, y: F.cross_entropy(o, y, weight=OF_CLASSES),
    ),
    "weights over their sum": (
        K,
        (CLASSES, WEIGHTS),
        lambda o, d: (rows(o, d[0]) * d[1]).sum() / d[1].sum(),
    ),
    "weights normalized first": (
        K,
        (CLASSES, WEIGHTS),
        lambda o, d: (rows(o, d[0]) * (d[1] / d[1].sum())).sum(),
    ),
    "times a count": (
        1,
        BINARY,
        lambda o, y: F.mse_loss(o[:, 0], y) * y.sum(),
    ),
}


def run(outputs: int, target: Any, loss: Loss) -> Traced:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))
    x = torch.randn(B, 8)
    held = [y.clone() for y in (target if isinstance(target, tuple) else (target,))]
    given = tuple(held) if isinstance(target, tuple) else held[0]
    return traced(net, lambda: loss(net(x), given), [x, *held])


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary(name: str) -> None:
    outputs, target, loss, degree = ORDINARY[name]
    found = run(outputs, target, loss)
    assert found.verdict in ("proven", "values"), found.report
    assert found.degree == degree


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    outputs, target, loss, operation = COUPLED[name]
    found = run(outputs, target, loss)
    assert found.verdict == "coupled", found.report
    assert found.kinds != {"factor"}, found.report.findings
    causes = [f.cause for f in found.report.findings if f.cause is not None]
    assert causes, found.report.findings
    assert all(cause.line.startswith("test_losses.py:") for cause in causes), causes
    assert any(operation in cause.operation for cause in causes), causes


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name: str) -> None:
    found = run(*FACTORS[name])
    assert found.kinds == {"factor"}, found.report


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": lambda o: F.pad(o, (1, 2)),
    "in patches": lambda o: F.unfold(o.view(B, 1, 2, 2), 2),
    "gated": lambda o: F.glu(o, 1),
    "resized": lambda o: F.interpolate(o[:, None], 7, mode="linear"),
    "diagonal": lambda o: torch.diag_embed(o),
}


@pytest.mark.parametrize("way", LINEAR.values(), ids=LINEAR)
def test_a_factor_stays_one(way: Callable[[Tensor], Tensor]) -> None:
    """Whatever lies between a loss' division and the layers: its gradient is linear."""
    found = run(K, BINARY, lambda o, y: way(o).flatten(1).sin().sum() / y.sum())
    assert found.kinds == {"factor"}, found.report


class Squared(torch.autograd.Function):
    """Not the derivative of anything."""

    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return o * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * g


def test_what_squares_a_factor() -> None:
    found = run(K, BINARY, lambda o, y: (Squared.apply(o) + o).sum() / y.sum())
    assert found.kinds - {"factor"}, found.report


def test_selected_sum() -> None:
    """How many tokens a mask selects is seen by Python, and divides nothing."""
    found = run(T * K, PADDED, lambda o, y: token_losses(o, y)[y != -100].sum())
    assert found.verdict == "path"
    assert found.degree == 0


def logged(loss: Loss) -> Loss:
    """After a number that the loop only logs: divided by a count, too."""

    def both(o: Tensor, y: Tensor) -> Tensor:
        o.detach().sum() / (y > 0).sum()
        return loss(o, y)

    return both


@pytest.mark.parametrize("loss", [balanced_terms, one_path], ids=["two counts", "a count and b"])
@pytest.mark.parametrize("also_logged", [False, True])
def test_factors_that_differ(loss: Loss, also_logged: bool) -> None:
    """No strategy makes the weights of a loss' parts those of one sample: each division is named."""
    found = run(1, BINARY, logged(loss) if also_logged else loss)
    lines, first = inspect.getsourcelines(loss)
    divisions = {f"test_losses.py:{first + i}" for i, text in enumerate(lines) if " / " in text}
    assert found.kinds == {"factors"}, found.report
    for finding in found.report.findings:
        assert finding.cause is not None
        assert finding.cause.operation == "div", finding
        assert finding.cause.line in divisions, finding


def same_count_twice(o: Tensor, y: Tensor) -> Tensor:
    """Two terms, divided by a count that each of them computes."""
    each = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
    return each.sum() / y.sum().clamp(min=1) + (o[:, 0] ** 2).sum() / y.sum().clamp(min=1)


def other_bounds(o: Tensor, y: Tensor) -> Tensor:
    """The same count, bounded otherwise."""
    each = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
    return each.sum() / y.sum().clamp(min=1) + (o[:, 0] ** 2).sum() / y.sum().clamp(min=2)


def changed_between(o: Tensor, y: Tensor) -> Tensor:
    """The same line, of labels that have been written into."""
    each = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
    z = y.clone()
    first = each.sum() / z.sum()
    z.mul_(y + 1)
    return first + (o[:, 0] ** 2).sum() / z.sum()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(same_count_twice, "factor"), (other_bounds, "factors"), (changed_between, "factors")],
)
def test_numbers_that_are_computed_again(loss: Loss, kind: str) -> None:
    assert run(1, BINARY, loss).kinds == {kind}


def test_the_line_of_a_factor() -> None:
    """It is the loss' own, not that of a number which is only logged."""
    outputs, target, loss = FACTORS["tokens, masked mean"]
    lines, first = inspect.getsourcelines(masked_mean)
    (finding,) = run(outputs, target, logged(loss)).report.findings
    assert finding.kind == "factor"
    assert finding.cause is not None
    assert finding.cause.line == f"test_losses.py:{first + len(lines) - 1}"


def test_reads() -> None:
    """Numbers that Python reads: proven for the way that this step took."""
    found = run(
        1, REAL, lambda o, y: F.mse_loss(o[:, 0], y) * (2.0 if o.mean().item() > 9 else 1.0)
    )
    assert found.verdict == "path"
    assert found.report.reads[0].of == "several samples"


def test_counts() -> None:
    assert len(ORDINARY) >= 25
    assert len(COUPLED) >= 20
