"""Trials of the autotuner run on the real arguments: what they leave behind must not count.

Every configuration that suits a launch is tried in the very buffers, in one order or the other, before
the one that "wins" runs; memory that nobody has written holds NaN. The result must be, to the bit, what
the winner alone gives in fresh buffers, and right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops.triton import KERNELS
from fastclip.ops.triton.ghost_norm import ghost_cross, ghost_norm_concat
from fastclip.ops.triton.runtime import INTERPRETED, Tuned
from tests.ops.triton.oracle import DEVICE, normal, relative_error

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the autotuner runs every configuration")
HALF, SINGLE = torch.bfloat16, torch.float32
NAMES = (
    "conv",
    "embedding",
    "ghost_norm",
    "group_norm",
    "instantiated_norm",
    "layer_norm",
    "scaled_sum",
)
MODULES = {name: import_module(f"fastclip.ops.triton.{name}") for name in NAMES}
Order = Callable[[list[triton.Config]], list[triton.Config]]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty returns
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


class Search:
    """In the place of Tuned.run: trials in some order, then the winner, another in each launch."""

    def __init__(self, winner: int, trials: Order) -> None:
        self.winner, self.trials = winner, trials
        self.most = 0

    def run(self, kernel: Tuned, grid: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        every = {str(c.kwargs): c for c in kernel.usable(args, kwargs)}
        usable = list(every.values())  # warps and stages mean nothing to the interpreter
        self.most = max(self.most, len(usable))
        for config in [*self.trials(usable), usable[self.winner % len(usable)]]:
            kernel.run_with(config, grid, args, kwargs)
        self.winner += 1


def found(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], search: Search) -> list[Tensor]:
    monkeypatch.setattr(Tuned, "run", lambda *launch: search.run(*launch))
    result = call()
    return [result] if isinstance(result, Tensor) else [x for x in result if x is not None]


def check(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], expected: Sequence[Tensor], tol: float
) -> None:
    winner, most = 0, 1
    while winner < most:
        trials: Order = (lambda configs: configs[::-1]) if winner % 2 else list
        alone, tried = Search(winner, lambda _: []), Search(winner, trials)
        pairs = zip(found(monkeypatch, call, alone), found(monkeypatch, call, tried), strict=True)
        for (x, y), reference in zip(pairs, expected, strict=True):
            assert torch.equal(x, y)
            assert relative_error(x, reference) < tol
        most, winner = alone.most, winner + 1
    assert most > 1, "nothing to choose from"


def uses(*lengths: int, dtype: torch.dtype, d: int = 6, p: int = 5) -> list[tuple[Tensor, Tensor]]:
    return [
        (normal(1, t, d, dtype=dtype, seed=k), normal(1, t, p, dtype=dtype, seed=k + 10))
        for k, t in enumerate(lengths)
    ]


def exact(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    total = sum(torch.einsum("btp,btd->bpd", g.double(), a.double()) for a, g in parts)
    assert isinstance(total, Tensor)
    return total.square().sum((1, 2))


@pytest.mark.parametrize("lengths", [(100,), (70, 66), (65, 3, 66), (65, 2, 1, 3)], ids=str)
@pytest.mark.one_in(4)
def test_uses_of_one_parameter(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two to four uses share their sums; tiles of 64 and of 128 positions leave unlike numbers."""
    parts = uses(*lengths, dtype=HALF)
    check(monkeypatch, lambda: ghost_norm_concat(parts), [exact(parts)], 1e-3)


def test_norms_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their biases: of each tile of 64 positions, or of 128."""
    pairs = uses(100, 100, dtype=HALF)
    sums = torch.stack([g.double().sum(1) for _, g in pairs])
    expected = [torch.stack([exact([pair]) for pair in pairs]), sums]
    check(monkeypatch, lambda: KERNELS["ghost_norms"](pairs, True), expected, 1e-3)


def test_cross_term(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = uses(70, 130, dtype=HALF)
    both = (exact([x, y]) - exact([x]) - exact([y])) / 2
    check(monkeypatch, lambda: ghost_cross(*x, *y), [both], 1e-4)


WIDE = ConvGeometry((34, 20, 1, 2), (1, 1), (0, 0), (1, 1), 1)
"""Of narrower gradients one configuration loads wide."""


@pytest.mark.parametrize(("side", "dtype"), [(4, HALF), (6, SINGLE), (9, HALF)])
@pytest.mark.parametrize("name", ["conv_ghost_norm", "conv_norm"])
@pytest.mark.one_in(3)
def test_convolutions(
    name: str, side: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions in one tile, in one or two, in two or three."""
    if name == "conv_norm" and dtype == SINGLE:
        return  # one length of its steps: nothing to choose from
    x = normal(1, 20, side, side + 1, dtype=dtype)
    g = normal(1, 34, side, side, dtype=dtype, seed=1)
    gradients = ops.conv_per_sample_gradients(x.double(), g.double(), WIDE)
    expected = gradients.flatten(1).square().sum(1)
    check(monkeypatch, lambda: KERNELS[name](x, g, WIDE), [expected], 2e-3)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.one_in(2)
def test_instantiated(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ((a, g),) = uses(40, dtype=dtype, d=140, p=130)
    gradients = torch.einsum("btp,btd->bpd", g.double(), a.double())
    expected = [gradients.square().sum((1, 2)), gradients]
    norm = KERNELS["instantiated_norm"]
    check(monkeypatch, lambda: norm(a, g, keep=True), expected, 1e-4)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("t", [3, 40])
@pytest.mark.one_in(4)
def test_sums(t: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sample, and of rows of many samples."""
    monkeypatch.setattr(MODULES["scaled_sum"], "splits_for", lambda *_: 2)
    a, g = normal(3, t, 130, dtype=dtype), normal(3, t, 70, dtype=dtype, seed=1)
    scale = torch.rand(3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = torch.einsum("b,btp,btd->pd", scale.double(), g.double(), a.double())
    check(monkeypatch, lambda: KERNELS["scaled_sum"](a, g, scale), [expected], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.one_in(2)
def test_sums_of_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES["scaled_sum"], "splits_for", lambda *_: 2)
    pairs = [
        (normal(3, 40, 130, dtype=dtype, seed=k), normal(3, 40, 70, dtype=dtype, seed=k + 10))
        for k in range(2)
    ]
    scale = torch.rand(3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = [
        torch.einsum("b,btp,btd->pd", scale.double(), g.double(), a.double()) for a, g in pairs
    ]
    check(monkeypatch, lambda: KERNELS["scaled_sums"](pairs, scale), expected, 1e-5)


def test_convolutions_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = normal(2, 20, 9, 10, dtype=HALF), normal(2, 34, 9, 9, dtype=HALF, seed=1)
    gradients = ops.conv_per_sample_gradients(x.double(), g.double(), WIDE)
    expected = [gradients.flatten(1).square().sum(1), gradients]
    check(monkeypatch, lambda: KERNELS["conv_norm"](x, g, WIDE, True), expected, 1e-3)


def test_sums_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sample; of float32 there is one length of steps: nothing to choose from."""
    monkeypatch.setattr(MODULES["conv"], "splits_of", lambda *_: 2)
    geometry = ConvGeometry((7, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = normal(3, 3, 9, 9, dtype=HALF), normal(3, 7, 9, 9, dtype=HALF, seed=1)
    scale = torch.rand(3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = ops.conv_sum(x.double(), g.double(), scale.double(), geometry)
    check(monkeypatch, lambda: KERNELS["conv_sum"](x, g, scale, geometry), [expected], 1e-5)


def test_norm_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, weight = normal(1, 20, 300), normal(1, 20, 300, seed=1), normal(300, seed=2)
    mean, rstd = x.mean(2), (x.var(2, unbiased=False) + 1e-5).rsqrt()
    expected = ops.layer_norm_backward.reference(x, g, mean, rstd, weight, True)
    layer = KERNELS["layer_norm_backward"]
    check(monkeypatch, lambda: layer(x, g, mean, rstd, weight, True), expected, 1e-5)
    x, g, weight = normal(1, 4, 1500), normal(1, 4, 1500, seed=1), normal(4, seed=2)
    grouped = x.view(1, 2, -1)
    mean, rstd = grouped.mean(2), (grouped.var(2, unbiased=False) + 1e-5).rsqrt()
    expected = ops.group_norm_backward.reference(x, g, mean, rstd, weight, True)
    group = KERNELS["group_norm_backward"]
    check(monkeypatch, lambda: group(x, g, mean, rstd, weight, True), expected, 1e-5)


@pytest.mark.slow
def test_channels_last_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples in chunks; those in registers have no tile to choose."""
    x, g, weight = normal(2, 30, 29, 6), normal(2, 30, 29, 6, seed=1), normal(6, seed=2)
    x, g = (y.permute(0, 3, 1, 2).tile(1, 4, 2, 2) for y in (x, g))  # [2, 24, 60, 58]
    x, g = (y.contiguous(memory_format=torch.channels_last) for y in (x, g))
    weight, rows = weight.tile(4), x.flatten(2)
    forward, backward = KERNELS["group_norm"], KERNELS["group_norm_backward"]
    expected = ops.group_norm.reference(x, weight, weight, 4, 1e-5, SINGLE)
    check(monkeypatch, lambda: forward(x, weight, weight, 4, 1e-5, SINGLE), expected, 1e-5)
    given = rows, g.flatten(2), *expected[1:], weight, True
    expected = ops.group_norm_backward.reference(*given)
    check(monkeypatch, lambda: backward(*given), expected, 1e-5)


def tuned_kernels() -> dict[str, Tuned]:
    every = [(name, *item) for name in NAMES for item in vars(MODULES[name]).items()]
    return {module + name: x for module, name, x in every if isinstance(x, Tuned)}


def test_no_tuned_kernel_is_left_out() -> None:
    """A new one needs a test of its own here, unless its configurations differ in warps only."""
    choosing = [k for k in tuned_kernels().values() if any(c.kwargs for c in k.configs)]
    assert len(choosing) == 14


@pytest.mark.parametrize("kernel", tuned_kernels().values(), ids=tuned_kernels())
def test_the_same_configuration_everywhere(kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is told to be deterministic no search chooses: the first that suits is taken."""

    class NoSearch:
        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError("searched")

    chosen: list[triton.Config] = []
    monkeypatch.setattr(kernel, "search", NoSearch())
    monkeypatch.setattr(kernel, "usable", lambda *launch: kernel.configs[1:])
    monkeypatch.setattr(kernel, "run_with", lambda config, *launch: chosen.append(config))
    kernel[1,](torch.zeros(1))
    assert chosen == [kernel.configs[1]]
    torch.use_deterministic_algorithms(False)
    with pytest.raises(AssertionError, match="searched"):
        kernel[1,](torch.zeros(1))
