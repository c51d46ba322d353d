"""Command that plans a run: `python -m fastclip.plan --samples 60000 --epsilon 3 --epochs 10`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fastclip.errors import ArgumentError, FastclipError
from fastclip.plan.choices import SAMPLERS
from fastclip.plan.planned import MIN_STEPS, Plan, plan


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    command = argparse.ArgumentParser(
        prog="python -m fastclip.plan",
        description="Batch size, steps, noise multiplier and sampler of a private run, from the number "
        "of samples, the privacy budget, and epochs or compute.",
    )
    add_argument = command.add_argument
    add_argument("--samples", type=int, required=True, metavar="N",
                 help="size of the training set, in privacy units")  # fmt: skip
    add_argument("--epsilon", type=float, required=True, help="the privacy budget")
    add_argument("--delta", type=float, help="default: 1 / (10 N)")
    add_argument("--epochs", type=float, help="passes over the data")
    add_argument("--gpu-hours", type=float, metavar="H", help="compute instead of epochs")
    add_argument("--samples-per-second", type=float, metavar="S",
                 help="throughput of private training on one GPU, for --gpu-hours")  # fmt: skip
    add_argument("--unit-size", type=int, default=1, metavar="K",
                 help="samples per privacy unit (%(default)s); --samples then counts units")  # fmt: skip
    add_argument("--max-physical", type=int, metavar="B", help="samples that fit on the device")
    add_argument("--batch-size", type=int, nargs="+", metavar="B",
                 help="sizes to compare; default: powers of two")  # fmt: skip
    add_argument("--sampling", nargs="+", choices=SAMPLERS, default=SAMPLERS,
                 help="samplers to compare (all)")  # fmt: skip
    add_argument("--min-steps", type=int, default=MIN_STEPS, metavar="T",
                 help="fewest steps of the marked choice (%(default)s)")  # fmt: skip
    add_argument("--json", metavar="FILE", help="write the plan to this file")
    add_argument("--picture", metavar="FILE", help="draw the trade-off (matplotlib): .svg or .png")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Errors exit by SystemExit(2) with their message.

    Args:
        arguments: of the command line. None for those of the process.

    Returns:
        0.
    """
    command = parser()
    given = command.parse_args(arguments)
    try:
        found = plan(
            given.samples, given.epsilon, given.delta, epochs=given.epochs, gpu_hours=given.gpu_hours,
            samples_per_second=given.samples_per_second, unit_size=given.unit_size,
            max_physical=given.max_physical, batch_sizes=given.batch_size, sampling=given.sampling,
            min_steps=given.min_steps,
        )  # fmt: skip
        if given.json is not None:
            _write(found, given.json)
        if given.picture is not None:
            found.draw(given.picture)
    except FastclipError as error:
        command.error(str(error))
    print(f"{found}\n\nPaste this:\n\n{found.code()}", end="")
    if found.delta * found.samples >= 1:
        print(
            f"warning: delta = {found.delta:g} is at least 1 / N = {1 / found.samples:.3g}, so a run "
            "may publish one whole unit. Choose a smaller --delta.",
            file=sys.stderr,
        )
    return 0


def _write(found: Plan, path: str) -> None:
    """Write JSON.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(found.as_json(), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise ArgumentError(
            f"--json expects a file that can be written, got {path!r} ({error.strerror}). Choose "
            "another path."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
