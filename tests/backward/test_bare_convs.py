"""Convolutions as nodes, of C++ and of Python: what samples give one at a time, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastclip.errors import FastclipError, GraphError
from tests.backward.nodes import OF_ALL_MAKERS, STEPS, C, check, private_paused, step, warm
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)

pytestmark = OF_ALL_MAKERS
B = 4
KINDS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Net(nn.Module):
    """Two convolutions, of which one is given numbers that need no gradient."""

    def __init__(self, dims: int = 2, **options: Any) -> None:
        super().__init__()
        self.first = KINDS[dims](2, 4, 3, padding=1)
        self.second = KINDS[dims](4, 4, **{"kernel_size": 3, **options})
        self.head = nn.LazyLinear(3, dtype=torch.float64)
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1))


def net(side: int = 5, dims: int = 2, **options: Any) -> tuple[nn.Module, Tensor]:
    """A model and its data."""
    torch.manual_seed(0)
    model = Net(dims, **options).double()
    x = torch.randn(B, 2, *[side] * dims, dtype=torch.float64)
    model(x)
    return model, x


def nodes(private: Any) -> int:
    """How many calls of layers were nodes in the last pass."""
    return private.grad_state.bare.listed + private.grad_state.bare.taken


@settings(max_examples=40)
@given(
    dims=st.integers(1, 3), side=st.integers(4, 5), kernel=st.integers(1, 3),
    stride=st.integers(1, 2), dilation=st.integers(1, 2), groups=st.sampled_from([1, 2, 4]),
    padding=st.sampled_from([0, 1, "same", "valid"]), bias=st.booleans(),
    mode=st.sampled_from(["zeros", "zeros", "circular"]),
)  # fmt: skip
def test_shapes(
    dims: int, side: int, kernel: int, stride: int, dilation: int, groups: int,
    padding: Any, bias: bool, mode: str,
) -> None:  # fmt: skip
    if padding == "same":
        stride = 1
    if dilation * (kernel - 1) + 1 > side:
        dilation = 1
    options = {"stride": stride, "dilation": dilation, "groups": groups, "padding": padding}
    model, x = net(side, dims, kernel_size=kernel, bias=bias, padding_mode=mode, **options)
    twin = copy.deepcopy(model)
    private, optimizer = warm(model, x)
    step(private, x)
    plain = mode == "zeros" and not (padding == "same" and dilation * (kernel - 1) % 2)
    assert nodes(private) == 2 + plain
    check(model, optimizer, x, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", [3, 9])
@pytest.mark.parametrize("last", [False, True])
def test_a_traced_and_a_bare_step_agree_to_the_bit(
    dtype: torch.dtype, side: int, last: bool
) -> None:
    model, x = net(side)
    model, x, found = model.to(dtype), x.to(dtype), []
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(private, x)
        found.append((optimizer.per_sample_norms, summed(dict(model.named_parameters()))))
    assert nodes(private) == 3
    assert torch.equal(found[0][0], found[-1][0])
    assert all(torch.equal(found[0][1][n], found[-1][1][n]) for n in found[0][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """As the usual way has it, to the bit; the backward pass inside the block, too."""
    model, x = net()
    model, x, found = model.float(), x.float(), []
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for k in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = sample_loss(private(x)).mean()
            if k == STEPS - 1:
                loss.backward()
        if k < STEPS - 1:
            loss.backward()
        found.append((optimizer.per_sample_norms, summed(dict(model.named_parameters()))))
    assert nodes(private) == 3
    assert torch.equal(found[0][0], found[-1][0])
    assert all(torch.equal(found[0][1][n], found[-1][1][n]) for n in found[0][1])


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]], ids="-".join)
def test_frozen(frozen: list[str]) -> None:
    model, x = net()
    for name in frozen:
        getattr(model.second, name).requires_grad_(False)
    twin = copy.deepcopy(model)
    private, optimizer = warm(model, x)
    step(private, x)
    check(model, optimizer, x, twin)


@pytest.mark.parametrize(
    ("attribute", "value"), [("padding", (0, 1)), ("stride", (1, 2)), ("dilation", (2, 1))]
)
def test_settings_that_change(attribute: str, value: Any) -> None:
    class Pooled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).mean((2, 3)))

    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(B, 2, 7, 7, dtype=torch.float64)
    model(x)
    private, optimizer = warm(model, x)
    setattr(model.second, attribute, value)
    twin = Pooled().double()
    twin(x)
    twin.load_state_dict(model.state_dict())
    setattr(twin.second, attribute, value)
    step(private, x)
    check(model, optimizer, x, twin)


def test_used_twice() -> None:
    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.second(torch.tanh(self.first(x))))
            return self.head(torch.tanh(self.second(h)).flatten(1))

    torch.manual_seed(0)
    model = Again(padding=1).double()
    x = torch.randn(B, 2, 5, 5, dtype=torch.float64)
    model(x)
    twin = copy.deepcopy(model)
    private, optimizer = warm(model, x)
    step(private, x)
    assert nodes(private) == 4
    check(model, optimizer, x, twin)


def test_other_batches_and_rows_of_nan() -> None:
    model, x = net()
    twin = copy.deepcopy(model)
    private, optimizer = warm(model, x)
    for rows in (2, 1, 0):
        optimizer.zero_grad()
        step(private, x[:rows])
        if rows:
            check(model, optimizer, x[:rows], twin)
    optimizer.zero_grad()
    step(private, torch.cat([x, x.new_full((1, *x.shape[1:]), torch.nan)]))
    expected = clipped_sum(per_sample_gradients(twin, x), C)
    assert_sums(summed(dict(model.named_parameters())), expected, 1e-10)


def test_what_adds_nothing() -> None:
    model, x = net()
    private, _ = warm(model, x)
    with private_paused(private):
        step(private, x)
    loss = sample_loss(private(x)).mean()
    torch.autograd.grad(loss, [model.first.weight], allow_unused=True)
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())


def test_a_second_derivative_is_refused() -> None:
    model, x = net()
    private, _ = warm(model, x)
    x.requires_grad_()
    with private_paused(private):
        (slope,) = torch.autograd.grad(private(x).sum(), x, create_graph=True)
    with pytest.raises(GraphError, match="differentiated only once"):
        slope.square().sum().backward()


def test_thresholds_of_their_own() -> None:
    model, x = net()
    found, count = [], len(list(model.parameters()))
    options: dict[str, Any] = {"clipping": "per_layer", "max_grad_norm": [C / 3] * count}
    _, private, optimizer, _ = make_private(model, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(private, x)
        found.append(summed(dict(model.named_parameters())))
    assert nodes(private) == 3
    assert all(torch.equal(found[0][n], found[-1][n]) for n in found[0])


def replace_a_method(layer: nn.Conv2d) -> None:
    layer._conv_forward = lambda *given: given[0]  # type: ignore[method-assign]


def hook(layer: nn.Conv2d) -> None:
    layer.weight.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize("change", [replace_a_method, hook], ids=lambda f: f.__name__)
def test_layers_that_change_before_the_pass_ends(change: Any) -> None:
    """Of which all that they leave was taken while it ran."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Flatten())
    x = torch.randn(B, 2, 9, 9, dtype=torch.float64)
    private, _ = warm(model.double(), x)
    assert private.grad_state.bare.taken == 2
    assert not private.grad_state.bare.listed
    loss = sample_loss(private(x)).mean()
    change(model[2])
    with pytest.raises(FastclipError):
        loss.backward()
    assert not any(s.any() for s in summed(dict(model.named_parameters())).values())


def test_nothing_is_held_of_a_pass_that_failed() -> None:
    """What was taken while it ran is not in the next one."""
    model, x = net(3)
    twin = copy.deepcopy(model)
    private, optimizer = warm(model, x)

    class Fails(Exception):
        pass

    def fail(gradient: Tensor) -> None:
        raise Fails

    h = private(x)
    x2 = x.clone().requires_grad_()
    x2.register_hook(fail)
    del h
    loss = sample_loss(private(x2)).mean()
    with pytest.raises(Fails):
        loss.backward()
    optimizer.zero_grad()
    step(private, x)
    check(model, optimizer, x, twin)


def test_data_of_another_shape() -> None:
    """As many numbers, and an output of the same shape: only the kernel tells."""
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, (1, 3), stride=4)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 2 * 2, 3)).double()
    x = torch.randn(B, 2, 7, 7, dtype=torch.float64)
    private, optimizer = warm(model, x)
    assert nodes(private) == 2
    first.weight.data = torch.randn(4, 2, 3, 1, dtype=torch.float64)
    twin = nn.Sequential(
        nn.Conv2d(2, 4, (3, 1), stride=4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 2 * 2, 3)
    ).double()
    twin.load_state_dict(model.state_dict())
    step(private, x)
    check(model, optimizer, x, twin)
