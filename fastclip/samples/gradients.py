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
from typing import Any, cast

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
_SCORES = 2**26
"""Scores [h, l, s] that are in memory at a time, where one head has no more: 256 MiB, four times."""


def normal(like: Tensor, seed: int) -> Tensor:
    """Float32 numbers in the shape of `like`, drawn where it lies: logits may be 10^9 numbers."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device)


def gradients(
    outputs: Sequence[Tensor], edges: Sequence[GradientEdge], seeds: Sequence[Tensor],
    *, keep_graph: bool = False,
) -> Found:  # fmt: skip
    """Of the outputs, each times its seed, with respect to the edges; None where none is reached."""
    with RowByRow() if _gpu_in_use() else nullcontext():
        return torch.autograd.grad(
            outputs, edges, seeds, retain_graph=keep_graph, allow_unused=True
        )


@contextmanager
def in_order() -> Iterator[None]:
    """Kernels add up in a fixed order inside, where PyTorch has one that does and a GPU is in use.

    A CPU's order is fixed. Forward passes run inside, too: some compute their gradients in another way
    there, and a checkpoint computes them again.
    """
    if not _gpu_in_use():
        yield
        return
    mode, memory = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    filled = memory.fill_uninitialized_memory
    try:
        memory.fill_uninitialized_memory = False
        torch.set_deterministic_debug_mode(mode or "warn")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?is).*determinis")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filled


def _gpu_in_use() -> bool:
    """Of the model or of others: what is asked for may lie on a CPU, and what lies between on a GPU."""
    return torch.cuda.is_initialized()


class RowByRow(TorchDispatchMode):
    """Backward passes of fused attention are those of plain attention, a few heads of one row at a
    time: what the fused one does not hold, is not held here either."""

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION_BACKWARD:
            schema = function._schema  # type: ignore[attr-defined]  # of an operator
            names = [argument.name.rstrip("_") for argument in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            # what was dropped is known to the kernel alone
            if not given["dropout_p"] and not given["query"].is_nested:
                last = "flash" in schema.name  # its causal mask ends at the last key
                return attention_backward(given, ends_last=last)[: len(schema.returns)]
        return function(*args, **kwargs)


def attention_backward(given: Mapping[str, Any], *, ends_last: bool = False) -> Found:
    """Gradients of attention without dropout.

    With scores S = scale q k^T + bias, P = softmax(S) and the gradient dO of P v:
    dv = P^T dO, dS = P (dO v^T - rowsum(P dO v^T)), dq = scale dS k, dk = scale dS^T q.

    Args:
        given: by name: query [b, h, l, e]; key and value [b, k, s, e], of whose heads each serves h / k;
            grad_out, is_causal, scale, and attn_bias, which [b, h, l, s] broadcasts, if there is one.
            Its gradient is asked for by the last of grad_input_mask.
        ends_last: with is_causal, the last query sees the last key, not the first one the first.

    Returns:
        of query, key, value and the bias; the last None where it is not asked for.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    bias: Any = given.get("attn_bias")
    bias = bias if bias is None or not bias.numel() else bias[(None,) * (4 - bias.dim())]
    asked = bias is not None and given.get("grad_input_mask", (False,))[-1]
    of_bias: Any = torch.zeros_like(bias, dtype=torch.float32) if asked else None
    (heads, positions), (of_keys, seen) = query.shape[1:3], key.shape[1:3]
    found = [torch.empty_like(x) for x in (query, key, value)]
    for row in range(len(query)):
        sums = [x.new_zeros(x.shape, dtype=torch.float32) for x in (key[row], value[row])]
        for mine in _blocks(heads, heads // of_keys, _SCORES // max(positions * seen, 1)):
            theirs = slice(mine.start * of_keys // heads, -(-mine.stop * of_keys // heads))
            each = (mine.stop - mine.start) // (theirs.stop - theirs.start)
            q, out = (x[row, mine].float() for x in (query, given["grad_out"]))
            k, v = (x[row, theirs].float().repeat_interleave(each, 0) for x in (key, value))
            scores = scale * q @ k.mT
            if given.get("is_causal"):
                first = 1 + (seen - positions if ends_last else 0)
                scores.masked_fill_(
                    torch.ones_like(scores[0], dtype=torch.bool).triu(first), -torch.inf
                )
            if bias is not None:
                at = row % len(bias), mine if bias.shape[1] > 1 else slice(None)
                scores += bias[at]
            p = scores.softmax(-1).nan_to_num_(0.0)  # of a position that attends to nothing
            del scores
            of_scores = out @ v.mT
            of_scores.sub_((p * of_scores).sum(-1, keepdim=True)).mul_(p)
            found[0][row, mine] = (scale * of_scores @ k).to(query.dtype)
            for total, x in zip(sums, (scale * of_scores.mT @ q, p.mT @ out), strict=True):
                total[theirs] += x.unflatten(0, (-1, each)).sum(1)
            if asked:
                of_bias[at] += of_scores.sum_to_size(of_bias[at].shape)
        found[1][row], found[2][row] = sums
    if asked:
        of_bias = of_bias.to(bias.dtype).view(given["attn_bias"].shape)
    return (*found, of_bias)


def _blocks(heads: int, shared: int, few: int) -> Iterator[slice]:
    """Heads that are computed together, `few` if possible: those of whole keys, each of which serves
    `shared`, or a part of one's."""
    step = max(few // shared * shared, min(max(few, 1), shared))
    for begin in range(0, heads, max(step, shared)):
        end = min(begin + max(step, shared), heads)
        yield from (slice(at, min(at + step, end)) for at in range(begin, end, step))
