"""ghost_norm, ghost_cross and ghost_norm_concat against float64, and never below it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.numerics import margin
from fastclip.ops.triton.ghost_norm import ghost_cross, ghost_norm, ghost_norm_concat
from fastclip.ops.triton.runtime import INTERPRETED
from fastclip.ops.triton.tiles import CHUNK, STEP, UNIT, one_sided, product_mode, summed
from tests.ops.test_cancellation import CONSTRUCTIONS
from tests.ops.triton.oracle import DEVICE, DTYPES, NORM_TOLERANCE, normal, strided

module = import_module("fastclip.ops.triton.ghost_norm")  # the package exports the function
SHAPES = [(3, 1, 7, 5), (3, 7, 31, 65), (2, 65, 8, 130), (1, 130, 70, 33)]
Use = tuple[Tensor, Tensor]
ULP = 1e-6  # one position has no bound: its norm is rounded like any other number


def operands(b: int, t: int, d: int, p: int, dtype: torch.dtype, seed: int = 0) -> Use:
    return normal(b, t, d, dtype=dtype, seed=seed), normal(b, t, p, dtype=dtype, seed=seed + 1)


def exact(*uses: Use) -> Tensor:
    """Squared norm of sum_k g_k^T a_k in float64, [b]."""
    total = sum(torch.einsum("btp,btd->bpd", g.double().cpu(), a.double().cpu()) for a, g in uses)
    assert isinstance(total, Tensor)
    return total.square().sum((1, 2))


def sizes(*uses: Use) -> Tensor:
    """||A||^2 ||G||^2 of the uses together, [b]."""
    a = sum(a.double().cpu().square().sum((1, 2)) for a, _ in uses)
    return a * sum(g.double().cpu().square().sum((1, 2)) for _, g in uses)


def check(found: Tensor, *uses: Use) -> None:
    """Not below the exact norm, above it by the tolerance (of the norm, not of its square) and the
    reference's own bound at most."""
    tolerance = max(NORM_TOLERANCE[x.dtype] for use in uses for x in use)
    true = exact(*uses)
    assert found.dtype == torch.float32
    assert found.shape == true.shape
    found = found.double().cpu()
    assert (found >= true * (1 - ULP)).all()
    assert (found <= true * (1 + tolerance) ** 2 + 2 * UNIT * sizes(*uses)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, g = operands(*shape, dtype)
    check(ghost_norm(a, g), (a, g))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype: torch.dtype) -> None:
    """Gaps, positions innermost, the batch in dimension 1, and broadcast operands."""
    a, g = operands(3, 70, 20, 9, dtype)
    batch_inside = a.transpose(0, 1).contiguous().transpose(0, 1)
    check(ghost_norm(strided(a), strided(g)), (a, g))
    check(ghost_norm(a.mT.contiguous().mT, batch_inside), (a, a))
    one, row = a[:1].expand(3, -1, -1), g[:, :1].expand(-1, 70, -1)
    check(ghost_norm(one, row), (one, row))
    check(ghost_norm(strided(a[:, :1]), strided(g[:, :1])), (a[:, :1], g[:, :1]))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2)])
def test_operands_of_two_types(first: int, second: int) -> None:
    a, g = normal(2, 66, 9, dtype=DTYPES[first]), normal(2, 66, 5, dtype=DTYPES[second], seed=1)
    check(ghost_norm(a, g), (a, g))
    uses = [(a, g), (g[..., :3].repeat(1, 1, 3), a[..., :5])]
    check(ghost_norm_concat(uses), *uses)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_nothing_to_sum(shape: tuple[int, ...]) -> None:
    a, g = operands(*shape, torch.float32)
    assert torch.equal(ghost_norm(a, g), torch.zeros(shape[0], device=DEVICE))
    assert torch.equal(ghost_cross(a, g, a, g), torch.zeros(shape[0], device=DEVICE))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 3, 65])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite(value: float, t: int, dtype: torch.dtype) -> None:
    """A sample that holds inf or NaN has no finite norm; its neighbors keep theirs."""
    a, g = operands(4, t, 5, 6, dtype)
    clean = ghost_norm(a, g)
    a[1, -1, 2], g[2, 0, 3] = value, value
    a[3, 0, 0], g[3] = value, 0  # inf * 0
    found = ghost_norm(a, g)
    assert torch.equal(found.isfinite().cpu(), torch.tensor([True, False, False, False]))
    assert torch.equal(found[0], clean[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "d", "p"), [(2, 512, 4), (64, 8, 96), (130, 16, 16)])
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_cancellation(construction: str, t: int, d: int, p: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, g = (x.to(DEVICE, dtype) for x in CONSTRUCTIONS[construction](t, d, p))
    assert (ghost_norm(a, g).double().cpu() >= exact((a, g))).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "p"), [(3072, 30), (30, 9000)])
def test_equal_entries(d: int, p: int, dtype: torch.dtype) -> None:
    """Equal terms round alike: the errors of a long sum have one sign and do not cancel."""
    for left, right in ((1.1, 1.3), (0.7, 0.9), (1.37, 0.013)):
        a = torch.full((1, 20, d), left, device=DEVICE, dtype=dtype)
        g = torch.full((1, 20, p), right, device=DEVICE, dtype=dtype)
        assert (ghost_norm(a, g).double().cpu() >= exact((a, g))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_features(dtype: torch.dtype) -> None:
    """A vocabulary: the sum of a tile is started anew."""
    a, g = operands(1, 20, 9, 2 * CHUNK + 70, dtype)
    check(ghost_norm(a, g), (a, g))
    check(ghost_norm(g, a), (g, a))


def test_the_references_bound_is_part_of_it() -> None:
    a, g = operands(2, 65, 20, 30, torch.float32)
    over = ghost_norm(a, g).double().cpu() - exact((a, g))
    assert (over >= 1.5 * UNIT * sizes((a, g))).all()


@pytest.mark.parametrize("t", [1, 3, 65])
def test_squares_that_underflow_or_overflow(t: int) -> None:
    """Tiny inputs under huge output gradients: squares of either leave float32, norms do not."""
    for dtype, tiny, huge in ((torch.float32, 1e-24, 1e17), (torch.bfloat16, 1e-12, 1e10)):
        a, g = normal(2, t, 40, dtype=dtype) * tiny, normal(2, t, 30, dtype=dtype, seed=1) * huge
        for x, y in ((a, g), (g, a)):
            found = ghost_norm(x, y)
            assert found.isfinite().all()
            assert (found.double().cpu() >= exact((x, y)) * (1 - ULP)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_term_of_two_uses(dtype: torch.dtype) -> None:
    x, y = operands(3, 7, 31, 65, dtype), operands(3, 70, 31, 65, dtype, seed=2)
    terms = [torch.einsum("btp,btd->bpd", g.double().cpu(), a.double().cpu()) for a, g in (x, y)]
    found = ghost_cross(*x, *y).double().cpu()
    assert torch.allclose(found, (terms[0] * terms[1]).sum((1, 2)), atol=1e-6 * sizes(x, y).max())
    assert torch.equal(ghost_cross(*x, *y), ghost_cross(*x, *y))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 1), (7, 70), (65, 0, 1), (3, 1, 2, 1, 5, 1)])
def test_concatenated_uses(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """As torch.cat along t, then the norm."""
    uses = [operands(2, t, 9, 12, dtype, seed=2 * k) for k, t in enumerate(lengths)]
    check(ghost_norm_concat(uses), *uses)


def test_uses_that_cancel() -> None:
    """Nearly opposite uses: the cross term takes away almost everything."""
    first, g = 1e3 * normal(1, 16, 32), 1e2 * normal(1, 16, 8, seed=1)
    uses = [(first, g), (first + 1e-2 * normal(1, 16, 32, seed=2), -g)]
    assert (ghost_norm_concat(uses).double().cpu() >= exact(*uses)).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_repeatable(dtype: torch.dtype) -> None:
    a, g = operands(2, 70, 20, 30, dtype)
    assert torch.equal(ghost_norm(a, g), ghost_norm(a, g))
    uses = [(a, g), (a[:, :5], g[:, :5])]
    assert torch.equal(ghost_norm_concat(uses), ghost_norm_concat(uses))


MODES = ("native", "ieee", "tf32x3")


@pytest.mark.parametrize("bucket", [2**k for k in range(14)])
@pytest.mark.parametrize("device", ["ampere", "hopper"])
def test_a_configuration_for_everything(
    device: str, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "generation", lambda: device)
    for a_mode, g_mode, restart, sums in product(MODES, MODES, (0, 4096), (False, True)):
        options = {"bucket": bucket, "A_MODE": a_mode, "G_MODE": g_mode, "SUMS": sums}
        options |= {"A_RESTART": 0, "G_RESTART": restart}
        usable = module.usable(module.CONFIGS, options)
        assert usable
        # what room_for counts on
        assert all(c.kwargs["BLOCK_T"] >= min(bucket, 64) for c in usable)
        if a_mode == g_mode == "native":  # of a tile one number of warps
            assert len({c.kwargs["BLOCK_T"] for c in usable}) == len(usable)


def each_configuration(a: Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel takes one configuration after the other that suits products of a [b, t, d]."""
    mode = product_mode(a, a)
    options = {"bucket": 1 << (a.shape[1] - 1).bit_length(), "A_MODE": mode, "G_MODE": mode}
    options |= {"A_RESTART": 0, "G_RESTART": 0}
    for config in module.usable(module.CONFIGS, options):
        for kernel in (module._pairs_kernel, module._norms_kernel):
            monkeypatch.setattr(kernel, "usable", lambda *_, config=config: [config])
        yield


@pytest.mark.skipif(not INTERPRETED, reason="the autotuner runs every configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [12, 30, 130])
def test_every_configuration(t: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, g = operands(1, t, 20, 40, dtype)
    for _ in each_configuration(a, monkeypatch):
        check(ghost_norm(a, g), (a, g))
        uses = [(a, g), (a[:, :5], g[:, :5])]
        check(ghost_norm_concat(uses), *uses)


def test_what_is_left_to_the_reference() -> None:
    a, g = operands(2, 3, 4, 5, torch.float32)
    assert ghost_norm(a.double(), g.double()) is NotImplemented
    assert ghost_cross(a, g, a.double(), g) is NotImplemented


def test_tf32_is_never_enough() -> None:
    """Where the user allows tf32, norms take three products; 16-bit operands one of their own."""
    x, allowed = torch.zeros(1), torch.backends.cuda.matmul.allow_tf32
    try:
        for allow, mode in ((False, "ieee"), (True, "tf32x3")):
            torch.backends.cuda.matmul.allow_tf32 = allow
            assert product_mode(x, x) == product_mode(x, x.half()) == mode
            assert product_mode(x.half(), x.half()) == "native"
            assert product_mode(x.bfloat16(), x.half()) == "ieee"
            check(ghost_norm(*operands(2, 70, 9, 5, torch.float32)), operands(2, 70, 9, 5, x.dtype))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def truncating_dot(x: Tensor, y: Tensor, step: int, guard: int) -> Tensor:
    """A model of tensor cores: x and y [m, n] in float64, `step` products at a time.

    Products and accumulator are aligned to the largest, cut to 24 + `guard` bits, added and cut to
    24 bits, toward zero (Fasi et al. 2021; Khattak and Mikaitis 2025).
    """

    def cut(values: Tensor, largest: Tensor, bits: int) -> Tensor:
        unit = torch.exp2((torch.frexp(largest)[1] - bits).double())
        return torch.trunc(values / unit) * unit

    acc = torch.zeros(len(x), dtype=torch.float64)
    for k in range(0, x.shape[1], step):
        terms = torch.cat([acc[:, None], x[:, k : k + step] * y[:, k : k + step]], 1)
        total = cut(terms, terms.abs().amax(1, keepdim=True), 24 + guard).sum(1)
        acc = cut(total, total.abs(), 24)
    return acc


@pytest.mark.parametrize("n", [64, 768, 3072])
@pytest.mark.parametrize(("step", "guard"), [(8, 1), (16, 2)], ids=["A100", "H100"])
def test_bounds_cover_truncating_accumulators(step: int, guard: int, n: int) -> None:
    x, y = (normal(64, n, dtype=torch.bfloat16, seed=k).double().cpu() for k in (0, 1))
    x[:8], y[:8] = 1.1015625, torch.linspace(1, 2, 8)[:, None].bfloat16().double()  # equal terms
    x[8:40], y[8:40] = x[8:40].abs(), y[8:40].abs()  # terms of one sign
    y[24:40, n // 2 :] *= -1  # up, then down
    lost = ((x * y).sum(1) - truncating_dot(x, y, step, guard)).abs()
    m, w = one_sided(n, "native")
    assert (lost <= UNIT * (m * (x * y).sum(1).abs() + n * w * x.norm(dim=1) * y.norm(dim=1))).all()
    assert lost[:24].max() > 0.01 * n * UNIT  # without the bounds it would show


@pytest.mark.parametrize("t", [64, 1024, 16384])
def test_bounds_cover_sums_of_one_sign(t: int) -> None:
    """Of t equal terms, `STEP` at a time added to an accumulator in float32, as clipped sums are."""
    torch.manual_seed(0)
    product = 1 + torch.rand(2000)
    acc = torch.zeros(2000)
    for _ in range(t // STEP):
        step = torch.zeros(2000)
        for _ in range(STEP):
            step += product
        acc += step
    high = (acc.double() / (t * product.double()) - 1).max().item() / UNIT
    assert 0.02 * t / STEP < high <= summed(t) / 2 + margin(torch.float32) / UNIT / 2


def test_agrees_with_the_reference() -> None:
    a, g = operands(2, 33, 12, 7, torch.float32)
    reference = ops.ghost_norm(a.cpu(), g.cpu())
    assert torch.allclose(ghost_norm(a, g).cpu(), reference, rtol=2e-5)


@pytest.mark.parametrize("value", [1.0675, 1.3425, 1.9025, 1.92])
def test_one_position_of_many_equal_features(value: float) -> None:
    """Each lane adds a thousand squares that round alike."""
    a = torch.full((1, 1, 2**20), value, device=DEVICE)
    g = torch.ones(1, 1, 3, device=DEVICE)
    assert exact((a, g)).item() <= ghost_norm(a, g).item() * (1 + ULP)
