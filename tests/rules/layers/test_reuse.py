"""A parameter used more than once: a sample's gradient is the sum over the uses, norms included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import DTYPES, check_exact


class TiedHead(nn.Module):
    """An embedding whose matrix is also the output layer's, with something between them."""

    def __init__(
        self, padding_idx: int | None = None, bias: bool = False, last_only: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=padding_idx)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=bias)
        self.head.weight = self.embedding.weight
        self.last_only = last_only

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(torch.tanh(2.0 * self.embedding(ids)))
        return self.head(x[:, -1] if self.last_only else x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"bias": True}, {"padding_idx": 0}, {"last_only": True}],
    ids=["plain", "bias", "padding", "last-only"],
)
def test_tied_head(arguments: dict, loss_reduction: str, dtype: torch.dtype) -> None:
    ids = torch.randint(7, (5, 6))
    check_exact(TiedHead(**arguments), ids, dtype=dtype, loss_reduction=loss_reduction)


class TwoStreams(nn.Module):
    """Encoder and decoder share the embedding, and the head has its matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = TiedHead()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.tied(target) + self.tied(source).mean(1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_embedding_and_tied_head(dtype: torch.dtype) -> None:
    """Two embeddings and two heads of one matrix, at different lengths."""
    check_exact(TwoStreams(), (torch.randint(7, (4, 5)), torch.randint(7, (4, 3))), dtype=dtype)


class Twice(nn.Module):
    """Calls one layer on its own output."""

    def __init__(self, layer: nn.Module, times: int = 2) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


CALLED_TWICE = {
    "linear": (lambda: nn.Linear(6, 6), (4, 6)),
    "linear-positions": (lambda: nn.Linear(6, 6), (4, 5, 6)),
    "conv": (lambda: nn.Conv2d(3, 3, 3, padding=1), (4, 3, 6, 6)),
    "conv-shrinking": (lambda: nn.Conv2d(3, 3, 3, stride=2), (4, 3, 19, 19)),
    "layer-norm": (lambda: nn.LayerNorm(6), (4, 5, 6)),
    "rms-norm": (lambda: nn.RMSNorm(6), (4, 5, 6)),
    "group-norm": (lambda: nn.GroupNorm(3, 6), (4, 6, 5)),
    "instance-norm": (lambda: nn.InstanceNorm1d(6, affine=True), (4, 6, 5)),
    "block": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), (4, 6)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("case", CALLED_TWICE)
def test_module_called_again(case: str, times: int, dtype: torch.dtype) -> None:
    make, shape = CALLED_TWICE[case]
    if case == "conv-shrinking":
        times = 2  # a third call would have one pixel
    check_exact(Twice(make(), times), torch.randn(shape), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_module_under_two_names(dtype: torch.dtype) -> None:
    layer = nn.Linear(6, 6)
    check_exact(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(4, 6), dtype=dtype)


def tied_linears(what: str) -> nn.Module:
    """Two layers that share their weight, their bias or both; the rest is their own."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=what != "no-bias"))
    if what in ("weight", "both", "no-bias"):
        model[2].weight = model[0].weight
    if what in ("bias", "both"):
        model[2].bias = model[0].bias
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["weight", "bias", "both", "no-bias"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6)])
def test_tied_linears(shape: tuple, what: str, dtype: torch.dtype) -> None:
    check_exact(tied_linears(what), torch.randn(shape), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_norms(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6))
    model[2].weight = model[0].weight
    check_exact(model, torch.randn(4, 5, 6), dtype=dtype)


class TwoPlaces(nn.Module):
    """One layer on all positions, then on their mean, then on the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, t, d]
        y = torch.tanh(self.layer(x))
        return self.layer(y.mean(1)) * self.layer(x[:, :1]).squeeze(1) + self.layer(y[:, :2]).sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_different_lengths(dtype: torch.dtype) -> None:
    check_exact(TwoPlaces(), torch.randn(4, 5, 6), dtype=dtype)


class OutputUsedTwice(nn.Module):
    """One call, whose output is used twice: one record, not two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y) * y.sin() + y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6)])
def test_output_used_twice(shape: tuple, dtype: torch.dtype) -> None:
    check_exact(OutputUsedTwice(), torch.randn(shape), dtype=dtype)
