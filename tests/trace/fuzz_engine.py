"""The random networks of `tests.trace.fuzz`, trained by the engine: two private steps of unlike sizes.

`python -m tests.trace.fuzz_engine N --seed S` runs as many as one likes. What is coupled must end in an
error; what is accepted and draws nothing must sum up what samples give one at a time, clipped.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter

import torch
from torch import Tensor
from tqdm import tqdm

from fastclip.errors import FastclipError
from tests.oracle import make_private, summed
from tests.trace.fuzz import (
    CLASSES,
    B,
    D,
    Impossible,
    Network,
    Recipe,
    T,
    gradient,
    is_coupled,
    losses,
    recipe,
)

C, TOLERANCE = 0.5, 1e-7
SIZES = B, B - 1
ACCEPTED, REFUSED, INEXACT = "accepted", "error", "inexact"


def built(one: Recipe) -> Network:
    """A network whose BatchNorm does not learn from the batch, which no engine allows."""
    network = one.network()
    network.batch.requires_grad_(False).eval()
    return network


def clipped(network: Network, x: Tensor, y: Tensor) -> Tensor:
    """Sum of the samples' clipped gradients, in one vector."""
    own = [gradient(network, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    return torch.stack([g * min(1.0, C / float(g.norm())) if g.any() else g for g in own]).sum(0)


def draws(network: Network, x: Tensor) -> bool:
    """Whether a forward pass draws random numbers."""
    before = torch.get_rng_state()
    network(x)
    return not torch.equal(before, torch.get_rng_state())


def trained(one: Recipe) -> str:
    """What becomes of a network."""
    network, twin = built(one), built(one)
    torch.manual_seed(7)
    batches = [(torch.randn(n, T, D), torch.randint(CLASSES, (n,))) for n in SIZES]
    compared = not draws(built(one), batches[0][0])
    try:
        _, private, optimizer, _ = make_private(
            network, max_grad_norm=C, loss_reduction=one.reduction, lr=0.0, batch_size=B
        )
        for x, y in batches:
            torch.manual_seed(0)
            getattr(losses(private(x), y), one.reduction)().backward()
            if compared:
                held = summed(dict(network.named_parameters())).values()
                found, expected = torch.cat([v.flatten() for v in held]), clipped(twin, x, y)
                if float((found - expected).norm() / (expected.norm() + 1e-12)) > TOLERANCE:
                    return INEXACT
            optimizer.step()
            optimizer.zero_grad()
    except FastclipError:
        return REFUSED
    return ACCEPTED


def outcome(one: Recipe) -> tuple[str, str]:
    """(truth, what the engine did): truth is "coupled", "apart" or "unclear"."""
    torch.set_default_dtype(torch.float64)
    try:
        coupled = is_coupled(built(one))
        truth = "unclear" if coupled is None else "coupled" if coupled else "apart"
        return truth, trained(one)
    except Impossible:
        return "none", "impossible"
    finally:
        torch.set_default_dtype(torch.float32)


def is_wrong(truth: str, found: str) -> bool:
    """A coupling was accepted, or what is apart is not exact."""
    return (truth == "coupled" and found != REFUSED) or (truth == "apart" and found == INEXACT)


def main(arguments: list[str]) -> int:
    """Print what became of N networks; 1 if one of them is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("networks", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=None)
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if told.seed is None else told.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"seed {seed}", flush=True)
    tally: Counter[str] = Counter()
    begun, wrong = time.process_time(), 0
    for s in tqdm(range(seed, seed + told.networks), disable=None):
        one = recipe(s)
        truth, found = outcome(one)
        tally[f"{truth}: {found}"] += 1
        if is_wrong(truth, found):
            wrong += 1
            print("WRONG", truth, found, one, flush=True)
    for name, number in sorted(tally.items()):
        print(f"{name}: {number}")
    print(f"{time.process_time() - begun:.0f} CPU seconds")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
