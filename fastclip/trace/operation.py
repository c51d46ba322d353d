"""One operation as a rule sees it, and the properties of each kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastclip.core.torch_names import overload_of, tree_leaves
from fastclip.trace.attribution import Attribution, is_mixed
from fastclip.trace.memory import Shadow


@dataclass(frozen=True, eq=False)
class Out:
    """A rule's result for one output.

    Args:
        sample: its attribution. add, drop: flags added to those of the operands, and removed.
        exact: `add` are all flags. degree, factor: as for `Shadow`.
    """

    sample: Attribution
    add: int = 0
    drop: int = 0
    exact: bool = False
    degree: int | None = None
    factor: int | None = None


Rule = Callable[["Operation"], "Sequence[Out | Attribution] | None"]
"""It returns results for every output tensor; None: run the local probe."""
RULES: dict[str, Rule] = {}
_SPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "fsdp::")
"""Namespaces of torch's collectives, and of fully_shard's copies for them."""
BY_VALUES: set[str] = set()
"""Operations whose attribution depends on the values of their operands."""


def rule(*names: str, by_values: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these names (overloads and in-place ones included)."""

    def register(found: Rule) -> Rule:
        for name in names:
            RULES[name] = found
        if by_values:
            BY_VALUES.update(names)
        return found

    return register


class Operation:
    """A call of an operator.

    Attributes:
        tracer: of the step. name: of the operator. args, kwargs: of the call. outs: its output
        tensors. by_values: the result is not remembered. It holds only for these values, or the
        rule has noted something about this step.
    """

    __slots__ = (
        "__dict__", "_shadows", "args", "by_values", "func", "kind", "kwargs", "outs", "tracer",
    )  # fmt: skip

    def __init__(
        self, tracer: Any, kind: Kind, func: Any, args: tuple, kwargs: dict[str, Any],
        tensors: list[Tensor], shadows: list[Shadow], outs: list[Tensor],
    ) -> None:  # fmt: skip
        self.tracer, self.kind, self.func = tracer, kind, func
        self.args, self.kwargs, self.outs = args, kwargs, outs
        self.by_values = False
        self._shadows = {id(x): shadow for x, shadow in zip(tensors, shadows, strict=True)}

    @property
    def name(self) -> str:
        return self.kind.name

    @cached_property
    def given(self) -> dict[str, Any]:
        """Returns the arguments by their names, defaults included."""
        args, kwargs = self.args, self.kwargs
        return {
            a.name: args[k] if k < len(args) else kwargs.get(a.name, a.default_value)
            for k, a in enumerate(self.func._schema.arguments)
        }

    @property
    def operands(self) -> list[Tensor]:
        """Returns all arguments that are tensors, except those in lists."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def shadow(self, x: Tensor) -> Shadow:
        return self._shadows[id(x)]

    def of(self, x: Any) -> Attribution:
        """Returns the attribution of an operand; None if it depends on no sample, or is not a tensor."""
        return self._shadows[id(x)].sample if isinstance(x, Tensor) else None

    def flags(self, x: Any) -> int:
        return self._shadows[id(x)].flags if isinstance(x, Tensor) else 0

    def knows(self, x: Any) -> bool:
        return isinstance(x, Tensor) and id(x) in self._shadows


_RESHAPING = frozenset(
    {"squeeze", "unsqueeze", "transpose", "t", "swapaxes", "as_strided", "set", "resize"}
)


_NUMBERS = frozenset(("bool", "int", "float", "number", "Scalar"))
_OF_SIZES = frozenset(
    ("is_same_size", "_has_same_storage_numel", "_has_compatible_shallow_copy_type")
)
_COUNTED = frozenset(("bincount", "unique", "_unique2", "unique_consecutive", "unique_dim"))
"""Their rules do not note that Python can read the shape."""
_COUNTING = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))


class Kind:
    """The properties of an operator.

    Attributes:
        name: without overload and, if it writes in place, without the underscore.
        writes: positions of the arguments that it writes into. draws: it draws random numbers;
        random: these are independent.
        fresh: its outputs hold no numbers yet. reads: it gives a number to Python; counts: the
        shape of its output does.
        aliases: its output shares its operand's memory. reshapes: only the geometry changes.
        aligned: how constants lie alongside samples: "pointwise", "stacked", "together" or
        "gradient" (only the first operand), if they do. by_values: not remembered. collective:
        ranks exchange its inputs. filled: arguments whose numbers it replaces (`out=`).
        numbers: which arguments may be Python numbers.
    """

    __slots__ = (
        "aliases", "aligned", "base", "by_values", "collective", "counts", "draws", "filled", "fresh",
        "name", "numbers", "pointwise", "random", "reads", "reshapes", "rule", "writes",
    )  # fmt: skip

    def __init__(self, func: Any, pointwise: Rule, extra: frozenset[str]) -> None:
        space, base = func._schema.name.split("::")
        self.writes = [
            k
            for k, a in enumerate(func._schema.arguments)
            if a.alias_info and a.alias_info.is_write
        ]
        self.filled = [
            a.name for a in func._schema.arguments
            if a.kwarg_only and a.alias_info and a.alias_info.is_write
        ]  # fmt: skip
        if self.writes and base.endswith("_") and not base.endswith("__"):
            base = base[:-1]
        self.base = base
        self.name = base if space == "aten" else func._schema.name
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.random = self.draws and base not in _JOINTLY
        self.collective = func._schema.name.startswith(_SPACES)
        self.fresh = base.startswith(("empty", "new_empty"))
        numbers = any(str(r.type) in _NUMBERS for r in func._schema.returns)
        self.reads = numbers and base not in _OF_SIZES
        self.aliases = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        self.reshapes = bool(self.writes) and base in _RESHAPING
        of_pairs = base in ("max", "min") and overload_of(func) != "other"
        self.pointwise = (torch.Tag.pointwise in func.tags or base in extra) and not of_pairs
        self.rule: Rule | None = pointwise if self.pointwise else RULES.get(self.name)
        self.by_values = self.name in BY_VALUES or self.name == "eq"
        self.counts = bool(_COUNTING & set(func.tags)) and (self.rule is None or base in _COUNTED)
        self.aligned = self._alignment()
        self.numbers = tuple(
            k for k, a in enumerate(func._schema.arguments)
            if str(a.type) in ("Tensor", "number", "Optional[number]")
        )  # fmt: skip

    def written(self, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Returns the operands that it writes into."""
        given = [args[k] for k in self.writes if k < len(args)]
        return tensors_in([*given, *self.replaced(kwargs)])

    def replaced(self, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Returns the operands whose numbers it replaces."""
        return tensors_in([kwargs.get(name) for name in self.filled]) if self.filled else []

    def _alignment(self) -> str:
        """Returns how constants lie alongside samples, if they do."""
        if self.name in _TOGETHER:
            return "together"
        if self.pointwise or self.name in _ENTRIES:
            return "pointwise" if self.name not in ("fill", "zero") else ""
        if self.name in _STACKED:
            return "stacked"
        return "gradient" if self.name.endswith("_backward") else ""


_STACKED = frozenset((
    "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu", "_linalg_solve_ex",
    "linalg_solve_triangular", "linalg_lu_solve", "cholesky_solve", "triangular_solve",
))  # fmt: skip
"""Products and solutions whose first axis holds one matrix per entry."""
_ENTRIES = frozenset(("polar", "complex", "linalg_cross", "searchsorted"))
"""Operations by entry or by row that torch does not tag as pointwise."""
_TOGETHER = frozenset((
    "cat", "stack", "index_put", "_index_put_impl", "scatter", "scatter_add", "index_copy",
    "index_fill", "slice_scatter", "select_scatter", "masked_scatter", "copy", "block_diag",
    "index_add", "scatter_reduce", "diagonal_scatter",
))  # fmt: skip
"""Their results hold constant entries among those of samples."""
_JOINTLY = frozenset(("randperm", "multinomial"))
"""Their numbers are random, but depend on each other."""


# Arguments


def is_of_losses(kind: Kind, tensors: list[Tensor]) -> bool:
    """Whether it adds numbers, or multiplies by a constant: gradients then depend on none of them."""
    if any(x.dim() for x in tensors) or kind.writes:
        return False
    alone = len(tensors) == 1 and kind.name in ("mul", "div", "neg", "ones_like", "detach")
    return alone or kind.name in ("add", "sub")


def is_leaf(x: Tensor) -> bool:
    """Whether no operation has made it; torch does not know for a view made without a graph."""
    try:
        return x.is_leaf
    except RuntimeError:
        return False


def is_read(call: Operation, x: Tensor, what: str) -> bool:
    """Notes as read by Python a number of several samples that decides the computation for all."""
    if x.numel() != 1 or not call.tracer.lines.in_model() or not is_mixed(call.of(x)):
        return False
    call.by_values = True  # it is noted every time
    call.tracer.read(what, [call.shadow(x)])
    return True


def has_zeros(x: Tensor) -> bool:
    """Whether some values are exactly 0, and some are not."""
    return x.is_floating_point() and not x.is_meta and bool((x == 0).any()) and bool(x.any())


def tensors_in(found: Any) -> list[Tensor]:
    """Returns the tensors of a nested structure."""
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]


def generator_of(tensors: Sequence[Tensor], given: Mapping[str, Any]) -> torch.Generator | None:
    """Returns the generator of an operation: the given one, else its device's."""
    if (own := given.get("generator")) is not None:
        return own
    device = torch.device(given.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def taken_apart(func: Any, args: tuple, kwargs: dict) -> tuple[list[Tensor], list]:
    """Returns the tensors among the arguments, and what identifies the others."""
    tensors: list[Tensor] = []
    key: list = [func, *kwargs]
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
            key.append("tensor")
        elif isinstance(value, (list, tuple)):
            for held in value:
                if isinstance(held, Tensor):
                    tensors.append(held)
                    key.append("tensor")
                else:
                    key.append(held)
            key.append("]")
        else:
            key.append(value)
    return tensors, key
