"""A use of a parameter by a function: its rule, its call, and the hook on its output.

A layer's rule answers for a module; a use's rule for a function, whoever calls it. It says which of the
other operands are kept for the backward pass, and makes records of them and of the output's gradient.
Input gradients are autograd's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from fastclip.core.autograd import differentiable_once, private_function, save, saved, taking_part
from fastclip.core.torch_names import Native, tree_unflatten
from fastclip.errors import BatchSizeError, GraphError, say
from fastclip.ops import LastInput
from fastclip.ops.planner import PlanLog, Planner
from fastclip.ops.units import UnitSamples
from fastclip.rules.chance import (
    Chance,
    alike,
    given,
    is_number,
    is_of_torch,
    other_numbers,
    repeated,
)
from fastclip.rules.contribution import Contribution
from fastclip.rules.records import Record
from fastclip.rules.routing import several
from fastclip.samples.batch_axis import NOBODY, BatchAxis
from fastclip.samples.calls import Calls, Forward
from fastclip.samples.probing import of_samples

if TYPE_CHECKING:
    from fastclip.rules.routing import Routing


Operands = dict[str, Any]
"""The arguments of a call by name; private ones among them as they are."""


class UseRule(ABC):
    """Exact per-sample gradients of what some functions compute from parameters and a batch."""

    name = "use"
    routed = False
    """Also where samples are told entry by entry, not by their place."""
    keeps_output = False
    """The function saves its own output for its backward pass, so that it must not be changed."""
    last = False
    """Asked after all others: it answers for much, at a price."""
    own_memory = False
    """The output is in memory of its own, which nothing has saved, though torch may call it a view."""

    def __deepcopy__(self, memo: dict[int, Any]) -> UseRule:
        return self  # rules hold no state of a model

    @abstractmethod
    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        """The operands of this call; None where the rule does not answer for it."""

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        """Whether the rule can tell the samples of this output apart.

        Args:
            private: names of the operands that are parameters, or derived from such.
            batch_axis: of the samples in the output; None where they are told entry by entry.
        """
        return True

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        """Names of the tensors that `records` needs, beside the output's gradient."""
        return []

    @abstractmethod
    def records(self, use: UseBackward) -> None:
        """Record the contributions that `use.wants`."""


@lru_cache(maxsize=4096)
def plain_name(func: Callable) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__iadd__ and Tensor.__radd__."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__  # type: ignore[attr-defined]
    if name.startswith("__"):
        name = name.strip("_")
        for prefix in ("i", "r"):
            if name[:1] == prefix and name[1:] in _REFLECTED:
                return name[1:] if name not in ("rsub", "rtruediv", "rpow", "rmatmul") else name
        return name
    return name[:-1] if name.endswith("_") else name


_REFLECTED = frozenset(
    ["add", "sub", "mul", "truediv", "matmul", "pow", "mod", "floordiv", "and", "or", "xor"]
)


@lru_cache(maxsize=4096)
def in_place(func: Callable) -> bool:
    """The function changes its first argument."""
    name = func.__name__.partition(".")[0]  # aten's add_.Tensor
    if name.startswith("__"):
        bare = name.strip("_")
        return bare == "setitem" or (bare[:1] == "i" and bare[1:] in _REFLECTED)
    return name.endswith("_")


_RULES: dict[str, list[UseRule]] = {}
_UseRuleType = TypeVar("_UseRuleType", bound=type[UseRule])


def register_use(*names: str) -> Callable[[_UseRuleType], _UseRuleType]:
    """Class decorator: use this rule for functions of these names, before those registered so far."""

    def decorate(rule: _UseRuleType) -> _UseRuleType:
        one = rule()
        for name in names:
            known = _RULES.setdefault(name, [])
            known.insert(len(known) if one.last else 0, one)
        return rule

    return decorate


def rules_of(func: Callable) -> list[UseRule]:
    """The rules that may answer for a function, in order."""
    return _RULES.get(plain_name(func), [])


# -------------------------------------------------------------------------------------------------
# What uses of parameters need of those that are above them: the gradient state, and the
# interceptor.


class UseState(Protocol):
    """Everything that one private model remembers (fastclip.backward.state), as a use sees it."""

    names: dict[nn.Parameter, str]
    calls: Calls
    planner: Planner
    plan_log: PlanLog
    trace: Any
    """Of the first steps: fastclip.backward.traced_step."""
    caught: Any
    """Takes a pass that is rehearsed or captured; None while passes contribute."""

    @property
    def paused(self) -> bool:
        """What runs now contributes nothing."""

    @property
    def last_input(self) -> LastInput:
        """What is known of the input that the running pass has met last."""

    @property
    def units(self) -> UnitSamples | None:
        """Which rows of the running pass are clipped as one; None: each alone."""

    def layer_forward(self, path: Hashable | None = None) -> tuple[Forward, bool]:
        """The Forward that a use belongs to, and whether its output must open the pass itself."""

    def begins_with(self, forward: Forward, out: Tensor) -> None:
        """The gradient of `out` opens the pass."""

    def admit(self, path: str, forward: Forward, rows: int) -> None:
        """Check that a contribution may enter the running pass."""

    def check_hooks(self, parameters: Collection[nn.Parameter]) -> None:
        """Refuse hooks on the gradients of these parameters, which would not run."""

    def record(self, parameter: nn.Parameter, record: Record) -> None:
        """Take a contribution to a parameter."""

    def record_derived(
        self, target: Target, record: Record, wanted: Iterable[nn.Parameter]
    ) -> None:
        """Take a contribution to a value computed from parameters."""


class Intercepts(Protocol):
    """An interceptor (fastclip.rules.interceptor), as what it makes sees it."""

    grad_state: UseState

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """A function is called with a private value among its arguments."""


# -------------------------------------------------------------------------------------------------
# The tap on the output of a use: autograd passes it by, and the parameter's share is recorded
# there.


@dataclass(frozen=True, eq=False)
class Target:
    """What a use contributes to: a parameter, or a derived value (then `edge` says where)."""

    value: Tensor
    """Detached."""
    parameters: tuple[nn.Parameter, ...]
    graph: Any = None
    """Of the derived value, a fastclip.rules.derived.DerivedGraph."""
    edge: GradientEdge | None = None
    origin: Any = None
    """Where the derived value lies in one parameter, a fastclip.rules.slices.Origin."""


class UseCall:
    """What one call of a function leaves for the backward pass, apart from tensors autograd watches.

    Args:
        operands: non-private tensors taken out. targets: what is private, by the operand's name.
        batch_axis: of the samples in the output; None: `routing` tells whose an entry is.
    """

    def __init__(
        self, interceptor: Intercepts, forward: Forward, func: Callable, rule: UseRule,
        operands: Operands, targets: dict[str, Target], batch_axis: BatchAxis | None, *, changes: bool,
        label: str,
    ) -> None:  # fmt: skip
        self.interceptor, self.forward, self.func, self.rule = interceptor, forward, func, rule
        self.targets, self.batch_axis, self.changes, self.label = (
            targets,
            batch_axis,
            changes,
            label,
        )
        self.saved = rule.saved(operands, list(targets))
        self.held = [operands[name] for name in self.saved]
        self.operands = {n: v for n, v in operands.items() if not isinstance(v, Tensor)}
        self.parameters = tuple(
            dict.fromkeys(p for target in targets.values() for p in target.parameters)
        )
        device = next(iter(targets.values())).value.device.type
        self.autocast = _autocast(device)
        self.routing: Routing | None = None
        self.taker: Callable[[], int] | None = None
        """Tells the sample that it is of alone, once all have had their turns."""
        self.versions = {n: target.value._version for n, target in targets.items()}
        self.shares_memory = False
        """The output is in the memory of a private operand, which must stay as it is."""
        self.paused = interceptor.grad_state.paused
        self.chance: Chance | None = None
        """Where generators stood, if the call has drawn random numbers and will be repeated."""
        self.shown: list[Tensor] = []
        """All that it gave, if more than torch's generators may have decided about that."""
        self.number = 0
        """By which the routing knows the output."""
        self.seen: Any = None
        """What the trace knows of the output."""
        self.number_of_output = 0

    def repeated_with(self, chance: Chance, drew: bool, shown: list[Tensor]) -> None:
        """The call will be repeated in the backward pass, with the random numbers that it drew.

        Args:
            shown: all that it gave (`given`); empty where `chance` knows all that decides about it.

        Raises:
            GraphError: the pass is being captured, and a replay of it draws others.
        """
        if drew and self.interceptor.grad_state.caught is not None:
            raise GraphError(
                f"{self.label} draws random numbers, which differ when a CUDA graph repeats it for "
                "the per-sample gradients. Pass cuda_graph=False.",
                doc="random-numbers",
            )
        self.chance, self.shown = chance if drew else None, shown

    @property
    def samples_of(self) -> Callable[[Tensor], Tensor] | None:
        """The sample of every entry of a tensor like the output, where samples take turns."""
        taker = self.taker
        if taker is None:
            return None
        return lambda x: torch.full([1] * x.dim(), taker(), dtype=torch.int64, device="cpu")

    def changed(self, name: str) -> bool:
        """Whether a private operand has been changed in place since the call."""
        return self.targets[name].value._version != self.versions[name]

    def check_unchanged(self) -> None:
        """Raise if a private operand was changed through the output."""
        if self.shares_memory and any(map(self.changed, self.versions)):
            raise GraphError(
                f"{self.label}: its output shares the parameter's memory and was changed in place, "
                "so the gradient would be wrong. Change a clone.",
                doc="changed-tensors",
            )

    def tap(self, out: Tensor) -> Tensor:
        """The output, on which the gradient will be seen."""
        held, self.held = self.held, []
        return OutputHook.apply(self, out, *held, *self.parameters)


def _autocast(device: str) -> Callable[[], AbstractContextManager]:
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype=dtype, cache_enabled=False)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0) if is_number(x) else x


def _repeats(x: Tensor) -> bool:
    """Several of its entries are one: torch does not let it be changed as a whole."""
    return any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True))


@private_function
class OutputHook(Function):
    """The identity; its backward records."""

    @staticmethod
    def forward(ctx: Any, call: UseCall, out: Tensor, *rest: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        save(ctx, *rest[: len(call.saved)])
        ctx.call, ctx.edges = call, len(rest)
        found = OutputHook._tapped(ctx, call, out)
        if not call.paused:
            call.seen = call.interceptor.grad_state.trace.seen(found)
        return found

    @staticmethod
    def _tapped(ctx: Any, call: UseCall, out: Tensor) -> Tensor:
        if call.changes:
            ctx.mark_dirty(out)
            return out
        if out._is_view() and call.rule.own_memory:
            return out.data
        if out._is_view() and not ctx.needs_input_grad[1] and _repeats(out):
            call.shares_memory = True  # an expanded parameter
            return out.detach()
        if call.rule.keeps_output or out._is_view():
            return out.clone()
        return out.detach()  # the same memory and version: whoever has saved it finds it unchanged

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        call: UseCall = ctx.call
        call.check_unchanged()
        nothing = (None,) * ctx.edges
        if g is None:
            return None, None, *nothing
        grad_state = call.interceptor.grad_state
        if not grad_state.paused:
            grad_state.trace.arrived(call.label, call.seen, g, call.samples_of)
        known = () if call.paused or grad_state.paused else grad_state.names
        wanted = set(compress(call.parameters, taking_part(ctx, call.parameters, known)))
        if wanted:
            operands = dict(zip(call.saved, saved(ctx), strict=True))  # may run a checkpoint again
            full = torch.autocast(g.device.type, enabled=False)
            with grad_state.trace.aside(), Native(), full, of_samples(call.label):
                UseBackward(call, operands, g, wanted).run()
        return None, g, *nothing


class UseBackward(Contribution):
    """What a use's rule may see and do.

    Attributes:
        g: gradient of the output. batch_axis: of the samples in it, or None. operands: those that are
            no tensors. private: names of the operands that are parameters or derived. batch: samples.
    """

    def __init__(
        self, call: UseCall, saved: dict[str, Tensor], g: Tensor, wanted: set[nn.Parameter]
    ) -> None:
        names = {
            n for n, target in call.targets.items() if not wanted.isdisjoint(target.parameters)
        }
        grad_state = call.interceptor.grad_state
        super().__init__(
            call.label,
            call.rule.name,
            g,
            names,
            grad_state.planner,
            grad_state.plan_log,
            grad_state.last_input,
        )
        self._call, self._saved, self._wanted = call, saved, wanted
        self.batch_axis, self.operands = call.batch_axis, call.operands
        self.private = list(call.targets)
        self.batch = call.forward.batch_size or 0
        self._owner: Tensor | None = None
        self._given: list[Tensor] = []
        """All that the function gave when it was called again."""

    def run(self) -> None:
        """Check that the contribution may enter the running pass, and let the rule record it."""
        call = self._call
        grad_state = call.interceptor.grad_state
        if self.batch_axis is not None and not self.batch_axis.fits(self.g, self.batch):
            raise GraphError(
                f"{call.label}: its output of shape {list(self.g.shape)} cannot hold {self.batch} "
                "samples. Keep the batch along one axis.",
                doc="batch-axis",
            )
        grad_state.admit(call.label, call.forward, self.batch)
        grad_state.check_hooks(self._wanted)
        if self.batch_axis is None:
            self._owner = self._routed()
            self.g = self.g.masked_fill(self._owner == NOBODY, 0)
        call.rule.records(self)
        self.check_complete()

    def __getitem__(self, name: str) -> Tensor:
        """An operand: what was saved, or a private one's numbers."""
        found = self._saved.get(name)
        if found is not None:
            return found
        if self._call.changed(name):
            raise GraphError(
                f"{self._call.label}: a parameter, or a value computed from it, was changed in "
                "place after this use, so its gradient would be wrong. Change a clone, or change "
                "it before the use.",
                doc="changed-tensors",
            )
        return self._call.targets[name].value

    def shape_of(self, name: str) -> torch.Size:
        """The shape of an operand, whatever its numbers have become."""
        found = self._saved.get(name)
        return (self._call.targets[name].value if found is None else found).shape

    def tensors(self) -> list[str]:
        """Names of the operands at hand: those that were saved, and private ones."""
        return [*self._saved, *self.private]

    def samples(self, x: Tensor) -> Tensor:
        """`x`, whose samples lie as those of the output, with them along axis 0."""
        assert self.batch_axis is not None
        return self.batch_axis.samples(x, self.batch)

    def rows(self, x: Tensor) -> Tensor:
        """Deprecated: `samples`."""
        say("use.rows is deprecated. Call use.samples.", DeprecationWarning)
        return self.samples(x)

    def entry_owners(self) -> Tensor:
        """Deprecated: `sample_of_entry`."""
        say("use.entry_owners is deprecated. Call use.sample_of_entry.", DeprecationWarning)
        return self.sample_of_entry()

    def sample_of_entry(self) -> Tensor:
        """The sample of every entry of the output, or of what broadcasts to it; -1: of nobody."""
        if self.batch_axis is not None:
            shape = [1] * self.g.dim()
            shape[self.batch_axis.axis] = -1
            size = self.g.shape[self.batch_axis.axis]
            return self.batch_axis.sample_of_entry(size, self.batch, self.g.device).view(shape)
        assert self._owner is not None
        return self._owner

    def sample_of_row(self) -> Tensor:
        """The sample of every row of the output, all axes but the last flattened, int64 [n].

        Raises:
            BatchSizeError: a row holds entries of several samples (on a GPU it contributes nothing).
        """
        owner = self.sample_of_entry().expand(self.g.shape)
        if not self.g.numel():
            return owner.new_full((self.g.shape[:-1].numel(),), NOBODY)
        owner = owner.reshape(-1, owner.shape[-1])
        rows = owner.amax(1)
        alone = ((owner == rows[:, None]) | (owner == NOBODY)).all(1)
        if owner.device.type == "cpu" and not bool(alone.all()):
            raise several(self._call.label, "a row")
        return rows.masked_fill(~alone, NOBODY)

    def _routed(self) -> Tensor:
        call = self._call
        if not self.g.numel():
            return torch.zeros(self.g.shape, dtype=torch.int64, device=self.g.device)
        if call.routing is None and call.taker is not None:
            return torch.full(self.g.shape, call.taker(), dtype=torch.int64, device=self.g.device)
        if call.routing is None:
            fix = (
                "Apply it to the samples' losses before their mean."
                if self.g.numel() == 1
                else "Let every sample take the same path through the model."
            )
            raise BatchSizeError(
                f"{call.label}: a gradient reaches it that the dry run of the model did not show, so "
                f"fastclip cannot identify which sample its entries belong to. {fix}"
            )
        return call.routing.sample_of_entry(call.number, self.g, call.label)

    def replay(self, leaves: dict[str, Tensor], *, clean: bool = False) -> Tensor:
        """The function called again, on these leaves for private operands.

        Args:
            clean: zeros take the place of what is not finite in the other operands.
        """
        others = {n: _finite(x) for n, x in self._saved.items()} if clean else {}
        chance, label = self._call.chance, self._call.label
        same = nullcontext() if chance is None else chance.again(label)
        with torch.enable_grad(), self._call.autocast(), same:
            return self.called_on({**others, **leaves})

    @property
    def is_of_torch(self) -> bool:
        """Nothing but torch's generators, and those among its arguments, decides what it gives."""
        return is_of_torch(self._call.func)

    @contextmanager
    def backwards(self) -> Iterator[Callable[..., Any]]:
        """torch.autograd.grad, in whose every run the function's backward draws the same numbers.

        They are those that its backward pass over the batch will draw.
        """
        if self.is_of_torch:  # which draws nothing in backward passes
            yield torch.autograd.grad
            return
        chance = Chance(self._call.func, list(self._saved.values()))

        def gradient(*args: Any, **kwargs: Any) -> Any:
            chance.put_back()
            return torch.autograd.grad(*args, **kwargs)

        try:
            yield gradient
        finally:
            chance.put_back()

    def compared(
        self, found: list[Tensor], whole: Sequence[Tensor | None], *, clean: bool
    ) -> list[Tensor]:
        """The gradients of all samples, if the function did what it did (on an accelerator NaN, if not).

        Args:
            whole: gradients of the batch. clean: as of the `replay` that they come of, whose outputs
                may differ from the first call's.

        Raises:
            GraphError: the samples' do not add up to them, or it gave something else at first.
        """
        equal = [
            alike(rows.sum(0), x, rows.abs().sum(0))
            for rows, x in zip(found, whole, strict=True) if x is not None
        ]  # fmt: skip
        if not clean:
            equal += repeated(self._call.label, self._given, self._call.shown)
        same = torch.stack([x.to(self.g.device) for x in equal]).all()
        if same.device.type != "cpu":
            return [torch.where(same, x, torch.nan) for x in found]
        if not bool(same):
            raise other_numbers(self._call.label, "values")
        return found

    def called_on(self, values: dict[str, Tensor]) -> Tensor:
        """What the function makes of these values, and of the other operands as they were."""
        names = sorted((n for n in {*self.operands, *self.tensors()} if n.isdigit()), key=int)
        tensors = set(self.tensors())
        leaves = [
            values[n] if n in values else self[n] if n in tensors else self.operands[n]
            for n in names
        ]  # fmt: skip
        args, kwargs = tree_unflatten(leaves, self.operands["structure"])
        if self._call.changes:
            args = (args[0].clone(), *args[1:])
        out = self._call.func(*args, **kwargs)
        if not self.is_of_torch:
            self._given = given(out, args[0] if self._call.changes else None)
        out = args[0] if out is None else out
        return out if isinstance(out, Tensor) else out[self._call.number_of_output]

    def _units(self) -> UnitSamples | None:
        return self._call.interceptor.grad_state.units

    def _take(self, name: str, record: Record) -> None:
        call, target = self._call, self._call.targets[name]
        grad_state = call.interceptor.grad_state
        if target.graph is None:
            grad_state.record(target.parameters[0], record)
        else:
            grad_state.record_derived(target, record, self._wanted)
