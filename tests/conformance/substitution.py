"""Loads Opacus' test modules and makes, for a mode, a subclass of each of their classes.

Names are put in their place while a case runs and taken back after it, so that neither Opacus nor the
rest of a test session sees anything of it.
"""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import hypothesis

from tests.conformance import torchvision_stub

OWN, FAST, AS_IS = "own", "fast", "as is"
"""Opacus' modes under our engine; the fast mode; Opacus' parts that our engine uses unchanged."""

PROFILE = "conformance"
hypothesis.settings.register_profile(
    PROFILE, derandomize=True, database=None,
    # One test serves the subclasses of several modes; each of them is one executor by itself.
    suppress_health_check=[hypothesis.HealthCheck.differing_executors],
)  # fmt: skip


def opacus_tests(name: str) -> ModuleType:
    """The module opacus.tests.<name>.

    Its hypothesis tests try the same examples in every run: the list of cases that must fail
    could not be strict otherwise.
    """
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.load_profile(PROFILE)  # a test's settings inherit from it when defined
    try:
        with torchvision_stub.installed():
            return importlib.import_module(f"opacus.tests.{name}")
    finally:
        hypothesis.settings.load_profile(before)


def cases(
    module: ModuleType, mode: str, *, names: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None, classes: Collection[str] | None = None,
    only: Collection[str] | None = None, unskipped: Collection[str] = (),
    base: type | None = None, suffix: str | None = None,
) -> dict[str, type[unittest.TestCase]]:  # fmt: skip
    """Subclasses of the classes of tests in `module`, for a test module of ours to collect.

    Args:
        module: one of Opacus' test modules. mode: under which the cases are counted.
        names: what names in `module` stand for while a case runs.
        attributes: of the class, and of the test object after its setUp (the mode's name).
        classes: which classes of the module; all by default.
        only: which of their tests; all by default.
        unskipped: those of them that Opacus skips and fastclip need not.
        base: a class that overrides helpers of theirs.
        suffix: of the classes' names; by default the mode's, nothing for OWN.
    """
    if suffix is None:
        suffix = "" if mode == OWN else f"_{mode.replace(' ', '_')}"
    found = {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, unittest.TestCase)
        and kind.__module__ == module.__name__
        and (classes is None or name in classes)
    }
    missing = set(classes or ()) - set(found)
    if missing:
        raise ImportError(f"{module.__name__} has no {sorted(missing)}: another version of Opacus?")
    result = {}
    for name, kind in found.items():
        body: dict[str, Any] = {"MODE": mode, **(attributes or {})}
        for test in unittest.defaultTestLoader.getTestCaseNames(kind):
            if test in unskipped:
                body[test] = getattr(kind, test).__wrapped__
            elif only is not None and test not in only:
                body[test] = None  # what is not callable is no test
        parents = (kind,) if base is None else (base, kind)
        plain = type(name, parents, body)
        result[name + suffix] = _substituted(plain, name + suffix, module, names, attributes)
    return result


def _substituted(
    kind: type[unittest.TestCase], name: str, module: ModuleType,
    names: Mapping[str, Any] | None, attributes: Mapping[str, Any] | None,
) -> type[unittest.TestCase]:  # fmt: skip
    """`kind`, run with these names in its module, and with these attributes after its setUp."""

    def run(self: Any, result: Any = None) -> Any:
        with patch.multiple(module, **names) if names else nullcontext():
            return kind.run(self, result)

    def set_up(self: Any) -> None:
        kind.setUp(self)
        vars(self).update(attributes or {})

    return type(name, (kind,), {"run": run, "setUp": set_up})
