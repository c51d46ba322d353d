"""MIMIC-III (Johnson et al. 2016): how long does a stay last, from its discharge summary?

Prepared as van Aken et al. 2021 and Soleymani et al. (SoftAdaClip, appendix A.1) say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import codes_of
from bench.papers.data.mimic_files import (
    ADDENDUM,
    ADMISSIONS,
    COUNTS,
    NOTES,
    PATIENTS,
    SOURCE,
    SUMMARY,
)
from bench.papers.data.mimic_generated import generate
from bench.papers.data.notes import hashed, without_telling_sections
from bench.papers.data.source import check_count, is_synthetic
from bench.papers.data.splits import assembled, shares_of, split
from bench.papers.data.table import read_chunks
from fastclip.errors import ArgumentError, ArgumentTypeError

DAYS = (3, 7, 14)
CLASSES = ("up to 3 days", "4 to 7 days", "8 to 14 days", "over 14 days")
OLD = 65
"""The median age that the paper states for its other patients; written, not looked up in the rows."""
ATTRIBUTES = {
    "gender": ("female", "male"),
    "age": (f"below {OLD}", f"{OLD} and above"),
    "ethnicity": ("White", "non-White"),
}
__all__ = ["generate", "load"]
OF_ADMISSION = (
    *("SUBJECT_ID", "HADM_ID", "ADMITTIME", "DISCHTIME"),
    *("ADMISSION_TYPE", "ETHNICITY", "HOSPITAL_EXPIRE_FLAG"),
)
OF_PATIENT = ("SUBJECT_ID", "GENDER", "DOB")
OF_NOTE = ("ROW_ID", "HADM_ID", "CHARTDATE", "CATEGORY", "DESCRIPTION", "TEXT")
Tokenize = Callable[[list[str]], tuple[Tensor, Tensor]]


def load(
    folder: Path | None, *, seed: int = 0, tokenize: Tokenize = hashed, validation: float = 0.1
) -> Dataset:
    """70% of the patients to train, 10% to validate, 20% to test.

    Args:
        folder: has the three tables; NOTEEVENTS is read in pieces.
        seed: of the split.
        tokenize: of n texts the token ids [n, t] and their mask [n, t].
        validation: share of the validation part.

    Returns:
        Inputs (ids, mask); attributes "gender", "age" and "ethnicity".

    Raises:
        ArgumentError: files are missing, damaged, or do not belong together.
        ArgumentTypeError: `tokenize` returns something else.
    """
    shares = shares_of(0.2, validation)
    notes, admissions, patients = (
        SOURCE.find(folder, f"{name}.gz", name) for name in (NOTES, ADMISSIONS, PATIENTS)
    )
    synthetic = is_synthetic(folder)
    stays = _stays(admissions, patients, synthetic)
    texts = _texts(notes, set(stays["HADM_ID"]), synthetic)
    stays = stays[stays["HADM_ID"].isin(texts.index)]
    if stays.empty:
        raise ArgumentError(
            f"{notes} has no discharge summary of a stay of {admissions.name}: the files are of "
            "different versions, or cut off; get them again"
        )
    documents = [without_telling_sections(texts[stay]) for stay in stays["HADM_ID"]]
    x = tokenize(documents)
    if not isinstance(x, tuple) or len(x) != 2 or any(len(part) != len(stays) for part in x):
        raise ArgumentTypeError(
            f"tokenize must return a tuple (ids, mask) of two tensors with a row for each of the "
            f"{len(stays):,} texts; it returned {type(x).__name__}"
        )
    white = stays["ETHNICITY"].str.upper().str.startswith("WHITE").to_numpy(bool)
    return assembled(
        "mimic",
        x,
        torch.from_numpy(np.searchsorted(DAYS, stays["days"], side="left")),
        {
            "gender": torch.from_numpy(stays["gender"].to_numpy(copy=True)),
            "age": torch.from_numpy(stays["age"].to_numpy() >= OLD).long(),
            "ethnicity": torch.from_numpy(~white).long(),
        },
        split(np.arange(len(stays)), shares, seed=seed, units=stays["SUBJECT_ID"].to_numpy(str)),
        seed=seed,
        classes=CLASSES,
        attributes=ATTRIBUTES,
        synthetic=synthetic,
        notes=[
            "split by patient, so that nobody is in two parts: SoftAdaClip's paper does not say how",
            "an ethnicity that is not known counts as non-White",
        ],
    )


def _stays(admissions: Path, patients: Path, synthetic: bool) -> pd.DataFrame:
    """Admissions of people who were not born in them and left alive: days, age, gender, ethnicity."""
    stays = pd.concat(read_chunks(admissions, OF_ADMISSION))
    people = pd.concat(read_chunks(patients, OF_PATIENT))
    if not synthetic:
        check_count(str(admissions), len(stays), COUNTS[ADMISSIONS])
        check_count(str(patients), len(people), COUNTS[PATIENTS])
    alive = codes_of(stays["HOSPITAL_EXPIRE_FLAG"], ("0", "1"), admissions).numpy() == 0
    stays = stays[alive & (stays["ADMISSION_TYPE"] != "NEWBORN").to_numpy()]
    people = people.assign(gender=codes_of(people["GENDER"], ("F", "M"), patients).numpy())
    place = pd.Index(people["SUBJECT_ID"]).get_indexer(stays["SUBJECT_ID"])
    if (place < 0).any():
        raise ArgumentError(
            f"{patients} lacks the patient {stays['SUBJECT_ID'].iloc[int(np.argmax(place < 0))]} of "
            f"{admissions.name}: the files are of different versions, or cut off; get them again"
        )
    admitted, left = (_times(stays[name], admissions) for name in ("ADMITTIME", "DISCHTIME"))
    born = _times(people["DOB"], patients).iloc[place].set_axis(stays.index)
    had_birthday = (admitted.dt.month * 100 + admitted.dt.day) >= (
        born.dt.month * 100 + born.dt.day
    )
    return stays.assign(
        gender=people["gender"].iloc[place].to_numpy(),
        days=((left - admitted).dt.total_seconds() / 86_400).round(1),  # as van Aken et al. round
        age=admitted.dt.year - born.dt.year - (~had_birthday).astype(int),
    )


def _times(column: pd.Series, path: Path) -> pd.Series:
    times = pd.to_datetime(column, errors="coerce", format="%Y-%m-%d %H:%M:%S")
    if times.isna().any():
        at = int(np.argmax(times.isna()))
        raise ArgumentError(
            f"{path}, row {column.index[at] + 1}: {column.name} is {column.iloc[at]!r}, expected a time "
            "such as 2101-10-20 19:08:00"
        )
    return times


def _texts(path: Path, wanted: set[str], synthetic: bool) -> pd.Series:
    """The latest discharge summary of every wanted admission, and its addenda behind it."""
    kept, count = [], 0
    for chunk in read_chunks(path, OF_NOTE):
        count += len(chunk)
        summaries = chunk[(chunk["CATEGORY"] == SUMMARY) & chunk["HADM_ID"].isin(wanted)]
        kept.append(summaries[summaries["TEXT"].str.strip() != ""])
    if not synthetic:
        check_count(str(path), count, COUNTS[NOTES])
    notes = pd.concat(kept)
    notes = notes.assign(row=pd.to_numeric(notes["ROW_ID"], errors="coerce"))
    notes = notes.sort_values(["CHARTDATE", "row"]).drop_duplicates(
        ["HADM_ID", "TEXT"], keep="last"
    )
    addendum = notes["DESCRIPTION"] == ADDENDUM
    latest = notes[~addendum].drop_duplicates("HADM_ID", keep="last")
    return pd.concat([latest, notes[addendum]]).groupby("HADM_ID")["TEXT"].agg("\n\n".join)
