"""Canaries among a user's rows: their coins, their scores, and what is said of them."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.audit import OwnRun, Report, mix_in, mutants
from fastclip.errors import ArgumentError, ArgumentTypeError

D, ROWS = 1024, 32


def rows() -> TensorDataset:
    return TensorDataset(torch.zeros(ROWS, D), torch.zeros(ROWS))


def canaries(count: int = D) -> TensorDataset:
    """Rows that have an entry of the weights of their own."""
    return TensorDataset(torch.eye(count), torch.full((count,), 100.0))


def losses(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]) ** 2 / 2


def trained(steps: int = 4, sigma: float = 2.0) -> tuple[OwnRun, FastPrivacyEngine, Any, Any]:
    """A run with canaries: (audit, engine, the model before, after)."""
    torch.manual_seed(0)
    mixed, audit = mix_in(rows(), canaries())
    model = nn.Linear(D, 1, bias=False)
    before = copy.deepcopy(model)
    engine = FastPrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=50.0),
        data_loader=DataLoader(mixed, batch_size=64), noise_multiplier=sigma, max_grad_norm=1.0,
        sample_rate=1.0, expected_batch_size=64,
    )  # fmt: skip
    audit.watch(private, optimizer, losses)
    for _ in range(steps):
        for batch in loader:
            optimizer.zero_grad()
            losses(private, batch).mean().backward()
            optimizer.step()
    return audit, engine, before, model


def test_coins_are_fair_and_rows_are_those_of_the_canaries() -> None:
    mixed, audit = mix_in(rows(), canaries())
    inside = int(audit._inside.sum())
    assert len(mixed) == ROWS + inside  # type: ignore[arg-type]
    assert abs(inside - D / 2) < 6 * math.sqrt(D / 4)
    found = torch.stack([mixed[i][0] for i in range(ROWS, ROWS + inside)]).sum(0)
    assert torch.equal(found.bool(), audit._inside)
    assert not torch.equal(audit._inside, mix_in(rows(), canaries())[1]._inside)


def test_gradient_scores_are_those_of_autograd() -> None:
    """Each canary's own gradient times what was released, summed over steps."""
    torch.manual_seed(1)
    x = torch.randn(80, 6, dtype=torch.float64)
    audit = OwnRun(TensorDataset(x), torch.rand(80) < 0.5)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 1)).double()
    alone = copy.deepcopy(model).eval()
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=40), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    expected = torch.zeros(80, dtype=torch.float64)

    def slowly(_: Any) -> None:
        alone.load_state_dict(model.state_dict())
        released = [p.grad for p in model.parameters()]
        with torch.enable_grad():
            for i in range(80):
                own = torch.autograd.grad(of(alone, [x[i : i + 1]]).sum(), list(alone.parameters()))
                expected[i] += sum((a * b).sum() for a, b in zip(own, released, strict=True))

    def of(net: Any, batch: Any) -> Tensor:
        return net(batch[0]).squeeze(1).sin()

    audit.watch(private, optimizer, of, batch_size=32)
    optimizer.attach_step_hook(slowly)
    for batch in loader:
        optimizer.zero_grad()
        of(private, batch).mean().backward()
        optimizer.step()
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(audit.gradient_scores, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["gradients", "losses"])
@pytest.mark.parametrize("quiet", [False, True])
def test_a_true_claim_stands_and_a_false_one_is_refuted(kind: str, quiet: bool) -> None:
    """A tenth of the noise that is claimed, and canaries that no other row touches."""
    broken = (
        mutants.noise(lambda drawn, _: [0.1 * noise for noise in drawn])()
        if quiet
        else nullcontext()
    )
    with broken:
        audit, engine, before, after = trained(sigma=4.0 if quiet else 2.0)
    assert isinstance(after, nn.Linear)
    if kind == "gradients":
        scores = audit.gradient_scores
    else:
        scores = audit.loss_scores(after, losses, before=before)
    report = audit.report(engine, scores, delta=1e-5)
    assert report.claimed == engine.get_epsilon(1e-5)
    assert report.inside == int(audit._inside.sum())
    assert "added or removed" in report.neighbors
    if quiet:
        assert report.claimed < report.bound <= report.most
        assert report.refuted
        assert report.auroc > 0.99
    else:
        assert 0.1 < report.bound < report.claimed
        assert not report.refuted
    assert after.training


def made(bound: float, claimed: float = 2.0) -> Report:
    return Report(
        claimed=claimed, delta=1e-5, significance=0.05, bound=bound, most=4.5, auroc=0.7, tpr=0.1,
        canaries=100, inside=51, neighbors="one row is added or removed <here>",
    )  # fmt: skip


SAID = [
    (1.5, 2.0, "held", "The claim stands"),
    (2.5, 2.0, "refuted", "The claim is refuted"),
    (4.5, 2.0, "refuted", "Every guess about a coin was right"),
    (1.5, 4.5, "open", "These canaries could not refute this claim"),
    (4.5, 8.0, "open", "Every guess about a coin was right"),
    (1.5, math.inf, "refuted", "Nothing is claimed"),
]


@pytest.mark.parametrize(("bound", "claimed", "kind", "said"), SAID)
def test_the_pages(bound: float, claimed: float, kind: str, said: str, tmp_path: Path) -> None:
    report = made(bound, claimed)
    for name in ("audit.md", "audit.html"):
        report.save(tmp_path / name)
        text = (tmp_path / name).read_text()
        for part in (said, f"{bound:.4g}", "4.5", "100, 51", "What it does not show"):
            assert part in text
        assert ("stands" in text) == (kind == "held")
        assert ("a coin was right" in text) == (bound == 4.5)
    assert f'class="verdict {kind}"' in text
    assert "&lt;here&gt;" in text
    with pytest.raises(ArgumentError, match=r"ends in .md or .html"):
        report.save(tmp_path / "audit.pdf")


def test_a_claim_that_the_canaries_cannot_refute() -> None:
    """Without any noise at all: every coin is told, and the claim is above what that proves."""
    with mutants.noise(lambda drawn, _: [0.0 * noise for noise in drawn])():
        audit, engine, *_ = trained(sigma=0.8)
    report = audit.report(engine, audit.gradient_scores, delta=1e-5)
    assert (
        report.bound <= report.most < report.claimed
    )  # equal, unless coins are uneven: one in 370
    assert report.verdict.startswith("These canaries could not refute this claim")
    assert (
        report.verdict.endswith("was right.") == report.all_right == (report.bound == report.most)
    )


def test_the_old_name_of_all_right() -> None:
    for bound, right in ((1.5, True), (0.5, False)):
        report = Report(**{**dict.fromkeys((f.name for f in fields(Report)), 1), "bound": bound})
        with pytest.warns(DeprecationWarning, match=r"^Report.told .* Report.all_right"):
            assert report.told == report.all_right == right


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="data_set expects a data set of known length"):
        mix_in(Stream(), canaries())
    with pytest.raises(ArgumentError, match="64 samples or more, got 63"):
        mix_in(rows(), canaries(63))
    _, audit = mix_in(rows(), canaries())
    with pytest.raises(ArgumentError, match=r"Call watch\(...\) first"):
        audit.gradient_scores  # noqa: B018
    with pytest.raises(ArgumentError, match=r"one loss per sample, \[256\], got shape \(\)"):
        audit.loss_scores(nn.Linear(D, 1), lambda model, batch: losses(model, batch).mean())
    with pytest.raises(ArgumentTypeError, match="that make_private returned"):
        audit.watch(nn.Linear(D, 1), None, losses)
    with pytest.raises(ArgumentError, match=r"one score per canary, \[1024\], got shape \(3,\)"):
        audit.report(FastPrivacyEngine(), [1.0, 2.0, 3.0], delta=1e-5)
