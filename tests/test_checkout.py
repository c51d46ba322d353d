"""A checkout in the current folder shadows no package that other libraries look for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"bench", "examples", "fastclip", "tests"}


def run_in_root(code: str) -> str:
    """What a fresh interpreter prints whose first place to look is the root of the checkout."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_packages_at_the_top() -> None:
    """A new one would be found before an installed package of its name."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == PACKAGES


@pytest.mark.extras
def test_models_of_transformers_import() -> None:
    """transformers asks for a package `kernels`, and must not find a part of this one."""
    found = run_in_root(
        "import importlib.util, fastclip\n"
        "import transformers.models.bert.modeling_bert as bert\n"
        "import transformers.models.llama.modeling_llama as llama\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "print(fastclip.__file__, bert.BertModel.__name__, llama.LlamaModel.__name__)\n"
        "print(None if spec is None else spec.origin)"
    )
    first, kernels = found.splitlines()
    assert first == f"{ROOT / 'fastclip' / '__init__.py'} BertModel LlamaModel"
    assert not kernels.startswith(str(ROOT))
