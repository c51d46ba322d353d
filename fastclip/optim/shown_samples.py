"""What Opacus' modes leave on parameters of single rows: it can be read, and is not saved with them.

Opacus sets per-sample gradients as attributes (`p.grad_sample`, a list of them where passes are
accumulated), of which a layer's tell the row that it has seen, and keeps the inputs of layers on them
until the backward pass (`module.activations`). Whoever saves a parameter or a module saves its
attributes, so they are put there as `ShownSum`, which pickles as an empty tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn

from fastclip._opacus import (
    OPACUS_HOOKS,
    OPACUS_PARAM_MONKEYPATCH_ATTRS,
    AbstractGradSampleHooks,
)
from fastclip._torch import at_end_of_pass, tree_leaves
from fastclip.backward.sums import ShownSum

_WATCHED: WeakSet[AbstractGradSampleHooks] = WeakSet()


def watch_passes(wrapper: AbstractGradSampleHooks) -> None:
    """What every pass of a model that Opacus' code has wrapped leaves on it is only shown.

    A run that is broken off between a pass and its step may save its model, too. The hook goes where
    `cleanup()` takes it away: among Opacus' own, or on the wrapper that is dropped.
    """
    if wrapper in _WATCHED:
        return
    _WATCHED.add(wrapper)
    own = getattr(wrapper._module, OPACUS_HOOKS, None)
    if own is not None:
        own.append(wrapper._module.register_forward_hook(_after_forward))
    elif isinstance(wrapper, nn.Module):
        wrapper.register_forward_hook(_after_forward)


def _after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
    for part in module.modules():
        for call in part.__dict__.get("activations", ()):
            _only_shown(call)
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(partial(_in_pass, ref(module)))
            return


def _in_pass(model: ref[nn.Module], gradient: Tensor) -> None:
    module = model()
    if module is not None:
        at_end_of_pass(lambda: only_shown(module.parameters()))


def only_shown(parameters: Iterable[nn.Parameter]) -> None:
    """Keep what Opacus has left on these parameters as what is not pickled; its values stay."""
    for p in parameters:
        own = p.__dict__
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
            held = own.get(name)
            if type(held) is Tensor:
                own[name] = _shown(held)
            elif type(held) is list:
                _only_shown(held)


def _only_shown(tensors: list[Any]) -> None:
    tensors[:] = [_shown(x) if type(x) is Tensor else x for x in tensors]


def _shown(held: Tensor) -> Any:
    """The same memory, and Opacus' marks on it."""
    shown = held.as_subclass(ShownSum)
    shown.__dict__.update(held.__dict__)
    return shown
