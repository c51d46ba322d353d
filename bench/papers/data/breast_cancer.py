"""The 569 Wisconsin diagnostic breast cancer rows that ship with scikit-learn: is a mass benign?

Source: Wolberg et al. 1995, UCI Machine Learning Repository, doi 10.24432/C5DW2B (CC BY 4.0).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench.papers.data.dataset import Dataset
from bench.papers.data.splits import assembled, shares_of, split

RADIUS = 13.4
"""Of a cell nucleus, in the images' units: a constant near the middle of the published table."""
CLASSES = ("malignant", "benign")
ATTRIBUTES = {"size": ("small nuclei", "large nuclei")}
RANGES = {  # of mean, standard error and worst, as scikit-learn's description has them, rounded outwards
    "radius": ((6.9, 28.2), (0.1, 2.9), (7.9, 36.1)),
    "texture": ((9.7, 39.3), (0.3, 4.9), (12.0, 49.6)),
    "perimeter": ((43.7, 188.5), (0.7, 22.0), (50.4, 251.2)),
    "area": ((143.5, 2501.0), (6.8, 542.2), (185.2, 4254.0)),
    "smoothness": ((0.052, 0.164), (0.001, 0.032), (0.071, 0.223)),
    "compactness": ((0.019, 0.346), (0.002, 0.136), (0.027, 1.058)),
    "concavity": ((0.0, 0.427), (0.0, 0.396), (0.0, 1.252)),
    "concave points": ((0.0, 0.202), (0.0, 0.053), (0.0, 0.291)),
    "symmetry": ((0.106, 0.304), (0.007, 0.079), (0.156, 0.664)),
    "fractal dimension": ((0.049, 0.098), (0.0008, 0.030), (0.055, 0.208)),
}


def load(folder: Path | None = None, *, seed: int = 0, validation: float = 0.0) -> Dataset:
    """80% to train and 20% to test of each class.

    Args:
        folder: not looked at: the data come with scikit-learn.
        seed: of the split.
        validation: share of a validation part, taken from the training part.

    Returns:
        Inputs float32 [n, 30], scaled to [0, 1] by written ranges; attribute "size".
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    low, high = (  # [30]: all means, then all errors, then all worst values
        np.array([ranges[moment][end] for moment in range(3) for ranges in RANGES.values()])
        for end in range(2)
    )
    x = torch.from_numpy((table.data - low) / (high - low)).float()
    labels = table.target.astype(np.int64)
    return assembled(
        "breast-cancer",
        (x,),
        torch.from_numpy(labels),
        {"size": torch.from_numpy(table.data[:, 0] >= RADIUS).long()},
        split(np.arange(len(labels)), shares_of(0.2, validation), seed=seed, strata=labels),
        seed=seed,
        classes=CLASSES,
        attributes=ATTRIBUTES,
        synthetic=False,
        notes=[
            f"size (mean radius below {RADIUS}, or not) is no demographic group: it stands in for one"
        ],
    )
