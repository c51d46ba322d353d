"""What an import of the package brings with it, counted in modules, and that every name is there."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from opacus.validators.errors import UnsupportedModuleError

import fastclip
from fastclip import errors

ALONE = ("fastclip", "fastclip.errors", "fastclip.losses", "fastclip.clipping", "fastclip.ops")
"""What does without Opacus."""

ADDED = """
import importlib, sys, torch
for name in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(name)
    print(name, *set(sys.modules) - before)
"""

EVERYTHING = """
import fastclip
fastclip.ops.clip_scale, fastclip.clipping.dp_sgd, fastclip.losses, fastclip.errors.FastclipError
assert "opacus" not in __import__("sys").modules
fastclip.accounting.epsilon, fastclip.engine.FastPrivacyEngine, fastclip.data.draws
from fastclip import *
assert FastPrivacyEngine is fastclip.FastPrivacyEngine is fastclip.engine.FastPrivacyEngine
assert {*fastclip.__all__} <= {*globals()} & {*dir(fastclip)}
"""


def python(program: str, *arguments: str) -> list[list[str]]:
    """The words of each line that a program of its own process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_what_is_imported_beside_torch() -> None:
    """The package's own modules, a few of Python's, none of torch's large parts."""
    found = {name: set(modules) for name, *modules in python(ADDED, *ALONE)}
    assert found["fastclip"] == {"fastclip"}
    for name, modules in found.items():
        others = {module for module in modules if module.split(".")[0] != "fastclip"}
        assert {module.split(".")[0] for module in others} <= {"torch", *sys.stdlib_module_names}
        assert not {m for m in others if m.startswith(("torch.distributed", "torch._dynamo"))}
        assert len(others) <= 10, (name, others)
        assert len(modules) <= 60, (name, modules)


def test_names_are_there_when_they_are_asked_for() -> None:
    python(EVERYTHING)


def test_type_checkers_see_the_same_names() -> None:
    """Each is imported for them from the module of the table, or is a module."""
    source = ast.parse(Path(str(fastclip.__file__)).read_text())
    found: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fastclip"):
            found |= {alias.name: str(node.module) for alias in node.names}
    of_modules = {name for name, module in found.items() if module == "fastclip"}
    assert {*found} == {*fastclip.__all__}
    assert {name: f"fastclip.{module}" for name, module in fastclip._MODULES.items()} == {
        name: module for name, module in found.items() if name not in of_modules
    }


@pytest.mark.parametrize("package", [fastclip, errors])
def test_other_names_are_not(package: object) -> None:
    for name in ("no_such_name", "__no_such_name__"):
        assert not hasattr(package, name)
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {package.__name__} import no_such_name")  # type: ignore[attr-defined]


def test_what_a_module_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that a module of the package needs is named; the module is not taken for missing."""
    (tmp_path / "lacking.py").write_text("import no_such_library")
    monkeypatch.setattr(fastclip, "__path__", [*fastclip.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        _ = fastclip.lacking


def test_the_error_that_is_also_opacus() -> None:
    """One class, whenever it is asked for; it travels between processes."""
    kind = errors.UnsupportedLayerError
    assert kind is vars(errors)["UnsupportedLayerError"]
    assert kind.__bases__ == (errors.FastclipError, UnsupportedModuleError, NotImplementedError)
    back = pickle.loads(pickle.dumps(kind("why")))
    assert type(back) is kind
    assert back.args == ("why",)
    with pytest.raises(UnsupportedModuleError):
        raise kind("why")
