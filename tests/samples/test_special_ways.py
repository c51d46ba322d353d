"""Special rows, however rows are given and whatever of them a model rejects: what mixes rows is refused,
what keeps them apart is exact."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastclip import FastPrivacyEngine
from tests.oracle import clipped_sum, make_private, summed
from tests.refusal import refused

B, T, D, K = 6, 5, 4, 3
REFUSED = "independently"
Rows = Callable[[Tensor], tuple]


def data(seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, D, dtype=torch.float64, generator=g)


def zero_one(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


class Graphs(nn.Module):
    """Rows of any kind; `mixed`: under one block-diagonal matrix, which makes NaN of 0 * NaN."""

    def __init__(self, mixed: bool, odd: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.mixed, self.odd = nn.Linear(D, D), nn.Linear(D, K), mixed, odd

    def forward(self, x: Any, rows: Any = None) -> Any:
        x = as_tensor(x if rows is None else rows).to(self.head.weight.dtype)
        n, t = x.shape[:2]
        h, ones = self.layer(x.flatten(0, 1)), torch.ones(t, t, dtype=x.dtype)
        apart = (ones @ h.view(n, t, D)).flatten(0, 1)
        h = torch.block_diag(*[ones] * n) @ h if self.mixed else apart
        z = self.head(h.tanh()).view(n, t, K).mean(1)
        return (z, z[:, :1].detach().var(1)) if self.odd else z  # of one number: NaN


def as_tensor(x: Any) -> Tensor:
    if isinstance(x, PackedSequence):
        x = pad_packed_sequence(x, batch_first=True)[0]
    if not isinstance(x, Tensor):
        each = [row.x if isinstance(row, SimpleNamespace) else row for row in x]
        x = torch.stack([torch.as_tensor(row) for row in each])
    x = x.real if x.is_complex() else x
    while x.dim() < 3:
        x = x[..., None]
    return x.expand(-1, T, D)


def beside(rows: Any) -> tuple:
    return torch.zeros(len(rows), 2), rows


WAYS: dict[str, Rows] = {
    "numbers": lambda x: (x,),
    "0 and 1": lambda x: (zero_one(x),),
    "complex": lambda x: (torch.complex(x, x),),
    "packed": lambda x: (pack_padded_sequence(x, torch.full((len(x),), T), batch_first=True),),
    "list": lambda x: beside(list(x)),
    "tuple of arrays": lambda x: beside(tuple(row.numpy() for row in x)),
    "list of lists": lambda x: beside(x[:, :, 0].tolist()),
    "list of numbers": lambda x: beside(x[:, 0, 0].tolist()),
    "list of NumPy's numbers": lambda x: beside(list(x[:, 0, 0].numpy())),
    "list of objects": lambda x: beside([SimpleNamespace(x=row) for row in x]),
    "array": lambda x: beside(x.numpy()),
    "one number a row": lambda x: beside(x[:, 0, 0]),
    "0 or 1 a row": lambda x: beside(zero_one(x)[:, 0, 0]),
}


BY_PYTHON = [way for way in WAYS if ("list" in way and "objects" not in way) or "array" in way]
"""Numbers of which no operation reads the batch's own."""
FOLLOWED = [way for way in WAYS if way not in BY_PYTHON]


@pytest.mark.parametrize("way", ["numbers", "one number a row"])
def test_mixed_rows_are_refused(way: str) -> None:
    private = make_private(Graphs(True).double())[1]
    with refused(REFUSED):
        private(*WAYS[way](data()))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_mixed_rows_beside_an_output_that_is_nan_are_refused() -> None:
    private = make_private(Graphs(True, odd=True).double())[1]
    with refused(REFUSED):
        private(data())


def check(model: nn.Module, rows: Rows, C: float = 0.3) -> FastPrivacyEngine:
    """Two steps: the sums are those of one sample at a time."""

    def losses(out: Any) -> Tensor:
        return (out[0] if isinstance(out, tuple) else out).flatten(1).square().sum(1) / 2

    model, x = model.double(), data()
    params, each = dict(model.named_parameters()), []
    for i in range(B):
        model.zero_grad()
        losses(model(*rows(x[i : i + 1]))).sum().backward()
        each.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        )
    model.zero_grad()
    grads = {n: torch.stack([g[n] for g in each]) for n in params}
    total = clipped_sum(grads, C)
    engine, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(2):
        optimizer.zero_grad()
        losses(private(*rows(x))).mean().backward()
        for name, g in summed(params).items():
            torch.testing.assert_close(g, total[name], rtol=1e-8, atol=1e-9)
    return engine


@pytest.mark.parametrize("way", FOLLOWED)
def test_rows_that_stay_apart_are_exact(way: str) -> None:
    check(Graphs(False), WAYS[way])


@pytest.mark.parametrize("way", [way for way in BY_PYTHON if way != "list"])
def test_numbers_that_no_operation_reads_are_refused(way: str) -> None:
    with refused("in lists or arrays.*pass tensors"):
        check(Graphs(False), WAYS[way])


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_rows_beside_an_output_that_is_nan_are_exact() -> None:
    check(Graphs(False, odd=True), WAYS["numbers"])


# Masks of the model's own


class Masked(nn.Module):
    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.use = nn.Linear(D, D), nn.Linear(D, K), use
        self.rnn = nn.GRU(D, D, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.use(self, x, mask))


def pooled(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return (m.layer(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def added(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = m.layer(x)
    return ((h @ h.mT + (1 - mask[:, None]) * -1e9).softmax(-1) @ h).tanh().mean(1)


def filled(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = m.layer(x)
    scores = (h @ h.mT).masked_fill(mask[:, None] == 0, -torch.inf)
    return (scores.softmax(-1) @ h).tanh().mean(1)


def fused(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = m.layer(x)[:, None]
    bias = ((1 - mask) * -1e9)[:, None, None]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=bias)[:, 0].tanh().mean(1)


def trimmed(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """What is beyond the longest row is not computed."""
    longest = int(mask.sum(1).max())
    return pooled(m, x[:, :longest], mask[:, :longest])


def trimmed_by_tensor(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    longest = mask.sum(1).max().long()
    return pooled(m, x[:, :longest], mask[:, :longest])


def last(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.layer(x)[torch.arange(len(x)), mask.sum(1).long() - 1].tanh()


def recurrent(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(1).long()
    packed = pack_padded_sequence(m.layer(x), lengths, batch_first=True, enforce_sorted=False)
    return m.rnn(packed)[1][0]


def checked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("a mask holds 0 and 1")
    return pooled(m, x, mask)


def selected(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = torch.zeros(*mask.shape, D, dtype=x.dtype)
    h[mask.bool()] = m.layer(x[mask.bool()])
    return h.tanh().mean(1)


def weighted(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.layer(x).tanh().mean(1) * mask[:, -1:]


def classes(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.layer(x).mean(1).tanh() + m.layer.weight[mask[:, :D].argmax(1)]


MASKED = (
    pooled, added, filled, fused, trimmed, trimmed_by_tensor, last, recurrent, checked, selected,
    weighted, classes,
)  # fmt: skip


def rows_and_masks(x: Tensor) -> tuple:
    """A row is the longer, the larger its first number is."""
    lengths = 2 + (x[:, 0, 0].abs() * 3).long().clamp_max(T - 2)
    return x, (torch.arange(T) < lengths[:, None]).to(x.dtype)


@pytest.mark.parametrize("use", MASKED)
def test_masks_of_floats_are_exact(use: Callable[..., Tensor]) -> None:
    check(Masked(use), rows_and_masks)


def test_a_weight_of_0_or_1_a_row_is_exact() -> None:
    def use(m: Any, x: Tensor, weight: Tensor) -> Tensor:
        return pooled(m, x, x[..., 0].abs()) * weight[:, None]

    check(Masked(use), lambda x: (x, zero_one(x[:, 0, 0])))


def mixed_inputs(m: Any, x: Tensor) -> Tensor:
    h = torch.block_diag(*[torch.ones(T, T, dtype=x.dtype)] * len(x)) @ m.layer(x.flatten(0, 1))
    return h.view_as(x).tanh().mean(1)


@pytest.mark.parametrize("use", [checked, trimmed, recurrent, last])
def test_a_mask_that_must_be_one_hides_nothing(use: Callable[..., Tensor]) -> None:
    """It stays; the other input is looked at."""
    private = make_private(Masked(lambda m, x, n: use(m, x, n) + mixed_inputs(m, x)).double())[1]
    with refused(REFUSED):
        private(*rows_and_masks(data()))


# What a model rejects


def rescaled(x: Tensor) -> Tensor:
    return x / 255 if x.max() > 10 else x


def trims(x: Tensor) -> Tensor:
    return x[:, : int((x.abs().sum(-1) > 0).sum(1).max())]


def fills(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x.nanmean(0), x)


def spreads(x: Tensor) -> Tensor:
    h = torch.block_diag(*[torch.ones(T, T, dtype=x.dtype)] * len(x)) @ x.flatten(0, 1)
    return h.view_as(x) / T


REJECTS: dict[str, Callable[[Tensor], Tensor]] = {
    "infinite": Tensor.isinf,
    "not finite": lambda x: ~x.isfinite(),
    "large": lambda x: x.abs() > 1e3,
    "empty": lambda x: (x == 0).all(-1),
}


class Rejecting(nn.Module):
    def __init__(self, what: str, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.what, self.change = nn.Linear(D, K), REJECTS[what], change

    def forward(self, x: Tensor) -> Tensor:
        if bool(self.what(x).any()):
            raise ValueError("what came is rejected")
        return self.layer(x if self.change is None else self.change(x)).tanh().mean(1)


@pytest.mark.parametrize(("what", "change"), [
    ("infinite", rescaled), ("infinite", fills), ("infinite", spreads), ("not finite", rescaled),
    ("not finite", trims), ("large", trims), ("large", fills), ("large", spreads),
    ("empty", rescaled), ("empty", fills), ("empty", spreads),
])  # fmt: skip
def test_kinds_that_are_rejected_hide_no_others(what: str, change: Callable) -> None:
    private = make_private(Rejecting(what, change).double())[1]
    with refused(REFUSED):
        private(data())


@pytest.mark.parametrize("what", REJECTS)
def test_what_is_rejected_is_exact(what: str) -> None:
    check(Rejecting(what), WAYS["numbers"])


class Table(nn.Module):
    """The first column of a row is a category."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.table, self.layer, self.change = nn.Embedding(4, D), nn.Linear(D, D), change
        self.head = nn.Linear(D, K)

    def forward(self, x: Tensor) -> Tensor:
        category, x = x[:, 0].long(), x[:, 1:]
        x = x if self.change is None else self.change(x)
        return self.head((self.table(category) + self.layer(x)).tanh())


def table(x: Tensor) -> tuple:
    category = (x[:, 0, :1].abs() * 3).floor().clamp_max(3)
    return (torch.cat([category, x[:, 1]], 1),)


def test_categories_hide_no_special_rows() -> None:
    private = make_private(Table(rescaled).double())[1]
    with refused(REFUSED):
        private(*table(data()))


def test_tables_with_categories_are_exact() -> None:
    check(Table(), table)


class Weighted(nn.Module):
    """Weights above 1 are shared out among the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, K)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        losses = self.layer(x).mean(1).square().mean(1)
        return (losses * weights).sum() / (len(x) + (weights - 1).relu().sum())


def test_weights_that_are_shared_out() -> None:
    """How much is shared out follows from all rows, be it nothing in a first batch."""
    private = make_private(Weighted().double())[1]
    x = data()
    with refused("is part of the loss|mixes samples"):
        private(x, zero_one(x[:, 0, 0])).backward()
