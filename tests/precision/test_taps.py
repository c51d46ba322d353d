"""torch.compile of a private model makes one graph of its layers, which leave their parts through taps.

With a backend that runs aten's graphs as they are; the slow part of test_compile.py compiles them.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.backward import tapped
from fastclip.core.compiler import graphs_made
from fastclip.errors import BatchSizeError, FastclipError, GraphError, StepError
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.precision.test_compile import WAYS, Net, fresh
from tests.refusal import refused

__all__ = ["fresh"]
TOLERANCE = 1e-10


def breaks() -> int:
    """Of graphs, so far."""
    return torch._dynamo.utils.counters["graph_break"].total()


class Reused(nn.Module):
    """A layer that is used twice, on inputs of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.tanh(self.layer(x)))
        return self.head(torch.relu(y) + y)


class Words(nn.Module):
    """A table, positions, and a table that is the last layer's weight too."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 9)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.table(x)).tanh())


def picture() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 2, stride=2, groups=2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def rows(count: int) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64)


def words(count: int) -> Tensor:
    return torch.randint(9, (count, 4))


def pictures(count: int) -> Tensor:
    return torch.randn(count, 2, 4, 4, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "net": (Net, rows),
    "reused": (Reused, rows),
    "words": (Words, words),
    "tied": (lambda: Words(tied=True), words),
    "picture": (picture, pictures),
    "partly_frozen": (partly_frozen, rows),
}


def steps(
    private: Any, optimizer: Any, twin: nn.Module, params: dict, draws: Iterator[Tensor], C: float
) -> None:
    """Steps on these batches, each compared with one sample at a time."""
    for x in draws:
        optimizer.zero_grad()
        backward(private, x)
        if len(x):
            grads = per_sample_gradients(twin, x)
            assert relative_error(optimizer.per_sample_norms, norms(grads)) <= TOLERANCE
            assert_sums(summed(params), clipped_sum(grads, C), TOLERANCE)
        optimizer.step()


def compiled(
    name: str, way: str = "after", backend: str = "aot_eager", counts: tuple[int, ...] = (5,) * 6
) -> tuple[Any, Any, nn.Module, dict]:
    """A model that has made its steps: private, optimizer, an ordinary twin, its parameters by name."""
    made, draw = MODELS[name]
    model = made().double()
    twin = copy.deepcopy(model)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    C = norms(per_sample_gradients(twin, draw(5))).median().item()
    private, optimizer = WAYS[way](model, backend, max_grad_norm=C, lr=0.0)
    steps(private, optimizer, twin, params, map(draw, counts), C)
    return private, optimizer, twin, params


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_one_graph(name: str, way: str) -> None:
    """Exact in every step; one graph, and no break."""
    compiled(name, way)
    assert graphs_made() == 1
    # In front of torch's own classes it traces a call, which ends where the private model begins.
    assert breaks() == (way == "before" and isinstance(MODELS[name][0](), nn.Sequential))


@pytest.mark.parametrize("name", ["net", "words"])
def test_batches_of_any_size(name: str) -> None:
    """Two graphs serve all, an empty batch none; no step makes another."""
    compiled(name, counts=(5, 7, 5, 7, 3, 0, 9, 12, 3, 1, 8, 4, 11, 6, 0, 5))
    assert breaks() == 0
    assert graphs_made() <= 3  # of one size, of any, and of one row


def test_layers_are_in_the_graph() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        names = (getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes)
        seen.append(" ".join(names))
        return graph.forward

    compiled("net", backend=backend)  # type: ignore[arg-type]
    assert len(seen) == 1
    assert seen[0].count("_in_graph") == 5  # one layer is used twice
    assert "sin" in seen[0]


def test_evaluation_is_one_graph_too() -> None:
    private, _, twin, _ = compiled("words")
    before, x = breaks(), words(3)
    with torch.no_grad():
        assert torch.allclose(private(x), twin(x), rtol=1e-12)
    assert breaks() == before


def test_mixed_precision() -> None:
    """What a layer has multiplied is what its tap gets: of bfloat16."""
    model = Net()
    twin = copy.deepcopy(model)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    private, optimizer = WAYS["after"](model, "eager", max_grad_norm=0.5, lr=0.0)
    plain, other = make_private(twin, max_grad_norm=0.5, lr=0.0)[1:3]
    for _ in range(5):
        x = torch.randn(5, 6)
        for trained, own in ((private, optimizer), (plain, other)):
            own.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = trained(x)
            sample_loss(out.float()).mean().backward()
        theirs = {n: p for n, p in twin.named_parameters() if p.requires_grad}
        assert_sums(summed(params), summed(theirs), 2e-2)
        optimizer.step()
        other.step()
    assert graphs_made() == 1


def test_inputs_of_another_length() -> None:
    """Shapes are learnt once for each length, in a step that runs as it is."""
    private, optimizer, twin, params = compiled("words")
    C = float(optimizer.max_grad_norm)
    steps(
        private, optimizer, twin, params, (torch.randint(9, (5, n)) for n in (4, 7, 7, 4, 7, 2)), C
    )
    assert breaks() == 0


def test_a_way_that_comes_late() -> None:
    """Code that torch.compile traces in a later step is looked at, as a way of operators would be."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.calls = nn.Linear(6, 8), nn.Linear(8, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.first(x))
            self.calls += self.training
            return self.last(y - y.mean(0) if self.calls > 8 else y)

    private, optimizer = WAYS["after"](Late(), "aot_eager", max_grad_norm=1.0)
    with refused("another sample", BatchSizeError):
        for _ in range(12):
            optimizer.zero_grad()
            backward(private, torch.randn(5, 6))
            optimizer.step()


def test_a_weight_that_is_replaced() -> None:
    private, _, twin, _ = compiled("net")
    twin.head.weight = nn.Parameter(torch.zeros_like(twin.head.weight))
    private.head.weight = nn.Parameter(torch.zeros_like(private.head.weight))
    with refused("were added to the model", StepError):
        backward(private, rows(5))


def test_a_setting_that_changes() -> None:
    """The layer's own, which the graph has as a constant."""
    private, optimizer, twin, params = compiled("net")
    for model in (private, twin):
        model.body[2].eps = 0.5
    C = float(optimizer.max_grad_norm)
    steps(private, optimizer, twin, params, map(rows, (5, 5, 5)), C)


def test_frozen_meanwhile() -> None:
    """The layer goes its usual way until it is planned anew."""
    private, optimizer, twin, params = compiled("net")
    for model in (private, twin):
        model.head.bias.requires_grad_(False)
    trained = {n: p for n, p in params.items() if n != "head.bias"}
    steps(private, optimizer, twin, trained, map(rows, (5, 5, 5)), float(optimizer.max_grad_norm))


def test_trained_later() -> None:
    """What a layer that normalizes leaves depends on which of its parameters are trained."""
    model = Net().double()
    twin = copy.deepcopy(model)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    private, optimizer = WAYS["after"](model, "aot_eager", max_grad_norm=0.5, lr=0.0)
    for trained in (False, True, False):
        for one in (model, twin):
            one.body[2].weight.requires_grad_(trained)
        own = {n: p for n, p in params.items() if p.requires_grad}
        steps(private, optimizer, twin, own, map(rows, (5,) * 7), 0.5)


def test_what_a_backward_pass_asks_for() -> None:
    """Only parameters that are named contribute; none where inputs are."""
    private, optimizer, twin, params = compiled("net")
    x = rows(5).requires_grad_()
    grads = per_sample_gradients(twin, x.detach())
    C = float(optimizer.max_grad_norm)
    optimizer.zero_grad()
    loss = sample_loss(private(x)).mean()
    (got,) = torch.autograd.grad(loss, x, retain_graph=True)
    want = torch.autograd.grad(sample_loss(twin(x)).mean(), x)[0]
    assert torch.allclose(got, want, rtol=1e-9)
    assert all(getattr(p, "summed_grad", None) is None for p in params.values())
    loss.backward(inputs=[params["head.weight"]])
    own = {"head.weight": grads["head.weight"]}
    assert_sums(summed({"head.weight": params["head.weight"]}), clipped_sum(own, C), TOLERANCE)
    assert params["head.bias"].summed_grad is None


def test_parts_of_a_batch_add_up() -> None:
    private, optimizer, twin, params = compiled("words")
    x, C = words(10), float(optimizer.max_grad_norm)
    optimizer.zero_grad()
    private.grad_state.batch.accumulation_allowed = True
    for part in x.split(5):
        optimizer.signal_skip_step(do_skip=part is not x)
        backward(private, part)
    assert_sums(summed(params), clipped_sum(per_sample_gradients(twin, x), C), TOLERANCE)


def test_indices_that_are_written_to() -> None:
    """The table's contribution needs them as they were."""
    private, optimizer, _, _ = compiled("words")
    x = words(5)
    optimizer.zero_grad()
    loss = sample_loss(private(x)).mean()
    x.zero_()
    with refused("modified in place", GraphError):
        loss.backward()


def test_paused_passes_leave_nothing() -> None:
    private, optimizer, _, params = compiled("net")
    optimizer.zero_grad()
    loss = sample_loss(private(rows(5))).mean()
    private.grad_state.bare.slots.paused = True
    try:
        loss.backward()
    finally:
        private.grad_state.bare.slots.paused = False
    assert all(getattr(p, "summed_grad", None) is None for p in params.values())


def test_a_second_pass_is_refused() -> None:
    with torch._functorch.config.patch(
        donated_buffer=False
    ):  # else torch refuses to keep the graph
        private, optimizer, _, _ = compiled("net")
        optimizer.zero_grad()
        loss = sample_loss(private(rows(5))).mean()
        loss.backward(retain_graph=True)
        with refused("backward", FastclipError):
            loss.backward()


def test_two_models_take_turns() -> None:
    first, second = compiled("net"), compiled("words")
    for (private, optimizer, twin, params), draw in ((first, rows), (second, words)) * 2:
        steps(private, optimizer, twin, params, iter([draw(5)]), float(optimizer.max_grad_norm))
    assert breaks() == 0
    assert not tapped.GIVEN


def test_a_forward_that_fails_leaves_no_taps() -> None:
    private, optimizer, twin, params = compiled("net")
    with pytest.raises(Exception, match=r"shape|size"):
        private(torch.randn(5, 7, dtype=torch.float64))
    assert not tapped.GIVEN
    steps(private, optimizer, twin, params, iter([rows(5)]), float(optimizer.max_grad_norm))


def test_the_model_can_go() -> None:
    made = [*compiled("net")]
    gone = weakref.ref(made[0].head)
    made.clear()
    torch._dynamo.reset()
    gc.collect()
    gc.collect()  # of what the first one has let go of
    assert gone() is None


class Seen(nn.Module):
    """What a layer gives leaves the model together with a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(torch.tanh(self.layer(x)))
        return y, y[:, -1]


def test_a_result_and_a_view_of_it() -> None:
    """Both take their gradients back."""

    def loss(out: tuple[Tensor, Tensor], _: None) -> Tensor:
        return sample_loss(out[0]) + 3 * sample_loss(out[1])

    model = Seen().double()
    twin = copy.deepcopy(model)
    params = dict(model.named_parameters())
    private, optimizer = WAYS["after"](model, "aot_eager", max_grad_norm=0.5, lr=0.0)
    for _ in range(5):
        x = torch.randn(4, 3, 6, dtype=torch.float64)
        grads = per_sample_gradients(twin, x, loss)
        optimizer.zero_grad()
        backward(private, x, loss)
        assert_sums(summed(params), clipped_sum(grads, 0.5), TOLERANCE)
        optimizer.step()
    assert graphs_made() == 1


class Flagged(Net):
    """A setting, and a flag for which it is looked at anew; or the setting is changed while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.others = False, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.body(x))
        if self.others:
            norm, before = self.body[2], self.body[2].eps
            norm.eps = self.others
            y = y + norm(y)
            norm.eps = before
            y = y + norm(y)
        return self.head(torch.tanh(y))


@pytest.mark.parametrize("inside", [False, True])
def test_settings_are_those_of_the_call(inside: bool) -> None:
    """A graph holds them: after it was planned anew, and where forward changes them for a call."""
    model = Flagged().double()
    model.others = 0.7 if inside else 0.0
    twin = copy.deepcopy(model)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    private, optimizer = WAYS["after"](model, "aot_eager", max_grad_norm=0.5, lr=0.0)
    steps(private, optimizer, twin, params, map(rows, (5,) * 6), 0.5)
    for one in (model, twin):
        one.body[2].eps, one.flag = 0.5, True
    steps(private, optimizer, twin, params, map(rows, (5,) * 6), 0.5)


@pytest.mark.parametrize("first", [4, 20])
def test_every_graph_is_looked_at(first: int) -> None:
    """The third one; and what runs as it is, once torch.compile has given up."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.late = nn.Linear(6, 8), nn.Linear(8, 3), False

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.first(x))
            kind = len(found) if len(found) < first else -1
            y = y * (1 + 0.1 * (kind % 12 if first > 12 else kind // 2))
            return self.last(y - y.mean(0) if kind < 0 else y)

    found: list[int] = []
    private, optimizer = WAYS["after"](Late(), "aot_eager", max_grad_norm=1.0)
    data = torch.randn(40, 5, 6)
    with refused("another sample", BatchSizeError):
        for x in data[: first + 3]:
            found.append(0)
            optimizer.zero_grad()
            backward(private, x)
            optimizer.step()
    optimizer.zero_grad()
    assert len(found) >= first


class Mixed(nn.Module):
    """A table, a layer on its float32 rows, and a part that leaves autocast where a flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x).mean(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=flag[0]):
            y = self.inner(y).float()
        return self.head(torch.tanh(y))


flag = [True]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_taps_are_of_what_is_multiplied(backend: str) -> None:
    """Under autocast of the model's own, which comes and goes: the same as without torch.compile."""
    model = Mixed()
    twin = copy.deepcopy(model)
    params, theirs = (dict(m.named_parameters()) for m in (model, twin))
    private, optimizer = WAYS["after"](model, backend, max_grad_norm=0.5, lr=0.0)
    plain, other = make_private(twin, max_grad_norm=0.5, lr=0.0)[1:3]
    for k in range(9):
        flag[0], x = k < 5, words(5)
        for trained, own in ((private, optimizer), (plain, other)):
            own.zero_grad()
            sample_loss(trained(x).float()).mean().backward()
        assert_sums(summed(params), summed(theirs), 2e-2 if flag[0] else 1e-5)
        optimizer.step()
        other.step()


def test_models_in_a_chain() -> None:
    """What the second one is given comes from the first, whose weights its walk does not reach."""
    made = [compiled("net") for _ in range(2)]
    first, second = made
    bridge = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(4):
        x = rows(5)
        for one in made:
            one[1].zero_grad()
        sample_loss(second[0](first[0](x) @ bridge)).mean().backward()
        for one in made:
            assert all(torch.isfinite(p.summed_grad).all() for p in one[3].values())
            one[1].step()
