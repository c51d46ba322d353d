"""Rows that a router moves to its experts: exact, and no expert is made for every sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import BatchSizeError, FastclipError
from fastclip.rules.derived import DerivedGraph
from fastclip.rules.routing import Routing
from fastclip.rules.use import UseBackward
from tests.oracle import check_exact, check_exact_or_refused, make_private
from tests.rules.uses.functions import B, batch, no_replay

T, D, E, H = 9, 8, 3, 12


class Experts(nn.Module):
    """Each row of x [b, t, d] goes to two of the experts.

    Args:
        how: computes what expert e makes of its rows.
    """

    def __init__(self, how: Callable[[Experts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> nn.Parameter:
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(numbers / 2)

        self.router = nn.Linear(D, E, dtype=torch.float64)
        self.up, self.down = parameter(E, H, D), parameter(E, D, H)
        self.bias, self.scale, self.one = parameter(E, H), parameter(D), parameter(1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weight, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for e in chosen.unique():
            row, place = (chosen == e).nonzero(as_tuple=True)
            made = self.how(self, e, rows[row])
            out = out.index_add(0, row, made * weight[row, place, None])
        return out.view(x.shape)


def linear(m: Experts, e: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.up[e]).tanh(), m.down[e])


def with_bias(m: Experts, e: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.up[e], m.bias[e]).tanh(), m.down[e])


def products(m: Experts, e: Tensor, x: Tensor) -> Tensor:
    return (x @ m.up[e].t() + m.bias[int(e)]).relu() @ m.down[e].t() * m.scale - m.one


def twice(m: Experts, e: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.linear(F.linear(x, m.up[e]).tanh(), m.down[e]).sin(), m.up[e]) @ m.up[e]


class Model(nn.Module):
    def __init__(self, how: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(D, D, dtype=torch.float64)
        self.experts, self.after = Experts(how), nn.Linear(D, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.experts(self.before(x)))


def _unused(self: DerivedGraph, contributions: list) -> None:
    raise AssertionError("per-sample gradients of a whole parameter were made")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [linear, with_bias, products, twice], ids=lambda f: f.__name__)
def test_exact(how: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DerivedGraph, "pull_back", _unused)
    with no_replay():
        check_exact(Model(how), batch(B, T, D), dtype=torch.float64)
        check_exact(Model(how), batch(B, T, D), dtype=torch.float32)


def test_rows_and_entries_of_several_samples_are_refused() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    routing = Routing(2)
    number = routing.watch(x)
    routing._codes = [(torch.tensor([[2.0**-8, 2.0**-8, 2.0**-7], [2.0**-7, 0.0, 2.0**-7]]),)]
    g = torch.tensor([[1.0, 1.0, 1.0], [3.0, 0.0, 1.0]])
    with pytest.raises(BatchSizeError, match="an entry of its output depends on several samples"):
        routing.sample_of_entry(number, g, "w")
    g[1, 0] = 1.0
    assert routing.sample_of_entry(number, g, "w").tolist() == [[0, 0, 1], [1, -1, 1]]
    use = object.__new__(UseBackward)
    use.g, use.batch_axis, use._owner = g, None, routing.sample_of_entry(number, g, "w")
    use._call = SimpleNamespace(label="w")
    with pytest.raises(BatchSizeError, match="a row of its output depends on several samples"):
        use.sample_of_row()


class SharedInputs(Experts):
    """What expert 0 has made is kept for a loss of its own, past the module's output."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        chosen = self.router(rows).argmax(-1)
        out, kept = torch.zeros_like(rows), rows.new_zeros(len(rows), H)
        for e in range(E):
            row = (chosen == e).nonzero()[:, 0]
            made = F.linear(rows[row], self.up[e]).tanh()
            kept = kept.index_add(0, row, made)
            out = out.index_add(0, row, F.linear(made, self.down[e]))
        self.kept = kept.view(*x.shape[:-1], H)
        return out.view(x.shape)


@pytest.mark.parametrize("coupled", [False, True])
def test_a_small_share_that_passes_the_module_by_is_refused(coupled: bool) -> None:
    class Losses(Model):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            kept = self.experts.kept.sum((1, 2))
            return out + 1e-7 * (kept.sum() if coupled else kept)[..., None, None]

    model = Losses(linear)
    model.experts = SharedInputs(linear)
    with pytest.raises(FastclipError):
        check_exact(model, batch(B, T, D), dtype=torch.float64)


class Grouped(Experts):
    """One product for all experts, over rows sorted by expert; torch has it in float32 only."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        chosen = self.router(rows).argmax(-1)
        order = chosen.argsort(stable=True)
        ends = torch.nn.functional.one_hot(chosen, E).sum(0).cumsum(0).to(torch.int32)
        if x.dtype == torch.float64:  # the reference
            made = torch.einsum("nd,nhd->nh", rows, self.up[chosen]).tanh()
            return torch.einsum("nh,ndh->nd", made, self.down[chosen]).view(x.shape)
        made = torch._grouped_mm(rows[order], self.up.transpose(1, 2), offs=ends).tanh()
        made = torch._grouped_mm(made, self.down.mT, offs=ends)
        return torch.zeros_like(rows).index_copy(0, order, made).view(x.shape)


def test_grouped_product() -> None:
    model = Model(linear)
    model.experts = Grouped(linear)
    with no_replay():
        check_exact(model, batch(B, T, D), dtype=torch.float32)


class GroupedBetween(nn.Module):
    """Rows of a sample, half of them to each of two experts, through a grouped product."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, 16)  # by position, so that each expert's are together
        ends = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        made = torch._grouped_mm(rows, self.weight, offs=ends)
        return made.view(x.shape[1], x.shape[0], 16).transpose(0, 1)


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_contribution(dtype: torch.dtype, cancels: bool) -> None:
    """The sum is no more rounded than the norm, which a sample's scaled 16-bit gradients would be."""
    for seed in range(6):
        torch.manual_seed(seed)
        model = GroupedBetween(dtype)
        _, private, _, _ = make_private(model, max_grad_norm=1e-3, loss_reduction="sum")
        x, g = torch.randn(1, 8, 16), torch.randn(1, 8, 16)
        if cancels:
            x, g = x[:, :1].expand(-1, 8, -1).contiguous(), g[:, :1].repeat(1, 8, 1)
            g[:, 3::4] *= -2.97
        x, g = x.to(dtype), g.to(dtype)
        (private(x) * g).sum().backward()
        assert model.weight.summed_grad.double().norm().item() <= 1e-3


class Block(nn.Module):
    """Leaves the mask out where no row of the batch is padded, as transformers does.

    Args:
        couple: what else becomes of the rows of a padded batch.
    """

    def __init__(self, couple: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.inner, self.couple = nn.Linear(D, D, dtype=torch.float64), couple

    def forward(self, x: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        if keep.all():
            return self.inner(x + bias).tanh()
        x = self.inner(x + torch.where(keep[..., None], bias, -1.0)).tanh()
        return x if self.couple is None else self.couple(x)


class Shared(nn.Module):
    """Blocks that use one parameter, at one line of code."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(T, D, dtype=torch.float64))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, keep, self.bias)
        return x


def padded(*rows: int, of: int = B) -> tuple[Tensor, Tensor]:
    """Each of these rows is a little longer than the one before."""
    keep = torch.ones(of, T, dtype=torch.bool)
    for number, row in enumerate(rows):
        keep[row, 1 + number :] = False
    return batch(of, T, D), keep


@pytest.mark.parametrize("row", [0, 1])
def test_a_use_that_several_modules_make_is_followed_in_each(row: int) -> None:
    check_exact(Shared(Block(), Block(), Block()), padded(row), dtype=torch.float64)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "couple", [lambda x: x + 1e-3 * x.mean(0), lambda x: x.flip(0)], ids=["mean", "flip"]
)
def test_a_module_that_couples_rows_is_refused_whichever_makes_the_use(
    couple: Callable, number: int, row: int
) -> None:
    blocks = [Block(couple if i == number else None) for i in range(3)]
    last = (
        couple(torch.tensor([0.0, 1.0]))[0] == 1 and number == 2
    )  # only what is returned is flipped
    with nullcontext() if last else pytest.raises(BatchSizeError):
        check_exact(Shared(*blocks), padded(row), dtype=torch.float64)


@pytest.mark.parametrize("rows", [(2,), (1, 2, 3, 4, 5)])
def test_a_way_that_other_rows_decide(rows: tuple[int, ...]) -> None:
    """The first few rows are not padded; or copies of another row than the first are run."""
    check_exact(Shared(Block(), Block()), padded(*rows, of=6), dtype=torch.float64)


def test_a_way_that_the_number_of_rows_decides_is_refused() -> None:
    class Larger(Block):
        def forward(self, x: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
            x = self.inner(x).tanh()
            return x + 1e-3 * (x * bias) if len(x) > 4 else x

    with pytest.raises(BatchSizeError, match="number of samples"):
        check_exact(Shared(Larger()), padded(2, of=6), dtype=torch.float64)


def test_rows_that_one_module_moves_and_another_puts_back() -> None:
    blocks = [Block(lambda x: x.flip(0)), Block(), Block(lambda x: x.flip(0))]
    check_exact_or_refused(Shared(*blocks), padded(1), dtype=torch.float64)


class Tasks(nn.Module):
    """Each sample goes through the head that its task, a number of shape [b], names."""

    def __init__(self, heads: Callable[[Tasks, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.of = nn.Linear(D, D), heads
        self.heads = nn.ModuleList(nn.Linear(D, 2) for _ in range(E))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return self.of(self, self.body(x).tanh(), task)


def one_by_one(m: Tasks, h: Tensor, task: Tensor) -> Tensor:
    return torch.stack([m.heads[int(t)](row) for row, t in zip(h, task, strict=True)])


def as_rows(m: Tasks, h: Tensor, task: Tensor) -> Tensor:
    found = [row @ m.heads[t].weight.mT for row, t in zip(h.split(1), task.tolist(), strict=True)]
    return torch.cat(found)


def by_task(m: Tasks, h: Tensor, task: Tensor) -> Tensor:
    out = h.new_zeros(len(h), 2)
    for number, head in enumerate(m.heads):
        out[task == number] = head(h[task == number])
    return out


@pytest.mark.parametrize("heads", [one_by_one, as_rows, by_task], ids=lambda f: f.__name__)
def test_heads_by_number(heads: Callable) -> None:
    check_exact(Tasks(heads), (batch(6, D), torch.arange(6) % E), dtype=torch.float64)
