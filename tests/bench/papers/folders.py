"""Generated folders of every data set that reads files, and how tests change what is in them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.papers.data import DATA_SETS
from bench.papers.data.dataset import Dataset


@dataclass(frozen=True)
class Case:
    """A data set that reads files.

    Attributes:
        rows: to generate.
        files: text tables that it reads.
        others: other files that it reads.
        column: of the first table, one that it needs; "" where the table has no header.
    """

    rows: int
    files: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    column: str = ""


CASES: Mapping[str, Case] = {
    "adult": Case(600, ("adult.data", "adult.test")),
    "celeba": Case(
        40, ("list_attr_celeba.txt", "list_eval_partition.txt"), ("img_align_celeba/000001.jpg",)
    ),
    "dutch": Case(600, ("dutch_census_2001.arff",), (), "economic_status"),
    "gossis": Case(
        600,
        ("gossis-1-eicu-only-model-ready.csv.gz", "gossis-1-eicu-only.csv.gz"),
        (),
        "icu_death",
    ),
    "ham10000": Case(
        90, ("HAM10000_metadata.csv",), ("HAM10000_images_part_1/ISIC_0000000.jpg",), "lesion_id"
    ),
    "mimic": Case(
        300,
        ("ADMISSIONS.csv.gz", "PATIENTS.csv.gz", "NOTEEVENTS.csv.gz"),
        (),
        "HOSPITAL_EXPIRE_FLAG",
    ),
    "mnist": Case(
        300,
        (),
        (
            "t10k-images-idx3-ubyte.gz",
            "t10k-labels-idx1-ubyte.gz",
            "train-images-idx3-ubyte.gz",
            "train-labels-idx1-ubyte.gz",
        ),
    ),
}
TABLES = [(name, file) for name, case in CASES.items() for file in case.files]
FILES = TABLES + [(name, file) for name, case in CASES.items() for file in case.others]
COMPRESSED = [(name, file) for name, file in FILES if file.endswith(".gz")]


def generated(name: str, folder: Path) -> Path:
    """A new folder of small files."""
    DATA_SETS[name].generate(folder, rows=CASES[name].rows)
    return folder


def copied(source: Path, folder: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(source, folder))


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file, those that its compression holds."""
    packed = path.suffix == ".gz"
    content = change(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    path.write_bytes(gzip.compress(content) if packed else content)


def replaced(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence, which must be there."""

    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode(), 1)

    changed(path, change)


def parts_of(dataset: Dataset) -> dict[str, object]:
    """The parts that there are, by name."""
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {name: rows for name, rows in parts.items() if rows is not None}
