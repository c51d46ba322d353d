"""The programs of others: what docs/clients.md shows is what was measured, and one of them runs
both ways.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.clients import table
from bench.clients.__main__ import ENGINES, run
from bench.clients.programs import NAMES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results/clients-cpu.json"


def entry(**changed: object) -> dict:
    def runs(step: float) -> list[dict]:
        return [
            {
                "step": {"cpu": step + n},
                "run": {"cpu": 10 * step},
                "memory_mib": 8.0,
                "epsilon": 1.234,
            }
            for n in (1.0, 0.0)
        ]

    about = {"title": "a program", "version": "1.0", "kind": "text", "runs": "it", "note": "a note"}
    return {"about": about, "opacus": runs(4.0), "fastclip": runs(1.0), **changed}


def test_a_line() -> None:
    """Ratios of the least of the rounds; what failed says so in place of numbers."""
    assert table.line(entry()) == "| a program | 1.0 | it | 1.23 | 0.25 | 0.25 | 1.00 | a note |"
    failed = table.line(entry(opacus=[{"error": "ValueError: no"}]))
    assert (
        failed
        == "| a program | 1.0 | it | -, 1.23 | - | - | - | with Opacus: `ValueError: no`. a note |"
    )


def test_the_page_shows_what_was_measured() -> None:
    results = json.loads(RESULTS.read_text())
    assert list(results["programs"]) == [n for n in NAMES if n in results["programs"]]
    page = (ROOT / "docs/clients.md").read_text()
    assert table.table(results) in page
    assert table.written(page, results) == page


def test_every_run_was_of_its_engine() -> None:
    for name, measured in json.loads(RESULTS.read_text())["programs"].items():
        for engine in ENGINES:
            assert measured[engine], name
            for found in measured[engine]:
                assert found.get("engine", engine) == engine or "error" in found, name


@pytest.mark.extras
@pytest.mark.parametrize("name", ["mnist", "pfllib"])
def test_epsilon_is_at_most_that_of_opacus(name: str) -> None:
    """The same noise, rate and steps: Opacus' bound is a little above the tight one."""
    theirs, ours = (run(name, engine, tiny=True) for engine in ENGINES)
    assert [theirs.get("engine"), ours.get("engine")] == list(ENGINES), (theirs, ours)
    assert theirs["steps"] == ours["steps"]
    assert 0.95 * theirs["epsilon"] <= ours["epsilon"] <= theirs["epsilon"]
