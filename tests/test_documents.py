"""Documents name files that are there, and show code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastclip import clipping
from tests.oracle import make_private

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
PAGES.remove(ROOT / "CHANGELOG.md")  # which tells of the past, too


def named(text: str) -> set[str]:
    """Paths in backticks or as the targets of links, and what is left of `python -m MODULE`."""
    paths = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md|cuh?|cpp|hpp|toml))`", text))
    paths |= {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    modules = re.findall(r"python -m ((?:fastclip|bench|tests|examples)[\w.]*\w)", text)
    return paths | {module.replace(".", "/") for module in modules}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_are_there(page: Path) -> None:
    places = (page.parent, ROOT, ROOT / "fastclip")
    missing = {
        path
        for path in named(page.read_text()) - {"examples/NAME"}
        if not any((place / f"{path}{end}").exists() for place in places for end in ("", ".py"))
    }
    assert not missing


def test_names_are_found() -> None:
    text = "`a/b.py` `x.y` [z](../docs/c.md#d) [web](https://a.b/c.md) `python -m bench.train --only x`"
    assert named(text) == {"a/b.py", "../docs/c.md", "bench/train"}


@pytest.mark.extras
def test_what_the_page_on_fairness_shows(tmp_path: Path) -> None:
    """Its loop as it is written; what its table lets be published is what is recorded as private.

    Then its noisy counts, of which all is.
    """
    page = (ROOT / "docs" / "fairness.md").read_text()
    block, release = re.findall(r"```python\n(.*?)```", page, re.S)
    torch.manual_seed(0)
    x, sex = torch.randn(32, 5), torch.arange(32) % 2
    y = (x[:, 0] > 0).long()
    criterion = nn.CrossEntropyLoss()
    engine, model, optimizer, loader = make_private(
        nn.Linear(5, 2), dataset=TensorDataset(x, y, sex), poisson_sampling=True, batch_size=8,
        noise_multiplier=1.0, clipping=clipping.dpsgd_f(2),
    )  # fmt: skip
    known: dict[str, object] = {
        "torch": torch, "epochs": 2, "engine": engine, "model": model, "optimizer": optimizer,
        "loader": loader, "criterion": criterion, "test_x": x, "test_y": y, "test_sex": sex,
        "sample_losses": nn.CrossEntropyLoss(reduction="none"), "folder": tmp_path,
    }  # fmt: skip
    exec(block, known)
    assert (tmp_path / "report.html").exists()
    frame = known["recorder"].frame()  # type: ignore[attr-defined]
    assert set(frame["part"]) == {"training", "test"}
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    public = {name for row in rows if row[3].strip().startswith("yes") for name in names(row[1])}
    secret = {name for row in rows if row[3].strip() == "no" for name in names(row[1])}
    observed = frame[frame["part"] == "training"]
    assert set(observed[observed["private"]]["measure"]) == public
    assert set(observed[~observed["private"]]["measure"]) == secret
    exec(release, known)
    frame = known["recorder"].frame()  # type: ignore[attr-defined]
    assert frame[frame["part"] == "released"]["private"].all()
    published = (tmp_path / "published.md").read_text()
    assert "noisy counts" in published
    assert "Gradients of each group" in (tmp_path / "report.md").read_text()
    assert "Gradients of each group" not in published
    assert [found.releases for found in engine.privacy_by_data_set(1e-5).lines[1:]] == [1]


def names(cell: str) -> set[str]:
    """What is in backticks."""
    return set(re.findall(r"`(\w+)`", cell))
