"""The package does without the libraries of its reports, which are told by name where they lack."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = ("fairlearn", "pandas", "matplotlib")

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {library!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in [name for name in sys.modules if name.split(".")[0] == {library!r}]:
    del sys.modules[name]
import fastclip
try:
    import fastclip.fairness
except ValueError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def output(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.extras
def test_fastclip_imports_none_of_them() -> None:
    found = output("import sys; from fastclip import *; print(*sys.modules)").split()
    assert "torch" in found
    assert not {name for name in LIBRARIES if name in found}


@pytest.mark.extras
@pytest.mark.parametrize("library", ["fairlearn", "matplotlib"])
def test_which_extra_is_missing(library: str) -> None:
    assert output(WITHOUT.format(library=library)) == (
        f"ArgumentError: fastclip.fairness needs {library}, which is not installed. Run "
        "pip install 'fastclip[fairness]'. See errors.html#missing-libraries"
    )
