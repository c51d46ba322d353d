"""Layers that see numbers of no row, beside values of parameters; masks that some batches have."""

from __future__ import annotations

import copy
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
    sample_loss,
    summed,
)

D, POSITIONS = 6, 5


class Queries(nn.Module):
    """As of DETR's decoder: learned queries, and zeros of their shape as content, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.content = nn.Embedding(3, D), nn.Linear(D, D)
        self.memory, self.head = nn.Linear(POSITIONS, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1)
        h, memory = queries + self.content(torch.zeros_like(queries)), self.memory(x)
        return self.head((h @ memory.mT).softmax(-1) @ memory)


class Decoder(nn.Module):
    """torch's own, of which the first layer attends to learned queries alone."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, D))
        self.memory, self.head = nn.Linear(POSITIONS, D), nn.Linear(D, 2)
        layer = nn.TransformerDecoderLayer(D, 2, 8, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.queries.expand(len(x), -1, -1), self.memory(x)))


class Anchors(nn.Module):
    """Learned numbers, and what layers make of constants, added."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = nn.Parameter(torch.randn(3, D))
        self.moves = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.memory, self.head = nn.Linear(POSITIONS, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        anchors = self.anchors + self.moves(torch.ones(3, D, dtype=x.dtype))
        return self.head((self.memory(x) @ anchors.T).softmax(-1) @ anchors).mean(1)


class OwnTable(nn.Module):
    """A table that is called with positions, beside entries that are read by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory, self.head = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(torch.arange(POSITIONS))
        both = torch.cat([found, self.table.weight[:1].expand(POSITIONS, D)])
        return self.head(self.memory(x) * both.sum(0)).mean(1)


class AsNumbers(nn.Module):
    """Rows go through numbers of Python: nothing tells that they are those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.tensor((x.abs() * 4).long().clamp(max=8).tolist())
        return self.head(self.table(ids)).mean(1)


MODELS = {Queries: POSITIONS, Decoder: POSITIONS, Anchors: POSITIONS, OwnTable: D, AsNumbers: D}


@pytest.mark.parametrize(("build", "width"), MODELS.items())
def test_layers_that_see_no_rows(build: Callable[[], nn.Module], width: int) -> None:
    torch.manual_seed(0)
    check_exact(build(), torch.randn(4, 7, width), dtype=torch.float64)


class Biased(nn.Module):
    """Relative positions whose bias meets the mask in batches that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.biases = nn.ModuleList(nn.Embedding(9, 2) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        b, t, _ = x.shape
        far = (torch.arange(t) - torch.arange(t)[:, None]).clamp(-4, 4) + 4
        for bias, layer in zip(self.biases, self.layers, strict=True):
            allowed = bias(far).permute(2, 0, 1)[None]
            if not bool(mask.all()):
                there = mask[:, None, None].bool().expand(b, 1, t, t)
                allowed = torch.where(there, allowed, torch.finfo(x.dtype).min)
            q, k, v = (z.view(b, t, 2, 4).transpose(1, 2) for z in layer(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
            x = x + mixed.transpose(1, 2).reshape(b, t, 8)
        return self.head(x.mean(1))


@pytest.mark.parametrize("lengths", [(14, 12, 10), (13, 12, 10), (14, 14, 14)])
def test_a_padded_batch_whose_first_row_is_full(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask = (torch.arange(14) < torch.tensor(lengths)[:, None]).long()
    batch = Batch((torch.randint(1, 20, (3, 14)), mask), {})
    check_exact(Biased(), batch, dtype=torch.float64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [(9, 9, 9, 9), (14, 14, 14)])
def test_padding_that_the_first_batch_had_not(first: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Biased().double()
    twin = copy.deepcopy(model)
    private, optimizer = make_private(model, max_grad_norm=1e9)[1:3]
    longest = max(first)
    full = Batch((torch.randint(1, 20, (len(first), longest)), torch.ones(len(first), longest)))
    backward(private, full, sample_loss, "mean")
    optimizer.zero_grad()
    mask = (torch.arange(14) < torch.tensor((14, 12, 10))[:, None]).long()
    padded = Batch((torch.randint(1, 20, (3, 14)), mask))
    grads = per_sample_gradients(twin, padded, sample_loss)
    backward(private, padded, sample_loss, "mean")
    torch.testing.assert_close(optimizer.per_sample_norms, norms(grads), rtol=1e-10, atol=0)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 1e9), 1e-10)
