"""Old module paths: each gives what the new path has, and says where that is."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fastclip._moved import COMMANDS, MOVED, NAMES, spec_of

PACKAGE = Path(__file__).resolve().parents[1] / "fastclip"
PUBLIC = {
    "layers": "register_rule", "layers.rule": "LayerRule", "uses": "register_rule",
    "uses.rule": "register_use", "uses.reductions": "ElementwiseUse",
    "uses.elementwise": "ElementwiseUse", "planner": "Planner", "noise": "SecureNoise",
    "model": "FastPrivacyEngine", "model.unwrapping": "unwrap", "optim": "FastPrivacyEngine",
    "optim.optimizer": "FastDPOptimizer", "optim.grad_scaler": "GradScaler",
    "mechanism": "Mechanism", "explanation": "Explanation",
    "integrations.arguments": "PrivacyArguments",
}  # fmt: skip
"""Of each old path a name that users import from it."""


def test_every_path_is_tried() -> None:
    assert PUBLIC.keys() == MOVED.keys()


@pytest.mark.parametrize(("old", "name"), PUBLIC.items())
def test_an_old_path_gives_what_the_new_one_has(
    old: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"fastclip.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"import fastclip.{MOVED[old]}") as told:
        module = import_module(f"fastclip.{old}")
    assert getattr(module, name) is getattr(import_module(f"fastclip.{MOVED[old]}"), name)
    assert told[-1].filename == __file__


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_free(old: str) -> None:
    """Nothing lies there, so the alias is what is found."""
    place = PACKAGE / old.replace(".", "/")
    assert not place.with_suffix(".py").exists()
    assert not (place / "__init__.py").exists()


def test_other_paths_are_not_ours() -> None:
    assert spec_of("fastclip.nothing") is None
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import_module("fastclip.nothing")


@pytest.mark.parametrize(("old", "name"), NAMES.items())
def test_old_names(old: str, name: str) -> None:
    assert old != name


@pytest.mark.parametrize("old", COMMANDS)
def test_a_command(old: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"fastclip.{old.partition('.')[0]}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "matmul" in done.stdout
