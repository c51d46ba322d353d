"""Random numbers that are the same for every row: what is left follows from the rows.

Rows in another order draw other numbers, so their values say nothing, unless all draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import TorchDispatchMode, place_beneath, take_away
from fastclip.samples.elsewhere import drawn_by, evenly
from fastclip.samples.randomness import put_back, state_of

_MOST = 1 << 13
"""Numbers that are the same in one run; who threw away such ones, and drew again, would never end."""
_ORDERS = {"shuffle", "permutation"}
"""Functions of Python's and NumPy's generators that draw an order."""
_Given = dict[str, Any]
_OF_NUMBERS: dict[str, Callable[[_Given], Any]] = {
    "bernoulli": lambda given: given["self"] if given.get("p") is None else given["p"],
    "normal": lambda given: given["mean"] + 0.5 * given["std"],
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
}
"""Of what follows from numbers that a model computes, which still show."""
_DROPOUT = frozenset(("dropout_p", "dropout"))
"""Arguments of kernels that draw what they drop, and of those that compute their gradients."""
_AS_DRAWN = frozenset(("randperm", "multinomial"))
"""An order, or different entries of one row."""


class Even(TorchDispatchMode):
    """Inside, torch's random functions draw one number for all rows; kernels that drop drop nothing."""

    hears = False
    """It follows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = False
        """An operator that is not torch's has drawn from its generator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims"):
            before = torch.get_rng_state()
            out = func(*args, **kwargs)
            self.opaque |= not torch.equal(before, torch.get_rng_state())
            return out
        names = [argument.name for argument in func._schema.arguments]
        for dropout in _DROPOUT.intersection(names):  # of fused attention and recurrent kernels
            k = names.index(dropout)
            if dropout in kwargs:
                kwargs = {**kwargs, dropout: 0.0}
            elif k < len(args):
                args = (*args[:k], 0.0, *args[k + 1 :])
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1].rstrip("_").removesuffix("_functional")
        given = {a.name: a.default_value for a in func._schema.arguments}
        for n, x in (*zip(names, args, strict=False), *kwargs.items()):
            given[n] = x.clone() if isinstance(x, Tensor) else x
        out = func(*args, **kwargs)
        if name == "native_dropout":
            return given["input"], torch.ones_like(out[1])
        if name == "rrelu_with_noise":
            return _rrelu(out, args, given)
        if not isinstance(out, Tensor) or name in _AS_DRAWN or not out.numel():
            return out
        numbers = _OF_NUMBERS.get(name)
        if numbers is None:
            return out.copy_(out.reshape(-1)[0].clone().expand(out.shape))
        found = numbers(given)
        if isinstance(found, Tensor):
            return out.copy_(found)
        return out.fill_(1 if name == "bernoulli" else found)


def _rrelu(out: Any, args: tuple, given: _Given) -> Any:
    """With one slope for all."""
    if not given.get("training", False):
        return out
    x, noise = given["self"], args[1]
    slopes = torch.where(x > 0, 1.0, 0.25).to(x.dtype)
    if isinstance(out, Tensor):
        noise.copy_(slopes)
        return out.copy_(x * slopes)
    return x * slopes, slopes


class _Elsewhere:
    """Draws the first number that a function of Python's or NumPy's draws, for all."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._asked += 1
        if self._asked > _MOST:
            return evenly(function, *args, **kwargs)
        one = function.__self__  # type: ignore[attr-defined]  # a bound method
        before = state_of(one)
        try:
            out = function(*args, **kwargs)
        finally:
            put_back(one, before)
        if getattr(out, "shape", ()) and out.size and function.__name__ not in _ORDERS:  # NumPy's
            out[...] = out.flat[0]
        return out


@contextmanager
def draws_alike(tables: Iterable[dict[str, Any]]) -> Iterator[Even]:
    """Inside, all rows draw the same numbers in this thread.

    Args:
        tables: attributes, of which generators do the same, until whoever looks puts these back.
    """
    mode = Even()
    with drawn_by(_Elsewhere(), tables):
        placed = place_beneath(mode)
        try:
            yield mode
        finally:
            if placed:
                take_away(mode)
