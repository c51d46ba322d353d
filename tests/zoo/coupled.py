"""Models whose rows are not apart, by how they hide it: to be refused.

Each is a function of a model with two layers and some raw parameters, and of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, T

E = 3


class Body(nn.Module):
    """What the functions use: a layer, raw parameters, a router, a table."""

    def __init__(self, function: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(D, D), function
        self.p, self.zero = parameter(D), nn.Parameter(torch.zeros(D))
        self.up, self.router = parameter(E, D, D), nn.Linear(D, E)
        self.rows, self.table = parameter(64, D), nn.Embedding(9, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


Coupled = Callable[[Body, Tensor], Tensor]
COUPLED: dict[str, Coupled] = {}


def coupled(function: Coupled) -> Coupled:
    COUPLED[function.__name__] = function
    return function


# Statistics of the batch


@coupled
def mean_of_rows(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h - h.mean(0) * m.p


@coupled
def detached_mean(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h - 1e-8 * h.detach().mean(0) * m.p


@coupled
def mean_behind_a_gate_of_zero(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h + m.zero * (h.mean(0) * m.p)


@coupled
def small_mean(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h + 1e-9 * (h.mean(0) * m.p)


@coupled
def batch_norm_by_hand(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return (h - h.mean((0, 1))) / (h.var((0, 1)) + 1e-5).sqrt() * m.p


@coupled
def batch_norm_of_torch(m: Body, x: Tensor) -> Tensor:
    return F.batch_norm((m.layer(x) * m.p).mT, None, None, training=True)


@coupled
def maximum(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h / h.detach().abs().max() * m.p


@coupled
def nystrom(m: Body, x: Tensor) -> Tensor:
    """The pseudo-inverse starts from a maximum over the batch."""
    kernel = (m.layer(x) @ m.layer(x).mT).softmax(-1)
    inverse = 1 / kernel.sum(-2).max() * kernel.mT
    for _ in range(3):
        inverse = inverse @ (2 * torch.eye(T, dtype=x.dtype) - kernel @ inverse)
    return inverse @ x * m.p


@coupled
def cosine_between_rows(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x).mean(1)
    return F.normalize(h, dim=-1) @ F.normalize(h, dim=-1).T @ h * m.p


@coupled
def softmax_over_rows(m: Body, x: Tensor) -> Tensor:
    return (m.layer(x) * m.p).softmax(0)


@coupled
def sums_over_rows(m: Body, x: Tensor) -> Tensor:
    return (m.layer(x) * m.p).cumsum(0)


@coupled
def attention_to_rows(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x).mean(1)
    return h + 1e-6 * ((h * m.p) @ h.T / 50).softmax(-1) @ h


@coupled
def noise_of_the_batch(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h + torch.randn_like(h) * h.std(0, unbiased=False) * m.p


@coupled
def number_of_rows(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) * (m.p / len(x))


@coupled
def table_of_the_number_of_rows(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) + m.table(torch.tensor(len(x)))


# Numbers of the batch in values of parameters


@coupled
def number_in_python(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) * (m.p * x.abs().max().item())


@coupled
def detached_statistic_in_a_weight(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) @ (m.up[0] * x.detach().mean((0, 1)))


@coupled
def one_row_in_a_weight(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) @ (m.up[0] * x.detach()[0].mean(0))


@coupled
def branch_of_the_batch(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h * m.p if float(h.detach().sum()) > 0 else h


@coupled
def counts_of_the_batch(m: Body, x: Tensor) -> Tensor:
    ids = (x[..., 0] > 0).long()
    return m.layer(x) + m.table(ids) / torch.bincount(ids.flatten())[ids][..., None]


# Rows in other places


@coupled
def shuffled(m: Body, x: Tensor) -> Tensor:
    return m.layer(x)[torch.randperm(len(x))] * m.p


@coupled
def mixed_with_another(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h + 1e-3 * h[torch.randperm(len(x))] * m.p


@coupled
def rolled(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h + h.roll(1, 0) * m.p


@coupled
def reversed_rows(m: Body, x: Tensor) -> Tensor:
    return m.layer(x).flip(0) * m.p


@coupled
def sorted_rows(m: Body, x: Tensor) -> Tensor:
    return (m.layer(x) * m.p).sort(0).values


@coupled
def folded_wrongly(m: Body, x: Tensor) -> Tensor:
    return m.layer(x.reshape(T, len(x), D)).transpose(0, 1) * m.p


@coupled
def folded_wrongly_by_hand(m: Body, x: Tensor) -> Tensor:
    return (x.transpose(0, 1).reshape(-1, D) @ m.up[0]).view(x.shape) * m.p


@coupled
def recurrent_over_rows(m: Body, x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[0]), []
    for row in x:
        h = torch.tanh(m.layer(row) + h * m.p)
        found.append(h)
    return torch.stack(found)


@coupled
def first_row_for_all(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) * x[:1] * m.p


# Rows told apart by their number


@coupled
def half_of_the_batch(m: Body, x: Tensor) -> Tensor:
    h, half = m.layer(x), len(x) // 2
    return torch.cat([h[:half] * m.p, h[half:]])


@coupled
def layer_of_half_of_the_batch(m: Body, x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([m.layer(x[:half]), x[half:] * m.p])


@coupled
def last_row(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x)
    return torch.cat([h[:-1], h[-1:] * m.p])


@coupled
def every_other_row(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x).clone()
    h[::2] *= m.p
    return h


@coupled
def parameter_of_a_row(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) + m.rows[: len(x), None]


@coupled
def row_number(m: Body, x: Tensor) -> Tensor:
    return m.layer(x) + torch.arange(len(x), dtype=x.dtype)[:, None, None] * m.p


# Mixtures of experts in which rows compete


def _places(m: Body, h: Tensor) -> tuple[Tensor, Tensor]:
    chosen = m.router(h).argmax(-1)
    mask = F.one_hot(chosen, E)
    return chosen, (mask.cumsum(0) * mask).sum(1) - 1


def _of_experts(m: Body, h: Tensor, chosen: Tensor, keep: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for e in range(E):
        at = torch.where((chosen == e) & keep)[0]
        out[at] = h[at] @ m.up[e]
    return out


@coupled
def capacity_that_drops(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x).reshape(-1, D)
    chosen, places = _places(m, h)
    return (h + _of_experts(m, h, chosen, places < max(len(h) // 6, 1))).view(x.shape)


@coupled
def constant_capacity(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x).reshape(-1, D)
    chosen, places = _places(m, h)
    return (h + _of_experts(m, h, chosen, places < 4)).view(x.shape)


@coupled
def experts_choose_of_all(m: Body, x: Tensor) -> Tensor:
    h = m.layer(x).reshape(-1, D)
    share, out = m.router(h).softmax(-1), torch.zeros_like(h)
    for e in range(E):
        at = share[:, e].topk(len(h) // 2).indices
        out = out.index_add(0, at, h[at] @ m.up[e])
    return out.view(x.shape)


@coupled
def balance_of_the_batch(m: Body, x: Tensor) -> Tensor:
    share = m.router(m.layer(x)).softmax(-1)
    balance = share.mean((0, 1)).square().sum()
    return torch.einsum("bte,btd,edf->btf", share, x, m.up) + balance


# Hidden by what is drawn


@coupled
def number_of_rows_beside_noise(m: Body, x: Tensor) -> Tensor:
    return (m.layer(x) + 1e-20 * torch.randn_like(x)).tanh() / len(x)


@coupled
def number_of_rows_beside_dropout(m: Body, x: Tensor) -> Tensor:
    return m.layer(F.dropout(x, 1e-4)) * m.p / len(x)


@coupled
def half_of_the_batch_beside_noise(m: Body, x: Tensor) -> Tensor:
    h, half = m.layer(x) + 1e-20 * torch.randn_like(x), len(x) // 2
    return torch.cat([h[:half] * m.p, h[half:]])
