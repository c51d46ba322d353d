"""What private layers save for their backward pass is what they were given, whoever's hooks take it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fastclip.core import torch_names
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused

B, D, C = 6, 4, 0.3
Around = Callable[[], AbstractContextManager[Any]]


class Scaled:
    """int8, with one scale for the whole batch."""

    def __init__(self, x: Tensor) -> None:
        self.scale = x.abs().amax() / 127
        self.numbers = (x / self.scale).round().to(torch.int8)

    def back(self) -> Tensor:
        return self.numbers.to(self.scale.dtype) * self.scale


def compress(x: Tensor) -> Any:
    rows = x.is_floating_point() and x.dim() > 1 and not isinstance(x, nn.Parameter)
    return Scaled(x) if rows else x


def restore(kept: Any) -> Tensor:
    return kept.back() if isinstance(kept, Scaled) else kept


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(D, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.unsqueeze(1).expand(-1, 3, -1))[0].sum(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(D, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, D)), nn.Conv1d(1, 2, 3), nn.Flatten()),
    "a use": Raw,
    "recurrent": Recurrent,
}


class Inside(nn.Module):
    """The hooks are the model's own."""

    def __init__(self, inner: nn.Module, around: Around) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            return self.inner(x)


def check(net: nn.Module, outside: Around = nullcontext) -> None:
    """The clipped sums are those of samples alone."""
    x = torch.randn(B, D, dtype=torch.float64)
    truth = clipped_sum(per_sample_gradients(net, x), C)
    parameters = dict(net.named_parameters())
    _, model, _, _ = make_private(net, max_grad_norm=C, batch_size=B)
    with outside():
        loss = sample_loss(model(x)).mean()
    loss.backward()
    assert_sums(summed(parameters), truth, 1e-10)


def run(name: str, around: Around, inside: bool) -> None:
    """A step of a model with hooks of its own, or inside them."""
    torch.manual_seed(0)
    net = Inside(MODELS[name](), around if inside else nullcontext).double()
    check(net, nullcontext if inside else around)


known = pytest.mark.skipif(
    torch_names.saving_hooks.__name__ == "<lambda>", reason="this torch does not tell of such hooks"
)


@known
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_scale_of_the_batch_is_refused(name: str, inside: bool) -> None:
    """One large row makes the other rows' activations coarse, and so moves their gradients, too."""
    with refused("save_on_cpu|independently"):  # some are seen in a look
        run(name, lambda: saved_tensors_hooks(compress, restore), inside)


def same(x: Tensor) -> Tensor:
    return x


HARMLESS: dict[str, Around] = {
    "on the CPU": save_on_cpu,
    "as it is": lambda: saved_tensors_hooks(same, same),
    "detached": lambda: saved_tensors_hooks(lambda x: x.detach(), same),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("around", HARMLESS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_the_same_stays_exact(name: str, around: str, inside: bool) -> None:
    run(name, HARMLESS[around], inside)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_checkpoint_computes_again_is_exact(name: str) -> None:
    torch.manual_seed(0)
    check(Checkpointed(MODELS[name]()).double())
