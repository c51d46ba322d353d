"""GOSSIS-1-eICU (Raffa et al. 2022): who dies in hospital?

Prepared as Soleymani et al. (SoftAdaClip, appendix A.2) say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import codes_of, encoded, fitted, numbers_of
from bench.papers.data.source import Source, is_synthetic, new_folder
from bench.papers.data.splits import assembled, drawn, shares_of, split
from bench.papers.data.table import read_chunks, read_table, without_missing
from fastclip.errors import ArgumentError

READY, RAW = "gossis-1-eicu-only-model-ready.csv", "gossis-1-eicu-only.csv"
SOURCE = Source(
    "GOSSIS-1-eICU",
    "PhysioNet, https://doi.org/10.13026/gbmg-a531",
    "PhysioNet Credentialed Health Data License 1.5.0, with its training and data use agreement",
    f"{READY}.gz and {RAW}.gz",
)
KEY = "encounter_id"
DEATHS = 11_817
"""In the paper, after its filters: as many survivors are drawn."""
OLD = 65
OUTCOMES = ("hospital_death", "icu_death")
IDENTIFIERS = (
    *(KEY, "patientunitstayid", "patient_id", "hospital_id", "hospitalid", "icu_id"),
    "partition",
)
LATER = ("hospital_los_days", "icu_los_days", *OUTCOMES)
"""Known only at the end of the stay."""
LEFT_OUT = frozenset((*IDENTIFIERS, *LATER, "gender", "age", "ethnicity"))
MISSING = ("", "NA", "NaN")
CLASSES = ("survived", "died")
ATTRIBUTES = {
    "gender": ("female", "male", "unknown"),
    "age": (f"below {OLD}", f"{OLD} and above"),
}


def load(folder: Path | None, *, seed: int = 0, validation: float = 0.1) -> Dataset:
    """As many survivors as deaths, 70% to train, 10% to validate, 20% to test, of each class.

    Args:
        folder: has both files, gzip-compressed or not.
        seed: of the draw of survivors and of the split.
        validation: share of the validation part.

    Returns:
        Inputs float32 [n, d] in [0, 1]; attributes "gender" and "age", neither among the inputs.

    Raises:
        ArgumentError: files are missing or damaged, or do not belong together.
    """
    shares = shares_of(0.2, validation)
    path, synthetic = SOURCE.find(folder, f"{READY}.gz", READY), is_synthetic(folder)
    raw_path = SOURCE.find(folder, f"{RAW}.gz", RAW)
    table = without_missing(read_table(path, (KEY, *OUTCOMES), all_columns=True), MISSING)
    died, in_icu = (codes_of(table[name], ("0", "1"), path).numpy() for name in OUTCOMES)
    table = table[(died == 1) | (in_icu == 0)]  # who dies in the unit dies in the hospital
    people = _people(raw_path, table[KEY], path)
    table, people = (frame[(people["age"] != "").to_numpy()] for frame in (table, people))
    y = codes_of(table["hospital_death"], ("0", "1"), path)
    deaths = int(y.sum())
    rows = np.arange(len(y))
    survivors = drawn(rows[y.numpy() == 0], deaths, seed=seed)
    parts = split(
        np.concatenate([survivors, rows[y.numpy() == 1]]),
        shares,
        seed=seed,
        strata=np.repeat([0, 1], [len(survivors), deaths]),
    )
    inputs = table[[name for name in table.columns if name not in LEFT_OUT]]
    notes = ["scaled by ranges and words of the training rows, which epsilon does not cover"]
    if not synthetic and deaths != DEATHS:
        notes.append(f"{deaths:,} deaths remain, where the paper has {DEATHS:,}")
    return assembled(
        "gossis",
        (encoded(inputs, fitted(inputs.iloc[parts["train"]]), path),),
        y,
        {
            "gender": codes_of(people["gender"], ("f", "m", "u"), raw_path),
            "age": torch.from_numpy(numbers_of(people["age"], raw_path, 0, 120) >= OLD).long(),
        },
        parts,
        seed=seed,
        classes=CLASSES,
        attributes=ATTRIBUTES,
        synthetic=synthetic,
        notes=notes,
    )


def _people(path: Path, wanted: pd.Series, ready: Path) -> pd.DataFrame:
    """Age and gender (f, m, or u for unknown) of the wanted stays, in their order.

    Where gender is missing the paper keeps the row: its men and women are 14 fewer than its rows.
    """
    raw = pd.concat(read_chunks(path, (KEY, "age", "gender")))
    for name, keys, of in ((path.name, raw[KEY], path), (ready.name, wanted, ready)):
        if keys.duplicated().any():
            twice = keys[keys.duplicated()].iloc[0]
            raise ArgumentError(f"{of}: the {KEY} {twice} occurs twice; get {name} again")
    found = raw.set_index(KEY).index.get_indexer(wanted)
    if (found < 0).any():
        raise ArgumentError(
            f"{path} lacks {int((found < 0).sum()):,} of the stays of {ready.name}, the first of them "
            f"{KEY} {wanted.iloc[int(np.argmax(found < 0))]}: the files are of different versions"
        )
    people = raw.iloc[found]
    letters = people["gender"].str.lower().str[:1]
    return pd.DataFrame(
        {
            "age": people["age"].where(~people["age"].isin(MISSING), ""),
            "gender": letters.where(letters.isin(["f", "m"]), "u"),
        }
    )


def generate(folder: Path, *, rows: int = 1_200, seed: int = 0) -> None:
    """Write both files: deaths follow lactate, heart rate and age."""
    folder = new_folder(folder, SOURCE.title)
    random = np.random.RandomState(seed)
    age = random.randint(16, 90, rows)
    table = pd.DataFrame(
        {
            KEY: np.arange(1, rows + 1),
            "patientunitstayid": 100_000 + np.arange(rows),
            "partition": random.choice(["training", "test"], rows),
            "d1_heartrate_avg": random.normal(90, 18, rows).round(1),
            "d1_sysbp_avg": random.normal(120, 20, rows).round(1),
            "d1_lactate_avg": random.gamma(2, 1.2, rows).round(2),
            "ventilated_apache": random.randint(0, 2, rows),
            "icu_admit_source": random.choice(
                ["Floor", "Operating Room / Recovery", "Other ICU"], rows
            ),
            "group": random.choice(["Sepsis", "Trauma", "Cardiac"], rows),
        }
    )
    score = (
        0.9 * (table["d1_lactate_avg"] - 2.4)
        + 0.04 * (table["d1_heartrate_avg"] - 90)
        + 0.03 * (age - 60)
        + 0.8 * (table["group"] == "Sepsis")
        - 1.0
    )
    died = (score + random.logistic(size=rows) > 0).astype(int)
    table["hospital_death"] = died
    table["icu_death"] = np.where(random.rand(rows) < 0.02, 1, died * random.randint(0, 2, rows))
    people = pd.DataFrame(
        {
            KEY: table[KEY],
            "patient_id": 1 + np.arange(rows),
            "hospital_id": random.randint(1, 20, rows),
            "icu_id": random.randint(1, 40, rows),
            "age": age,
            "gender": random.choice(["F", "M", ""], rows, p=[0.45, 0.54, 0.01]),
            "ethnicity": random.choice(["Caucasian", "African American", "Other/Unknown"], rows),
        }
    )
    table["d1_lactate_avg"] = table["d1_lactate_avg"].mask(random.rand(rows) < 0.03)
    table.to_csv(folder / f"{READY}.gz", index=False, na_rep="NA")
    people.to_csv(folder / f"{RAW}.gz", index=False)
