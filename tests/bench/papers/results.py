"""Made-up results of experiments."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd


def run(
    strategy: str,
    seed: int,
    numbers: Mapping[tuple[str, str, str], float],
    *,
    epsilon: float | None = 3.0,
    experiment: str = "made-up",
    part: str = "test",
    step: int = 100,
) -> pd.DataFrame:
    """Rows of a run: values by attribute, group and measure."""
    rows = [
        {
            "experiment": experiment,
            "data": "none",
            "synthetic": False,
            "strategy": strategy,
            "epsilon": float("nan") if epsilon is None else epsilon,
            "seed": seed,
            "part": part,
            "step": step,
            "attribute": attribute,
            "group": group,
            "measure": measure,
            "value": value,
        }
        for (attribute, group, measure), value in numbers.items()
    ]
    return pd.DataFrame(rows)
