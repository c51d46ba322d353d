"""Norms by group as a model trains, beside one sample at a time by autograd in float64."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pandas as pd
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fastclip import clipping
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness import FairnessRecorder
from tests import test_units as units
from tests.fairness.by_hand import CASES, B, C, K
from tests.networks import mlp, rows
from tests.oracle import make_private, norms, per_sample_gradients, sample_loss
from tests.strategies import PRESETS

GROUPS = ("a", "b", "c")
Table = dict[tuple[int, str, str], float]


def recorder(protected: str | None = "group", **more: tuple[str, ...]) -> FairnessRecorder:
    return FairnessRecorder({"group": GROUPS, **more}, ("no", "yes"), protected)


def start(strategy: Any, **options: Any) -> tuple:
    torch.manual_seed(0)
    model = mlp()
    options = {"max_grad_norm": C, "batch_size": B, **options}
    engine, private, optimizer, loader = make_private(model, clipping=strategy, **options)
    return engine, model, private, optimizer, loader


def one_at_a_time(model: nn.Module, x: Tensor) -> Tensor:
    """Norms of the rows' gradients, [b], from a model that is not private."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    return norms(per_sample_gradients(twin, x))


def observed(frame: pd.DataFrame, attribute: str = "group") -> Table:
    """(step, group, measure): value."""
    of = frame[(frame["part"] == "training") & (frame["attribute"] == attribute)]
    of = of[~of["measure"].isin(["threshold", "weight"])]
    assert not of["private"].any()
    assert of["epsilon"].isna().all()
    keys = of[["step", "group", "measure"]].itertuples(index=False, name=None)
    return dict(zip(keys, of["value"], strict=True))


def check(found: Table, step: int, group: str, **expected: Any) -> None:
    for measure, values in expected.items():
        value = values.mean().item() if len(values) else math.nan
        got = found[step, group, measure]
        assert got == pytest.approx(value, rel=1e-9, nan_ok=True), (step, group, measure)


# Beside autograd


@pytest.mark.parametrize("name", CASES)
def test_norms_by_group_are_those_of_autograd(name: str) -> None:
    """Six steps, each its own period; nobody of group c is in the first."""
    case = CASES[name]
    engine, model, private, optimizer, _ = start(case.strategy, lr=0.05)
    by_hand, seen, ours = case.start(), recorder(), []
    for number in range(6):
        torch.manual_seed(number)
        x = rows(7) * torch.tensor([[0.05], [0.3], [1.0], [3.0], [0.4], [2.0], [0.1]])
        group = torch.arange(7) % (2 if number == 0 else 3)
        n = one_at_a_time(model, x)
        scales, thresholds = by_hand(n, group)
        ours.append((group, n, n * scales, (n > thresholds).double()))
        optimizer.zero_grad()
        engine.set_groups(group)
        sample_loss(private(x)).mean().backward()
        seen.observe(optimizer, {"group": group})
        optimizer.step()
        seen.close_period(number)
    found = observed(seen.frame())
    assert len(found) == 6 * len(GROUPS) * 4
    for step, (group, before, after, clipped) in enumerate(ours):
        for k, label in enumerate(GROUPS):
            mine = group == k
            assert found[step, label, "rows"] == mine.sum()
            check(found, step, label, norm_before=before[mine], norm_after=after[mine],
                  clipped=clipped[mine])  # fmt: skip
    every = torch.cat([clipped for *_, clipped in ours])
    assert 0 < every.mean() < 1


def test_layers_have_no_norm_of_the_whole() -> None:
    _, model, private, optimizer, _ = start("per_layer", max_grad_norm=[0.1] * 4)
    x, seen = rows(6), recorder()
    before = one_at_a_time(model, x)
    sample_loss(private(x)).mean().backward()
    seen.observe(optimizer, {"group": torch.zeros(6, dtype=torch.int64)})
    seen.close_period(1)
    found = observed(seen.frame())
    check(found, 1, "a", norm_before=before)
    assert math.isnan(found[1, "a", "norm_after"])
    assert math.isnan(found[1, "a", "clipped"])
    optimizer.step()
    seen.thresholds(1, optimizer)
    told = seen.frame().query("measure == 'threshold'")
    assert told["attribute"].tolist() == ["layer"] * 4
    assert told["group"].tolist() == ["0", "1", "2", "3"]
    assert told["value"].tolist() == [0.1] * 4


def test_a_sample_that_is_not_finite_is_clipped_to_nothing() -> None:
    _, model, private, optimizer, _ = start(clipping.dp_sgd())
    x, group, seen = rows(6), torch.arange(6) % 3, recorder()
    n = one_at_a_time(model, x)
    x[1] = math.nan
    sample_loss(private(x)).mean().backward()
    seen.observe(optimizer, {"group": group})
    seen.close_period(1)
    found = observed(seen.frame())
    for label, mine in (("a", [0, 3]), ("c", [2, 5])):
        check(found, 1, label, norm_before=n[mine], norm_after=n[mine].clamp(max=C))
    assert found[1, "b", "rows"] == 2
    assert found[1, "b", "norm_before"] == pytest.approx(n[4].item() / 2)
    assert found[1, "b", "clipped"] == (1 + float(n[4] > C)) / 2


# What was drawn


def poisson(strategy: Any, limit: int | None, **options: Any) -> tuple[FairnessRecorder, list]:
    """Three passes over 24 rows; the recorder, and (rows, groups) as the loop saw them."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, 6, dtype=torch.float64, generator=generator)
    data = TensorDataset(x, torch.arange(24) % 3)
    engine, _, private, optimizer, loader = start(
        strategy, dataset=data, poisson_sampling=True, generator=generator, **options
    )
    seen, batches = recorder(other=("x", "y")), []
    manager = None
    if limit is not None:
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer
        )
        loader = manager.__enter__()
    for _ in range(3):
        for x, group in loader:
            optimizer.zero_grad()
            engine.set_groups(group)
            losses = sample_loss(private(x))
            (losses.mean() if len(x) else losses.sum()).backward()
            seen.observe(optimizer, {"group": group, "other": group % 2})
            optimizer.step()
            batches.append((x, group))
    seen.close_period(1)
    return seen, batches


@pytest.mark.parametrize("strategy", ["dp_sgd", "soft_ada_clip", "dpsgd_f_previous"])
def test_physical_batches_add_up(strategy: str) -> None:
    whole, split = (
        observed(poisson(PRESETS[strategy], n, batch_size=12)[0].frame()) for n in (None, 3)
    )
    assert whole.keys() == split.keys()
    for key, value in whole.items():
        assert split[key] == pytest.approx(value, rel=1e-9), key


@pytest.mark.parametrize("strategy", ["dp_sgd", "dpsgd_f"])
def test_empty_batches_count_nobody(strategy: str) -> None:
    seen, batches = poisson(PRESETS[strategy], None, batch_size=1)
    sizes = [len(x) for x, _ in batches]
    assert 0 in sizes
    groups = torch.cat([group for _, group in batches])
    for attribute, of, labels in (("group", groups, GROUPS), ("other", groups % 2, ("x", "y"))):
        found = observed(seen.frame(), attribute)
        for k, label in enumerate(labels):
            assert found[1, label, "rows"] == int((of == k).sum())


def test_nothing_but_empty_batches_writes_nothing() -> None:
    _, _, _, optimizer, _ = start(clipping.dp_sgd())
    seen = recorder()
    seen.observe(optimizer, {"group": torch.empty(0, dtype=torch.int64)})
    seen.close_period(1)
    assert seen.frame().empty


@pytest.mark.parametrize("strategy", ["dp_sgd", "dpsgd_f"])
def test_placeholder_rows_count_nobody(strategy: str) -> None:
    seen, batches = poisson(PRESETS[strategy], None, batch_size=1, rand_on_empty=True)
    real = [len(x) for x, _ in batches if not bool(((x == 0) | (x == 1)).all())]
    assert len(real) < len(batches)  # some draw was empty
    assert min(len(x) for x, _ in batches) == 1
    found = observed(seen.frame())
    assert sum(found[1, label, "rows"] for label in GROUPS) == sum(real)


# Units


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_units(reduction: str) -> None:
    """Norms are of patients: their groups fit, those of rows do not."""
    notes, _, model, private, optimizer, loader = units.start(reduction=reduction)
    seen, checked = recorder(protected=None), 0
    plain = nn.Sequential(nn.Linear(units.D, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for numbers, x in loader:
        optimizer.zero_grad()
        n = []
        plain.load_state_dict(model.state_dict())
        ids = [notes.ids[row] for row in numbers.tolist()]
        firsts = [row for row, who in enumerate(ids) if who not in ids[:row]]
        for first in firsts:
            mine = [row for row, who in enumerate(ids) if who == ids[first]]
            each = units.losses(plain(x[mine]))
            grads = torch.autograd.grad(
                each.mean() if reduction == "mean" else each.sum(), list(plain.parameters())
            )
            n.append(torch.stack([g.norm() for g in grads]).norm())
        units.losses(private(x)).mean().backward()
        group = torch.tensor([int(who.split()[1]) % 3 for who in ids])
        if len(firsts) < len(x):
            with pytest.raises(
                ArgumentError, match=r"units.*got \d+ for group.*one group per unit.*#privacy-units"
            ):
                seen.observe(optimizer, {"group": group})
        seen.observe(optimizer, {"group": group[firsts]})
        optimizer.step()
        seen.close_period(checked)
        for k, label in enumerate(GROUPS):
            mine = (group[firsts] == k).nonzero().flatten().tolist()
            found = observed(seen.frame())
            assert found[checked, label, "rows"] == len(mine)
            of = torch.stack([n[i] for i in mine]) if mine else torch.empty(0)
            check(found, checked, label, norm_before=of)
        checked += 1
    assert checked


# Refusals


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({}, ArgumentError, "observe expects groups of the attributes .*got none of group"),
        ({"group": torch.zeros(4).long()}, ArgumentError, r"of group per sample, \[6\], got \[4\]"),
        ({"group": torch.zeros(6, 1).long()}, ArgumentError, r"\[6\], got \[6, 1\]"),
        ({"group": torch.zeros(6)}, ArgumentTypeError, r"an int64 tensor \[6\], got torch.float32"),
        ({"group": [0] * 6}, ArgumentTypeError, r"an int64 tensor \[6\], got list"),
        ({"group": torch.arange(6)}, ArgumentError, "numbers from 0 to 2 for group, got 0 to 5"),
    ],
)
def test_groups_that_are_refused(groups: Any, error: type[Exception], message: str) -> None:
    """Of a strategy of groups, too; and nothing is half counted."""
    engine, _, private, optimizer, _ = start(clipping.dpsgd_f(K))
    seen = recorder()
    engine.set_groups(torch.arange(6) % 3)
    sample_loss(private(rows(6))).mean().backward()
    with pytest.raises(error, match=message):
        seen.observe(optimizer, groups)
    seen.close_period(1)
    assert seen.frame().empty


def test_what_fails_for_one_attribute_counts_for_none() -> None:
    _, _, private, optimizer, _ = start(clipping.dp_sgd())
    seen = recorder(other=("x", "y"))
    sample_loss(private(rows(6))).mean().backward()
    with pytest.raises(ArgumentError, match="for other"):
        seen.observe(optimizer, {"group": torch.arange(6) % 3, "other": torch.full((6,), 2)})
    seen.close_period(1)
    assert seen.frame().empty


def test_before_any_backward_pass() -> None:
    _, _, _, optimizer, _ = start(clipping.dp_sgd())
    with pytest.raises(ArgumentError, match=r"observe expects a backward pass.*#step-order"):
        recorder().observe(optimizer, {"group": torch.arange(3)})


def test_other_optimizers_are_refused() -> None:
    _, model, _, optimizer, _ = start("flat", grad_sample_mode="hooks")
    for other in (optimizer, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(ArgumentTypeError, match="the optimizer that make_private returned"):
            recorder().observe(other, {"group": torch.arange(3)})


@pytest.mark.parametrize(
    ("protected", "message"),
    [
        (None, "protected expects an attribute, got None"),
        ("two", "'two' expects the 3 groups.*got 2"),
    ],
)
@pytest.mark.parametrize("name", ["dpsgd_f", "naive_reweighting"])
def test_strategies_of_groups_need_to_know_which(name: str, protected: Any, message: str) -> None:
    engine, _, private, optimizer, _ = start(CASES[name].strategy)
    seen = recorder(protected, two=("x", "y"))
    engine.set_groups(torch.arange(6) % 3)
    sample_loss(private(rows(6))).mean().backward()
    groups = {"group": torch.arange(6) % 3, "two": torch.arange(6) % 2}
    with pytest.raises(ArgumentError, match=message):
        seen.observe(optimizer, groups)
    optimizer.step()
    with pytest.raises(ArgumentError, match=message):
        seen.thresholds(1, optimizer)
    assert seen.frame().empty


# Observing changes nothing


def train(name: str, seen: FairnessRecorder | None) -> dict[str, Any]:
    """Everything that a run ends with."""
    strategy = PRESETS[name]
    noise = torch.Generator().manual_seed(3)
    engine, model, private, optimizer, _ = start(
        strategy, noise_multiplier=0.7, noise_generator=noise, max_grad_norm=0.5
    )
    torch.manual_seed(9)
    for step in range(4):
        x, group = rows(6), torch.arange(6) % 3
        optimizer.zero_grad()
        engine.set_groups(group)
        sample_loss(private(x)).mean().backward()
        if seen is not None:
            seen.observe(optimizer, {"group": group})
        optimizer.step()
        if seen is not None:
            seen.close_period(step)
            seen.thresholds(step, optimizer)
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "next": list(optimizer.grad_state.clipping.next.tensors().values()),
        "threshold": [optimizer.threshold],
        "counts": [] if optimizer.noisy_counts is None else [optimizer.noisy_counts],
        "random": [torch.get_rng_state(), noise.get_state()],
        "history": copy.deepcopy(engine.accountant.history),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PRESETS)
def test_observing_changes_nothing(name: str) -> None:
    seen = recorder()
    with_it, without = train(name, seen), train(name, None)
    assert with_it.pop("history") == without.pop("history")
    for key, values in without.items():
        for ours, theirs in zip(with_it[key], values, strict=True):
            assert torch.equal(ours, theirs), key
    assert len(observed(seen.frame())) == 4 * 3 * 4
    told = seen.frame()
    told = told[told["private"]]
    weighted = {"weight"} if name.startswith("naive") else set()
    assert set(told["measure"]) == {"threshold", "sensitivity", "noise_multiplier"} | weighted
    last = told[(told["step"] == 3) & (told["measure"] == "threshold")]
    assert last["value"].tolist() == with_it["threshold"][0].reshape(-1).tolist()


@pytest.mark.parametrize("where", ["meta", "cpu"])
@pytest.mark.parametrize(
    "name", ["dp_sgd", "soft_ada_clip", "dpsgd_f", "naive_previous", "per_layer"]
)
def test_observing_waits_for_nothing(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device any look at a value raises."""
    twin = mlp()
    _, here, _, _ = make_private(copy.deepcopy(twin))
    sample_loss(here(rows(6))).mean().backward()  # finds the samples' axis, which needs values
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no meta device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    c, strategy = (1.0, PRESETS[name]) if name in PRESETS else ([1.0] * 4, name)
    model: nn.Module = copy.deepcopy(twin).to("meta")
    engine, private, optimizer, _ = make_private(
        model, clipping=strategy, noise_multiplier=1.0, max_grad_norm=c
    )
    private.grad_state.calls.layouts = here.grad_state.calls.layouts
    seen = recorder(other=("x", "y"))
    for _ in range(3):
        optimizer.zero_grad()
        engine.set_groups(torch.empty(6, dtype=torch.int64, device="meta"))
        private(rows(6).to("meta")).square().mean().backward()
        group = torch.zeros(6, dtype=torch.int64, device=where)
        seen.observe(optimizer, {"group": group, "other": group})
        optimizer.step()
    assert {of.device.type for of in seen.state_dict()["observed"].values()} == {"meta"}
