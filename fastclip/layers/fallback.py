"""Any other layer: vmap of the layer's own forward and backward, one sample at a time in effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_leaves

from fastclip import ops
from fastclip.errors import UnsupportedLayerError
from fastclip.layers.records import KeptRecord
from fastclip.layers.rule import LayerRule

if TYPE_CHECKING:
    from fastclip.private_layer import LayerBackward

HOW_TO_REGISTER = (
    "write its rule with @fastclip.layers.register_rule (examples/custom_layer.py), freeze it, or "
    "replace it"
)


class FallbackRule(LayerRule):
    """Exact but slow: the forward pass is computed again inside the backward pass."""

    name = "vmap"

    def __init__(self) -> None:
        self._verified: WeakSet[nn.Module] = WeakSet()
        """Modules whose output for one sample has been seen not to depend on the others."""

    def axis(self, module: Any) -> int | None:
        return 0

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        others = (*args[1:], *kwargs.values())
        if not args or not isinstance(args[0], Tensor) or _any_tensor(others):
            raise TypeError("its forward must take one tensor, first, and no other")
        return args[0], (args[1:], kwargs, _autocast(args[0].device.type))

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        before = _random_states()
        versions = {name: buffer._version for name, buffer in module.named_buffers()}
        out = module(x, *extra[0], **extra[1])
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
            raise TypeError("it draws random numbers in forward, which a second pass cannot repeat")
        if any(buffer._version != versions[name] for name, buffer in module.named_buffers()):
            raise TypeError("it changes its buffers in forward, so samples depend on each other")
        if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != x.shape[0]:
            raise TypeError("its output must be one tensor with one row a sample")
        if x.shape[0] > 1 and module not in self._verified:
            self._verify_independence(module, x, out, extra)
        return out, (x,)

    def _verify_independence(self, module: Any, x: Tensor, out: Tensor, extra: Any) -> None:
        """Once a module: the first sample alone must give the first row of the output."""
        alone = module(x[:1], *extra[0], **extra[1])
        if alone.shape != out[:1].shape or not torch.allclose(
            alone, out[:1], rtol=1e-2, atol=1e-4, equal_nan=True
        ):
            raise TypeError("its output for one sample depends on the other samples of the batch")
        self._verified.add(module)

    def backward(self, call: LayerBackward) -> Tensor | None:
        (x,) = call.saved
        module, (args, kwargs, autocast) = call.module, call.extra
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        trained = {name: p for name, p in parameters.items() if call.wants(name)}
        differentiable = x.is_floating_point()

        def gradients(row: Tensor, g: Tensor) -> Any:
            def run(own: dict[str, Tensor], row: Tensor) -> Tensor:
                merged = {**parameters, **own}
                return functional_call(module, merged, (row[None], *args), kwargs)[0]

            if differentiable:
                return vjp(run, trained, row)[1](g)
            return vjp(lambda own: run(own, row), trained)[1](g)

        try:
            with autocast():  # that of the forward pass, which is computed again
                results = vmap(gradients)(x, call.g)
        except Exception as error:
            raise UnsupportedLayerError(
                f"{call.path} ({type(module).__name__}) has no per-sample rule, and vmap of its "
                f"backward failed ({type(error).__name__}: {error}); {HOW_TO_REGISTER}"
            ) from error
        for name in trained:
            call.record(name, KeptRecord(ops.widen(results[0][name])))
        return results[1] if differentiable and call.needs_input_grad else None


def _autocast(device: str) -> Callable[[], AbstractContextManager]:
    """Brings back the autocast state of now; without its cache, which a transform must not fill."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype=dtype, cache_enabled=False)


def _any_tensor(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(values))


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
