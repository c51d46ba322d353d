"""Half Grams and per-sample gradients of fastclip._host on a CPU, against float64 and the reference."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.errors import GraphError
from fastclip.ops import ConvGeometry, LastInput, dispatch, grams
from fastclip.ops import conv as conv_gradients
from fastclip.ops import linear as kept
from fastclip.ops.dispatch import backend_of, use_backend
from fastclip.rules.records import KeptRecord, kept_record
from tests.oracle import check_exact

_host = pytest.importorskip("fastclip._host", reason="fastclip._host is not built")
host = pytest.importorskip("fastclip.ops.host")
pytestmark = pytest.mark.skipif(
    not _host.product_lanes(), reason="products in vectors ask for a processor with AVX2 and FMA"
)
POINT = ConvGeometry((35, 9, 1), (1,), (0,), (1,), 1)
SHAPES = {  # b, t, d, p
    "one number": (3, 1, 1, 1),
    "a tile with edges": (3, 5, 7, 3),
    "just more than tiles": (3, 33, 65, 17),
    "more than a strip": (3, 20, 30, 131),
    "cut sums": (2, 193, 16, 5),
    "strips of a Gram": (2, 401, 33, 9),
    "several panels": (2, 1153, 6, 140),
    "whole lines": (2, 64, 96, 64),
    "few last columns": (2, 36, 200, 6),
    "a vector of last columns": (2, 40, 200, 6),
    "more than a vector of last columns": (2, 60, 200, 6),
}
CONVOLUTIONS = {  # channels, outputs, space, kernel, stride, padding, dilation
    "2d": (5, 7, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "whole panels": (64, 33, (9, 8), (3, 2), (1, 1), (1, 0), (1, 1)),
    "strides": (32, 4, (9, 8), (3, 2), (2, 3), (1, 0), (1, 1)),
    "dilation": (3, 70, (9, 9), (2, 3), (1, 2), (2, 2), (3, 2)),
    "mostly padding": (2, 3, (2, 1), (5, 3), (1, 1), (4, 2), (1, 1)),
    "patches": (3, 40, (16, 16), (8, 8), (8, 8), (0, 0), (1, 1)),
    "pointwise": (33, 130, (7, 7), (1, 1), (2, 2), (0, 0), (1, 1)),
    "several panels": (4, 3, (40, 36), (3, 3), (1, 1), (1, 1), (1, 1)),
    "1d": (3, 5, (23,), (5,), (2,), (3,), (1,)),
    "3d": (3, 4, (4, 3, 5), (2, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 2)),
}


def operands(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    b, t, d, p = shape
    generator = torch.Generator().manual_seed(t)
    return (
        torch.randn(b, t, d, generator=generator),
        torch.randn(b, t, p, generator=generator),
    )


def ways_to_lie(x: Tensor) -> dict[str, Tensor]:
    """x [b, t, n] in other places of memory."""
    wide = F.pad(x, (3, 2))
    return {
        "in order": x,
        "positions side by side": x.mT.contiguous().mT,
        "part of longer rows": wide[:, :, 3 : 3 + x.shape[2]],
        "rows in another order": x.transpose(0, 1).contiguous().transpose(0, 1),
        "one row for all": x[:1].expand_as(x),
        "steps of two": torch.stack([x, x], -1).flatten(2)[:, :, ::2],
    }


def sizes(*values: Tensor) -> list[Tensor]:
    return [x.double().flatten(1).square().sum(1) for x in values]


def close(found: Tensor, exact: Tensor, room: Tensor | None = None) -> None:
    """Off by a few roundings of the terms' sizes, `room`."""
    room = exact.abs() if room is None else room
    assert found.dtype == torch.float32
    assert bool(((found.double() - exact).abs() <= 2e-6 * room + 1e-30).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_their_norms(shape: str, lanes: int, threads: int) -> None:
    a, g = operands(SHAPES[shape])
    for way, x in ways_to_lie(a).items():
        y = ways_to_lie(g)[way]
        parts, *norms = host.gradients_with_norms(x, y, LastInput())
        found = ops.whole(parts)
        exact = torch.bmm(y.double().mT, x.double())
        close(found, exact, torch.bmm(y.double().abs().mT, x.double().abs()))
        for norm, own in zip(norms, sizes(found, x, y), strict=True):
            close(norm, own)
        assert torch.equal(host.wide_gradients(x, y), found)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_grams(shape: str, lanes: int, threads: int) -> None:
    """As the reference has them, entries that it leaves out included, so that one may meet the other."""
    a, g = operands(SHAPES[shape])
    for way, x in ways_to_lie(a).items():
        y = ways_to_lie(g)[way]
        found, wide = host.wide_gram(x), grams.wide_gram.reference(x.double())
        close(found, wide, sizes(x)[0][:, None, None])
        exact = grams.gram_dots.reference(wide, y.double())
        for gram in (found, grams.wide_gram.reference(x)):
            for number, right in zip(host.gram_dots(gram, y), exact, strict=True):
                close(number, right, exact[1].maximum(right))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gradients_of_convolutions(case: str, lanes: int, threads: int) -> None:
    channels, outputs, space, kernel, *rest = CONVOLUTIONS[case]
    geometry = ConvGeometry((outputs, channels, *kernel), *rest, 1)
    torch.manual_seed(0)
    x = torch.randn(3, channels, *space)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    g = torch.randn_like(convolve(x, torch.zeros(geometry.weight_shape), None, *rest))
    reference = conv_gradients.wide_conv_gradients.reference
    exact = reference(x.double(), g.double(), geometry)
    room = reference(x.double().abs(), g.double().abs(), geometry)
    laid = (x, g), (x.mT.contiguous().mT, g.transpose(0, 1).contiguous().transpose(0, 1))
    for own_x, own_g in laid:
        parts, *norms = host.conv_gradients_with_norms(own_x, own_g, geometry, LastInput())
        found = ops.whole(parts)
        close(found, exact, room)
        for norm, own in zip(norms, sizes(found, x, g), strict=True):
            close(norm, own)
        assert torch.equal(host.wide_conv_gradients(own_x, own_g, geometry), found)


def test_equal_terms(lanes: int) -> None:
    """Roundings of one sign stay within what norms are raised by, however long a sum is."""
    for n in (64, 192, 193, 1024, 5000):
        for value in (1.1, 1 / 3, 0.7):
            x = torch.full((2, 16, n), value)
            exact = n * torch.tensor(value).double() ** 2
            off = (host.wide_gram(x).double() / exact - 1).abs().max()
            assert off <= min(n / 4, 96 + n / 32) * ops.unit_roundoff(torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_stay_alone(value: float, lanes: int) -> None:
    a, g = operands((4, 40, 9, 35))
    geometry = ConvGeometry((35, 9, 3), (1,), (1,), (1,), 1)

    def gradients(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        (linear, norms, *_), (conv, others, *_) = (
            host.gradients_with_norms(x, y, LastInput()),
            host.conv_gradients_with_norms(x.mT, y.mT, geometry, LastInput()),
        )
        return (ops.whole(linear), norms), (ops.whole(conv), others)

    right = gradients(a, g)
    for spoilt in (a, g):
        x, y = a.clone(), g.clone()
        (x if spoilt is a else y)[1, 3, 5] = value
        gram = host.wide_gram(x)
        product, _, trace_x, trace_y = host.gram_dots(gram, y)
        assert product.isfinite().tolist() == [True, False, True, True]
        assert (trace_x + trace_y).isfinite().tolist() == [True, False, True, True]
        for ours, others in zip(gradients(x, y), right, strict=True):
            for own, other in zip(ours, others, strict=True):
                assert not own[1].isfinite().all()
                assert torch.equal(own[[0, 2, 3]], other[[0, 2, 3]])


def test_what_is_declined(lanes: int) -> None:
    """Other types, other devices, nothing at all, groups, fewer samples than threads."""
    a, g = operands((4, 5, 9, 35))
    pairs = [
        (a.double(), g.double()), (a.bfloat16(), g.bfloat16()), (a.to("meta"), g.to("meta")),
        (a[:0], g[:0]), (a[:, :0], g[:, :0]), (torch._neg_view(a), torch._neg_view(g)),
    ]  # fmt: skip
    for x, y in pairs:
        assert host.wide_gram(x) is NotImplemented
        assert host.gram_dots(a @ a.mT, y) is NotImplemented
        for own in (y, g):
            assert host.wide_gradients(x, own) is NotImplemented
            assert host.gradients_with_norms(x, own, LastInput()) is NotImplemented
            assert host.wide_conv_gradients(x.mT, own.mT, POINT) is NotImplemented
            assert (
                host.conv_gradients_with_norms(x.mT, own.mT, POINT, LastInput()) is NotImplemented
            )
    with pytest.raises(ValueError, match="NotImplementedType"):  # vmap's own: no tensor came back
        torch.func.vmap(host.wide_gram)(a[None])
    for x, y in ((a[:2], g), (a[:, :4], g), (a, g[0]), (a[0], g[0]), (a[None], g[None])):
        assert host.gradients_with_norms(x, y, LastInput()) is NotImplemented
        assert host.gram_dots(torch.randn(len(x), 5, 4), y) is NotImplemented
        assert host.conv_gradients_with_norms(x.mT, y.mT, POINT, LastInput()) is NotImplemented
    assert host.wide_gram(a[0]) is NotImplemented
    for kernel, padding in ((1, 1), (2, 0), (3, 0)):  # another output's size
        other = ConvGeometry((35, 9, kernel), (1,), (padding,), (1,), 1)
        assert host.conv_gradients_with_norms(a.mT, g.mT, other, LastInput()) is NotImplemented
    groups = ConvGeometry((35, 3, 1), (1,), (0,), (1,), 3)
    assert host.conv_gradients_with_norms(a.mT, g.mT, groups, LastInput()) is NotImplemented
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert host.wide_gram(a[:1]) is NotImplemented
    finally:
        torch.set_num_threads(before)


def test_vectors_that_the_processor_does_not_have() -> None:
    with pytest.raises(ValueError, match="no vectors of so many numbers"):
        _host.half_gram((0, 0, 0), False, 0, 0, 0, 0, 1, 5, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("used", ["by them", "by torch"])
def test_a_fork_does_not_wait_for_threads_of_its_parent(used: str) -> None:
    a, _ = operands((4, 40, 9, 35))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = host.wide_gram(a) if used == "by them" else torch.randn(1 << 20).add_(1) * 0
        child = os.fork()
        if not child:
            signal.alarm(30)  # a child that waits for ever ends so
            found = host.wide_gram(a)
            os._exit(0 if used == "by torch" or torch.equal(found, expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", host.PRODUCTS)
def test_they_serve_by_default(name: str) -> None:
    assert backend_of(name, torch.device("cpu"))[0] == "host"
    with use_backend("reference"):
        assert backend_of(name, torch.device("cpu"))[0] == "reference"


class Mixed(nn.Module):
    """Layers of every kind that the loops serve."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 16, 3, stride=2)
        self.first, self.last = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.deep(torch.tanh(self.wide(x)))).flatten(2).mT
        return x + self.last(torch.tanh(self.first(x)))


def test_a_step_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one sample at a time in float64; and the loops have served."""
    called = set()

    def watched(name: str, launcher: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any) -> Any:
            found = launcher(*args)
            if found is not NotImplemented:
                called.add(name)
            return found

        return spy

    for name, launcher in host.PRODUCTS.items():
        monkeypatch.setitem(dispatch._load("host"), name, watched(name, launcher))
    monkeypatch.setattr(host, "PART", 6000)  # of large layers, parts of a sample or two
    torch.manual_seed(0)
    check_exact(Mixed(), torch.randn(6, 3, 24, 24), dtype=torch.float32)
    assert {"gradients_with_norms", "conv_gradients_with_norms", "parted_sum"} <= called


@pytest.mark.parametrize("samples", [1, 3, 9])
def test_kept_records_hold_the_norms_of_what_they_hold(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second look at the gradients: the norm that came with them, raised. And parts are their sum."""
    a, g = operands((4, 40, 9, 35))
    monkeypatch.setattr(host, "PART", samples * 4 * 9 * 35)
    for (parts, norm), pair in (
        (ops.kept_gradients(a, g, LastInput()), (a, g)),
        (ops.kept_conv_gradients(a.mT, g.mT, POINT, LastInput()), (a, g)),
    ):
        assert [len(part) for part in parts] == {1: [1] * 4, 3: [3, 1], 9: [4]}[samples]
        record, found = kept_record(parts, norm), ops.whole(parts)
        bare = ops.row_norm_sq(found)
        torch.testing.assert_close(norm.total, bare, rtol=1e-6, atol=0)
        raised = (bare.sqrt() + ops.product_margin(*pair)).square()
        torch.testing.assert_close(record.norm_sq(), raised, rtol=1e-6, atol=0)
        assert torch.equal(record.per_sample(), found)
        assert torch.equal(torch.cat([*record.apart()]), found)
        scale = torch.tensor([0.5, 0, 1, 0.25])
        expected = torch.einsum("b,b...->...", scale.double(), found.double())
        close(record.clipped_sum(scale), expected, sizes(found)[0].sum().sqrt())
        both = record.merge(KeptRecord(found.clone()))
        assert both is not None
        torch.testing.assert_close(both.per_sample(), 2 * found, rtol=0, atol=0)
        record.check_unmodified()
        parts[-1].add_(1)
        with pytest.raises(GraphError, match="modified in place"):
            record.check_unmodified()


@pytest.mark.parametrize("lengths", [[5], [2, 2, 1], [1] * 5])
@pytest.mark.parametrize("size", [1, 7, 2048, 5003])
def test_sums_of_parts(lengths: list[int], size: int, lanes: int, threads: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n, size) for n in lengths]
    scale = torch.rand(5)
    found = host.parted_sum(parts, scale)
    whole, exact = torch.cat(parts).double(), scale.double() @ torch.cat(parts).double()
    close(found, exact, scale.double() @ whole.abs())
    torch.testing.assert_close(found, kept.parted_sum.reference(parts, scale))


def test_a_sample_of_scale_0_is_not_in_the_sum(lanes: int) -> None:
    parts = [torch.ones(2, 40), torch.full((2, 40), torch.nan)]
    scale = torch.tensor([1.0, 0.5, 0, 0])
    assert torch.equal(host.parted_sum(parts, scale), torch.full((40,), 1.5))
    assert host.parted_sum(parts, scale + 1).isnan().all()
    nowhere = torch.tensor([1.0, torch.nan, 0, 0])
    assert host.parted_sum(parts, nowhere).isnan().all()


def test_parts_that_are_declined(lanes: int) -> None:
    """Nothing of what does not belong together, nor of what is not in memory, is read."""
    part, scale = torch.randn(2, 40), torch.rand(4)
    for parts in (
        iter([part, part]), [], [part], [part, part, part], [part[:1], part[:1], part],
        [part, part[:, :9]], [part, part.double()], [part, part.mT.contiguous().mT],
    ):  # fmt: skip
        assert host.parted_sum(parts, scale) is NotImplemented
    assert host.parted_sum([part, part], scale.to("meta")) is NotImplemented
    with pytest.raises(ValueError, match="so many samples"):
        _host.weighted_sum([part.data_ptr()], 2, scale.data_ptr(), part.data_ptr(), 4, 40, lanes, 1)


def test_tensors_without_memory_are_the_references() -> None:
    """Under a mode that traces, what a loop would write to has none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, g = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name in ("wide_gradients", "gram_dots", "wide_gram"):
            operands = {"gram_dots": (torch.randn(4, 5, 5), g), "wide_gram": (a,)}.get(name, (a, g))
            assert host.PRODUCTS[name](*operands) is NotImplemented
        assert host.parted_sum([a], torch.randn(4)) is NotImplemented
