"""Small files of MIMIC-III's format: no patient is real, and no sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from bench.papers.data.mimic_files import ADDENDUM, ADMISSIONS, NOTES, PATIENTS, SOURCE, SUMMARY
from bench.papers.data.source import new_folder

COMPLAINTS = (  # words of short stays to words of long ones
    ("syncope", "observation", "biopsy", "stable"),
    ("pneumonia", "angina", "cellulitis", "improved"),
    ("bypass", "pancreatitis", "seizures", "drain"),
    ("sepsis", "ventilator", "tracheostomy", "dialysis"),
)
LASTING = ((0.5, 3.0), (3.2, 7.0), (7.2, 14.0), (14.5, 40.0))
"""Days of each class, from and to."""


def generate(folder: Path, *, rows: int = 300, seed: int = 0) -> None:
    """Write the three tables with `rows` admissions; a patient has up to a few.

    A fifth of the stays are of newborns or end in death, a tenth have an addendum, and there are notes
    of other categories. The words of a summary follow the length of the stay.
    """
    folder = new_folder(folder, SOURCE.title)
    random = np.random.RandomState(seed)
    subjects = np.sort(random.randint(1, rows * 3 // 4 + 2, rows))
    kinds = random.randint(0, len(COMPLAINTS), rows)
    admitted = pd.Timestamp("2130-01-01 08:00:00") + pd.to_timedelta(
        random.randint(0, 365 * 40, rows), unit="D"
    )
    days = np.array([random.uniform(*LASTING[kind]) for kind in kinds])
    left = admitted + pd.to_timedelta(np.rint(days * 1_440), unit="min")
    types = np.where(
        random.rand(rows) < 0.1, "NEWBORN", random.choice(["EMERGENCY", "ELECTIVE"], rows)
    )
    pd.DataFrame(
        {
            "ROW_ID": np.arange(1, rows + 1),
            "SUBJECT_ID": subjects,
            "HADM_ID": 100_000 + np.arange(rows),
            "ADMITTIME": admitted,
            "DISCHTIME": left,
            "ADMISSION_TYPE": types,
            "ETHNICITY": random.choice(
                ["WHITE", "BLACK/AFRICAN AMERICAN", "UNKNOWN/NOT SPECIFIED"], rows
            ),
            "HOSPITAL_EXPIRE_FLAG": (random.rand(rows) < 0.1).astype(int),
        }
    ).to_csv(folder / f"{ADMISSIONS}.gz", index=False)
    people = np.unique(subjects)
    born = pd.Timestamp("2040-01-01") + pd.to_timedelta(
        random.randint(0, 365 * 70, len(people)), "D"
    )
    pd.DataFrame(
        {
            "ROW_ID": np.arange(1, len(people) + 1),
            "SUBJECT_ID": people,
            "GENDER": random.choice(["F", "M"], len(people)),
            "DOB": born.strftime("%Y-%m-%d 00:00:00"),
        }
    ).to_csv(folder / f"{PATIENTS}.gz", index=False)
    notes = []
    for row, kind in enumerate(kinds):
        day = left[row].strftime("%Y-%m-%d")
        words = " ".join(random.choice(COMPLAINTS[kind], 6))
        report = (
            f"Admission Date:  [**{admitted[row]:%Y-%m-%d}**]       Discharge Date:  [**{day}**]\n\n"
            f"History of Present Illness:\nAdmitted with {words}.\n\n"
            "Discharge Medications:\n1. Aspirin 81 mg. Sig: One tablet.\n\n"
            "Discharge Disposition:\nHome\n"
        )
        notes.append((row, day, SUMMARY, "Report", report))
        if random.rand() < 0.1:
            notes.append((row, day, SUMMARY, ADDENDUM, f"Addendum: {words}.\n"))
        notes.append((row, day, "Nursing/other", "Report", "Slept well.\n"))
    table = pd.DataFrame(notes, columns=["row", "CHARTDATE", "CATEGORY", "DESCRIPTION", "TEXT"])
    table.insert(0, "HADM_ID", 100_000 + table.pop("row"))
    table.insert(0, "SUBJECT_ID", subjects[table["HADM_ID"] - 100_000])
    table.insert(0, "ROW_ID", np.arange(1, len(table) + 1))
    table.to_csv(folder / f"{NOTES}.gz", index=False)
