"""A module's own forward as a function of its tensors, with or without what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COMPUTE_WEIGHTS = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Pre-hooks of torch that set a weight made of parameters: part of what the module computes."""


class _Plain(nn.Module):
    """Calls the module's own forward, without the hooks on it: these belong to the call outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, _COMPUTE_WEIGHTS)]
        weights = {n: v for n, v in module.__dict__.items() if isinstance(v, Tensor) and hooks}
        try:
            for hook in hooks:
                hook(module, args)
            return type(module).forward(module, *args, **kwargs)
        finally:
            module.__dict__.update(weights)


def plain_forward(
    module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor, args: tuple, kwargs: dict
) -> Any:
    """What the module's forward returns for x with these tensors in the place of its parameters."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules())):
        raise TypeError(
            "torch.nn.utils.parametrize.cached() keeps weights that were computed once, outside; "
            "leave its block"
        )
    own = {f"module.{name}": value for name, value in parameters.items()}
    return functional_call(_Plain(module), own, (x, *args), kwargs)


@contextmanager
def nothing_left_behind(module: nn.Module) -> Iterator[None]:
    """Attributes that forward sets (attention maps, counters) are as before afterwards.

    A transform's tensors, which mean nothing outside of it, would stay there.
    """
    before = [(m, dict(m.__dict__)) for m in module.modules()]
    try:
        yield
    finally:
        for m, attributes in before:
            m.__dict__.clear()
            m.__dict__.update(attributes)


class Foreigners(TorchDispatchMode):
    """Gathers the tensors that operations inside meet and that come from nowhere.

    Such a tensor is neither an argument nor a parameter or buffer, nor was it made inside: it came
    by an attribute, a closure, a list or a global. Tensors of one number are left out.
    """

    def __init__(self, module: nn.Module, *known: Any) -> None:
        super().__init__()
        tensors = [t for t in tree_leaves((known, list(module.buffers()))) if isinstance(t, Tensor)]
        self._known = {id(t): t for t in tensors}
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(...)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.numel() > 1 and id(leaf) not in self._known:
                    self.found[id(leaf)] = leaf
        out = func(*args, **kwargs)
        self._known.update((id(t), t) for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def foreign_leaf(out: Tensor, own: list[Tensor]) -> Tensor | None:
    """A leaf other than `own` that the gradient of `out` would reach, or None."""
    known = {id(t) for t in own}
    if out.grad_fn is None:
        return out if out.requires_grad and id(out) not in known else None
    waiting, seen = [out.grad_fn], {out.grad_fn}
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return None


def where_from(module: nn.Module) -> str:
    """Attributes of the module that hold tensors which require a gradient, to name the culprit."""
    names = [
        f"{path}.{name}".lstrip(".")
        for path, m in module.named_modules()
        for name, value in m.__dict__.items()
        if isinstance(value, Tensor) and value.requires_grad
    ]
    return f"a tensor ({', '.join(names)})" if names else "a tensor (of a closure, list or global)"
