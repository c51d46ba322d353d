"""Discharge summaries: which sections stay, which notes of an admission count, and word numbers."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pandas as pd
import pytest
import torch

from bench.papers.data import mimic
from bench.papers.data.notes import hashed, without_telling_sections

NOTE = """Admission Date:  [**2151-7-16**]              Discharge Date:  [**2151-8-4**]

Service: MEDICINE
History of Present Illness:
Came with pain: mild.
Discharge Medications:
1. Aspirin. Sig: One
Disp:*30 Tablet(s)* Refills:*2*
Medications at home:
Heparin
Brief Hospital Course:
Did well.
Discharge Disposition:
Home With Service
Followup Instructions:
Call us
"""


def test_sections_that_tell_the_discharge_are_removed() -> None:
    text = without_telling_sections(NOTE)
    for word in ("2151-8-4", "Aspirin", "Disp", "Refills", "Heparin", "Home"):
        assert word not in text
    for word in ("2151-7-16", "MEDICINE", "pain: mild", "Did well", "Call us"):
        assert word in text


@pytest.mark.parametrize("text", ["", "  no header here\n", "sent home today"])
def test_notes_without_sections_stay(text: str) -> None:
    assert without_telling_sections(text) == text.strip()


def test_words_become_their_checksum() -> None:
    ids, mask = hashed(["Two words", "", "a b c d"], length=3, vocabulary=100)
    assert ids.shape == mask.shape == (3, 3)
    assert ids[0].tolist() == [1 + zlib.crc32(b"two") % 99, 1 + zlib.crc32(b"words") % 99, 0]
    assert mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert ids.max() < 100


def _write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)


@pytest.fixture
def stays(tmp_path: Path) -> Path:
    """Six stays: five patients who left alive, one of them twice, and a newborn and a death."""
    (tmp_path / "SYNTHETIC").touch()
    admissions = [  # patient, stay, from, to, type, died
        (1, 11, "2150-03-01 10:00:00", "2150-03-04 10:00:00", "EMERGENCY", 0),  # 3.0 days
        (1, 12, "2151-01-01 00:00:00", "2151-01-04 04:00:00", "URGENT", 0),  # 3.2
        (2, 21, "2150-01-01 00:00:00", "2150-01-15 00:00:00", "ELECTIVE", 0),  # 14.0
        (3, 31, "2150-01-01 00:00:00", "2150-01-16 00:00:00", "EMERGENCY", 0),  # 15.0
        (4, 41, "2150-01-01 00:00:00", "2150-01-02 00:00:00", "NEWBORN", 0),
        (5, 51, "2150-01-01 00:00:00", "2150-01-02 00:00:00", "EMERGENCY", 1),
        (6, 61, "2150-01-01 00:00:00", "2150-01-02 00:00:00", "EMERGENCY", 0),  # has no summary
        (7, 71, "2150-01-01 00:00:00", "2150-01-02 00:00:00", "EMERGENCY", 0),
        (8, 81, "2150-01-01 00:00:00", "2150-01-02 00:00:00", "EMERGENCY", 0),
    ]
    _write(
        tmp_path,
        "ADMISSIONS",
        [
            dict(zip(mimic.OF_ADMISSION, (p, s, a, b, kind, "WHITE - RUSSIAN", died), strict=True))
            for p, s, a, b, kind, died in admissions
        ],
    )
    births = ["2085-03-01", "1850-01-01", *["2120-06-01"] * 6]  # 65 on the day; over 89, as shifted
    _write(
        tmp_path,
        "PATIENTS",
        [
            {"SUBJECT_ID": number, "GENDER": "F", "DOB": f"{born} 00:00:00"}
            for number, born in enumerate(births, start=1)
        ],
    )
    notes = [  # stay, day, category, description, text
        (11, "2150-03-04", "Discharge summary", "Report", "latest"),
        (11, "2150-03-05", "Discharge summary", "Addendum", "added"),
        (11, "2150-03-03", "Discharge summary", "Report", "earlier"),
        (11, "2150-03-06", "Nursing", "Report", "nursing"),
        (12, "2151-01-04", "Discharge summary", "Report", "second"),
        *((stay, "2150-02-01", "Discharge summary", "Report", "text") for stay in (21, 31, 71, 81)),
        *((stay, "2150-02-01", "Discharge summary", "Report", "gone") for stay in (41, 51)),
        (61, "2150-02-01", "Discharge summary", "Report", "  "),
        ("", "2150-02-01", "Discharge summary", "Report", "of no stay"),
    ]
    _write(
        tmp_path,
        "NOTEEVENTS",
        [
            dict(zip(mimic.OF_NOTE, (row, *note), strict=True))
            for row, note in enumerate(notes, start=1)
        ],
    )
    return tmp_path


def test_stays_and_their_notes(stays: Path) -> None:
    seen = []

    def tokenize(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        seen.extend(texts)
        return hashed(texts)

    data = mimic.load(stays, tokenize=tokenize, validation=0.0)
    assert seen == ["latest\n\nadded", "second", "text", "text", "text", "text"]
    y = torch.cat([data.train.y, data.test.y])
    assert y.bincount().tolist() == [3, 1, 1, 1]  # 3.0, 1.0, 1.0; 3.2; 14.0; 15.0 days
    old = torch.cat([data.train.groups["age"], data.test.groups["age"]])
    assert old.sum() == 3  # both stays of the first patient, and the second patient
    white = torch.cat([data.train.groups["ethnicity"], data.test.groups["ethnicity"]])
    assert (white == 0).all()


def test_notes_of_other_stays(stays: Path) -> None:
    text = (stays / "NOTEEVENTS.csv").read_text().replace("Discharge summary", "Nursing")
    (stays / "NOTEEVENTS.csv").unlink()
    (stays / "NOTEEVENTS.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ValueError, match=r"has no discharge summary of a stay of ADMISSIONS\.csv"):
        mimic.load(stays)
