"""The numbers of the papers' tables, as printed, to be set beside results of one's own."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fastclip.errors import ArgumentError

FOLDER = Path(__file__).resolve().parent
PAPERS = {
    "softadaclip": "Soleymani, Dadsetan and Rudzicz: SoftAdaClip",
    "bounded": "Zhao, Rehn, Heikkilä, Tajeddine and Honkela 2025: bounded adaptive clipping",
    "sad_dpsgd": "Steps Adaptive Decay DPSGD (SAD-DPSGD), on HAM10000",
    "dpsgd_f": "Xu, Du and Wu 2020: DPSGD-F",
}
"""Names of the files, and what they were read from."""
WHOLE = ("table", "page")
REAL = ("epsilon", "delta", "value", "error")


def load(paper: str | None = None) -> pd.DataFrame:
    """The numbers of a paper, or of all.

    Args:
        paper: a name of PAPERS; None for all of them, one below the other.

    Returns:
        One row a number; README.md beside this file says what the columns mean. Text that does not
        apply is "", a number NaN (epsilon of a run without privacy), a table or page <NA>.

    Raises:
        ArgumentError: there is no such paper.
    """
    if paper is not None and paper not in PAPERS:
        raise ArgumentError(f"paper is one of {', '.join(PAPERS)}, or None for all, not {paper!r}")
    names = PAPERS if paper is None else (paper,)
    return pd.concat([_read(FOLDER / f"{name}.csv") for name in names], ignore_index=True)


def _read(path: Path) -> pd.DataFrame:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for name in (*WHOLE, *REAL):
        frame[name] = pd.to_numeric(frame[name])  # "" becomes NaN
    return frame.astype({**dict.fromkeys(WHOLE, "Int64"), **dict.fromkeys(REAL, float)})
