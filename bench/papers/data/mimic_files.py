"""The files of MIMIC-III 1.4 and what they are called."""

from __future__ import annotations

from bench.papers.data.source import Source

NOTES, ADMISSIONS, PATIENTS = "NOTEEVENTS.csv", "ADMISSIONS.csv", "PATIENTS.csv"
SOURCE = Source(
    "MIMIC-III",
    "PhysioNet, https://doi.org/10.13026/C2XW26",
    "PhysioNet Credentialed Health Data License 1.5.0, with its training and data use agreement",
    f"{NOTES}, {ADMISSIONS} and {PATIENTS} (.gz or not)",
)
COUNTS = {NOTES: 2_083_180, ADMISSIONS: 58_976, PATIENTS: 46_520}
"""Rows of version 1.4."""
SUMMARY, ADDENDUM = "Discharge summary", "Addendum"
"""A category of notes, and a description of some in it."""
