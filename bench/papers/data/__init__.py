"""Data sets of the papers, read from a folder that the user names, or generated."""

from __future__ import annotations

from types import ModuleType

from bench.papers.data import (
    adult,
    breast_cancer,
    celeba,
    digits,
    dutch,
    gossis,
    ham10000,
    mimic,
    mnist,
)

DATA_SETS: dict[str, ModuleType] = {
    "adult": adult,
    "breast-cancer": breast_cancer,
    "celeba": celeba,
    "digits": digits,
    "dutch": dutch,
    "gossis": gossis,
    "ham10000": ham10000,
    "mimic": mimic,
    "mnist": mnist,
}
"""Each has `load(folder, *, seed, ...)`; those that read files, `generate(folder, *, rows, seed)`."""
