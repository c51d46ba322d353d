"""Lists of tensors as a model's only input: their entries are the samples, not the rows in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastclip import FastPrivacyEngine, unwrap
from tests.oracle import assert_sums, clipped_sum, summed
from tests.refusal import refused

D, DRAWN = 4, 5
Rows = list[tuple[Tensor, Tensor]]


def collate(rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    return [x for x, _ in rows], [y for _, y in rows]


def private_of(
    model: nn.Module, rows: Rows, **kwargs: Any
) -> tuple[nn.Module, Any, Iterator[tuple[list[Tensor], list[Tensor]]]]:
    """Private model, optimizer and batches of DRAWN rows, in order."""
    loader = DataLoader(rows, batch_size=DRAWN, collate_fn=collate)  # type: ignore[arg-type]
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=0.5, poisson_sampling=False, **kwargs,
    )  # fmt: skip
    return private, optimizer, iter(loader)


class Bags(nn.Module):
    """`how` the entries of a list are computed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(D, 6), nn.Linear(6, 2), how

    def forward(self, bags: list[Tensor]) -> Tensor:
        if self.how == "each":
            return torch.stack([self.head(self.layer(x).tanh().mean(0)) for x in bags])
        if self.how == "pooled first":
            return self.head(self.layer(torch.stack([x.mean(0) for x in bags])).tanh())
        h = self.layer(torch.cat(bags)).tanh()
        if self.how == "split":
            return self.head(torch.stack([x.mean(0) for x in h.split([*map(len, bags)])]))
        return self.head(h)  # of every slice


LENGTHS = {
    "alike": [3] * (3 * DRAWN),
    "as many as rows": [DRAWN] * (3 * DRAWN),
    "unlike": [1, 4, 2, 5, 3] * 3,
    "unlike later": [3] * DRAWN + [2, 4, 2, 4, 3] * 2,
}


def rows_of(lengths: list[int], of_slices: bool = False) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, D, generator=generator, dtype=torch.float64),
            torch.randint(2, (n,) if of_slices else (), generator=generator),
        )
        for n in lengths
    ]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("how", ["each", "pooled first", "split"])
def test_entries_are_samples(how: str, lengths: str) -> None:
    """Whatever their sizes."""
    model = Bags(how).double()
    params = dict(model.named_parameters())
    rows = rows_of(LENGTHS[lengths])
    own = []
    for x, y in rows:
        loss = F.cross_entropy(model([x]), y[None])
        own.append(torch.autograd.grad(loss, list(params.values())))
    private, optimizer, batches = private_of(model, rows)
    for number, (bags, ys) in enumerate(batches):
        optimizer.zero_grad()
        F.cross_entropy(private(bags), torch.stack(ys)).backward()
        some = own[number * DRAWN :][:DRAWN]
        grads = {n: torch.stack(g) for n, g in zip(params, zip(*some, strict=True), strict=True)}
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-9)
        assert len(optimizer.per_sample_norms) == DRAWN


@pytest.mark.parametrize("lengths", [[3] * 10, [8] * 10, [3] * DRAWN + [2, 4, 2, 4, 3]])
def test_slices_are_of_their_sample(lengths: list[int]) -> None:
    """A label for every slice: clipped by slices, one patient would move the sum by several C."""
    model, rows = Bags("slices").double(), rows_of(lengths, True)
    params, own = dict(model.named_parameters()), []
    for x, y in rows:
        own.append(torch.autograd.grad(F.cross_entropy(model([x]), y), [*params.values()]))
    private, optimizer, batches = private_of(model, rows)
    for number, (bags, ys) in enumerate(batches):
        optimizer.zero_grad()
        if len({*map(len, bags)}) > 1:  # as many in all as before, but not of each
            with refused("mixes samples|have no fixed batch axis"):
                private(bags).sum().backward()
            return
        F.cross_entropy(private(bags), torch.cat(ys)).backward()
        some = own[number * DRAWN :][:DRAWN]
        grads = {n: torch.stack(g) for n, g in zip(params, zip(*some, strict=True), strict=True)}
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-9)


@pytest.mark.parametrize("lengths", [[DRAWN] * 10, [3, 2, 4, 1, 3] * 2])
def test_slices_are_no_samples(lengths: list[int]) -> None:
    private, _, batches = private_of(Bags("slices").double(), rows_of(lengths, True))
    with refused("stack|mixes samples"):
        private(next(batches)[0]).sum().backward()


class Pooled(Bags):
    """Runs with one number of entries alone, so that it cannot be cut there."""

    def forward(self, bags: list[Tensor]) -> Tensor:
        if len(bags) != DRAWN:
            raise ValueError("entries")
        return self.head(self.layer(sum(bags)).tanh())  # type: ignore[arg-type]


class Arguments(Bags):
    def forward(self, *bags: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(list(bags))


class Entries(Bags):
    def forward(self, bags: dict[int, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(list(bags.values()))


@pytest.mark.parametrize(
    ("model", "call"),
    [
        (Pooled("slices"), lambda model, bags: model(bags)),
        (Arguments("slices"), lambda model, bags: model(*bags)),
        (Entries("slices"), lambda model, bags: model(dict(enumerate(bags)))),
    ],
)
def test_rows_of_what_was_drawn(model: nn.Module, call: Callable[..., Tensor]) -> None:
    """As many entries as rows were drawn, but the rows in them are as many as outputs."""
    private, _, batches = private_of(model.double(), rows_of([3] * 10))
    with refused("the data loader drew 5 samples"):
        call(private, next(batches)[0])


class Views(nn.Module):
    """Several views of all rows in a list."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(D, 2), how

    def forward(self, views: list[Tensor]) -> Tensor:
        each = [self.layer(x).tanh() for x in views]
        if self.how == "stacked":
            return torch.stack(each)
        return torch.cat(each) if self.how == "joined" else torch.stack(each).mean(0)


@pytest.mark.parametrize("views", [2, 3, 7])
def test_views_are_no_samples(views: int) -> None:
    """Where there are other numbers of them than of rows."""
    model = Views("mean").double()
    params = dict(model.named_parameters())
    rows = rows_of([views] * 10)
    private, optimizer, batches = private_of(model, rows)
    for bags, ys in batches:
        given = list(torch.stack(bags, 1))
        own = _alone(private, given, ys)
        optimizer.zero_grad()
        F.cross_entropy(private(given), torch.stack(ys)).backward()
        grads = {n: torch.stack(g) for n, g in zip(params, zip(*own, strict=True), strict=True)}
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-9)


def _alone(private: nn.Module, given: list[Tensor], ys: list[Tensor]) -> list[Any]:
    own = Views("mean").double()
    own.load_state_dict(unwrap(private).state_dict())
    return [
        torch.autograd.grad(
            F.cross_entropy(own([v[i : i + 1] for v in given]), y[None]), list(own.parameters())
        )
        for i, y in enumerate(ys)
    ]


@pytest.mark.parametrize("how", ["stacked", "joined"])
def test_what_holds_the_samples_cannot_be_told(how: str) -> None:
    """As many views as rows, or views along the first axis of what is returned."""
    private, _, batches = private_of(Views(how).double(), rows_of([DRAWN] * 10))
    given = list(torch.stack(next(batches)[0], 1))
    with refused("either may be the samples"):
        private(given)


class Few(nn.Module):
    """A model that takes no entries, too; `how` they come."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.how = nn.Linear(D, 6), nn.Linear(6, 2), how
        self.raw, self.bias = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(6))

    def forward(self, bags: list[Any]) -> Tensor:
        if self.how == "records":
            bags = [bag["x"] for bag in bags]
        h = [self.layer(x).tanh().mean(0) for x in bags]
        out = torch.stack(h) if h else torch.zeros(0, 6, dtype=torch.float64)
        return (out * self.bias) @ self.raw if self.how == "raw" else self.head(out)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", ["tensors", "records", "raw"])
def test_draws_of_nobody(how: str, first: bool) -> None:
    """As steps of no sample, whether or not the model has been looked at before."""
    model, rows = Few(how).double(), [x for x, _ in rows_of([7] * 12)]
    params, own = dict(model.named_parameters()), []
    given = [{"x": x} if how == "records" else x for x in rows]
    for x in given:
        loss = model([x]).square().sum()
        found = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
        pairs = zip(params.items(), found, strict=True)
        own.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs})
    loader = DataLoader(
        [*enumerate(given)], batch_size=1, collate_fn=list,  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(2 if first else 1),
    )  # fmt: skip
    private, optimizer, batches = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=0.5, loss_reduction="sum",
    )  # fmt: skip
    sizes = []
    for batch in batches:
        sizes.append(len(batch))
        optimizer.zero_grad()
        private([x for _, x in batch]).square().sum().backward()
        some = [own[i] for i, _ in batch] or [{n: torch.zeros_like(p) for n, p in params.items()}]
        grads = {n: torch.stack([g[n] for g in some]) for n in params}
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-9)
        optimizer.step()
    assert (sizes[0] == 0) is first
    assert 0 in sizes[1:]
    assert 2 in sizes
    assert private.grad_state.calls.layouts["forward"].proven
