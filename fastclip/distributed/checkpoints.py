"""State of a model as one process has it, so any number of ranks can resume it."""

from __future__ import annotations

from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fastclip.core.opacus_names import AbstractGradSampleHooks
from fastclip.core.torch_names import tree_map
from fastclip.distributed.processes import bare
from fastclip.distributed.shards import let_go

_WRAPPED = "_module."
"""Prefix of the keys of a model that make_private returned, as with Opacus."""


def model_of(module: Any) -> nn.Module:
    """Returns the model itself, if `module` is the module handle of make_private(wrap_model=False)."""
    handle = isinstance(module, AbstractGradSampleHooks) and not isinstance(module, nn.Module)
    return module._module if handle else module


def as_alone(module: nn.Module) -> Any:
    """Returns a holder of the model's state, with the keys and tensors that it has in one process.

    Args:
        module: a private model, as make_private returned it or in place, or a standard one.
    """
    returned = isinstance(module, AbstractGradSampleModule)
    model: Any = module._module if returned else module
    if is_sharded(model):
        return _Gathered(module, dict(module.named_parameters(remove_duplicate=False)))
    return module if bare(model) is model else _Alone(bare(model), _WRAPPED if returned else "")


def optimizer_alone(optimizer: Any) -> Any:
    """Returns a holder of the optimizer's state as one process has it."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DTensor) for p in held):
        return optimizer
    return _Gathered(optimizer, dict(enumerate(held)))


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard has sharded the model. Its parameters are shards again afterwards."""
    return let_go(model)


class Kept:
    """A state that all ranks gather together, for the first rank to write."""

    def __init__(self, of: Any, writes: bool, **options: Any) -> None:
        self._state = of.gather(writes, **options)

    def state_dict(self, **options: Any) -> Any:
        return self._state


class _Gathered:
    """The state of a model or an optimizer with sharded parameters.

    Args:
        parameters: the parameters by the names in the state, keys of a model or numbers of an optimizer.
    """

    def __init__(self, of: Any, parameters: dict[Any, Any]) -> None:
        self._of, self._parameters = of, parameters

    def gather(self, keeps: bool, **options: Any) -> dict[str, Any]:
        """Gathers whole tensors, on the CPU, if this rank `keeps` them. All ranks call this together."""

        def whole(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            found = x.full_tensor()
            return found.cpu() if keeps else None

        found: dict[str, Any] = tree_map(whole, self._of.state_dict(**options))
        return found

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> Any:
        held = state.get("state") if "param_groups" in state else None
        if held is None:
            sharded: Any = {key: self._sharded(key, value) for key, value in state.items()}
        else:
            own = {
                number: {name: self._sharded(number, value) for name, value in values.items()}
                for number, values in held.items()
            }
            sharded = {**state, "state": own}
        return self._of.load_state_dict(sharded, **options)

    def _sharded(self, key: Any, value: Any) -> Any:
        """Shards `value` as the parameter that it belongs to, if it has its shape."""
        own = self._parameters.get(key)
        if not isinstance(own, DTensor) or getattr(value, "shape", None) != own.shape:
            return value
        value = value.to(own.to_local().device)
        return distribute_tensor(value, own.device_mesh, own.placements)


class _Alone:
    def __init__(self, model: nn.Module, prefix: str) -> None:
        self._model, self._prefix = model, prefix

    def state_dict(self, **options: Any) -> dict[str, Any]:
        return self._model.state_dict(prefix=self._prefix, **options)

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> Any:
        bare_keys = {key.removeprefix(self._prefix): value for key, value in state.items()}
        if not bare_keys.keys() & self._model.state_dict().keys():  # as Opacus saves DPDDP
            bare_keys = {key.removeprefix("module."): value for key, value in bare_keys.items()}
        return self._model.load_state_dict(bare_keys, **options)
