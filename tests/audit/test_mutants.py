"""Broken engines, each of which the audit must flag; and each of which breaks something else."""

from __future__ import annotations

import pytest
import torch

from fastclip.audit.attack import Setting, attack
from fastclip.audit.mutants import MUTANTS, Mutant

HELD = [m for m in MUTANTS if isinstance(m.setting, Setting)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mutant", HELD, ids=lambda m: m.name)
def test_a_mutant_is_refuted(mutant: Mutant) -> None:
    """Each of the mechanism's, with few canaries; the neighbours' take long, and are in a slow test."""
    torch.manual_seed(0)
    assert mutant.audited(canaries=20_000, runs=0).refuted


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m not in HELD], ids=lambda m: m.name)
def test_a_mutant_of_neighbours_is_refuted(mutant: Mutant) -> None:
    torch.manual_seed(0)
    assert mutant.audited(canaries=0, runs=400).refuted


@pytest.mark.slow
def test_no_two_do_the_same() -> None:
    """Names, and of those in one setting what a run with one seed releases, accounts and states."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    inside = torch.arange(900) % 2 == 0
    seen: dict[tuple[object, ...], str] = {}
    for mutant in HELD:
        if mutant.setting.secure:
            continue
        torch.manual_seed(3)
        with mutant.broken():
            found = attack(mutant.setting, inside, 1e-5)
        released = found.noise.nan_to_num().sum().item(), found.counts.sum().item()
        key = (mutant.setting.name, *released, str(found.history), found.claimed)
        assert key not in seen, (mutant.name, seen[key])
        seen[key] = mutant.name
