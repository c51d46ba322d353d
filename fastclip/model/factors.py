"""PEFT's LoHa in torch's own functions.

LoHa computes a weight from its factors in an autograd function, which hides from the engine whose
gradient comes to which factor. PEFT's method runs as it is, but for that function: the same product,
written out.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

_METHOD = "get_delta_weight"


def _product(w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor, scale: Tensor) -> Tensor:
    return (w1a @ w1b) * (w2a @ w2b) * scale


def _convolution(
    t1: Tensor, w1a: Tensor, w1b: Tensor, t2: Tensor, w2a: Tensor, w2b: Tensor, scale: Tensor
) -> Tensor:
    """i, j rank, k, l kernel, r input, p output channels."""
    equation = "ijkl,jr,ip->prkl"
    first, second = torch.einsum(equation, t1, w1b, w1a), torch.einsum(equation, t2, w2b, w2a)
    return first * second * scale


_WRITTEN_OUT = {"make_weight": _product, "make_weight_cp": _convolution}


def write_out(module: nn.Module) -> None:
    """Let a layer of LoHa compute its weight where the engine sees it."""
    own = getattr(type(module), _METHOD, None)
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "LoHaLayer" in kinds and _METHOD not in vars(module) and isinstance(own, FunctionType):
        module.__dict__[_METHOD] = MethodType(_with(own), module)


def give_back(module: nn.Module) -> None:
    """It computes it as before."""
    found = getattr(vars(module).get(_METHOD), "__func__", None)
    if getattr(found, "__globals__", {}).get("make_weight") is _product:
        del module.__dict__[_METHOD]


def _with(own: FunctionType) -> Callable[..., Tensor]:
    """The function, in which these names mean the products above."""
    known = {**own.__globals__, **_WRITTEN_OUT}
    made = FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made
