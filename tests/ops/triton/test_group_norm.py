"""GroupNorm of channels-last maps: the kernels against float64, and a private layer on them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.core.numerics import full_float32
from fastclip.errors import GraphError
from fastclip.ops import dispatch
from fastclip.ops.dispatch import use_backend
from fastclip.ops.triton.group_norm import (
    MAX_SIZE,
    cut,
    group_norm,
    group_norm_backward,
    is_channels_last,
)
from tests.ops.triton.oracle import (
    DEVICE,
    DTYPES,
    NORM_TOLERANCE,
    SUM_TOLERANCE,
    normal,
    relative_error,
)
from tests.oracle import make_private, sample_loss, summed

EPS = 1e-5
NAMES = ("y", "mean", "rstd", "dx", "dw", "db")
WHOLE = [  # b, c, h, w, k: held in registers
    (2, 4, 1, 2, 1),
    (3, 6, 7, 7, 6),  # InstanceNorm
    (1, 96, 7, 7, 32),  # three channels a group, more than one block of columns
    (2, 25, 5, 3, 5),
    (2, 128, 4, 4, 32),
    (1, 700, 3, 2, 1),
    (1, 36, 16, 29, 9),  # fewer columns than else
]
CHUNKS = [  # b, c, h, w, k: more than one program goes through a sample
    (2, 64, 33, 32, 32),
    (1, 9, 50, 41, 3),
    (1, 70, 36, 36, 70),  # InstanceNorm, two blocks of columns
    (2, 300, 10, 13, 1),
]


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def arguments(shape: tuple, dtype: torch.dtype, offset: float = 2.0) -> tuple[Tensor, ...]:
    """x and g channels-last, weight, bias."""
    b, c, h, w, _ = shape
    x, g = normal(b, c, h, w, seed=1) + offset, normal(b, c, h, w, seed=2)
    return (
        last(x.to(dtype)),
        last(g.to(dtype)),
        normal(c, seed=3).to(dtype),
        normal(c, seed=4).to(dtype),
    )


def exact(x: Tensor, g: Tensor, w: Tensor | None, bias: Tensor | None, k: int) -> list[Tensor]:
    """y, mean, rstd, dx, and per-sample dw and db: autograd in float64, one sample at a time."""
    found = []
    for one, upstream in zip(x.double().cpu(), g.double().cpu(), strict=True):
        leaf = one[None].clone().requires_grad_()
        c = leaf.shape[1]
        given = [torch.ones(c) if w is None else w, torch.zeros(c) if bias is None else bias]
        leaves = [p.double().cpu().requires_grad_() for p in given]
        y = F.group_norm(leaf, k, *leaves, EPS)
        grads = torch.autograd.grad(y, [leaf, *leaves], upstream[None])
        rows = leaf.detach().reshape(k, -1)
        rstd = (rows.var(1, correction=0) + EPS).rsqrt()
        found.append([y.detach()[0], rows.mean(1), rstd, grads[0][0], *grads[1:]])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def run(
    x: Tensor, g: Tensor, w: Tensor | None, bias: Tensor | None, k: int, *, need_input: bool = True,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """What the kernels give, in the order of `exact`."""
    shape = (*x.shape[:2], x.shape[2:].numel())
    assert is_channels_last(x.reshape(shape), k)
    y, mean, rstd = group_norm(x, w, bias, k, EPS, dtype or x.dtype)
    assert ops.channels_last(y)
    dx, dw, db = group_norm_backward(x.reshape(shape), g.reshape(shape), mean, rstd, w, need_input)
    assert (dx is not None) == need_input
    if dx is not None:
        dx = dx.view(x.shape)
        assert dx.dtype == x.dtype
        assert ops.channels_last(dx)
    return [y, mean, rstd, dx, dw, db]


def compare(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None:
            continue
        assert one.shape == other.shape
        tolerance = SUM_TOLERANCE if i in (0, 3) else NORM_TOLERANCE
        assert relative_error(one, other) < tolerance[dtype], NAMES[i]
        assert i in (0, 3) or one.dtype == torch.float32


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*WHOLE, *CHUNKS], ids=str)
def test_against_autograd(shape: tuple, dtype: torch.dtype) -> None:
    given, k = arguments(shape, dtype), shape[-1]
    compare(run(*given, k), exact(*given, k), dtype)


def test_both_ways_are_met() -> None:
    """Samples in registers and in chunks; blocks of columns that the channels do not fill."""
    assert all(cut(c, h * w, k).whole for _, c, h, w, k in WHOLE)
    assert all(cut(c, h * w, k).chunks > 1 for _, c, h, w, k in CHUNKS)
    assert not any(cut(c, h * w, k).whole for _, c, h, w, k in CHUNKS)
    assert any(cut(c, h * w, k).blocks > 1 for _, c, h, w, k in CHUNKS)


@pytest.mark.parametrize("shape", [(2, 36, 7, 7, 12), (2, 12, 37, 38, 4)], ids=str)
def test_forms(shape: tuple) -> None:
    """Without weight or bias, without the input's gradient, types that autocast mixes."""
    x, g, w, bias = arguments(shape, torch.float32)
    k, half = shape[-1], torch.bfloat16
    for own in ((None, None), (w, None), (None, bias)):
        compare(run(x, g, *own, k), exact(x, g, *own, k), torch.float32)
    compare(run(x, g, w, bias, k, need_input=False), exact(x, g, w, bias, k), torch.float32)
    y, *_ = found = run(x.to(half), g, w, bias, k, dtype=torch.float32)
    assert y.dtype == torch.float32
    expected = exact(x.to(half), g, w, bias, k)
    assert relative_error(y, expected[0]) < 1e-5  # nothing was rounded on the way
    compare(found, expected, half)
    compare(
        run(x.to(half), g.to(half), w, bias, k), exact(x.to(half), g.to(half), w, bias, k), half
    )


@pytest.mark.parametrize("shape", [(2, 12, 7, 7, 3), (2, 12, 37, 38, 3)], ids=str)
def test_large_mean(shape: tuple) -> None:
    """A mean 3,000 deviations away: E[x^2] - E[x]^2 would have no digit of the variance left.

    What is left to float32 is the rounding of the mean itself, 3,000 u of a deviation.
    """
    given, k = arguments(shape, torch.float32, offset=3000.0), shape[-1]
    found, expected = run(*given, k), exact(*given, k)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(one, other) < (2e-7 if i == 1 else 1e-5 if i == 2 else 1e-3)


@pytest.mark.parametrize("shape", [(3, 12, 7, 7, 3), (3, 12, 37, 38, 3)], ids=str)
def test_one_outlier(shape: tuple) -> None:
    """The first entry of a group is far away: it must not be what others are measured from."""
    x, *rest = arguments(shape, torch.float32)
    x[:, 0, 0, 0] = 1e4
    found, expected = run(x, *rest, shape[-1]), exact(x, *rest, shape[-1])
    compare(found, expected, torch.float32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(3, 12, 7, 7, 4), (3, 12, 37, 38, 4)], ids=str)
def test_not_finite(shape: tuple, value: float) -> None:
    """A bad sample stays alone; in it, a bad group does."""
    k = shape[-1]
    for which in (0, 1):
        given = arguments(shape, torch.float32)
        expected = exact(*given, k)
        given[which][1, 4, 3, 5] = value
        found = run(*given, k)
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one[::2], other[::2]) < 1e-5
            size = one.shape[1] // k  # of a group
            assert relative_error(one[1, 2 * size :], other[1, 2 * size :]) < 1e-5
        for one in found[3:] if which else found[:5]:
            assert not one[1].isfinite().all()


def test_strides_of_the_gradient() -> None:
    """Contiguous and expanded ones are copied."""
    x, g, w, bias = arguments((2, 12, 7, 5, 3), torch.float32)
    for other in (g.contiguous(), g[..., :1, :1].expand_as(g)):
        compare(run(x, other, w, bias, 3), exact(x, other, w, bias, 3), torch.float32)


def test_three_dimensions() -> None:
    x = normal(2, 6, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    g, w, bias = normal(2, 6, 3, 4, 5, seed=1), normal(6, seed=2), normal(6, seed=3)
    compare(run(x, g, w, bias, 2), exact(x, g, w, bias, 2), torch.float32)


def test_what_is_not_taken() -> None:
    """Contiguous maps, one position, no sample, float64, groups that one program cannot hold."""
    w = None
    for x in (
        normal(2, 4, 3, 3), normal(2, 4), normal(2, 4, 1, 1), last(normal(0, 4, 3, 3)),
        last(normal(1, 4, 3, 3)).double(), last(normal(1, 4 * MAX_SIZE, 1, 2)),
        last(normal(2, 4, 3, 6))[..., ::2], last(normal(2, 8, 3, 3))[:, :4],
    ):  # fmt: skip
        assert group_norm(x, w, None, 2, EPS, x.dtype) is NotImplemented
        with use_backend("triton"):
            y, *statistics = ops.group_norm(x, w, None, 2, EPS, x.dtype)
            assert torch.allclose(y, F.group_norm(x, 2, eps=EPS), atol=1e-6)
            if x.numel():
                rows = x.reshape(*x.shape[:2], -1)
                g = normal(*x.shape, seed=1).to(x.dtype)
                dx, dw, db = ops.group_norm_backward(rows, g.view(rows.shape), *statistics, w, True)
                expected = exact(x, g, w, None, 2)
                for one, other in zip((dx.reshape(x.shape), dw, db), expected[3:], strict=True):
                    assert torch.allclose(one.double().cpu(), other, rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_fit() -> None:
    """Torch's own errors, and nothing is read beyond a parameter."""
    x = last(normal(2, 6, 3, 3))
    with use_backend("triton"):
        for k, own in ((4, None), (3, normal(5))):
            with pytest.raises(RuntimeError, match=r"[Ee]xpected"):
                ops.group_norm(x, own, None, k, EPS, x.dtype)


def test_what_is_merged_stays_small() -> None:
    for c, k in ((64, 32), (12, 4), (1024, 1), (768, 1), (1023, 33)):
        for t in (50, 784, 3136, 12544, 200_000):
            how = cut(c, t, k)
            assert how.rows * how.chunks >= t > how.rows * (how.chunks - 1)
            assert how.columns * how.chunks <= max(4096, how.columns)


def test_reference_of_mixed_types() -> None:
    """It serves where a kernel declines: x of 16 bits, all else in float32."""
    x, g, w, bias = arguments((2, 6, 5, 5, 3), torch.bfloat16)
    y, *statistics = ops.group_norm.reference(x, w.float(), bias.float(), 3, EPS, torch.float32)
    rows, upstream = x.flatten(2), g.flatten(2).float()
    dx, *own = ops.group_norm_backward.reference(rows, upstream, *statistics, w.float(), True)
    assert (y.dtype, dx.dtype) == (torch.float32, torch.bfloat16)
    compare([y, *statistics, dx.view(x.shape), *own], exact(x, g, w, bias, 3), torch.bfloat16)
    dx, *own = ops.group_norm_backward.reference(rows, g.flatten(2), *statistics, w, True)
    compare([y, *statistics, dx.view(x.shape), *own], exact(x, g, w, bias, 3), torch.bfloat16)


def test_repeatable_and_alone() -> None:
    """To the bit; and a sample's numbers do not depend on who else is in the batch."""
    for shape in ((3, 12, 7, 7, 4), (3, 12, 37, 38, 4)):
        x, g, *own = arguments(shape, torch.bfloat16)
        found, again = (run(x, g, *own, 4) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        alone = run(x[1:2], g[1:2], *own, 4)
        assert all(torch.equal(one[1:2], other) for one, other in zip(found, alone, strict=True))


MODELS = {
    "group": lambda: nn.GroupNorm(4, 12),
    "group, one position": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.GroupNorm(4, 12)),
    "instance": lambda: nn.InstanceNorm2d(12, affine=True),
}


class Cast(nn.Module):
    """What torch's autocast does before a GroupNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def randomized(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    for p in model.parameters():
        nn.init.normal_(p)
    return model.to(memory_format=torch.channels_last)


def trained(
    model: nn.Module, x: Tensor, backend: str
) -> tuple[Tensor, dict[str, Tensor], list[bool]]:
    """Norms and clipped sums of a step, and of every output of a norm whether it is channels-last.

    In full float32: cuDNN's convolutions around the norm would round to tf32.
    """
    found: list[bool] = []
    with use_backend(backend), full_float32(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel of group_norm.*")
        _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
        trace = optimizer.grad_state.trace  # as from the third step on, when kernels serve
        trace.left, trace._traces = 0, False
        optimizer.grad_state.bare.layers = []  # nodes of a CPU ask for none
        for layer in model.modules():
            if isinstance(layer, (nn.GroupNorm, nn.InstanceNorm2d)):
                layer.register_forward_hook(lambda *call: found.append(ops.channels_last(call[-1])))
        sample_loss(private(x)).mean().backward()
        return optimizer.per_sample_norms, summed(dict(model.named_parameters())), found


def alike(found: tuple, expected: tuple) -> None:
    assert relative_error(found[0], expected[0]) < 1e-5
    for key, value in expected[1].items():
        assert relative_error(found[1][key], value) < 1e-5, key


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [7, 37])
@pytest.mark.parametrize("name", MODELS)
def test_private_layer(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and clipped sums of a channels-last model are those of the reference in float64, and the
    layer's output stays channels-last."""
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("auto"))
    convolutions = nn.Conv2d(3, 12, 1, bias=False), nn.Conv2d(12, 2, 1)
    model = randomized(convolutions[0], MODELS[name](), nn.Tanh(), convolutions[1])
    x = last(normal(3, 3, size, size) + 1)
    expected = trained(copy.deepcopy(model).cpu().double(), x.cpu().double(), "reference")
    found = trained(model.to(DEVICE), x, "triton")
    alike(found, expected)
    one = name == "group, one position"
    assert found[2][-1] != one
    served = {key.split()[1] for key in dispatch._STATE.proven}
    assert "group_norm_backward" in served
    assert ("group_norm" in served) != one


def test_samples_are_followed_through_a_layer_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is launched past torch: in a traced step the reference computes."""
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("triton"))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)).to(DEVICE)
    x = last(normal(3, 3, 7, 7))
    engine, private, _, _ = make_private(model)
    out = private(x).flatten(1).mean(1)
    with pytest.raises(GraphError, match="mixes samples"):
        (out - out.mean()).square().mean().backward()
    private(x).mean().backward()
    assert not engine.explain().unproven


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_autocast_without_a_copy(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where autocast asks for float32 (it does on GPUs) the layer takes x as it is: the same numbers."""
    norm = nn.GroupNorm(4, 12)
    layers = nn.Conv2d(3, 12, 1), norm, Cast(), nn.Tanh(), nn.Conv2d(12, 2, 1)
    model = randomized(*layers).to(DEVICE)
    model[0].bfloat16().requires_grad_(False)
    plain = copy.deepcopy(model)
    x = last(normal(3, 3, 7, 7).bfloat16())
    plain[1] = nn.Sequential(Cast(), plain[1])
    expected = trained(plain, x, backend)
    monkeypatch.setattr("fastclip.rules.norm._type_under_autocast", lambda x: torch.float32)
    norms, sums, formats = trained(model, x, backend)
    assert formats[-1] == (
        backend == "triton" or DEVICE.type == "cpu"
    )  # torch's own on a GPU are not
    alike((norms, {key.replace("1.", "1.1.", 1): value for key, value in sums.items()}), expected)
