"""Functions of a parameter and the batch, whose input needs a gradient too: each exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Member, T, check

eye = torch.eye(D, dtype=torch.float64)


def some(x: Tensor, most: int) -> Tensor:
    """Numbers from 0 to `most`, of x."""
    return (x.detach().abs() * 2).long().clamp(max=most)


FUNCTIONS: dict[str, list[Callable[[Functions, Tensor], Tensor]]] = {
    "powers": [
        lambda m, x: (3 + x * x) ** m.a,
        lambda m, x: m.a.exp() ** x,
        lambda m, x: (m.a * m.a) ** x,
        lambda m, x: torch.float_power(x.abs() + 1, m.a),
        lambda m, x: x.relu() ** 2 * m.a,
        lambda m, x: torch.pow(x.relu() + 0.1, m.w[0]),
        lambda m, x: torch.hypot(m.a, x),
        lambda m, x: torch.stack([m.a**i for i in range(3)], -1) @ x[:, :3, :2],
    ],
    "pairs": [
        lambda m, x: m.a / (3 + x * x),
        lambda m, x: torch.fmax(m.a, x),
        lambda m, x: torch.logaddexp(m.a, x),
        lambda m, x: torch.lerp(m.a, x, x),
        lambda m, x: torch.xlogy(x, m.a.abs()),
        lambda m, x: torch.atan2(x, m.a),
        lambda m, x: torch.where(x > m.a, x, m.a),
        lambda m, x: (x > m.a).to(x.dtype) * x * m.w[0],
        lambda m, x: torch.clamp(x, m.a - 1, m.a + 1),
        lambda m, x: x.mul(m.a).add(m.a).sub(m.a, alpha=3),
    ],
    "activations": [
        lambda m, x: F.prelu(x, m.a[:1]),
        lambda m, x: torch.softmax(x, -1) * m.a,
        lambda m, x: torch.sigmoid(x + m.a),
        lambda m, x: F.hardtanh(x * m.a),
        lambda m, x: F.glu(x * m.a),
        lambda m, x: F.softmax(x @ m.w / m.a.norm(), -1),
        lambda m, x: F.dropout(x * m.a, 0.0),
        lambda m, x: -m.a * x,
        lambda m, x: abs(m.a) * x,
        lambda m, x: x * m.a.sum(),
    ],
    "along an axis": [
        lambda m, x: torch.stack([x, m.a.expand_as(x)]).amax(0),
        lambda m, x: (x + m.a).cummax(1).values,
        lambda m, x: (x * m.a).cumprod(1),
        lambda m, x: (x * m.a).logcumsumexp(1),
        lambda m, x: F.normalize(x @ m.w, dim=1),
        lambda m, x: (x * m.a).topk(2, -1).values,
        lambda m, x: (x * m.a).sort(1).values,
        lambda m, x: (x * m.a).median(1).values,
        lambda m, x: (x * m.a).kthvalue(2, 1).values,
    ],
    "windows": [
        lambda m, x: F.interpolate(x * m.a, size=9),
        lambda m, x: F.conv1d(x.mT, m.w[:, :, None], m.a),
        lambda m, x: F.conv_transpose1d(x.mT, m.w[:, :, None].expand(D, D, 3), m.a, padding=1),
        lambda m, x: (x * m.a).unfold(1, 2, 1),
        lambda m, x: F.max_pool1d(x * m.a, 2),
        lambda m, x: F.adaptive_avg_pool1d(x * m.a, 2),
        lambda m, x: F.grid_sample(
            m.w.expand(len(x), 1, D, D), x[:, :, None, :2].tanh(), align_corners=False
        ),
    ],
    "products": [
        lambda m, x: torch.addmm(m.a, x[:, 0], m.w),
        lambda m, x: torch.einsum("btd,de,bte->bt", x, m.w, x),
        lambda m, x: F.bilinear(x, x, m.w[None].expand(3, D, D).contiguous(), m.a[:3]),
        lambda m, x: torch.tensordot(x, m.w, dims=([2], [0])),
        lambda m, x: torch.einsum("...d,d->...", x, m.a),
        lambda m, x: x @ torch.diag(m.a),
        lambda m, x: F.layer_norm(x, (D,), m.a),
        lambda m, x: F.dropout(m.w, 0.5, training=False) @ x.mT,
        lambda m, x: F.cross_entropy(
            (x @ m.w).mT, torch.zeros(len(x), T, dtype=torch.long), reduction="none"
        ),
    ],
    "distances": [
        lambda m, x: torch.cdist(x, m.w.expand(len(x), D, D)),
        lambda m, x: F.cosine_similarity(x, m.a[None, None], -1),
        lambda m, x: F.kl_div(
            (x @ m.w).log_softmax(-1), m.a.softmax(0).expand_as(x), reduction="none"
        ),
        lambda m, x: F.triplet_margin_loss(
            x, m.a.expand_as(x), m.w[0].expand_as(x), reduction="none"
        ),
        lambda m, x: F.pairwise_distance(x, m.a.expand_as(x)),
        lambda m, x: torch.stack([torch.dist(r, m.a) for r in x[:, 0]])[:, None],
        lambda m, x: F.scaled_dot_product_attention(
            x, m.w.expand(len(x), D, D), m.w.expand(len(x), D, D)
        ),
    ],
    "places": [
        lambda m, x: m.w.expand(len(x), D, D).gather(1, some(x, D - 1)),
        lambda m, x: F.embedding_bag(
            some(x, D - 1)[:, 0], m.w, per_sample_weights=x[:, 0], mode="sum"
        ),
        lambda m, x: torch.zeros_like(x).scatter_add(1, some(x, T - 1), x * m.a),
        lambda m, x: x.index_put(
            (torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)), m.a
        ),
        lambda m, x: x.masked_scatter(
            (torch.arange(T)[None, :, None] == 0).expand_as(x), m.a.repeat(len(x))
        ),
        lambda m, x: torch.vstack([x[:, 0], m.a[None].expand(len(x), D)])[: len(x)],
        lambda m, x: torch.cat([x, m.t.expand(1, T, D)])[:-1] * m.a,
        lambda m, x: x * torch.trace(m.w),
        lambda m, x: x @ m.w.flip(0),
        lambda m, x: x @ m.w.roll(1, 0),
        lambda m, x: x / m.w.std(0),
    ],
    "pieces": [
        lambda m, x: sum((xi * pi for xi, pi in zip(x.unbind(-1), m.a.unbind(), strict=True)))[
            ..., None
        ],
        lambda m, x: sum((xi * pi for xi, pi in zip(x.unbind(-1), m.a, strict=True)))[..., None],
        lambda m, x: torch.stack([*m.w]) @ x.mT,
        lambda m, x: x * torch.cat(m.w.chunk(2))[1],
    ],
    "linear algebra": [
        lambda m, x: torch.linalg.solve(m.w + 3 * eye, x.mT),
        lambda m, x: x @ torch.linalg.inv(m.w + 3 * eye),
        lambda m, x: torch.linalg.solve(x.mT @ x + m.w @ m.w.T + eye, x.mT),
        lambda m, x: torch.logdet(x.mT @ x + m.w @ m.w.T + eye)[:, None],
        lambda m, x: torch.linalg.svdvals(x + m.t),
        lambda m, x: torch.linalg.eigvalsh(x.mT @ x + m.w @ m.w.T),
        lambda m, x: torch.linalg.solve_triangular(m.w.triu() + 3 * eye, x.mT, upper=True),
    ],
}


class Functions(nn.Module):
    """All of a group, side by side, behind a layer."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.layer, self.group = nn.Linear(D, D), group
        self.a, self.w, self.t = parameter(D), parameter(D, D), parameter(T, D)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.layer(x))
        return [torch.tanh(function(self, x)) for function in FUNCTIONS[self.group]]


@pytest.mark.parametrize("group", FUNCTIONS)
def test_exact(group: str) -> None:
    check(Member(group, "functions", lambda: Functions(group)), sizes=(3,))
