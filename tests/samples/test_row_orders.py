"""A sample that forward passes under one loss hold in several rows would contribute more than C."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracle import assert_sums, clipped_sum, make_private, summed
from tests.refusal import refused

B, D = 6, 5
ORDER = torch.tensor([3, 0, 5, 1, 2, 4])


class Two(nn.Module):
    """Takes rows alone, with a mask by keyword, along axis 1, packed, or by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(D, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encode(x if mask is None else x * mask)).square().sum(-1)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)


def rows() -> Tensor:
    return torch.randn(B, D, dtype=torch.float64, device="cpu")


def trained() -> tuple[nn.Module, nn.Module]:
    model = Two().double()
    _, private, _, _ = make_private(model, batch_size=B)
    return model, private


Losses = Callable[[nn.Module, Tensor], Tensor]
IN_TWO_ROWS: dict[str, Losses] = {
    "reordered": lambda m, x: m(x) + m(x[ORDER]),
    "reordered first": lambda m, x: m(x[ORDER]) + m(x.clone()),
    "half of them": lambda m, x: m(x) + m(torch.cat([x[:3], x[[4, 5, 3]]])),
    "negatives drawn twice": lambda m, x: m(x) - m(x[[1, 0, 0, 0, 5, 4]]),
    "the third": lambda m, x: m(x) + m(x + 1) + m(x.flip(0)),
    "by keyword": lambda m, x: m(x, mask=x.gt(0)) + m(x[ORDER], mask=x.gt(0)[ORDER]),
    "a method": lambda m, x: (m.encode(x) - m.encode(x[ORDER])).square().sum(-1),
    "a part": lambda m, x: (m.body(x) * 2 + m.body(x[ORDER])).sum(-1),
}


@pytest.mark.parametrize("case", IN_TWO_ROWS)
def test_a_sample_in_two_rows(case: str) -> None:
    model, private = trained()
    x = rows()
    losses = IN_TWO_ROWS[case](private, x)
    with refused("computed from one sample"):
        losses.mean().backward()
    assert not any(total.any() for total in summed(dict(model.named_parameters())).values())


@pytest.mark.parametrize("batch", [2, 3])
def test_few_rows(batch: int) -> None:
    _, private = trained()
    x = rows()[:batch]
    with refused("computed from one sample"):
        (private(x) + private(x.flip(0))).mean().backward()
    (private(x) + private(x)).mean().backward()


IN_THEIR_ROWS: dict[str, Losses] = {
    "again": lambda m, x: m(x) + 2 * m(x),
    "changed": lambda m, x: m(x) + m(x.flip(1)) + m(x + 1),
    "methods": lambda m, x: (m.encode(x) - m.encode(-x)).square().sum(-1),
    "categories": lambda m, x: m(ONE * TWO) + m(ONE * (1 - TWO)),
}
ONE = torch.linspace(1, 2, D, dtype=torch.float64)
TWO = torch.tensor([0.0, 1, 0, 1, 0, 1])[:, None]


@pytest.mark.parametrize("case", IN_THEIR_ROWS)
def test_a_sample_in_its_row(case: str) -> None:
    """Values that are another row's by accident are no other sample."""
    model = Two().double()
    plain, losses, x = copy.deepcopy(model), IN_THEIR_ROWS[case], rows()
    params = dict(model.named_parameters())
    _, private, _, _ = make_private(model, batch_size=B)
    expected = [
        torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True, allow_unused=True)
        for loss in losses(plain, x)
    ]
    grads = {
        name: torch.stack([torch.zeros_like(p) if g[i] is None else g[i] for g in expected])
        for i, (name, p) in enumerate(params.items())
    }
    losses(private, x).mean().backward()
    assert_sums(summed(params), clipped_sum(grads, 1.0), 1e-10)


def test_a_row_that_is_given_again() -> None:
    """The second call has the first sample's row twice."""
    _, private, _, _ = make_private(Two().double(), batch_size=B)
    x = rows()
    losses = private(x) + private(torch.cat([x[:1].flip(1), x[:1], x[2:] + 1]))
    with refused("at several positions"):
        losses.mean().backward()


@pytest.mark.parametrize("t", [1, 3, 4])
def test_letters_in_another_order(t: int) -> None:
    """A model that is called letter by letter meets two rows in each other's place all the time: whose
    they are is known all the same."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)).double()
    _, private, _, _ = make_private(model, batch_size=2)
    ids = torch.arange(B)[:, None].expand(B, t)
    losses = private(ids) + private(ids.flip(0))
    with refused("computed from one sample|mixes samples"):
        losses.square().sum((1, 2)).mean().backward()


class Along(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.rnn, self.packed = nn.GRU(D, 3, batch_first=False), packed

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[1],), x.shape[0])
        out = self.rnn(pack_padded_sequence(x, lengths) if self.packed else x)[0]
        return pad_packed_sequence(out)[0] if self.packed else out


def test_samples_along_axis_1() -> None:
    """Another order of the positions is none of the samples."""
    model = Along(packed=False).double()
    _, private, _, _ = make_private(model, batch_size=B, batch_first=False)
    x = torch.randn(4, B, D, dtype=torch.float64)
    (private(x) + private(x.flip(0))).square().sum((0, 2)).mean().backward()
    with refused("computed from one sample"):
        (private(x) + private(x[:, ORDER])).square().sum((0, 2)).mean().backward()


def test_only_the_first_passes_wait() -> None:
    """Rows are read on the CPU in the first passes alone; then nothing of a batch is kept."""
    _, private, optimizer, _ = make_private(Two().double(), batch_size=B)
    for _ in range(5):
        x = rows()
        losses = private(x) + private(-x)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert losses.grad_fn is not None  # its graph is
    assert alive() is None


def told_of(loss: Callable[[nn.Module, Tensor], Tensor], steps: int = 3) -> list[str]:
    """Warnings in steps over batches that are drawn anew."""
    _, private = trained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            loss(private, rows()).mean().backward()
    return [str(w.message) for w in caught if "few rows in common" in str(w.message)]


def test_rows_of_another_source_are_told_once() -> None:
    public = rows()
    assert len(told_of(lambda m, x: m(x) + m(public[: len(x)]))) == 1
    assert len(told_of(lambda m, x: m(x) + m(x + 0.1))) == 1  # two views cannot be told from them


@pytest.mark.parametrize("case", ["again", "rows", "alone"])
def test_rows_in_common_are_not_told(case: str) -> None:
    losses: dict[str, Losses] = {
        "again": lambda m, x: m(x) + m(x),
        "rows": lambda m, x: m(x) + m(torch.cat([x[:3], x[3:] + 0.1])),
        "alone": lambda m, x: m(x),
    }
    assert not told_of(losses[case])
