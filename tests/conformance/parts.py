"""What the fast mode puts in the place of Opacus' parts, for tests that build the parts by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opacus.data_loader import DPDataLoader
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.optim import Optimizer

from fastclip.backward.state import GradientState
from fastclip.clipping import dp_sgd
from fastclip.data.draws import SampledBatches
from fastclip.data.loader import draw_securely, watch_draws
from fastclip.engine.model import FastGradSampleHooks, FastGradSampleModule
from fastclip.engine.optimizer import FastDPOptimizer
from fastclip.engine.validation import check_module


class Loader(DPDataLoader):
    """Opacus' loader as make_private leaves it: its sampler tells when a batch is drawn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        watch_draws(self, SampledBatches(independent=True, required=True))


def watched_sampler(**options: Any) -> Any:
    """Opacus' Poisson sampler as make_private leaves it."""
    loader: Any = SimpleNamespace(batch_sampler=UniformWithReplacementSampler(**options))
    watch_draws(loader, SampledBatches(independent=True, required=True))
    return loader.batch_sampler


def secure_sampler(**options: Any) -> Any:
    """Opacus' Poisson sampler as make_private leaves it in secure mode."""
    loader: Any = SimpleNamespace(batch_sampler=UniformWithReplacementSampler(**options))
    draw_securely(loader)
    return loader.batch_sampler


class Module(FastGradSampleModule):
    """The private model, without an engine; C is 1 until an `optimizer` says otherwise."""

    newest: GradientState

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean",
        strict: bool = True,
    ) -> None:  # fmt: skip
        grad_state = _grad_state(m, batch_first, loss_reduction)
        super().__init__(
            m, grad_state=grad_state, batch_first=batch_first, loss_reduction=loss_reduction
        )
        Module.newest = grad_state


class Hooks(FastGradSampleHooks):
    """The handle of wrap_model=False, without an engine."""

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean",
        strict: bool = True,
    ) -> None:  # fmt: skip
        grad_state = _grad_state(m, batch_first, loss_reduction)
        super().__init__(
            m, grad_state=grad_state, batch_first=batch_first, loss_reduction=loss_reduction
        )


def _grad_state(m: nn.Module, batch_first: bool, loss_reduction: str) -> GradientState:
    check_module(m)
    names = {p: name for name, p in m.named_parameters() if p.requires_grad}
    axis = 0 if batch_first else 1
    return GradientState(names, dp_sgd(), 1.0, mean_loss=loss_reduction == "mean", batch_axis=axis)


def optimizer(optimizer: Optimizer, max_grad_norm: float, **options: Any) -> FastDPOptimizer:
    """The private optimizer of the newest `Module`."""
    private = FastDPOptimizer(optimizer, grad_state=Module.newest, **options)
    private.max_grad_norm = max_grad_norm
    return private


def embedding_norms(
    layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Norms of the gradients of an embedding's samples, as Opacus' norm sampler returns them."""
    private = Module(layer, loss_reduction="sum")
    private(activations[0]).backward(backprops)
    norms = private.grad_state.per_sample_norms
    assert norms is not None
    return {layer.weight: norms}
