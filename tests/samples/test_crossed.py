"""Models that set rows of two inputs against each other: refused at the first step, however they do.

What one row adds to the sums is measured where a step is released: the sums with it, and without.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import Batch, check_exact, make_private
from tests.refusal import refused

B, D, C = 8, 5, 0.1
AGAINST = "either may be the samples|is part of the loss|independently of|Your loss mixes samples"
CLASSES = torch.randn(B, D)


class Towers(nn.Module):
    """Two towers, and what is made of what they give."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, 4), nn.Linear(D, 4)
        self.register_buffer("items", torch.randn(B, D))
        self.free = nn.Parameter(torch.randn(B, D))
        self.use = use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


def scores(model: Towers, x: Tensor, y: Tensor) -> Tensor:
    return model.q(x) @ model.k(y).T


def of_rows(losses: Tensor) -> Tensor:
    return F.cross_entropy(losses.flatten(1), LABELS[: len(losses)] % losses[0].numel())


LABELS = torch.arange(64)


def change(
    use: Callable[..., Any], calls: list[tuple[Any, ...]], loss: Callable[[Any], Tensor] = of_rows
) -> float:
    """What the last row of the last call changes in the sums, in thresholds."""

    def sums(less: int) -> Tensor:
        torch.manual_seed(1)
        model = Towers(use).double()
        params = list(model.parameters())
        _, private, optimizer, _ = make_private(model, max_grad_norm=C, lr=0.0)
        for step, args in enumerate(calls):
            few = step == len(calls) - 1 and less
            optimizer.zero_grad()
            loss(private(*(x[: len(x) - few] for x in args))).backward()
            found = torch.cat(
                [p.new_zeros(p.numel()) if p.summed_grad is None else p.summed_grad.flatten()
                 for p in params]
            )  # fmt: skip
            optimizer.step()
        return found

    return ((sums(0) - sums(1)).norm() / C).item()


def rows(n: int = B, *shape: int) -> Tensor:
    return torch.randn(n, *shape, D).double()


def one_for_all() -> tuple[Tensor, Tensor]:
    """Rows of which one is the best for all others."""
    x, y = 1 + 0.1 * rows(), 0.1 * rows()
    y[-1] = 40.0
    return x, y


TWO: dict[str, Callable[..., Any]] = {
    "scores": scores,
    "distances": lambda m, x, y: -torch.cdist(m.q(x), m.k(y)),
    "numbers that no tower sees": lambda m, x, y: m.q(x) @ y[:, :4].T,
    "a third axis": lambda m, x, y: m.q(x)[:, None] * m.k(y)[None],
    "pairs in a row": lambda m, x, y: scores(m, x, y).flatten(),
    "pairs of pairs": lambda m, x, y: m.q(x) @ m.k(torch.cat([y, -y])).T,
    "a list": lambda m, x, y: [scores(m, x, y)],
    "a loss beside": lambda m, x, y: {"scores": scores(m, x, y), "mean": m.q(x).mean()},
    "losses of [b, 1] and [b]": lambda m, x, y: F.mse_loss(
        m.q(x)[:, :1], y[:, 0], reduction="none"
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("case", TWO)
def test_rows_against_rows(case: str) -> None:
    def loss(out: Any) -> Tensor:
        out = out["scores"] if isinstance(out, dict) else out[0] if isinstance(out, list) else out
        return of_rows(out) if out.dim() > 1 else out.pow(2).mean()

    with refused(AGAINST):
        assert change(TWO[case], [one_for_all()], loss) <= 1 + 1e-6


def test_a_refusal_names_the_way_out() -> None:
    with refused("it mixes samples.* return one loss per sample"):
        change(scores, [one_for_all()])


def test_one_tensor_given_twice() -> None:
    x = rows()
    with refused(AGAINST):
        change(scores, [(x, x)])


def test_three_inputs() -> None:
    with refused(AGAINST):
        change(lambda m, x, y, z: scores(m, x, y) + m.k(z).sum(1)[:, None], [(rows(),) * 3])


@pytest.mark.parametrize(
    "given",
    [
        lambda x, y: Batch(({"x": x, "y": y},)),
        lambda x, y: Batch(([x, y],)),
        lambda x, y: Batch((SimpleNamespace(x=x, y=y),)),
        lambda x, y: Batch((), {"y": y, "x": x}),
        lambda x, y: Batch((x, list(y))),
    ],
)
def test_however_they_are_given(given: Callable[..., Batch]) -> None:
    def use(model: Towers, *args: Any, **kwargs: Any) -> Tensor:
        one = args[0] if len(args) == 1 else args or kwargs
        one = vars(one) if isinstance(one, SimpleNamespace) else one
        x, y = (one["x"], one["y"]) if isinstance(one, dict) else one
        return scores(model, x, torch.stack(y) if isinstance(y, list) else y)

    batch = given(rows(), rows())
    with refused(AGAINST):
        of_rows(make_private(Towers(use).double())[1](*batch.args, **batch.kwargs)).backward()


def test_of_another_length_each_time() -> None:
    """Nothing that is left out of a cut would be held against what it was before."""

    def use(model: Towers, x: Tensor, y: Tensor) -> Tensor:
        return model.q(x).mean(1) @ model.k(y).T

    x, y = one_for_all()
    with refused(AGAINST):
        change(use, [(x[:, None].expand(-1, n, -1), y) for n in (5, 6, 7)])


def test_a_first_batch_of_one_row() -> None:
    """It says nothing of what has one entry, too."""

    def use(model: Towers, x: Tensor, y: Tensor) -> Tensor:
        return model.q(x).mean(1) @ model.k(y).T

    x, y = one_for_all()
    with refused(AGAINST):
        change(use, [(rows(1, 4), rows(1)), (x[:, None].expand(-1, 6, -1), y)])


TIME_FIRST: dict[str, tuple[Callable[..., Tensor], str]] = {
    "scores": (lambda m, x, y: m.q(x).mean(0) @ m.k(y).T, AGAINST),
    "attention to the others": (
        lambda m, x, y: (m.q(x).mean(0) @ m.k(y).T).softmax(1) @ m.k(y),
        "depends on another sample",
    ),
}


@pytest.mark.parametrize("case", TIME_FIRST)
def test_features_beside_what_is_time_first(case: str) -> None:
    """They have their rows along axis 0, where the batch's other inputs have none."""
    use, refusal = TIME_FIRST[case]
    with refused(refusal):
        private = make_private(Towers(use).double(), batch_first=False)[1]
        of_rows(private(rows(6, B), rows())).backward()


def test_labels_beside_what_is_time_first() -> None:
    def use(model: Towers, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.q(x).mean(0), labels, reduction="none")[:, None]

    batch = Batch(
        (rows(6, B), torch.arange(B) % 4),
        take=lambda batch, i: Batch((batch.args[0][:, i : i + 1], batch.args[1][i : i + 1])),
    )
    check_exact(Towers(use), batch, dtype=torch.float64, batch_first=False)


def test_losses_of_pairs_inside() -> None:
    def use(model: Towers, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores(model, x, y), torch.arange(len(x)), reduction="none")

    with refused("depends on another sample"):
        change(use, [one_for_all()], lambda losses: losses.mean())


def test_sums_of_pairs_beside_rows() -> None:
    """The gradient of each row's numbers is the same whatever the others hold."""

    def use(model: Towers, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        q, k = model.q(x), model.k(y)
        return {"rows": k, "pairs": q.sum(1)[:, None] + k.sum(1)[None]}

    with refused("it mixes samples"):
        change(use, [one_for_all()], lambda out: of_rows(out["pairs"]))
    assert change(use, [one_for_all()], lambda out: of_rows(out["rows"])) <= 1 + 1e-6


@pytest.mark.parametrize("batch", [B, 9])
def test_the_nearest_of_the_batch(batch: int) -> None:
    """It does not run on two rows, nor on three."""

    def use(model: Towers, x: Tensor, y: Tensor) -> Tensor:
        return scores(model, x, y).topk(5).values

    with refused("samples and not with 2 and 3"):
        change(use, [(rows(batch), rows(batch))])


HONEST: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "classes, fewer than rows": (scores, CLASSES[:-1]),
    "positions": (lambda m, x, y: m.q(x[:, None].expand(-1, B, -1) + y).tanh().mean(1), CLASSES),
    "a mask": (
        lambda m, x, y: (m.q(x[:, None] + CLASSES.to(x)).mT @ y).flatten(1),
        torch.ones(B, B).tril(),
    ),
    "weights of classes": (
        lambda m, x, y: torch.cat([m.q(x), m.k(x)], 1) * y,
        torch.arange(B) + 1.0,
    ),
}


@pytest.mark.parametrize("case", HONEST)
def test_no_rows_of_as_many_entries(case: str) -> None:
    """What cannot be cut to a few has none, also where the batch has as many rows."""
    use, y = HONEST[case]
    y = y.double()
    batch = Batch(
        (rows(), y), take=lambda batch, i: Batch((batch.args[0][i : i + 1], batch.args[1]))
    )
    check_exact(Towers(lambda m, x, y: use(m, x, y.to(x))), batch, dtype=torch.float64)


@pytest.mark.parametrize("name", ["items", "free"])
def test_a_table_of_the_model_given_back_to_it(name: str) -> None:
    _, private, optimizer, _ = make_private(Towers(scores).double(), max_grad_norm=C)
    for n in (B, 6, B):
        optimizer.zero_grad()
        of_rows(private(rows(n), getattr(private, name))).backward()
        optimizer.step()


def test_a_catalogue_of_as_many_items_as_a_later_batch() -> None:
    items = rows()
    _, private, optimizer, _ = make_private(Towers(scores).double(), max_grad_norm=C)
    for n in (B - 2, B, B + 4, B):
        optimizer.zero_grad()
        of_rows(private(rows(n), items)).backward()
        optimizer.step()
