"""Members of every family in other modes: precision, checkpoints, compiled, split batches, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.oracle import clipped_sum, make_private, norms, relative_error, summed
from tests.zoo.families import MEMBERS, marked
from tests.zoo.member import Member, check, per_sample

SELECTED = [
    "arguments: Film",
    "folds: Between",
    "folds: HeadBiases",
    "expanded: ClassToken",
    "lists: Matrices",
    "writes: FirstPosition",
    "functional: TiedByProduct",
    "shared: OneLayerTwice",
    "derived: HyperNetwork",
    "derived: Mixture",
    "parametrised: weight_norm",
    "position tables: Beit",
    "torch's attention: multihead_batch_first",
    "norms and gates: Gated",
    "mixers: SelectiveScan",
    "complex: SpectralFilter",
    "experts: IndexAdd",
    "experts: SlicesOfTensors",
    "experts: SortSplit",
]
FEW = SELECTED[1::3]
QUICK = ["folds: Between", "derived: HyperNetwork", "experts: SlicesOfTensors"]
each = pytest.mark.parametrize("name", marked(SELECTED, QUICK))
some = pytest.mark.parametrize("name", marked(FEW, QUICK[:1]))
NEEDS_ROWS = ["complex: SpectralFilter", "experts: SortSplit"]


class Checkpointed(nn.Module):
    """The whole model, computed again in the backward pass."""

    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant and x.is_floating_point():  # else it would have no backward
            x = x.detach().requires_grad_()
        return checkpoint(self.model, x, use_reentrant=self.reentrant)


def wrapped(member: Member, around: Callable[[nn.Module], nn.Module]) -> Member:
    """The same inside another module."""
    return Member(
        member.name, member.family, lambda: around(member.build()), member.inputs, member.loss,
        member.tolerance,
    )  # fmt: skip


@each
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(name: str, reentrant: bool) -> None:
    member = MEMBERS[name]
    if reentrant and not member.batch(1).is_floating_point():
        return  # torch's reentrant checkpoints need an input with a gradient
    check(wrapped(member, lambda model: Checkpointed(model, reentrant)), sizes=(3,))


@each
def test_hooks(name: str) -> None:
    check(MEMBERS[name], sizes=(3,), wrap_model=False)


@each
def test_sizes(name: str) -> None:
    """As long as there are positions; one row; many; none at all after the first."""
    check(MEMBERS[name], sizes=(5, 1, 9))


@each
def test_one_row_first(name: str) -> None:
    """The first batch is one row; samples are told from nothing else."""
    check(MEMBERS[name], sizes=(1, 4))


@each
def test_empty_batch(name: str) -> None:
    """As Poisson sampling gives them: a sum of zeros."""
    member = MEMBERS[name]
    if name in NEEDS_ROWS:
        return  # nor does the ordinary model run
    model = member.model()
    _, private, optimizer, _ = make_private(model)
    member.loss(private, member.batch(3)).backward()
    optimizer.step()
    optimizer.zero_grad()
    empty = member.batch(0)
    out = private(empty)
    out.sum().backward()
    optimizer.step()
    for name_, p in model.named_parameters():
        assert torch.isfinite(p).all(), name_
        assert p.grad is None or not p.grad.any(), name_


@some
@pytest.mark.parametrize("after", [False, True])
def test_copied(name: str, after: bool) -> None:
    """A copy of the model is made private; or a private model is copied, and both go on alone."""
    member = MEMBERS[name]
    model, twin, batch = member.model(), member.model(), member.batch(4)
    model = model if after else copy.deepcopy(model)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    if after:
        member.loss(private, batch).backward()
        optimizer.zero_grad()
        other = copy.deepcopy(private)
        assert all(type(p) is nn.Parameter for p in other.parameters())
        for p in other.parameters():
            p.data.zero_()
    grads = per_sample(twin, batch, member.loss)
    optimizer.zero_grad()
    member.loss(private, batch).backward()
    found = summed(dict(model.named_parameters()))
    assert relative_error(found, clipped_sum(grads, 0.1)) <= member.tolerance


@each
def test_physical_batches(name: str) -> None:
    """One logical batch in two physical ones of unlike size."""
    member = MEMBERS[name]
    model, twin = member.model(), member.model()
    first, second = member.batch(4), member.batch(2, seed=1)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1, loss_reduction="mean")
    found = [per_sample(twin, batch, member.loss) for batch in (first, second)]
    grads = {n: torch.cat([found[0][n], found[1][n]]) for n in found[0]}
    optimizer.zero_grad()
    optimizer.signal_skip_step(True)
    member.loss(private, first).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    member.loss(private, second).backward()
    params = dict(model.named_parameters())
    assert relative_error(summed(params), clipped_sum(grads, 0.1)) <= member.tolerance


@each
def test_autocast(name: str) -> None:
    """bfloat16 products: near the rows' own gradients under autocast, and within rounding of them."""
    member = MEMBERS[name]
    if member.family == "complex":
        return  # torch has no complex bfloat16
    model, twin = member.model().float(), member.model().float()
    batch = member.batch(4)
    batch = batch.float() if batch.is_floating_point() else batch

    def loss(m: nn.Module, inputs: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return member.loss(m, inputs)

    grads = per_sample(twin, batch, loss)
    C = float(norms(grads).median())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    loss(private, batch).backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 2e-2
    found = summed(dict(model.named_parameters()))
    assert relative_error(found, clipped_sum(grads, C)) <= 5e-2


@pytest.fixture
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
@some
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(name: str, backend: str) -> None:
    around = lambda model: torch.compile(model, backend=backend)  # noqa: E731
    check(MEMBERS[name], sizes=(3,), around=around)
