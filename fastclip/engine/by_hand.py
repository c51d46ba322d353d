"""Private models that you wrap yourself, as with Opacus; the optimizer that you make later clips."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex
from weakref import WeakSet

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample import GradSampleModule as OpacusModule
from opacus.optimizers import DPOptimizer as OpacusOptimizer
from torch import distributed, nn

from fastclip.backward.state import GradientState
from fastclip.clipping import Clipping, resolve
from fastclip.clipping.resolve import named
from fastclip.core.checks import not_negative
from fastclip.core.opacus_names import OPACUS_MARK
from fastclip.core.opacus_names import GradSampleHooks as OpacusHooks
from fastclip.distributed.processes import bare, ranks_of, uncompiled
from fastclip.distributed.ranks import Ranks
from fastclip.engine import validation
from fastclip.engine.interception import not_pickled
from fastclip.engine.model import (
    FastGradSampleHooks,
    FastGradSampleModule,
    attach_state,
    held_by,
    is_claimed,
    uninstall,
)
from fastclip.engine.optimizer import FastDPOptimizer
from fastclip.errors import (
    ArgumentError,
    ArgumentTypeError,
    GraphError,
    StepError,
    UnsupportedLayerError,
)
from fastclip.ops.random import require_cipher

_ALL: WeakSet[ByHand] = WeakSet()
_UNCALLED = frozenset((
    "add_hooks", "capture_activations_hook", "capture_backprops_hook", "rearrange_grad_samples",
))  # fmt: skip
"""Methods in which Opacus computes per-sample gradients."""


class ByHand:
    """A model wrapped by hand. Opacus computes per-sample gradients until an optimizer is made.

    Attributes:
        earlier: Opacus' wrapper until then, in a list so that it is not a submodule.
    """

    batch_first: bool
    loss_reduction: str
    grad_state: GradientState
    earlier: list[Any]
    _module: nn.Module
    _allowed = True
    GRAD_SAMPLERS = OpacusModule.GRAD_SAMPLERS
    is_supported = OpacusModule.is_supported
    validate = OpacusModule.validate

    def _wrap(
        self, kind: type, m: nn.Module, batch_first: bool, loss_reduction: str, **options: Any
    ) -> None:
        """Wrap `m`; Opacus' class `kind` computes gradients until an optimizer is made."""
        if not isinstance(m, nn.Module):
            raise ArgumentTypeError(f"m expects a torch.nn.Module, got {type(m).__name__}.")
        validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if isinstance(m, AbstractGradSampleModule):
            raise UnsupportedLayerError(
                f"m is a private model already ({type(m).__name__}). Pass the model that it wraps.",
                doc="wrapped-model",
            )
        self._check_overrides()
        self.batch_first, self.loss_reduction = batch_first, loss_reduction
        self.earlier = [kind(m, batch_first=batch_first, loss_reduction=loss_reduction, **options)]
        self._module = m
        _ALL.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(self.__dict__, memo))
        _ALL.add(made)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise not_pickled()

    def __setstate__(self, state: Any) -> None:
        raise pickled_by_opacus(type(self).__name__)

    def _check_overrides(self) -> None:
        for own in type(self).__mro__:
            for name in _UNCALLED.intersection(vars(own) if not issubclass(ByHand, own) else ()):
                raise UnsupportedLayerError(
                    f"{own.__name__} overrides {name}, which this engine does not call. Register a rule "
                    "for the layer with @fastclip.rules.register_rule."
                )

    @property
    def clips(self) -> bool:
        """Whether an optimizer has been made, so that passes clip and sum."""
        return "grad_state" in self.__dict__

    def clip_with(
        self, optimizer: torch.optim.Optimizer, strategy: Clipping,
        max_grad_norm: float | Sequence[float], *, together: bool = False,
    ) -> GradientState:  # fmt: skip
        """Clip and sum for this optimizer from now on, and for no earlier one.

        Args:
            together: all processes train the same model together.

        Raises:
            GraphError: several processes train, but not together. Otherwise as make_private.
        """
        model, several = self._module, distributed.is_initialized()
        if several and not together and distributed.get_world_size() > 1:
            raise GraphError(
                "Several processes train, and DPOptimizer would add separate noise in each of them. Use "
                "DistributedDPOptimizer with DPDDP(GradSampleModule(model)).",
                doc="several-processes",
            )
        joined = several and together
        ranks = Ranks(model, distributed.group.WORLD) if joined else ranks_of(model)
        trained, frozen = held_by(optimizer, uncompiled(bare(model)), ranks)
        grad_state = GradientState(
            trained, strategy, max_grad_norm, mean_loss=self.loss_reduction == "mean",
            batch_axis=0 if self.batch_first else 1, frozen=frozen,
        )  # fmt: skip
        grad_state.clipping.ranks = ranks
        grad_state.batch.accumulation_allowed = self._allowed
        self.remove_hooks()
        attach_state(self, model, grad_state, self.batch_first, self.loss_reduction)
        return grad_state

    def remove_hooks(self) -> None:
        """Make the model non-private again."""
        while self.earlier:
            self.earlier.pop().cleanup()
        if self.clips:
            uninstall(self._module)
            del self.grad_state

    def cleanup(self) -> None:
        """Does the same as `remove_hooks`."""
        self.remove_hooks()

    @property
    def hooks_enabled(self) -> bool:
        """Whether passes contribute."""
        if self.clips:
            return not self.grad_state.calls.paused
        return all(own.hooks_enabled for own in self.earlier)

    def disable_hooks(self) -> None:
        """Let passes leave no per-sample gradients and no clipped sums until `enable_hooks`."""
        self._switch(on=False)

    def enable_hooks(self) -> None:
        """Let passes contribute again."""
        self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        for own in self.earlier:
            (own.enable_hooks if on else own.disable_hooks)()
        if self.clips:
            self.grad_state.calls.paused = not on

    def forbid_grad_accumulation(self) -> None:
        """Raise an error for two passes without a step between them."""
        self._accumulation(False)

    def allow_grad_accumulation(self) -> None:
        """Add up passes without a step between them."""
        self._accumulation(True)

    def _accumulation(self, allowed: bool) -> None:
        self._allowed = allowed
        if self.clips:
            self.grad_state.batch.accumulation_allowed = allowed
        for own in self.earlier:
            (own.allow_grad_accumulation if allowed else own.forbid_grad_accumulation)()


class GradSampleModule(ByHand, FastGradSampleModule):
    """Replaces opacus.GradSampleModule, and uses this engine once you make an optimizer.

    Until you make a `DPOptimizer` over its parameters, Opacus computes per-sample gradients in
    `p.grad_sample`. From then on backward passes clip and sum, and keep none.

    Args:
        m: the model, in training mode.
        batch_first: samples lie along axis 0 of its inputs; otherwise along axis 1.
        loss_reduction: "mean" (over the physical batch) or "sum".
        strict: raise Opacus' errors for unsupported modules before there is an optimizer.
        force_functorch: as in Opacus, before there is an optimizer.

    Raises:
        ArgumentTypeError, ArgumentError: naming the argument.
        NotImplementedError: as Opacus, if strict.

    Formal guarantee: none by itself; that of the `DPOptimizer` that is made over its parameters.
    """

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean",
        strict: bool = True, force_functorch: bool = False,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.grad_accumulation_hook = None
        options = {"strict": strict, "force_functorch": force_functorch}
        self._wrap(OpacusModule, m, batch_first, loss_reduction, **options)

    def __getattr__(self, name: str) -> Any:
        if "_modules" not in vars(self):  # unpickled, without __init__
            raise pickled_by_opacus(type(self).__name__)
        return super().__getattr__(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `p.grad`, and what passes have left on parameters."""
        if self.clips:
            super().zero_grad(set_to_none)
            return
        for own in self.earlier:
            own.set_grad_sample_to_none()
        nn.Module.zero_grad(self, set_to_none)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """The models that make_private returns are instances too."""
        asked = cls is GradSampleModule and FastGradSampleModule in other.__mro__
        return True if asked else NotImplemented


class GradSampleHooks(ByHand, FastGradSampleHooks):
    """Replaces opacus.grad_sample.GradSampleHooks. As `GradSampleModule`, but the model is unchanged."""

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean",
        strict: bool = True, force_functorch: bool = False,
    ) -> None:  # fmt: skip
        self.grad_accumulation_hook = None
        options = {"strict": strict, "force_functorch": force_functorch}
        self._wrap(OpacusHooks, m, batch_first, loss_reduction, **options)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """The module handles that make_private returns are instances too."""
        asked = cls is GradSampleHooks and FastGradSampleHooks in other.__mro__
        return True if asked else NotImplemented


def pickled_by_opacus(kind: str) -> StepError:
    """The error for an object of Opacus that is unpickled after `install`."""
    return StepError(
        f"A {kind} was pickled by Opacus and cannot be unpickled after fastclip.opacus.install(). "
        "Unpickle it before install(), and pass on its state_dict().",
        doc="wrapped-model",
    )


def module_of(optimizer: torch.optim.Optimizer) -> ByHand:
    """The model wrapped by hand that holds an optimizer's parameters.

    Raises:
        StepError: there is none, or there are several.
    """
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found = [m for m in list(_ALL) if not held.isdisjoint(m._module.parameters())]
    found = [m for m in found if m.clips or m.earlier]
    if len(found) != 1 or not held <= {*found[0]._module.parameters()}:
        raise StepError(
            "optimizer expects the parameters of one GradSampleModule, got some of none or of several. "
            "Wrap the whole model in one GradSampleModule first.",
            doc="optimizers",
        )
    return found[0]


@contextmanager
def unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """A context that removes the wrapper of a model wrapped by hand without an optimizer.

    After an error the model has its wrapper again. Any other module is unchanged.
    """
    own: list[Any] = []
    if isinstance(module, ByHand):
        own = [*module.earlier]
    elif type(module) is OpacusModule and not (is_claimed(module) or _is_trained(module)):
        own = [module]
    if not own:
        yield module
        return
    for wrapper in own:
        wrapper.cleanup()
    try:
        yield own[0]._module
    except BaseException:
        for wrapper in own:
            options = {"loss_reduction": wrapper.loss_reduction, "batch_first": wrapper.batch_first}
            wrapper.add_hooks(force_functorch=wrapper.force_functorch, **options)
            for p in wrapper._module.parameters():
                if p.requires_grad:
                    vars(p).update({"grad_sample": None, OPACUS_MARK: 0})
        raise
    if isinstance(module, ByHand):
        module.earlier.clear()


def _is_trained(module: nn.Module) -> bool:
    """Whether an optimizer of Opacus holds one of its parameters."""
    own = set(module.parameters())
    made = (x for x in gc.get_objects() if issubclass(type(x), OpacusOptimizer))
    return any(not own.isdisjoint(optimizer.params) for optimizer in made)


# -------------------------------------------------------------------------------------------------
# An optimizer that you make yourself, as with Opacus, over a model wrapped by hand.


class _Kind(type):
    """The optimizers that make_private returns are instances of DPOptimizer too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        asked = cls.__dict__.get("stands_for")
        return type.__instancecheck__(cls, instance) or (
            asked is not None and isinstance(instance, asked)
        )


class DPOptimizer(FastDPOptimizer, metaclass=_Kind):
    """Replaces opacus.optimizers.DPOptimizer, over the parameters of an earlier `GradSampleModule`.

    Args:
        optimizer: the inner optimizer.
        noise_multiplier: sigma, the standard deviation of the noise over the sensitivity.
        max_grad_norm: C; with clipping="per_layer" a list with one threshold per parameter tensor.
        expected_batch_size: B, the public denominator if loss_reduction is "mean".
        loss_reduction: "mean" divides the noisy sum by B; "sum" does not.
        generator: of the noise (torch's global one if None).
        secure_mode: cryptographic noise, without a generator.
        clipping: a strategy of fastclip.clipping, or the name of a preset.
        **options: arguments of the preset.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.
        StepError: no `GradSampleModule` holds the parameters.

    Formal guarantee: that of `FastDPOptimizer` for each real step. As with Opacus, steps are recorded
    only by a hook that you attach (`attach_step_hook`), and the sampling is not known.
    """

    stands_for = FastDPOptimizer
    _together = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, noise_multiplier: float,
        max_grad_norm: float | Sequence[float], expected_batch_size: float | None,
        loss_reduction: str = "mean", generator: torch.Generator | None = None,
        secure_mode: bool = False, clipping: str | Clipping = "flat", **options: Any,
    ) -> None:  # fmt: skip
        validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if generator is not None and secure_mode:
            raise ArgumentError(
                "Passing seed is prohibited in secure mode. Omit generator.", doc="secure-mode"
            )
        if secure_mode:
            require_cipher()
        noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        inner = (
            optimizer.original_optimizer if isinstance(optimizer, OpacusOptimizer) else optimizer
        )
        validation.check_inner_step(inner)
        clipping, options = named(clipping, options)
        strategy = resolve(clipping, options, noise_multiplier)
        grad_state = module_of(inner).clip_with(
            inner, strategy, max_grad_norm, together=self._together
        )
        super().__init__(
            inner, grad_state=grad_state, noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction,
            generator=generator, secure_mode=secure_mode,
        )  # fmt: skip

    def __setstate__(self, state: Any) -> None:
        if "grad_state" not in vars(self):
            raise pickled_by_opacus(type(self).__name__)
        super().__setstate__(state)


class DistributedDPOptimizer(DPOptimizer):
    """Replaces opacus.optimizers.DistributedDPOptimizer, over `DPDDP(GradSampleModule(model))`.

    It adds the sums of all ranks, and noise once. Arguments, errors and guarantee are those of
    `DPOptimizer`; B is the batch size of all ranks together.
    """

    _together = True

    def reduce_gradients(self) -> None:
        """Does nothing: the ranks exchange their sums before noise is added."""
