"""What a probe does to a model's state, and to what its state hides."""

from __future__ import annotations

import random
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from fastclip.samples.state import applied_by
from tests.oracle import backward, check_exact, make_private, sample_loss
from tests.refusal import refused

B, D = 6, 4


class Gated(nn.Module):
    """Couples rows behind a gate of zero; `kind` says what else it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.head, self.kind = nn.Linear(D, D), nn.Linear(D, 2), kind
        self.gate = nn.Parameter(torch.zeros(1, D))
        self.positive = nn.Parameter(torch.full((1, D), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + self.gate * (h - h.mean(0))
        if self.kind == "logarithm":
            h = h * self.positive.log()
        out = self.head(h)
        return out.masked_fill(x[:, :2] > 0, -torch.inf) if self.kind == "masked" else out


@pytest.mark.parametrize("kind", ["plain", "logarithm", "masked"])
def test_a_gate_is_opened(kind: str) -> None:
    """Whatever signs other parameters need, and where outputs are infinite on purpose."""
    for _ in range(4):
        private = make_private(Gated(kind))[1]
        with refused("independently of the others"):
            private(torch.randn(B, D))


class Views(nn.Module):
    """Two parameters of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, values = nn.Linear(D, D), torch.zeros(1, D)
        self.scale, self.shift = nn.Parameter(values), nn.Parameter(values[:, :1])

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * (1 + self.scale) + self.shift


def test_parameters_that_are_views_are_put_back() -> None:
    model = Views()
    make_private(model)[1](torch.randn(B, D))
    assert not model.scale.any()


class Drawing(nn.Module):
    """Draws from a generator of its own, in the same way for any number of rows."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(D, 2), {"noise": generator}

    def forward(self, x: Tensor) -> Tensor:
        own, shape = self.own["noise"], (len(x), 2)
        if isinstance(own, torch.Generator):
            z = torch.randn(shape, generator=own)
        elif isinstance(own, random.Random):
            z = torch.full(shape, own.random())
        else:
            z = torch.from_numpy(own.normal(size=shape)).float()
        return self.first(x) * (1 + z)


@pytest.mark.parametrize(
    "make",
    [
        torch.Generator, lambda: random.Random(1), lambda: numpy.random.default_rng(1),
        lambda: numpy.random.RandomState(1),
    ],
)  # fmt: skip
def test_generators_of_a_model(make: Any) -> None:
    """They draw as if nobody had looked."""
    one, other = Drawing(make()), Drawing(make())
    other.load_state_dict(one.state_dict())
    if isinstance(one.own["noise"], torch.Generator):
        one.own["noise"].manual_seed(1)
        other.own["noise"].manual_seed(1)
    private, x = make_private(one)[1], torch.randn(B, D)
    assert torch.equal(private(x), other(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it may be in use already")
def test_a_gpu_that_is_not_in_use_is_not_seeded() -> None:
    """What is asked of it before it is first used would be done then: noise from a known seed."""
    asked = torch.cuda._lazy_seed_tracker
    torch.manual_seed(3)
    before = list(asked.get_calls())
    make_private(nn.Linear(4, 2))[1](torch.randn(6, 4))
    assert [id(call) for call in asked.get_calls()] == [id(call) for call in before]


@pytest.mark.parametrize("draw", ["numpy", "own"])
def test_a_mixup_that_draws_elsewhere(draw: str) -> None:
    """Rows are mixed now and then: with the numbers that torch does not know of, too."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.own = nn.Linear(D, 2), numpy.random.default_rng(1)

        def forward(self, x: Tensor) -> Tensor:
            own: Any = numpy.random if draw == "numpy" else self.own
            h = self.first(x)
            return h + 0.1 * h[torch.from_numpy(own.permutation(len(h)))].detach()

    private = make_private(Mixing())[1]
    with refused("independently of the others"):
        private(torch.randn(B, D))


class Stashing(nn.Module):
    """Fills containers in its forward, some of which its loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        self.aux: list[Tensor] = []
        self.last: deque[int] = deque(maxlen=3)
        self.seen: dict[str, Any] = {"sizes": set()}

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        self.aux.append(h.square().mean(1))
        self.last.append(len(x))
        self.seen["sizes"].add(len(x))
        return self.head(h)


def test_containers_are_put_back() -> None:
    model = Stashing()
    private = make_private(model)[1]
    out = private(torch.randn(B, D))
    (sample_loss(out) + sum(model.aux)).mean().backward()
    assert len(model.aux) == 1
    assert list(model.last) == [B]
    assert model.seen == {"sizes": {B}}


@pytest.mark.parametrize(
    ("at", "reads"), [(1, False), (2, False), *((at, True) for at in range(1, 9))]
)
def test_an_interrupted_look_leaves_no_trace(at: int, reads: bool) -> None:
    """Of traced runs alone, and of those in which values are compared, too."""
    calls: list[int] = []

    class Interrupted(Stashing):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            out = self.head(checkpoint(self.first, x, use_reentrant=True))
            if len(calls) == at:
                raise KeyboardInterrupt
            return out if not reads or int(out.isnan().sum()) >= 0 else -out

    model = Interrupted()
    nn.init.zeros_(model.head.weight)
    private, x = make_private(model)[1], torch.randn(B, D)
    before, state = torch.get_rng_state(), {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        private(x)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[n], p) for n, p in model.state_dict().items())
    assert "apply" not in vars(CheckpointFunction)
    assert private.grad_state.depth == 0
    backward(private, x)
    check_exact(Stashing(), x, dtype=torch.float64)


class Hooked(nn.Module):
    """Puts hooks on its layers in its first forward pass, and notes that they are there, as
    transformers' models do when they are asked for hidden states."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.head, self.hooked, self.everywhere = nn.Linear(D, 2), False, everywhere
        self.states: list[Tensor] = []
        self.handles: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            if self.everywhere:
                self.handles.append(register_module_forward_hook(self.note))
            else:
                self.handles += [layer.register_forward_hook(self.note) for layer in self.layers]
        self.states.clear()
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.states[1])  # of the second layer

    def note(self, module: nn.Module, given: Any, out: Tensor) -> None:
        if module in {*self.layers}:
            self.states.append(out)


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_of_the_first_forward_pass(everywhere: bool) -> None:
    """What each run of a look puts on would stay, and call with each step more."""
    torch.manual_seed(0)
    model = Hooked(everywhere)
    before = len(module._global_forward_hooks)
    private = make_private(model)[1]
    try:
        for _ in range(2):
            out = private(torch.ones(B, D) + 0.01 * torch.randn(B, D))
            sample_loss(out).mean().backward()
        x = torch.ones(B, D)
        expected = model.head(model.layers[1](model.layers[0](x).tanh()))
        torch.testing.assert_close(private(x), expected)
        assert [len(layer._forward_hooks) for layer in model.layers] == [1 - everywhere] * 3
        assert len(module._global_forward_hooks) == before + everywhere
        check_exact(Hooked(False), torch.randn(B, D), dtype=torch.float64)
    finally:
        model.states.clear()
        for handle in model.handles:
            handle.remove()


class Grown(nn.Module):
    """Gets a part in its first forward pass, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.grown = nn.ModuleList([nn.Linear(D, D)]), False
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.grown:
            self.parts.append(nn.Tanh())
            self.grown = True
        for part in self.parts:
            x = part(x)
        return self.head(x)


def test_parts_of_the_first_forward_pass() -> None:
    torch.manual_seed(0)
    model = Grown()
    check_exact(model, torch.randn(B, D), dtype=torch.float64)
    private = make_private(model)[1]
    for _ in range(2):
        sample_loss(private(torch.randn(B, D))).mean().backward()
        assert len(model.parts) == 2


def test_checkpoints_run_as_before_in_whatever_order_contexts_are_left() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(applied_by(lambda *args: 1))
    second.enter_context(applied_by(lambda *args: 2))
    assert CheckpointFunction.apply() == 2
    first.close()
    assert CheckpointFunction.apply() == 2
    second.close()
    assert "apply" not in vars(CheckpointFunction)
