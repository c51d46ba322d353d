"""What the last wave of each clipped sum wastes, and what one launch for layers of one shape would save.

    python -m bench.kernels.waves

Computed, not measured: steps that a GPU of `--cores` multiprocessors takes one after the other for the
sums of a model's linear layers, each layer in its own launch (`scaled_sum`) or up to 12 of one shape in
one (`scaled_sums`), over the steps that would keep every multiprocessor busy to the end. A step is a
tile of 128 rows, 128 columns and 128 positions of one sample, or 64 of a shorter one. Launches cost
nothing here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fastclip.ops.triton.runtime import STORE, cost, next_power_of_2, splits_of

SIDE = LONGEST = 128
SHORT = 64
"""Positions of a step where samples have no more."""


@dataclass(frozen=True)
class Model:
    """Linear layers (outputs, inputs, how many) at a batch of b samples of t positions."""

    name: str
    b: int
    t: int
    layers: tuple[tuple[int, int, int], ...]


BERT = ((768, 768, 48), (3072, 768, 12), (768, 3072, 12))
MODELS = (
    Model("BERT-base, T = 128, batch 256", 256, 128, BERT),
    Model("BERT-base, T = 512, batch 64", 64, 512, BERT),
    Model(
        "GPT-2, T = 1024, batch 16", 16, 1024,
        ((2304, 768, 12), (768, 768, 12), (3072, 768, 12), (768, 3072, 12), (50257, 768, 1)),
    ),
    Model("ViT-B, 197 positions, batch 128", 128, 197, BERT),
)  # fmt: skip


def work(model: Model, outputs: int, inputs: int) -> tuple[int, int, int]:
    """Tiles of a layer's sum, steps of each, and steps that a part's own sum costs."""
    tiles = -(-outputs // SIDE) * -(-inputs // SIDE)
    positions = LONGEST if next_power_of_2(model.t) >= LONGEST else SHORT
    return tiles, model.b * -(-model.t // positions), STORE * SHORT // positions


def taken(model: Model, cores: int) -> tuple[float, float]:
    """Steps one after the other: each layer in its own launch, and with no multiprocessor ever idle."""
    now = ideal = 0.0
    for outputs, inputs, count in model.layers:
        tiles, steps, store = work(model, outputs, inputs)
        now += count * cost(splits_of(tiles, steps, cores, store), tiles, steps, cores, store)
        ideal += count * tiles * steps / cores
    return now, ideal


def grouped(model: Model, cores: int, most: int) -> float:
    """The same in launches of at most so many layers of one shape, cut together."""
    total = 0.0
    for outputs, inputs, count in model.layers:
        tiles, steps, store = work(model, outputs, inputs)
        while count:
            together = min(most, count)
            all_tiles = tiles * together
            splits = splits_of(all_tiles, steps, cores, store)
            total += cost(splits, all_tiles, steps, cores, store)
            count -= together
    return total


def table(cores: int) -> str:
    """A line for each model: what is lost beyond the ideal, alone and in groups."""
    lines = [f"{'lost beyond full waves':<34}{'alone':>8}{'of 4':>8}{'of 12':>8}"]
    for model in MODELS:
        now, ideal = taken(model, cores)
        lost = (now, grouped(model, cores, 4), grouped(model, cores, 12))
        lines.append(f"{model.name:<34}" + "".join(f"{each / ideal - 1:>8.1%}" for each in lost))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.waves", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--cores", type=int, default=132, help="multiprocessors (H100 and H200: 132)"
    )
    print(table(parser.parse_args(arguments).cores))


if __name__ == "__main__":
    main()
