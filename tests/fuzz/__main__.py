"""`python -m tests.fuzz [networks] [first seed]`: as many random networks as one has time for."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch
from tqdm import tqdm

from tests.fuzz.networks import outcome


def main() -> int:
    """Print what became of them; 1 if a network was silently wrong, or refused without need."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told = [int(argument) for argument in sys.argv[1:]]
    count, first = (*told, *(1000, 0)[len(told) :])
    tally: Counter[str] = Counter()
    bad = 0
    for seed in tqdm(range(first, first + count), mininterval=5):
        result, recipe, seen = outcome(seed)
        kind = "coupled" if recipe.coupled else "apart, moved" if recipe.limited else "apart"
        tally[f"{kind}, {result}"] += 1
        if result in ("wrong", "crashed") or (result == "refused" and kind == "apart"):
            bad += 1
            tqdm.write(f"{result}: {recipe}\n  {seen}")
    for name, number in sorted(tally.items()):
        print(f"{name}: {number}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
