"""The claim that scores are held against is that of their own run, whoever has copied what."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.audit import mix_in
from fastclip.errors import ArgumentError
from tests.audit.test_own_run_refusals import COUNT, D, loader_of, run, squares

COPIES = [copy.deepcopy, lambda audit: pickle.loads(pickle.dumps(audit))]


def kept(mixed: list[Any]) -> Any:
    """A loader that hands the data set out, for a second run on the same coins."""

    def loader(data_set: Any) -> Any:
        mixed.append(data_set)
        return loader_of(data_set)

    return loader


def another_run(mixed: Any, steps: int = 1, watch: Any = None) -> FastPrivacyEngine:
    """With more noise, and the same canaries; steps that end in a KeyError are passed over."""
    model, engine = nn.Linear(D, 1), FastPrivacyEngine(accountant="rdp")
    private, optimizer, drawn = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader_of(mixed), noise_multiplier=8.0, max_grad_norm=1.0, sample_rate=0.25,
        expected_batch_size=64,
    )  # fmt: skip
    if watch is not None:
        watch(private, optimizer)
    for _, batch in zip(range(steps), drawn, strict=False):
        optimizer.zero_grad()
        squares(private, batch).mean().backward()
        with suppress(KeyError):
            optimizer.step()
    return engine


@pytest.mark.parametrize("copied", COPIES)
def test_a_copied_audit_knows_its_run(copied: Any) -> None:
    mixed: list[Any] = []
    audit, engine, *_ = run(loader=kept(mixed))
    other = another_run(mixed[0])
    for each in (audit, copied(audit), copied(copied(audit))):
        with pytest.raises(ArgumentError, match="engine of the run that was watched"):
            each.report(other, each.gradient_scores, delta=1e-5)
    twin = copied(audit)
    assert twin.report(engine, twin.gradient_scores, delta=1e-5).inside


@pytest.mark.parametrize("copied", COPIES)
def test_a_ledger_that_went_on_accounts_for_what_was_watched(copied: Any) -> None:
    """In a checkpoint, or in another engine that has loaded it."""
    mixed: list[Any] = []
    audit, engine, *_ = run(loader=kept(mixed), steps=2)
    twin = copied(audit)
    other = another_run(mixed[0])
    other.accountant.load_state_dict(engine.accountant.state_dict())
    assert twin.report(other, twin.gradient_scores, delta=1e-5).claimed > engine.get_epsilon(1e-5)


@pytest.mark.parametrize("copied", [lambda audit: audit, *COPIES])
@pytest.mark.parametrize("chained", [False, True])
def test_steps_that_a_watch_is_not_shown(copied: Any, chained: bool) -> None:
    """Assigning a hook replaces those that were attached, that of the watch, too."""

    def replace(step: int, optimizer: Any) -> None:
        if step == 1:
            before = optimizer.step_hook
            optimizer.step_hook = before if chained else lambda _: None

    audit, engine, model, _ = run(steps=3, sample_rate=0.25, before_step=replace)
    one = copied(audit)
    if chained:
        assert one.report(engine, one.gradient_scores, delta=1e-5).inside
        return
    with pytest.raises(
        ArgumentError, match=r"are of 1 steps since watch.* 2 more .*attach_step_hook"
    ):
        one.gradient_scores  # noqa: B018
    assert one.report(engine, one.loss_scores(model, squares), delta=1e-5).inside


def test_a_look_that_fails_is_no_step() -> None:
    """Nothing was released."""
    calls: list[int] = []

    def of(model: Any, batch: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyError("label")
        return squares(model, batch)

    mixed, audit = mix_in(TensorDataset(torch.randn(64, D)), TensorDataset(torch.randn(COUNT, D)))
    engine = another_run(mixed, 3, lambda model, optimizer: audit.watch(model, optimizer, of))
    assert len(calls) == 3
    assert sum(steps for *_, steps in engine.accountant.history) == 3
    assert audit.report(engine, audit.gradient_scores, delta=1e-5).inside


@pytest.mark.parametrize("copied", [lambda audit: audit, *COPIES])
def test_losses_are_of_a_model_that_the_engine_trained(copied: Any) -> None:
    mixed: list[Any] = []
    audit, engine, model, _ = run(loader=kept(mixed), watched=False)
    other = another_run(mixed[0])
    scores = audit.loss_scores(model, squares)
    audit = copied(audit)
    with pytest.raises(ArgumentError, match="engine that trained the model of these loss_scores"):
        audit.report(other, scores, delta=1e-5)
    with pytest.raises(ArgumentError, match="engine that trained the model of these loss_scores"):
        audit.report(engine, audit.loss_scores(nn.Linear(D, 1), squares), delta=1e-5)
    assert audit.report(engine, scores, delta=1e-5).inside


def test_a_model_is_itself_or_equal() -> None:
    """Its weights of an earlier time are its own only in the model that went on."""
    audit, engine, model, _ = run(watched=False)
    mine, twin = audit.loss_scores(model, squares), copy.deepcopy(model)
    theirs = audit.loss_scores(twin, lambda model, batch: 2 * squares(model, batch))
    assert audit.report(engine, mine, delta=1e-5, reports=2).inside
    assert audit.report(engine, theirs, delta=1e-5, reports=2).inside
    with torch.no_grad():
        model.weight.add_(1.0)
    assert audit.report(engine, mine, delta=1e-5, reports=2).inside
    with pytest.raises(ArgumentError, match="a copy of its current state"):
        audit.report(engine, theirs, delta=1e-5, reports=2)
