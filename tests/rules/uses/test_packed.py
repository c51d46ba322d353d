"""Recurrent layers over packed sequences: rows sorted by length, of a batch that shrinks over time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from tests.oracle import Batch, check_exact, sample_loss
from tests.rules.uses.test_recurrent import KINDS, STEPS, kinds, rnn

LENGTHS = {"sorted": [5, 4, 4, 1], "unsorted": [2, 5, 1, 4], "even": [3, 3, 3, 3]}
orders = pytest.mark.parametrize("order", LENGTHS)


def padded_loss(output: tuple, _: object) -> torch.Tensor:
    """Loss of a packed output sequence and the final states; the padding's share is constant."""
    sequence, final = output
    sequence, _ = pad_packed_sequence(sequence, batch_first=True, total_length=STEPS)
    states = final if isinstance(final, tuple) else (final,)
    return sample_loss(
        torch.cat([sequence.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)
    )


@pytest.mark.one_in(9)
@orders
@pytest.mark.parametrize("bidirectional", [True, False])
@kinds
def test_packed_root(kind: str, bidirectional: bool, order: str) -> None:
    x, lengths = torch.randn(4, STEPS, 3), LENGTHS[order]

    def pack(rows: slice, to: torch.dtype) -> Batch:
        packed = pack_padded_sequence(
            x[rows].to(to), lengths[rows], batch_first=True, enforce_sorted=order != "unsorted"
        )
        return Batch((packed,), take=lambda _, i: pack(slice(i, i + 1), torch.float64))

    model = rnn(kind, num_layers=2, bidirectional=bidirectional)
    check_exact(model, pack(slice(None), torch.float64), padded_loss, dtype=torch.float64)


class Packing(nn.Module):
    """Packs what an embedding made, as text classifiers do."""

    def __init__(self, kind: str, enforce_sorted: bool, given: bool = False) -> None:
        super().__init__()
        self.enforce_sorted = enforce_sorted
        self.embedding = nn.Embedding(9, 3)
        self.rnn = rnn(kind, bidirectional=True, num_layers=2)
        self.start = nn.Embedding(9, 16) if given else None
        self.head = nn.Linear(12, 2)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        states = None
        if self.start is not None:
            h = self.start(ids[:, 0]).unflatten(1, (4, 4)).transpose(0, 1).contiguous()
            states = (h, h.cos()) if isinstance(self.rnn, nn.LSTM) else h
        out, last = self.rnn(packed, states)
        last = last[0] if isinstance(last, tuple) else last
        sequence, _ = pad_packed_sequence(out, batch_first=True, total_length=STEPS)
        return self.head(torch.cat([sequence.tanh().sum(1), last[-1]], 1))


IDS = 2 * torch.arange(20).view(4, STEPS) % 9


@pytest.mark.one_in(8)
@orders
@pytest.mark.parametrize("given", [True, False])
@kinds
def test_packed_inside(kind: str, given: bool, order: str) -> None:
    model = Packing(kind, order != "unsorted", given)
    check_exact(model, (IDS, torch.tensor(LENGTHS[order])), dtype=torch.float64)


@pytest.mark.one_in(3)
@orders
def test_projected_states(order: str) -> None:
    model = Packing("lstm", order != "unsorted")
    model.rnn = nn.LSTM(3, 8, 2, proj_size=4, bidirectional=True, batch_first=True)
    check_exact(model, (IDS, torch.tensor(LENGTHS[order])), dtype=torch.float64)


class OwnLengths(nn.Module):
    """Lengths follow from the data; only final states are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(9, 3), rnn("gru"), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = ids[:, 0] % STEPS + 1
        packed = pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
@pytest.mark.parametrize("state", [0, 1])
def test_final_states_of_a_projected_layer(state: int, options: dict) -> None:
    """Nothing else of what it returns is used: not the packed sequence before them."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 8, proj_size=4, batch_first=True, **options)
            self.head = nn.LazyLinear(2)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            last = self.rnn(packed)[1][state][-2 if self.rnn.bidirectional else -1 :]
            return self.head(torch.cat(list(last), 1))

    torch.manual_seed(0)
    given, model = (torch.randn(4, STEPS, 3), torch.tensor(LENGTHS["unsorted"])), Last()
    model(*given)
    check_exact(model, given, dtype=torch.float64)


def test_lengths_of_the_data() -> None:
    check_exact(OwnLengths(), IDS, dtype=torch.float64)


class SortsItself(nn.Module):
    """Sorts its rows by length, and puts them back."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(9, 3), rnn(kind)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ordered, order = lengths.sort(descending=True, stable=True)
        packed = pack_padded_sequence(self.embedding(ids)[order], ordered, batch_first=True)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=STEPS)
        return self.head(out[order.argsort()].tanh().sum(1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", LENGTHS)
@kinds
def test_sorted_by_the_model(kind: str, order: str) -> None:
    batch = (IDS, torch.tensor(LENGTHS[order]))
    check_exact(SortsItself(kind), batch, dtype=torch.float64)


class Sentences(nn.Module):
    """Words of characters, packed together: every sample has several sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(9, 3), rnn("lstm"), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [b, words, t]
        b, words = ids.shape[:2]
        flat = ids.flatten(0, 1)
        lengths = flat[:, 0] % STEPS + 1
        packed = pack_padded_sequence(
            self.embedding(flat), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][0][0].view(b, words, -1).tanh().sum(1))


def test_packed_words() -> None:
    ids = torch.arange(40).mul(7).view(4, 2, STEPS) % 9
    check_exact(Sentences(), ids, dtype=torch.float64)


class Several(nn.Module):
    """Layers between packed data: a Linear over rows of the packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = rnn("gru"), KINDS["lstm"](4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_sequence(
            [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)], enforce_sorted=False
        )
        out = self.second(self.first(packed)[0])[0]
        return pad_packed_sequence(out, batch_first=True, total_length=STEPS)[0]


def test_two_packed_layers() -> None:
    batch = (torch.randn(4, STEPS, 3), torch.tensor(LENGTHS["unsorted"]))
    check_exact(Several(), batch, dtype=torch.float64)
