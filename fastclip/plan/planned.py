"""A plan: all choices under one budget, the marked one, its reasons in words, and code to paste."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastclip.accounting.epsilon import epsilon as epsilon_of
from fastclip.core.checks import between, positive, whole
from fastclip.errors import ArgumentError
from fastclip.plan.choices import SAMPLERS, Choice, search
from fastclip.plan.picture import draw

MIN_STEPS = 250
"""Default of `min_steps`, a rule of thumb."""

_IN_WORDS = {"poisson": "Poisson sampling", "allocation": "Random allocation",
             "loader": "The loader's own order"}  # fmt: skip
_HARDLY = 0.1
"""Share of the noise of the mean below which larger batches hardly help."""
_UNKNOWN = (
    "Not known here: your learning rate, C, model and data. Less noise helps only if the steps",
    "suffice to learn. Compare two or three neighbors of * on public data.",
    "The code contains the sampling rate and B, which follow from N. If N is secret, pass a",
    "public estimate of it.",
)


@dataclass(frozen=True)
class Plan:
    """All choices under one budget, and the marked one. Print it for a table and its explanation.

    Attributes:
        samples: N, the number of privacy units.
        epsilon: the budget.
        delta: delta of the budget.
        unit_size: samples per privacy unit.
        epochs: passes that you asked for, or None if compute limits the run.
        compute: samples that the compute processes, or None.
        max_physical: most samples of a physical batch, or None.
        min_steps: fewest steps of the marked choice.
        choices: by batch size, then by sampler.
        best: the marked choice.
    """

    samples: int
    epsilon: float
    delta: float
    unit_size: int
    epochs: float | None
    compute: float | None
    max_physical: int | None
    min_steps: int
    choices: tuple[Choice, ...]
    best: Choice

    @property
    def spent(self) -> float:
        """Epsilon of the marked choice, from its history."""
        return epsilon_of(self.best.history(), self.delta)

    def as_json(self) -> dict[str, Any]:
        """Return plain values: the question, all choices, the marked one, and its code."""
        names = ("samples", "epsilon", "delta", "unit_size", "epochs", "compute", "max_physical",
                 "min_steps")  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "choices": [choice.as_json() for choice in self.choices],
            "best": {**self.best.as_json(), "epsilon": self.spent},
            "code": self.code(),
        }

    @property
    def length(self) -> str:
        """The length that you asked for, in words."""
        if self.compute is None:
            return f"{self.epochs:g} epochs"
        epochs = self.compute / self.unit_size / self.samples
        return f"compute for {self.compute:.4g} samples, {epochs:.3g} epochs"

    @property
    def units(self) -> str:
        """What N and B count."""
        return "samples" if self.unit_size == 1 else "units"

    def __str__(self) -> str:
        return "\n".join([*_question(self), "", *_table(self), "", *_reasons(self)])

    def code(self) -> str:
        """Return Python for the marked choice.

        It expects `model`, `optimizer`, `criterion` and `train_set`, and `unit_of_sample` if units have
        several samples.
        """
        return _code(self)

    def draw(self, path: str | Path) -> None:
        """Save a picture, with matplotlib.

        Args:
            path: a file that ends in .svg, .png or .pdf.

        Raises:
            ArgumentError: matplotlib is missing, or cannot write such a file.
        """
        draw(
            self.choices, self.best, (self.epsilon, self.delta), path,
            title=f"Noise at epsilon {self.epsilon:g}, {self.length}", units=self.units,
        )  # fmt: skip


def plan(
    samples: int, epsilon: float, delta: float | None = None, *, epochs: float | None = None,
    gpu_hours: float | None = None, samples_per_second: float | None = None, unit_size: int = 1,
    max_physical: int | None = None, batch_sizes: Iterable[int] | None = None,
    sampling: Sequence[str] = SAMPLERS, min_steps: int = MIN_STEPS,
) -> Plan:  # fmt: skip
    """Compute the noise of batch sizes and samplers under one budget, and mark a choice.

    The marked choice has the least noise of a step, sigma / B, among those with at least `min_steps`
    steps. If none has as many, it is among those with the most steps.

    Formal guarantee: a run with a choice's sampling, noise multiplier and steps is (epsilon, delta)-DP
    by the accountant "prv", for the neighbors of `fastclip.accounting.epsilon`.

    Args:
        samples: N, the number of samples, or of privacy units. A public number, if N is secret.
        epsilon: the budget.
        delta: in (0, 1). None for 1 / (10 N).
        epochs: passes over the data.
        gpu_hours: compute instead of epochs, in hours of one GPU.
        samples_per_second: samples that private training processes per second on one GPU.
        unit_size: samples per privacy unit. N and B then count units.
        max_physical: most samples of a physical batch.
        batch_sizes: sizes to compare, in privacy units. None for powers of two. Each is rounded to
            N / t for a whole number t of batches.
        sampling: samplers to compare, of SAMPLERS. With several samples per unit, the loader's own
            order is left out, because it does not support units.
        min_steps: fewest steps of the marked choice.

    Raises:
        ArgumentError, ArgumentTypeError: a value is out of range, compute does not suffice for one
            batch, or no noise multiplier reaches the budget.
    """
    n = whole("samples", samples, 4)
    target = positive("epsilon", epsilon)
    delta = between("delta", 1 / (10 * n) if delta is None else delta, 0, 1)
    size, least = whole("unit_size", unit_size, 1), whole("min_steps", min_steps, 1)
    most = None if max_physical is None else whole("max_physical", max_physical, 1)
    if most is not None and most < size:
        raise ArgumentError(
            f"max_physical expects at least unit_size={size} samples, got {most}, because a unit is not "
            "split. Raise max_physical."
        )
    compute = _compute(epochs, gpu_hours, samples_per_second)
    epochs = None if epochs is None else positive("epochs", epochs)
    found = search(
        n, (target, delta), batch_sizes, _samplers(sampling, size), epochs=epochs,
        units=(compute or 0.0) / size, most=None if most is None else most // size,
    )  # fmt: skip
    if not found:
        raise ArgumentError(
            f"The compute processes {compute:.3g} samples, less than one batch of the sizes to compare. "
            "Raise gpu_hours, or pass smaller batch_sizes."
        )
    enough = min(least, max(choice.steps for choice in found))
    best = min((c for c in found if c.steps >= enough), key=lambda choice: choice.noise)
    return Plan(n, target, delta, size, epochs, compute, most, least, tuple(found), best)


def _compute(
    epochs: float | None, gpu_hours: float | None, samples_per_second: float | None
) -> float | None:
    """Return the samples that the compute processes, or None if epochs are given.

    Raises:
        ArgumentError: both or none are given.
    """
    given = [gpu_hours is not None, samples_per_second is not None]
    if not (any(given) if epochs is None else not any(given)) or any(given) != all(given):
        raise ArgumentError(
            "plan expects either epochs, or gpu_hours and samples_per_second, got "
            f"epochs={epochs}, gpu_hours={gpu_hours}, samples_per_second={samples_per_second}. Pass one "
            "of the two."
        )
    if gpu_hours is None:
        return None
    rate = positive("samples_per_second", samples_per_second)
    return 3600 * positive("gpu_hours", gpu_hours) * rate


def _samplers(sampling: Sequence[str], unit_size: int) -> list[str]:
    """Return the samplers to compare, without repetition.

    Raises:
        ArgumentError: an unknown name, or none is left.
    """
    asked = [sampling] if isinstance(sampling, str) else list(sampling)
    unknown = [name for name in asked if name not in SAMPLERS]
    if unknown or not asked:
        raise ArgumentError(
            f"sampling expects names among {', '.join(map(repr, SAMPLERS))}, got {sampling!r}."
        )
    left = [name for name in SAMPLERS if name in asked and (unit_size == 1 or name != "loader")]
    if not left:
        raise ArgumentError(
            "The data loader's own order does not support units of several samples. Pass "
            "sampling='poisson' or 'allocation'.",
            doc="privacy-units",
        )
    return left


# -------------------------------------------------------------------------------------------------
# The plan in words.


def _question(found: Plan) -> list[str]:
    lines = [
        f"N = {found.samples} {found.units}, epsilon = {found.epsilon:g}, delta = {found.delta:.3g}, "
        f"{found.length}"
    ]
    if found.unit_size > 1:
        lines.append(
            f"Each unit has up to {found.unit_size} samples. N, B and epsilon refer to units, so "
            "epsilon protects all samples of a unit together."
        )
    return lines


def _table(found: Plan) -> list[str]:
    """Return one line per batch size, with sigma and sigma / B of each sampler."""
    names = [name for name in SAMPLERS if any(c.sampler == name for c in found.choices)]
    parts = found.max_physical is not None
    left = ["batch size", "steps", *(["parts"] if parts else [])]
    rows = [[*left, *(name for _ in names for name in ("sigma", "sigma/B")), "of mean"]]
    for batch in sorted({c.batch_size for c in found.choices}):
        here = {c.sampler: c for c in found.choices if c.batch_size == batch}
        first = next(iter(here.values()))
        row = [str(batch), str(first.steps)]
        row += [f"{first.physical_batches:.1f}"] if parts else []
        for name in names:
            own = here.get(name)
            mark = "*" if own == found.best else " "
            row += [f"{own.sigma:.3f}", f"{own.noise:.2e}{mark}"] if own else ["-", "- "]
        rows.append([*row, f"{min(c.noise_of_mean for c in here.values()):.1e}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    start = len(left)
    head = " " * (sum(widths[:start]) + 2 * start)
    for number, name in enumerate(names):
        of = widths[start + 2 * number : start + 2 * number + 2]
        head += name.rjust(sum(of) + 2) + "  "
    return [head.rstrip(), *lines]


def _reasons(found: Plan) -> list[str]:
    """Return the legend, why the choice is marked, and what the planner does not know."""
    best = found.best
    lines = [
        "sigma/B: noise of one step, per entry of the mean gradient, in units of C. Over d parameters",
        "its length is sqrt(d) times that. No sample's gradient is longer than 1, in the same units.",
        "of mean: sigma / (B sqrt(steps)), noise of the mean over all steps, of the row's best sampler.",
    ]
    if found.max_physical is not None:
        lines.append(
            f"parts: expected physical batches per step, of at most {found.max_physical} samples."
        )
    lines += ["", f"* {_IN_WORDS[best.sampler]}, batch size {best.batch_size}, {best.steps} steps "
              f"({best.epochs:.4g} epochs), sigma {best.sigma:.4g}."]  # fmt: skip
    lines += [f"  {line}" for line in (*_why_batch(found), *_why_sampler(found))]
    return [*lines, "", *_UNKNOWN]


def _why_batch(found: Plan) -> list[str]:
    best, own = found.best, [c for c in found.choices if c.sampler == found.best.sampler]
    larger = [c for c in own if c.batch_size > best.batch_size]
    if best.steps < found.min_steps:
        lines = [
            f"No choice has {found.min_steps} steps, so this one has the most. Plan more epochs, or "
            "lower --min-steps."
        ]
    else:
        lines = [f"Least noise of a step with at least {found.min_steps} steps (--min-steps)."]
    if larger:
        after = larger[0]
        lines.append(
            f"B = {after.batch_size} would have {_percent(after.noise / best.noise)} noise in a step, "
            f"but only {after.steps} steps."
        )
        gain = 1 - min(c.noise_of_mean for c in own) / best.noise_of_mean
        lines.append(
            f"Larger batches reduce the noise of the mean over all steps by at most {100 * gain:.2g} %."
        )
        if gain < _HARDLY:
            lines.append("Only more samples, a larger epsilon or a larger delta reduce it further.")
    return lines


def _why_sampler(found: Plan) -> list[str]:
    """Compare the marked choice with the other samplers at its batch size."""
    best, lines = found.best, []
    for other in found.choices:
        if other.batch_size == best.batch_size and other != best:
            reason = ", without amplification by sampling" if other.sampler == "loader" else ""
            ratio = _percent(other.noise / best.noise)
            lines.append(f"{_IN_WORDS[other.sampler]} would have {ratio} noise{reason}.")
    return lines


def _percent(ratio: float) -> str:
    """Return a ratio in words, as "12 % more"."""
    if ratio >= 2:
        return f"{ratio:.2g} times the"
    return f"{100 * abs(ratio - 1):.2g} % {'more' if ratio > 1 else 'less'}"


# -------------------------------------------------------------------------------------------------
# The plan as code.


def _code(found: Plan) -> str:
    best, split = found.best, found.max_physical is not None
    names = "BatchMemoryManager, FastPrivacyEngine" if split else "FastPrivacyEngine"
    lines = [
        "from torch.utils.data import DataLoader", "", f"from fastclip import {names}", "",
        "engine = FastPrivacyEngine()",
        "model, optimizer, loader = engine.make_private_with_epsilon(",
        "    module=model,",
        "    optimizer=optimizer,",
        f"    data_loader=DataLoader(train_set, batch_size={best.batch_size}{_shuffled(best)}),",
        f"    target_epsilon={found.epsilon!r},",
        f"    target_delta={found.delta!r},",
        f"    epochs={_epochs(best)},",
        "    max_grad_norm=1.0,",
        *(f"    {line}," for line in _sampling(found)),
        ")",
        f"for epoch in range({best.passes}):",
    ]  # fmt: skip
    loop, stop = _loop(found), ""
    if split:
        lines += [
            "    with BatchMemoryManager(",
            "        data_loader=loader, optimizer=optimizer,",
            f"        max_physical_batch_size={found.max_physical},",
            "    ) as physical:",
        ]  # fmt: skip
        stop = "    "
    return "\n".join([*lines, *(f"    {stop}{line}" for line in loop)]) + "\n"


def _shuffled(best: Choice) -> str:
    return ", shuffle=True" if best.sampler == "loader" else ""


def _sampling(found: Plan) -> list[str]:
    best = found.best
    lines = [f'sampling="{best.sampler}"']
    if best.sampler != "loader":
        lines.append(f"sample_rate=1 / {best.steps_per_epoch}")
    lines.append(f"expected_batch_size={best.batch_size}")
    if found.unit_size > 1:
        lines += ["unit_ids=unit_of_sample", f"max_samples_per_unit={found.unit_size}"]
    return lines


def _epochs(best: Choice) -> str:
    """Return the shortest number of epochs with these steps, or whole passes."""
    if best.sampler != "poisson":
        return str(best.passes)
    for digits in range(16):
        number = math.floor(best.epochs * 10**digits) / 10**digits
        if math.ceil(number * best.steps_per_epoch) == best.steps:
            return f"{number:.{digits}f}"
    return repr((best.steps - 0.5) / best.steps_per_epoch)


def _loop(found: Plan) -> list[str]:
    split, best = found.max_physical is not None, found.best
    lines = [
        f"for x, y in {'physical' if split else 'loader'}:",
        "    optimizer.zero_grad()",
        "    criterion(model(x), y).backward()",
        "    optimizer.step()",
    ]
    if best.steps % best.steps_per_epoch:
        real = "optimizer.last_step_was_real and " if split else ""
        lines += [
            f"    if {real}optimizer.real_steps == {best.steps}:  # the end of the plan",
            "        break",
        ]
    return lines
