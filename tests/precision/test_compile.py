"""torch.compile before or after make_private.

The tests compile with backends that need no C++ compiler, the slow ones with inductor.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastclip
from fastclip.errors import UnsupportedLayerError
from tests.oracle import (
    TOLERANCE,
    Batch,
    LossFn,
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
from tests.precision.families import FAMILIES, gradients_under, losses_under
from tests.refusal import refused

F32 = TOLERANCE[torch.float32]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code of another test, and counters from zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Private layers with arithmetic in between, a shared one, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.body(x)) * 2
        y = torch.tanh(self.body[3](y) + y.sin())
        return self.head(torch.tanh(self.frozen(y)) - y)


def graphs() -> int:
    """Number of compiled graphs so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


Way = Callable[..., nn.Module]


def before(model: nn.Module, backend: str, **kwargs: object) -> tuple:
    """torch.compile(model), then make_private."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    compiled = torch.compile(model, backend=backend)
    return make_private(compiled, optimizer_params=parameters, **kwargs)[1:3]


def after(model: nn.Module, backend: str, **kwargs: object) -> tuple:
    """make_private, then torch.compile of what it returned."""
    private, optimizer = make_private(model, **kwargs)[1:3]
    return torch.compile(private, backend=backend), optimizer


def in_place(model: nn.Module, backend: str, **kwargs: object) -> tuple:
    """model.compile(), then make_private."""
    model.compile(backend=backend)
    return make_private(model, **kwargs)[1:3]


def after_in_place(model: nn.Module, backend: str, **kwargs: object) -> tuple:
    """make_private, then model.compile()."""
    private, optimizer = make_private(model, **kwargs)[1:3]
    private.compile(backend=backend)
    return private, optimizer


WAYS = {way.__name__: way for way in (before, after, in_place, after_in_place)}


def check(
    way: Callable[..., tuple], model: nn.Module, batch: Batch, loss_fn: LossFn = sample_loss, *,
    backend: str = "aot_eager", tol: float = F32,
) -> None:  # fmt: skip
    """Steps of a compiled private model, exact: two that are traced, and two with something compiled."""
    grads = per_sample_gradients(model, batch, loss_fn)
    C = norms(grads).median().item()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    private, optimizer = way(model, backend, max_grad_norm=C, lr=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        backward(private, batch, loss_fn)
        assert relative_error(optimizer.per_sample_norms, norms(grads)) <= tol
        assert_sums(summed(params), clipped_sum(grads, C), tol)
        optimizer.step()
    assert graphs() > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_exact(way: str, backend: str) -> None:
    check(WAYS[way], Net(), Batch((torch.randn(4, 6),)), backend=backend)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["before", "after"])
def test_convolutions(way: str) -> None:
    check(WAYS[way], *FAMILIES["resnet"]())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, way: str) -> None:
    check(WAYS[way], *FAMILIES[family]())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("way", ["before", "after"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "resnet"])
def test_inductor(family: str, way: str) -> None:
    check(WAYS[way], *FAMILIES[family](), backend="inductor")


@pytest.mark.parametrize("way", ["before", "after"])
def test_poisson_batches(way: str) -> None:
    """Batches of any size: at most one more graph, for sizes that are not known."""
    model = Net()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    twin = copy.deepcopy(model)
    private, optimizer = WAYS[way](model, "eager", max_grad_norm=0.5, lr=0.0)
    seen = []
    for rows in (4, 7, 3, 9, 12, 5, 8, 6, 11, 2, 10, 7):
        x = torch.randn(rows, 6)
        grads = per_sample_gradients(twin, x)
        optimizer.zero_grad()
        backward(private, x)
        assert relative_error(optimizer.per_sample_norms, norms(grads)) <= F32
        assert_sums(summed(params), clipped_sum(grads, 0.5), F32)
        optimizer.step()
        seen.append(graphs())
    first = next(n for n in seen if n)  # steps that are traced compile nothing
    assert seen[-1] == seen[-4] <= 2 * first


def test_a_loop_of_the_loader() -> None:
    """Poisson sampling's own batches, an empty one and one row among them."""
    model = Net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    data = torch.utils.data.TensorDataset(torch.randn(24, 6))
    _, private, optimizer, loader = make_private(
        torch.compile(model, backend="aot_eager"), dataset=data, batch_size=2, noise_multiplier=1.0,
        poisson_sampling=True, optimizer_params=parameters, generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    sizes = []
    for (x,) in loader:
        optimizer.zero_grad()
        sample_loss(private(x)).mean().backward()
        optimizer.step()
        sizes.append(len(x))
    assert 0 in sizes
    assert len(set(sizes)) > 2
    assert all(torch.isfinite(p).all() for p in parameters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_names_and_evaluation(way: str) -> None:
    """Parameters keep torch's names for compiled modules; evaluation gives the plain outputs."""
    model, x = Net(), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    private, optimizer = WAYS[way](model, "eager")
    backward(private, x)
    optimizer.step()
    plain.load_state_dict(
        {
            k.replace("_orig_mod.", "").replace("_module.", ""): v
            for k, v in private.state_dict().items()
        }
    )
    private.eval()
    with torch.no_grad():
        assert torch.equal(private(x), plain(x))
    private.load_state_dict(private.state_dict())


def test_back_to_an_ordinary_model() -> None:
    model, x = Net(), torch.randn(4, 6)
    compiled = torch.compile(model, backend="eager")
    parameters = [p for p in model.parameters() if p.requires_grad]
    private = make_private(compiled, optimizer_params=parameters)[1]
    backward(private, x)
    assert private.to_standard_module() is compiled
    sample_loss(compiled(x)).mean().backward()
    assert all(p.grad is not None for p in parameters)


def test_a_copy_is_private_too() -> None:
    model, x = Net(), torch.randn(4, 6)
    private, optimizer = before(model, "eager", max_grad_norm=1.0)
    twin = copy.deepcopy(private)
    backward(twin, x)
    assert all(p.grad is None for p in twin.parameters())
    assert optimizer.per_sample_norms is None


class Block(nn.Module):
    """A layer and what follows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * 2


def test_compiled_parts() -> None:
    """Blocks compiled one by one inside an ordinary model."""
    model, x = nn.Sequential(Block(6), Block(3)), torch.randn(4, 6)
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for i in range(2):
        model[i] = torch.compile(model[i], backend="eager")
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(3):  # what is traced is not compiled
        optimizer.zero_grad()
        backward(private, x)
    assert graphs() == 2  # none of a probe of two or three rows
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= F32
    assert_sums(summed(params), clipped_sum(grads, C), F32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mode", "whole"), [("fast", False), ("fast", True), ("hooks", False)])
def test_compiled_steps(mode: str, whole: bool) -> None:
    """torch.compile around the optimizer's step, or a whole training step: no release is compiled."""
    moved = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net()
        engine, private, optimizer, _ = make_private(
            model, grad_sample_mode=mode, noise_multiplier=1.0,
            noise_generator=torch.Generator().manual_seed(7),
        )  # fmt: skip

        def step(x: torch.Tensor, private: Any = private, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            sample_loss(private(x)).mean().backward()
            optimizer.step()

        take = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        train = torch.compile(step, backend="eager") if compiled else step
        for k in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(k))
            if whole:
                train(x)
                continue
            optimizer.zero_grad()
            backward(private, x)
            take()
        assert sum(steps for *_, steps in engine.accountant.history) == 3
        moved.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *moved))


def test_a_full_graph_is_refused() -> None:
    model = Net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with refused("Omit fullgraph", UnsupportedLayerError):
        make_private(compiled, optimizer_params=parameters)
    compiled(torch.randn(4, 6)).sum().backward()  # left as it was


def test_private_models_are_not_made_private_again() -> None:
    private = make_private(Net())[1]
    with refused("private already", UnsupportedLayerError):
        make_private(torch.compile(private, backend="eager"))


@pytest.mark.parametrize("way", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_loss_scale(dtype: torch.dtype, way: str) -> None:
    """With a backend that computes as eager PyTorch does, under the same autocast."""
    model, batch = Net(), Batch((torch.randn(4, 6),))
    grads = gradients_under(dtype, model, batch, _loss, scale=1024.0)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    C = norms(grads).median().item()
    private, optimizer = WAYS[way](model, "eager", max_grad_norm=C)
    loss = losses_under(dtype, private, batch, _loss).mean()
    fastclip.GradScaler(init_scale=1024.0).scale(loss).backward()
    tol = 5e-4 if dtype == torch.bfloat16 else 1e-4
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= tol
    assert_sums(summed(params), clipped_sum(grads, C), 10 * tol)


def _loss(out: torch.Tensor, _: None) -> torch.Tensor:
    return sample_loss(out.float())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model, batch, loss_fn = FAMILIES["gpt2"]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check(before, model, batch, loss_fn)
