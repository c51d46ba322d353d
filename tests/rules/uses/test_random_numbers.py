"""Functions that draw random numbers: their samples' gradients are those of the numbers they drew."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused
from tests.rules.uses.functions import Function, Model, batch

_HIDDEN, _OWN, _COUNTER = np.random.default_rng(0), torch.Generator().manual_seed(0), count()
_DRAWS: dict[str, Callable[[torch.Size], Tensor]] = {
    "torch": lambda shape: torch.rand(shape, dtype=torch.float64),
    "numpy": lambda shape: torch.from_numpy(np.random.random(tuple(shape))),
    "python": lambda shape: torch.tensor(
        [random.random() for _ in range(shape.numel())], dtype=torch.float64
    ).view(shape),
    "hidden": lambda shape: torch.from_numpy(_HIDDEN.random(tuple(shape))),
    "own": lambda shape: torch.rand(shape, dtype=torch.float64, generator=_OWN),
    "system": lambda shape: torch.frombuffer(
        bytearray(os.urandom(shape.numel())), dtype=torch.uint8
    ).view(shape) / 255,
    "counter": lambda shape: torch.full(shape, float(next(_COUNTER) % 2)),
}  # fmt: skip


@torch.library.custom_op("fastclip_tests::masked", mutates_args=())
def _masked(x: Tensor, w: Tensor, source: str) -> list[Tensor]:
    mask = (_DRAWS[source](x.shape) > 0.5).to(x.dtype)
    return [x * w * mask, mask]


def _keep_mask(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _mask_back(ctx, g):
    x, w, mask = ctx.saved_tensors
    return g[0] * w * mask, (g[0] * x * mask).sum((0, 1)), None


_masked.register_autograd(_mask_back, setup_context=_keep_mask)


@torch.library.custom_op("fastclip_tests::rounded", mutates_args=())
def _rounded(x: Tensor, w: Tensor, source: str, input_too: bool) -> Tensor:
    return x * w


def _keep_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.source, ctx.input_too = inputs[2:]


def _round_back(ctx, g):
    x, w = ctx.saved_tensors
    kept = (_DRAWS[ctx.source](x.shape) > 0.5).to(x.dtype)
    return g * w * (kept if ctx.input_too else 1), (g * x * kept).sum((0, 1)), None, None


_rounded.register_autograd(_round_back, setup_context=_keep_inputs)


@torch.library.custom_op("fastclip_tests::straight", mutates_args=())
def _straight(x: Tensor, w: Tensor, kind: str) -> list[Tensor]:
    drawn = _DRAWS["hidden"](x.shape)
    kept: dict[str, Callable[[], Tensor]] = {
        "numbers": lambda: drawn,
        "booleans": lambda: drawn > 0.5,
        "infinite": lambda: torch.where(drawn > 0.5, 0.0, -torch.inf),
        "one in many": lambda: torch.arange(drawn.numel()).view(x.shape) != int(drawn.sum()),
        "places": lambda: (drawn > 0.5).nonzero(),
    }
    return [x * w, kept[kind]()]


def _straight_back(ctx, g):
    x, w, kept = ctx.saved_tensors
    if kept.shape != x.shape:
        kept = torch.zeros_like(x).index_put_(tuple(kept.T), x.new_ones(()))
    seen = kept.exp() if kept.is_floating_point() and kept.min() < 0 else kept
    return g[0] * w, (g[0] * x * seen).sum((0, 1)), None


_straight.register_autograd(_straight_back, setup_context=_keep_mask)


def _attention(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    out = F.scaled_dot_product_attention(weights[0], heads, heads, dropout_p=0.5)
    return out.transpose(1, 2).flatten(2)


def _keys(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    key, value = (w.exp() for w in weights)
    return F.scaled_dot_product_attention(heads, key, value, dropout_p=0.3).flatten(1)


def _multi_head(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    query, w_in, w_out = weights
    x, zeros = x.transpose(0, 1), x.new_zeros(18)
    return F.multi_head_attention_forward(
        query.expand(-1, x.shape[1], -1), x, x, 6, 2, w_in, zeros, None, None, False, 0.4, w_out,
        None, need_weights=False,
    )[0].transpose(0, 1)  # fmt: skip


FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "attention of queries": (_attention, ((1, 2, 3, 3),)),
    "attention of keys": (_keys, ((1, 2, 7, 3), (1, 2, 7, 3))),
    "multi-head attention": (_multi_head, ((3, 1, 6), (18, 6), (6, 6))),
    "a dropped parameter": (lambda w, x: x @ F.dropout(w[0], 0.5), ((6, 6),)),
    "a dropped product": (lambda w, x: F.dropout(x * w[0], 0.5), ((6,),)),
    "rrelu": (lambda w, x: F.rrelu(x * w[0], training=True) * w[0], ((6,),)),
    "gumbel": (lambda w, x: F.gumbel_softmax(x + w[0]) @ w[1], ((6,), (6, 6))),
    "pooling": (
        lambda w, x: F.fractional_max_pool2d((x * w[0])[:, None], 2, output_size=(2, 3)).flatten(1),
        ((6,),),
    ),
    "noise on a parameter": (lambda w, x: x * (w[0] + 0.3 * torch.randn_like(w[0])), ((6,),)),
    "a custom operator": (lambda w, x: _masked(x, w[0], "torch")[0], ((6,),)),
    "numpy in an operator": (lambda w, x: _masked(x, w[0], "numpy")[0], ((6,),)),
    "python in an operator": (lambda w, x: _masked(x, w[0].exp(), "python")[0], ((6,),)),
    "a backward that draws": (lambda w, x: _rounded(x, w[0], "torch", False), ((6,),)),
    "numpy in a backward": (lambda w, x: _rounded(x, w[0], "numpy", False), ((6,),)),
}  # fmt: skip


def _seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers_that_were_drawn(name: str) -> None:
    """Against ordinary autograd after the same seed, nothing clipped; and what is drawn next."""
    function, shapes = FUNCTIONS[name]
    model, plain = Model(function, *shapes), Model(function, *shapes)
    plain.load_state_dict(model.state_dict())
    _, private, optimizer, _ = make_private(model, max_grad_norm=1e6, loss_reduction="sum", lr=0.0)
    sample_loss(private(batch())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = []
    for net in (private, plain):
        _seed()
        out = net(batch())
        drawn_next = torch.rand(3), np.random.random(), random.random()
        sample_loss(out).sum().backward()
        found.append((out.detach(), *drawn_next))
    for x, y in zip(*found, strict=True):
        assert np.allclose(x, y)
    for (label, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(p.summed_grad, q.grad) <= 1e-10, label


@pytest.mark.parametrize("name", ["attention of queries", "a custom operator"])
def test_each_sample_is_clipped_alone(name: str) -> None:
    """The gradients of single samples, given the numbers that the batch has drawn."""
    function, shapes = FUNCTIONS[name]
    model, plain = Model(function, *shapes), Model(function, *shapes)
    plain.load_state_dict(model.state_dict())
    _, private, optimizer, _ = make_private(model, max_grad_norm=1.0, loss_reduction="sum", lr=0.0)
    sample_loss(private(batch())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    _seed()
    losses, own = sample_loss(plain(batch())), dict(plain.named_parameters())
    each = [torch.autograd.grad(loss, list(own.values()), retain_graph=True) for loss in losses]
    grads = {n: torch.stack(rows) for n, rows in zip(own, zip(*each, strict=True), strict=True)}
    assert norms(grads).min() > 1.0
    _seed()
    sample_loss(private(batch())).sum().backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 1.0), 1e-10)


HIDDEN: dict[str, Function] = {
    "forward": lambda w, x: _masked(x, w[0], "hidden")[0],
    "a generator of torch's": lambda w, x: _masked(x, w[0], "own")[0],
    "the system's numbers": lambda w, x: _masked(x, w[0], "system")[0],
    "a counter": lambda w, x: _masked(x, w[0], "counter")[0],
    "backward": lambda w, x: _rounded(x, w[0], "hidden", False),
    "backward of the input": lambda w, x: _rounded(x, w[0], "torch", True),
    "numbers": lambda w, x: _straight(x, w[0], "numbers")[0],
    "booleans": lambda w, x: _straight(x, w[0], "booleans")[0],
    "infinite": lambda w, x: _straight(x, w[0], "infinite")[0],
    "one in many": lambda w, x: _straight(x, w[0], "one in many")[0],
    "places": lambda w, x: _straight(x, w[0], "places")[0],
}


@pytest.mark.parametrize("where", HIDDEN)
def test_generators_that_nobody_knows(where: str) -> None:
    """A custom operator that draws from a generator of its own is found out, and named.

    Also where only its own backward looks at what it drew, in another output.
    """
    _, private, _, _ = make_private(Model(HIDDEN[where], (6,)), max_grad_norm=1e6)
    with refused("random numbers" if "backward" in where else "(masked|straight).*random numbers"):
        sample_loss(private(batch())).mean().backward()


@pytest.mark.parametrize("kind", ["numbers", "booleans", "infinite", "one in many", "places"])
def test_one_that_draws_later(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drew nothing while the model was looked at: every backward pass compares all outputs, too."""
    model = Model(lambda w, x: _straight(x, w[0], kind)[0], (6,))
    _, private, optimizer, _ = make_private(model, max_grad_norm=1e6)
    with monkeypatch.context() as patch:
        patch.setitem(_DRAWS, "hidden", lambda shape: torch.ones(shape, dtype=torch.float64))
        sample_loss(private(batch())).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with refused("straight.*random numbers"):
        for _ in range(8):  # one entry in many may be drawn alike
            optimizer.zero_grad()
            sample_loss(private(batch())).mean().backward()
