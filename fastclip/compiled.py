"""The modules that csrc/ becomes: taken where they are built, of the sources that are here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from fastclip.building.missing import find
from fastclip.errors import say
from fastclip.sources import is_current


class _OtherSources(ImportError):
    """The module is there, and its sources have changed since."""


def check_built(name: str, folder: str, compiler: str) -> None:
    """Refuse a module that is absent, or that was built from other sources than a checkout has now, or
    against another torch.

    The launchers of those sources would hand an older module what it takes for something else, so
    that is said aloud, too.

    Args:
        name: of the module in fastclip. folder: of csrc/, which becomes it. compiler: builds it.

    Raises:
        ImportError: saying so, and the way out.
    """
    try:
        _of_the_package(name, folder, compiler)
    except _OtherSources as error:
        say(str(error))
        raise


def of_this_torch(name: str, folder: str) -> ModuleType:
    """A module that is compiled against torch: of the package, or else of the user's cache.

    Args:
        name: of the module in fastclip. folder: of csrc/, which becomes it.

    Raises:
        ImportError: neither has one that fits; the package's is told.
    """
    try:
        return _of_the_package(name, folder, "a C++ compiler")
    except ImportError as error:
        try:
            return find(name, folder)
        except ImportError:
            if isinstance(error, _OtherSources):
                say(str(error))
        raise


def _of_the_package(name: str, folder: str, compiler: str) -> ModuleType:
    try:
        module = importlib.import_module(f"fastclip.{name}")
    except ImportError as error:
        told = f"fastclip.{name} is not built ({error}): {how_to_build(compiler)}"
        raise ImportError(told) from error
    versions: dict[str, str] = getattr(module, "versions", dict)()
    torch = importlib.import_module("torch") if "torch" in versions else None
    if torch is not None and versions["torch"] != torch.__version__.partition("+")[0]:
        raise ImportError(f"fastclip.{name} was compiled against another torch")
    if not is_current(folder, versions.get("sources", "")):
        raise _OtherSources(
            f"fastclip.{name} was built from other sources than csrc/{folder} has now, so it is not "
            f"used: {how_to_build(compiler)}"
        )
    return module


def how_to_build(compiler: str, package: Path = Path(__file__).parent) -> str:
    """What to do where a module of csrc/ is absent, in a checkout or where a wheel was installed."""
    if (package.parent / "csrc").is_dir():
        return f"`make build` with {compiler} on PATH builds it"
    return (
        f"reinstall fastclip from its source distribution with {compiler} on PATH (pip install "
        "--force-reinstall --no-deps fastclip-VERSION.tar.gz builds it)"
    )
