"""Whether an operation's result is right: against its reference in float64, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from bench.measure import first_line
from fastclip.ops import dispatch

_WIDEST = 24 << 30  # bytes of operands up to which the reference runs in float64


class WrongResult(Exception):
    """The result is not what the reference gives."""


def copied(arguments: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The arguments in memory of their own (operations may write to them), floats as `dtype`."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(dtype, copy=True) if dtype and leaf.is_floating_point() else leaf.clone()

    return tree_map(copy, dict(arguments))


def expected(run: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """What the PyTorch reference gives, in float64 where that fits; and the type it ran in."""
    tensors = [leaf for leaf in tree_flatten(dict(arguments))[0] if isinstance(leaf, Tensor)]
    reasons = []
    with dispatch.use_backend("reference"):
        if sum(8.0 * x.numel() for x in tensors if x.is_floating_point()) <= _WIDEST:
            try:
                return run(**copied(arguments, torch.float64)), "float64"
            except (RuntimeError, TypeError, ValueError) as error:  # no memory, no such kernel
                reasons.append(first_line(error))
        try:
            return run(**copied(arguments)), "the operands' type"
        except Exception as error:
            reasons.append(first_line(error))
            raise WrongResult(f"no reference to check against: {'; '.join(reasons)}") from error


def relative_error(found: Any, reference: Any) -> float:
    """The largest ||found - reference|| / ||reference|| of the results' tensors.

    Raises:
        WrongResult: they do not have the same tensors of the same shapes.
    """
    mine, theirs = (
        [leaf for leaf in tree_flatten(result)[0] if leaf is not None]
        for result in (found, reference)
    )
    if len(mine) != len(theirs):
        raise WrongResult(f"expected {len(theirs)} tensors, got {len(mine)}")
    worst = 0.0
    for x, y in zip(mine, theirs, strict=True):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if x.shape != y.shape:
            raise WrongResult(f"expected the shape {list(y.shape)}, got {list(x.shape)}")
        y = y.to(x.device, torch.float64)
        size = torch.linalg.vector_norm(y).item()
        error = torch.linalg.vector_norm(x.double() - y).item() / (size or 1.0)
        if math.isnan(error):
            return error
        worst = max(worst, error)
    return worst


def poison(result: Any) -> None:
    """Fill a result with NaN and drop it: the next one, likely in its memory, must write it all."""
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, Tensor) and leaf.numel():
            with torch.no_grad():
                leaf.fill_(math.nan if leaf.is_floating_point() else 113)


def equal(first: Any, second: Any) -> bool:
    """Equality of two results, bit by bit."""
    pairs = zip(tree_flatten(first)[0], tree_flatten(second)[0], strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def served_by(
    operation: str, device: torch.device, call: Callable[[], Any]
) -> tuple[Any, str, str]:
    """Call it; its result, the backend that computed the operation in it, and why that one.

    A launcher that returns NotImplemented leaves the call to the reference, without a word: it is
    watched, so that no figure is told under the name of a kernel that did not run.
    """
    if operation not in dispatch.OPERATIONS:
        return call(), "unknown", "not an operation that dispatches"
    backend, why = dispatch.backend_of(operation, device)
    if backend == "reference":
        return call(), backend, why
    answers: list[tuple[str, bool]] = []
    with ExitStack() as stack:
        for name in dispatch._candidates(device):
            table = dispatch._load(name)
            if operation in table:
                watched = _watched(table[operation], name, answers)
                stack.enter_context(patch.dict(table, {operation: watched}))
        found = call()
    if taken := [name for name, took in answers if took]:
        return found, taken[-1], "launched"
    backend, why = dispatch.backend_of(operation, device)
    if backend == "reference":  # its first launch has failed
        return found, backend, why
    return found, "reference", f"the {backend} kernel did not take these arguments"


def _watched(launcher: Callable[..., Any], name: str, answers: list) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        result = launcher(*args, **kwargs)
        answers.append((name, result is not NotImplemented))
        return result

    return launch
