"""The quickstart and every tutorial of the site run as written, from the first line to the last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import BertForSequenceClassification

from bench.processes import ROOT

SPREAD = ROOT / "docs" / "tutorials" / "distributed.md"
PAGES = sorted(
    {*(ROOT / "docs" / "tutorials").glob("*.md"), ROOT / "docs" / "quickstart.md"} - {SPREAD}
)


@pytest.mark.extras
@pytest.mark.one_in(2)
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


@pytest.mark.slow
def test_the_script_of_several_processes(tmp_path: Path) -> None:
    """Under torchrun, as its page says; two processes spend what one does."""
    (script,) = re.findall(r"```python\n(.*?)```", SPREAD.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    said = []
    for processes in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(processes), "train.py"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout.strip().splitlines()[-1])
    assert said[0] == said[1]
    assert re.fullmatch(r"epsilon \d\.\d{3} after 8 steps", said[0])


def clinicalbert(known: dict, said: str, folder: Path) -> None:
    """The adapter that was saved is the one that was trained; epsilon was kept to."""
    assert known["trainer"].engine.get_epsilon(1e-4) <= 3.0
    trained = {name: p for name, p in known["model"].named_parameters() if p.requires_grad}
    saved = dict(
        PeftModel.from_pretrained(
            BertForSequenceClassification(known["config"]), folder / "adapter"
        ).named_parameters()
    )
    assert len(trained) == 10
    for name, parameter in trained.items():
        assert torch.equal(saved[name], parameter), name


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


def image_classifier(known: dict, said: str, folder: Path) -> None:
    """The run that was stopped and resumed keeps to its budget, and has learned; the weights load."""
    assert known["done"] == 3
    assert 7.5 < known["epsilon"] <= 8.0
    assert known["reached"] > 0.6  # of four classes
    assert known["probabilities"].shape == (1, 4)
    assert "privacy unit" in said


def patients(known: dict, said: str, folder: Path) -> None:
    assert "unit" in said


def quickstart(known: dict, said: str, folder: Path) -> None:
    """The budget is kept, and the rule that the data follow is learned."""
    assert 2.5 < known["epsilon"] <= 3.0
    assert known["accuracy"] > 0.85
    assert "privacy unit" in said
    assert (folder / "model.pt").exists()


def saving(known: dict, said: str, folder: Path) -> None:
    assert {"model.pt", "model.pt2", "run.pt"} <= {path.name for path in folder.iterdir()}
    x = torch.randn(3, 8)
    loaded = torch.export.load(folder / "model.pt2").module()(x[:2])
    assert torch.allclose(loaded, known["served"](x[:2]))


CHECKS = {
    "clinicalbert": clinicalbert,
    "first_model": first_model,
    "groups": groups,
    "image_classifier": image_classifier,
    "patients": patients,
    "quickstart": quickstart,
    "saving": saving,
}
