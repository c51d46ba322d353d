"""Models that compute their samples one after the other: exact, or an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.errors import FastclipError
from tests.oracle import assert_sums, clipped_sum, make_private, summed

B, T, D = 5, 3, 4
Does = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Layers and parameters, and what a test does with them: returns losses [b], or their mean."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.does = does
        self.body, self.head, self.norm = nn.Linear(D, D), nn.Linear(D, 3), nn.LayerNorm(D)
        self.table, self.conv = nn.Embedding(3, D), nn.Conv1d(T, 2, 3)
        self.matrix = nn.Parameter(torch.randn(D, D) / 2)
        self.vector, self.each = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(12, D))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.does(self, x, y)


def one_by_one(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = [
        F.cross_entropy(m.head(m.body(a[None]).mean(1).tanh()), b[None])
        for a, b in zip(x, y, strict=True)
    ]
    return torch.stack(losses).mean()


def by_number(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = [m.head(m.norm(m.body(x[i : i + 1, -1])).tanh()) for i in range(len(x))]
    return F.cross_entropy(torch.cat(rows), y)


def through_time(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of each sample the first use of the matrix is of zeros."""
    rows = []
    for i in range(len(x)):
        h = x.new_zeros(D)
        for t in range(x.shape[1]):
            h = torch.tanh(m.body(x[i, t]) + m.matrix @ h + m.vector)
        rows.append(m.head(h))
    return F.cross_entropy(torch.stack(rows), y)


def step_by_step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In each step all samples have their turns."""
    rows = [torch.ones_like(m.vector) for _ in x]
    for t in range(x.shape[1]):
        rows = [torch.tanh(m.matrix @ h + m.body(x[i, t])) for i, h in enumerate(rows)]
    return F.cross_entropy(torch.stack([m.head(h) for h in rows]), y)


def looked_up(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    pairs = zip(x, y, strict=True)
    return torch.stack([m.conv(a * m.table(b)).logsumexp((0, 1)) for a, b in pairs]).mean()


def after_a_batch(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = m.body(x).tanh().sum(1)
    return torch.stack([F.cross_entropy(m.head(r), b) for r, b in zip(h, y, strict=True)]).mean()


def recomputed(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = [m.head(checkpoint(m.body, a, use_reentrant=False).tanh().sum(0)) for a in x]
    return F.cross_entropy(torch.stack(rows), y)


def in_place(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = []
    for a in x:
        h = m.body(a.sum(0))
        rows.append(m.head(h.add_(m.vector).mul_(2)))
    return F.cross_entropy(torch.stack(rows), y)


APART = [
    one_by_one, by_number, through_time, step_by_step, looked_up, after_a_batch, recomputed, in_place,
]  # fmt: skip


def batch(b: int, t: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(b)
    x = torch.randn(b, t, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (b,), generator=generator)


def check(model: nn.Module, private: nn.Module, given: tuple[Tensor, Tensor]) -> None:
    """The clipped sum of a step."""
    twin, (x, y) = Model(model.does).double(), given
    own = []
    for i in range(len(x)):
        loss = twin(x[i : i + 1], y[i : i + 1])
        found = torch.autograd.grad(loss, [*twin.parameters()], allow_unused=True)
        pairs = zip(twin.named_parameters(), found, strict=True)
        own.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs})
    private.zero_grad()
    private(*given).backward()
    grads = {n: torch.stack([g[n] for g in own]) for n in own[0]}
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 0.1), 1e-10)
    assert private.grad_state.calls.layouts["forward"].proven


@pytest.mark.parametrize("does", APART, ids=lambda f: f.__name__)
def test_samples_take_turns(does: Does) -> None:
    """In batches of any size, and of lengths that follow how often each has its turn."""
    model = Model(does).double()
    private = make_private(model, max_grad_norm=0.1)[1]
    for b, t in ((5, T), (3, T), (6, T), (4, T + (does in (through_time, step_by_step)))):
        check(model, private, batch(b, t))


def test_a_batch_of_one_comes_first() -> None:
    model = Model(one_by_one).double()
    private = make_private(model, max_grad_norm=0.1)[1]
    for b in (1, 4):
        check(model, private, batch(b))


def weighs(weight: Callable[[nn.Module, Tensor, int], object]) -> Does:
    """What a weight that follows from more than the sample makes of the samples."""

    def does(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        rows = [m.head(m.body(a.sum(0)) * weight(m, x, i)) for i, a in enumerate(x)]
        return F.cross_entropy(torch.stack(rows), y)

    return does


def carried(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h, rows = m.vector, []
    for a in x:
        h = torch.tanh(m.body(a.sum(0)) + 0.1 * h)
        rows.append(m.head(h))
    return F.cross_entropy(torch.stack(rows), y)


def kept(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What the first sample has made is taken from all."""
    first, rows = None, []
    for a in x:
        h = m.body(a.sum(0))
        first = h.detach() if first is None else first
        rows.append(m.head(h - 0.1 * first))
    return F.cross_entropy(torch.stack(rows), y)


def detached(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = [m.head(m.body(a.sum(0)) if i else m.body(a.sum(0)).detach()) for i, a in enumerate(x)]
    return F.cross_entropy(torch.stack(rows), y)


COUPLED: dict[str, Does] = {
    "the first": weighs(lambda m, x, i: 2 if i == 0 else 1),
    "the last": weighs(lambda m, x, i: 2 if i == len(x) - 1 else 1),
    "its number": weighs(lambda m, x, i: 1 + i),
    "how many there are": weighs(lambda m, x, i: 1 / len(x)),
    "a parameter of its number": weighs(lambda m, x, i: m.each[i]),
    "parts of a table": weighs(lambda m, x, i: torch.arange(12.0).to(x)[i]),
    "the ninth": weighs(lambda m, x, i: 2 if i > 8 else 1),
    "the sample before": weighs(lambda m, x, i: x[i - 1].sum(0)),
    "all": weighs(lambda m, x, i: x.sum((0, 1))),
    "carried": carried,
    "kept": kept,
    "detached": detached,
    "another order": lambda m, x, y: F.cross_entropy(
        torch.stack([m.head(m.body(a.sum(0))) for a in x][::-1]), y
    ),
    "all but one": lambda m, x, y: F.cross_entropy(
        torch.stack([m.head(m.body(a.sum(0))) for a in x[1:]]), y[1:]
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    private = make_private(Model(COUPLED[name]).double())[1]
    with pytest.raises(FastclipError):
        private(*batch(12)).backward()
