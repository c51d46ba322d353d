"""The model that make_private returns, who owns its parameters, and the way back."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Spent, union
from fastclip.backward.guards import arm, is_batch_norm, say_untrained
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.backward.state import GradientState, follow_shards
from fastclip.core.compiler import is_one_graph, pass_over
from fastclip.core.opacus_names import (
    OPACUS_MARK,
    OPACUS_PARAM_MONKEYPATCH_ATTRS,
    AbstractGradSampleHooks,
)
from fastclip.distributed.processes import (
    bare,
    check_not_replicated,
    hold_back,
    is_compiled,
    reduce_again,
    uncompiled,
)
from fastclip.distributed.ranks import Ranks, whole_of
from fastclip.engine import interception, validation
from fastclip.engine.bare import may_be_bare
from fastclip.engine.forward_wrapper import (
    PartForwardWrapper,
    RecurrentForwardWrapper,
    RootForwardWrapper,
    SortedForwardWrapper,
    call_root,
)
from fastclip.engine.interception import ATTRIBUTE, LayerHook, attach, detach
from fastclip.engine.own_forward import check_copied
from fastclip.errors import ArgumentError, ArgumentTypeError, UnsupportedLayerError, say
from fastclip.ops.noise import DrawnStates
from fastclip.rules import find_rule
from fastclip.rules.protocol import MARKS

# -------------------------------------------------------------------------------------------------
# What the weights of a model have been trained with: whoever trains it next counts it, too.
#
# `cleanup()` ends one engine's hold on a model, and takes none of its steps out of the weights.
# What they have spent is kept in memory for the modules whose own parameters were trained, weakly,
# so that it goes with them into another model. A copy that is made of them afterwards has none of
# it.


class Trained(NamedTuple):
    """What one ledger says of a model's steps, and where their noise came from."""

    spent: Spent
    drawn: DrawnStates | None
    """None in a copy."""

    def covers(self, other: Trained) -> bool:
        """Whether it counts all that the other does."""
        own = self.spent.segments
        return union(own, other.spent.segments) == own


_TRAINED: WeakKeyDictionary[nn.Module, list[Trained]] = WeakKeyDictionary()
"""Modules that were let go."""


def owners(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that have parameters of their own to be trained."""
    return [
        module
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]


def trained_by(batch: LogicalBatch) -> list[Trained]:
    """What a model was trained with whose steps release this batch; nothing before make_private."""
    spent = batch.spent
    ledger = getattr(batch.account, "ledger", None)
    return [] if spent is None else [Trained(spent, None if ledger is None else ledger.drawn)]


def let_go(modules: Iterable[nn.Module], batch: LogicalBatch) -> None:
    """Who releases `batch` takes no more steps on these modules."""
    now = trained_by(batch)
    for module in modules if now else ():
        before = [each for each in _TRAINED.get(module, []) if not now[0].covers(each)]
        _TRAINED[module] = before + now


def let_go_with(wrapper: object, modules: Iterable[nn.Module], batch: LogicalBatch) -> None:
    """The same once `wrapper` is gone; its `cleanup()` is Opacus', which tells nobody."""
    held = [ref(module) for module in modules]

    def end() -> None:
        let_go([module for each in held if (module := each()) is not None], batch)

    finalize(wrapper, end).atexit = False


def found_in(model: nn.Module) -> list[Trained]:
    """What modules of `model` were trained with when they were let go."""
    return list(
        {id(each): each for module in model.modules() for each in _TRAINED.get(module, [])}.values()
    )


# -------------------------------------------------------------------------------------------------
# One engine for each parameter: which are alive, and what they hold.
#
# Two engines that clip the same parameter would each release its share of every sample: 2 C for
# noise of C. All is held weakly: an engine whose model was collected, or cleaned up, owns nothing.


_FAST: WeakKeyDictionary[nn.Module, ref[GradientState]] = WeakKeyDictionary()
"""Models that were intercepted, and their gradient states."""
_OPACUS: WeakSet[AbstractGradSampleHooks] = WeakSet()
"""What make_private returned in Opacus' modes."""
_BATCH = "fastclip_batch"
"""Its attribute: the logical batch of its newest optimizer, which a copy has, too."""

_TWICE = "each of the two engines would release every sample once"


def held_by(
    optimizer: Any, model: nn.Module, ranks: Ranks | None
) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, str]]:
    """The optimizer's parameters and their names, in its order: the trained ones, and the others.

    Args:
        model: whole on all ranks; of trained ones the parameters are given with which it computes.
    """
    name = {p: path for path, p in model.named_parameters()}
    held = [(p, whole_of(ranks, p)) for group in optimizer.param_groups for p in group["params"]]
    trained = {own: name[own] for p, own in held if p.requires_grad}
    return trained, {p: name[own] for p, own in held if not p.requires_grad}


def claim(model: nn.Module, grad_state: GradientState) -> None:
    """`model` is intercepted for `grad_state`, which owns its parameters until it is retired."""
    _FAST[model] = ref(grad_state)


def claim_for_opacus(wrapper: AbstractGradSampleHooks, batch: LogicalBatch) -> None:
    """`wrapper` has a new optimizer; those that its parameters had before release nothing any more."""
    mine = {p for p in wrapper._module.parameters() if p.requires_grad}
    for other in list(_OPACUS):
        if other is wrapper or not mine.isdisjoint(other._module.parameters()):
            other.__dict__[_BATCH].retire()
    wrapper.__dict__[_BATCH] = batch
    let_go_with(wrapper, owners(wrapper._module), batch)
    _OPACUS.add(wrapper)


def is_claimed(wrapper: nn.Module) -> bool:
    """It is what make_private returned in one of Opacus' modes."""
    return _BATCH in wrapper.__dict__


def check_free(model: nn.Module, parameters: Mapping[nn.Parameter, str], again: Any = None) -> None:
    """Refuse a model that a living engine holds, as a whole, in part or by a parameter.

    Args:
        parameters: those that are to become private, and their names.
        again: what an earlier make_private returned, if this one goes on with the same model.

    Raises:
        UnsupportedLayerError: naming the module or parameter, with a suggested fix.
    """
    if _conflict(model, parameters, again) is None:
        return
    gc.collect()  # models refer to themselves: one that was dropped may linger
    conflict = _conflict(model, parameters, again)
    if conflict is not None:
        raise UnsupportedLayerError(conflict, doc="wrapped-model")


def go_on_with(
    ledger: Ledger, again: Any, model: nn.Module, trained: Mapping[nn.Parameter, str]
) -> None:
    """A model that may be made private under this ledger, with all that its steps have spent so far.

    Args:
        again: what any earlier make_private returned, or a copy of that, if the model is that.
        trained: the parameters that are to become private, and their names.

    Raises:
        UnsupportedLayerError: another engine holds it. ArgumentError: it cannot count these steps.
    """
    check_free(model, trained, again=again)
    before = found_in(model)
    for batch in _batches_of(again, model):
        before += trained_by(batch)
    known = ledger.segments()
    segments, protected = known, ledger.protected
    try:
        for spent, drawn in before:
            if drawn is not None:
                ledger.drawn.join(drawn)
            segments = union(segments, spent.segments)
            protected = protected.beside(spent.protected)
        if segments == known:
            return
        ledger.join(segments, protected)
    except ArgumentError as error:
        raise ArgumentError(
            f"This engine cannot count the steps in the model's weights: {str(error).rstrip('.')}. To "
            "state a separate epsilon, call cleanup() on what make_private returned and pass a "
            "copy.deepcopy of the model.",
            doc="privacy-budget",
        ) from error
    say(
        "Another FastPrivacyEngine trained this model before, and this engine counts those steps in "
        "addition to its own. To start anew, pass a newly initialized model.",
        doc="privacy-budget",
    )


def _batches_of(again: Any, model: nn.Module) -> list[LogicalBatch]:
    """Whose releases are in the weights of a model, and may go on."""
    inside = set(owners(model))
    found = [w for w in list(_OPACUS) if not inside.isdisjoint(owners(w._module))]
    if again is not None and again not in found:
        found.append(again)
    batches = [
        w.grad_state.batch if hasattr(w, "grad_state") else w.__dict__.get(_BATCH) for w in found
    ]
    return [batch for batch in batches if batch is not None and not batch.retired]


def _conflict(model: nn.Module, parameters: Mapping[nn.Parameter, str], again: Any) -> str | None:
    grad_state = getattr(again, "grad_state", None)
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        handle = module.__dict__.get(ATTRIBUTE)
        if handle is not None and handle.grad_state is not grad_state:
            return (
                f"{where} is private already, and {_TWICE}. Call cleanup() on what make_private "
                "returned first, or pass that in the same mode to resume."
            )
        for wrapper in _opacus_engines(module):
            if wrapper is not again and _alive(wrapper):
                return (
                    f"{where} is private already by Opacus' {type(wrapper).__name__}, and {_TWICE}. "
                    "Call cleanup() on what make_private returned first."
                )
    for other in _grad_states():
        for p in other.names if other is not grad_state else ():
            if p in parameters:
                return (
                    f"Parameter {parameters[p]!r} is also {other.names[p]!r} of another private "
                    f"model, and {_TWICE}. Put both into one model, or call cleanup() on what "
                    "make_private returned for the other."
                )
    for wrapper in list(_OPACUS):
        for p in wrapper._module.parameters() if wrapper is not again else ():
            if p in parameters and OPACUS_MARK in p.__dict__:
                return (
                    f"Parameter {parameters[p]!r} belongs to another private model too "
                    f"({type(wrapper).__name__}), and {_TWICE}. Put both into one model, or call "
                    "cleanup() on what make_private returned for the other."
                )
    return None


def _grad_states() -> Iterator[GradientState]:
    for held in list(_FAST.values()):
        grad_state = held()
        if grad_state is not None and not grad_state.batch.retired:
            yield grad_state


def _opacus_engines(module: nn.Module) -> Iterator[AbstractGradSampleHooks]:
    """The wrapper that this module is, and those whose hooks it carries (plain Opacus', too)."""
    for found in (
        module,
        *(getattr(hook, "__self__", None) for hook in module._forward_hooks.values()),
    ):
        if isinstance(found, AbstractGradSampleHooks) and not hasattr(found, "grad_state"):
            yield found


def _alive(wrapper: AbstractGradSampleHooks) -> bool:
    """Whether it has not been cleaned up."""
    return any(OPACUS_MARK in p.__dict__ for p in wrapper._module.parameters())


# -------------------------------------------------------------------------------------------------


FOLLOWED = "where it is used"
"""What the plan says of parameters without a layer's rule."""


def install(model: nn.Module, grad_state: GradientState) -> None:
    """Intercept every trainable layer of `model`; on an error the model is left as it was.

    A compiled model stays compiled, in the regions between its private layers.
    """
    check_free(model, grad_state.names)
    check_copied(model)
    for path, module in model.named_modules():
        if is_compiled(module) and is_one_graph(module):
            raise UnsupportedLayerError(
                f"{path or 'The model'} is compiled with fullgraph=True, but private layers run "
                "between compiled regions. Omit fullgraph.",
                doc="compile-and-graphs",
            )
    try:
        _Installer(uncompiled(bare(model)), grad_state).run()
        follow_shards(grad_state)
        arm(grad_state)
    except Exception:
        uninstall(model)
        raise
    say_untrained(grad_state.others)
    claim(model, grad_state)
    hold_back(grad_state.clipping.ranks)


def uninstall(model: nn.Module) -> None:
    """Give every module its own forward back and forget what the engine kept on parameters.

    The optimizers of the gradient states involved release nothing any more.
    """
    for module in model.modules():
        interception.detach_entries(module)
        validation.give_back(module)
        handle = module.__dict__.get(ATTRIBUTE)
        if handle is not None:
            if any(True for _ in module.parameters(recurse=False)):
                let_go([module], handle.grad_state.batch)
            handle.grad_state.retire()
            loss, handle.grad_state.model_loss = handle.grad_state.model_loss, None
            if loss is not None:
                loss.give_back(model)
            detach(module)
    for parameter in model.parameters():
        for name in ("grad_sample", "summed_grad"):
            parameter.__dict__.pop(name, None)
    reduce_again(model)


class _Installer:
    def __init__(self, model: nn.Module, grad_state: GradientState) -> None:
        self.model, self.grad_state = model, grad_state
        self.handles: dict[nn.Module, LayerHook] = {}
        self.owners: dict[nn.Parameter, int] = {}

    def run(self) -> None:
        """Give every trainable module its rule or scope, then intercept them all at once."""
        for path, module in self.model.named_modules():
            validation.write_out(module)
            if is_batch_norm(module):
                self.grad_state.batch_norms.append((path, module))
            if isinstance(module, DPRNNBase):
                self._handle(path, module).scopes.append(RecurrentForwardWrapper())
            elif _own(module) or is_parametrized(module):
                self._layer(path, module)
        self._handle("", self.model).scopes.append(RootForwardWrapper())
        for module, handle in self.handles.items():
            if handle.rule is None:
                interception.attach_methods(handle.path, module, self.grad_state)
                if module is not self.model:
                    handle.scopes.append(PartForwardWrapper())
            attach(module, handle)
        may_be_bare(self.grad_state.bare, self.handles)
        for path, module in self.model.named_modules():
            if self._is_part(module):
                interception.attach_part(path, module, self.grad_state)
        self.grad_state.calls.known = set(self.model.parameters())
        ranks = self.grad_state.clipping.ranks
        if ranks is None or ranks.shards is None:  # else a rank holds parts of parameters
            own = self.grad_state.names.keys() | self.grad_state.frozen.keys()
            self.grad_state.others = {
                p: n for n, p in self.model.named_parameters() if p not in own
            }
        for parameter, uses in self.owners.items():
            if uses > 1:
                self.grad_state.mark_shared(parameter)

    def _is_part(self, module: nn.Module) -> bool:
        """Runs private layers, and is none: called by itself, it may do anything to their samples."""
        if module in self.handles or not MARKS.isdisjoint(vars(module)):
            return False
        return any(below in self.handles for below in module.modules())

    def _layer(self, path: str, module: nn.Module) -> None:
        handle = self._handle(path, module)
        rule, own = find_rule(module), _own(module)
        self._claim(own)
        if isinstance(module, nn.RNNBase):
            handle.scopes.append(SortedForwardWrapper())
        if rule is None:  # its parameters are followed wherever they are used
            for name in own:
                self.grad_state.plan_log.register(f"{path}.{name}".lstrip("."), FOLLOWED)
            return
        handle.rule = rule
        if isinstance(module, RNNLinear):
            for parameter in own.values():
                self.grad_state.mark_shared(parameter)
        self.grad_state.plan_log.register(path, rule.name)

    def _claim(self, own: dict[str, nn.Parameter]) -> None:
        for parameter in own.values():
            self.owners[parameter] = self.owners.get(parameter, 0) + 1

    def _handle(self, path: str, module: nn.Module) -> LayerHook:
        return self.handles.setdefault(module, LayerHook(path, self.grad_state))


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}


PREFIX = "_module."
"""Of the keys of a private model's state_dict."""


class FastGradSampleModule(AbstractGradSampleModule):
    """The private model: `m` with its trainable layers intercepted.

    Behaves as `m`: what it has not, `m` is asked for, and what `m` has is set there. Keys of its
    state_dict carry the prefix `_module.`, as with Opacus; load_state_dict takes those of `m`, too, and
    fastclip.unwrap gives `m`.

    Args:
        m: the model.
        grad_state: its gradient state.
        batch_first: as in make_private.
        loss_reduction: as in make_private.
    """

    def __init__(
        self, m: nn.Module, *, grad_state: GradientState, batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        attach_keeper(self, m, grad_state, batch_first, loss_reduction)

    @pass_over
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_root(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper has not is the model's own: `model.config`, `model.encode`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # not there yet
                raise
            return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is read from the model is set there, where its forward reads it."""
        parts = self.__dict__.get("_modules", {})
        model = parts.get("_module")
        own = name in vars(self) or name in parts or hasattr(type(self), name)
        if model is None or own or not _has(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As torch's; keys of the bare model are as good as those of this one."""
        if not any(key.startswith(PREFIX) for key in state_dict):
            state_dict = {PREFIX + key: value for key, value in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **options)

    def forbid_grad_accumulation(self) -> None:
        self.grad_state.batch.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.grad_state.batch.accumulation_allowed = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and, unless a split batch is being gathered, `p.summed_grad`."""
        self.grad_state.zero_grad()
        nn.Module.zero_grad(self, set_to_none)

    def _replicate_for_data_parallel(self) -> Any:
        check_not_replicated()

    def remove_hooks(self) -> None:
        uninstall(self._module)

    cleanup = remove_hooks

    def _close(self) -> None:
        """What Opacus' `to_standard_module` calls."""
        self.cleanup()


GradSampleModule.register(FastGradSampleModule)  # loops unwrap what isinstance tells them is one


class FastGradSampleHooks(AbstractGradSampleHooks):
    """The handle of wrap_model=False; `cleanup()` makes the model ordinary again."""

    def __init__(
        self, m: nn.Module, *, grad_state: GradientState, batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:  # fmt: skip
        attach_keeper(self, m, grad_state, batch_first, loss_reduction)

    forbid_grad_accumulation = FastGradSampleModule.forbid_grad_accumulation
    allow_grad_accumulation = FastGradSampleModule.allow_grad_accumulation
    remove_hooks = FastGradSampleModule.remove_hooks
    cleanup = FastGradSampleModule.cleanup


def _has(model: nn.Module, name: str) -> bool:
    try:
        return hasattr(model, name)
    except Exception:  # a property of its own, which cannot be read now
        return True


def attach_keeper(
    owner: Any, m: nn.Module, grad_state: GradientState, batch_first: bool, loss_reduction: str
) -> None:
    """`m` becomes private for this gradient state, and `owner` is what a program holds of it."""
    install(m, grad_state)
    grad_state.trace.know(m)
    owner.grad_state = grad_state
    owner.batch_first = batch_first
    owner.loss_reduction = loss_reduction
    owner.grad_accumulation_hook = None
    owner._module = m  # behind what the wrapper has itself: some models have such names, too
    for parameter in m.parameters():
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:  # of an engine that is gone without cleanup()
            parameter.__dict__.pop(name, None)
        if parameter.requires_grad:
            parameter.grad_sample = None  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------
# From what training wraps back to the user's model, and its names.


Value = TypeVar("Value")
PREFIXES = ("_module.", "module.", "_orig_mod.")
"""Of state_dict keys: make_private's, DistributedDataParallel's, torch.compile's."""


def unwrap(model: nn.Module | AbstractGradSampleHooks) -> nn.Module:
    """The model as it was given to make_private: its class, its methods, its state_dict keys.

    It stays private while it is trained; `model.cleanup()` makes it ordinary again.

    Args:
        model: what make_private returned, also inside DistributedDataParallel or torch.compile.

    Raises:
        ArgumentTypeError: for something else than a model.
    """
    if not isinstance(model, (nn.Module, AbstractGradSampleHooks)):
        raise ArgumentTypeError(
            f"model expects what make_private returned, got {type(model).__name__}."
        )
    inner: nn.Module = model
    while True:
        outer, inner = inner, bare(uncompiled(inner))
        if isinstance(inner, (AbstractGradSampleModule, AbstractGradSampleHooks)):
            inner = inner._module
        if inner is outer:
            return inner


def bare_state_dict(state: Mapping[str, Value], model: nn.Module) -> dict[str, Value]:
    """A saved state_dict of a private model with the keys of the user's own.

    Args:
        state: its keys with what make_private, DistributedDataParallel or torch.compile put before
            them, or without.
        model: the user's, for `model.load_state_dict(bare_state_dict(state, model))`.

    Raises:
        ArgumentError: the keys are another model's.
    """
    own = unwrap(model).state_dict().keys()
    found = dict(state)
    while not own & found.keys():
        prefix = next((p for p in PREFIXES if found and all(k.startswith(p) for k in found)), None)
        if prefix is None:
            raise ArgumentError(
                f"state expects keys of {type(unwrap(model)).__name__} such as "
                f"{next(iter(own), None)!r}, got {next(iter(state), None)!r}. Pass the state_dict of "
                "the same model.",
                doc="wrapped-model",
            )
        found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found
