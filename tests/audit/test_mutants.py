"""Broken engines: the audit flags each, a quick test finds each, and each breaks something else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastclip.audit.mechanism import Setting, attack
from fastclip.audit.mutants import MUTANTS, Mutant
from tests.audit.found_by import FOUND_BY

ROOT = Path(__file__).parents[2]
HELD = [m for m in MUTANTS if isinstance(m.setting, Setting)]


class Collected:
    """A plugin that keeps what is selected."""

    def __init__(self) -> None:
        self.tests: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = {item.nodeid for item in session.items}


def test_each_is_found_by_a_test_of_the_quick_part() -> None:
    """Of what `make test` runs; that they fail is in a slow test."""
    assert FOUND_BY.keys() == {mutant.name for mutant in MUTANTS}
    (quick,) = re.findall(r"^QUICK := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    functions = sorted({test.partition("[")[0] for test in FOUND_BY.values()})
    chosen = [str(ROOT / test) for test in functions]  # with all cases, of which few are quick
    collected = Collected()
    options = ["--collect-only", "-qq", "-m", quick, "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    assert pytest.main([*chosen, *options], plugins=[collected]) == 0
    assert set(FOUND_BY.values()) <= collected.tests


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_each_fails_the_test_that_finds_it() -> None:
    """By what that test asserts, and under the broken engine alone."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.audit.found_by"], cwd=ROOT, check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["whole"] == dict.fromkeys(FOUND_BY.values(), "passed")
    assert found["broken"] == dict.fromkeys(FOUND_BY, "AssertionError in call")


QUICK = (
    "a parameter without noise",
    "noise reused in every step",
    "raw counts of the same step",
    "averaged before clipping",
    "every second step recorded",
    "the stated epsilon is a tenth",
)
"""One a look: entries, steps, counts, guesses, what is recorded, what is stated."""


@pytest.mark.parametrize("mutant", [
    pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow) for m in HELD
])  # fmt: skip
def test_a_mutant_is_refuted(mutant: Mutant) -> None:
    """Each of the mechanism's, with few canaries; the neighbors' take long, and are in a slow test."""
    torch.manual_seed(0)
    assert mutant.audited(canaries=20_000, runs=0).refuted


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m not in HELD], ids=lambda m: m.name)
def test_a_mutant_of_neighbors_is_refuted(mutant: Mutant) -> None:
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
