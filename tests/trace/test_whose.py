"""Whose each entry is where data move samples, or constants keep them apart: whose change changes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.samples.batch_axis import BatchAxis
from fastclip.trace import attribution as at
from fastclip.trace.memory import MOVED, ORDER, POSITIONS, Shadow
from fastclip.trace.tracer import Tracer
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.trace.run import Run

B, T, D = 3, 4, 5
Use = Callable[[Tensor, Tensor], Tensor]
APART = torch.arange(B).repeat_interleave(T)[:, None] != torch.arange(B).repeat_interleave(T)


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def attends(x: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """All samples are one sequence."""
    rows = x.flatten(0, 1)
    return fill(rows @ rows.mT).softmax(-1) @ rows


def put_back(x: Tensor, counts: Tensor) -> Tensor:
    kept, out = torch.arange(T) < counts[:, None], x.clone()
    out[kept] = 2 * x[kept]
    return out


def by_kind(x: Tensor, counts: Tensor) -> Tensor:
    """A loop over the kinds that there are."""
    out = torch.zeros_like(x)
    for kind in counts.unique():
        out = out + torch.where((counts == kind)[:, None, None], 2 * x, 0.0)
    return out


def columns_that_are_hit(x: Tensor, counts: Tensor) -> Tensor:
    hit = F.one_hot(counts, T + 1)
    out = torch.zeros_like(x)
    for k in (hit.sum(0) > 0).nonzero():
        out = out + hit[:, k[0]][:, None, None] * x
    return out


CASES: dict[str, Use] = {
    "as often as counts say": lambda x, n: x[torch.repeat_interleave(torch.arange(len(x)), n)],
    "in order, and back": lambda x, n: x[(o := n.argsort())][o.argsort()],
    "in order, and back by numbers": lambda x, n: x[(o := n.argsort())].index_select(0, inverse(o)),
    "where a mask is": put_back,
    "a mask of large numbers": lambda x, n: attends(x, lambda s: s.masked_fill(APART, -1e30)),
    "one of two": lambda x, n: attends(x, lambda s: torch.where(APART, -1e30, s)),
    "a product with zeros": lambda x, n: torch.eye(len(x), dtype=x.dtype) @ x.mean(1),
    "kind by kind": by_kind,
    "column by column": columns_that_are_hit,
}  # fmt: skip
IN_PLACE = ["in order, and back", "in order, and back by numbers", "where a mask is"]


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, D, dtype=torch.float64), torch.tensor([2, 4, 3])


def followed(use: Use) -> tuple[Shadow, Tensor]:
    """What is known of the result, and that."""
    tracer, (x, counts) = Tracer(()), given()
    tracer.begin()
    assert tracer.enter()
    tracer.lines.enter_model()
    try:
        tracer.seed(x)
        tracer.seed(counts)
        y = use(x, counts)
        return tracer.shadow_of(y), y
    finally:
        tracer.end()
        tracer.leave()


@pytest.mark.parametrize("case", CASES)
def test_changes_of_one_sample_change_its_own(case: str) -> None:
    torch.manual_seed(0)
    shadow, y = followed(CASES[case])
    own = at.expanded(shadow.sample, y.shape)
    assert not shadow.mixed
    torch.manual_seed(0)
    x, counts = given()
    for sample in range(B):
        changed = x.clone()
        changed[sample] += 1.0
        assert torch.equal(CASES[case](changed, counts) != y, own == sample)


@pytest.mark.parametrize("case", IN_PLACE)
def test_what_is_back_in_its_place_is_moved_no_more(case: str) -> None:
    assert not followed(CASES[case])[0].flags & (MOVED | POSITIONS | ORDER)


@pytest.mark.parametrize("use", [
    by_kind, lambda x, n: x * (F.one_hot(n).cumsum(0) < 9).any(1)[:, None, None],
])  # fmt: skip
def test_numbers_that_all_take_are_noted_every_time(use: Use) -> None:
    """What was found of an operation is remembered, but not that it has read a number."""
    reads = []
    for _ in range(3):
        tracer, (x, counts) = Tracer(()), given()
        tracer.begin()
        assert tracer.enter()
        tracer.lines.enter_model()
        try:
            tracer.seed(x)
            tracer.seed(counts)
            use(x, counts)
        finally:
            tracer.end()
            tracer.leave()
        reads.append({read.what for read in tracer.report.reads})
    assert reads[0] == reads[1] == reads[2]
    assert reads[0] & {"a number", "a comparison"}


def test_places_are_no_numbers_of_a_sample() -> None:
    """Where a sample lies among the others follows from them."""
    assert followed(lambda x, n: x * inverse(n.argsort())[:, None, None].double())[0].mixed


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


BY_ALL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the largest": lambda out, y: (each(out, y) * (y == y.max())).mean(),
    "the commonest": lambda out, y: out.log_softmax(1)[:, y.mode().values[None]].mean(),
    "the first hundred": lambda out, y: (each(out, y) * (y.cumsum(0) < 100)).mean(),
    "those that there are": lambda out, y: torch.stack(
        [(each(out, y) * (y == kind)).sum() for kind in y.unique()]
    ).sum(),
}  # fmt: skip


@pytest.mark.parametrize("loss", BY_ALL)
def test_outside_the_model_no_values_say_what_one_number_of_all_does(loss: str) -> None:
    run = Run()
    x, y = next(iter(run.loader))
    with pytest.raises(RuntimeError, match="Your loss mixes samples"):
        BY_ALL[loss](run.model(x), y).backward()


class Reads(nn.Module):
    """Time comes first, in as many steps as there are samples; Python reads a number, so that values are
    compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x.transpose(0, 1)).tanh()
        self.seen = float(h.detach().sum())
        return h.sum(0)


def test_samples_lie_elsewhere_than_they_are_taken_to() -> None:
    """An error of the traced step; the same batch is looked at again."""
    torch.manual_seed(0)
    model, x = Reads(), torch.randn(B, B, D, dtype=torch.float64)
    grads = per_sample_gradients(model, x)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        sample_loss(private(x)).mean().backward()
    layout = private.grad_state.calls.layouts["forward"]
    assert layout.batch_axes["layer"] == BatchAxis(1)
    layout.batch_axes["layer"] = BatchAxis(0)
    optimizer.zero_grad()
    private.grad_state.trace.again(True)
    with pytest.raises(RuntimeError, match="in other positions in this batch"):
        sample_loss(private(x)).mean().backward()
    optimizer.zero_grad()
    sample_loss(private(x)).mean().backward()
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 0.1), 1e-10)


@pytest.mark.parametrize("mean", [
    lambda out, y, kept: F.cross_entropy(out[kept], y[kept]),
    lambda out, y, kept: F.cross_entropy(out, y, reduction="none")[kept].mean(),
])  # fmt: skip
def test_means_over_as_many_entries_as_the_batch_selects(mean: Callable[..., Tensor]) -> None:
    """As long as each sample has as many, in every step."""
    run = Run()
    for number, (x, y) in enumerate(run.loader):
        kept = torch.ones(len(y), dtype=torch.bool)
        kept[2] = number < 4
        run.optimizer.zero_grad()
        loss = mean(run.model(x), y, kept & (x[:, 0] < 1e9))
        if number < 4:
            loss.backward()
            run.check_sums(x, y)
            run.optimizer.step()
            continue
        with pytest.raises(RuntimeError, match="mean over entries that the batch selects"):
            loss.backward()


class WithAToken(nn.Module):
    """A trained row before every sample's own, as a class token or a bias of the sequence."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.token = axis, nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(
            *(1 if a == self.axis else n for a, n in enumerate(x.shape[:2])), -1
        )
        return torch.cat([token, x], self.axis)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mean_over_rows_of_no_sample_too(batch_first: bool) -> None:
    """As many for every sample, so the mean divides by the batch size and a constant."""
    model, x = WithAToken(1 if batch_first else 0).double(), torch.randn(4, 5, 4).double()
    given = x if batch_first else x.transpose(0, 1).contiguous()
    private = make_private(model, batch_first=batch_first)[1]
    out = private(given)
    F.mse_loss(out, torch.zeros_like(out)).backward()
    want = 4 * 2 / (4 * 6 * 4) * model.token.detach().expand(4, 1, 4)
    scale = (1 / want.flatten(1).norm(dim=1)).clamp(max=1)
    expected = torch.einsum("b,bij->ij", scale, want)[None]
    assert relative_error(model.token.summed_grad, expected) < 1e-12
