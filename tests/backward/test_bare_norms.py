"""Layers that normalize, and tables, as nodes of C++ and of Python: what samples give one at a time, to
the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastclip.errors import GraphError
from tests.backward.nodes import OF_ALL_MAKERS, STEPS, C, check, private_paused, step, warm
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused

pytestmark = OF_ALL_MAKERS
B, T, D, WORDS = 5, 4, 6, 9


class Text(nn.Module):
    """A table with a row of padding, and norms over features."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(WORDS, D, padding_idx=0), nn.LayerNorm(D)
        self.mix, self.second = nn.Linear(D, D), nn.RMSNorm(D, eps=1e-5)
        self.head = nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.mix(self.first(self.table(ids))))).mean(1))


class Images(nn.Module):
    """Norms over channels and pixels, and one over two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first = nn.Linear(T, D * T), nn.GroupNorm(3, D)
        self.second, self.head = nn.LayerNorm((D, T)), nn.Linear(D * T, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.inner(x).view(-1, D, T))
        return self.head(self.second(torch.tanh(h)).flatten(1))


def ids() -> Tensor:
    found = torch.randint(WORDS, (B, T))
    found[:, 0] = 0
    return found


def pixels() -> Tensor:
    return torch.randn(B, T, dtype=torch.float64)


MODELS: list[tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = [
    (Text, ids, 5),
    (Images, pixels, 4),
]
ALL = pytest.mark.parametrize(("build", "data", "nodes"), MODELS, ids=["text", "images"])


def checked(model: nn.Module, data: Callable[[], Tensor], nodes: int) -> None:
    """After some steps all its layers are nodes, and exact."""
    twin, x = copy.deepcopy(model), data()
    private, optimizer = warm(model, x)
    x = data()
    step(private, x)
    assert private.grad_state.bare.listed == nodes
    check(model, optimizer, x, twin)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@ALL
def test_exact(build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int) -> None:
    checked(build().double(), data, nodes)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_traced_and_a_bare_step_agree_to_the_bit(
    build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int, dtype: torch.dtype
) -> None:
    model, found = build().to(dtype), []
    x = data().to(dtype) if data is pixels else data()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(private, x)
        found.append((optimizer.per_sample_norms, summed(dict(model.named_parameters()))))
    assert private.grad_state.bare.listed == nodes
    assert torch.equal(found[0][0], found[-1][0])
    assert all(torch.equal(found[0][1][n], found[-1][1][n]) for n in found[0][1])


@settings(max_examples=40)
@given(
    b=st.integers(1, 4), between=st.lists(st.integers(1, 3), max_size=2), c=st.integers(1, 3),
    kind=st.sampled_from(["layer", "two axes", "rms", "group", "image"]), bias=st.booleans(),
    eps=st.sampled_from([1e-5, 0.1]), scale=st.sampled_from([0.0, 1.0, 1e3]),
    last=st.booleans(),
)  # fmt: skip
def test_shapes(
    b: int, between: list[int], c: int, kind: str, bias: bool, eps: float, scale: float, last: bool
) -> None:
    c, shape = 2 * c, (2 * c,)
    norm: nn.Module
    if kind == "two axes":
        norm, shape = nn.LayerNorm((3, c), eps=eps, bias=bias), (3, c)
    elif kind == "layer":
        norm = nn.LayerNorm(c, eps=eps, bias=bias)
    elif kind == "rms":
        norm = nn.RMSNorm(c, eps=eps if bias else None)
    else:
        norm = nn.GroupNorm(2, c, eps=eps)
        shape = (c, 2, 3) if kind == "image" else (c, 3)
    inner = shape if kind in ("group", "image") else (*between, *shape)
    size = torch.Size(inner).numel()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(2, size), norm, nn.Linear(size, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).view(len(x), *inner)
            if last and h.dim() == 4:
                h = h.contiguous(memory_format=torch.channels_last)
            return self.head(torch.tanh(self.norm(h)).flatten(1))

    model = Around().double()
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    twin, x = copy.deepcopy(model), torch.randn(b, 2, dtype=torch.float64)
    private, optimizer = warm(model, x)
    x = x.clone()
    x[0] *= scale
    step(private, x)
    grads = per_sample_gradients(twin, x)
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)


@ALL
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_frozen(
    build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int, which: str
) -> None:
    model = build().double()
    for layer in model.children():
        if not isinstance(layer, nn.Linear) and getattr(layer, which, None) is not None:
            getattr(layer, which).requires_grad_(False)
    twin, x = copy.deepcopy(model), data()
    private, optimizer = warm(model, x)
    step(private, x)
    check(model, optimizer, x, twin)


def test_a_table_that_is_the_head_too() -> None:
    class Tied(Text):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(D, WORDS, bias=False)
            self.head.weight = self.table.weight

    model = Tied().double()
    twin, x = copy.deepcopy(model), ids()
    private, optimizer = warm(model, x)
    step(private, x)
    assert private.grad_state.bare.listed == 5
    check(model, optimizer, x, twin)


class Twice(nn.Module):
    """One norm and one table, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(WORDS, D), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x)) * self.table(x.flip(1))
        return self.head(self.norm(torch.tanh(h)).sum(1))


def test_used_twice() -> None:
    checked(Twice().double(), ids, 5)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("first", "eps", 0.5),
        ("second", "eps", 0.5),
        ("table", "padding_idx", 2),
        ("table", "padding_idx", None),
    ],
)
def test_settings_that_change(name: str, attribute: str, value: Any) -> None:
    model = Text().double()
    private, optimizer = warm(model, ids())
    setattr(getattr(model, name), attribute, value)
    twin, x = Text().double(), ids()
    x[:, 1] = 2
    twin.load_state_dict(model.state_dict())
    setattr(getattr(twin, name), attribute, value)
    step(private, x)
    check(model, optimizer, x, twin)


def test_groups_that_change() -> None:
    model = Images().double()
    private, optimizer = warm(model, pixels())
    model.first.num_groups = 2
    twin, x = copy.deepcopy(Images().double()), pixels()
    twin.load_state_dict(model.state_dict())
    twin.first.num_groups = 2
    step(private, x)
    check(model, optimizer, x, twin)


def test_an_option_that_no_rule_computes() -> None:
    model = Text().double()
    private, _ = warm(model, ids())
    model.table.max_norm = 1.0
    with refused("max_norm"):
        step(private, ids())


@ALL
def test_other_batches(
    build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int
) -> None:
    model = build().double()
    twin = copy.deepcopy(model)
    private, optimizer = warm(model, data())
    for rows in (2, 0, 1):
        optimizer.zero_grad()
        x = data()[:rows]
        step(private, x)
        if rows:
            check(model, optimizer, x, twin)
        assert all(not rows or bool(p.summed_grad.any()) for p in model.head.parameters())


def test_rows_of_nan_contribute_nothing() -> None:
    model, x = Images().double(), pixels()
    twin = copy.deepcopy(model)
    private, _ = warm(model, x)
    bad = torch.cat([x, x.new_full((1, T), torch.nan)])
    step(private, bad)
    grads = per_sample_gradients(twin, x)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(
    build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int, dtype: torch.dtype
) -> None:
    """As the usual way has it, to the bit."""
    model, found = build(), []
    x = data().float() if data is pixels else data()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            losses = sample_loss(private(x))
        losses.mean().backward()
        found.append((optimizer.per_sample_norms, summed(dict(model.named_parameters()))))
    assert torch.equal(found[0][0], found[-1][0])
    assert all(torch.equal(found[0][1][n], found[-1][1][n]) for n in found[0][1])
    assert private.grad_state.bare.listed == nodes


@ALL
def test_what_adds_nothing(
    build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int
) -> None:
    model, x = build().double(), data()
    private, _ = warm(model, x)
    with private_paused(private):
        sample_loss(private(x)).mean().backward()
    torch.autograd.grad(sample_loss(private(x)).mean(), [model.first.weight], allow_unused=True)
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())


def test_a_second_derivative_is_refused() -> None:
    model, x = Images().double(), pixels().requires_grad_()
    private, _ = warm(model, x.detach())
    with private_paused(private):
        (slope,) = torch.autograd.grad(private(x).sum(), x, create_graph=True)
    with pytest.raises(GraphError, match="differentiated only once"):
        slope.square().sum().backward()


def test_an_input_that_is_written_to() -> None:
    class Writes(Images):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.inner(x).view(-1, D, T))
            out = self.second(h)
            if self.training and getattr(self, "writes", False):
                h.mul_(2)
            return self.head(out.flatten(1))

    model = Writes().double()
    private, _ = warm(model, pixels())
    model.writes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(private, pixels())


@ALL
def test_thresholds_of_their_own(
    build: Callable[[], nn.Module], data: Callable[[], Tensor], nodes: int
) -> None:
    """Scales are [l, b]: the same sums as of layers that go their usual way, to the bit."""
    model, x, found = build().double(), data(), []
    count = len(list(model.parameters()))
    _, private, optimizer, _ = make_private(
        model, clipping="per_layer", max_grad_norm=[C / 3] * count
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(private, x)
        found.append(summed(dict(model.named_parameters())))
    assert private.grad_state.bare.listed == nodes
    assert all(torch.equal(found[0][n], found[-1][n]) for n in found[0])


class Deep(nn.Module):
    """Many small parameters of one size, of layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            m for _ in range(4) for m in (nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))
        )
        self.scale, self.head = nn.Parameter(torch.ones(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.head(x)


def test_small_parameters_lie_together_as_they_did() -> None:
    """Sums of float32, too, are those of the first step, to the bit."""
    model, found = Deep(), []
    x = torch.randn(8, D)
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(private, x)
        found.append(summed(dict(model.named_parameters())))
    assert private.grad_state.bare.listed == 13
    assert all(torch.equal(found[0][n], found[-1][n]) for n in found[0] if n != "scale")


def test_padding_that_changes_before_the_pass_ends() -> None:
    """The gradient is of what the forward pass used, also where layers were planned anew since."""

    class Named(Text):
        def forward(self, ids: Tensor, factor: float | None = None) -> Tensor:
            out = super().forward(ids)
            return out if factor is None else out * factor

    model = Named().double()
    model.table.padding_idx = None
    twin, x = copy.deepcopy(model), ids()
    private, optimizer = warm(model, x)
    loss = sample_loss(private(x)).mean()
    model.table.padding_idx = 2
    for _ in range(4):
        private(x, factor=2.0)
    loss.backward()
    check(model, optimizer, x, twin)


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(D), lambda: nn.GroupNorm(2, D)])
def test_weight_and_bias_in_one(norm: Callable[[], nn.Module]) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(D, D), norm(), nn.Linear(D, 3)
            self.norm.bias = self.norm.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(self.first(x))))

    model, x = Shared().double(), torch.randn(B, D, dtype=torch.float64)
    nn.init.normal_(model.norm.weight)  # type: ignore[arg-type]
    twin = copy.deepcopy(model)
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(private, x)
        check(model, optimizer, x, twin)


def test_weight_and_bias_that_become_one() -> None:
    model, x = Text().double(), ids()
    private, _ = warm(model, x)
    model.first.bias = model.first.weight
    with refused("became one parameter.*errors.html#changed-model"):
        step(private, x)
