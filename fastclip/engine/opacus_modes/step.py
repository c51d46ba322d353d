"""The step of Opacus' modes: sums of one logical batch, clipped at one C; raw gradients stay inside."""

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
# No optimizer but the private one may step on a model of Opacus' modes: there `p.grad` is raw.
#
# The gate of an inner optimizer (`Gate`) knows the one that was given to make_private. Any other,
# made before or after, is met here: one hook of torch's hears of every optimizer's step, and looks
# whether it holds a parameter of a living private model. All is held weakly, and ends with
# `cleanup()`.


@dataclass(frozen=True)
class _Claim:
    """What a private model's newest optimizer may step on."""

    parameters: frozenset[int]
    """Ids of all of the model's, frozen ones included: they may be trained again."""
    gate: Gate
    inner: weakref.ref[Optimizer]


_CLAIMS: WeakKeyDictionary[AbstractGradSampleHooks, _Claim] = WeakKeyDictionary()
_INSTALLED: list[Any] = []
"""The handle of the hook, once a model was made private by one of Opacus' modes."""


def watch_steps(wrapper: AbstractGradSampleHooks, inner: Optimizer, gate: Gate) -> None:
    """From now on only `inner`, while its gate is open, may step on the parameters of `wrapper`."""
    known = frozenset(id(p) for p in wrapper._module.parameters())
    _CLAIMS[wrapper] = _Claim(known, gate, weakref.ref(inner))
    if not _INSTALLED:
        _INSTALLED.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse raw gradients; to an optimizer of another model this is one look at its list.

    Raises:
        StepError: naming a parameter, and the way out.
    """
    if not _CLAIMS or isinstance(optimizer, DPOptimizer) or is_open(optimizer):
        return  # of a private one the inner optimizer is looked at
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
        return  # an optimizer inside the inner one (ZeRO, Lookahead): it steps on what is released
    mine = set(held)
    name = next((name for name, p in parameters.items() if id(p) in mine), None)
    if name is None:
        return  # the model's parameters were replaced, and the number is another tensor's now
    raise StepError(
        f"step() of {type(optimizer).__name__} was called on parameter {name!r} of a private model, "
        "whose gradient is not clipped and has no noise. Call step() of the optimizer that make_private "
        "returned, or model.cleanup() to train without privacy.",
        doc="optimizers",
    )


def _within(held: Iterable[int], parameters: Iterable[nn.Parameter], inner: Optimizer) -> bool:
    """Whether what an optimizer holds of a model is the inner optimizer's, too."""
    released = {id(p) for p in parameters_of(inner)}
    return {id(p) for p in parameters}.intersection(held) <= released


# -------------------------------------------------------------------------------------------------
# What Opacus' modes leave on parameters of single samples: it can be read, and is not saved with them.
#
# Opacus sets per-sample gradients as attributes (`p.grad_sample`, a list of them where passes are
# accumulated), of which a layer's tell the sample that it has seen, and keeps the inputs of layers on
# them until the backward pass (`module.activations`). Whoever saves a parameter or a module saves
# its attributes, so they are put there as `ShownSum`, which pickles as an empty tensor.


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


# -------------------------------------------------------------------------------------------------


@private
class OpacusStep(DPOptimizer):
    """Order and borders of Opacus' step; how it clips and adds noise is said by subclasses.

    Formal guarantee: a real step releases the clipped sums of one logical batch, all clipped at the
    thresholds for which its noise is scaled, once; no other gradient reaches the inner step. A
    `max_grad_norm` set in the middle of a logical batch takes effect at the next one.
    """

    _source: NoiseSource = SeededNoise()
    _ranks: Ranks | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        self.batch = LogicalBatch()
        self.hooks = StepHooks(self.batch)
        self.sums = ClippedSums()
        self._clipped_at: Any = None
        """Thresholds of the logical batch that is being gathered; None before its first sum."""
        self._known: set[nn.Parameter] | None = None
        self._model: nn.Module | None = None
        super().__init__(optimizer, **kwargs)
        self._gate = gate_of(self.original_optimizer)

    def bind(self, wrapper: Any, ranks: Ranks | None = None) -> None:
        """Tell the optimizer what make_private returned for its model, and who trains it."""
        self._ranks = ranks
        claim_for_opacus(wrapper, self.batch)
        watch_steps(wrapper, self.original_optimizer, self._gate)
        watch_passes(wrapper)
        self._model, self._known = wrapper._module, set(wrapper._module.parameters())

    # Thresholds

    def _thresholds(self) -> Any:
        """C of the next logical batch, as it is set now."""
        return float(self.max_grad_norm)

    def _in_use(self) -> Any:
        """C of the logical batch that is being gathered."""
        return self._thresholds() if self._clipped_at is None else self._clipped_at

    def _noise_std(self) -> float:
        return self.noise_multiplier * self._in_use()

    # Skipped steps

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus: the next step() only accumulates (BatchMemoryManager calls this)."""
        self.batch.signal(do_skip)

    def discard_logical_batch(self) -> None:
        """Give up the logical batch that is being gathered: its sums and gradients.

        For where a loop over a BatchMemoryManager is left before its end, or one of its physical
        batches is skipped. Nothing of it is released, so it costs nothing.
        """
        with self.batch.abandon():
            self._forget()
            self._forget_samples()
            if self._model is not None:
                forget_passes(self._model)
        keep_only(self, ())

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, per-sample gradients, and the sums unless they are of a split batch."""
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
        """Parameters of the model, those of no optimizer among them: Opacus' code writes to all."""
        return self._known or parameters_of(self)

    def _forget_samples(self) -> None:
        """Of frozen parameters, too: they may be trained again in the next batch."""
        for p in self._all():
            if p.requires_grad or hasattr(p, "grad_sample"):
                p.grad_sample = None  # type: ignore[attr-defined]

    # Step

    @disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Opacus': closure, `pre_step`, inner step; an inner step that fails leaves the gate shut."""
        self.batch.last_was_real = False
        try:
            return super().step(closure)
        finally:
            self._gate.shut()

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Everything before the inner step; False if this step only accumulates.

        A step that fails releases nothing, and `zero_grad` clears what it had.
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
            if not self.batch.contribute(self._rows()):
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
            except BaseException:  # not accounted (a hook failed, Ctrl-C)
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
        """All ranks are about to release the same step, clipped at the thresholds of its noise.

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
            **{"a digest of all thresholds": number_of(clipped)},
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
        """Refuse parameters without a per-sample gradient; Opacus' error where none has one."""
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

    def _rows(self) -> list[int]:
        """Samples of each backward pass since the last step."""
        held = self.params[0].grad_sample
        return [len(part) for part in (held if isinstance(held, list) else [held])]

    def _drop_samples(self) -> None:
        """The draw was empty, and the sample that there is is a placeholder."""
        for p in self.params:
            p.grad_sample = self._get_flat_grad_sample(p)[:0]

    @property
    def accumulated_iterations(self) -> int:
        """Batches that this step consumes, those of skipped steps among them."""
        return max(super().accumulated_iterations, self.batch.accumulated)

    def _move_threshold(self) -> None:
        """What a strategy does after a real step."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for this in its step(), which would skip steps on overflow."""
        raise StepError(
            "torch.amp.GradScaler does not scale the clipping threshold, and skips steps on overflow, "
            "which reveals something about raw gradients. Use bfloat16 without a scaler, or the fast "
            "mode with fastclip.GradScaler.",
            doc="mixed-precision",
        )
