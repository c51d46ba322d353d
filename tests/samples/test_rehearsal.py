"""Calls that a traced run on few rows proves, and those that it must leave to values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import FastclipError
from fastclip.samples import runs
from fastclip.samples.agreement import unmasked
from tests.oracle import (
    Batch,
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)

B, T, D = 6, 5, 4
Does = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer, what a test does to its output, and a head."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.does = does
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.generator = torch.Generator()
        self.alike = nn.Parameter(torch.randn(1, T, D).repeat(16, 1, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.int64) if mask is None else mask
        return self.head(torch.tanh(self.does(self, torch.tanh(self.first(x)), mask))).mean(1)


def masked(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """As transformers do: without padding there is nothing to hide."""
    scores = h @ h.transpose(1, 2)
    if not mask.all():
        scores = scores.masked_fill(mask[:, None] == 0, -1e4)
    return scores.softmax(-1) @ h


def counted(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """The same question, and one of a constant."""
    scores = h @ h.transpose(1, 2)
    if mask.bool().sum() != mask.numel():
        scores = scores.masked_fill(mask[:, None] == 0, -1e4)
    every = torch.ones(h.shape[:2], dtype=torch.int64)
    return scores.softmax(-1) @ h if every.sum() == every.numel() else h


def warned(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    if (h == 0).all():
        print("nothing here")
    return m.second(h)


def marked(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """Only where some sample has marks, they count."""
    return h * mask.clamp(min=1)[..., None] if (mask > 1).any() else h


def packed(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """As transformers ask whether any sample consists of several texts, told by a jump of positions."""
    scores = h @ h.transpose(1, 2)
    texts = (mask.cumsum(1).diff(dim=1, prepend=mask[:, :1] - 1) != 1).cumsum(1)
    if not (texts[:, -1] == 0).all():
        scores = scores.masked_fill(texts[:, None] != texts[:, :, None], -1e4)
    return scores.softmax(-1) @ h


def cells(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    state = h.new_zeros(len(h), D)
    for step in h.unbind(1):
        state = torch.tanh(step + F.linear(state, m.second.weight))
    return state[:, None] + h


def seeded_here(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return h @ torch.randn(D, D).to(h) * torch.rand(T, 1).to(h)


def normed(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """An instance norm as torch computes it: of so many samples, and as many channels each."""
    weight, bias = (m.second.bias * k for k in (1, 2))
    return F.instance_norm(h.transpose(1, 2), weight=weight, bias=bias).transpose(1, 2)


PROVEN: dict[str, Does] = {
    "layers": lambda m, h, mask: m.second(h),
    "a token for each sample": lambda m, h, mask: torch.cat([m.token.expand(len(h), -1, -1), h], 1),
    "folded": lambda m, h, mask: m.second(h.reshape(-1, D)).view_as(h),
    "its own mean": lambda m, h, mask: h - h.mean((1, 2), keepdim=True),
    "a mask": masked,
    "a mask that is counted": counted,
    "a mask of marks": marked,
    "a mask of positions": packed,
    "weights of instances": normed,
    "scattered into zeros": lambda m, h, mask: m.second(
        torch.zeros(len(h), T, D).to(h).scatter(2, h.argsort(-1), h)
    ),
    "a question without effect": warned,
    "dropout": lambda m, h, mask: m.second(F.dropout(h, 0.3)),
    "a state of zeros": cells,
    "indexed by position": lambda m, h, mask: h[torch.arange(len(h)), -1][:, None] + h,
    "numbers of a seed of its own": lambda m, h, mask: (
        h + torch.randn(D, generator=torch.Generator().manual_seed(7)).to(h)
    ),
    "torch's generator, seeded": seeded_here,
    "its generator, seeded": lambda m, h, mask: h[
        ..., torch.randperm(D, generator=m.generator.manual_seed(3))
    ],
}


def passes(private: nn.Module) -> int:
    """Forward passes that were made beside the calls."""
    return sum(look.passes for look in private.grad_state.calls.looks)


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name: str) -> None:
    torch.manual_seed(0)
    model = Model(PROVEN[name]).double()
    x, mask = torch.randn(B, T, D).double(), torch.ones(B, T, dtype=torch.int64)
    mask[1, 3:] = mask[2:, 4:] = 0
    given = (x, mask) if name.startswith("a mask") else (x,)
    grads = None if name == "dropout" else per_sample_gradients(model, Batch(given))
    private = make_private(model, max_grad_norm=0.1)[1]
    sample_loss(private(*given)).mean().backward()
    assert private.grad_state.calls.layouts["forward"].proven
    assert passes(private) <= 6
    if grads is not None:
        found = summed(dict(model.named_parameters()))
        assert_sums(found, clipped_sum(grads, 0.1), 1e-10)


def test_masks_are_told_from_numbers_of_a_table() -> None:
    """Of one row, whose numbers are all 0."""
    mask, numbers = torch.tensor([[1, 1], [1, 0]]), torch.zeros(2, 2, dtype=torch.int64)
    assert torch.equal(unmasked(mask, 0), torch.ones_like(mask))
    assert torch.equal(unmasked(numbers, 0), numbers)
    assert torch.equal(unmasked(mask + 1, 0), mask + 1)


class Doubled(torch.autograd.Function):
    """Its gradient is another one than what torch would compute."""

    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 2 * g


def hooked(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    h = m.second(h)
    h.register_hook(lambda g: 2 * g)
    return h


def in_an_order(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    order = torch.randperm(len(h))
    return m.second(h[order])[order.argsort()]


def detached(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """Both answers give the same values, and other gradients."""
    return h.detach() if h.mean() > 0.01 else m.second(h) - m.second(h).detach() + h.detach()


def seen_by_others(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """Others see samples that have marks, of which there are none."""
    marks = mask > 1
    return h - (h * marks[..., None]).mean(0) if marks.any() else h


def bounded(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """Whether some sample is out of bounds, where parameters may have put it."""
    return h.clamp(-2, 2) if (h.abs() > 2).any() else h


def by_address(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    ctypes.memmove(out.data_ptr(), h.data_ptr(), h.numel() * h.element_size())
    return m.second(out) + h


APART: dict[str, Does] = {
    "an address": by_address,
    "a way that is not taken and mixes": seen_by_others,
    "a question of what was learned": bounded,
    "a gradient of one's own": lambda m, h, mask: Doubled.apply(h),
    "a hook": hooked,
    "an order by chance": in_an_order,
    "the samples that Python selects": lambda m, h, mask: torch.stack(
        [m.second(r) if r.sum().item() > -99 else r for r in h]
    ),
}


@pytest.mark.parametrize("name", APART)
def test_left_to_values(name: str) -> None:
    torch.manual_seed(0)
    private = make_private(Model(APART[name]).double())[1]
    backward(private, torch.randn(B, T, D).double())
    assert not private.grad_state.calls.layouts["forward"].proven
    assert passes(private) > 6


def by_node(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    h = m.second(h).tanh()
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda gs, _: tuple(g + 0.1 * g.mean(0) for g in gs))
    return h


def of_so_many(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    return h * len(torch.unique(h[:, 0, 0].round()))


def clamped(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    """In most batches both ways give the same."""
    return h.clamp(-0.5, 0.5) if h.max() > 0.8 else h


def dropped(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return F.dropout(h, 0.5)


COUPLED: dict[str, Does] = {
    "a part of so many features": lambda m, h, mask: h * h[:, : len(h) // 3].sum(1, keepdim=True),
    "as often as there are samples": lambda m, h, mask: (
        h.unsqueeze(1).expand(-1, len(h), -1, -1).sum(1)
    ),
    "a padding of their number": lambda m, h, mask: (
        h + torch.cat([h, h.new_zeros(len(h), len(h), D)], 1).mean(1, keepdim=True)
    ),
    "positions in the batch": lambda m, h, mask: (
        h
        + 0 * m.second.weight[: len(h)].new_ones(1)
        + F.embedding(torch.arange(len(h)), torch.cat([m.token[0]] + [2 * m.token[0]] * 11))[
            :, None
        ]
    ),
    "rows of a table that are alike": lambda m, h, mask: h + m.alike[: len(h)],
    "rows of a table by number": lambda m, h, mask: (
        h * F.embedding(torch.arange(len(h)), m.alike.flatten(1)).view_as(h)
    ),
    "channels of a table": lambda m, h, mask: F.batch_norm(
        h.view(1, -1, 1).expand(-1, -1, 2) * torch.arange(2).to(h),
        None,
        None,
        m.alike.flatten()[: h.numel()],
        None,
        True,
    )[..., 1].view_as(h),
    "scattered among samples": lambda m, h, mask: (
        h + torch.zeros_like(h).scatter(0, torch.zeros(1, T, D, dtype=torch.int64), h[:1])
    ),
    "a count of ones": lambda m, h, mask: h * torch.ones(len(h), T).sum().to(h),
    "many of a count": lambda m, h, mask: (
        h * (torch.ones(5000) * torch.ones(len(h), T).sum())[:1].to(h)
    ),
    "a triangle": lambda m, h, mask: h.transpose(0, 1).tril().transpose(0, 1),
    "a node's hook": by_node,
    "how many there are of a kind": of_so_many,
    "a question that is seldom answered": clamped,
    "draws by position": lambda m, h, mask: (
        h * torch.bernoulli((torch.arange(len(h)) % 2).double())[:, None, None]
    ),
    "a question of gradients": detached,
    "a question": lambda m, h, mask: 2 * h if h.mean() > 0.01 else h,
    "the number of samples": lambda m, h, mask: h * (1 + 1 / len(h)),
    "a tensor of their number": lambda m, h, mask: h * torch.full((), 1 / len(h)).to(h),
    "their share": lambda m, h, mask: h / torch.ones(len(h), 1, 1).sum().to(h),
    "more samples": lambda m, h, mask: h - 0.1 * h.mean(0) if len(h) > 8 else h,
    "the mask's sum": lambda m, h, mask: h * T / mask.double().mean(),
    "draws of a seed by position": lambda m, h, mask: (
        h + torch.randn(len(h), 1, 1, generator=torch.Generator().manual_seed(7)).to(h)
    ),
    "a dropout of a seed": dropped,
    "a seed of their number": lambda m, h, mask: (
        h + torch.randn(D, generator=torch.Generator().manual_seed(len(h))).to(h)
    ),
    "draws": lambda m, h, mask: h * (k := torch.rand(len(h), T, 1).to(h)) / k.mean(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    torch.manual_seed(0)
    private = make_private(Model(COUPLED[name]).double())[1]
    mask = torch.randint(0, 2, (12, T)).index_fill_(1, torch.tensor(0), 1)
    with pytest.raises(FastclipError):
        sample_loss(private(torch.randn(12, T, D).double(), mask)).mean().backward()


@pytest.mark.skipif(not runs.FOLLOWS, reason="fastclip._path is not built")
def test_a_special_sample_comes_later() -> None:
    """Both ways give the same of the first batch, and not of one that takes the other."""

    def does(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
        return h * mask[..., None] if (mask > 1).any() else h

    private, optimizer = make_private(Model(does).double())[1:3]
    x, mask = torch.randn(B, T, D).double(), torch.ones(B, T, dtype=torch.int64)
    for _ in range(3):
        optimizer.zero_grad()
        sample_loss(private(x, mask)).mean().backward()
        optimizer.step()
    assert private.grad_state.calls.layouts["forward"].proven
    mask[2, 0], mask[3:, 1] = 2, 0
    with pytest.raises(FastclipError, match="independently of the others"):
        private(x, mask)


def late_hook(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    h = m.second(h)
    if len(h) > 8 and h.requires_grad:
        h.register_hook(lambda g: g + 0.1 * g.mean(0))
    return h


def test_a_step_counts_where_nothing_was_compared() -> None:
    """Few rows prove it; what the step itself shows inside the model is an error."""
    private = make_private(Model(late_hook).double())[1]
    with pytest.raises(FastclipError, match="mixes samples"):
        sample_loss(private(torch.randn(12, T, D).double())).mean().backward()


def test_a_new_way_is_traced() -> None:
    """Also after the first two steps, loss and backward pass included."""

    def does(m: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([h, h], 1) if m.on else h

    model = Model(does).double()
    model.on = False
    private, optimizer = make_private(model)[1:3]
    for on in (False, False, False, True, True):
        model.on = on
        optimizer.zero_grad()
        backward(private, torch.randn(B, T, D).double())
        optimizer.step()
        assert passes(private) == 3 + 3 * on
    traced = private.grad_state.trace.log.reports
    assert len(traced) == 2
    assert traced[-1].operations > traced[0].operations
