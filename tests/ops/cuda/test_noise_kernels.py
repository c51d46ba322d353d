"""Launchers of noise, through the host build of their source and, where there is one, on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import _C, ops
from fastclip.errors import ArgumentError
from fastclip.ops.cuda import KERNELS, fill_normal, noise_finalize
from fastclip.ops.dispatch import backend_of, use_backend
from fastclip.ops.noise import SecureNoise, SeededNoise
from tests.ops.cuda.drawing import (
    SCALARS,
    SIZES,
    arithmetic,
    devices,
    dtypes,
    seeded,
    sources,
    sums_for,
)
from tests.ops.noise.laws import assert_standard_normal, assert_uncorrelated


@devices
@dtypes
def test_without_noise_it_is_the_quotient(dtype: torch.dtype, device: str) -> None:
    parameters = [torch.zeros(n, dtype=dtype, device=device) for n in SIZES]
    summed: list[Tensor | None] = [*sums_for(parameters)]
    summed[4] = None
    found = noise_finalize(summed, parameters, 0.0, 3.0, seeded(device))
    for total, parameter, gradient in zip(summed, parameters, found, strict=True):
        expected = torch.zeros_like(parameter) if total is None else (total / 3.0).to(dtype)
        assert gradient.dtype == dtype
        assert torch.equal(gradient, expected)


@devices
@pytest.mark.parametrize("std", ["number", "tensor"])
def test_the_noise_of_every_tensor_is_normal(std: str, device: str) -> None:
    """(out * divisor - sum) / std, of float64 parameters, whose rounding is far below the noise."""
    parameters = [torch.zeros(n, dtype=torch.float64, device=device) for n in (50_001, 70_000)]
    summed = sums_for(parameters)
    level: float | Tensor = 0.7
    if std == "tensor":
        level = torch.tensor(0.7, dtype=torch.float64, device=device)
    for source in sources(device):
        found = noise_finalize([summed[0], None], parameters, level, 16.0, source)
        first, second = (found[0] * 16.0 - summed[0]) / 0.7, found[1] * 16.0 / 0.7
        assert_standard_normal(first.cpu())
        assert_standard_normal(second.cpu())
        assert_uncorrelated(first.cpu(), second[: len(first)].cpu())


@devices
@dtypes
def test_noise_is_added_before_the_cast(dtype: torch.dtype, device: str) -> None:
    """Sum, noise and division in float32 (float64), one rounding at the end."""
    parameters = [torch.zeros(n, dtype=dtype, device=device) for n in SIZES]
    wide = [torch.zeros(n, dtype=arithmetic(dtype), device=device) for n in SIZES]
    summed = sums_for(parameters)
    found = noise_finalize(summed, parameters, 2.0, 8.0, seeded(device))
    unrounded = noise_finalize(summed, wide, 2.0, 8.0, seeded(device))
    noise = noise_finalize([None] * len(SIZES), wide, 1.0, 1.0, seeded(device))
    for gradient, exact, total, normal in zip(found, unrounded, summed, noise, strict=True):
        assert torch.equal(gradient, exact.to(dtype))
        assert torch.allclose(exact.double(), (total + 2.0 * normal.double()) / 8.0, rtol=1e-5,
                              atol=1e-6)  # fmt: skip


@devices
def test_a_tensor_of_std_is_a_number(device: str) -> None:
    """The same noise, whatever type the scalar has, and 0 in it is no noise."""
    parameters = [torch.zeros(5000, device=device)]
    summed = sums_for(parameters)
    for value in (0.5, 0.0):
        number = noise_finalize(summed, parameters, value, 2.0, seeded(device))[0]
        for scalar in (torch.tensor(value), torch.tensor([value], dtype=torch.float64)):
            found = noise_finalize(summed, parameters, scalar.to(device), 2.0, seeded(device))[0]
            assert torch.equal(found, number)


@devices
def test_tensors_of_all_types_and_layouts_in_one_call(device: str) -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(30, 50, dtype=dtype, device=device)) for dtype in SCALARS
    ]
    parameters.append(torch.nn.Parameter(torch.zeros(7, 5, 4, device=device).permute(2, 0, 1)))
    parameters.append(torch.nn.Parameter(torch.zeros((), device=device)))
    summed: list[Tensor | None] = [*sums_for(parameters)]
    summed[1] = torch.randn(50, 30, device=device).t()
    summed[2] = torch.randn(30, 51, device=device).to(torch.bfloat16)[:, 1:]  # a type to convert
    found = noise_finalize(summed, parameters, 0.0, 2.0, seeded(device))
    for total, parameter, gradient in zip(summed, parameters, found, strict=True):
        assert total is not None
        assert gradient.shape == parameter.shape
        assert gradient.is_contiguous()
        assert not gradient.requires_grad
        assert torch.equal(
            gradient, (total.to(arithmetic(parameter.dtype)) / 2.0).to(gradient.dtype)
        )
    noisy = noise_finalize(summed, parameters, 1.0, 2.0, seeded(device))
    assert not any(torch.equal(x, y) for x, y in zip(noisy, found, strict=True))


@devices
def test_nothing_to_do(device: str) -> None:
    source = seeded(device)
    assert noise_finalize([], [], 1.0, 1.0, source) == []
    empty = torch.zeros(0, 3, device=device)
    assert noise_finalize([None], [empty], 1.0, 1.0, source)[0].shape == (0, 3)
    fill_normal(empty, 1.0, source)


@devices
def test_the_generators_state_decides(device: str) -> None:
    parameters = [torch.zeros(5000, device=device), torch.zeros(10, device=device)]
    nothing = [None, None]

    def draw(source) -> Tensor:
        return torch.cat(noise_finalize(nothing, parameters, 1.0, 1.0, source))

    source, again = seeded(device), seeded(device)
    first, second = draw(source), draw(source)
    assert torch.equal(draw(again), first)
    assert torch.equal(draw(again), second)
    assert_uncorrelated(first.cpu(), second.cpu())
    assert not (first == second).any()
    assert not (draw(seeded(device, 1)) == first).any()
    torch.manual_seed(5)
    from_global = draw(SeededNoise())
    torch.manual_seed(5)
    assert torch.equal(draw(SeededNoise()), from_global)


@devices
def test_secure_noise_has_no_state_to_repeat(device: str) -> None:
    parameters = [torch.zeros(100_000, device=device)]
    source = SecureNoise()

    def draw() -> Tensor:
        torch.manual_seed(5)
        return noise_finalize([None], parameters, 1.0, 1.0, source)[0].cpu()

    first, second = draw(), draw()
    assert int((first == second).sum()) < 5  # of 10^5, by rounding
    assert_uncorrelated(first, second)


@devices
@dtypes
def test_fill_normal_in_any_layout(dtype: torch.dtype, device: str) -> None:
    for source in sources(device):
        whole = torch.zeros(301, 400, dtype=dtype, device=device)
        fill_normal(whole[:, ::2], 2.0, source)
        assert not whole[:, 1::2].any()
        assert abs(float(whole[:, ::2].double().std()) - 2) < 0.05
        row = torch.zeros(20_001, dtype=dtype, device=device)
        version = row._version
        fill_normal(row[1:], 2.0, source)
        assert row._version > version  # a backward pass that saved it notices
        assert float(row[0]) == 0.0
        assert abs(float(row[1:].double().std()) - 2) < 0.1


# ---- What is refused -------------------------------------------------------------------------------


def test_what_the_kernels_do_not_take() -> None:
    source, x = seeded(), torch.zeros(3)

    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise AssertionError("never looked at")

    wrapped = torch.Tensor._make_subclass(Wrapped, torch.zeros(3))
    for like, summed in (
        ([wrapped], [None]),
        ([x], [wrapped]),
        ([x.to_sparse()], [None]),
        ([x], [x.to_sparse()]),
        ([torch.zeros(3, dtype=torch.complex64)], [None]),
        ([x, torch.zeros(3, device="meta")], [None, None]),
        ([torch.zeros(3, device="meta")], [None]),
    ):
        assert noise_finalize(summed, like, 1.0, 1.0, source) is NotImplemented
    assert fill_normal(torch.zeros(3, device="meta"), 1.0, source) is NotImplemented

    class Elsewhere(SeededNoise):
        class generator:
            device = torch.device("cuda", 0)

    assert noise_finalize([None], [x], 1.0, 1.0, Elsewhere.__new__(Elsewhere)) is NotImplemented


def test_wrong_arguments() -> None:
    source, x = seeded(), torch.zeros(3)
    with pytest.raises(ArgumentError, match="sums of the parameters' shapes"):
        noise_finalize([torch.zeros(4)], [x], 1.0, 1.0, source)
    for std in (-1.0, float("nan")):
        with pytest.raises(ArgumentError, match="expects a finite number >= 0"):
            noise_finalize([None], [x], std, 1.0, source)
    with pytest.raises(ArgumentError, match="scalar tensor"):
        noise_finalize([None], [x], torch.ones(2), 1.0, source)
    with pytest.raises(ValueError, match="zip"):
        noise_finalize([None, None], [x], 1.0, 1.0, source)


def test_the_extension_checks_its_arguments() -> None:
    place = {"device": -1, "stream": 0}
    how = {"std": 1.0, "device_std": 0, "divisor": 1.0, "guarded": False, **place}
    with pytest.raises(ValueError, match="key of 32 bytes"):
        _C.noise_chacha20(key=bytes(31), rows=[], **how)
    with pytest.raises(ValueError, match="more chunks than a grid"):
        _C.noise_silent(rows=[(0, 0, 2**62, 0)], divisor=1.0, **place)
    with pytest.raises(ValueError, match="Scalar"):
        _C.noise_silent(rows=[(0, 0, 1, 4)], divisor=1.0, **place)


def test_dispatch_finds_the_launchers() -> None:
    parameters = [torch.zeros(100, dtype=torch.bfloat16)]
    for name in ("noise_finalize", "fill_normal"):
        assert KERNELS[name].__module__ == "fastclip.ops.cuda"
    with use_backend("cuda"):
        found = ops.noise_finalize([None], parameters, 1.0, 4.0, seeded())
        assert torch.equal(found[0], noise_finalize([None], parameters, 1.0, 4.0, seeded())[0])
        drawn = seeded().draw(torch.zeros(1000), 3.0)
        expected = torch.zeros(1000)
        fill_normal(expected, 3.0, seeded())
        assert torch.equal(drawn, expected)
        assert backend_of("noise_finalize", torch.device("cpu")) == ("cuda", "launched")
