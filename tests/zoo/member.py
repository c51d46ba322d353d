"""What a member of the zoo is, and how it is held against one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastclip.ops.units import UnitSamples
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    relative_error,
    sample_loss,
    summed,
)

B, T, D, WORDS, CLASSES = 4, 5, 6, 11, 3
Loss = Callable[[nn.Module, Any], Tensor]


def sequence(b: int) -> Tensor:
    """[b, T, D]."""
    return torch.randn(b, T, D, dtype=torch.float64)


def words(b: int) -> Tensor:
    """Ids [b, T]."""
    return torch.randint(WORDS, (b, T))


def image(b: int) -> Tensor:
    """[b, 2, 8, 8]."""
    return torch.randn(b, 2, 8, 8, dtype=torch.float64)


def mean_of_rows(model: nn.Module, inputs: Any) -> Tensor:
    """The mean of the rows' losses of what the model returns: one tensor, or several."""
    if isinstance(inputs, dict):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return mean_loss(output)


def mean_loss(output: Any) -> Tensor:
    """Of a tensor, or of every one in a tuple, list or dict."""
    if isinstance(output, Tensor):
        output = torch.view_as_real(output) if output.is_complex() else output
        return sample_loss(output[:, None] if output.dim() == 1 else output).mean()
    values = output.values() if isinstance(output, dict) else output
    return sum(mean_loss(value) for value in values)  # type: ignore[return-value]


def own_loss(model: nn.Module, inputs: Any) -> Tensor:
    """What a model returns that computes its loss, the mean over rows, itself."""
    return model(inputs)


@dataclass
class Member:
    """One model: how to make it, a batch of b rows for it, and the mean of their losses.

    Attributes:
        tolerance: 1e-5 where a model computes in float32 by itself.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any] = sequence
    loss: Loss = mean_of_rows
    tolerance: float = 1e-10

    def model(self) -> nn.Module:
        """Double, with parameters that say something, the same ones for every call."""
        kind = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return self.build().double().train()
        finally:
            torch.set_default_dtype(kind)

    def batch(self, b: int, seed: int = 0) -> Any:
        """The same ones for every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.inputs(b)


class Family:
    """Members that are hard for one reason; iterating gives them.

    Args:
        name: of the family.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def member(self, build: Any = None, /, **options: Any) -> Any:
        """Decorator: a class without arguments, or a function that returns a model, is a member."""
        if build is None:
            return lambda build: self.member(build, **options)
        name = options.pop("name", build.__name__)
        assert name not in self.members, name
        self.members[name] = Member(f"{self.name}: {name}", self.name, build, **options)
        return build


def row(inputs: Any, i: int) -> Any:
    """Row i alone, of a batch whose tensors all have their rows along axis 0."""
    return tree_map(lambda x: x[i : i + 1].clone() if isinstance(x, Tensor) else x, inputs)


def row_count(inputs: Any) -> int:
    """Of the first tensor."""
    found: list[int] = []
    tree_map(lambda x: found.append(len(x)) if isinstance(x, Tensor) else None, inputs)
    return found[0]


def per_sample(model: nn.Module, inputs: Any, loss: Loss) -> dict[str, Tensor]:
    """{name: [b, *shape]}: every row alone in an ordinary model, by autograd."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {n: [] for n in trained}
    for i in range(row_count(inputs)):
        model.zero_grad()
        own = loss(model, row(inputs, i))
        if own.requires_grad:
            own.backward()
        for name, p in trained.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(found) for name, found in rows.items()}


def by_units(
    grads: dict[str, Tensor], units: Callable[[int], UnitSamples] | None
) -> dict[str, Tensor]:
    """The gradients of units [u, *shape] from their rows' [b, *shape]; of rows where there are none."""
    if units is None:
        return grads
    known = units(len(next(iter(grads.values()))))
    own = [known.owner == unit for unit in range(known.count)]
    return {
        n: torch.stack([getattr(g[x], known.reduction)(0) for x in own]) for n, g in grads.items()
    }


def check(
    member: Member,
    *,
    sizes: tuple[int, ...] = (B, 3),
    around: Callable[[nn.Module], nn.Module] | None = None,
    tolerance: float | None = None,
    units: Callable[[int], UnitSamples] | None = None,
    **options: Any,
) -> None:
    """Some steps of the engine, each against one sample at a time.

    Args:
        sizes: of the batches. around: makes of the private model what is called.
        units: those that so many rows are clipped by.
        options: of make_private.
    """
    batches = [member.batch(b, seed) for seed, b in enumerate(sizes)]
    check_model(
        member.model(), member.model(), batches, member.loss,
        around=around, tolerance=tolerance or member.tolerance, units=units, **options,
    )  # fmt: skip


def check_model(
    model: nn.Module,
    twin: nn.Module,
    batches: list[Any],
    loss: Loss = mean_of_rows,
    *,
    around: Callable[[nn.Module], nn.Module] | None = None,
    tolerance: float = 1e-10,
    units: Callable[[int], UnitSamples] | None = None,
    **options: Any,
) -> None:
    """Train `model` on these batches with a threshold at the middle norm of the first.

    Args:
        twin: the same model once more (some cannot be copied), which stays ordinary.
    """
    first = norms(by_units(per_sample(twin, batches[0], loss), units))
    C = float(first.quantile(0.5))
    assert C > 0
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, lr=0.05, **options)
    # wrap_model=False returns a handle; the model itself is called
    called = private if isinstance(private, nn.Module) else model
    called = called if around is None else around(called)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for batch in batches:
        twin.load_state_dict(model.state_dict(), strict=False)
        grads = per_sample(twin, batch, loss)
        if units is not None:
            optimizer.grad_state.batch.next_units = units(len(next(iter(grads.values()))))
            grads = by_units(grads, units)
        optimizer.zero_grad()
        loss(called, batch).backward()
        assert [n for n, p in trained.items() if p.grad is not None] == []
        assert relative_error(optimizer.per_sample_norms, norms(grads)) <= tolerance
        assert_sums(summed(trained), clipped_sum(grads, C), tolerance)
        optimizer.step()
    trace = optimizer.grad_state.trace  # a compiled model's may wait for another one
    trace.left, trace._traces = 0, False
    trace.end()
