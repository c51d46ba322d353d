"""Random small networks under the tracer, held against brute force.

`python -m tests.trace.fuzz N --seed S` runs as many as one likes.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trace.apart import APART, D, T
from tests.trace.coupled import COUPLED
from tests.trace.standalone import Traced, traced

B, CLASSES, DRAWS = 5, 3, 4
TOLERANCE = 1e-7


class Network(nn.Module):
    """A chain of steps, with a layer between some of them."""

    def __init__(self, steps: list) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(len(steps) + 1))
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.norm, self.group, self.batch = nn.LayerNorm(D), nn.GroupNorm(2, D), nn.BatchNorm1d(D)
        self.conv, self.table = nn.Conv1d(D, D, 3, padding=1), nn.Embedding(D, D)
        self.recurrent, self.first = nn.LSTM(D, D), nn.LSTM(D, D, batch_first=True)
        self.gated, self.cell = nn.GRU(D, D), nn.LSTMCell(D, D)
        self.positions = nn.Parameter(torch.randn(T, D))
        self.head = nn.Linear(D, CLASSES)
        self.register_buffer("running", torch.zeros(D))
        self.bank: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[-1](x)
        for k, step in enumerate(self.steps):
            h = step(self, h)
            if k % 2:
                h = torch.tanh(self.layers[k](h))
        return self.head(h.mean(1))


@dataclass
class Recipe:
    """A network, told by its seed: the names of its steps, and the loss's reduction."""

    seed: int
    names: list[str] = field(default_factory=list)
    reduction: str = "sum"
    planted: str = ""

    def network(self) -> Network:
        torch.manual_seed(self.seed)
        return Network(
            [(COUPLED if x.startswith("!") else APART)[x.lstrip("!")] for x in self.names]
        )


def recipe(seed: int) -> Recipe:
    """Half of them have a coupling."""
    rng = random.Random(seed)
    names = [rng.choice(list(APART)) for _ in range(rng.randint(1, 4))]
    planted = rng.choice(list(COUPLED)) if seed % 2 else ""
    if planted:
        names.insert(rng.randint(0, len(names)), f"!{planted}")
    return Recipe(seed, names, rng.choice(["sum", "mean"]), planted)


def losses(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def gradient(network: Network, x: Tensor, y: Tensor, only: int | None = None) -> Tensor:
    """Of the sum over samples, or of one sample's loss, in one vector."""
    torch.manual_seed(0)
    n = copy.deepcopy(network)
    of_each = losses(n(x), y)
    (of_each.sum() if only is None else of_each[only]).backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in n.parameters()]
    )


def differ(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) > TOLERANCE * (float(one.norm()) + 1e-12)


def follows_others(network: Network, x: Tensor, y: Tensor) -> bool:
    """The gradient of one sample's loss is another one beside other samples."""
    for i in range(B):
        own, mine = gradient(network, x, y, i), (torch.arange(B) == i)[:, None, None]
        for shift in (-2.0, 0.0, 2.0):
            others = torch.where(mine, x, torch.randn(B, T, D) * 3 + shift)
            if differ(own, gradient(network, others, y, i)):
                return True
    return False


def follows_rounding(network: Network, x: Tensor, y: Tensor) -> bool:
    """The largest of equal numbers, or what is divided by almost nothing: another one where numbers are
    rounded in another order, as they are in batches of another size.
    """
    own, moved = gradient(network, x, y), [x * (1 + 1e-12 * torch.randn_like(x)) for _ in range(8)]
    return any(differ(own, gradient(network, near, y)) for near in moved)


class Impossible(Exception):
    """A step does not take what the one before it has made."""


def is_coupled(network: Network) -> bool | None:
    """By brute force: an output moves with another sample, or gradients do not add up.

    Returns:
        None: the network does not run on single samples; or its gradients follow from rounding, and from
            no other sample.

    Raises:
        Impossible: it does not run at all.
    """
    torch.manual_seed(100)
    try:
        gradient(network, torch.randn(B, T, D), torch.randint(CLASSES, (B,)))
    except Exception as error:
        raise Impossible from error
    shown = 0
    for k in range(DRAWS):
        torch.manual_seed(100 + k)
        x, y = torch.randn(B, T, D) * (1 + 2 * (k % 2)), torch.randint(CLASSES, (B,))
        try:
            alone = sum(gradient(network, x[i : i + 1], y[i : i + 1]) for i in range(B))
        except Exception:
            return None
        shown += differ(alone, gradient(network, x, y))
        if shown > 1:
            return follows_others(network, x, y) or not follows_rounding(network, x, y) or None
        torch.manual_seed(0)
        first = copy.deepcopy(network)(x).detach()
        x[0] = torch.randn(T, D) * 3
        torch.manual_seed(0)
        second = copy.deepcopy(network)(x).detach()
        if float((first[1:] - second[1:]).abs().max()) > TOLERANCE:
            return True
    return None if shown else False


def trace(network: Network, reduction: str) -> Traced:
    torch.manual_seed(5)
    x, y = torch.randn(B, T, D), torch.randint(CLASSES, (B,))

    def step() -> Tensor:
        return getattr(losses(network(x), y), reduction)()

    return traced(network, step, [x, y])


def outcome(one: Recipe) -> tuple[str, str, Traced | None]:
    """(truth, verdict, report): truth is "coupled", "apart" or "unclear"."""
    torch.set_default_dtype(torch.float64)
    try:
        coupled = is_coupled(one.network())
        truth = "unclear" if coupled is None else "coupled" if coupled else "apart"
        if one.planted and truth == "apart":
            truth = "unclear"  # what is planted does not show in these draws
        if one.planted and coupled is None:
            truth = "coupled"
        try:
            found = trace(one.network(), one.reduction)
        except Exception:
            print(one, traceback.format_exc())
            return truth, "error", None
        return truth, found.verdict, found
    except Impossible:
        return "none", "impossible", None
    finally:
        torch.set_default_dtype(torch.float32)


def is_wrong(truth: str, verdict: str) -> bool:
    """A coupling that was accepted."""
    return truth == "coupled" and verdict in ("proven", "values")


def is_needless(truth: str, verdict: str) -> bool:
    """An error without need."""
    return verdict == "error" or (truth == "apart" and verdict == "coupled")


def main(arguments: list[str]) -> int:
    """Print what became of N networks; 1 if a coupling was accepted, or more than 2% were needless."""
    parser = argparse.ArgumentParser()
    parser.add_argument("networks", type=int, nargs="?", default=500)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--alone", action="store_true", help="every step by itself, instead")
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if told.seed is None else told.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"seed {seed}", flush=True)
    recipes = [recipe(s) for s in range(seed, seed + told.networks)]
    if told.alone:
        recipes = [Recipe(seed, [name]) for name in APART]
        recipes += [Recipe(seed, [f"!{name}"], "sum", name) for name in COUPLED]
    tally: Counter[str] = Counter()
    begun = time.process_time()
    for one in recipes:
        truth, verdict, found = outcome(one)
        tally[f"{truth}: {verdict}"] += 1
        if is_wrong(truth, verdict) or is_needless(truth, verdict):
            word = "ACCEPTED" if is_wrong(truth, verdict) else "needless"
            shown = found and (
                found.report.findings[:2],
                found.report.by_value[:2],
                found.report.probed,
            )
            print(word, one, shown, flush=True)
    for name, number in sorted(tally.items()):
        print(f"{name}: {number}")
    print(f"{time.process_time() - begun:.0f} CPU seconds")
    wrong = tally["coupled: proven"] + tally["coupled: values"]
    needless = tally["apart: coupled"] + sum(n for k, n in tally.items() if k.endswith("error"))
    return int(wrong > 0 or needless > 0.02 * sum(tally.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
