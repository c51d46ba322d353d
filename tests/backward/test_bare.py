"""Layers as single nodes, of C++ and of Python: the same norms and sums, and nothing that a plain layer
would refuse."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from fastclip.backward import bare
from fastclip.errors import FastclipError, GraphError
from tests.backward import nodes
from tests.backward.nodes import OF_ALL_MAKERS, C, private_paused, step
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

pytestmark = OF_ALL_MAKERS
B, D = 5, 6


class Net(nn.Module):
    """Layers that may be bare, around what tests do."""

    def __init__(self, does: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.third, self.head = Conv1D(4, D), nn.Linear(4, 3)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.relu_(self.second(h)) if self.does is None else self.does(self, h)
        return self.head(torch.tanh(self.third(h)))


def rows(*between: int) -> Tensor:
    return torch.randn(B, *between, D, dtype=torch.float64)


def count(private: nn.Module) -> int:
    """How many calls of layers were bare in the last backward pass."""
    return private.grad_state.bare.listed


def warm(model: nn.Module, x: Tensor, *, is_bare: bool = True) -> tuple[nn.Module, Any]:
    """A private model whose next steps are bare."""
    private, optimizer = nodes.warm(model, x, steps=4)
    assert private.grad_state.bare.listed or not (is_bare and bare.SERVES)
    return private, optimizer


def check(model: nn.Module, optimizer: Any, x: Tensor, twin: nn.Module | None = None) -> None:
    """What is summed is what samples give one at a time, clipped."""
    nodes.check(model, optimizer, x, twin or _plain(model))


def _plain(model: nn.Module) -> nn.Module:
    """A copy that is not private."""
    twin = Net(getattr(model, "does", None)).double()
    twin.load_state_dict(model.state_dict())
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
    return twin


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("between", [(), (1,), (3,), (2, 3)], ids=str)
def test_exact(between: tuple[int, ...]) -> None:
    model, x = Net().double(), rows(*between)
    private, optimizer = warm(model, x)
    step(private, x)
    assert count(private) >= 2
    check(model, optimizer, x)


@pytest.mark.parametrize("between", [(), (3,)], ids=str)
def test_a_traced_and_a_bare_step_agree_to_the_bit(between: tuple[int, ...]) -> None:
    model, x, found = Net().double(), rows(*between), []
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(4):
        optimizer.zero_grad()
        step(private, x)
        found.append((optimizer.per_sample_norms, summed(dict(model.named_parameters()))))
    assert count(private) == 4
    assert torch.equal(found[0][0], found[-1][0])
    assert all(torch.equal(found[0][1][n], found[-1][1][n]) for n in found[0][1])


@settings(max_examples=25)
@given(
    b=st.integers(1, 4), t=st.integers(0, 3), d=st.integers(1, 5), p=st.integers(1, 5),
    bias=st.booleans(), transposed=st.booleans(), scale=st.sampled_from([0.0, 1.0, 1e3]),
)  # fmt: skip
def test_shapes(b: int, t: int, d: int, p: int, bias: bool, transposed: bool, scale: float) -> None:
    layer = Conv1D(p, d) if transposed else nn.Linear(d, p, bias=bias)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(p, 2)).double()
    twin, x = copy.deepcopy(model), torch.randn(b, *[t] * (t > 0), d, dtype=torch.float64)
    private, optimizer = warm(model, x, is_bare=False)  # where gradients are kept none is
    x = x.clone()
    x[0] *= scale
    step(private, x)
    grads = per_sample_gradients(twin, x)
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)


@pytest.mark.parametrize(
    "frozen", [["weight"], ["bias"], ["weight", "bias"]], ids=["weight", "bias", "both"]
)
def test_frozen(frozen: list[str]) -> None:
    model, x = Net().double(), rows()
    for name in frozen:
        getattr(model.second, name).requires_grad_(False)
    private, optimizer = warm(model, x)
    step(private, x)
    check(model, optimizer, x)


def test_rows_of_a_nan_contribute_nothing() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    x[1, 2] = torch.nan
    step(private, x)
    others = [0, 2, 3, 4]
    grads = per_sample_gradients(_plain(model), x[others])
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)


def test_a_batch_of_another_size_and_an_empty_one() -> None:
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    for other in (torch.cat([x, x]), x[:1], x[:0]):
        optimizer.zero_grad()
        step(private, other) if len(other) else sample_loss(private(other)).sum().backward()
        if len(other):
            check(model, optimizer, other)
        else:
            assert not any(s.any() for s in summed(dict(model.named_parameters())).values())


def again(net: Net, h: Tensor) -> Tensor:
    return net.second(torch.tanh(net.second(h)))


def kept(net: Net, h: Tensor) -> Tensor:
    return checkpoint(net.second, h, use_reentrant=False)


def kept_reentrant(net: Net, h: Tensor) -> Tensor:
    return checkpoint(net.second, h, use_reentrant=True)


def on_cpu(net: Net, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(net.second(h))


def without_graph(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        other = net.second(h)
    return net.second(h) + other


def by_keyword(net: Net, h: Tensor) -> Tensor:
    return net.second(input=h)


def tied(net: Net, h: Tensor) -> Tensor:
    return h @ net.second.weight + net.second(h)


@pytest.mark.parametrize(
    "does", [again, kept, kept_reentrant, on_cpu, without_graph, by_keyword, tied],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_beside_what_goes_its_usual_way(does: Callable[..., Tensor]) -> None:
    model, x = Net(does).double(), rows()
    private, optimizer = warm(model, x)
    step(private, x)
    check(model, optimizer, x)


@pytest.mark.parametrize("between", [(), (4,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(between: tuple[int, ...], dtype: torch.dtype) -> None:
    """To the bit what layers give that go their usual way."""
    model, x = Shared().float(), rows(*between).float()
    private, optimizer = warm(model, x)
    found = []
    for is_bare in (True, False):
        optimizer.zero_grad()
        if not is_bare:
            private.grad_state.bare.layers = []
        with torch.autocast("cpu", dtype):
            step(private, x)
        sums = summed(dict(model.named_parameters()))
        found.append((optimizer.per_sample_norms, sums, count(private)))
    (norms_of, sums, bare_ones), (others, other_sums, none) = found
    assert torch.equal(norms_of, others)
    assert all(torch.equal(sums[n], other_sums[n]) for n in sums)
    assert bare_ones >= 2
    assert not none


class Shared(Net):
    """Layers that share their input, of which autocast makes one copy."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * torch.tanh(self.second(x))
        return self.head(torch.tanh(self.third(h)))


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_bare_calls_are_no_new_way(cast: torch.dtype | None) -> None:
    """Of the same operators in the same order: nothing is looked at again."""
    model, x = Net().float(), rows(3).float()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", cast, enabled=cast is not None):
            step(private, x)
    assert count(private) >= 2
    assert len(private.grad_state.calls.looks) == 1


def test_layers_share_a_copy_of_their_input() -> None:
    model, x = Shared().float(), rows().float()
    private, _ = warm(model, x)
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as seen:
        private(x)
    casts = [e for e in seen.events() if e.name == "aten::_to_copy"]
    assert len(casts) <= 4 + 4 + 3  # weights, biases, and inputs of three


def test_a_layer_that_fails_says_which() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    model.does = lambda net, h: net.second(h.float())
    with pytest.raises(RuntimeError, match=r"second \(Linear\)"):
        step(private, x)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("between", [(), (3,)], ids=str)
def test_sums_that_have_no_room_together(
    between: tuple[int, ...], per_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer after the other, and as many as there is room for: the same to the bit."""
    found = []
    for room in (1 << 20, 8 * D * D, 1):
        monkeypatch.setattr(bare, "ROOM", room)
        torch.manual_seed(0)
        model, x = Net(transposed).double(), rows(*between)
        options = {"clipping": "per_layer", "max_grad_norm": [C / 3] * 8} if per_layer else {}
        _, private, optimizer, _ = make_private(model, **{"max_grad_norm": C, **options})
        for _ in range(4):
            optimizer.zero_grad()
            step(private, x)
        assert count(private) >= 2
        found.append(summed(dict(model.named_parameters())))
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in found[0])


def transposed(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.second(h))


@pytest.mark.parametrize("between", [(), (3,)], ids=str)
def test_thresholds_of_their_own(between: tuple[int, ...]) -> None:
    """Scales are [l, b]: the same sums as of layers that go their usual way, to the bit."""
    model, x, found = Net().double(), rows(*between), []
    options = {"clipping": "per_layer", "max_grad_norm": [C / 3] * 8}
    _, private, optimizer, _ = make_private(model, **options)
    for _ in range(4):
        optimizer.zero_grad()
        step(private, x)
        found.append(summed(dict(model.named_parameters())))
    assert count(private) >= 2
    assert all(torch.equal(found[0][n], found[-1][n]) for n in found[0])


def test_nothing_is_held_after_a_pass() -> None:
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    seen: list[Any] = []
    model.first.register_forward_hook(lambda module, given, out: seen.append(weakref.ref(out)))
    for _ in range(4):
        optimizer.zero_grad()
        step(private, x)
    assert count(private) == 4
    assert seen[-1]() is None


def test_two_passes_into_one_sum() -> None:
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    step(private, x)
    once = summed(dict(model.named_parameters()))
    optimizer.zero_grad()
    for _ in range(2):
        step(private, x)
    twice = summed(dict(model.named_parameters()))
    assert_sums(twice, {n: 2 * s for n, s in once.items()}, 1e-12)


def test_gradients_of_inputs_add_nothing() -> None:
    model, x = Net().double(), rows().requires_grad_()
    private, _ = warm(model, x)
    (found,) = torch.autograd.grad(sample_loss(private(x)).sum(), x)
    (wanted,) = torch.autograd.grad(sample_loss(_plain(model)(x)).sum(), x)
    assert relative_error(found, wanted) <= 1e-12
    assert not any(s.any() for s in summed(dict(model.named_parameters())).values())


def test_a_second_derivative_is_refused() -> None:
    model, x = Net().double(), rows().requires_grad_()
    private, _ = warm(model, x)
    with private_paused(private):
        (slope,) = torch.autograd.grad(private(x).sum(), x, create_graph=True)
    with pytest.raises(GraphError, match="differentiated only once"):
        slope.square().sum().backward()


def test_a_second_backward_pass_is_refused() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    loss = sample_loss(private(x)).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(GraphError, match="second backward pass"):
        loss.backward()


def test_paused() -> None:
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    with private_paused(private):
        step(private, x)
    loss = sample_loss(private(x)).mean()
    with private_paused(private):
        loss.backward()
    assert not any(s.any() for s in summed(dict(model.named_parameters())).values())
    step(private, x)
    check(model, optimizer, x)


def test_a_loss_of_what_the_model_does_not_return() -> None:
    model, x, seen = Net().double(), rows(), []
    private, _ = warm(model, x)
    model.second.register_forward_hook(lambda module, given, out: seen.append(out))
    private(x)
    with pytest.raises(FastclipError):
        seen[-1].sum().backward()


def test_autograd_grad_of_parameters_adds_nothing() -> None:
    model, x = Net().double(), rows().requires_grad_()
    private, optimizer = warm(model, x.detach())
    for wanted in ([*model.parameters()], [x, model.second.weight], [x]):
        given = torch.autograd.grad(sample_loss(private(x)).mean(), wanted, allow_unused=True)
        assert all((g is None) is (w is not x) for g, w in zip(given, wanted, strict=True))
        assert not any(s.any() for s in summed(dict(model.named_parameters())).values())
    loss = sample_loss(private(x)).mean()
    torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, retain_graph=True)
    loss.backward(inputs=[*model.parameters()])
    check(model, optimizer, x.detach())


def replaced(net: Net) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach().clone())


def exchanged(net: Net) -> None:
    net.first.weight, net.second.weight = net.second.weight, net.first.weight


def without_bias(net: Net) -> None:
    net.second.bias = None


def deleted(net: Net) -> None:
    del net.second.weight


@pytest.mark.parametrize(
    "change", [replaced, exchanged, without_bias, deleted], ids=lambda f: f.__name__
)
def test_contributions_are_of_what_the_forward_pass_used(change: Callable[[Net], None]) -> None:
    """Parameters are replaced after it, and put back after the backward pass."""
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    loss = sample_loss(private(x)).mean()
    before = {m: dict(m._parameters) for m in model.modules()}
    change(model)
    loss.backward()
    for module, parameters in before.items():
        module._parameters.clear()
        module._parameters.update(parameters)
    check(model, optimizer, x)
    assert count(private) == 4


def test_a_weight_beside_the_parameters() -> None:
    """Found before the parameter of its name, it is what the layer computes with: no bare call."""
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    object.__setattr__(model.second, "bias", torch.ones(D, dtype=torch.float64))
    wanted = Net().double()
    wanted.load_state_dict(model.state_dict())
    object.__setattr__(wanted.second, "bias", torch.ones(D, dtype=torch.float64))
    assert torch.allclose(private(x), wanted(x))


def test_tables_of_parameters_that_are_exchanged() -> None:
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    one, other = model.first, model.second
    one._parameters, other._parameters = other._parameters, one._parameters
    step(private, x)
    check(model, optimizer, x)


class Written(nn.Module):
    """A tensor of which autocast has made a copy becomes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        h = self.first(y)
        y.data = y.data * 3
        return h * self.second(y)


def test_a_copy_of_what_a_tensor_was() -> None:
    torch.manual_seed(0)
    model, x = Written(), rows().float()
    plain = copy.deepcopy(model)
    private = make_private(model, max_grad_norm=C)[1]
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            out, wanted = private(x), plain(x)
            sample_loss(out).mean().backward()
        assert torch.equal(out, wanted)


def test_what_a_failed_pass_has_left_is_let_go_of() -> None:
    fails, seen = [False], list[Any]()

    def may_fail(gradient: Tensor) -> None:
        if fails[0]:
            raise RuntimeError("stop")

    def does(net: Net, h: Tensor) -> Tensor:
        out = torch.tanh(net.second(h))
        seen.append(weakref.ref(out))
        if out.requires_grad:
            out.register_hook(may_fail)
        return out * 1.0

    model, x = Net(does).double(), rows()
    private, optimizer = warm(model, x)
    fails[0] = True
    with contextlib.suppress(RuntimeError):
        step(private, x)
    fails[0] = False
    optimizer.zero_grad()
    assert seen[-1]() is None
    step(private, x)
    assert count(private) == 4
    seen.clear()
    check(model, optimizer, x)


def test_a_pass_within_another() -> None:
    """The outer one ends with an error, and the sums are those of the inner one alone."""
    model, x, other = Net().double(), rows(), rows()
    private, optimizer = warm(model, x)
    inner, out = sample_loss(private(other)).mean(), private(x)
    out.register_hook(lambda g: inner.backward() and None)
    hooked = out * 1.0
    with pytest.raises(GraphError):
        sample_loss(hooked).mean().backward()
    check(model, optimizer, other)


SWAPPED = nn.Parameter(torch.randn(D, D, dtype=torch.float64))


def swap(layer: nn.Linear) -> None:
    layer.weight = SWAPPED


def register_again(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def cast(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.float()


def hook(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda g: 2 * g)


@pytest.mark.parametrize("change", [swap, register_again, cast, hook], ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_layer_that_changes(change: Callable[[nn.Linear], None], when: str) -> None:
    """An error, and nothing is lost: the sums are as before."""
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    if when == "within":
        handle = model.first.register_forward_hook(lambda *_: change(model.second))
    else:
        change(model.second)
    with pytest.raises((FastclipError, RuntimeError)):
        step(private, x)
    assert not any(s.any() for s in summed(dict(model.named_parameters())).values())
    if when == "within":
        handle.remove()


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_layer_that_is_frozen(when: str) -> None:
    """Before the step, or within the forward pass: it takes no part, and the others are exact."""
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    if when == "within":
        model.first.register_forward_hook(lambda *_: model.second.requires_grad_(False) and None)
    else:
        model.second.requires_grad_(False)
    step(private, x)
    check(model, optimizer, x)


def test_a_tensor_that_was_written_to() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)

    def write(gradient: Tensor) -> None:
        gradient.mul_(2)

    def written(net: Net, h: Tensor) -> Tensor:
        out = net.second(h)
        if out.requires_grad:
            out.register_hook(write)
        return out

    model.does, found = written, None
    try:
        step(private, x)
        found = summed(dict(model.named_parameters()))
    except FastclipError:
        return
    plain = Net(model.does).double()
    plain.load_state_dict(model.state_dict())
    grads = per_sample_gradients(plain, x)
    assert_sums(found, clipped_sum(grads, C), 1e-10)


def test_an_input_that_is_written_to_before_the_pass_ends() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    loss = sample_loss(private(x)).mean()
    loss.register_hook(lambda _: x.mul_(2) and None)  # the input of the first layer
    with pytest.raises((GraphError, RuntimeError)):
        loss.backward()


def test_another_thread_goes_the_usual_way() -> None:
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    handle = next(h for h, module in private.grad_state.bare.layers if module is model.second)
    found: list[Any] = []

    def run(*_: object) -> None:
        thread = threading.Thread(
            target=lambda: found.append(handle.bare and handle.bare(x, model.second))
        )
        thread.start()
        thread.join()

    model.first.register_forward_hook(run)
    for _ in range(4):
        optimizer.zero_grad()
        step(private, x)
    check(model, optimizer, x)
    assert count(private) == 4
    assert found
    assert not any(x is not None for x in found)


def test_transforms() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    model.does = lambda net, h: torch.func.vmap(net.second)(h)
    with pytest.raises(FastclipError):
        step(private, x)


def test_copies_and_what_evaluates() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    other = copy.deepcopy(private)
    with torch.no_grad():
        assert torch.equal(other(x), private(x))
    private.eval()
    assert torch.equal(private(x), _plain(model).eval()(x))


@pytest.mark.parametrize("inside", [nullcontext, torch.inference_mode], ids=["plain", "inference"])
def test_nodes_are_used(inside: Callable[[], Any]) -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    with inside():
        out = private(x)
    made = out.grad_fn is not None and bool(bare.nodes.slots_of(out.grad_fn))
    assert made is (inside is nullcontext)


def test_a_layer_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "SERVES", False)
    model, x = Net().double(), rows()
    private, optimizer = warm(model, x)
    step(private, x)
    check(model, optimizer, x)
    assert count(private) == 0


def test_switched_off_by_the_environment() -> None:
    code = "from fastclip.backward import bare; print(bare.SERVES, bare.WHY_NOT)"
    environment = {**os.environ, "FASTCLIP_NODES": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "FASTCLIP_NODES=0"]


def test_functional_calls() -> None:
    model, x = Net().double(), rows()
    private, _ = warm(model, x)
    other = {n: torch.randn_like(p).requires_grad_() for n, p in model.second.named_parameters()}
    model.does = lambda net, h: torch.func.functional_call(net.second, other, (h,))
    with pytest.raises(FastclipError):
        step(private, x)
