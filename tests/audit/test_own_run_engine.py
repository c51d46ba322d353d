"""The claim that scores are held against is that of their own run, whoever has copied what."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError
from tests.audit.test_own_run_refusals import D, loader_of, run, squares

COPIES = [copy.deepcopy, lambda audit: pickle.loads(pickle.dumps(audit))]


def kept(mixed: list[Any]) -> Any:
    """A loader that hands the data set out, for a second run on the same coins."""

    def loader(data_set: Any) -> Any:
        mixed.append(data_set)
        return loader_of(data_set)

    return loader


def another_run(mixed: Any, steps: int = 1) -> FastPrivacyEngine:
    """With more noise, and the same canaries."""
    model, engine = nn.Linear(D, 1), FastPrivacyEngine(accountant="rdp")
    private, optimizer, drawn = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader_of(mixed), noise_multiplier=8.0, max_grad_norm=1.0, sample_rate=0.5,
        expected_batch_size=64,
    )  # fmt: skip
    for _, batch in zip(range(steps), drawn, strict=False):
        optimizer.zero_grad()
        squares(private, batch).mean().backward()
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
    with pytest.raises(ArgumentError, match="a copy of it as it is now"):
        audit.report(engine, theirs, delta=1e-5, reports=2)
