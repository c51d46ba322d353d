"""The generators that a model may draw from, and runs in which all samples draw the same numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fastclip.core.torch_names import (
    TorchDispatchMode,
    place_beneath,
    take_away,
    tree_leaves,
    tree_map,
)
from fastclip.ops.random import set_aside

OF_TORCH = "a generator of torch's that the model holds"


class Generators:
    """All generators that a model may draw from.

    Args:
        held: objects that its modules hold, with generators among them.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        self._numpy = sys.modules.get("numpy")
        kinds: tuple[Any, ...] = (torch.Generator, random.Random)
        if self._numpy is not None:
            kinds += (self._numpy.random.Generator, self._numpy.random.RandomState)
        self._own = list({id(one): one for one in held if isinstance(one, kinds)}.values())

    def states(self) -> dict[str, Any]:
        """Their states, by library: equal if nothing was drawn in between."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        array = None if self._numpy is None else self._numpy.random.get_state()
        found: dict[str, list[Any]] = {
            "Python's random": [random.getstate()],
            "numpy.random": [array],
            "torch": [torch.get_rng_state(), *cuda],
            OF_TORCH: [state_of(x) for x in self._own if isinstance(x, torch.Generator)],
            "a generator that the model holds": [
                state_of(x) for x in self._own if not isinstance(x, torch.Generator)
            ],
        }
        return {name: [_comparable(x) for x in states] for name, states in found.items()}

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Start all of them at `seed` inside, and restore them.

        Meanwhile, other threads take no seed from torch's global generator.
        """
        python = random.getstate()
        array = None if self._numpy is None else self._numpy.random.get_state()
        own = [state_of(one) for one in self._own]
        cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        try:
            with set_aside(), torch.random.fork_rng(devices=cuda):
                torch.default_generator.manual_seed(seed)
                if cuda:  # else it would be seeded when it is first used
                    torch.cuda.manual_seed_all(seed)
                random.seed(seed)
                if self._numpy is not None:
                    self._numpy.random.seed(seed)
                for one in self._own:
                    start(one, seed)
                yield
        finally:
            random.setstate(python)
            if self._numpy is not None:
                self._numpy.random.set_state(array)
            for one, state in zip(self._own, own, strict=True):
                put_back(one, state)


def is_outside_torch(one: Any) -> bool:
    """Whether it is a generator of Python's or NumPy's."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(one, (random.Random, *kinds))


def state_of(one: Any) -> Any:
    """The state of one generator."""
    if isinstance(one, torch.Generator):
        return one.get_state().clone()
    if isinstance(one, random.Random):
        return one.getstate()
    return one.bit_generator.state if hasattr(one, "bit_generator") else one.get_state()


def has_moved(one: Any, since: Any) -> bool:
    """Whether the state of one generator differs from `since`, a result of `state_of`."""
    now = state_of(one)
    if isinstance(now, torch.Tensor):
        return not torch.equal(now, since)
    return bool(_comparable(now) != _comparable(since))


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return bytes(state.tolist())
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return [x.tobytes() if hasattr(x, "tobytes") else x for x in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def start(one: Any, seed: int) -> None:
    """Let one generator start at `seed`."""
    if isinstance(one, torch.Generator):
        one.manual_seed(seed)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = type(one.bit_generator)(seed).state
    else:
        one.seed(seed)


def put_back(one: Any, state: Any) -> None:
    """Restore the state of one generator."""
    if isinstance(one, random.Random):
        one.setstate(state)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = state
    else:
        one.set_state(state)


# -------------------------------------------------------------------------------------------------
# Random numbers of Python and NumPy: the functions, and generators of a model.


DrawFunction = Callable[..., Any]
"""Called instead of a function that draws random numbers, with that function and its arguments."""
_OTHERS = {"getstate", "setstate", "get_state", "set_state", "seed"}
"""Functions of generators that draw nothing."""


def evenly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a draw. The generator's next state depends on its state before, not on the amount
    drawn. So the numbers that one sample draws do not affect those of the next.
    """
    one = function.__self__  # type: ignore[attr-defined]  # a bound method
    before = state_of(one)
    following = int.from_bytes(
        one.randbytes(4) if hasattr(one, "randbytes") else one.bytes(4), "big"
    )
    put_back(one, before)
    try:
        return function(*args, **kwargs)
    finally:
        start(one, following)


@contextmanager
def drawn_by(draw: DrawFunction, tables: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Call `draw` for the functions of `random` and `numpy.random` inside, in this thread.

    Args:
        tables: attributes; generators among them do the same, until the caller restores them.
    """
    numpy = sys.modules.get("numpy")
    modules: list[Any] = [random] if numpy is None else [random, numpy.random]
    saved = [
        (module, name, function)
        for module in modules for name, function in list(vars(module).items())
        if name not in _OTHERS
        and getattr(function, "__self__", None) is getattr(module.random, "__self__", module)
    ]  # fmt: skip
    here = threading.get_ident()

    def through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return function(*args, **kwargs)
        return draw(function, *args, **kwargs)

    def stand_in(x: Any) -> Any:
        return _StandIn(x, through) if is_outside_torch(x) else x

    for table in tables:
        held = {n: x for n, x in table.items() if any(map(is_outside_torch, tree_leaves(x)))}
        table |= {n: tree_map(stand_in, x) for n, x in held.items()}
    try:
        for module, name, function in saved:
            setattr(module, name, wraps(function)(partial(through, function)))
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)


class _StandIn:
    """Stands for a generator: calls of its methods go through `draw`."""

    def __init__(self, one: Any, draw: DrawFunction) -> None:
        self._one, self._draw = one, draw

    @property  # type: ignore[misc]  # mypy knows __class__ as an attribute
    def __class__(self) -> Any:  # so that it is one for isinstance
        return type(self._one)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        draws = name not in _OTHERS and getattr(found, "__self__", None) is self._one
        return partial(self._draw, found) if draws else found


# -------------------------------------------------------------------------------------------------
# Random numbers that are the same for every sample, so all differences depend on the samples.
#
# In another order, samples draw other random numbers. Their values can be compared only if all samples
# draw the same.


_MOST = 1 << 13
"""Number of draws that are the same in one run. A loop that rejects numbers and draws again must end."""
_ORDERS = {"shuffle", "permutation"}
"""Functions of Python's and NumPy's generators that return an order."""
_Given = dict[str, Any]
_OF_NUMBERS: dict[str, Callable[[_Given], Any]] = {
    "bernoulli": lambda given: given["self"] if given.get("p") is None else given["p"],
    "normal": lambda given: given["mean"] + 0.5 * given["std"],
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
}
"""Distributions of numbers that a model computes, which still show in the result."""
_DROPOUT = frozenset(("dropout_p", "dropout"))
"""Dropout arguments of fused kernels, and of kernels that compute their gradients."""
_AS_DRAWN = frozenset(("randperm", "multinomial"))
"""An order, or different entries of one sample."""


class Even(TorchDispatchMode):
    """Makes torch's random functions return one number for all samples inside, and turns dropout off."""

    hears = False
    """It follows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = False
        """A custom operator has drawn from torch's generator."""

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
    """Returns the first number that a function of Python or NumPy draws, for all samples."""

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
    """Let all samples draw the same random numbers inside, in this thread.

    Args:
        tables: attributes; generators among them do the same, until the caller restores them.
    """
    mode = Even()
    with drawn_by(_Elsewhere(), tables):
        placed = place_beneath(mode)
        try:
            yield mode
        finally:
            if placed:
                take_away(mode)
