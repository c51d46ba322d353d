"""Gradients in a look: the same backward pass twice gives the same, to the last bit.

Whose an entry is, two backward passes say together, and a sum that is added up in another order each
time looks like a sum over several samples. On a GPU many kernels add up in the order in which their
threads arrive: those of attention foremost, whose gradients may be rounded to 16 bits afterwards, so
that one entry in a hundred differs by 2^-8. Here PyTorch's other kernels are asked for their fixed
order, and a backward pass of attention is computed again from its inputs, row by row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fastclip._torch import TorchDispatchMode

Found = tuple[Tensor | None, ...]
ATTENTION_BACKWARD = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward").default
    for name in ("flash", "efficient", "cudnn")
)
"""Operators that compute the gradients of fused attention on a GPU."""


def normal(like: Tensor, seed: int) -> Tensor:
    """Float32 numbers in the shape of `like`, drawn where it lies: logits may be 10^9 numbers."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device)


def gradients(
    outputs: Sequence[Tensor], edges: Sequence[GradientEdge], seeds: Sequence[Tensor],
    *, keep_graph: bool = False,
) -> Found:  # fmt: skip
    """Of the outputs, each times its seed, with respect to the edges; None where none is reached."""
    with in_order() if torch.cuda.is_initialized() else nullcontext():  # a CPU's order is fixed
        return torch.autograd.grad(
            outputs, edges, seeds, retain_graph=keep_graph, allow_unused=True
        )


@contextmanager
def in_order() -> Iterator[None]:
    """Kernels add up in a fixed order inside, where PyTorch has one that does."""
    mode = torch.get_deterministic_debug_mode()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode(mode or "warn")
    try:
        with warnings.catch_warnings(), RowByRow():
            warnings.filterwarnings("ignore", r"(?is).*determinis")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


class RowByRow(TorchDispatchMode):
    """Backward passes of fused attention are those of plain attention, one row at a time: no more than
    one row's scores [h, l, s] are held."""

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION_BACKWARD:
            schema = function._schema  # type: ignore[attr-defined]  # of an operator
            names = [argument.name.rstrip("_") for argument in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            if not given["dropout_p"]:  # else which were dropped is known to the kernel alone
                return attention_backward(given)[: len(schema.returns)]
        return function(*args, **kwargs)


def attention_backward(given: Mapping[str, Any]) -> Found:
    """Gradients of attention without dropout.

    With scores S = scale q k^T + bias, P = softmax(S) and the gradient dO of P v:
    dv = P^T dO, dS = P (dO v^T - rowsum(P dO v^T)), dq = scale dS k, dk = scale dS^T q.

    Args:
        given: by name: query [b, h, l, e]; key and value [b, k, s, e], of whose heads each serves h / k;
            grad_out, is_causal, scale, and attn_bias [b or 1, h or 1, l or 1, s or 1], if there is one.

    Returns:
        of query, key, value and the bias, the last None where there is none.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    bias: Any = given.get("attn_bias")
    bias = None if bias is None or not bias.numel() else bias
    scale = given.get("scale") or query.shape[-1] ** -0.5
    found: list[list[Tensor]] = [[], [], []]
    of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    for row in range(len(query)):
        q, k, v, out = (x[row].float() for x in (query, key, value, given["grad_out"]))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = scale * q @ k.mT
        if given.get("is_causal"):
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        at = None if bias is None else row % len(bias)
        if bias is not None:
            scores = scores + bias[at]
        p = scores.softmax(-1).nan_to_num(0.0)  # of a position that attends to nothing
        of_p = out @ v.mT
        of_scores = p * (of_p - (p * of_p).sum(-1, keepdim=True))
        heads = (len(key[row]), -1)
        for mine, x, like in (
            (0, scale * of_scores @ k, query), (1, scale * of_scores.mT @ q, key),
            (2, p.mT @ out, value),
        ):  # fmt: skip
            shared = x if mine == 0 else x.unflatten(0, heads).sum(1)
            found[mine].append(shared.to(like.dtype))
        if of_bias is not None:
            of_bias[at] += of_scores.sum_to_size(of_bias[at].shape)
    sums = [torch.stack(rows) for rows in found]
    return (*sums, None if of_bias is None else of_bias.to(bias.dtype))
