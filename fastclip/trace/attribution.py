"""Sample attribution: the sample of each entry of a tensor, as integers that broadcast to its shape.

`[b, 1, 1]` means "sample i along axis 0". `[b, t]` gives it entry by entry. None means "no sample" for
all entries. An attribution never has an axis that the tensor lacks, and is never written into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

NONE = -1
"""The entry depends on no sample."""
SEVERAL = 1 << 30
"""The entry depends on more than one sample."""
UNSEEN = SEVERAL + 1
"""No operation was seen to write the entry. It joins like another sample."""
_ABOVE = SEVERAL + 2
KIND = torch.int32

Attribution = Tensor | None


def everywhere(value: int, dims: int) -> Tensor:
    """Returns one value for all entries of a tensor of so many dimensions."""
    return torch.full([1] * dims, value, dtype=KIND, device="cpu")


def along(size: int, axis: int, dims: int, each: int = 1) -> Tensor:
    """Returns sample i at position i of one axis, or at `each` positions from i * `each` on."""
    samples = torch.arange(size, dtype=KIND, device="cpu").repeat_interleave(each)
    return samples.view([-1 if k == axis else 1 for k in range(dims)])


def compressed(found: Tensor) -> Tensor:
    """Returns the same with one entry along axes where nothing changes."""
    for axis, size in enumerate(found.shape):
        if size > 1:
            first = found.narrow(axis, 0, 1)
            if found.stride(axis) == 0 or bool((found == first).all()):
                found = first
    return found.contiguous()


def joined(one: Attribution, other: Attribution) -> Attribution:
    """Returns the attribution of entries that depend on both."""
    if one is None or one is other:
        return other
    if other is None:
        return one
    out = torch.maximum(one, other)
    return out.masked_fill_((one != other) & (one != NONE) & (other != NONE), SEVERAL)


def reduced(
    found: Attribution, axes: Iterable[int] | None = None, keep: bool = True
) -> Attribution:
    """Returns the attribution of reductions over these axes; None: over all."""
    if found is None:
        return None
    dims = found.dim()
    chosen = (
        sorted({axis % dims for axis in (range(dims) if axes is None else axes)}) if dims else []
    )
    wide = [axis for axis in chosen if found.shape[axis] > 1]
    if wide:
        high = found.amax(wide, keepdim=True)
        low = found.masked_fill(found == NONE, _ABOVE).amin(wide, keepdim=True)
        found = high.masked_fill_((low != high) & (high != NONE), SEVERAL)
    if not keep and chosen:
        found = found.reshape([n for axis, n in enumerate(found.shape) if axis not in chosen])
    return found


def expanded(found: Attribution, shape: Sequence[int]) -> Tensor:
    """Expands to the tensor's shape, without new memory."""
    if found is None:
        return torch.full([1] * len(shape), NONE, dtype=KIND, device="cpu").expand(shape)
    return found.expand(shape)


def fitted(found: Attribution, dims: int) -> Attribution:
    """Adds or removes leading axes to have as many as a tensor."""
    if found is None or found.dim() == dims:
        return found
    if found.dim() > dims:
        return found.reshape(found.shape[found.dim() - dims :])
    return found.reshape([1] * (dims - found.dim()) + list(found.shape))


def reshaped(found: Tensor, shape: Sequence[int], new: Sequence[int]) -> Tensor:
    """Reshapes the attribution of a tensor; only groups of axes that change are expanded."""
    if found.numel() == 1:
        return found.reshape([1] * len(new))
    if 0 in shape or 0 in new:
        return found.expand(shape).reshape(new)
    source: list[int] = []
    target: list[int] = []
    i = j = 0
    while i < len(shape) or j < len(new):
        begin, start = i, j
        have = shape[i] if i < len(shape) else 1
        want = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(shape)), min(j + 1, len(new))
        while have != want:
            if have < want:
                have, i = have * shape[i], i + 1
            else:
                want, j = want * new[j], j + 1
        changes = any(found.shape[axis] > 1 for axis in range(begin, i))
        source += list(shape[begin:i]) if changes else [1] * (i - begin)
        target += list(new[start:j]) if changes else [1] * (j - start)
    return compressed(found.expand(source).reshape(target))


def meet(shape: Sequence[int], found: Attribution) -> bool:
    """Whether a tensor broadcast against this one has an axis with one entry per sample."""
    if found is None:
        return False
    behind = range(1, 1 + min(len(shape), found.dim()))
    return any(shape[-k] > 1 and lie_along(found, found.dim() - k) for k in behind)


def scattered(into: Tensor, axis: int, at: Tensor, values: Tensor, keeps: bool) -> Tensor:
    """Returns the attribution after a scatter along an axis: values at one position are joined.

    Args:
        into, at, values: as for `Tensor.scatter`. keeps: the old entries count too.
    """
    high = into.scatter_reduce(axis, at, values, "amax", include_self=keeps)
    low = into.masked_fill(into == NONE, _ABOVE).scatter_reduce(
        axis, at, values.masked_fill(values == NONE, _ABOVE), "amin", include_self=keeps
    )
    return high.masked_fill((low != high) & (high != NONE) & (low <= SEVERAL), SEVERAL)


def is_mixed(found: Attribution) -> bool:
    """Whether some entry depends on several samples, or on an entry that no operation wrote."""
    return found is not None and bool((found >= SEVERAL).any())


def is_alike(found: Tensor) -> bool:
    """Whether samples follow each other along one axis with equal numbers of entries, in one order of
    flattened axes. Constants may lie between them."""
    wide = [axis for axis in range(found.dim()) if lie_along(found, axis)]
    if len(wide) != 1:
        return False
    line = reduced(found, [axis for axis in range(found.dim()) if axis != wide[0]])
    assert line is not None
    flat = line.reshape(-1).long()
    if bool((flat < 0).any()) or bool((flat >= flat.numel()).any()):
        return False
    counts = torch.bincount(flat)
    each = int(counts[0])
    if bool((counts != each).any()):
        return False
    numbers = torch.arange(len(counts), device="cpu")
    return any(
        torch.equal(flat, numbers.repeat_interleave(inner).repeat(each // inner))
        for inner in range(1, each + 1)
        if each % inner == 0
    )


def lie_along(found: Tensor, axis: int) -> bool:
    """Whether entries of several samples lie along this axis."""
    if found.shape[axis] < 2:
        return False
    none = found == NONE
    least = found.masked_fill(none, SEVERAL).amin(axis)
    return bool(((found.amax(axis) != least) & ~none.all(axis)).any())


def is_of_several(found: Tensor) -> bool:
    """Whether there are entries of more than one sample."""
    own = found[(found >= 0) & (found < SEVERAL)]
    return own.numel() > 1 and bool((own != own.reshape(-1)[0]).any())


def are_as_many(
    found: Tensor, samples: int, present: Tensor | None = None, *, beside: bool = False
) -> bool:
    """Whether all of these samples have equal numbers of entries, including constant ones instead.

    Args:
        present: the numbers of samples that may have any; None: all. beside: constant entries may lie
            next to those of all samples, as many for each (a trained row before each sample).
    """
    flat = found.reshape(-1)
    counts = torch.bincount(flat[(flat >= 0) & (flat < SEVERAL)].long(), minlength=samples)
    if present is not None:
        may = torch.zeros_like(counts, dtype=torch.bool)
        may[present[(present >= 0) & (present < samples)].long()] = True
        if not bool(counts[~may].any()):
            counts = counts[may]
    if not counts.numel():
        return True
    most, each = int(counts.max()), counts.numel()
    return most * each == flat.numel() or (
        beside and most == int(counts.min()) and flat.numel() % each == 0
    )


def are_apart(several: Sequence[Attribution]) -> bool:
    """Whether no entry belongs to a sample in two of these."""
    found = [x >= 0 for x in several if x is not None]
    if len(found) < 2:
        return True
    if len(found) > 2 or found[0].dim() != found[1].dim():
        return False
    if any(1 not in (n, k) and n != k for n, k in zip(found[0].shape, found[1].shape, strict=True)):
        return False
    return not bool((found[0] & found[1]).any())


def differs(x: Tensor, found: Tensor, moved: bool = False, near: float = 0.0) -> bool:
    """Whether a constant has different values alongside different samples.

    Args:
        x: the constant. found: attribution of the data. moved: samples lie where data put them, and
            any change along their axis counts. near: tolerance relative to the largest entry.
    """
    room = near * float(x.detach().abs().amax()) if near and x.numel() else 0.0
    shape = torch.broadcast_shapes(x.shape, found.shape)
    found = fitted(found, len(shape)).expand(shape)  # type: ignore[union-attr]
    x = x.detach().expand(shape)
    axes = [axis for axis, n in enumerate(shape) if n > 1 and found.stride(axis)]
    own = next((axis for axis in axes if _tells(found, axis)), None) if len(axes) > 1 else None
    axes = axes if own is None else [own]
    if moved:
        return any(not _same(x, x.narrow(axis, 0, 1), room) for axis in axes)
    if len(axes) == 1 and shape[axes[0]] == int(found.max()) + 1:
        return not _same(x, x.narrow(axes[0], 0, 1), room)
    keep = (found >= 0) & (found < SEVERAL)
    flat, beside = found[keep], x[keep]
    counts = torch.bincount(flat.long())
    counts = counts[counts > 0]
    if counts.numel() == 0:
        return False
    if bool((counts != counts[0]).any()):
        first, x = (beside[:1], beside) if own is None else (x.narrow(own, 0, 1), x)
        return not _same(x, first, room)
    x = beside
    x = x[torch.sort(flat, stable=True).indices].view(counts.numel(), -1)
    return not _same(x, x[:1], room)


def _tells(found: Tensor, axis: int) -> bool:
    """Whether the position along this axis determines the sample of an entry, if it has one."""
    keep = (found >= 0) & (found < SEVERAL)
    others = [d for d in range(found.dim()) if d != axis]
    if not others:
        return True
    low = found.masked_fill(~keep, SEVERAL).amin(others)
    high = found.masked_fill(~keep, NONE).amax(others)
    return bool(((low == high) | (high == NONE)).all())


def _same(x: Tensor, y: Tensor, room: float = 0.0) -> bool:
    equal = (x - y).abs() <= room if room else x == y
    if x.is_floating_point():
        equal |= x.isnan() & y.isnan()
    return bool(equal.all())
