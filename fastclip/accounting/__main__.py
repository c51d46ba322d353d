"""Command for the forecast of a private run: `python -m fastclip.accounting --samples 60000 ...`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.attack import PRIORS, RATES, Attack, in_words, strongest_attack
from fastclip.accounting.calibration import find_noise_multiplier, planned_steps
from fastclip.accounting.epsilon import history
from fastclip.accounting.forecast import Forecast, forecast, table
from fastclip.accounting.steps import Rate, TruncatedPoisson, probability
from fastclip.accounting.tuning import Poisson, Trials, TruncatedNegativeBinomial
from fastclip.clipping.schedules import (
    ConstantNoise,
    ExponentialNoise,
    LinearNoise,
    NoiseSchedule,
    StagedNoise,
    StepNoise,
    TimeNoise,
)
from fastclip.core.checks import positive, whole
from fastclip.errors import ArgumentError, FastclipError

# Each schedule's class, and its options as (command-line name, keyword of the class).
SCHEDULES: dict[str, tuple[Callable[..., NoiseSchedule], dict[str, str]]] = {
    "constant": (ConstantNoise, {}),
    "staged": (
        StagedNoise,
        {"stages": "stages", "noise_decay": "decay", "length_decay": "length_decay"},
    ),
    "step": (StepNoise, {"stages": "stages", "noise_decay": "decay"}),
    "linear": (LinearNoise, {"stages": "stages", "final_noise": "final"}),
    "exponential": (ExponentialNoise, {"stages": "stages", "rate": "rate"}),
    "time": (TimeNoise, {"stages": "stages", "rate": "rate"}),
}
SCHEDULE_OPTIONS = ("stages", "noise_decay", "length_decay", "final_noise", "rate")
STAGES = 3


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    command = argparse.ArgumentParser(
        prog="python -m fastclip.accounting",
        description="Noise and epsilon of a planned private run, stage by stage. The sample rate "
        "is q = B / N; a training loop under Opacus' data loader has q = 1 / len(loader) = "
        "1 / ceil(N / B), a little more or less.",
    )
    add = command.add_argument
    add("--samples", type=int, required=True, metavar="N", help="size of the training set")
    add("--batch-size", type=int, required=True, metavar="B", help="expected logical batch size")
    add(
        "--max-batch-size",
        type=int,
        metavar="M",
        help="larger sampled batches are truncated to M random samples; needs --accountant pld",
    )
    add(
        "--allocation",
        type=int,
        metavar="K",
        help="random allocation instead of Poisson sampling: each sample is in exactly K batches of "
        "an epoch of K / q steps; needs --accountant prv or pld",
    )
    length = command.add_mutually_exclusive_group(required=True)
    length.add_argument(
        "--epochs",
        type=float,
        help="length as passes of 1 / q steps, or of K / q steps with --allocation K",
    )
    length.add_argument("--steps", type=int, help="length in real steps")
    add(
        "--delta",
        "--target-delta",
        type=float,
        help="default: 1 / (10 N); it should stay well below 1 / N",
    )
    budget = command.add_mutually_exclusive_group(required=True)
    budget.add_argument("--noise-multiplier", type=float, help="total sigma of the first step")
    budget.add_argument(
        "--epsilon",
        "--target-epsilon",
        type=float,
        help="target: solves for the first step's sigma",
    )
    add(
        "--accountant",
        choices=("prv", "pld", "rdp", "gdp"),
        default="prv",
        help="accountant of the total and the target (%(default)s)",
    )
    _add_schedule(add)
    _add_questions(add)
    return command  # fmt: skip


def _add_schedule(add: Callable[..., Any]) -> None:
    """Add the arguments for the noise of each step."""
    add("--schedule", choices=SCHEDULES, default="constant", help="noise schedule (%(default)s)")
    add("--stages", type=int, help=f"for any schedule except the constant one ({STAGES})")
    add("--noise-decay", type=float, help="for staged and step")
    add("--length-decay", type=float, help="for staged")
    add("--final-noise", type=float, help="for linear: last sigma / first sigma")
    add("--rate", type=float, help="for exponential and time")
    add(
        "--count-noise-ratio",
        type=float,
        metavar="R",
        help="sigma of counts / sigma of gradients, for a strategy that counts (adaptive clipping)",
    )


def _add_questions(add: Callable[..., Any]) -> None:
    """Add the arguments for a hyperparameter search, an attack, and the form of the output."""
    add("--trials", type=float, metavar="MEAN", help="expected number of runs of a private search")
    add(
        "--trials-distribution",
        choices=("tnb", "poisson"),
        help="distribution of their number: truncated negative binomial (default) or Poisson",
    )
    add("--eta", type=float, help="shape of tnb: 0 logarithmic (default), 1 geometric")
    add(
        "--attack",
        type=float,
        nargs="*",
        metavar="RATE",
        help="bounds on any attack, from the trade-off curve: membership advantage, reconstruction, mu "
        "of Gaussian DP, and true-positive rates at these false-positive rates "
        f"({' '.join(f'{rate:g}' for rate in RATES)})",
    )
    add(
        "--priors",
        type=float,
        nargs="+",
        metavar="P",
        help="probabilities of guessing a sample without the model, for the bound on reconstruction "
        f"({' '.join(f'{prior:g}' for prior in PRIORS)}), implies --attack",
    )
    add(
        "--picture",
        metavar="FILE",
        help="plot the trade-off curve as PNG, SVG or PDF (matplotlib), implies --attack",
    )
    add("--json", action="store_true", help="print JSON")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Errors exit by SystemExit(2) with their message.

    Args:
        argv: arguments. None for those of the process.

    Returns:
        0.
    """
    command = parser()
    given = command.parse_args(argv)
    try:
        rate = _rate(given)
        delta = 1 / (10 * given.samples) if given.delta is None else given.delta
        planned, best = _answer(given, rate, delta)
        if given.picture is not None and best is not None:
            title = f"epsilon {planned.epsilon:.3g} at delta {delta:.2g} ({given.accountant})"
            _save(best.plot(title), given.picture)
    except FastclipError as error:
        command.error(str(error))
    if delta >= 1 / given.samples:
        print(
            f"warning: delta = {delta:g} is at least 1 / N = {1 / given.samples:.3g}, so a run may "
            "publish one whole sample. Choose a smaller --delta.",
            file=sys.stderr,
        )
    if given.json:
        attack = best.as_json() if best else None
        print(json.dumps({**planned.as_json(), "attack": attack}, indent=2, allow_nan=False))
        return 0
    cut = "" if given.max_batch_size is None else f", at most {given.max_batch_size} samples"
    sizes = f"N = {given.samples}, B = {given.batch_size}{cut}"
    print(f"{sizes}, q = B / N = {probability(rate):.6g}", end="")
    print(f" (Opacus' loader: 1 / {math.ceil(given.samples / given.batch_size)})\n")
    print(table(planned))
    if best:
        print("\n" + in_words(best))
    return 0


def _rate(given: argparse.Namespace) -> Rate:
    """Return the sampling rate q = B / N, of sampled batches that may be truncated."""
    samples = whole("--samples", given.samples, 1)
    batch = whole("--batch-size", given.batch_size, 1)
    if batch > samples:
        raise ArgumentError(f"--batch-size expects at most --samples = {samples}, got {batch}.")
    if given.allocation is not None:
        return _allocation(given, samples / batch)
    if given.max_batch_size is None:
        return batch / samples
    most = whole("--max-batch-size", given.max_batch_size, 1)
    cut = TruncatedPoisson(batch / samples, samples, most)
    if given.trials is not None:
        raise ArgumentError(
            "--trials computes the cost of a search from Renyi divergences, and none is known for "
            "truncated batches. Omit --max-batch-size.",
            doc="unsupported-options",
        )
    return cut


def _allocation(given: argparse.Namespace, pass_: float) -> RandomAllocation:
    """Return the random allocation of an epoch, for 1 / q steps of a pass."""
    times = whole("--allocation", given.allocation, 1)
    for option in ("max_batch_size", "trials"):
        if getattr(given, option) is not None:
            raise ArgumentError(
                f"--{option.replace('_', '-')} and --allocation together have no known accounting. Omit "
                "one of them.",
                doc="unsupported-options",
            )
    return RandomAllocation(max(times, round(times * pass_)), times)


def _answer(given: argparse.Namespace, rate: Rate, delta: float) -> tuple[Forecast, Attack | None]:
    """Return the planned run, and the bounds on an attack if they are requested."""
    steps = planned_steps(rate, given.epochs, given.steps)
    schedule, trials = _schedule(given, steps), _trials(given)
    if given.epsilon is None:
        sigma = positive("--noise-multiplier", given.noise_multiplier)
    else:
        sigma = find_noise_multiplier(
            target_epsilon=given.epsilon, target_delta=delta, sample_rate=rate, steps=steps,
            schedule=schedule, accountant=given.accountant,
        )  # fmt: skip
    planned = forecast(
        schedule, sigma, rate, steps, delta, accountant=given.accountant,
        count_noise_ratio=given.count_noise_ratio, trials=trials,
    )  # fmt: skip
    if given.attack is None and given.priors is None and given.picture is None:
        return planned, None
    entries = history(schedule, sigma, rate, steps)
    return planned, strongest_attack(
        entries, delta, given.attack or RATES, priors=given.priors or PRIORS
    )


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--picture expects a file that can be written, such as attack.png, got {path!r} "
            f"({str(error).splitlines()[0].rstrip('.')})."
        ) from error


def _schedule(given: argparse.Namespace, steps: int) -> NoiseSchedule:
    build, options = SCHEDULES[given.schedule]
    for name in SCHEDULE_OPTIONS:
        if name not in options and getattr(given, name) is not None:
            kinds = [kind for kind, (_, its) in SCHEDULES.items() if name in its]
            raise ArgumentError(
                f"--{name.replace('_', '-')} expects --schedule {' or '.join(kinds)}, "
                f"got --schedule {given.schedule}."
            )
    if not options:
        return build()
    values = {
        keyword: getattr(given, name)
        for name, keyword in options.items()
        if getattr(given, name) is not None
    }
    return build(total_steps=steps, **{"stages": STAGES, **values})


def _trials(given: argparse.Namespace) -> Trials | None:
    if given.trials is None:
        if given.eta is not None or given.trials_distribution is not None:
            raise ArgumentError(
                "--eta and --trials-distribution expect --trials, which is missing. Add --trials MEAN."
            )
        return None
    if given.trials_distribution == "poisson":
        if given.eta is not None:
            raise ArgumentError("--eta expects --trials-distribution tnb, got poisson.")
        return Poisson(given.trials)
    eta = 0.0 if given.eta is None else given.eta
    return TruncatedNegativeBinomial.from_mean(given.trials, eta)


if __name__ == "__main__":
    sys.exit(main())
