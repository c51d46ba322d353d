"""bench.faults: fastclip bears a few of each, and engines that are broken on purpose are found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.faults.cases import Case
from bench.faults.outcomes import EXACT, FAILED, Broken, Outcome, check_ledger, mixed, same, tally
from bench.faults.picture import draw
from bench.processes import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")


def faults(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m bench.faults`, in a process of its own, which it may break and fork."""
    return subprocess.run(
        [sys.executable, "-m", "bench.faults", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_quick_look(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    done = faults("--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert {"plain", "split", "workers"} == {
        case["name"].removeprefix("kill-") for case in result["cases"] if "kill" in case["name"]
    }
    assert all(case["outcomes"][FAILED] == 0 for case in result["cases"])
    draw(result, tmp_path / "faults.png")
    assert (tmp_path / "faults.png").stat().st_size > 1000


@pytest.mark.extras
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("defect", "told", "case", "seeds"),
    [
        ("ledger-after-the-step", "the ledger is short", "kill-plain", [2]),
        ("sums-are-kept", "holds something of the failed step", "memory-plain", range(80, 120, 4)),
        ("no-checksum", "loaded with other numbers", "checkpoint-flipped", range(60)),
    ],
)
def test_a_broken_engine_is_found(
    defect: str, told: str, case: str, seeds: Sequence[int], tmp_path: Path
) -> None:
    out = tmp_path / "faults.json"
    done = faults(
        "--planted", defect, "--case", case, "--seed", *map(str, seeds), "--out", str(out)
    )
    assert done.returncode == 1, done.stderr[-2000:]
    (found,) = json.loads(out.read_text())["cases"]
    assert any(told in failure["why"] for failure in found["failures"])


def test_what_equals_what() -> None:
    x = torch.tensor([1.0, 0.0])
    assert same({"a": [x, 1, None]}, {"a": [x.clone(), 1, None]})
    assert not same({"a": x}, {"a": -x.neg().neg()})  # -0.0
    assert not same([1], [1.0])
    assert same(x * torch.nan, x * torch.nan)
    old, new = {"w": x}, {"w": x + 1}
    assert mixed({"w": torch.tensor([1.0, 1.0])}, old, new)
    assert not mixed({"w": torch.tensor([1.5, 1.0])}, old, new)


def test_a_ledger_that_is_short_or_long() -> None:
    check_ledger(3, 3)
    check_ledger(3, 2)
    with pytest.raises(Broken, match="short"):
        check_ledger(2, 3)
    with pytest.raises(Broken, match="holds 4"):
        check_ledger(4, 2)


def test_runs_of_a_quick_look_are_spread() -> None:
    case = Case("", "", "", lambda: 100, 4, lambda seed, folder: Outcome(EXACT, ""))
    assert list(case.seeds(quick=True)) == [0, 25, 50, 75]
    assert list(case.seeds(quick=False)) == list(range(100))
    assert tally([case.run(0, Path())] * 3)["outcomes"] == {
        EXACT: 3, "clear error": 0, FAILED: 0
    }  # fmt: skip
