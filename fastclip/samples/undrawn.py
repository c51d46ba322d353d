"""Random numbers that are the same for every row and every batch: what is left follows from the rows.

Of two ways between which a number chooses, one would never be taken; so there are three levels of it.
And what is made of all rows' numbers would be the same in every batch; so rows may have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import TorchDispatchMode
from fastclip.samples.elsewhere import evenly
from fastclip.samples.randomness import put_back, start, state_of

MIDDLE, LOW, HIGH, BY_ROW = range(4)
"""The first row MIDDLE, the second one LOW, all others HIGH."""
_MOST = 1 << 13
"""Numbers that are so in one run; who threw away such ones, and drew again, would never end."""
_PART = (0.5, 0.005, 0.995)
"""Of what may be drawn, how much is below."""
_DEVIATIONS = (0.5, -1.5, 1.5)
_POSITIVE = (0.5, 0.005, 5.0)
_FILLED = {
    "rand": _PART, "rand_like": _PART, "exponential": _POSITIVE, "log_normal": _POSITIVE,
    "cauchy": _DEVIATIONS, "randn": _DEVIATIONS, "randn_like": _DEVIATIONS,
    "geometric": (1, 1, 5), "bernoulli": (1, 0, 1),
}  # fmt: skip
"""What every number becomes that these functions draw, level by level."""
_MEANS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
}
"""Of what follows from numbers that a model computes: so these still show."""
_UNEVEN = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise")
"""How far these move a generator on, values say: what a row draws follows from the rows before it."""
_ORDERS = {"shuffle", "permutation"}
"""Functions of Python's and NumPy's generators that draw an order, which is one for all rows."""
_SEEDS = (50, 19357, 20837)
"""For which both of these begin with such a `_PART`."""


class Undrawn:
    """What random functions give if nothing is left to chance. No generator is moved on.

    Args:
        level: MIDDLE, LOW, HIGH or BY_ROW. rows: which draws have one number, or several, a row.
        alike: the level of all rows in these, in the place of each row's own.
    """

    def __init__(
        self, level: int = MIDDLE, rows: Collection[int] = (), alike: int | None = None
    ) -> None:
        self.level, self.rows, self.alike = level, rows, alike
        self.sizes: list[int | None] = []
        """Of the draws so far, along their first axis."""
        self.varies = False
        """Other levels may give other numbers."""
        self._asked = 0

    def again(self) -> Undrawn:
        """The same for another run."""
        return Undrawn(self.level, self.rows, self.alike)

    def __call__(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result of a random operation; NotImplemented for any other."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return NotImplemented
        name = func._schema.name.split("::")[1].rstrip("_").removesuffix("_functional")
        if name == "native_dropout":
            kept = self._fill(
                "bernoulli", torch.ones_like(args[0], dtype=torch.bool), {"p": 1}, func
            )
            return args[0] * kept, kept
        if name == "rrelu_with_noise":
            return _rrelu(func, args, kwargs)
        if not any(name in known for known in (_FILLED, _MEANS, _OF_ARGUMENTS)):
            return NotImplemented
        if not self._more():
            return NotImplemented
        given = {**dict(zip(_names(func), args, strict=False)), **kwargs}
        if name in _MEANS:
            given = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
        out = _put_back(func, args, kwargs)
        return self._fill(name, out, given, func) if isinstance(out, Tensor) else out

    def _more(self) -> bool:
        self._asked += 1
        return self._asked <= _MOST

    def _fill(self, name: str, out: Tensor, given: dict[str, Any], func: Any) -> Tensor:
        if name in _MEANS:
            return out.copy_(_MEANS[name](given))
        self.sizes.append(len(out) if out.dim() else None)
        self.varies |= name != "randperm" and (name != "bernoulli" or not out.dim())
        if self.level == BY_ROW and len(self.sizes) - 1 in self.rows:
            for i, row in enumerate(out):
                own = {n: x[i] if _as_long(x, out) else x for n, x in given.items()}
                _fill(name, row, min(i, HIGH) if self.alike is None else self.alike, own)
            return out
        if name == "bernoulli" and out.dim():
            p = given.get("p") if "p" in _names(func) else given["self"]
            return out.copy_(p) if isinstance(p, Tensor) else out.fill_(1)
        return _fill(name, out, MIDDLE if self.level == BY_ROW else self.level, given)

    def elsewhere(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first number that a function of Python's or NumPy's draws, for all it draws at once."""
        if function.__name__ in _ORDERS or not self._more():
            return evenly(function, *args, **kwargs)
        self.varies = True
        one = function.__self__  # type: ignore[attr-defined]  # a bound method
        before = state_of(one)
        start(one, _SEEDS[MIDDLE if self.level == BY_ROW else self.level])
        try:
            out = function(*args, **kwargs)
        finally:
            put_back(one, before)
        if getattr(out, "shape", ()) and out.size:  # NumPy's
            out[...] = out.flat[0]
        return out


def _as_long(x: Any, out: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape[:1] == out.shape[:1]


def _fill(name: str, out: Tensor, level: int, given: dict[str, Any]) -> Tensor:
    if name in _FILLED:
        return out.fill_(_FILLED[name][level])
    return _OF_ARGUMENTS[name](out, level, given)


class Even(TorchDispatchMode):
    """Inside, what one row draws does not follow from how much others did."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = NotImplemented
        if func._schema.name.split("::")[1].startswith(_UNEVEN):
            out = Undrawn()(func, args, kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _put_back(func: Any, args: tuple, kwargs: dict) -> Any:
    """What it gives, where no generator moves."""
    given = kwargs.get("generator")
    before = None if given is None else given.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        out = func(*args, **kwargs)
    if given is not None:
        given.set_state(before)
    return out


def _uniform(out: Tensor, level: int, given: dict[str, Any]) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return out.fill_(low + (high - low) * _PART[level])


def _normal(out: Tensor, level: int, given: dict[str, Any]) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    drawn = mean + _DEVIATIONS[level] * std
    return out.copy_(drawn) if isinstance(drawn, Tensor) else out.fill_(drawn)


def _whole(out: Tensor, level: int, given: dict[str, Any]) -> Tensor:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return out.fill_(high - 1 if level == HIGH and high is not None else low)


def _category(out: Tensor, level: int, given: dict[str, Any]) -> Tensor:
    return out.fill_(given["self"].shape[-1] - 1 if level == HIGH else 0)


def _in_order(out: Tensor, level: int, given: dict[str, Any]) -> Tensor:
    return out.copy_(torch.arange(len(out), dtype=out.dtype, device=out.device))


def _rrelu(func: Any, args: tuple, kwargs: dict) -> Any:
    """With the middle slope."""
    given: dict[str, Any] = {"lower": 0.125, "upper": 1 / 3, "training": False}
    given |= {**dict(zip(_names(func), args, strict=False)), **kwargs}
    if not given["training"]:
        return NotImplemented
    x, noise = given["self"], given["noise"]
    slopes = torch.where(x > 0, 1.0, (given["lower"] + given["upper"]) / 2).to(x.dtype)
    name = func._schema.name
    if name.endswith("_functional"):
        return x * slopes, slopes
    noise.copy_(slopes)
    return x.mul_(slopes) if name.endswith("_") else x * slopes


_OF_ARGUMENTS: dict[str, Callable[[Tensor, int, dict[str, Any]], Tensor]] = {
    "uniform": _uniform, "normal": _normal, "randint": _whole, "randint_like": _whole,
    "random": _whole, "multinomial": _category,
    "randperm": _in_order,
}  # fmt: skip
