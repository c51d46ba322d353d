"""Files that are written whole: what is there at each moment at which the machine could stop."""

from __future__ import annotations

import io
import os
import stat
import threading
from pathlib import Path

import pytest

from fastclip.core.system import write_whole
from fastclip.errors import ArgumentError
from tests.refusal import refused


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


def write(path: Path, content: bytes = b"new") -> None:
    write_whole(path, lambda part: part.write_bytes(content))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writers_of_one_process_do_not_mix(tmp_path: Path) -> None:
    """While one is half done another one comes and goes."""
    path, errors = tmp_path / "state", []
    contents = [bytes([65 + k]) * 10**5 for k in range(3)]

    def slowly(part: Path) -> None:
        part.write_bytes(contents[0][:10])
        write(path, contents[1])
        assert path.read_bytes() == contents[1]
        with part.open("ab") as file:
            file.write(contents[0][10:])

    write_whole(path, slowly)
    assert path.read_bytes() == contents[0]

    def often(content: bytes) -> None:
        for _ in range(30):
            try:
                write(path, content)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=often, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert not errors
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_who_may_read_it_stays(tmp_path: Path) -> None:
    path, seen = tmp_path / "state", []
    umask = os.umask(0o027)
    try:
        write(path)
        assert mode(path) == 0o640
        for kept in (0o600, 0o664):
            path.chmod(kept)
            write_whole(path, lambda part: seen.append(mode(part)) or part.write_bytes(b"newer"))
            assert mode(path) == kept
    finally:
        os.umask(umask)
    assert seen == [0o600, 0o600]


def test_links_stay(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    for name in ("there", "not there yet"):
        link = tmp_path / name
        link.symlink_to(folder / name)
        if name == "there":
            (folder / name).write_bytes(b"old")
        write(link)
        assert link.is_symlink()
        assert (folder / name).read_bytes() == b"new"
    assert sorted(p.name for p in folder.iterdir()) == ["not there yet", "there"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = path.stat().st_mode
    with refused(f"is a {kind}. Choose another name", ArgumentError):
        write(path)
    assert path.stat().st_mode == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_the_longest_name(tmp_path: Path) -> None:
    write(tmp_path / ("n" * 255))
    write_whole(os.fsencode(tmp_path / "bytes"), lambda part: part.write_bytes(b"new"))
    assert (tmp_path / "bytes").read_bytes() == b"new"
