"""`make release-check`: whether this commit can be released, and whether it runs when it is installed.

`python -m bench.release_check --environment PYTHON --torch VERSION` measures one line of the table in
docs/versions.md: a clean environment, the import, the doctor and one private step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench.processes import ROOT

MOST_WORDS = 1_500
"""Of one version in CHANGELOG.md."""
TORCH = "2.13.0"
COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")
"""What is hidden where an environment is to have no compiler."""
IN_SDIST = {
    "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml", "setup.py",
    "csrc/step/module.cpp", "fastclip/py.typed",
}  # fmt: skip
STEP = """
import json, pathlib, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import fastclip
inside = pathlib.Path(fastclip.__file__).is_relative_to(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
engine = fastclip.FastPrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
)
x, y = next(iter(loader))
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
trained = all(bool(torch.isfinite(p).all()) for p in model.parameters())
print(json.dumps({"inside": inside, "trained": trained, "epsilon": engine.get_epsilon(1e-5),
                  "torch": torch.__version__, "version": fastclip.__version__}))
"""


class NotReady(Exception):
    """What is to be done before the release."""


def check(condition: object, sentence: str) -> None:
    """Raise it unless the condition holds."""
    if not condition:
        raise NotReady(sentence)


def command(*words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """What a command prints; one that fails is not ready."""
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, "PYTHONPATH": "", **(env or {})}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    check(done.returncode == 0, f"{' '.join(words[:4])}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


# -------------------------------------------------------------------------------------------------
# What the files say.


def version(root: Path = ROOT) -> str:
    """The version that the package states: `fastclip.__version__`, the one source of it."""
    text = (root / "fastclip" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    if found is None:
        raise NotReady("fastclip/__init__.py has no __version__ of the form X.Y.Z")
    return found[1]


def section(changelog: str, of: str) -> tuple[date, str]:
    """The date and the text of a version in a changelog."""
    found = re.search(
        rf"^## \[{re.escape(of)}\] - (\d{{4}}-\d\d-\d\d)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    if found is None:
        raise NotReady(f"CHANGELOG.md has no heading `## [{of}] - YYYY-MM-DD`")
    return date.fromisoformat(found[1]), found[2]


def check_files(root: Path = ROOT) -> str:
    """The version and its date are the same in all files."""
    stated = version(root)
    build = (root / "pyproject.toml").read_text()
    check(
        'version = { attr = "fastclip.__version__" }' in build, "pyproject.toml has its own version"
    )
    cited = (root / "CITATION.cff").read_text()
    check(f"\nversion: {stated}\n" in cited, f"CITATION.cff does not say version: {stated}")
    text = (root / "CHANGELOG.md").read_text()
    dated, entries = section(text, stated)
    check(
        f"\ndate-released: {dated}\n" in cited, f"CITATION.cff does not say date-released: {dated}"
    )
    waiting = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    check(waiting is None or not waiting[1].strip(), "CHANGELOG.md has unreleased entries")
    words = len(entries.split())
    check(words <= MOST_WORDS, f"CHANGELOG.md says {stated} in {words} words of {MOST_WORDS}")
    return f"version {stated} of {dated}, {words} words in CHANGELOG.md"


def check_git() -> str:
    """Everything is committed, and the tag is free."""
    changed = command("git", "status", "--porcelain", "--untracked-files=no")
    check(not changed, f"not committed:\n{changed}")
    tag = f"v{version()}"
    check(tag not in command("git", "tag", "--list").split(), f"the tag {tag} is there already")
    return f"nothing is left to commit, the tag {tag} is free"


# -------------------------------------------------------------------------------------------------
# What is built.


@contextmanager
def exported() -> Iterator[Path]:
    """A folder with what the commit holds, and nothing else."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        command("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tree))
        shutil.rmtree(tree / ".git")
        yield tree


def built(source: Path, call: str, to: Path) -> Path:
    """A file that the build backend makes, without compiled modules."""
    code = f"import setuptools.build_meta as b, sys; print(b.{call}(sys.argv[1]))"
    told = command(sys.executable, "-c", code, str(to), cwd=source, env={"FASTCLIP_BUILD": "0"})
    return to / told.split()[-1]


def build_both(tree: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel of what is in it."""
    to = tree.parent
    sdist = built(tree, "build_sdist", to)
    with tarfile.open(sdist) as files:
        files.extractall(to / "unpacked", filter="data")
    (source,) = (to / "unpacked").iterdir()
    return sdist, built(source, "build_wheel", to)


def check_contents(sdist: Path, wheel: Path) -> str:
    """The sdist has all that a build needs, the wheel the package alone, and both the version."""
    with tarfile.open(sdist) as files:
        inside = {name.partition("/")[2] for name in files.getnames()}
    check(inside >= IN_SDIST, f"the sdist lacks {sorted(IN_SDIST - inside)}")
    left = [name for name in inside if name.startswith(("tests", "bench", "docs")) or ".so" in name]
    check(not left, f"the sdist holds {left[:5]}")
    with zipfile.ZipFile(wheel) as files:
        held = files.namelist()
    odd = [name for name in held if not re.match(r"fastclip(/|-[\d.]+\.dist-info/)", name)]
    check(not odd, f"the wheel holds {odd[:5]}")
    for path in (sdist, wheel):
        check(path.name.startswith(f"fastclip-{version()}"), f"{path.name} has another version")
    return f"{sdist.name}: {len(inside)} names; {wheel.name}: {len(held)} names"


# -------------------------------------------------------------------------------------------------
# Whether it runs in an environment of its own.


def programs(to: Path, compiler: bool) -> str:
    """A folder for PATH: all programs that are on it now, an nvcc that fails, compilers if asked for."""
    to.mkdir()
    (to / "nvcc").write_text("#!/bin/sh\nexit 1\n")  # its kernels take a quarter of an hour
    (to / "nvcc").chmod(0o755)
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in sorted(Path(folder).glob("*")) if Path(folder).is_dir() else ():
            link = to / program.name
            if (compiler or program.name not in COMPILERS) and not os.path.lexists(link):
                link.symlink_to(program)
    return str(to)


def serve(
    artifact: Path, folder: Path, python: str, torch: str, *, compiler: bool, background: bool
) -> dict[str, Any]:
    """Install it in a new environment; import it, ask the doctor, take one private step.

    Args:
        artifact: a wheel or an sdist. folder: for the environment. python: an interpreter.
        torch: its version. compiler: whether C++ compilers are on PATH; no nvcc is.
        background: wait for the modules that are compiled in the background, and step again.

    Returns:
        versions, what the doctor says of the compiled modules, and epsilon after the step.
    """
    own = {
        "FASTCLIP_CACHE": str(folder / "cache"), "CXX": "", "CUDA_HOME": "", "CUDA_PATH": "",
        "PATH": programs(folder / "programs", compiler),
    }  # fmt: skip
    run = {} if background else {"FASTCLIP_BUILD": "0"}
    command(python, "-m", "venv", str(folder / "environment"))
    inner = str(folder / "environment" / "bin" / "python")
    command(inner, "-m", "pip", "install", "--quiet", f"torch=={torch}", cwd=folder, env=own)
    command(inner, "-m", "pip", "install", "--quiet", str(artifact), cwd=folder, env=own)
    doctor: dict[str, Any] = {}
    for again in range(1 + background):
        told = command(inner, "-c", STEP, str(folder / "environment"), cwd=folder, env=own | run)
        found = json.loads(told.splitlines()[-1])
        check(found.pop("inside"), "another fastclip was imported than the one installed")
        check(found.pop("trained"), "a parameter is not finite after one step")
        check(0 < found["epsilon"] < 100, f"epsilon is {found['epsilon']}")
        doctor = settled(inner, folder, own | run, 0 if again or not background else 1_200)
    return {"python": doctor["python"], **found, **compiled(doctor)}


def settled(python: str, folder: Path, env: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """What the doctor says once nothing is compiled any more, or after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        said = json.loads(command(python, "-m", "fastclip.doctor", "--json", cwd=folder, env=env))
        if said["nodes"]["state"] != "compiling" or time.monotonic() > end:
            return said
        time.sleep(10)


def compiled(doctor: Mapping[str, Any]) -> dict[str, str]:
    """Which of the compiled modules are used, or why not."""
    nodes, loops = doctor["nodes"], doctor["loops"]
    return {
        "_host": "yes" if loops["built"] else loops["why"],
        "_step": "yes" if nodes["compiled"] else nodes["why"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line per check; 1 if something is left to do."""
    parser = argparse.ArgumentParser(prog="python -m bench.release_check", description=__doc__)
    parser.add_argument("--files", action="store_true", help="only what the files and git say")
    parser.add_argument("--environment", metavar="PYTHON", help="only one line of the table")
    parser.add_argument("--torch", default=TORCH, help="its version in the new environment")
    parser.add_argument("--sdist", action="store_true", help="install the sdist, not the wheel")
    parser.add_argument("--no-compiler", action="store_true", help="hide compilers")
    options = parser.parse_args(arguments)
    python = options.environment or sys.executable
    try:
        if not options.environment:
            print(check_files(), check_git(), sep="\n", flush=True)
        if options.files:
            return 0
        with exported() as tree:
            sdist, wheel = build_both(tree)
            print(check_contents(sdist, wheel), flush=True)
            artifact = sdist if options.sdist else wheel
            found = serve(
                artifact, tree.parent, python, options.torch, compiler=not options.no_compiler,
                background=bool(options.environment),
            )  # fmt: skip
        print(f"{artifact.name} in a new environment: {json.dumps(found)}")
    except NotReady as reason:
        print(f"not ready: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
