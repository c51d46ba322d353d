"""What is published: a wheel and an sdist that are whole, and serve outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from bench.processes import ROOT
from fastclip.core.build_recipe import files_of

SNIPPET = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
BEFORE = """
import pathlib, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import fastclip
assert pathlib.Path(fastclip.__file__).is_relative_to(sys.argv[1]), fastclip.__file__
model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(3, (64,))), batch_size=16)
"""


def backend(call: str, source: Path, folder: Path) -> Path:
    """A call of the build backend, as pip and build make it; the file that it wrote."""
    code = f"import setuptools.build_meta as b, sys; print(b.{call}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True,
        env={**os.environ, "FASTCLIP_BUILD": "0"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of what git tracks here, and the wheel of that sdist alone."""
    folder = tmp_path_factory.mktemp("package")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
        check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    sdist = backend("build_sdist", folder / "tree", folder)
    with tarfile.open(sdist) as files:
        files.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, backend("build_wheel", source, folder)


@pytest.mark.extras
def test_the_sdist_builds_the_kernels_and_the_wheel_holds_the_package_alone(
    built: tuple[Path, Path],
) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as files:
        inside = {name.partition("/")[2] for name in files.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*")}
    assert sources | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= inside
    with zipfile.ZipFile(wheel) as files:
        held = {name for name in files.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        told = files.read(metadata).decode()
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastclip").rglob("*.py*")}
    packed = {path for part in ("path", "step") for path in files_of(part)}
    csrc = {f"fastclip/_{path.relative_to(ROOT).as_posix()}" for path in packed}
    assert {"fastclip/_csrc/step/module.cpp", "fastclip/_csrc/registry.hpp"} <= csrc
    ours = {name for name in ours if "__pycache__" not in name} | {"fastclip/py.typed"}
    assert held == ours | csrc
    assert {"fastclip/_C.pyi", "fastclip/_host.pyi"} <= held
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", told, re.MULTILINE))
    assert extras == {"hf", "lightning", "fairness", "pld", "test", "dev"}


@pytest.mark.extras
def test_the_readmes_snippet_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = built
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    run_snippet(Path(sys.executable), tmp_path / "site", str(tmp_path / "site"))


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """With what the wheel itself asks for, and nothing else: its dependencies are whole."""
    run([sys.executable, "-m", "venv", "empty"], tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    for wanted in (f"torch=={torch.__version__.partition('+')[0]}", str(built[1])):
        run([str(python), "-m", "pip", "install", "--quiet", wanted], tmp_path)
    run_snippet(python, tmp_path / "empty")
    found = run([str(python), "-m", "fastclip.doctor"], tmp_path)
    assert "Reinstall fastclip from its source distribution" in found


def run_snippet(python: Path, site: Path, imported_from: str = "") -> None:
    """What the README shows first, with fastclip from there."""
    assert SNIPPET is not None
    code = BEFORE + SNIPPET[1]
    assert 0 < float(run([str(python), "-c", code, str(site)], site.parent, imported_from)) < 100


def run(command: list[str], folder: Path, imported_from: str = "") -> str:
    """What a command that must not fail prints; it sees no other checkout."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": imported_from},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
