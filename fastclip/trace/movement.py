"""Operations that move entries or join whole axes: views, sums, softmax, sorts, collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.memory import BY_VALUE, MOVED, ORDER, POSITIONS, RANDOM, STICKY
from fastclip.trace.operation import Operation, Out, rule, tensors_in


def axes_of(call: Operation, dims: int) -> list[int]:
    """Returns the axes that the argument `dim` names; all if it names none."""
    dim = call.given.get("dim")
    if dim is None or (isinstance(dim, (list, tuple)) and not len(dim)):
        return list(range(dims))
    return [d % dims if dims else 0 for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


# Views

_UNCHANGED = frozenset(("_conj", "_neg_view", "real", "imag", "alias", "detach", "lift"))
_TAKES_A_PART = frozenset((
    "slice", "select", "split", "split_with_sizes", "unbind", "narrow", "chunk", "unsafe_chunk",
    "unsafe_split", "unsafe_split_with_sizes",
))  # fmt: skip


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "_unsafe_view_copy")
def _reshaped(call: Operation) -> list[Any]:
    x, out = call.args[0], call.outs[0]
    shadow = call.shadow(x)
    if isinstance(call.args[1], torch.dtype):
        same = out.shape == x.shape
        return [shadow.sample if same else at.reduced(shadow.sample, [x.dim() - 1])]
    return [Out(at.reshaped(shadow.sample, x.shape, out.shape), degree=shadow.degree)]  # type: ignore[arg-type]


@rule(
    "alias", "detach", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand", "slice",
    "select", "split", "split_with_sizes", "unbind", "unfold", "numpy_T", "movedim",
    "_conj", "_neg_view", "real", "imag", "unsafe_split", "unsafe_split_with_sizes", "chunk",
    "unsafe_chunk", "lift", "narrow", "swapaxes",
)  # fmt: skip
def _viewed(call: Operation) -> list[Any]:
    x = call.args[0]
    shadow = call.shadow(x)
    if call.name in _UNCHANGED:
        return [Out(shadow.sample, degree=shadow.degree)]
    found = call.func(at.expanded(shadow.sample, x.shape), *call.args[1:], **call.kwargs)
    found = [found] if isinstance(found, Tensor) else list(found)
    flag = 0
    if shadow.flags & MOVED and call.name in _TAKES_A_PART:
        axis = call.given.get("dim", 0) % x.dim()
        if found[0].shape != x.shape and at.lie_along(shadow.sample, axis):  # type: ignore[arg-type]
            # A fixed part of samples whose positions follow from data.
            flag = BY_VALUE if _read(call) else ORDER
    return [Out(_narrowed(f), flag, degree=shadow.degree) for f in found]


def _read(call: Operation) -> bool:
    """Notes that Python knows the number of entries."""
    tracer = call.tracer
    known = tracer.read_by_python or tracer.memory.lengths_read
    return known or any(r.what != "nonzero" for r in tracer.report.reads)


def _narrowed(found: Tensor) -> Tensor:
    for axis in range(found.dim()):
        if found.shape[axis] > 1 and found.stride(axis) == 0:
            found = found.narrow(axis, 0, 1)
    return at.compressed(found)


def _by_number(call: Operation, axes: tuple[int, int]) -> int:
    """Returns ORDER if entries taken along one axis depend on the position along the other."""
    found = call.of(call.args[0])
    assert found is not None
    return ORDER * any(at.lie_along(found, axis) for axis in axes)


@rule("tril", "triu")
def _triangle(call: Operation) -> list[Any]:
    return [Out(call.of(call.args[0]), _by_number(call, (-2, -1)))]


@rule("diagonal")
def _diagonal(call: Operation) -> list[Any]:
    x, axes = call.args[0], (call.given["dim1"], call.given["dim2"])
    found = call.func(at.expanded(call.of(x), x.shape), *call.args[1:], **call.kwargs)
    return [Out(_narrowed(found), _by_number(call, axes))]


@rule("view_as_real")
def _as_real(call: Operation) -> list[Any]:
    return [call.of(call.args[0]).unsqueeze(-1)]  # type: ignore[union-attr]


@rule("view_as_complex")
def _as_complex(call: Operation) -> list[Any]:
    return [at.reduced(call.of(call.args[0]), [-1], keep=False)]


@rule("complex", "polar")
def _complex(call: Operation) -> list[Any]:
    return [at.joined(call.of(call.args[0]), call.of(call.args[1]))]


@rule("as_strided", by_values=True)
def _strided(call: Operation) -> list[Any]:
    found = call.tracer.memory.found(call.outs[0])
    assert found is not None
    return [Out(found.sample, found.flags & STICKY)]


@rule(
    "empty_like", "new_zeros", "new_empty", "new_full", "new_ones", "zeros_like", "rand_like",
    "randn_like", "new_empty_strided", "bernoulli_p",
)  # fmt: skip
def _made(call: Operation) -> list[Any]:
    return [Out(None, RANDOM * call.kind.random, exact=True)] * len(call.outs)


# Copies


@rule("cat", "stack")
def _together(call: Operation) -> list[Any]:
    new = call.name == "stack"
    tensors = [x for x in call.given["tensors"] if x.dim() == call.outs[0].dim() - new]
    axis, dims = call.given["dim"] % call.outs[0].dim(), tensors[0].dim()
    found = [call.of(x) for x in tensors]
    held = [f for f in found if f is not None]
    if not held:  # memory with samples is overwritten, or holds nothing
        return [None]
    sizes = [max(f.shape[d] for f in held) for d in range(dims)]
    parts = [
        at.expanded(f, [x.shape[d] if d == axis and not new else sizes[d] for d in range(dims)])
        for x, f in zip(tensors, found, strict=True)
    ]
    return [at.compressed(torch.stack(parts, axis) if new else torch.cat(parts, axis))]


_BY_NUMBERS = frozenset(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col"))
"""Their kernels take only floating-point numbers."""


@rule(
    "flip", "roll", "repeat", "slice_backward", "select_backward", "diagonal_backward",
    "constant_pad_nd", "repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "slice_scatter", "select_scatter", "rot90", "_pad_enum", "reflection_pad1d", "reflection_pad2d",
    "replication_pad2d", "replication_pad1d", "im2col", "tile", "as_strided_scatter",
    "diagonal_scatter", "unfold_copy", "block_diag",
)  # fmt: skip
def _moved(call: Operation) -> list[Any] | None:
    """Runs the operation on the attribution. New entries are 0, which stands for no sample."""
    args = call.args
    if call.name == "constant_pad_nd":
        args = (*args[:2], 0)
    if call.name == "repeat_interleave" and isinstance(args[-1], Tensor):
        return _repeated(call) if len(args) == 1 else None

    def up(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            return [up(x) for x in value]
        if not call.knows(value):
            return value
        raised = at.expanded(call.of(value), value.shape) + 1
        floats = call.name in _BY_NUMBERS or ("pad" in call.name and call.name != "constant_pad_nd")
        return raised.double() if floats else raised

    found = call.func(*map(up, args), **call.kwargs)
    return [at.compressed(found.to(at.KIND) - 1)]


def _repeated(call: Operation) -> list[Any] | None:
    """Handles repeats: the number of each entry, as often as it says."""
    repeats, out = call.args[0], call.outs[0]
    if repeats.is_meta:
        return None
    call.by_values = True
    call.tracer.read("lengths", [call.shadow(repeats)])
    found = torch.repeat_interleave(at.expanded(call.of(repeats), repeats.shape), repeats.cpu())
    if not out.numel():
        found = at.expanded(call.of(repeats), repeats.shape)[:1]
    return [Out(at.compressed(found), MOVED | POSITIONS)]


@rule("unfold_backward")
def _unfold_backward(call: Operation) -> list[Any]:
    """Adds windows of an axis, which lie along the last one."""
    given = call.given
    own = at.reduced(call.of(given["grad_in"]), [given["dim"], -1])
    return [own.squeeze(-1)]  # type: ignore[union-attr]


# Whole axes


def mean_of(call: Operation, found: at.Attribution) -> int | None:
    """Returns the degree of a mean over entries of samples; None if data decides their number."""
    if found is None:
        return -1
    moved = any(call.flags(x) & MOVED for x in call.operands)
    memory, several = call.tracer.memory, at.is_of_several(found)
    if (moved or several) and not at.are_as_many(
        found, memory.samples, memory.present, beside=not moved
    ):
        call.by_values = True  # it is noted every time
        call.tracer.counts.add(call.operands, call.tracer.lines.current())
        return None
    call.tracer.report.counted |= moved
    return -1


@rule(
    "sum", "mean", "amax", "amin", "any", "all", "prod", "var", "std", "var_mean", "std_mean",
    "linalg_vector_norm", "norm", "logsumexp", "argmax", "argmin", "max", "min", "median", "nansum",
    "count_nonzero", "aminmax", "nanmedian", "mode", "native_norm", "trace", "nanmean",
)  # fmt: skip
def _reduced(call: Operation) -> list[Any]:
    x = call.args[0]
    shadow, out = call.shadow(x), call.outs[0]
    axes = axes_of(call, x.dim())
    if call.name == "trace":
        axes = list(range(x.dim()))
    found = at.reduced(shadow.sample, axes, out.dim() == x.dim())
    if len(axes) == x.dim():
        found = found.reshape([1] * out.dim())  # type: ignore[union-attr]
    degree = None
    if call.name in ("sum", "mean"):
        if at.is_mixed(found) and not shadow.mixed:
            degree = 0 if call.name == "sum" else mean_of(call, shadow.sample)
            call.tracer.python.extents.add(x.numel())
            call.by_values = True  # noted in every step
            if degree is not None and shadow.degree is not None:
                degree += shadow.degree
        else:
            degree = shadow.degree
    return [Out(found, degree=degree)] * len(call.outs)


@rule(
    "_linalg_det", "linalg_matrix_norm", "linalg_inv_ex", "_linalg_slogdet", "_linalg_solve_ex",
    "linalg_cholesky_ex", "linalg_lu_factor_ex", "_linalg_svd", "_linalg_eigh", "linalg_qr",
    "linalg_solve_triangular", "cholesky_solve", "linalg_pinv", "triangular_solve", "linalg_matrix_exp",
    "linalg_eig", "linalg_eigvals", "_linalg_eigvals", "linalg_ldl_factor_ex", "linalg_inv", "cholesky",
    "cholesky_inverse", "linalg_lu", "linalg_lu_solve", "lu_unpack", "linalg_ldl_solve",
)  # fmt: skip
def _matrices(call: Operation) -> list[Any]:
    """Joins each matrix, in the last two axes."""
    found: at.Attribution = None
    dims = call.args[0].dim()
    for x in call.operands:
        own = call.of(x)
        if own is not None and x.dim() == dims - 1 and not x.is_floating_point():  # pivots
            own = own.unsqueeze(-1)
        found = at.joined(found, at.fitted(at.reduced(own, [-1, -2]), dims))
    assert found is not None
    return [
        found if x.dim() == dims else at.reduced(found, [-1, -2][: dims - x.dim()], keep=False)
        for x in call.outs
    ]


@rule(
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "kthvalue", "_safe_softmax",
    "cumprod_backward", "glu", "glu_backward", "_logcumsumexp",
)  # fmt: skip
def _along(call: Operation) -> list[Any] | None:
    """Joins an axis: each of its entries depends on all of it."""
    axis = call.given["dim"]
    found: at.Attribution = None
    for x in call.operands:
        own = call.of(x)
        if call.name == "_softmax_backward_data" and x is call.args[0] and at.is_mixed(own):
            own = _where_weighted(call, x, call.args[1])
        found = at.joined(found, at.reduced(own, [axis]))
    assert found is not None
    for x in call.outs:
        same = x.dim() == found.dim()
        if same and any(n not in (1, x.shape[d]) for d, n in enumerate(found.shape)):
            return None
    if call.name in ("_softmax", "_safe_softmax", "_softmax_backward_data"):
        found = _without_masked(call, found)
    if call.name == "kthvalue" and not call.given["keepdim"]:
        found = at.reduced(found, [axis], keep=False)
    return [found] * len(call.outs)


def _without_masked(call: Operation, found: Tensor) -> Tensor:
    """Removes entries where a constant mask leaves -inf: there a softmax is 0, of no sample."""
    backward = call.name == "_softmax_backward_data"
    x = call.args[1 if backward else 0]
    own = call.of(x)
    if own is None or x.is_meta or not bool((own == at.NONE).any()):
        return found
    call.by_values = True
    gone = (own == at.NONE) & (x.detach() == (0 if backward else -torch.inf))
    return at.compressed(found.expand(x.shape).masked_fill(gone, at.NONE))


@rule("renorm")
def _renormed(call: Operation) -> list[Any]:
    """Joins each slice of an axis, which is divided by its norm."""
    x, axis = call.args[0], call.given["dim"] % call.args[0].dim()
    return [at.reduced(call.of(x), [d for d in range(x.dim()) if d != axis])]


def _where_weighted(call: Operation, g: Tensor, weights: Tensor) -> at.Attribution:
    """Returns the attribution of a softmax' gradient where the softmax is not exactly 0."""
    if weights.is_meta:
        return call.of(g)
    call.by_values = True
    return at.expanded(call.of(g), g.shape).masked_fill(weights == 0, at.NONE)


@rule("bucketize", "searchsorted")
def _placed(call: Operation) -> list[Any] | None:
    """Joins values with boundaries, which lie along the last axis."""
    x, bounds = call.args[:2] if call.name == "bucketize" else call.args[1::-1]
    sorter = call.given.get("sorter")
    if call.of(sorter) is not None or not isinstance(x, Tensor):
        return None
    of_bounds = at.reduced(call.of(bounds), [-1])
    return [at.joined(call.of(x), at.fitted(of_bounds, call.outs[0].dim()))]


@rule("_sample_dirichlet")
def _drawn_together(call: Operation) -> list[Any]:
    """Joins the last axis, along which numbers sum to one."""
    return [at.reduced(call.of(call.args[0]), [-1])]


@rule("histc", "bincount", "unique", "_unique2", "unique_consecutive", "unique_dim")
def _counted(call: Operation) -> list[Any]:
    found = at.reduced(call.of(call.args[0]))
    one = found.reshape(-1)[:1]  # type: ignore[union-attr]
    return [one.reshape([1] * x.dim()) for x in call.outs]


@rule("sort", "topk", "argsort", by_values=True)
def _sorted(call: Operation) -> list[Any] | None:
    """Handles a sort: entries move along the axis, and each keeps its sample."""
    x, index = call.args[0], call.outs[-1]
    found = call.of(x)
    assert found is not None
    axis = call.given["dim"] % max(1, x.dim())
    if x.dim() == 0 or found.shape[axis] == 1:
        return [found] * len(call.outs)
    if index.is_meta:
        return None
    if index.shape[axis] < x.shape[axis]:  # which entries are the first depends on all
        return [at.reduced(found, [axis])] * len(call.outs)
    moved = at.compressed(torch.gather(found.expand(x.shape), axis, index))
    return [Out(moved, MOVED)] * (len(call.outs) - 1) + [Out(moved, MOVED | POSITIONS)]


# Exchanges between ranks are never probed: each rank must run them equally often

_FILLED = ("out", "all_gather_output")
"""Arguments that collectives write into; few schemas say so."""


def exchanged(tracer: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a collective. Its outputs depend on no sample if its inputs do not, and else on several.

    Other ranks have other samples.
    """
    declared = func._schema.arguments
    given = {
        a.name: args[k] if k < len(args) else kwargs.get(a.name) for k, a in enumerate(declared)
    }
    filled = {
        a.name for a in declared
        if a.name.startswith(_FILLED) or (a.alias_info is not None and a.alias_info.is_write)
    }  # fmt: skip
    taken = tensors_in([value for name, value in given.items() if name not in filled])
    with tracer.aside():
        held = any(tracer.shadow_of(x).held for x in taken)
    out = func(*args, **kwargs)
    written = tensors_in([given[name] for name in filled] if filled else taken)
    cause = tracer.cause(func._schema.name) if held else None
    with tracer.aside():
        for x in (*written, *tensors_in(out)):
            of = (
                tracer.made(at.everywhere(at.SEVERAL, x.dim())) if held else tracer.shadows.constant
            )
            tracer.memory.write(x, of, cause, whole=False)
    return out
