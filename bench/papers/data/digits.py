"""The 1,797 handwritten digits that ship with scikit-learn, class 8 made rare: MNIST in small.

Source: Alpaydin and Kaynak 1998, UCI Machine Learning Repository (CC BY 4.0).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench.papers.data.dataset import Dataset
from bench.papers.data.splits import assembled, shares_of, split, with_fewer

REDUCED = 8
KEPT = 0.1
HIGHEST = 16
"""Each pixel counts the set bits of a 4 x 4 block."""
CLASSES = tuple("0123456789")


def load(folder: Path | None = None, *, seed: int = 0) -> Dataset:
    """80% to train and 20% to test of each class; of class 8, a tenth of its training rows stays.

    Args:
        folder: not looked at: the data come with scikit-learn.
        seed: of the split and of the rows that class 8 keeps.

    Returns:
        Inputs float32 [n, 1, 8, 8] in [0, 1]; attribute "class".
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    parts = split(np.arange(len(labels)), shares_of(0.2), seed=seed, strata=labels)
    parts["train"] = with_fewer(parts["train"], labels, REDUCED, KEPT, seed=seed)
    y = torch.from_numpy(labels)
    return assembled(
        "digits",
        (torch.from_numpy(digits.images[:, None]).float() / HIGHEST,),
        y,
        {"class": y},
        parts,
        seed=seed,
        classes=CLASSES,
        attributes={"class": CLASSES},
        synthetic=False,
        notes=[
            f"class {REDUCED} keeps {int((labels[parts['train']] == REDUCED).sum())} training rows"
        ],
    )
