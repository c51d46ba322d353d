"""The step of Opacus' modes: releases the sums of one logical batch, and never raw gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastclip.backward.guards import NOT_KEPT
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.backward.sums import ClippedSums, ShownSum
from fastclip.core.compiler import disable_dynamo
from fastclip.core.opacus_names import (
    OPACUS_HOOKS,
    OPACUS_MARK,
    OPACUS_PARAM_MONKEYPATCH_ATTRS,
    AbstractGradSampleHooks,
    forget_passes,
)
from fastclip.core.torch_names import at_end_of_pass, tree_leaves
from fastclip.distributed.ranks import Ranks
from fastclip.distributed.shards import number_of
from fastclip.engine.model import claim_for_opacus
from fastclip.engine.optimizer import private
from fastclip.engine.release import (
    Gate,
    StepHooks,
    digest_of_names,
    gate_of,
    is_open,
    keep_only,
    parameters_of,
)
from fastclip.errors import StepError
from fastclip.ops.noise import NoiseSource, SeededNoise

# -------------------------------------------------------------------------------------------------
# Only the private optimizer may step on a model of Opacus' modes, where `p.grad` is raw.
#
# The gate of an inner optimizer (`Gate`) covers the one that was passed to make_private. One torch hook
# covers all others: it sees every optimizer's step, and checks whether the optimizer holds a parameter
# of a living private model. All references are weak, and end with `cleanup()`.


@dataclass(frozen=True)
class _Claim:
    """The parameters that a private model's newest optimizer may change."""

    parameters: frozenset[int]
    """Ids of all of the model's parameters, including frozen ones, which may be trained later."""
    gate: Gate
    inner: weakref.ref[Optimizer]


_CLAIMS: WeakKeyDictionary[AbstractGradSampleHooks, _Claim] = WeakKeyDictionary()
_INSTALLED: list[Any] = []
"""The handle of the torch hook, once a model is private in one of Opacus' modes."""


def watch_steps(wrapper: AbstractGradSampleHooks, inner: Optimizer, gate: Gate) -> None:
    """Let only `inner`, while its gate is open, step on the parameters of `wrapper`."""
    known = frozenset(id(p) for p in wrapper._module.parameters())
    _CLAIMS[wrapper] = _Claim(known, gate, weakref.ref(inner))
    if not _INSTALLED:
        _INSTALLED.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error for a step on raw gradients. Optimizers of other models pass.

    Raises:
        StepError: naming a parameter, with a suggested fix.
    """
    if not _CLAIMS or isinstance(optimizer, DPOptimizer) or is_open(optimizer):
        return  # for a private optimizer the inner one is checked
    held = [id(p) for p in parameters_of(optimizer)]
    for wrapper, claim in list(_CLAIMS.items()):
        if not claim.parameters.isdisjoint(held):
            _check(optimizer, held, wrapper, claim)


def _check(
    optimizer: Optimizer, held: Iterable[int], wrapper: AbstractGradSampleHooks, claim: _Claim
) -> None:
    parameters = dict(wrapper._module.named_parameters())
    if not any(OPACUS_MARK in p.__dict__ for p in parameters.values()):
        del _CLAIMS[wrapper]  # it was cleaned up
        return
    inner = claim.inner()
    if claim.gate.passing and inner is not None and _within(held, parameters.values(), inner):
        return  # an optimizer inside the inner one (ZeRO, Lookahead) steps on released gradients
    mine = set(held)
    name = next((name for name, p in parameters.items() if id(p) in mine), None)
    if name is None:
        return  # the model's parameters were replaced, and another tensor has this id now
    raise StepError(
        f"step() of {type(optimizer).__name__} was called on parameter {name!r} of a private model, "
        "whose gradient is not clipped and has no noise. Call step() of the optimizer that make_private "
        "returned, or model.cleanup() to train without privacy.",
        doc="optimizers",
    )


def _within(held: Iterable[int], parameters: Iterable[nn.Parameter], inner: Optimizer) -> bool:
    """Whether the inner optimizer holds all parameters of the model that this optimizer holds."""
    released = {id(p) for p in parameters_of(inner)}
    return {id(p) for p in parameters}.intersection(held) <= released


# -------------------------------------------------------------------------------------------------
# Per-sample data that Opacus' modes leave on parameters can be read, but is not saved with them.
#
# Opacus sets per-sample gradients as attributes (`p.grad_sample`, a list if passes are accumulated),
# which reveal the samples that a layer has seen. It also keeps the inputs of layers until the backward
# pass (`module.activations`). Saving a parameter or a module saves its attributes, so these become a
# `ShownSum`, which pickles as an empty tensor.


_WATCHED: WeakSet[AbstractGradSampleHooks] = WeakSet()


def watch_passes(wrapper: AbstractGradSampleHooks) -> None:
    """Keep per-sample data that passes leave on a model of Opacus' modes out of saved files.

    A run that is interrupted between a pass and its step may save its model too. `cleanup()` removes
    the hook: it is among Opacus' own, or on the wrapper that is dropped.
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
    """Turn the data that Opacus left on these parameters into `ShownSum`; its values stay."""
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
    """A `ShownSum` of the same memory, with Opacus' marks."""
    shown = held.as_subclass(ShownSum)
    shown.__dict__.update(held.__dict__)
    return shown


# -------------------------------------------------------------------------------------------------


@private
class OpacusStep(DPOptimizer):
    """The order of Opacus' step. Subclasses define how to clip and to add noise.

    Formal guarantee: a real step releases the clipped sums of one logical batch once. All were clipped
    at the thresholds for which the noise is scaled, and no other gradient reaches the inner step. A
    `max_grad_norm` set in the middle of a logical batch takes effect at the next one.
    """

    _source: NoiseSource = SeededNoise()
    _ranks: Ranks | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        self.batch = LogicalBatch()
        self.hooks = StepHooks(self.batch)
        self.sums = ClippedSums()
        self._clipped_at: Any = None
        """Thresholds of the current logical batch; None before its first sum."""
        self._known: set[nn.Parameter] | None = None
        self._model: nn.Module | None = None
        super().__init__(optimizer, **kwargs)
        self._gate = gate_of(self.original_optimizer)

    def bind(self, wrapper: Any, ranks: Ranks | None = None) -> None:
        """Connect the optimizer with the private model and the ranks that train it."""
        self._ranks = ranks
        claim_for_opacus(wrapper, self.batch)
        watch_steps(wrapper, self.original_optimizer, self._gate)
        watch_passes(wrapper)
        self._model, self._known = wrapper._module, set(wrapper._module.parameters())

    # Thresholds

    def _thresholds(self) -> Any:
        """C of the next logical batch."""
        return float(self.max_grad_norm)

    def _in_use(self) -> Any:
        """C of the current logical batch."""
        return self._thresholds() if self._clipped_at is None else self._clipped_at

    def _noise_std(self) -> float:
        return self.noise_multiplier * self._in_use()

    # Skipped steps

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus: the next step() only accumulates (BatchMemoryManager calls this)."""
        self.batch.signal(do_skip)

    def discard_logical_batch(self) -> None:
        """Drops the current logical batch: its sums and gradients.

        Call this if you leave a loop over a BatchMemoryManager early, or skip one of its physical
        batches. Nothing is released, so the privacy cost is zero.
        """
        with self.batch.abandon():
            self._forget()
            self._forget_samples()
            if self._model is not None:
                forget_passes(self._model)
        keep_only(self, ())

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears gradients, per-sample gradients, and the sums unless a split batch is incomplete."""
        self._gate.shut()
        if self.batch.keeps_sums():
            self._forget_samples()
        else:
            with self.batch.clearing():
                self._forget()
                self._forget_samples()
        self.original_optimizer.zero_grad(set_to_none)

    def _forget(self) -> None:
        self.sums.clear(self.params)
        self._clipped_at = None

    def _all(self) -> Collection[nn.Parameter]:
        """All parameters of the model, even without an optimizer: Opacus' code writes to all."""
        return self._known or parameters_of(self)

    def _forget_samples(self) -> None:
        """Forget samples of frozen parameters too: they may be trained again in the next batch."""
        for p in self._all():
            if p.requires_grad or hasattr(p, "grad_sample"):
                p.grad_sample = None  # type: ignore[attr-defined]

    # Step

    @disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """As in Opacus: closure, `pre_step`, inner step. A failed inner step shuts the gate too."""
        self.batch.last_was_real = False
        try:
            return super().step(closure)
        finally:
            self._gate.shut()

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Runs everything before the inner step; returns False if this step only accumulates.

        A step that fails releases nothing, and `zero_grad` clears its sums.
        """
        self.batch.last_was_real = False
        self._gate.shut()
        only_shown(self._all())
        released = self.params
        if self._known is not None:
            self._check_known(released)
        if released:
            self._check_ready()
            self.batch.begin_pass()
            self.batch.check_no_units()
            if not self.batch.contribute(self._samples_of_passes()):
                self._drop_samples()
            skip = self.batch.next_skip()
            self.batch.step(skip=skip)
            self._is_last_step_skipped = skip
            if self._clipped_at is None:
                self._clipped_at = self._thresholds()
            self.clip_and_accumulate()
            if skip:
                return False
            try:
                self._meet()
                self.releasing = True
                self.add_noise()
                self.scale_grad()
                self.hooks.run(self)
            except BaseException:  # not recorded (a hook failed, Ctrl-C)
                keep_only(self, ())
                raise
            finally:
                self.releasing = False
            self._move_threshold()
            self.batch.count_release()
        keep_only(self, released)
        self._gate.open = True
        return True

    def _meet(self) -> None:
        """Check that all ranks release the same step, clipped at the thresholds of its noise.

        Raises:
            StepError: naming what differs, on every rank.
        """
        if self._ranks is None or self._model is None:
            return
        clipped, trained = self._clipped_at, set(self.params)
        self._ranks.in_step(
            batches=self.accumulated_iterations,
            expected_batch_size=self.expected_batch_size or 0.0,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=math.hypot(*clipped) if isinstance(clipped, list) else clipped,
            **{"digest of all thresholds": number_of(clipped)},
            **digest_of_names(n for n, p in self._model.named_parameters() if p in trained),
        )

    def _check_known(self, parameters: list[nn.Parameter]) -> None:
        assert self._known is not None
        unknown = sum(p not in self._known for p in parameters)
        if unknown:
            raise StepError(
                f"{unknown} of the optimizer's trainable parameters do not belong to its private model, "
                "so make_private does not cover them. Give them a separate optimizer.",
                doc="optimizers",
            )

    def _check_ready(self) -> None:
        """Raise an error for parameters without a per-sample gradient; Opacus' if none has one."""
        lacking = [p for p in self.params if getattr(p, "grad_sample", None) is None]
        if any(getattr(p, "grad_sample", None) is NOT_KEPT for p in self.params):
            raise StepError(
                "Per sample gradient is not initialized, because another optimizer in the fast mode "
                "clips this model. Call step() of that one.",
                doc="optimizers",
            )
        if any(getattr(p, OPACUS_MARK, 0) for p in lacking):
            raise StepError(
                "Per sample gradient is not initialized, because no complete backward pass followed a "
                "forward pass. Call optimizer.discard_logical_batch(), continue with the next batch, "
                "and evaluate under torch.no_grad()."
            )
        if 0 < len(lacking) < len(self.params):
            names = {} if self._model is None else {p: n for n, p in self._model.named_parameters()}
            raise StepError(
                "Per sample gradient is not initialized, because the last backward pass did not reach "
                f"{len(lacking)} of the trained parameters ({names.get(lacking[0], 'no name')}, ...). "
                "Freeze them, or omit grad_sample_mode to use the fast mode."
            )
        for p in lacking:
            self._get_flat_grad_sample(p)

    def _samples_of_passes(self) -> list[int]:
        """Number of samples in each backward pass since the last step."""
        held = self.params[0].grad_sample
        return [len(part) for part in (held if isinstance(held, list) else [held])]

    def _drop_samples(self) -> None:
        """Drop the placeholder sample of an empty sampled batch."""
        for p in self.params:
            p.grad_sample = self._get_flat_grad_sample(p)[:0]

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches that this step consumes, including those of skipped steps."""
        return max(super().accumulated_iterations, self.batch.accumulated)

    def _move_threshold(self) -> None:
        """Update the strategy after a real step."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler.step(), which would skip steps on overflow."""
        raise StepError(
            "torch.amp.GradScaler does not scale the clipping threshold, and skips steps on overflow, "
            "which reveals something about raw gradients. Use bfloat16 without a scaler, or the fast "
            "mode with fastclip.GradScaler.",
            doc="mixed-precision",
        )
