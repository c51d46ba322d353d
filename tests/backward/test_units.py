"""Rows that are clipped by units: what is counted, what is bounded, what is refused."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip import GradScaler, clipping
from fastclip.errors import ArgumentError, ArgumentTypeError, BatchSizeError, StepError
from fastclip.ops.units import UnitSamples
from tests.networks import mlp, rows
from tests.oracle import (
    DTYPES,
    Batch,
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.precision.families import FAMILIES, gradients_under, losses_under
from tests.precision.test_autocast import NORM, SUM
from tests.strategies import COMBINATIONS, PRESETS, label
from tests.units import LAYOUTS, Elsewhere, scattered, unit_samples

OWNER = [0, 1, 0, 2, 3, 2, 0, 4]
LAYERS = [0.3, 1.0, 0.7, 0.2]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def start(model: nn.Module, strategy: Any = "flat", C: Any = 0.5, **options: Any) -> tuple:
    """(engine, parameters by name, private, optimizer), all noise from a seeded generator."""
    engine, private, optimizer, _ = make_private(
        model, max_grad_norm=C, clipping=strategy,
        noise_generator=torch.Generator().manual_seed(5), **options,
    )  # fmt: skip
    return engine, dict(model.named_parameters()), private, optimizer


def joined(optimizer: Any, owner: list[int] | UnitSamples, reduction: str = "mean") -> None:
    """The rows of the next pass belong to these units."""
    units = owner if isinstance(owner, UnitSamples) else unit_samples(owner, reduction)
    optimizer.grad_state.batch.next_units = units


def total_norm(sums: dict[str, Tensor]) -> float:
    return torch.stack([x.double().norm() for x in sums.values()]).norm().item()


# What is counted and clipped


EVERY = {**PRESETS, **{label(strategy): strategy for strategy in COMBINATIONS}}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", EVERY)
def test_a_unit_of_equal_rows_is_a_row(name: str) -> None:
    """Norms, scales, counts, groups, thresholds and noise: the run over units is that over rows."""
    strategy, model = EVERY[name], mlp()
    C = LAYERS if strategy.threshold.per_layer else 0.5
    found = []
    for repeated in (False, True):
        engine, params, private, optimizer = start(
            copy.deepcopy(model), strategy, C, noise_multiplier=0.7
        )
        for step in range(3):
            torch.manual_seed(step)
            x, groups = rows(5), torch.arange(5) % 3
            if repeated:
                x = x[OWNER]
                joined(optimizer, OWNER)
                first = [OWNER.index(unit) for unit in range(5)]
                ids = torch.full((len(OWNER),), 2)  # those of later rows say nothing
                ids[first] = groups
                groups = ids
            engine.set_groups(groups)
            backward(private, x)
            optimizer.step()
            optimizer.zero_grad()
        found.append([*params.values(), optimizer.threshold, optimizer.per_sample_norms])
        if optimizer.noisy_counts is not None:
            found[-1].append(optimizer.noisy_counts)
    for by_rows, by_units in zip(*found, strict=True):
        assert relative_error(by_units.detach(), by_rows.detach()) <= 1e-9


@pytest.mark.one_in(4)
@layouts
@reductions
@pytest.mark.parametrize("name", [n for n, s in PRESETS.items() if not s.threshold.same_step])
def test_every_strategy_sees_units(name: str, reduction: str, layout: str) -> None:
    """Against the strategy's own scales of the units' norms, by autograd."""
    strategy, model, x = PRESETS[name], mlp(), rows(7)
    units = LAYOUTS[layout](7, reduction)
    grads = per_sample_gradients(model, x, units=units)
    engine, params, private, optimizer = start(copy.deepcopy(model), strategy)
    groups = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    joined(optimizer, units)
    engine.set_groups(groups)
    backward(private, x)
    first = torch.tensor([units.owner.tolist().index(unit) for unit in range(units.count)])
    own = groups[first] if strategy.threshold.num_groups is not None else None
    state = strategy.initial(0.5, len(params))
    scales = strategy.scales(norms(grads), state, own)
    expected = {n: torch.einsum("u,u...->...", scales, g) for n, g in grads.items()}
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
    assert_sums(summed(params), expected, 1e-9)


@layouts
@reductions
def test_per_layer(reduction: str, layout: str) -> None:
    model, x, units = mlp(), rows(7), LAYOUTS[layout](7, reduction)
    grads = per_sample_gradients(model, x, units=units)
    _, params, private, optimizer = start(copy.deepcopy(model), "per_layer", LAYERS)
    joined(optimizer, units)
    backward(private, x)
    expected = {
        name: clipped_sum({name: grads[name]}, C)[name]
        for name, C in zip(grads, LAYERS, strict=True)
    }
    assert_sums(summed(params), expected, 1e-10)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@reductions
def test_physical_batches(reduction: str, loss_reduction: str) -> None:
    """Units of several physical batches under one release; the batches differ in size."""
    model, x = mlp(), rows(9)
    owners = [[0, 1, 0, 1, 0], [0], [0, 0, 1]]
    _, params, private, optimizer = start(
        copy.deepcopy(model), clipping.adaptive(), loss_reduction=loss_reduction
    )
    grads: list[dict[str, Tensor]] = []
    for i, (part, owner) in enumerate(zip(x.split([5, 1, 3]), owners, strict=True)):
        grads.append(per_sample_gradients(model, part, units=unit_samples(owner, reduction)))
        optimizer.signal_skip_step(i < 2)
        joined(optimizer, owner, reduction)
        backward(private, part, loss_reduction=loss_reduction)
        if i < 2:
            optimizer.step()
            optimizer.zero_grad()
    whole = {name: torch.cat([g[name] for g in grads]) for name in params}
    assert_sums(summed(params), clipped_sum(whole, 0.5), 1e-10)
    optimizer.step()
    assert optimizer.noisy_counts.item() == (norms(whole) <= 0.5).sum().item()


# What is bounded


@pytest.mark.one_in(2)
@layouts
@reductions
def test_a_whole_unit_moves_the_sum_by_at_most_the_threshold(reduction: str, layout: str) -> None:
    model, x, C = mlp(), rows(9) * 10, 0.3
    units = LAYOUTS[layout](9, reduction)
    found = []
    for gone in (None, *range(units.count)):
        keep = units.owner != (-1 if gone is None else gone)
        _, params, private, optimizer = start(copy.deepcopy(model), C=C)
        names = units.owner[keep].unique()
        joined(
            optimizer,
            unit_samples(torch.searchsorted(names, units.owner[keep]).tolist(), reduction),
        )
        backward(private, x[keep])
        found.append(summed(params))
    moves = [total_norm({n: found[0][n] - s[n] for n in s}) for s in found[1:]]
    assert max(moves) <= C * (1 + 1e-12)
    assert max(moves) >= 0.99 * C


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "resnet"])
def test_no_unit_exceeds_the_threshold(family: str, dtype: torch.dtype) -> None:
    """The contribution of one unit as it was computed, alone, and not a rounding more."""
    model, batch, loss_fn = FAMILIES[family]()
    _, params, private, optimizer = start(model, C=0.01, loss_reduction="sum")
    joined(optimizer, [0, 0, 0])
    if dtype == torch.float32:
        loss_fn(private(*batch.args, **batch.kwargs), batch.target).sum().backward()
    else:
        losses_under(dtype, private, batch, loss_fn).sum().backward()
    assert optimizer.per_sample_norms.item() > 0.01
    assert 0.0099 < total_norm(summed(params)) <= 0.01


@layouts
def test_rows_that_cancel(layout: str) -> None:
    """Two huge rows of a unit whose difference is small: its norm is not under-estimated."""
    model = nn.Linear(6, 4, bias=False)
    a, small = 1e4 * torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    x = torch.stack([a[0], a[1], a[0] + small[0], small[1]])
    sign = torch.tensor([1.0, 1.0, -1.0, 1.0])[:, None, None]
    _, params, private, optimizer = start(model, C=1.0, loss_reduction="sum")
    owner = {"scattered": [0, 1, 0, 1], "adjacent": [0, 0, 1, 1], "padded": [0, 1, 0, 1]}[layout]
    x = x[[0, 2, 1, 3]] if layout == "adjacent" else x
    sign = sign[[0, 2, 1, 3]] if layout == "adjacent" else sign
    units = unit_samples(owner, "sum")
    kind = Elsewhere if layout == "padded" else UnitSamples
    joined(optimizer, kind(units.owner, 2, 2, "sum"))
    (private(x) * sign).sum().backward()
    wide = torch.einsum("bt...i,bt...o->boi", (x * sign).double(), torch.ones(4, 5, 4).double())
    true = torch.stack([wide[units.owner == unit].sum(0).norm() for unit in range(2)])
    assert (optimizer.per_sample_norms.double() >= true * (1 - 2**-18)).all()
    assert total_norm(summed(params)) <= 2.0


@layouts
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_takes_its_unit_out(bad: float, layout: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv1d(2, 3, 3), nn.LayerNorm(3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.conv(x).transpose(1, 2)))

    model, units = Table().double(), LAYOUTS[layout](7)
    x = torch.randn(7, 2, 6).double()
    grads = per_sample_gradients(model, x, units=units)
    row = int((units.owner == 0).nonzero()[-1])
    grads = {name: g[1:] for name, g in grads.items()}
    x[row, 1, 3] = bad
    _, params, private, optimizer = start(model, C=0.5)
    joined(optimizer, units)
    backward(private, x)
    assert torch.isfinite(optimizer.per_sample_norms).tolist() == [False] + [True] * (
        units.count - 1
    )
    assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-10)


@pytest.mark.parametrize("largest", [1, 2])
def test_more_rows_than_was_said_contribute_nothing(largest: int) -> None:
    """On a device that is not looked at, the norms of such a unit would leave rows out."""
    model, x = mlp(), rows(4)
    grads = per_sample_gradients(model, x[:1])
    _, params, private, optimizer = start(model)
    owner = torch.tensor([0, 1, 1, 1])
    joined(optimizer, Elsewhere(owner, 2, largest))
    backward(private, x)
    assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-10)


# Batches without units, or without rows


@pytest.mark.parametrize("strategy", ["flat", "per_layer", clipping.dpsgd_f(3)], ids=str)
def test_an_empty_batch(strategy: Any) -> None:
    per_layer = strategy == "per_layer"
    engine, params, private, optimizer = start(mlp(), strategy, LAYERS if per_layer else 0.5)
    joined(optimizer, UnitSamples(torch.zeros(0, dtype=torch.int64), 0, 0))
    engine.set_groups(torch.zeros(0, dtype=torch.int64))
    backward(private, rows(0), loss_reduction="sum")
    assert optimizer.per_sample_norms.shape == (0,)
    assert not any(s.any() for s in summed(params).values())
    optimizer.step()


@pytest.mark.parametrize("strategy", ["flat", "per_layer", clipping.adaptive()], ids=str)
def test_placeholder_rows_belong_to_no_unit(strategy: Any) -> None:
    per_layer = strategy == "per_layer"
    _, params, private, optimizer = start(mlp(), strategy, LAYERS if per_layer else 0.5)
    joined(optimizer, UnitSamples(torch.zeros(2, dtype=torch.int64), 0, 0))
    backward(private, rows(2))
    assert optimizer.per_sample_norms.shape == (0,)
    assert not any(s.any() for s in summed(params).values())
    optimizer.step()
    assert optimizer.noisy_counts is None or not optimizer.noisy_counts.any()


@reductions
def test_units_of_one_row(reduction: str) -> None:
    """In any order; the path of rows."""
    model, x, owner = mlp(), rows(4), [2, 0, 3, 1]
    check_exact(model, x, dtype=torch.float64, units=lambda b: unit_samples(owner, reduction))
    for joins in (owner, None):
        _, params, private, optimizer = start(copy.deepcopy(model))
        if joins is not None:
            joined(optimizer, joins, reduction)
        backward(private, x)
        if joins is not None:
            first, own = summed(params), optimizer.per_sample_norms
    assert torch.equal(own[owner], optimizer.per_sample_norms)
    assert all(torch.equal(first[name], s) for name, s in summed(params).items())


class Files(TorchDispatchMode):
    """From which files of the engine, and by objects of which classes, operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.owners: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe()
        while frame is not None:
            self.seen.add(frame.f_code.co_filename.replace("\\", "/").rpartition("fastclip/")[2])
            self.owners.add(type(frame.f_locals.get("self")).__name__)
            frame = frame.f_back  # type: ignore[assignment]
        return func(*args, **(kwargs or {}))


def test_rows_alone_know_nothing_of_units() -> None:
    """Without units no operator is called for them."""
    _, _, private, optimizer = start(mlp(), clipping.adaptive())
    for units in (False, True):
        if units:
            joined(optimizer, [0, 1, 0])
        with Files() as files:
            backward(private, rows(3))
        optimizer.step()
        optimizer.zero_grad()
        assert "backward/backward_pass.py" in files.seen
        assert ("UnitRecord" in files.owners) == units


def test_units_serve_one_pass() -> None:
    _, _, private, optimizer = start(mlp())
    joined(optimizer, [0, 1, 0])
    backward(private, rows(3))
    assert optimizer.per_sample_norms.shape == (2,)
    optimizer.step()
    optimizer.zero_grad()
    backward(private, rows(3))
    assert optimizer.per_sample_norms.shape == (3,)


# Ways through a model


class Pair(nn.Module):
    """One call for each half of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@layouts
@reductions
def test_two_forward_passes_under_one_loss(reduction: str, layout: str) -> None:
    model, x, y, units = Pair(), rows(7), rows(7), LAYOUTS[layout](7, reduction)

    def losses(call: nn.Module, one: Batch) -> Tensor:
        return sample_loss(call(one.args[0])) + sample_loss(call(one.args[1]).sin())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return losses(self.pair, Batch((x, y)))

    grads = per_sample_gradients(Both(), Batch((x, y)), lambda out, _: out, units=units)
    grads = {name.removeprefix("pair."): g for name, g in grads.items()}
    C = norms(grads).median().item()
    _, params, private, optimizer = start(copy.deepcopy(model), C=C)
    joined(optimizer, units)
    losses(private, Batch((x, y))).mean().backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
    assert_sums(summed(params), clipped_sum(grads, C), 1e-10)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["bert", "gpt2", "resnet"])
@layouts
def test_models(layout: str, family: str, dtype: torch.dtype) -> None:
    model, batch, loss_fn = FAMILIES[family]()
    check_exact(model, batch, loss_fn, dtype=dtype, units=LAYOUTS[layout])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_checkpoints(family: str, reentrant: bool) -> None:
    model, batch, loss_fn = FAMILIES[family]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check_exact(model, batch, loss_fn, dtype=torch.float32, units=scattered)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@reductions
def test_autocast(reduction: str, family: str, dtype: torch.dtype) -> None:
    """As far from autograd under the same autocast as rows are."""
    model, batch, loss_fn = FAMILIES[family]()
    grads = gradients_under(dtype, model, batch, loss_fn)
    units = scattered(3, reduction)
    grads = {
        name: torch.stack(
            [getattr(g[units.owner == unit], reduction)(0) for unit in range(units.count)]
        )
        for name, g in grads.items()
    }
    C = norms(grads).median().item()
    _, params, private, optimizer = start(model, C=C, loss_reduction="sum")
    joined(optimizer, units)
    losses_under(dtype, private, batch, loss_fn).sum().backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= NORM[dtype]
    assert_sums(summed(params), clipped_sum(grads, C), SUM[dtype])
    assert all(p.grad is None and p.summed_grad.dtype == torch.float32 for p in params.values())


@pytest.mark.parametrize("scale", [1.0, 4096.0, 2.0**-5])
def test_scaled_losses(scale: float) -> None:
    """Powers of two round nothing."""
    model, x, found = mlp().float(), rows(4).float(), []
    for scaled in (False, True):
        _, params, private, optimizer = start(copy.deepcopy(model), clipping.adaptive())
        joined(optimizer, [0, 1, 0, 0])
        loss = sample_loss(private(x)).mean()
        if scaled:
            scaler = GradScaler(init_scale=scale)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
        found.append([optimizer.per_sample_norms, *(p.summed_grad for p in params.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(3), 1, 3), ArgumentTypeError, "int64"),
        (([0, 0], 1, 2), ArgumentTypeError, "int64"),
        ((torch.tensor([0, 0, 1]), 2, 2, "median"), ArgumentError, "reduction"),
        ((torch.tensor([0, 0, 1]), 2, 3), ArgumentError, "largest"),
        ((torch.tensor([0, 0, 1]), 3, 2), ArgumentError, "count"),
        ((torch.tensor([0, 0, 2]), 3, 2), ArgumentError, "each with a sample"),
        ((torch.tensor([0, -1, 1]), 2, 1), ArgumentError, "negative"),
        ((torch.tensor([0, 0]), 0, 2), ArgumentError, "both"),
        ((torch.tensor([0, 0]), 1, 0), ArgumentError, "both"),
        ((torch.tensor([0, 0]), -1, 0), ArgumentError, "both"),
    ],
)
def test_units_that_do_not_fit(arguments: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        UnitSamples(*arguments)


def test_units_of_other_rows() -> None:
    _, params, private, optimizer = start(mlp())
    joined(optimizer, [0, 1, 0])
    with pytest.raises(BatchSizeError, match="3 samples"):
        backward(private, rows(4))
    assert all(p.summed_grad is None for p in params.values())


def test_groups_are_of_rows() -> None:
    engine, _, private, optimizer = start(mlp(), clipping.dpsgd_f(3))
    joined(optimizer, [0, 1, 0])
    engine.set_groups(torch.tensor([0, 1]))
    with pytest.raises(StepError, match="3 samples"):
        backward(private, rows(3))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_materialized_gradients_have_no_units(mode: str) -> None:
    _, private, optimizer, _ = make_private(mlp(), grad_sample_mode=mode)
    optimizer.batch.next_units = unit_samples([0, 1, 0])
    backward(private, rows(3))
    with pytest.raises(StepError, match="Omit grad_sample_mode"):
        optimizer.step()
