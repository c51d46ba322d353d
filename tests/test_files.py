"""Files that are written whole: what is there at each moment at which the machine could stop."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from fastclip.files import write_whole


def test_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, happened = tmp_path / "state", []
    path.write_bytes(b"old")
    fsync = os.fsync

    def spy(opened: int) -> None:
        kind = "folder" if os.path.samestat(os.fstat(opened), tmp_path.stat()) else "file"
        happened.append((kind, path.read_bytes()))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", spy)
    write_whole(path, lambda part: part.write_bytes(b"new"))
    assert happened == [("file", b"old"), ("folder", b"new")]
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_is_lost(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def write(part: Path) -> None:
        part.write_bytes(b"ne")
        raise error

    with pytest.raises(error):
        write_whole(path, write)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_an_open_file() -> None:
    file = io.BytesIO()
    write_whole(file, lambda opened: opened.write(b"new"))
    assert file.getvalue() == b"new"
