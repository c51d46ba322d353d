"""Dutch census of 2001: is a person's occupation of high standing? Groups by sex.

The file is the one of Le Quy et al. 2022; every column is a code, so every column is one-hot.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import Category, codes_of, encoded, words
from bench.papers.data.reading import opened, reading
from bench.papers.data.source import Source, check_count, is_synthetic, new_folder
from bench.papers.data.splits import assembled, drawn, shares_of, split
from bench.papers.data.table import read_table, without_missing
from fastclip.errors import ArgumentError

FILES = ("dutch_census_2001.arff", "dutch_census_2001.csv", "dutch.csv")
SOURCE = Source(
    "Dutch census 2001",
    "the fairness benchmark of Le Quy et al. 2022, https://github.com/tailequy/fairness_dataset, "
    "https://doi.org/10.1002/widm.1452 (census: IPUMS International, https://doi.org/10.18128/D020.V7.3)",
    "IPUMS International terms of use",
    "dutch_census_2001.arff (or dutch_census_2001.csv, or dutch.csv)",
)
CLASSES = ("low", "high")
ATTRIBUTES = {"sex": ("female", "male")}
OCCUPATIONS = ("5_4_9", "2_1")
SEXES = ("2", "1")
COUNTS = (30_273, 30_147)
"""Females and males in both published files; Xu et al. 2020 exchange the two numbers."""
UNBALANCED = (10_000, 30_000)
"""Females and males in the unbalanced data of Xu et al. 2020."""
AS_CODES = {
    "sex": {"female": "2", "male": "1"},
    "occupation": {"0": "5_4_9", "1": "2_1"},
}
"""The words of dutch.csv."""
COLUMNS = (  # domains of the file's own header
    Category("age", words("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17")),
    Category("household_position", words("1110 1121 1122 1131 1132 1140 1210 1220")),
    Category("household_size", words("111 112 113 114 125 126")),
    Category("prev_residence_place", words("1 2 9")),
    Category("citizenship", words("1 2 3")),
    Category("country_birth", words("1 2 3")),
    Category("edu_level", words("0 1 2 3 4 5 9")),
    Category("economic_status", words("111 112 120 210 221 222 223 224")),
    Category("cur_eco_activity", words("111 122 124 131 132 133 134 135 136 137 138 139 200")),
    Category("marital_status", words("1 2 3 4")),
)
NAMES = ("sex", *(column.name for column in COLUMNS), "occupation")


def load(folder: Path | None, *, seed: int = 0, unbalanced: bool = False) -> Dataset:
    """80% to train and 20% to test of each class.

    Args:
        folder: has the arff or csv file.
        seed: of the split, and of the unbalanced draw before it.
        unbalanced: draw 30,000 males and 10,000 females first (of generated files: three males for a
            female).

    Returns:
        Inputs float32 [n, d] of zeros and ones; attribute "sex".

    Raises:
        ArgumentError: the file is missing, damaged, or not the published one.
    """
    path, synthetic = SOURCE.find(folder, *FILES), is_synthetic(folder)
    table = without_missing(_read(path))
    sex = codes_of(table["sex"], SEXES, path)
    counts = [int((sex == code).sum()) for code in range(2)]
    if not synthetic:
        for name, count, expected in zip(ATTRIBUTES["sex"], counts, COUNTS, strict=True):
            check_count(f"{path}, {name}s", count, expected)
    y = codes_of(table["occupation"], OCCUPATIONS, path)
    rows = np.arange(len(table))
    if unbalanced:
        females = min(UNBALANCED[0], counts[0], counts[1] // 3)
        wanted = (females, 3 * females)
        rows = np.concatenate(
            [drawn(rows[sex.numpy() == code], wanted[code], seed=seed + code) for code in range(2)]
        )
    return assembled(
        "dutch",
        (encoded(table, COLUMNS, path),),
        y,
        {"sex": sex},
        split(rows, shares_of(0.2), seed=seed, strata=y.numpy()[rows]),
        seed=seed,
        classes=CLASSES,
        attributes=ATTRIBUTES,
        synthetic=synthetic,
        notes=["all codes are one-hot: more inputs than the 35 of Xu et al. 2020"],
    )


def _read(path: Path) -> pd.DataFrame:
    """The rows of either format, in the words of the arff file."""
    if path.suffix == ".arff":
        names, skip = _arff_header(path)
        table = read_table(path, NAMES, names=names, skip=skip)
    else:
        with reading(path), opened(path) as file:
            names = tuple(file.readline().decode("utf-8").strip().lower().split(","))
        table = read_table(path, NAMES, names=names, skip=1)
    for column, codes in AS_CODES.items():
        table[column] = table[column].replace(codes)
    return table


def _arff_header(path: Path) -> tuple[tuple[str, ...], int]:
    """Names of the attributes, lower-case, and the number of lines through @data."""
    names = []
    with reading(path), opened(path) as file:
        for number, line in enumerate(file, start=1):
            fields = line.decode("utf-8").split(maxsplit=2)
            keyword = fields[0].lower() if fields else ""
            if keyword == "@attribute" and len(fields) == 3:
                names.append(fields[1].strip("'\"").lower())
            elif keyword == "@data":
                return tuple(names), number
    raise ArgumentError(
        f"{path} has no line @data: it is no arff file, or was cut off; get it again"
    )


def generate(folder: Path, *, rows: int = 1_200, seed: int = 0) -> None:
    """Write dutch_census_2001.arff: occupations follow education, activity and sex."""
    folder = new_folder(folder, SOURCE.title)
    random = np.random.RandomState(seed)
    table = pd.DataFrame({column.name: random.choice(column.values, rows) for column in COLUMNS})
    table["sex"] = random.choice(SEXES, rows)
    score = (
        1.2 * (table["edu_level"].astype(int).clip(upper=5) - 3)
        + 1.0 * table["cur_eco_activity"].isin(["111", "137", "200"])
        + 1.0 * (table["sex"] == "1")
    )
    high = score + random.logistic(size=rows) > 0
    table["occupation"] = np.where(high, *reversed(OCCUPATIONS))
    domains = {column.name: column.values for column in COLUMNS}
    domains |= {"sex": SEXES, "occupation": OCCUPATIONS}
    published = {"marital_status": "Marital_status"}
    lines = ["@relation dutch_census_data", ""]
    lines += [
        f"@attribute {published.get(name, name)} {{{','.join(domains[name])}}}" for name in NAMES
    ]
    lines += [
        "",
        "@data",
        "",
        *(",".join(row) for row in table[list(NAMES)].itertuples(index=False)),
    ]
    (folder / FILES[0]).write_text("\n".join([*lines, ""]))
