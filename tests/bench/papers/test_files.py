"""Files that are missing, damaged, of another version or not real: one sentence says which and why."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from bench.papers.data import DATA_SETS, adult, celeba, dutch, gossis, ham10000, mimic, mnist
from bench.papers.data.idx import write_idx
from bench.papers.data.mimic_files import SOURCE as MIMIC
from bench.papers.data.source import MARKER
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.bench.papers.folders import CASES, COMPRESSED, FILES, TABLES, changed, replaced

SOURCES = {
    "adult": adult.SOURCE,
    "celeba": celeba.SOURCE,
    "dutch": dutch.SOURCE,
    "gossis": gossis.SOURCE,
    "ham10000": ham10000.SOURCE,
    "mimic": MIMIC,
    "mnist": mnist.MNIST.source,
}
ADULT_WAY_OUT = (
    "get it from the UCI Machine Learning Repository, https://doi.org/10.24432/C5XW20 (licence: CC BY "
    "4.0) and put adult.data and adult.test into the folder"
)


def says(*texts: str, error: type[Exception] = ArgumentError):
    """The block raises this very error, whose message contains the texts."""
    return pytest.raises(error, match="^" + "".join(f"(?=.*{re.escape(text)})" for text in texts))


@pytest.mark.parametrize("name", SOURCES)
def test_no_folder(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    with says(f"{source.title}: no folder was named; {source.way_out}"):
        DATA_SETS[name].load(None)
    with says(f"{source.title}: there is no folder {tmp_path / 'x'}; {source.way_out}"):
        DATA_SETS[name].load(tmp_path / "x")
    with says(f"{source.title}: no file ", f" in {tmp_path}; {source.way_out}"):
        DATA_SETS[name].load(tmp_path)


def test_the_way_out_of_adult(tmp_path: Path) -> None:
    (tmp_path / "adult.data").touch()
    with pytest.raises(ArgumentError) as caught:
        adult.load(tmp_path / "none")
    assert str(caught.value) == f"Adult: there is no folder {tmp_path / 'none'}; {ADULT_WAY_OUT}"


@pytest.mark.parametrize(("name", "file"), FILES)
def test_a_file_is_missing(name: str, file: str, copy) -> None:
    folder = copy(name)
    (folder / file).unlink()
    with says(Path(file).name, SOURCES[name].way_out):
        DATA_SETS[name].load(folder)


@pytest.mark.parametrize(("name", "file"), TABLES)
def test_text_that_is_not_utf8(name: str, file: str, copy) -> None:
    folder = copy(name)
    seen = []

    def spoil(content: bytes) -> bytes:
        lines = content.split(b"\n")
        at = len(b"\n".join(lines[:20])) + 1 + 3  # the fourth byte of line 21
        seen.append(at)
        return content[:at] + b"\xff" + content[at + 1 :]

    changed(folder / file, spoil)
    place = f"line 21, byte {seen[0]} of the file, is 0xff"
    with says(f"{folder / file} is not UTF-8 text: {place}; get it again, or convert it"):
        DATA_SETS[name].load(folder)


@pytest.mark.parametrize(("name", "file"), COMPRESSED)
def test_a_gzip_file_that_is_cut_off(name: str, file: str, copy) -> None:
    path = copy(name) / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    with says(
        f"{path} is not a whole gzip file (", "was cut off or damaged on the way; get it again"
    ):
        DATA_SETS[name].load(path.parent)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (name, file)
        for name, file in TABLES
        if not file.startswith("NOTEEVENTS") and name != "celeba"
    ],
)
def test_a_table_that_is_cut_off_within_a_row(name: str, file: str, copy) -> None:
    path = copy(name) / file
    changed(path, lambda content: content.rstrip()[: content.rstrip().rindex(b",")])
    with says(str(path), " fields, expected the ", "cut off or damaged; get it again"):
        DATA_SETS[name].load(path.parent)


def test_notes_that_are_cut_off_within_a_text(copy) -> None:
    path = copy("mimic") / "NOTEEVENTS.csv.gz"
    changed(path, lambda content: content[:-5])
    with says(f"{path} is not the table that was expected (unexpected end of data)"):
        mimic.load(path.parent)


@pytest.mark.parametrize(
    ("name", "file", "column"),
    [(name, case.files[0], case.column) for name, case in CASES.items() if case.column],
)
def test_a_column_that_is_missing(name: str, file: str, column: str, copy) -> None:
    path = copy(name) / file
    replaced(path, column, "another")
    with says(f"{path} lacks the column {column}; it has "):
        DATA_SETS[name].load(path.parent)


@pytest.mark.parametrize(("name", "file"), FILES)
def test_an_empty_file(name: str, file: str, copy) -> None:
    folder = copy(name)
    changed(folder / file, lambda content: b"")
    with says(str(folder / file)):
        DATA_SETS[name].load(folder)


WRONG_ENTRIES = [
    ("adult", "adult.data", ", Male, ", ", Man, ", "sex is 'Man', expected one of Female, Male"),
    ("adult", "adult.test", ">50K.", "50K.", "income is '50K', expected one of <=50K, >50K"),
    (
        "celeba",
        "list_attr_celeba.txt",
        "40\n",
        "41\n",
        "its first line says 41 pictures, but 40 follow",
    ),
    ("celeba", "list_attr_celeba.txt", "Goatee", "Goat", "expected the names of the 40 attributes"),
    (
        "celeba",
        "list_eval_partition.txt",
        "000002.jpg 0",
        "000002.jpg 3",
        "part is '3', expected one of",
    ),
    ("celeba", "list_eval_partition.txt", "000002", "000009", "list different pictures"),
    ("dutch", "dutch_census_2001.arff", "@data", "@rows", "has no line @data"),
    ("ham10000", "HAM10000_metadata.csv", ",histo,", ",,histo,", "row 1: 8 fields, expected the 7"),
    ("ham10000", "HAM10000_metadata.csv", "ISIC_0000003", "ISIC_9", "1 of 90 pictures are not in "),
    ("mimic", "ADMISSIONS.csv.gz", ":00:00,", ",", "expected a time such as 2101-10-20 19:08:00"),
    ("mimic", "PATIENTS.csv.gz", ",M,", ",X,", "GENDER is 'X', expected one of F, M"),
]


@pytest.mark.parametrize(("name", "file", "old", "new", "message"), WRONG_ENTRIES)
def test_entries_that_are_wrong(
    name: str, file: str, old: str, new: str, message: str, copy
) -> None:
    path = copy(name) / file
    replaced(path, old, new)
    with says(message, str(path.parent)):
        DATA_SETS[name].load(path.parent)


def test_a_number_outside_its_range(copy) -> None:
    path = copy("adult") / "adult.data"
    lines = path.read_text().splitlines()
    row = next(number for number, line in enumerate(lines) if "?" not in line)
    fields = lines[row].split(", ")
    fields[12] = "100"
    lines[row] = ", ".join(fields)
    path.write_text("\n".join(lines))
    with says(
        f"{path}, row {row + 1}: hours-per-week is '100', expected a number between 1 and 99"
    ):
        adult.load(path.parent)


def _without_question_marks(content: bytes) -> bytes:
    return b"".join(line for line in content.splitlines(True) if b"?" not in line)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "fewer"),
    [
        ("adult", "adult.data", ", White, ", ", ?, ", 1),
        ("dutch", "dutch_census_2001.arff", ",5_4_9\n", ",?\n", 1),
        ("ham10000", "HAM10000_metadata.csv", ",male,", ",,", 0),
    ],
)
def test_missing_values(name: str, file: str, old: str, new: str, fewer: int, copy) -> None:
    path = copy(name) / file
    load = DATA_SETS[name].load
    changed(path, _without_question_marks)
    before = sum(load(path.parent).split["rows"].values())
    replaced(path, old, new)
    assert sum(load(path.parent).split["rows"].values()) == before - fewer


def test_missing_values_of_gossis(copy) -> None:
    """A row that misses an input goes; one that misses the gender stays, as in the paper."""
    folder = copy("gossis")
    raw = folder / f"{gossis.RAW}.gz"
    changed(raw, lambda content: content.replace(b",M,", b",,"))
    data = gossis.load(folder)
    assert set(data.train.groups["gender"].tolist()) == {0, 2}
    changed(folder / f"{gossis.READY}.gz", lambda content: content.replace(b",Floor,", b",NA,"))
    fewer = gossis.load(folder)
    assert sum(fewer.split["rows"].values()) < sum(data.split["rows"].values())
    assert fewer.train.x[0].shape[1] == data.train.x[0].shape[1] - 1


REAL = [
    ("adult", "rows, but the published data have 30,162: the file is cut off or another version"),
    ("celeba", "list_attr_celeba.txt: 40 rows, but the published data have 202,599"),
    ("dutch", "rows, but the published data have 30,273"),
    ("ham10000", "HAM10000_metadata.csv: 90 rows, but the published data have 10,015"),
    ("mimic", "ADMISSIONS.csv.gz: 300 rows, but the published data have 58,976"),
    (
        "mnist",
        "and not the published 9fb629c4189551a2d022fa330f9573f3: it is another file, or was "
        "damaged on the way; get it again",
    ),
]


@pytest.mark.parametrize(("name", "message"), REAL)
def test_generated_files_do_not_pass_for_real_ones(name: str, message: str, copy) -> None:
    folder = copy(name)
    (folder / MARKER).unlink()
    with says(message):
        DATA_SETS[name].load(folder)


@pytest.mark.parametrize("name", CASES)
def test_a_generator_does_not_write_over_real_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    with says("holds files without the marker SYNTHETIC"):
        DATA_SETS[name].generate(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["real"]


@pytest.mark.parametrize("plain", [False, True])
def test_sizes_of_idx_files(plain: bool, copy) -> None:
    folder = copy("mnist")
    path = folder / "train-images-idx3-ubyte.gz"
    if plain:
        content = gzip.decompress(path.read_bytes())
        path.unlink()
        path = folder / "train-images-idx3-ubyte"
        path.write_bytes(content)
    changed(path, lambda content: content[:-1])
    with says(f"{path}: its header says 300 x 28 x 28, which is 235,216 bytes, but it has 235,215"):
        mnist.load(folder)


IDX = [
    (
        "t10k-labels-idx1-ubyte.gz",
        np.zeros((75, 28, 28)),
        "idx file of magic number 2049, came 2051",
    ),
    ("t10k-labels-idx1-ubyte.gz", np.zeros(74), "has 75 images, but t10k-labels-idx1-ubyte.gz 74"),
    ("t10k-labels-idx1-ubyte.gz", np.full(75, 10), "has the label 10, expected 0 to 9"),
    ("t10k-images-idx3-ubyte.gz", np.zeros((75, 32, 32)), "images of 28 x 28 pixels, came 32 x 32"),
]


@pytest.mark.parametrize(("file", "values", "message"), IDX)
def test_idx_files_of_another_content(file: str, values: np.ndarray, message: str, copy) -> None:
    folder = copy("mnist")
    write_idx(folder / file, values)
    with says(message):
        mnist.load(folder)


def test_the_test_part_of_mnist_alone(copy) -> None:
    folder = copy("mnist")
    for name in mnist.TRAIN:
        (folder / f"{name}.gz").unlink()
    data = mnist.load(folder, reduced_class=None)
    assert data.split["rows"] == {"train": 60, "test": 15}
    assert data.notes[1].startswith(
        "60 training and 15 test rows, both from the published test part"
    )
    assert mnist.load(folder, kept=3).train.y.bincount()[8] == 3


@pytest.mark.parametrize("name", ["celeba", "ham10000"])
def test_a_picture_that_is_cut_off(name: str, copy) -> None:
    path = copy(name) / CASES[name].others[0]
    path.write_bytes(path.read_bytes()[:400])
    with says(f"{path} is not a whole picture ("):
        DATA_SETS[name].load(path.parents[1])


def test_a_tokenizer_that_returns_something_else(folders) -> None:
    with says("tokenize must return a tuple (ids, mask)", error=ArgumentTypeError):
        mimic.load(folders["mimic"], tokenize=lambda texts: texts)
