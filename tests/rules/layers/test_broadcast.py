"""What has no batch dimension of its own: position ids, class tokens, relative biases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastclip.errors import BatchSizeError
from tests.apart import check_exact_of_one_draw
from tests.oracle import (
    DTYPES,
    assert_sums,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused

POSITIONS = [4, 5]  # 4 == b: a dimension's length does not tell what it is


class TokenAndPosition(nn.Module):
    """Token embedding plus position embedding.

    Args:
        rank: of the position ids: 1 is [t] (nanoGPT), 2 is [1, t] (transformers).
        between: applied to the position embedding before it is added.
    """

    def __init__(self, rank: int, between: nn.Module | None = None) -> None:
        super().__init__()
        self.rank = rank
        self.token, self.position = nn.Embedding(7, 6), nn.Embedding(9, 6)
        self.between = between or nn.Identity()
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])
        if self.rank == 2:
            positions = positions[None]
        return self.head(torch.tanh(self.token(ids) + self.between(self.position(positions))))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("rank", [1, 2])
def test_position_ids(rank: int, positions: int, loss_reduction: str, dtype: torch.dtype) -> None:
    ids = torch.randint(7, (4, positions))
    check_exact(TokenAndPosition(rank), ids, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("between", [lambda: nn.Linear(6, 6), lambda: nn.LayerNorm(6)])
def test_layers_before_the_sum(between, rank: int, positions: int, dtype: torch.dtype) -> None:
    """A Linear or LayerNorm sees the positions before any sample does."""
    model = TokenAndPosition(rank, between())
    ids = torch.randint(7, (4, positions))
    check_exact(model, ids, dtype=dtype)


class Vision(nn.Module):
    """A class token in front of the patches, a position embedding and a gain, all raw."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.patch = nn.Linear(5, 6)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(1, positions + 1, 6))
        self.gain = nn.Parameter(torch.randn(1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.token.expand(x.shape[0], -1, -1)
        y = torch.cat([tokens, self.patch(x)], dim=1) + self.position
        return self.head(torch.tanh(y).mean(1) * self.gain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("positions", [3, 4, 5])
def test_raw_parameters(positions: int, loss_reduction: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, positions, 5)
    check_exact(Vision(positions), x, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_parameters_below_the_root(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Vision(4), nn.Tanh(), nn.Linear(3, 2))
    check_exact(model, torch.randn(4, 4, 5), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_one(dtype: torch.dtype) -> None:
    check_exact(Vision(4), torch.randn(1, 4, 5), dtype=dtype, C=0.5)
    check_exact(TokenAndPosition(2), torch.randint(7, (1, 4)), dtype=dtype, C=0.5)


class Gain(nn.Module):
    """Multiplies features by a raw parameter of any shape that broadcasts."""

    def __init__(self, shape: tuple) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(6, 6), nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.gain)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(1,), (6,), (1, 1), (1, 6), (1, 1, 1), (1, 1, 6)])
@pytest.mark.parametrize("x_shape", [(4, 6), (6, 6), (4, 5, 6), (4, 4, 6), (6, 6, 6), (4, 1, 6)])
def test_a_leading_one_need_not_be_the_batch(x_shape: tuple, shape: tuple) -> None:
    """[1, d] beside [b, t, d] broadcasts over t: expanded to [b, d] it would fit where t == b."""
    x = torch.randn(x_shape)
    if len(shape) <= x.dim():
        check_exact(Gain(shape), x, dtype=torch.float64)
    else:  # [1, b, d]: one row of output
        with refused("batch axis of the model's inputs is unknown"):
            make_private(Gain(shape))[1](x)


class Repeated(nn.Module):
    """A raw parameter copied with `repeat`, which multiplies a batch that is already there."""

    def __init__(self, times: int | None) -> None:
        super().__init__()
        self.times = times
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, t, d]
        tokens = self.token.repeat(self.times or x.shape[0], 1, 1)
        return self.head(torch.tanh(torch.cat([tokens, x], dim=1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeat(dtype: torch.dtype) -> None:
    check_exact(Repeated(None), torch.randn(4, 5, 6), dtype=dtype)


class RelativeBias(nn.Module):
    """Mixes positions by weights embedded from their distance: ids [t, t], no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(6, 6)
        self.distance = nn.Embedding(12, 2)  # two heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, t, d]
        t = torch.arange(x.shape[1])
        bias = self.distance(t[:, None] - t[None, :] + 6)  # [t, t, head]
        weights = bias.permute(2, 0, 1)[None].softmax(-1)  # [1, head, t, t]
        return (weights @ self.value(x)[:, None]).flatten(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_relative_bias(positions: int, dtype: torch.dtype) -> None:
    check_exact(RelativeBias(), torch.randn(4, positions, 6), dtype=dtype)


class DroppedPositions(nn.Module):
    """Dropout on the positions alone: the mask is drawn for [t, d] before and [b, t, d] after."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop, self.head = nn.Embedding(9, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x + self.drop(self.table(torch.arange(x.shape[1])))))


def test_dropout_on_positions() -> None:
    """One mask serves all samples: their gradients are those of the same draw."""
    model, x = DroppedPositions().double(), torch.randn(4, 5, 6).double()
    check_exact_of_one_draw(model, x)
    assert model.drop.p == 0.5


@pytest.mark.parametrize("lengths", [(1, 5, 1), (5, 1, 5)])
def test_the_length_may_change(lengths: tuple) -> None:
    """Ids of shape [t] with t = 1 are a length of one, not a batch of one."""
    model = Positions().double()
    params = dict(model.named_parameters())
    batches = [torch.randn(4, t, 6).double() for t in lengths]
    expected = [clipped_sum(per_sample_gradients(model, x), 1.0) for x in batches]
    _, private, optimizer, _ = make_private(model, lr=0.0)
    for x, sums in zip(batches, expected, strict=True):
        optimizer.zero_grad()
        sample_loss(private(x)).mean().backward()
        assert_sums(summed(params), sums, 1e-10)
        optimizer.step()


class Positions(nn.Module):
    """Adds an embedding of ids [t] to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x + self.table(torch.arange(x.shape[1]))))


class Averages(Positions):
    """The mean of what all positions have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x + self.table(torch.arange(x.shape[1])).mean(0)))


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_mean_over_positions(positions: int) -> None:
    check_exact(Averages(), torch.randn(4, positions, 6), dtype=torch.float64)


def test_a_refusal_stays_a_refusal() -> None:
    """An error while the axes are learned must not let the next forward pass through."""

    class Coupled(Positions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x - x.mean(0) + self.table(torch.arange(x.shape[1])))

    _, private, _, _ = make_private(Coupled())
    for _ in range(2):
        with pytest.raises(BatchSizeError, match="independently of the others"):
            private(torch.randn(4, 5, 6))
