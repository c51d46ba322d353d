"""Every tutorial of the site runs as it is written, from its first line to its last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.processes import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    known: dict[str, object] = {"__name__": page.stem}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, page.name, "exec"), known)
    told = CHECKS.get(page.stem)
    if told is not None:
        told(known, capsys.readouterr().out, tmp_path)


def first_model(known: dict, said: str, folder: Path) -> None:
    assert 7.5 < known["epsilon"] <= 8.0
    assert known["accuracy"] > 0.6
    assert "epsilon" in said


def groups(known: dict, said: str, folder: Path) -> None:
    """What the page says of it: rare rows are clipped more under one threshold."""
    page = (folder / "report.html").read_text()
    assert "Two groups" in page
    frame = known["recorders"]["constant"].frame()
    last = frame[
        (frame["step"] == 4) & (frame["measure"] == "clipped") & (frame["attribute"] == "group")
    ]
    share = last.set_index("group")["value"]
    assert share["rare"] >= share["common"]


def patients(known: dict, said: str, folder: Path) -> None:
    assert "unit" in said


def saving(known: dict, said: str, folder: Path) -> None:
    assert {"model.pt", "model.pt2", "run.pt"} <= {path.name for path in folder.iterdir()}
    x = torch.randn(3, 8)
    loaded = torch.export.load(folder / "model.pt2").module()(x[:2])
    assert torch.allclose(loaded, known["served"](x[:2]))


CHECKS = {"first_model": first_model, "groups": groups, "patients": patients, "saving": saving}
