"""A use of a parameter by a function: its rule, its call, and the hook on its output.

A layer rule covers a module. A use rule covers a function, wherever it is called. It says which other
operands are kept for the backward pass. It makes records of them and of the output's gradient.
Autograd itself computes input gradients.
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
"""The arguments of a call by name. Private ones are unchanged."""


class UseRule(ABC):
    """Exact per-sample gradients of what some functions compute from parameters and a batch."""

    name = "use"
    routed = False
    """The rule also works if samples are identified per entry instead of by a batch axis."""
    keeps_output = False
    """The function saves its own output for its backward pass: the output must not change."""
    last = False
    """Tried after all others: it covers many functions, at a higher cost."""
    own_memory = False
    """The output has its own memory, which nothing has saved, even if torch calls it a view."""

    def __deepcopy__(self, memo: dict[int, Any]) -> UseRule:
        return self  # rules hold no state of a model

    @abstractmethod
    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        """Returns the operands of this call, or None if the rule does not cover it."""

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        """Whether the rule can separate the samples of this output.

        Args:
            private: names of the operands that are parameters, or derived from such.
            batch_axis: of the output; None if samples are identified per entry.
        """
        return True

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        """Returns names of the tensors that `records` needs, in addition to the output's gradient."""
        return []

    @abstractmethod
    def records(self, use: UseBackward) -> None:
        """Records the contributions that `use.wants`."""


@lru_cache(maxsize=4096)
def plain_name(func: Callable) -> str:
    """Returns `add` for torch.add, Tensor.add_, Tensor.__iadd__ and Tensor.__radd__."""
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
    """Whether the function changes its first argument."""
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
    """Returns the rules that may cover a function, in order."""
    return _RULES.get(plain_name(func), [])


# -------------------------------------------------------------------------------------------------
# What uses of parameters need of the gradient state and of the interceptor.


class UseState(Protocol):
    """The part of the gradient state of a private model that a use sees (fastclip.backward.state)."""

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
        """Whether the running pass contributes nothing."""

    @property
    def last_input(self) -> LastInput:
        """What is known of the last input in the running pass."""

    @property
    def units(self) -> UnitSamples | None:
        """The privacy units of the running pass; None: each sample is clipped separately."""

    def layer_forward(self, path: Hashable | None = None) -> tuple[Forward, bool]:
        """Returns the Forward of a use, and whether its output must open the pass itself."""

    def begins_with(self, forward: Forward, out: Tensor) -> None:
        """The gradient of `out` opens the pass."""

    def admit(self, path: str, forward: Forward, rows: int) -> None:
        """Check that a contribution may enter the running pass."""

    def check_hooks(self, parameters: Collection[nn.Parameter]) -> None:
        """Raises an error for hooks on the gradients of these parameters, which would not run."""

    def record(self, parameter: nn.Parameter, record: Record) -> None:
        """Take a contribution to a parameter."""

    def record_derived(
        self, target: Target, record: Record, wanted: Iterable[nn.Parameter]
    ) -> None:
        """Take a contribution to a value computed from parameters."""


class Intercepts(Protocol):
    """The part of an interceptor (fastclip.rules.interceptor) that uses and derived values see."""

    grad_state: UseState

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """A function is called with a private value among its arguments."""


# -------------------------------------------------------------------------------------------------
# The output hook of a use. Autograd passes through it, and it records the parameter's contribution.


@dataclass(frozen=True, eq=False)
class Target:
    """The target of a contribution: a parameter, or a derived value (then `edge` says where)."""

    value: Tensor
    """Detached."""
    parameters: tuple[nn.Parameter, ...]
    graph: Any = None
    """Of the derived value, a fastclip.rules.derived.DerivedGraph."""
    edge: GradientEdge | None = None
    origin: Any = None
    """Where the derived value lies in one parameter, a fastclip.rules.slices.Origin."""


class UseCall:
    """What one call of a function keeps for the backward pass, except tensors that autograd saves.

    Args:
        operands: non-private tensors taken out. targets: what is private, by the operand's name.
        batch_axis: of the output; None: `routing` identifies the sample of each entry.
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
        """Returns the only sample that the call belongs to, after all samples had their turn."""
        self.versions = {n: target.value._version for n, target in targets.items()}
        self.shares_memory = False
        """The output shares the memory of a private operand, which must not change."""
        self.paused = interceptor.grad_state.paused
        self.chance: Chance | None = None
        """States of generators, if the call has drawn random numbers and will be repeated."""
        self.shown: list[Tensor] = []
        """All outputs, if they may depend on more than torch's generators."""
        self.number = 0
        """The number of the output in the routing."""
        self.seen: Any = None
        """The trace's record of the output."""
        self.number_of_output = 0

    def repeated_with(self, chance: Chance, drew: bool, shown: list[Tensor]) -> None:
        """Notes that the backward pass will repeat the call, with the random numbers that it drew.

        Args:
            shown: all outputs (`given`); empty if `chance` covers everything that they depend on.

        Raises:
            GraphError: the pass is being captured, and a replay draws other numbers.
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
        """Returns the sample of every entry of a tensor like the output, if samples take turns."""
        taker = self.taker
        if taker is None:
            return None
        return lambda x: torch.full([1] * x.dim(), taker(), dtype=torch.int64, device="cpu")

    def changed(self, name: str) -> bool:
        """Whether a private operand has been changed in place since the call."""
        return self.targets[name].value._version != self.versions[name]

    def check_unchanged(self) -> None:
        """Raises GraphError if a private operand was changed through the output."""
        if self.shares_memory and any(map(self.changed, self.versions)):
            raise GraphError(
                f"{self.label}: its output shares the parameter's memory and was changed in place, "
                "so the gradient would be wrong. Change a clone.",
                doc="changed-tensors",
            )

    def hooked(self, out: Tensor) -> Tensor:
        """Returns the output with its hook, which sees the gradient."""
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
    """Whether several of its entries share memory, so torch does not let it be changed as a whole."""
    return any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True))


@private_function
class OutputHook(Function):
    """The identity; its backward records."""

    @staticmethod
    def forward(ctx: Any, call: UseCall, out: Tensor, *rest: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        save(ctx, *rest[: len(call.saved)])
        ctx.call, ctx.edges = call, len(rest)
        found = OutputHook._passed_on(ctx, call, out)
        if not call.paused:
            call.seen = call.interceptor.grad_state.trace.seen(found)
        return found

    @staticmethod
    def _passed_on(ctx: Any, call: UseCall, out: Tensor) -> Tensor:
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
        return out.detach()  # the same memory and version: a saved output is unchanged

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
        g: gradient of the output. batch_axis: of it, or None. operands: those that are not tensors.
        private: names of the operands that are parameters or derived. batch: samples.
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
        """All outputs of the function's second call."""

    def run(self) -> None:
        """Checks that the contribution may enter the running pass, and lets the rule record it."""
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
        """Returns an operand: a saved tensor, or the values of a private one."""
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
        """Returns the shape of an operand, even if its values have changed."""
        found = self._saved.get(name)
        return (self._call.targets[name].value if found is None else found).shape

    def tensors(self) -> list[str]:
        """Returns names of the available operands: saved and private ones."""
        return [*self._saved, *self.private]

    def samples(self, x: Tensor) -> Tensor:
        """Returns `x`, which has the output's batch axis, with samples along axis 0."""
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
        """Returns the sample of each entry of the output, broadcast to it; -1 for no sample."""
        if self.batch_axis is not None:
            shape = [1] * self.g.dim()
            shape[self.batch_axis.axis] = -1
            size = self.g.shape[self.batch_axis.axis]
            return self.batch_axis.sample_of_entry(size, self.batch, self.g.device).view(shape)
        assert self._owner is not None
        return self._owner

    def sample_of_row(self) -> Tensor:
        """Returns the sample of every row of the output, all axes except the last flattened, int64 [n].

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
        """Calls the function again, with these leaves instead of private operands.

        Args:
            clean: replaces non-finite values in the other operands by zeros.
        """
        others = {n: _finite(x) for n, x in self._saved.items()} if clean else {}
        chance, label = self._call.chance, self._call.label
        same = nullcontext() if chance is None else chance.again(label)
        with torch.enable_grad(), self._call.autocast(), same:
            return self.called_on({**others, **leaves})

    @property
    def is_of_torch(self) -> bool:
        """Whether the outputs depend on no generators except torch's and those among the arguments."""
        return is_of_torch(self._call.func)

    @contextmanager
    def backwards(self) -> Iterator[Callable[..., Any]]:
        """Yields torch.autograd.grad with the same random numbers in every run of the backward.

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
        """Returns the samples' gradients if the repeated calls match, else NaN on an accelerator.

        Args:
            whole: gradients of the batch. clean: as in the `replay` that gave them. Its outputs may then
            differ from those of the first call.

        Raises:
            GraphError: the sum over samples differs from `whole`, or the first call gave other outputs.
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
        """Returns the function's output for these values, with the other operands unchanged."""
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
