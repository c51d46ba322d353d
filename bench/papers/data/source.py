"""Where the files of a data set come from, and the one error that says so when they are not there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastclip.errors import ArgumentError

MARKER = "SYNTHETIC"
"""A file of this name says that a generator wrote the folder."""
SYNTHETIC_NOTE = "synthetic data of the real files' format: no figure of it is a result"


@dataclass(frozen=True)
class Source:
    """A public or licensed data set, as messages name it.

    Attributes:
        title: its name.
        site: who gives it away, with the DOI or address.
        licence: under which terms.
        put: which files belong into the folder, in words.
    """

    title: str
    site: str
    licence: str
    put: str

    def find(self, folder: Path | str | None, *names: str) -> Path:
        """The first of these files that the folder has.

        Raises:
            ArgumentError: no folder was named, it does not exist, or none of the files is in it.
        """
        if folder is None:
            raise ArgumentError(f"{self.title}: no folder was named; {self.way_out}")
        folder = Path(folder)
        if not folder.is_dir():
            raise ArgumentError(f"{self.title}: there is no folder {folder}; {self.way_out}")
        if found := held(folder, *names):
            return found
        wanted = " or ".join(names)
        raise ArgumentError(f"{self.title}: no file {wanted} in {folder}; {self.way_out}")

    @property
    def way_out(self) -> str:
        """How to come by the files: the end of every message that misses some."""
        return (
            f"get it from {self.site} (licence: {self.licence}) and put {self.put} into the folder"
        )


def held(folder: Path | str, *names: str) -> Path | None:
    """The first of these files that the folder has, or None."""
    return next((Path(folder) / name for name in names if (Path(folder) / name).is_file()), None)


def is_synthetic(folder: Path | str | None) -> bool:
    """Whether a generator wrote the folder."""
    return folder is not None and (Path(folder) / MARKER).is_file()


def new_folder(folder: Path | str, title: str) -> Path:
    """A folder for generated files, marked as such.

    Raises:
        ArgumentError: it holds files that no generator wrote.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not is_synthetic(folder):
        raise ArgumentError(
            f"{title}: {folder} holds files without the marker {MARKER}, and generated ones "
            "could take the place of real data; name an empty folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(f"{title}: random rows of a generator, no real data.\n")
    return folder


def check_md5(path: Path, expected: str) -> None:
    """Raises ArgumentError unless the file has this MD5 sum."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ArgumentError(
            f"{path} has MD5 {digest.hexdigest()} and not the published {expected}: it is another "
            "file, or was damaged on the way; get it again"
        )


def check_count(what: str, count: int, expected: int) -> None:
    """Raises ArgumentError unless as many rows came as the real data have."""
    if count != expected:
        raise ArgumentError(
            f"{what}: {count:,} rows, but the published data have {expected:,}: the file is cut off "
            "or another version; get it again"
        )
