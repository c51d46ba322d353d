"""The model that make_private returns, the engine that owns its parameters, and `unwrap`."""

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
# Steps that are in the weights of a model. The next engine that trains it counts them too.
#
# `cleanup()` ends one engine's hold on a model, but its steps stay in the weights. The privacy that
# they spent is kept in memory, weakly, for the modules whose own parameters were trained. It moves
# with a module into another model. A later copy of a module has no such record.


class Trained(NamedTuple):
    """A model's steps according to one ledger, and the states of the noise generator they used."""

    spent: Spent
    drawn: DrawnStates | None
    """None in a copy."""

    def covers(self, other: Trained) -> bool:
        """Whether it counts all steps of the other."""
        own = self.spent.segments
        return union(own, other.spent.segments) == own


_TRAINED: WeakKeyDictionary[nn.Module, list[Trained]] = WeakKeyDictionary()
"""Modules that an engine has released."""


def owners(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that have trainable parameters of their own."""
    return [
        module
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]


def trained_by(batch: LogicalBatch) -> list[Trained]:
    """The steps of the model that releases this batch; none before make_private."""
    spent = batch.spent
    ledger = getattr(batch.account, "ledger", None)
    return [] if spent is None else [Trained(spent, None if ledger is None else ledger.drawn)]


def let_go(modules: Iterable[nn.Module], batch: LogicalBatch) -> None:
    """Record the steps on these modules, where the optimizer of `batch` takes no more."""
    now = trained_by(batch)
    for module in modules if now else ():
        before = [each for each in _TRAINED.get(module, []) if not now[0].covers(each)]
        _TRAINED[module] = before + now


def let_go_with(wrapper: object, modules: Iterable[nn.Module], batch: LogicalBatch) -> None:
    """Call `let_go` once `wrapper` is gone. Its `cleanup()` is Opacus' own and gives no signal."""
    held = [ref(module) for module in modules]

    def end() -> None:
        let_go([module for each in held if (module := each()) is not None], batch)

    finalize(wrapper, end).atexit = False


def found_in(model: nn.Module) -> list[Trained]:
    """The steps recorded on modules of `model` when an engine released them."""
    return list(
        {id(each): each for module in model.modules() for each in _TRAINED.get(module, [])}.values()
    )


# -------------------------------------------------------------------------------------------------
# One engine per parameter: the engines that are alive, and their parameters.
#
# Two engines that clip the same parameter would each release a gradient of every sample: 2 C with
# noise for C. All references are weak, and an engine without a model, or after cleanup(), owns nothing.


_FAST: WeakKeyDictionary[nn.Module, ref[GradientState]] = WeakKeyDictionary()
"""Intercepted models and their gradient states."""
_OPACUS: WeakSet[AbstractGradSampleHooks] = WeakSet()
"""Models that make_private returned in Opacus' modes."""
_BATCH = "fastclip_batch"
"""Their attribute: the logical batch of the newest optimizer, which a copy has too."""

_TWICE = "each of the two engines would release every sample once"


def held_by(
    optimizer: Any, model: nn.Module, ranks: Ranks | None
) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, str]]:
    """Names of the optimizer's parameters, in its order: the trained ones, and the others.

    Args:
        model: whole on all ranks. Trained parameters are those with which it computes.
    """
    name = {p: path for path, p in model.named_parameters()}
    held = [(p, whole_of(ranks, p)) for group in optimizer.param_groups for p in group["params"]]
    trained = {own: name[own] for p, own in held if p.requires_grad}
    return trained, {p: name[own] for p, own in held if not p.requires_grad}


def claim(model: nn.Module, grad_state: GradientState) -> None:
    """Record that `grad_state` owns the parameters of `model` until it is retired."""
    _FAST[model] = ref(grad_state)


def claim_for_opacus(wrapper: AbstractGradSampleHooks, batch: LogicalBatch) -> None:
    """Record a new optimizer of `wrapper`; earlier optimizers of its parameters release nothing more."""
    mine = {p for p in wrapper._module.parameters() if p.requires_grad}
    for other in list(_OPACUS):
        if other is wrapper or not mine.isdisjoint(other._module.parameters()):
            other.__dict__[_BATCH].retire()
    wrapper.__dict__[_BATCH] = batch
    let_go_with(wrapper, owners(wrapper._module), batch)
    _OPACUS.add(wrapper)


def is_claimed(wrapper: nn.Module) -> bool:
    """Whether make_private returned it in one of Opacus' modes."""
    return _BATCH in wrapper.__dict__


def check_free(model: nn.Module, parameters: Mapping[nn.Parameter, str], again: Any = None) -> None:
    """Raise an error if a living engine holds the model, a part of it or one of its parameters.

    Args:
        parameters: those that will become private, and their names.
        again: what an earlier make_private returned, if this one continues with the same model.

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
    """Check that a model may become private under this ledger, and count its earlier steps there.

    Args:
        again: what an earlier make_private returned, or a copy of it, if the model is that.
        trained: the parameters that will become private, and their names.

    Raises:
        UnsupportedLayerError: another engine holds the model.
        ArgumentError: the ledger cannot count the earlier steps.
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
    """Logical batches of engines whose steps are in the weights of a model and may continue."""
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
    """Opacus' wrappers of this module: itself, or those whose hooks it carries."""
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
"""The plan's entry for parameters without a layer rule."""


def install(model: nn.Module, grad_state: GradientState) -> None:
    """Intercept every trainable layer of `model`. On an error the model is unchanged.

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
    """Restore every module's own forward, and remove the engine's attributes of parameters.

    The optimizers of these gradient states release nothing more.
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
        self.uses: dict[nn.Parameter, int] = {}
        """Number of modules that hold each parameter."""

    def run(self) -> None:
        """Give every trainable module its rule or forward wrapper, then intercept all at once."""
        for path, module in self.model.named_modules():
            validation.write_out(module)
            if is_batch_norm(module):
                self.grad_state.batch_norms.append((path, module))
            if isinstance(module, DPRNNBase):
                self._handle(path, module).wrappers.append(RecurrentForwardWrapper())
            elif _own(module) or is_parametrized(module):
                self._layer(path, module)
        self._handle("", self.model).wrappers.append(RootForwardWrapper())
        for module, handle in self.handles.items():
            if handle.rule is None:
                interception.attach_methods(handle.path, module, self.grad_state)
                if module is not self.model:
                    handle.wrappers.append(PartForwardWrapper())
            attach(module, handle)
        may_be_bare(self.grad_state.bare, self.handles)
        for path, module in self.model.named_modules():
            if self._is_part(module):
                interception.attach_part(path, module, self.grad_state)
        self.grad_state.calls.known = set(self.model.parameters())
        ranks = self.grad_state.clipping.ranks
        if ranks is None or ranks.shards is None:  # otherwise a rank holds parts of parameters
            own = self.grad_state.names.keys() | self.grad_state.frozen.keys()
            self.grad_state.others = {
                p: n for n, p in self.model.named_parameters() if p not in own
            }
        for parameter, uses in self.uses.items():
            if uses > 1:
                self.grad_state.mark_shared(parameter)

    def _is_part(self, module: nn.Module) -> bool:
        """It is not private, but runs private layers. A script may call it by itself."""
        if module in self.handles or not MARKS.isdisjoint(vars(module)):
            return False
        return any(below in self.handles for below in module.modules())

    def _layer(self, path: str, module: nn.Module) -> None:
        handle = self._handle(path, module)
        rule, own = find_rule(module), _own(module)
        self._claim(own)
        if isinstance(module, nn.RNNBase):
            handle.wrappers.append(SortedForwardWrapper())
        if rule is None:  # each use of its parameters is tracked
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
            self.uses[parameter] = self.uses.get(parameter, 0) + 1

    def _handle(self, path: str, module: nn.Module) -> LayerHook:
        return self.handles.setdefault(module, LayerHook(path, self.grad_state))


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}


PREFIX = "_module."
"""Prefix of the keys of a private model's state_dict."""


class FastGradSampleModule(AbstractGradSampleModule):
    """The private model: `m` with its trainable layers intercepted.

    It behaves as `m`. Attributes that it lacks are read from `m`, and attributes of `m` are set there.
    Keys of its state_dict have the prefix `_module.`, as in Opacus. load_state_dict also takes the keys
    of `m`, and fastclip.unwrap returns `m`.

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
        attach_state(self, m, grad_state, batch_first, loss_reduction)

    @pass_over
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_root(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the model's: `model.config`, `model.encode`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # not set yet
                raise
            return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model are set on the model, where its forward reads them."""
        parts = self.__dict__.get("_modules", {})
        model = parts.get("_module")
        own = name in vars(self) or name in parts or hasattr(type(self), name)
        if model is None or own or not _has(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As in torch; keys of the bare model are accepted too."""
        if not any(key.startswith(PREFIX) for key in state_dict):
            state_dict = {PREFIX + key: value for key, value in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **options)

    def forbid_grad_accumulation(self) -> None:
        self.grad_state.batch.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.grad_state.batch.accumulation_allowed = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `p.grad` and, unless a split batch is incomplete, `p.summed_grad`."""
        self.grad_state.zero_grad()
        nn.Module.zero_grad(self, set_to_none)

    def _replicate_for_data_parallel(self) -> Any:
        check_not_replicated()

    def remove_hooks(self) -> None:
        uninstall(self._module)

    cleanup = remove_hooks

    def _close(self) -> None:
        """Called by Opacus' `to_standard_module`."""
        self.cleanup()


GradSampleModule.register(FastGradSampleModule)  # loops check isinstance, then unwrap


class FastGradSampleHooks(AbstractGradSampleHooks):
    """The module handle of wrap_model=False; `cleanup()` makes the model non-private again."""

    def __init__(
        self, m: nn.Module, *, grad_state: GradientState, batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:  # fmt: skip
        attach_state(self, m, grad_state, batch_first, loss_reduction)

    forbid_grad_accumulation = FastGradSampleModule.forbid_grad_accumulation
    allow_grad_accumulation = FastGradSampleModule.allow_grad_accumulation
    remove_hooks = FastGradSampleModule.remove_hooks
    cleanup = FastGradSampleModule.cleanup


def _has(model: nn.Module, name: str) -> bool:
    try:
        return hasattr(model, name)
    except Exception:  # a property that cannot be read now
        return True


def attach_state(
    owner: Any, m: nn.Module, grad_state: GradientState, batch_first: bool, loss_reduction: str
) -> None:
    """Make `m` private for this gradient state; `owner` is the wrapper or module handle."""
    install(m, grad_state)
    grad_state.trace.know(m)
    owner.grad_state = grad_state
    owner.batch_first = batch_first
    owner.loss_reduction = loss_reduction
    owner.grad_accumulation_hook = None
    owner._module = m  # last: some models have attributes of these names too
    for parameter in m.parameters():
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:  # from an engine that ended without cleanup()
            parameter.__dict__.pop(name, None)
        if parameter.requires_grad:
            parameter.grad_sample = None  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------
# From wrappers back to the user's model and its names.


Value = TypeVar("Value")
PREFIXES = ("_module.", "module.", "_orig_mod.")
"""Prefixes of state_dict keys: make_private, DistributedDataParallel, torch.compile."""


def unwrap(model: nn.Module | AbstractGradSampleHooks) -> nn.Module:
    """The model that was passed to make_private, with its class, methods and state_dict keys.

    The model stays private. `model.cleanup()` makes it non-private again.

    Args:
        model: what make_private returned, also inside DistributedDataParallel or torch.compile.

    Raises:
        ArgumentTypeError: `model` is not a model.
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
    """A saved state_dict of a private model, with the keys of the user's own model.

    Args:
        state: a state_dict whose keys may have prefixes of make_private, DistributedDataParallel or
            torch.compile.
        model: the user's model, for `model.load_state_dict(bare_state_dict(state, model))`.

    Raises:
        ArgumentError: the keys belong to another model.
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
