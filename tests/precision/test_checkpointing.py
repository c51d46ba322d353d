"""Activation checkpointing, both kinds: what is recomputed in the backward pass is exact, too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fastclip
from tests.models.test_transformers import keep_float64
from tests.oracle import (
    DTYPES,
    TOLERANCE,
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    relative_error,
    sample_loss,
    summed,
)
from tests.precision.families import FAMILIES, TRANSFORMERS, gradients_under, losses_under

# transformers renames its switch; torch looks at the first, gradient-free runs of a checkpoint.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
KINDS = {"non-reentrant": False, "reentrant": True}


@pytest.fixture(autouse=True)
def float64_throughout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the case is in float64; elsewhere the engine's own casts are needed."""
    case = getattr(request.node, "callspec", None)
    if case is not None and case.params.get("dtype") == torch.float64:
        keep_float64(monkeypatch)


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Number of forward calls of the model's Linear layers (and transformers' Conv1D) inside."""
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    layers = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    yield calls
    for hook in hooks:
        hook.remove()


PAIRS = [(f, k) for f in TRANSFORMERS for k in KINDS]


def checkpointed(family: str, reentrant: bool) -> tuple:
    """The family's case, with transformers' own checkpointing of every block."""
    model, batch, loss_fn = FAMILIES[family]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model, batch, loss_fn


@pytest.mark.one_in(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_transformers(family: str, kind: str, dtype: torch.dtype) -> None:
    model, batch, loss_fn = checkpointed(family, KINDS[kind])
    check_exact(model, batch, loss_fn, dtype=dtype)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_under_autocast(family: str, kind: str) -> None:
    """The recomputation runs under the autocast of the forward pass; the very same numbers."""
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model, batch, loss_fn = checkpointed(family, KINDS[kind])
        if not on:
            model.gradient_checkpointing_disable()
        params = dict(model.named_parameters())
        _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
        losses = losses_under(torch.bfloat16, private, batch, loss_fn)
        with counted(model) as calls:
            fastclip.GradScaler().scale(losses.mean()).backward()
        assert bool(calls[0]) == on
        found.append((optimizer.per_sample_norms, summed(params)))
    (norms_off, sums_off), (norms_on, sums_on) = found
    assert torch.equal(norms_off, norms_on)
    assert relative_error(sums_on, sums_off) <= 1e-6


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("family", "kind"), [pair for pair in PAIRS if pair[0] in ("bert", "gpt2", "t5", "vit")]
)
def test_dropout(family: str, kind: str) -> None:
    """The recomputed masks are those of the forward pass: as without checkpointing."""
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model, batch, loss_fn = checkpointed(family, KINDS[kind])
        if not on:
            model.gradient_checkpointing_disable()
        dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
        assert dropouts
        for module in dropouts:
            module.p = 0.3
        params = dict(model.named_parameters())
        _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
        torch.manual_seed(7)
        backward(private, batch, loss_fn)
        found.append((optimizer.per_sample_norms, summed(params)))
    (norms_off, sums_off), (norms_on, sums_on) = found
    assert relative_error(norms_on, norms_off) <= 1e-6
    assert relative_error(sums_on, sums_off) <= 1e-6


class Convolutions(nn.Module):
    """Blocks of convolutions, recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions(kind: str, dtype: torch.dtype) -> None:
    check_exact(Convolutions(KINDS[kind]), torch.randn(4, 3, 9, 9), dtype=dtype)


class Shared(nn.Module):
    """One layer used inside and outside of the recomputed part."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.layer, self.head = reentrant, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.reentrant)
        return self.head(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_used_three_times(kind: str, dtype: torch.dtype) -> None:
    check_exact(Shared(KINDS[kind]), torch.randn(4, 6), dtype=dtype)


class Sequential(nn.Module):
    """torch's helper for whole stacks, under nested checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stack = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)])
        self.head = nn.Linear(6, 3)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self.stack, 3, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return self.head(checkpoint(self._inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nested(kind: str, dtype: torch.dtype) -> None:
    check_exact(Sequential(KINDS[kind]), torch.randn(4, 6), dtype=dtype)


SAVED: dict[str, Any] = {
    "products": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    "factors": [torch.ops.aten.mul.Tensor, torch.ops.aten.native_layer_norm.default],
    "everything": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
}


class Selective(nn.Module):
    """Layers and uses of parameters, of whose outputs some are kept."""

    def __init__(self, saved: Any) -> None:
        super().__init__()
        self.context = partial(create_selective_checkpoint_contexts, saved)
        self.first, self.norm, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.rand(5) + 0.5)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.first(x) * self.gain) ** 2 @ self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self._inner, x, use_reentrant=False, context_fn=self.context))


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6)], ids=str)
def test_selective(saved: str, shape: tuple[int, ...]) -> None:
    check_exact(Selective(SAVED[saved]), torch.randn(shape), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_several_steps(kind: str) -> None:
    """Batches of several sizes, as Poisson sampling draws them, with evaluation in between."""
    model = Convolutions(KINDS[kind]).double()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for rows in (3, 1, 4):
        x = torch.randn(rows, 3, 9, 9, dtype=torch.float64)
        grads = _gradients(model, x)
        optimizer.zero_grad()
        with torch.no_grad():
            private(x)
        backward(private, x)
        assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
        assert_sums(summed(params), clipped_sum(grads, 0.5), TOLERANCE[torch.float64])
        optimizer.step()


def _gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of an ordinary copy with the weights of now."""
    twin = Convolutions(False).double()
    twin.load_state_dict(model.state_dict())
    rows = []
    for i in range(len(x)):
        twin.zero_grad()
        sample_loss(twin(x[i : i + 1])).sum().backward()
        rows.append({n: p.grad.clone() for n, p in twin.named_parameters()})
    return {n: torch.stack([row[n] for row in rows]) for n in rows[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_float16_and_a_loss_scale(kind: str) -> None:
    """All of it at once: autocast to float16, a scale, recomputation."""
    model, x, dtype = Convolutions(KINDS[kind]), torch.randn(4, 3, 9, 9), torch.float16
    grads = gradients_under(dtype, copy.deepcopy(model), x, _loss, scale=1024.0)
    C = norms(grads).median().item()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    with torch.autocast("cpu", dtype=dtype):
        out = private(x)
    fastclip.GradScaler(init_scale=1024.0).scale(sample_loss(out.float()).mean()).backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 2e-4
    assert_sums(summed(params), clipped_sum(grads, C), 1e-3)


def _loss(out: torch.Tensor, _: None) -> torch.Tensor:
    return sample_loss(out.float())
