"""Adult (Census income, Becker and Kohavi 1996): does a person earn more than 50,000 dollars a year?

Both files are pooled and split anew, as Xu et al. 2020 and Soleymani et al. (SoftAdaClip) do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import Category, Number, codes_of, encoded, numbers_of, words
from bench.papers.data.reading import opened, reading
from bench.papers.data.source import Source, check_count, is_synthetic, new_folder
from bench.papers.data.splits import assembled, drawn, shares_of, split
from bench.papers.data.table import read_table, without_missing

SOURCE = Source(
    "Adult",
    "the UCI Machine Learning Repository, https://doi.org/10.24432/C5XW20",
    "CC BY 4.0",
    "adult.data and adult.test",
)
FILES = {"adult.data": 30_162, "adult.test": 15_060}
"""Rows without a missing value, as adult.names states them."""
SEXES = {"Female": 14_695, "Male": 30_527}
BALANCED = 14_000
"""Rows of each sex in the balanced data of Xu et al. 2020."""
MEDIAN_AGE = 37
"""Of the published extract: a constant, not looked up in the rows at hand."""
AGES = (17, 90)

NAMES = words(
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)
CLASSES = ("<=50K", ">50K")
ATTRIBUTES = {"sex": ("female", "male"), "age": ("below 38", "38 and above")}
RACES = ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")

COLUMNS = (  # domains of adult.names; ranges of the published extract
    Category(
        "workclass",
        words(
            "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
            "Never-worked"
        ),
    ),
    Category(
        "education",
        words(
            "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
            "Masters 1st-4th 10th Doctorate 5th-6th Preschool"
        ),
    ),
    Number("education-num", 1, 16),
    Category(
        "marital-status",
        words(
            "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
            "Married-AF-spouse"
        ),
    ),
    Category(
        "occupation",
        words(
            "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
            "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
            "Priv-house-serv Protective-serv Armed-Forces"
        ),
    ),
    Category(
        "relationship",
        ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    ),
    Category("race", ("White", "Non-White")),
    Number("capital-gain", 0, 99_999),
    Number("capital-loss", 0, 4_356),
    Number("hours-per-week", 1, 99),
    Category(
        "native-country",
        words(
            "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
            "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
            "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
            "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
            "Trinadad&Tobago Peru Hong Holand-Netherlands"
        ),
    ),
)
PROTECTED = (Number("age", *AGES), Category("sex", tuple(SEXES)))
NOTES = (
    "categories are not merged and no outliers are left out, so there are more inputs than the papers'",
    "age is split at 38: 37 is the median of the published extract",
)


def load(
    folder: Path | None,
    *,
    seed: int = 0,
    balanced: bool = False,
    validation: float = 0.0,
    protected: bool = False,
) -> Dataset:
    """Adult, 80% to train and 20% to test (both the same of each class).

    Args:
        folder: has adult.data and adult.test, as published or with a header.
        seed: of the split, and of the balanced draw before it.
        balanced: draw 14,000 rows of each sex first (of generated files: as many as there are of both).
        validation: share of a validation part, taken from the training part (SoftAdaClip: 0.1).
        protected: give sex and age to the model, too.

    Returns:
        Inputs float32 [n, d] in [0, 1]; attributes "sex" and "age".

    Raises:
        ArgumentError: files are missing, damaged, or not the published ones.
    """
    shares = shares_of(0.2, validation)
    synthetic = is_synthetic(folder)
    tables = [_read(SOURCE.find(folder, name), synthetic) for name in FILES]
    x, y, sex, age = (torch.cat(parts) for parts in zip(*map(_tensors, tables), strict=True))
    if not synthetic:
        for code, (name, expected) in enumerate(SEXES.items()):
            check_count(f"Adult, {name}", int((sex == code).sum()), expected)
    if not protected:
        x = x[:, : -1 - len(SEXES)]
    rows = np.arange(len(y))
    if balanced:
        each = min(BALANCED, *(int((sex == code).sum()) for code in range(2)))
        rows = np.concatenate(
            [drawn(rows[sex.numpy() == code], each, seed=seed + code) for code in range(2)]
        )
    return assembled(
        "adult",
        (x,),
        y,
        {"sex": sex, "age": age},
        split(rows, shares, seed=seed, strata=y.numpy()[rows]),
        seed=seed,
        classes=CLASSES,
        attributes=ATTRIBUTES,
        synthetic=synthetic,
        notes=NOTES
        if protected
        else (*NOTES, "relationship names husbands and wives, and so often sex"),
    )


def _read(path: Path, synthetic: bool) -> tuple[pd.DataFrame, Path]:
    """The rows of a file that miss nothing."""
    with reading(path), opened(path) as file:
        first = file.readline().decode("utf-8")
    header = first.split(",")[0].strip() == NAMES[0]
    remark = first.startswith("|")  # the published adult.test: "|1x3 Cross validator"
    table = read_table(path, NAMES, names=None if header else NAMES, skip=int(remark))
    table = without_missing(table)
    if not synthetic:
        check_count(f"{path}, without missing values", len(table), FILES[path.name])
    return table, path


def _tensors(read: tuple[pd.DataFrame, Path]) -> tuple[torch.Tensor, ...]:
    """Inputs with age and sex last, classes, and groups by sex and age."""
    table, path = read
    table = table.assign(income=table["income"].str.removesuffix("."))
    codes_of(table["race"], RACES, path)  # a word that is none of them is an error, not a group
    table["race"] = np.where(table["race"] == "White", "White", "Non-White")
    return (
        encoded(table, (*COLUMNS, *PROTECTED), path),
        codes_of(table["income"], CLASSES, path),
        codes_of(table["sex"], tuple(SEXES), path),
        torch.from_numpy(numbers_of(table["age"], path, *AGES) > MEDIAN_AGE).long(),
    )


def generate(folder: Path, *, rows: int = 1_200, seed: int = 0) -> None:
    """Write adult.data and adult.test as published, with `rows` rows in both together.

    Incomes follow education, hours, age and marriage; men are more, and earn more.
    """
    folder = new_folder(folder, SOURCE.title)
    random = np.random.RandomState(seed)
    table = pd.DataFrame({"age": random.randint(17, 91, rows)})
    for column in COLUMNS:
        if isinstance(column, Category):
            table[column.name] = random.choice(column.values, rows)
        else:
            table[column.name] = random.randint(int(column.low), int(column.high) + 1, rows)
    table["fnlwgt"] = random.randint(10_000, 1_000_000, rows)
    table["race"] = random.choice(RACES, rows, p=[0.8, 0.05, 0.05, 0.05, 0.05])
    table["sex"] = random.choice(tuple(SEXES), rows, p=[1 / 3, 2 / 3])
    for name in ("capital-gain", "capital-loss"):
        table[name] *= random.rand(rows) < 0.05
    score = (
        0.5 * (table["education-num"] - 8.5)
        + 0.06 * (table["hours-per-week"] - 50)
        + 0.02 * (table["age"] - 50)
        + 1.5 * (table["marital-status"] == "Married-civ-spouse")
        + 1.0 * (table["sex"] == "Male")
        - 2.0
    )
    rich = score + random.logistic(size=rows) > 0
    table.loc[random.rand(rows) < 0.05, "workclass"] = "?"
    table["income"] = np.where(rich, *reversed(CLASSES))
    lines = [", ".join(map(str, row)) for row in table[list(NAMES)].itertuples(index=False)]
    cut = rows * 2 // 3
    (folder / "adult.data").write_text("\n".join([*lines[:cut], ""]))
    tests = [f"{line}." for line in lines[cut:]]
    (folder / "adult.test").write_text("\n".join(["|1x3 Cross validator", *tests, ""]))
