"""What newcomers do first, as they write it, in a folder of their own, with documented calls only."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import ROOT

SCRIPTS = sorted(set(Path(__file__).parent.glob("*.py")) - {Path(__file__)})
SCRIPTS = [path for path in SCRIPTS if path.name not in ("__init__.py", "test_mistakes.py")]
DOCUMENTED = "\n".join(
    path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
)


LONG = ("opacus_images", "opacus_text", "tabular_groups", "trainer_lora", "with_lightning")


@pytest.mark.extras
@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
        for path in SCRIPTS
    ],
)
def test_a_newcomers_script(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1].startswith("done: ")
    assert "fastclip/" not in done.stderr, done.stderr  # no warning points into the library


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_uses_what_is_documented(script: Path) -> None:
    """Every name that it imports of fastclip is public, and stands on a page."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastclip"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name)
                assert not alias.name.startswith("_")
                assert alias.name in DOCUMENTED
