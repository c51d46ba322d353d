"""Operations that choose entries by other tensors: indices, masks, scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.law import changes_alongside
from fastclip.trace.memory import BY_VALUE, LEARNED, MOVED, ORDER, POSITIONS, STICKY
from fastclip.trace.operation import Operation, Out, is_read, rule


def _several(call: Operation, flags: int = 0) -> Out:
    return Out(at.everywhere(at.SEVERAL, call.outs[0].dim()), flags | LEARNED, exact=True)


def _one_axis(found: Tensor, axis: int, dims: int) -> Tensor:
    """Returns the attribution of a list that indexes one axis."""
    return found.reshape([-1 if d == axis else 1 for d in range(dims)])


# Reading


@rule("gather", "index_select", "take_along_dim", by_values=True)
def _gathered(call: Operation) -> list[Any] | None:
    x, axis, index = call.args[:3]
    if call.name == "take_along_dim" or not isinstance(index, Tensor):
        return None
    axis %= max(1, x.dim())
    own, of_index = call.of(x), call.of(index)
    chosen_by_data = False
    if own is not None and own.shape[axis] > 1:
        if index.is_meta:
            own = at.reduced(own, [axis])
        elif call.name == "gather":
            own = at.compressed(torch.gather(at.expanded(own, x.shape), axis, index))
            chosen_by_data = of_index is not None
        else:
            own = at.compressed(torch.index_select(own, axis, index))
            chosen_by_data = of_index is not None
    elif own is not None and call.name == "gather":
        own = own.expand([1 if d == axis else n for d, n in enumerate(own.shape)])
        own = own[
            tuple(
                slice(0, index.shape[d]) if n > 1 else slice(None) for d, n in enumerate(own.shape)
            )
        ]
    if of_index is not None and call.name == "index_select":
        of_index = _one_axis(of_index, axis, x.dim())
    if call.name == "gather" and of_index is None and own is not None and not index.is_meta:
        rows = _whose_slices(call.of(x), x, axis)
        among = None if rows is None else torch.gather(rows, axis, index)
        if among is not None and _is_numbered(call, index, among):
            return [Out(own, call.flags(x) & STICKY | ORDER, exact=True)]
    return [_chosen(call, own, of_index, call.flags(x), call.flags(index), chosen_by_data)]


def _whose_slices(own: at.Attribution, x: Tensor, axis: int) -> Tensor | None:
    """Returns the sample of each slice along this axis, at all entries; None if it has several."""
    rows = at.reduced(own, [axis])
    if rows is None or at.is_mixed(rows):
        return None
    return rows.expand(x.shape)


def _is_numbered(call: Operation, index: Tensor, own: at.Attribution) -> bool:
    """Whether a constant index takes different entries of different samples."""
    assert own is not None
    moved = bool(call.flags(call.args[0]) & MOVED)
    return changes_alongside(index, own, call.shadow(index), moved)


def _chosen(
    call: Operation, own: at.Attribution, of_index: at.Attribution, flags: int, of: int, by_data: bool
) -> Out:  # fmt: skip
    """Handles an index whose numbers are data, along the batch axis (`by_data`) or elsewhere."""
    flags, of = flags & STICKY, of & STICKY
    if by_data:  # as an index a position in the batch is correct
        back = flags & MOVED and of & (MOVED | POSITIONS) and own is not None and at.is_alike(own)
        flags |= of & ~(ORDER | POSITIONS) | (MOVED if of & MOVED else BY_VALUE)
        if back:  # as the values of this batch say
            flags = flags & ~MOVED | BY_VALUE
        return Out(at.joined(own, of_index), flags, exact=True)
    if of & POSITIONS and (own is not None or flags & LEARNED or call.args[0].is_floating_point()):
        return _several(call, flags)
    return Out(at.joined(own, of_index), flags | of, exact=True)


@rule("index", "_unsafe_index", by_values=True)
def _indexed(call: Operation) -> list[Any] | None:
    x, indices = call.args[:2]
    own, out = call.of(x), call.outs[0]
    used = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for _, i in used):
        return _masked(call, x, used)
    data = [
        (axis, i) for axis, i in used if call.of(i) is not None and not is_read(call, i, "an index")
    ]
    flags, of = call.flags(x), 0
    for _, i in data:
        of |= call.flags(i)
    along_samples = own is not None and any(own.shape[axis] > 1 for axis, _ in used)
    by_data = own is not None and any(own.shape[axis] > 1 for axis, _ in data)
    if own is not None:
        if out.is_meta:
            return [_several(call)]
        axes = [axis for axis, _ in used]
        full = own.expand([x.shape[d] if d in axes else n for d, n in enumerate(own.shape)])
        own = at.compressed(torch.ops.aten.index.Tensor(full, list(indices)))
        shape = torch.broadcast_shapes(*[i.shape for _, i in used])
        for axis, i in used:
            rows = _whose_slices(call.of(x), x, axis) if call.of(i) is None else None
            if rows is not None:
                among = at.compressed(torch.ops.aten.index.Tensor(rows, list(indices)))
                if changes_alongside(_spread(i.expand(shape), axes, x), among, call.shadow(i)):
                    flags |= ORDER
    return [_chosen(
        call,
        own,
        _leading(call, x, used, data),
        flags,
        of if not along_samples or by_data else of & ~POSITIONS,
        by_data,
    )]  # fmt: skip


def _leading(
    call: Operation,
    x: Tensor,
    used: Sequence[tuple[int, Tensor]],
    data: Sequence[tuple[int, Tensor]],
) -> at.Attribution:
    """Returns the attribution of the indices, in their axes of the result."""
    shape = torch.broadcast_shapes(*[i.shape for _, i in used])
    found: at.Attribution = None
    for _, i in data:
        found = at.joined(found, at.fitted(call.of(i), len(shape)))
    if found is None:
        return None
    return _spread(found, [axis for axis, _ in used], x)


def _spread(found: Tensor, axes: Sequence[int], x: Tensor) -> Tensor:
    """Moves the attribution of indices of these axes of `x` to the axes of the result."""
    together = list(axes) == list(range(axes[0], axes[-1] + 1))
    before = axes[0] if together else 0
    after = x.dim() - axes[-1] - 1 if together else x.dim() - len(axes)
    return found.reshape([1] * before + list(found.shape) + [1] * after)


def _masked(call: Operation, x: Tensor, used: Sequence[tuple[int, Tensor]]) -> list[Any] | None:
    """Handles a mask: which entries it selects depends on their sample, their positions on all."""
    if len(used) > 1 or call.outs[0].is_meta:
        return None
    axis, mask = used[0]
    of_mask = call.of(mask)
    order = _is_masked_by_number(call, x, axis, mask)
    if of_mask is not None:
        call.tracer.read("number of entries that a mask selects", [call.shadow(mask)])
        _note_number(call, at.is_mixed(at.reduced(of_mask)))
    lead = None
    if of_mask is not None:
        lead = of_mask.reshape(
            [1] * axis + list(of_mask.shape) + [1] * (x.dim() - axis - mask.dim())
        )
    own = at.joined(call.of(x), lead)
    assert own is not None
    axes = range(axis, axis + mask.dim())
    full = own.expand([x.shape[d] if d in axes else n for d, n in enumerate(own.shape)])
    out = torch.ops.aten.index.Tensor(full, [None] * axis + [mask.bool()])
    return [Out(at.compressed(out), MOVED * (of_mask is not None) | order)]


def _note_number(call: Operation, several: bool) -> None:
    """Notes that Python can read the length of a result."""
    if several:
        call.tracer.known_number(call.outs[0].shape[0] if call.outs[0].dim() else 1)


def _is_masked_by_number(call: Operation, x: Tensor, axis: int, mask: Tensor) -> int:
    """Returns ORDER if a constant mask differs between samples."""
    own = call.of(x)
    if own is None or call.of(mask) is not None:
        return 0
    behind = [d for d in range(own.dim()) if not axis <= d < axis + mask.dim()]
    alongside = at.reduced(own, behind, keep=False)
    changes = changes_alongside(mask, alongside, call.shadow(mask))  # type: ignore[arg-type]
    return ORDER if changes else 0


@rule("nonzero", by_values=True)
def _nonzero(call: Operation) -> list[Any]:
    x = call.args[0]
    call.tracer.read("nonzero", [call.shadow(x)])
    own = call.of(x)
    _note_number(call, at.is_mixed(at.reduced(own)))
    if call.outs[0].numel():
        found = at.compressed(at.expanded(own, x.shape)[x != 0][:, None])
    else:
        found = own.reshape(-1)[:1, None]  # type: ignore[union-attr]
    return [Out(found, MOVED | POSITIONS)]


@rule("masked_select", by_values=True)
def _selected(call: Operation) -> list[Any]:
    x, mask = torch.broadcast_tensors(*call.args[:2])
    call.tracer.read("masked_select", [call.shadow(y) for y in call.args[:2]])
    own = at.joined(call.of(call.args[0]), call.of(call.args[1]))
    assert own is not None
    _note_number(call, at.is_mixed(at.reduced(own)))
    if not call.outs[0].numel():
        return [own.reshape(-1)[:1]]
    return [Out(at.compressed(at.fitted(own, x.dim()).expand(x.shape)[mask]), MOVED)]  # type: ignore[union-attr]


@rule("masked_scatter_backward", by_values=True)
def _selected_backward(call: Operation) -> list[Any] | None:
    """Handles the gradient of a mask: selected entries, and zeros elsewhere."""
    g, mask = call.args[:2]
    if g.is_meta:
        return None
    out = call.outs[0]
    of_mask = at.fitted(call.of(mask), g.dim())
    own = at.expanded(at.joined(call.of(g), of_mask), g.shape)[mask.expand(g.shape)]
    found = torch.full([out.numel()], at.NONE, dtype=at.KIND, device="cpu")
    found[: own.numel()] = own[: out.numel()]
    moved = MOVED if of_mask is not None else 0
    return [Out(at.compressed(found.view(out.shape)), moved)]


# Writing


@rule("masked_scatter", by_values=True)
def _scattered_by_mask(call: Operation) -> list[Any] | None:
    """Writes entries of the source in sequence where the mask is set."""
    x, mask, source = call.args[:3]
    if x.is_meta:
        return None
    out = call.outs[0]
    mask = mask.expand(out.shape)
    of_mask = at.fitted(call.of(call.args[1]), out.dim())
    own = at.expanded(at.joined(at.fitted(call.of(x), out.dim()), of_mask), out.shape)
    own = own.clone()
    number = int(mask.sum())
    taken = at.expanded(call.of(source), source.shape).reshape(-1)[:number]
    own[mask] = at.joined(taken, at.expanded(of_mask, out.shape)[mask])  # type: ignore[assignment]
    found = at.compressed(own)
    flags = (call.flags(x) | call.flags(call.args[1]) | call.flags(source)) & STICKY
    if of_mask is not None:
        flags = flags & ~MOVED | BY_VALUE if not at.is_mixed(found) else flags
    return [Out(found, flags, exact=True)]


_ADDS = frozenset(("scatter_add", "index_add", "scatter_reduce"))


@rule(
    "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
    by_values=True,
)  # fmt: skip
def _scattered(call: Operation) -> list[Any] | None:
    base, axis, index = call.args[:3]
    source = call.args[3] if len(call.args) > 3 and isinstance(call.args[3], Tensor) else None
    axis %= max(1, base.dim())
    if base.is_meta:
        return None
    own, of_index, of_source = call.of(base), call.of(index), call.of(source)
    if call.name.startswith("index"):
        of_index = None if of_index is None else _one_axis(of_index, axis, base.dim())
        whole = source is not None and source.dim() == base.dim()
        shape = list(source.shape) if whole else [  # type: ignore[union-attr]
            index.numel() if d == axis else n for d, n in enumerate(base.shape)
        ]  # fmt: skip
        places = _one_axis(index, axis, base.dim()).expand(shape)
        of_source = at.fitted(of_source, base.dim())
    else:
        shape, places = list(index.shape), index
        if of_source is not None:
            of_source = at.expanded(of_source, source.shape)[tuple(slice(0, n) for n in shape)]  # type: ignore[union-attr]
    if of_index is not None and of_source is not None:
        of_index, of_source = at.expanded(of_index, shape), at.expanded(of_source, shape)
    written = at.joined(of_source, of_index)
    moved = call.flags(index) & MOVED
    if of_index is not None and not moved:  # any position of the axis may have been written
        return _anywhere(base, axis, own, written)
    if written is None:
        written = at.everywhere(at.NONE, base.dim())
    full = at.expanded(own, base.shape).contiguous()
    found = at.compressed(
        at.scattered(full, axis, places, written.expand(shape).contiguous(), call.name in _ADDS)
    )
    flags = (call.flags(base) | call.flags(source)) & STICKY
    if of_index is None and not call.name.startswith("index"):
        alongside = at.reduced(found, [axis])
        if changes_alongside(index, alongside, call.shadow(index)):  # type: ignore[arg-type]
            flags |= ORDER
    if of_index is not None:
        numbers = of_source is None and source is not None and source.numel() > 1
        if numbers and moved:
            numbers = changes_alongside(source, of_index, call.shadow(source), True)  # type: ignore[arg-type]
            flags |= POSITIONS * numbers  # by a sample's position among all
        flags |= (
            call.flags(index) & STICKY & ~(ORDER if numbers and not moved else ORDER | POSITIONS)
        )
        if at.is_alike(found) and (moved or not numbers):
            flags &= ~MOVED
    return [Out(found, flags, exact=True)]


def _anywhere(
    base: Tensor, axis: int, own: at.Attribution, written: at.Attribution
) -> list[Any] | None:
    assert written is not None
    if own is not None and any(
        1 not in (n, k) and n != k for n, k in zip(own.shape, written.shape, strict=True)
    ):
        return None
    if written.shape[axis] > 1 or (own is not None and own.shape[axis] > 1):
        both = at.joined(at.reduced(own, [axis]), at.reduced(written, [axis]))
        return [at.reduced(both, [axis])] if _fits(both, base) else None
    return [at.joined(own, written)] if _fits(written, base) else None


def _fits(found: at.Attribution, x: Tensor) -> bool:
    return found is not None and all(n in (1, x.shape[d]) for d, n in enumerate(found.shape))


@rule("index_put", "_index_put_impl", "_unsafe_index_put", by_values=True)
def _put(call: Operation) -> list[Any] | None:
    base, indices, source = call.args[:3]
    if base.is_meta:
        return None
    adds = bool(call.given.get("accumulate", False))
    own, of_source = call.of(base), call.of(source)
    used = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in used):
        return _put_by_mask(call, base, indices, source)
    full = at.expanded(own, base.shape).contiguous()
    target = full[tuple(slice(None) if i is None else i for i in indices)]
    written = at.expanded(of_source, source.shape).expand(target.shape)
    data = [i for i in used if call.of(i) is not None]
    moved = any(call.flags(i) & MOVED for i in used)
    if data:
        if len(used) != len(indices):
            return None
        shape = torch.broadcast_shapes(*[i.shape for i in used])
        for i in data:
            lead = at.fitted(call.of(i), len(shape))
            lead = lead.reshape(list(lead.shape) + [1] * (written.dim() - lead.dim()))  # type: ignore[union-attr]
            written = at.joined(written, lead.expand(written.shape))  # type: ignore[assignment]
        if not moved:
            return [_put_anywhere(call, full, indices, written)]
    found = at.compressed(_written(full, indices, written, adds))
    flags = (call.flags(base) | call.flags(source)) & STICKY
    if _is_put_by_number(call, full, indices, at.joined(at.compressed(target), written)):
        flags |= ORDER
    for i in used:
        flags |= call.flags(i) & STICKY & ~ORDER
    if (
        moved
        and (of_source is not None or source.numel() == 1)
        and not call.flags(source) & POSITIONS
    ):
        flags &= ~(POSITIONS | (MOVED if at.is_alike(found) else 0))  # samples are put back
    return [Out(found, flags, exact=True)]


def _is_put_by_number(
    call: Operation, full: Tensor, indices: Sequence[Any], written: at.Attribution
) -> bool:  # fmt: skip
    """Whether constant indices of axes without samples differ between samples."""
    used = [i for i in indices if i is not None]
    shape = torch.broadcast_shapes(*[i.shape for i in used])
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    if written is None or call.of(call.args[0]) is None:
        return False
    return any(
        call.of(i) is None
        and call.of(call.args[0]).shape[axis] == 1  # type: ignore[union-attr]
        and changes_alongside(_spread(i.expand(shape), axes, full), written, call.shadow(i))
        for axis, i in zip(axes, used, strict=True)
    )


def _put_anywhere(call: Operation, full: Tensor, indices: Sequence[Any], written: Tensor) -> Tensor:
    """Handles writes whose positions are data: all entries along those axes may be written."""
    axes = [d for d, i in enumerate(indices) if i is not None and call.of(i) is not None]
    if all(call.of(i) is not None for i in indices if i is not None):
        one = at.reduced(written).reshape([1] * full.dim())  # type: ignore[union-attr]
        return at.compressed(at.reduced(at.joined(at.reduced(full, axes), one), axes))  # type: ignore[arg-type]
    spread = at.reduced(full, axes).expand(full.shape).clone()  # type: ignore[union-attr]
    return at.compressed(at.reduced(_written(spread, indices, written, True), axes))  # type: ignore[arg-type]


def _put_by_mask(
    call: Operation, base: Tensor, indices: Sequence[Any], source: Tensor
) -> list[Any] | None:
    if len(indices) > 1:
        return None
    mask = indices[0].bool()
    of_mask = call.of(indices[0])
    full = at.expanded(call.of(base), base.shape)
    if of_mask is not None:
        of_mask = of_mask.reshape(list(of_mask.shape) + [1] * (base.dim() - mask.dim()))
        full = at.joined(full, of_mask.expand(base.shape))  # type: ignore[assignment]
    full = full.clone()
    of_source = call.of(source)
    if of_source is not None:
        taken = full[mask]
        full[mask] = at.joined(taken, at.expanded(of_source, source.shape).expand(taken.shape))  # type: ignore[assignment]
    found, order = at.compressed(full), _is_masked_by_number(call, base, 0, mask)
    if of_mask is None or at.is_mixed(found) or call.flags(base) & MOVED:
        return [Out(found, order)]
    flags = (call.flags(base) | call.flags(source) | call.flags(indices[0])) & STICKY
    if flags & MOVED:  # by the values of this batch, each is back in its position
        flags = flags & ~MOVED | BY_VALUE
    return [Out(found, flags | order, exact=True)]


def _written(full: Tensor, indices: Sequence[Any], values: Tensor, adds: bool) -> Tensor:
    numbers = torch.arange(full.numel(), device="cpu").view(full.shape)
    places = numbers[tuple(slice(None) if i is None else i for i in indices)].reshape(-1)
    flat = full.reshape(-1)
    return at.scattered(flat, 0, places, values.reshape(-1), adds).view(full.shape)
