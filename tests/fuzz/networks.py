"""One random network, trained for some steps: exact, refused, or silently wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastclip.errors import FastclipError
from tests.fuzz import uses
from tests.fuzz.parts import D, Later, Residual, apart, coupling, moved
from tests.oracle import (
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    summed,
)

STRENGTHS = (1.0, 0.3, 0.1, 1e-2, 1e-3)
SIZES = (1, 2, 3, 4, 6, 9)
TOLERANCE = 1e-9


class Network(nn.Module):
    """Parts in a row, a mean over the positions, a head."""

    def __init__(self, words: bool, parts: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(7, D) if words else nn.Linear(D, D)
        self.parts, self.head = nn.Sequential(*parts), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(self.words(x)).mean(1))


@dataclass
class Recipe:
    """What a network is made of, for the report of a failure."""

    seed: int
    parts: list[str] = field(default_factory=list)
    coupled: bool = False
    limited: bool = False
    """It may be refused, though its rows are apart."""
    sizes: list[int] = field(default_factory=list)
    words: bool = False
    t: int = 3
    zero_head: bool = False


def build(seed: int) -> tuple[Network, Recipe]:
    """A network and its recipe; half of all networks couple rows somewhere."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    recipe = Recipe(seed, words=draw.random() < 0.3, t=draw.choice([1, 2, 3, 4]))
    layers, used, parts = apart(recipe.t), uses.apart(recipe.t, draw), []
    for _ in range(draw.randint(1, 5)):
        kind = draw.choices([layers, used, moved()], [10, 10, 1])[0]
        name = draw.choice(sorted(kind))
        part = kind[name]()
        recipe.limited |= name in moved()
        name = repr(part) if kind is used and "\n" not in repr(part) else name
        if draw.random() < 0.3:
            part, name = Residual(part, draw.choice([None, 0.5, 1e-6])), f"residual {name}"
        parts.append(part)
        recipe.parts.append(name)
    recipe.coupled = draw.random() < 0.5
    if recipe.coupled:
        strength = draw.choice(STRENGTHS)
        bad = draw.choice([coupling, uses.coupling])(strength)
        name = draw.choice(sorted(bad))
        part, name = bad[name](), f"{name} x {strength}"
        hiding = draw.choice(["", "", "zero gate", "gate of 1e-6", "flag", "count"])
        if hiding in ("zero gate", "gate of 1e-6"):
            part = Residual(part, 0.0 if hiding == "zero gate" else 1e-6)
        elif hiding:
            part = Later(part, counts=hiding == "count")
        place = draw.randint(0, len(parts))
        parts.insert(place, part)
        recipe.parts.insert(place, f"[{name}, {hiding or 'open'}]")
    head = nn.Linear(D, 3)
    recipe.zero_head = draw.random() < 0.25
    if recipe.zero_head:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    recipe.sizes = [draw.choice(SIZES) for _ in range(3)]
    return Network(recipe.words, parts, head).double(), recipe


def inputs(recipe: Recipe, b: int) -> Tensor:
    """Rows of words or numbers."""
    if recipe.words:
        return torch.randint(7, (b, recipe.t))
    return torch.randn(b, recipe.t, D, dtype=torch.float64)


def outcome(seed: int) -> tuple[str, Recipe, str]:
    """ "exact", "refused", "wrong" or "crashed", with the recipe, and what was seen."""
    model, recipe = build(seed)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    C = 0.1
    try:
        _, private, optimizer, _ = make_private(model, max_grad_norm=C, lr=0.3)
        for step, b in enumerate(recipe.sizes):
            for module in model.modules():
                if isinstance(module, Later):
                    module.on = step > 0 and not module.counts
            x = inputs(recipe, b)
            grads = per_sample_gradients(_plain(model, recipe, step), x)
            optimizer.zero_grad()
            backward(private, x)
            expected, found = clipped_sum(grads, C), summed(params)
            # rows that are alone have nothing to be coupled with
            scale = max(C, float(norms(grads).max()))
            error = relative_error(optimizer.per_sample_norms, norms(grads))
            error = max(error, max(float((found[n] - expected[n]).norm()) for n in params) / scale)
            if not error <= TOLERANCE:
                return "wrong", recipe, f"step {step}: relative error {error:.2e}"
            optimizer.step()
    except FastclipError as error:
        return "refused", recipe, str(error)
    except Exception as error:
        return "crashed", recipe, f"{type(error).__name__}: {error}"
    return "exact", recipe, ""


def _plain(model: nn.Module, recipe: Recipe, step: int) -> nn.Module:
    """An ordinary copy, as it is now; however often it is called."""
    twin, _ = build(recipe.seed)
    twin.load_state_dict(model.state_dict())
    for module in twin.modules():
        if isinstance(module, Later):
            module.counts, module.on = False, step > 0
    return twin
