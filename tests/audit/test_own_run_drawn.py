"""A run that does not draw the canaries cannot be refuted by them, so nothing is said of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from fastclip import FastPrivacyEngine
from fastclip.audit import mix_in
from fastclip.errors import ArgumentError
from tests.audit.test_own_run_refusals import COUNT, loader_of, run, squares

ROWS = 64
ANOTHER = r"the data set that mix_in returned, .* before mix_in\. See errors\.html#audits$"
LEFT_OUT = r"can draw each canary .* its own id\. See errors\.html#audits$"


def rows_alone(mixed: Any) -> Dataset[Any]:
    return mixed.datasets[0]


def split(mixed: Any) -> Dataset[Any]:
    return random_split(mixed, [0.9, 0.1])[0]


def whole_subset(mixed: Any) -> Dataset[Any]:
    return Subset(mixed, range(len(mixed)))


def other_coins(mixed: Any) -> Dataset[Any]:
    return mix_in(*mixed.datasets[:1], TensorDataset(torch.randn(COUNT, 8)))[0]


def more_rows(mixed: Any) -> Dataset[Any]:
    return ConcatDataset([mixed, TensorDataset(torch.randn(8, 8))])


@pytest.mark.parametrize("made", [rows_alone, split, whole_subset, other_coins, more_rows])
def test_another_data_set(made: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^watch expects .*{ANOTHER}"):
        run(loader=lambda mixed: loader_of(made(mixed)))
    audit, engine, model, _ = run(loader=lambda mixed: loader_of(made(mixed)), watched=False)
    with pytest.raises(ArgumentError, match=f"^engine expects .*{ANOTHER}"):
        audit.report(engine, audit.loss_scores(model, squares), delta=1e-5)


def weighted(mixed: Any, least: float) -> DataLoader:
    weights = torch.ones(len(mixed))
    weights[0], weights[-1] = 0.0, least  # a row of data_set may be held out
    return DataLoader(mixed, batch_size=64, sampler=WeightedRandomSampler(weights, len(mixed)))


def subset(mixed: Any, last: int) -> DataLoader:
    return DataLoader(
        mixed, batch_size=64, sampler=SubsetRandomSampler(range(8, len(mixed) - last))
    )


@pytest.mark.parametrize(("loader", "wrong", "right"), [(weighted, 0.0, 0.5), (subset, 1, 0)])
def test_canaries_that_are_never_drawn(loader: Any, wrong: Any, right: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^watch expects .*{LEFT_OUT}"):
        run(loader=lambda mixed: loader(mixed, wrong))
    audit, engine, model, _ = run(loader=lambda mixed: loader(mixed, wrong), watched=False)
    with pytest.raises(ArgumentError, match=f"^engine expects .*{LEFT_OUT}"):
        audit.report(engine, audit.loss_scores(model, squares), delta=1e-5)
    audit, engine, *_ = run(loader=lambda mixed: loader(mixed, right))
    assert audit.report(engine, audit.gradient_scores, delta=1e-5).canaries == COUNT


@pytest.mark.parametrize("alone", [True, False])
def test_canaries_are_units_of_their_own(alone: bool) -> None:
    """The claim is for a unit, and two canaries of one tell twice as much."""
    mixed, audit = mix_in(TensorDataset(torch.randn(ROWS, 8)), TensorDataset(torch.randn(COUNT, 8)))
    ids = torch.arange(len(mixed)) // 2  # type: ignore[arg-type]
    if alone:
        ids[ROWS:] = ROWS + torch.arange(len(mixed) - ROWS)  # type: ignore[arg-type]
    model = torch.nn.Linear(8, 1)
    private, optimizer, _ = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
        data_loader=loader_of(mixed), noise_multiplier=1.0, sample_rate=0.5,
        expected_batch_size=64, unit_ids=ids,
    )  # fmt: skip
    if alone:
        audit.watch(private, optimizer, squares)
    else:
        with pytest.raises(ArgumentError, match=LEFT_OUT):
            audit.watch(private, optimizer, squares)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mixed: pickle.loads(pickle.dumps(mixed))])
def test_a_copy_of_the_data_set_is_known(copied: Any) -> None:
    audit, engine, *_ = run(loader=lambda mixed: loader_of(copied(mixed)))
    assert audit.report(engine, audit.gradient_scores, delta=1e-5).canaries == COUNT
