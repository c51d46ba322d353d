"""Which line a traced step names: of a user's file, and of a package that computes the loss."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import pytest

from fastclip.trace.findings import line_of

CODE = "def loss():\n    return sys._getframe()\n"


def frame_in(place: Path) -> FrameType:
    """A frame whose file lies at `place`, called from this one."""
    known = {"sys": sys}
    exec(compile(CODE, str(place), "exec"), known)
    return known["loss"]()  # type: ignore[operator]


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_line_of_a_package_comes_first(folder: str) -> None:
    frame = frame_in(Path("/somewhere", folder, "product", "training.py"))
    shown = line_of(frame)
    assert shown.startswith("training.py:2, called at test_lines.py:"), shown


def test_a_line_of_the_users_alone() -> None:
    assert line_of(frame_in(Path("/somewhere/project/training.py"))) == "training.py:2"


def test_the_standard_library_is_passed_over() -> None:
    frame = frame_in(Path(sysconfig.get_path("stdlib"), "contextlib.py"))
    assert line_of(frame).startswith("test_lines.py:")
