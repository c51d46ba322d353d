"""Inputs built so that a Gram matrix cancels: norms must not come out too small.

sum_ts (a_t . a_s)(g_t . g_s) adds terms of size ||A||^2 ||G||^2; where the true squared norm is far
below that, a float32 Gram returns rounding noise, even a negative number, and a sample would be
clipped too little. The products here are chosen: the loss is <output, g>, so g is exactly the
output's gradient.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastclip import ops
from fastclip.core.numerics import margin
from tests.oracle import make_private, summed

C = 1.0
ULP = 1e-6  # a norm is rounded to float32 like any other number


def nearly_constant(t: int, n: int, big: float, tiny: float) -> torch.Tensor:
    """[1, t, n]: one large vector at every position, plus small differences."""
    return big * torch.randn(1, 1, n) + tiny * torch.randn(1, t, n)


def alternating(t: int, n: int, size: float) -> torch.Tensor:
    """[1, t, n]: one vector with signs + - + -, so that pairs of positions cancel."""
    signs = torch.tensor([1.0, -1.0]).repeat(t // 2)[None, :, None]
    return size * torch.randn(1, 1, n) * signs


def paired(t: int, n: int, big: float, tiny: float) -> torch.Tensor:
    """[1, t, n]: positions come in nearly equal pairs, which `alternating` sets off."""
    half = big * torch.randn(1, t // 2, 1, n)
    return (half + tiny * torch.randn(1, t // 2, 2, n)).reshape(1, t, n)


def nearly_parallel(t: int, n: int, tiny: float) -> torch.Tensor:
    """[1, t, n]: one random vector, a little different at each position."""
    return 3 * torch.randn(1, 1, n) + tiny * torch.randn(1, t, n)


CONSTRUCTIONS = {
    "constant": lambda t, d, p: (nearly_constant(t, d, 1e3, 1e-2), alternating(t, p, 1e2)),
    "constant-mild": lambda t, d, p: (nearly_constant(t, d, 10.0, 1e-3), alternating(t, p, 1.0)),
    "exact": lambda t, d, p: (nearly_constant(t, d, 1e3, 0.0), alternating(t, p, 1e2)),
    "paired": lambda t, d, p: (paired(t, d, 1e3, 1e-2), alternating(t, p, 1e2)),
    "transposed": lambda t, d, p: (alternating(t, d, 1e2), nearly_constant(t, p, 1e3, 1e-2)),
}
SHAPES = [(2, 512, 4), (16, 64, 64), (64, 8, 512), (128, 128, 16), (256, 512, 8), (256, 16, 16)]


def norms_and_contribution(
    model: nn.Module, x: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The engine's norms, [b], and the float64 norm of everything that was contributed."""
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    (private(x) * g).sum().backward()
    contribution = torch.cat([s.double().flatten() for s in summed(params).values()])
    return optimizer.per_sample_norms, contribution.norm().item()


def linear_case(construction: str, t: int, d: int, p: int) -> tuple:
    """Layer, activations, output gradients and the true norm."""
    a, g = CONSTRUCTIONS[construction](t, d, p)
    true = torch.einsum("btp,btd->bpd", g.double(), a.double()).norm().item()
    assert true < 0.1 * a.double().norm().item() * g.double().norm().item()  # it does cancel
    return nn.Linear(d, p, bias=False), a, g, true


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("t", "d", "p"), SHAPES)
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_linear_norm(construction: str, t: int, d: int, p: int) -> None:
    model, a, g, true = linear_case(construction, t, d, p)
    assert norms_and_contribution(model, a, g)[0].item() >= true * (1 - ULP)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("t", "d", "p"), SHAPES)
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_linear_contribution(construction: str, t: int, d: int, p: int) -> None:
    model, a, g, _ = linear_case(construction, t, d, p)
    assert norms_and_contribution(model, a, g)[1] <= C


@pytest.mark.parametrize("tiny", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize(("t", "n"), [(2, 64), (2, 256), (6, 64), (18, 64), (6, 768)])
def test_nearly_parallel_positions(t: int, n: int, tiny: float) -> None:
    """Where all roundings of a Gram are alike, and what they are of cancels: 40 draws each."""
    fading = 1 - tiny * torch.arange(t)[None, :, None]
    signs = torch.ones(t)
    signs[t // 2 :] = -1
    for seed in range(40):
        torch.manual_seed(seed)
        a = nearly_parallel(t, n, tiny)
        g = 10 * torch.randn(1, 1, n) * signs[None, :, None] * fading
        true = torch.einsum("btp,btd->bpd", g.double(), a.double()).norm().item()
        assert ops.ghost_norm(a, g).double().sqrt().item() >= true * (1 - ULP)


@pytest.mark.parametrize("bias", [False, True])
def test_many_samples(bias: bool) -> None:
    """Each of a batch, where only some of the samples are adversarial."""
    bad = [CONSTRUCTIONS["paired"](64, 32, 32) for _ in range(3)]
    good = [(torch.randn(1, 64, 32), torch.randn(1, 64, 32)) for _ in range(3)]
    a, g = (torch.cat(parts) for parts in zip(*(bad + good), strict=True))
    weight = torch.einsum("btp,btd->bpd", g.double(), a.double()).flatten(1).norm(dim=1)
    true = torch.hypot(weight, g.double().sum(1).norm(dim=1)) if bias else weight
    found = norms_and_contribution(nn.Linear(32, 32, bias=bias), a, g)[0].double()
    assert (found >= true * (1 - ULP)).all()
    assert torch.allclose(found[3:], true[3:], rtol=1e-5)  # nor are the others' overestimated


def conv_case(channels: int, out: int, size: int, padding: int) -> tuple:
    """A nearly constant image under an output gradient that alternates from pixel to pixel."""
    x = nearly_constant(size * size, channels, 1e3, 1e-2).mT.reshape(1, channels, size, size)
    side = size + 2 * padding - 2
    checkerboard = 1.0 - 2.0 * (torch.arange(side)[:, None] + torch.arange(side)).remainder(2)
    g = 1e2 * torch.randn(1, out, 1, 1) * checkerboard
    patches = F.unfold(x.double(), 3, padding=padding)  # [1, channels * 9, pixels]
    true = (g.double().flatten(2) @ patches.mT).norm().item()
    return nn.Conv2d(channels, out, 3, padding=padding, bias=False), x, g, true


MAPS = [(c, p, size, pad) for c, p in ((64, 4), (16, 16), (4, 64)) for size in (4, 6, 8)
        for pad in (0, 1)]  # fmt: skip


@pytest.mark.parametrize(("channels", "out", "size", "padding"), MAPS)
def test_conv_norm(channels: int, out: int, size: int, padding: int) -> None:
    model, x, g, true = conv_case(channels, out, size, padding)
    assert norms_and_contribution(model, x, g)[0].item() >= true * (1 - ULP)


@pytest.mark.parametrize(("channels", "out", "size", "padding"), MAPS)
def test_conv_contribution(channels: int, out: int, size: int, padding: int) -> None:
    model, x, g, _ = conv_case(channels, out, size, padding)
    assert norms_and_contribution(model, x, g)[1] <= C


class Difference(nn.Module):
    """W x - W y: two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, 2, t, d]
        return self.layer(x[:, 0]) - self.layer(x[:, 1])


def test_uses_that_cancel() -> None:
    """Nearly opposite uses: the cross term takes away almost everything."""
    first = 1e3 * torch.randn(1, 16, 32)
    x = torch.stack([first, first + 1e-2 * torch.randn(1, 16, 32)], dim=1)
    g = 1e2 * torch.randn(1, 16, 8)
    true = torch.einsum("btp,btd->pd", g.double(), (x[:, 0] - x[:, 1]).double()).norm().item()
    norms, contribution = norms_and_contribution(Difference(), x, g)
    assert norms.item() >= true * (1 - ULP)
    assert contribution <= C


class TableAndHead(nn.Module):
    """Looks ids up in a table and applies its transpose to x: two uses of unlike kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple:
        return self.table(ids), self.head(x)


def test_table_and_head_that_cancel() -> None:
    """Row v of the table's gradient is g, and of the head's, -g but for a little."""
    model = TableAndHead()
    ids = torch.randperm(40)[None, :24]
    g = 1e3 * torch.randn(1, 24, 16)
    x = -g + 1e-2 * torch.randn(1, 24, 16)
    picked = F.one_hot(ids, 40).float()  # the gradient of the head's output
    true = (g.double() + x.double()).norm().item()
    params = {"table": model.table.weight}
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    looked_up, scores = private(ids, x)
    ((looked_up * g).sum() + (scores * picked).sum()).backward()
    assert optimizer.per_sample_norms.item() >= true * (1 - ULP)
    assert summed(params)["table"].double().norm().item() <= C


@pytest.mark.parametrize("tiny", [False, True])
def test_many_rows_of_one_id(tiny: bool) -> None:
    """Rows that nearly cancel, or a large one that swallows a thousand small ones in float32."""
    if tiny:
        rows = torch.full((1000, 4), 5.5e-8)
        rows[0] = 1.0
    else:
        rows = torch.full((64, 4), 1e3)
        rows[1::2] *= -1
        rows += torch.linspace(0, 1e-2, 256).view(64, 4)
    ids, sample = torch.full((len(rows),), 7), torch.zeros(len(rows), dtype=torch.int64)
    found = ops.lookup_norm(ids, sample, rows, 1, 11).double().sqrt().item()
    exact = rows.double().sum(0).norm().item()
    assert found >= exact * (1 - 2**-22)


@pytest.mark.parametrize(("t", "d", "p"), [(64, 768, 768), (8, 6000, 2000), (130, 40, 30)])
@pytest.mark.parametrize("method", ["ghost_norm", "instantiated_norm"])
def test_terms_of_one_sign(method: str, t: int, d: int, p: int) -> None:
    """All entries equal: every rounding goes the same way. The margin of the scales covers it."""
    for value in (0.1, 0.7, 1.3):
        a, g = torch.full((1, t, d), value), torch.full((1, t, p), value)
        found = getattr(ops, method)(a, g).double().sqrt().item()
        exact = a.double().norm().item() * g.double().norm().item()
        assert found * (1 + margin(torch.float32)) >= exact
