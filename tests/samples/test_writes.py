"""What a forward pass writes into the model's own tensors, through whichever tensor it writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import (
    Batch,
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

B, D = 6, 4
Write = Callable[[Tensor, Tensor], object]

WAYS: dict[str, Write] = {
    "in place": lambda own, now: own.mul_(0.9).add_(now, alpha=0.1),
    "data": lambda own, now: own.data.mul_(0.9).add_(now.data, alpha=0.1),
    "detached": lambda own, now: own.detach().lerp_(now, 0.1),
    "a view": lambda own, now: own.view(1, -1)[0].copy_(now),
    "foreach": lambda own, now: torch._foreach_add_([own.data], [now]),
    "other memory": lambda own, now: setattr(own, "data", 0.9 * own.data + 0.1 * now.data),
}
KINDS = ["buffer", "frozen", "trained", "left out"]


class Running(nn.Module):
    """Keeps a mean of what it has seen, for later."""

    def __init__(self, kind: str, write: Write, of_batch: bool = True) -> None:
        super().__init__()
        self.first, self.head, self.write = nn.Linear(D, D), nn.Linear(D, 2), write
        self.of_batch = of_batch
        if kind == "buffer":
            self.register_buffer("mean", torch.ones(D))
        else:
            self.mean = nn.Parameter(torch.ones(D), requires_grad=kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            self.write(self.mean, h.mean(0) if self.of_batch else torch.full((D,), 0.5))
        return self.head(h)


def layers(model: Running) -> list[nn.Parameter]:
    return [*model.first.parameters(), *model.head.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_learns_from_the_batch_is_refused(way: str, kind: str) -> None:
    """And nothing of it is left."""
    model = Running(kind, WAYS[way])
    trained = [*layers(model), *([model.mean] if kind == "trained" else [])]
    private = make_private(model, optimizer_params=trained)[1]
    for _ in range(2):
        with refused("errors.html#carried-state"):
            private(torch.randn(B, D))
        assert torch.equal(model.mean, torch.ones(D))


def test_what_follows_from_no_batch_is_the_models_own() -> None:
    """Weights that a model normalizes itself; a look leaves them as they were."""
    seen: list[Tensor] = []

    def write(own: Tensor, now: Tensor) -> None:
        seen.append(own.clone())
        own.data.mul_(now)

    model = Running("frozen", write, of_batch=False)
    private = make_private(model, optimizer_params=layers(model))[1]
    private(torch.randn(B, D))
    assert len(seen) > 2
    assert all(torch.equal(x, torch.ones(D)) for x in seen)
    assert torch.equal(model.mean, torch.full((D,), 0.5))


class Converting(nn.Module):
    """Turns a router into float32 when it runs, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(D, 3), nn.Linear(D, 3)
        nn.init.normal_(self.router.weight, std=1e-3)  # which a look stirs

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        return self.head(x) * self.router(x.float()).softmax(-1).to(x.dtype)


def test_weights_that_the_forward_pass_converts() -> None:
    """A look stirs what says nothing, and nothing of it is left in the memory that they get."""
    torch.manual_seed(0)
    model, twin, x = Converting().double(), Converting().double(), torch.randn(B, D).double()
    twin.load_state_dict(model.state_dict())
    grads = per_sample_gradients(twin, x)
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    backward(private, x)
    assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
    assert (optimizer.per_sample_norms / norms(grads) - 1).abs().max() < 1e-5
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-5)


class Shrinking(nn.Module):
    """Makes its own weights smaller in every forward pass."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.first, self.scale, self.by = nn.Linear(D, 2), nn.Parameter(torch.ones(2)), by

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(self.by)
        return self.first(x) * self.scale


def test_trained_weights_that_follow_from_no_batch() -> None:
    """Once a step, whatever was looked at; gradients are those of the weights in use."""
    model, twin, x = Shrinking(0.5).double(), Shrinking(1.0).double(), torch.randn(B, D).double()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        twin.scale.mul_(0.5)
    grads = per_sample_gradients(twin, x)
    C = norms(grads).median().item()
    private = make_private(model, max_grad_norm=C, loss_reduction="sum")[1]
    backward(private, x, loss_reduction="sum")
    assert torch.equal(model.scale, twin.scale)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-12)


class Table(nn.Module):
    def __init__(self, trained: bool = True, **options: object) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(3 * torch.randn(9, D)), nn.Linear(D, 2)
        self.table.requires_grad_(trained)
        self.options = options

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding_bag(ids, self.table, **self.options))


IDS = torch.arange(3 * B).view(B, 3) % 9


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True, "mode": "sum"}, {"sparse": True}]
)
def test_bags_that_look_at_the_batch(options: dict) -> None:
    model = Table(**options)
    before = model.table.detach().clone()
    with refused("Omit the option"):
        make_private(model)[1](IDS)
    assert torch.equal(model.table, before)


def test_a_frozen_table_whose_rows_the_batch_normalizes() -> None:
    model = Table(trained=False, max_norm=1.0)
    before = model.table.clone()
    with refused("errors.html#carried-state"):
        make_private(model, optimizer_params=list(model.head.parameters()))[1](IDS)
    assert torch.equal(model.table, before)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_themselves(mode: str) -> None:
    check_exact(Table(mode=mode), Batch((IDS,)), dtype=torch.float64)


def test_torchs_own_bags() -> None:
    class Torchs(Table):
        def forward(self, ids: Tensor) -> Tensor:
            starts = torch.arange(len(ids)) * ids.shape[1]
            by_frequency = self.options.get("by_frequency", False)
            found = torch.embedding_bag(self.table, ids.flatten(), starts, by_frequency, 0)
            return self.head(found[0])

    with refused("scale_grad_by_freq"):
        make_private(Torchs(by_frequency=True))[1](IDS)


class Narrow(nn.Module):
    """Rows that a model has sorted go through a layer without a width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = nn.Linear(D, D), nn.Linear(D, 0), nn.Linear(0, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        order = h[:, 0].argsort()
        return h + self.up(self.down(h[order]))[order.argsort()]


def test_a_layer_without_a_width_among_moved_rows() -> None:
    check_exact(Narrow(), torch.randn(B, D), dtype=torch.float64)


class Assembled(nn.Module):
    """A weight that is put together from parts of two parameters, in memory that held nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        w = torch.empty(D, D, dtype=x.dtype)
        w[:2], w[2:] = self.first.weight[:2], self.second.weight[: D - 2]
        return self.head(torch.tanh(x @ w.T))


def test_a_weight_that_is_put_together() -> None:
    check_exact(Assembled(), torch.randn(B, D), dtype=torch.float64)
