"""Results in one tidy file, whole at every moment: a killed run loses nothing and is counted once.

A run that ends writes a file of its own under a temporary name, then renames it. `merge` adds such
files to results.csv.gz in the same way and deletes them; what was merged and not yet deleted is known
by its key.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from fastclip.errors import ArgumentError

COLUMNS = (
    "run", "experiment", "data", "synthetic", "strategy", "epsilon", "seed", "part", "step",
    "epsilon_spent", "attribute", "group", "measure", "value", "private",
)  # fmt: skip
TEXT = dict.fromkeys(
    ("run", "experiment", "data", "strategy", "part", "attribute", "group", "measure"), str
)
"""Columns that are text, also where they look like numbers (class 8)."""


class Store:
    """A folder of results.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "results.csv.gz"
        self._about = folder / "about.json"
        self._runs = folder / "runs"
        self._runs.mkdir(parents=True, exist_ok=True)

    def done(self) -> set[str]:
        """Keys of the runs that ended."""
        waiting = {path.name.removesuffix(".csv") for path in self._runs.glob("*.csv")}
        # Read last: what another process merges meanwhile is found in one place or in both.
        return waiting | (set(self.frame()["run"]) if self.file.exists() else set())

    def frame(self) -> pd.DataFrame:
        """All merged results, one measured value a row."""
        if not self.file.exists():
            return pd.DataFrame(columns=list(COLUMNS))
        try:
            frame = pd.read_csv(self.file, dtype=TEXT, keep_default_na=False, na_values=[""])
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ArgumentError(f"{self.file} cannot be read as results: {error}") from error
        missing = set(COLUMNS) - set(frame)
        if missing:
            raise ArgumentError(
                f"{self.file} expects the columns {COLUMNS}, lacks {sorted(missing)}"
            )
        return frame

    def add(self, key: str, frame: pd.DataFrame) -> None:
        """What a run measured; the run is done once this returns."""
        assert tuple(frame.columns) == COLUMNS
        write(self._runs / f"{key}.csv", frame.to_csv(index=False).encode())

    def merge(self) -> pd.DataFrame:
        """Everything so far, in one file."""
        with self.held("merge"):
            frame = self.frame()
            seen = set(frame["run"])
            files = sorted(self._runs.glob("*.csv"))
            new = [pd.read_csv(path, dtype=TEXT, keep_default_na=False, na_values=[""])
                   for path in files if path.name.removesuffix(".csv") not in seen]  # fmt: skip
            if new:
                frame = pd.concat([part for part in (frame, *new) if len(part)], ignore_index=True)
                frame = frame.sort_values(["experiment", "strategy", "epsilon", "seed", "run"],
                                          kind="stable", ignore_index=True)  # fmt: skip
                text = frame.to_csv(index=False, float_format="%.9g")
                write(self.file, gzip.compress(text.encode(), mtime=0))
            for path in files:
                path.unlink()
                path.with_suffix(".lock").unlink(missing_ok=True)
        return frame

    def checkpoint(self, key: str) -> Path:
        """Where a run keeps itself until it ends."""
        return self._runs / f"{key}.checkpoint"

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """One process at a time; the system lets go of what a killed one held."""
        with (self._runs / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # What was run

    def about(self) -> dict[str, Any]:
        """Commands, machine, versions, and of each experiment its settings, data and split."""
        return json.loads(self._about.read_text()) if self._about.exists() else {}

    def note(self, experiment: str, told: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Of an experiment, what its results came from.

        Args:
            told: data, split and settings, and what each strategy is built as.
            made: the command, where and with what it ran.

        Raises:
            ArgumentError: where this folder holds results of other data or settings under the same
                name.
        """
        with self.held("about"):
            about = self.about()
            before = about.get(experiment, {})
            for what, theirs, ours in _differing(before, told):
                raise ArgumentError(
                    f"{self.folder} holds results of {experiment} with {what} {theirs!r}, this run has "
                    f"{ours!r}; pass another folder with --out"
                )
            strategies = {**before.get("strategies", {}), **told["strategies"]}
            origins = before.get("made", [])
            known = [{**one, "date": None} for one in origins]
            if {**made, "date": None} not in known:
                origins = [*origins, dict(made)]
            about[experiment] = {**told, "strategies": strategies, "made": origins}
            write(self._about, (json.dumps(about, indent=1) + "\n").encode())


def _differing(
    before: Mapping[str, Any], told: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """(what, before, now) of everything that makes results another experiment's."""
    told = json.loads(json.dumps(told))  # as it was written: tuples are lists there
    for what in ("data", "synthetic", "split"):
        if before and before[what] != told[what]:
            yield what, before[what], told[what]
    for part in ("settings", "strategies"):
        for name in before.get(part, {}).keys() & told[part].keys():
            if before[part][name] != told[part][name]:
                yield name, before[part][name], told[part][name]


def write(path: Path, content: bytes) -> None:
    """A file that is whole whenever it is there, also after a power cut."""
    part = path.with_suffix(f".part{os.getpid()}")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
