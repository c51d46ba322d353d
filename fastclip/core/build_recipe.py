"""How the modules of csrc/ are compiled, and from which sources; setup.py loads this too.

This file imports nothing of fastclip, because setup.py loads it before anything is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

UNITS = {".cpp", ".cu"}
"""Suffixes of compiled files; the rest is included."""
OF_THE_HOST = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
"""Flags of the host's compiler, to which nvcc passes *.cpp."""
ANOTHER = "CXX=... chooses another compiler"


class NotBuilt(Exception):
    """Why there is no extension, and what to do about it."""


class NoCompiler(NotBuilt):
    """No compiler exists. This is not an error, even if the build was requested."""


def check_system() -> None:
    """Raises NoCompiler on systems without builds."""
    if sys.platform != "linux":
        raise NoCompiler(f"Modules are built on Linux only, and this is {sys.platform}.")


def find_cxx() -> str:
    """Returns the C++ compiler named by CXX, or the first on PATH; GCC makes the fastest loops."""
    named = os.environ.get("CXX", "").strip()
    for command in (named,) if named else ("g++", "c++", "clang++"):
        try:
            program, *arguments = shlex.split(command)
        except ValueError as error:
            raise NotBuilt(
                f"CXX={named} is not a valid command ({error}). Check its quotes."
            ) from error
        found = shutil.which(program)
        if found is not None:
            return shlex.join([found, *arguments])
    if named:
        raise NotBuilt(f"CXX={named} is not on PATH. Set CXX to a C++ compiler, or unset it.")
    raise NoCompiler("No C++ compiler is installed. Install g++, or set CXX to a compiler.")


def find_torch() -> Path:
    """Returns the folder of the installed torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise NoCompiler(
            "Torch is missing in the build environment (pip isolates builds), so fastclip "
            "compiles in the background at run time. Pass --no-build-isolation to pip to build "
            "now."
        )
    return Path(found.origin).parent


def find_cxx_and_torch() -> str:
    """Returns the C++ compiler, if torch is installed."""
    find_torch()
    return find_cxx()


def plain_flags(sources: Path, pybind11: str | Path) -> list[str]:
    """Returns the flags of every source.

    Args:
        sources: csrc/, or a copy. pybind11: the folder of its headers.
    """
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").is_file():
        raise NotBuilt(f"Python.h is missing in {python}. Install python3-dev (python3-devel).")
    headers = [flag for path in (pybind11, python) for flag in ("-isystem", str(path))]
    return ["-std=c++17", "-O3", f"-I{sources}", *headers]


def torch_headers() -> list[Path]:
    """Returns the folders of torch's headers; the first also holds pybind11's."""
    include = find_torch() / "include"
    found = [include, include / "torch" / "csrc" / "api" / "include"]
    for header in (include / "pybind11" / "pybind11.h", found[1] / "torch" / "version.h"):
        if not header.is_file():
            raise NotBuilt(f"Torch came without {header}. Install torch's own wheel.")
    return found


def torch_flags() -> list[str]:
    """Returns the flags for torch, whose headers then check nothing at run time."""
    import torch

    strings = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    found = [flag for path in torch_headers() for flag in ("-isystem", str(path))]
    return [*OF_THE_HOST, "-DNDEBUG", strings, *found]


def torch_libraries() -> list[str]:
    """Returns the libraries of torch; a process that has imported torch finds them."""
    return [f"-L{find_torch() / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def units_of(folder: Path) -> list[Path]:
    """Returns the compiled files of a module's folder."""
    return sorted(path for path in folder.glob("*.*") if path.suffix in UNITS and path.is_file())


def mark_flag(unit: Path, mark: str) -> list[str]:
    """Returns the flag that writes the mark of the sources into one unit: a change compiles it again."""
    return [f'-DFASTCLIP_SOURCES="{mark}"'] if unit.name == "module.cpp" else []


def compiling(compiler: Sequence[str], flags: Sequence[str], unit: str, made: str) -> list[str]:
    """Returns the command that makes an object of one unit."""
    return [*compiler, *flags, "-c", unit, "-o", made]


def linking(
    compiler: Sequence[str], objects: Sequence[str], libraries: Sequence[str], made: str
) -> list[str]:
    """Returns the command that makes the module from its objects."""
    return [*compiler, "-shared", *objects, *libraries, "-o", made]


# -------------------------------------------------------------------------------------------------
# Which sources a module of csrc/ was built from: setup.py writes their mark into the module.
_PACKED = Path(__file__).resolve().parents[1] / "_csrc"
"""The sources in a wheel: those that are compiled on the user's machine."""
CSRC = _PACKED if _PACKED.is_dir() else _PACKED.parents[1] / "csrc"
"""The folder of sources, next to the package of a checkout or in an installed one."""
_KINDS = {".cpp", ".cu", ".cuh", ".hpp", ".inc"}


def files_of(folder: str, csrc: Path = CSRC) -> list[Path]:
    """Returns the sources of csrc/`folder`, and headers that the modules share."""
    found = sorted([*csrc.iterdir(), *(csrc / folder).iterdir()])
    return [path for path in found if path.suffix in _KINDS and path.is_file()]


def mark_of(folder: str, csrc: Path = CSRC) -> str:
    """Returns a mark that changes with any of these files."""
    digest = hashlib.sha256()
    for path in files_of(folder, csrc):
        for part in (path.relative_to(csrc).as_posix().encode(), path.read_bytes()):
            digest.update(b"%d " % len(part) + part)
    return digest.hexdigest()[:16]


def is_current(folder: str, mark: str, csrc: Path = CSRC) -> bool:
    """Whether a module with this mark was built from the present sources, if there are any."""
    return not (csrc / folder).is_dir() or mark_of(folder, csrc) == mark
