"""The operations as torch custom ops: schemas, fake implementations and results."""

from __future__ import annotations

import pytest
import torch

from fastclip import ops
from fastclip.ops import library  # noqa: F401, registers torch.ops.fastclip

B, T, D, P, C = 3, 5, 4, 6, 8


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


CONV = ([6, 2, 3, 3], [2, 1], [1, 1], [1, 1], 2)
CALLS = {
    "ghost_norm": lambda: (normal(B, T, D), normal(B, T, P)),
    "instantiated_norm": lambda: (normal(B, T, D), normal(B, T, P)),
    "scaled_sum": lambda: (normal(B, T, D), normal(B, T, P), torch.rand(B)),
    "lookup_norm": lambda: (
        torch.randint(7, (B * T,)), torch.arange(B).repeat_interleave(T), normal(B * T, D), B, 7, -1,
    ),
    "conv_norm": lambda: (normal(B, 4, 9, 6), normal(B, 6, 5, 6), *CONV, False),
    "layer_norm_backward": lambda: (
        normal(B, T, C), normal(B, T, C), normal(B, T), torch.rand(B, T), normal(C),
    ),
    "rms_norm_backward": lambda: (normal(B, T, C), normal(B, T, C), torch.rand(B, T), normal(C)),
    "group_norm_backward": lambda: (
        normal(B, C, T), normal(B, C, T), normal(B, 2), torch.rand(B, 2), normal(C),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """Torch's own test of a custom op: schema, autograd registration, fake tensors, dynamic shapes."""
    torch.library.opcheck(getattr(torch.ops.fastclip, name).default, CALLS[name]())


def test_the_op_is_the_operation() -> None:
    a, g = CALLS["ghost_norm"]()
    assert torch.equal(torch.ops.fastclip.ghost_norm(a, g), ops.ghost_norm(a, g))
    x, y, *_ = CALLS["conv_norm"]()
    geometry = ops.ConvGeometry((6, 2, 3, 3), (2, 1), (1, 1), (1, 1), 2)
    found = torch.ops.fastclip.conv_norm(x, y, *CONV, True)
    assert torch.equal(found, ops.conv_ghost_norm(x, y, geometry))


def test_compiled_code_calls_it() -> None:
    """Without a graph break, for changing batch sizes."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def norm(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.ops.fastclip.ghost_norm(a * 2, g).sqrt()

    for b in (2, 3, 5):
        a, g = normal(b, T, D), normal(b, T, P)
        assert torch.allclose(norm(a, g), ops.ghost_norm(a * 2, g).sqrt())
