"""Embedding and EmbeddingBag: repeated ids, padding, bags in both of their forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import DTYPES, Batch, check_exact

IDS = {1: (6,), 2: (6, 9), 3: (6, 3, 5)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("padding_idx", [None, 0, 4])
@pytest.mark.parametrize("rank", IDS)
def test_embedding(
    rank: int, padding_idx: int | None, loss_reduction: str, dtype: torch.dtype
) -> None:
    """Five ids in samples of up to fifteen positions: most are repeated."""
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=padding_idx), nn.Tanh(), nn.Linear(4, 3))
    ids = torch.randint(5, IDS[rank])
    check_exact(model, ids, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32])
@pytest.mark.parametrize("words", [50, 500])
def test_alone(words: int, id_type: torch.dtype, dtype: torch.dtype) -> None:
    """Many entries of a small table, and few of a large one."""
    check_exact(nn.Embedding(words, 8), torch.randint(words, (5, 20)).to(id_type), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [[[2, 2, 2], [2, 2, 2]], [[0, 0, 0], [1, 0, 0]]])
def test_one_id_many_times(ids: list, dtype: torch.dtype) -> None:
    """The rows of a sample's gradient add up before the norm; a padded row counts for nothing."""
    model = nn.Sequential(nn.Embedding(3, 4, padding_idx=0), nn.Linear(4, 2))
    check_exact(model, torch.tensor(ids), dtype=dtype, C=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_of_padding_alone(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 0], [1, 2], [2, 2], [1, 0]])
    check_exact(nn.Embedding(3, 4, padding_idx=0), ids, dtype=dtype)


class Bag(nn.Module):
    """A bag between the model's inputs and a head; b is the length of its output."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, **arguments)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, offsets=None, weights=None) -> torch.Tensor:
        return self.head(torch.tanh(self.bag(ids, offsets, weights)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bag_of_rows(mode: str, padding_idx: int | None, dtype: torch.dtype) -> None:
    check_exact(Bag(mode=mode, padding_idx=padding_idx), torch.randint(7, (5, 6)), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_rows(dtype: torch.dtype) -> None:
    batch = Batch((torch.randint(7, (5, 6)), None, torch.randn(5, 6)))
    check_exact(Bag(mode="sum"), batch, dtype=dtype)


STARTS = [0, 3, 4, 9]  # of 4 bags over 12 ids


def one_bag(batch: Batch, i: int) -> Batch:
    """Bag i alone, offsets included."""
    ids, offsets, weights = batch.args
    last = len(offsets) > len(STARTS)  # include_last_offset
    start, end = [*STARTS, len(ids)][i : i + 2]
    new_offsets = offsets.new_tensor([0, end - start] if last else [0])
    return Batch((ids[start:end], new_offsets, None if weights is None else weights[start:end]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"padding_idx": 1}, {"include_last_offset": True}],
    ids=["plain", "padding", "last-offset"],
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets(mode: str, arguments: dict, weighted: bool, dtype: torch.dtype) -> None:
    """The root's first input is as long as all bags together: it does not tell b."""
    ids = torch.randint(7, (12,))
    last = [len(ids)] if arguments.get("include_last_offset") else []
    weights = torch.randn(12) if weighted and mode == "sum" else None  # torch: for sums only
    batch = Batch((ids, torch.tensor(STARTS + last), weights), take=one_bag)
    check_exact(Bag(mode=mode, **arguments), batch, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_bag(dtype: torch.dtype) -> None:
    ids, offsets = torch.tensor([1, 2, 2, 5]), torch.tensor([0, 3, 3])

    def take(batch: Batch, i: int) -> Batch:
        return Batch((ids[[0, 3, 3][i] : [3, 3, 4][i]], torch.tensor([0])))

    check_exact(Bag(mode="sum"), Batch((ids, offsets), take=take), dtype=dtype)


@pytest.mark.parametrize("offsets", [None, STARTS])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_32_bits(mode: str, offsets: list[int] | None) -> None:
    if offsets is None:
        batch: Batch | torch.Tensor = torch.randint(7, (5, 4)).int()
    else:
        ids = torch.randint(7, (12,)).int()
        batch = Batch((ids, torch.tensor(offsets).int(), None), take=one_bag)
    model = Bag(mode=mode)
    check_exact(model, batch, dtype=torch.float64)
