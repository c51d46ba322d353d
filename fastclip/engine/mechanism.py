"""The guarantee of a run: the mechanism of its steps, who is protected, and what is trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from fastclip.accounting import Attack, NoiseLevels, strongest_attack
from fastclip.accounting.steps import Entry, encoded
from fastclip.counts.lines import worded
from fastclip.data.design import ALLOCATED, CYCLIC, GIVEN_ORDER, STREAM, SamplingDesign
from fastclip.errors import say

_GUARANTEE = {
    "added": "data sets that differ in one {unit}, added or removed",
    "zeroed": "data sets of the same, public number of {unit}s, in one of which a {unit} contributes "
    "nothing (zero-out)",
}


@dataclass(frozen=True)
class Mechanism:
    """The steps of one private model as a mechanism.

    `print` it, or keep `as_json()` for an audit.

    Formal guarantee: the steps taken are (epsilon, delta)-differentially private for `neighbors`, if
    the assumptions in `trusted` hold. Epsilon includes other releases of the engine's accountant.
    """

    unit: str
    """The privacy unit: "row" (one sample), or "unit" of several samples (a patient)."""
    neighbors: str
    """The neighboring relation."""
    sampler: str
    sample_rate: float
    """q, the largest probability that a unit is in a step."""
    sampled_independently: bool
    """Poisson sampling. Otherwise a unit is in every pass once, without amplification, except in a
    random allocation."""
    public_size: bool
    """q and B were given, so neither depends on the number of units."""
    units: int | None
    """N, the number of units that may be drawn; None if nothing depends on it and it stays secret."""
    expected_batch_size: float
    """B, the public divisor of the noisy sums."""
    max_batch_size: int | None
    max_samples_per_unit: int | None
    clipping: str
    """The scale function and the threshold policy, in words."""
    sensitivity: float
    """L2 sensitivity of the sum, to which the next step's noise is scaled. If the next step derives it
    from counts of its own batch and pays for them, this is the sensitivity of the last step."""
    noise: NoiseLevels
    """Noise multipliers of the next step: total, gradients and count queries."""
    schedule: str
    """How the noise changes from step to step."""
    taken: tuple[Entry, ...]
    """(sigma, q, steps) that the accountant has recorded. Without Poisson sampling one pass over the
    data is one entry, however many steps the optimizer takes in it."""
    planned: tuple[Entry, ...]
    """The same for the whole run, if its length is known."""
    accountant: str
    delta: float | None
    epsilon: float | None
    """Spent by `taken` at `delta`."""
    planned_epsilon: float | None
    secure: tuple[str, ...] = field(default=())
    """What nobody can predict, or attack through its rounding."""
    insecure: tuple[str, ...] = field(default=())
    trusted: tuple[str, ...] = field(default=())
    """Assumptions of the guarantee."""

    @property
    def neighbours(self) -> str:
        """The old name of `neighbors`."""
        say("Mechanism.neighbours is deprecated. Use Mechanism.neighbors.", DeprecationWarning)
        return self.neighbors

    @cached_property
    def attack(self) -> Attack:
        """Bounds on any attack on `taken`, from the trade-off curve of its privacy loss distribution.

        They are computed when they are first read. Only `Attack.mu` depends on `delta`.
        """
        return strongest_attack(self.taken, self.delta)

    @cached_property
    def planned_attack(self) -> Attack | None:
        """The same for `planned`, if the length of the run is known."""
        return strongest_attack(self.planned, self.delta) if self.planned else None

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the bounds on attacks. An infinite epsilon is None."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["noise"] = self.noise._asdict()
        for name, value in found.items():
            if isinstance(value, float) and not math.isfinite(value):
                found[name] = None
            elif isinstance(value, tuple):
                found[name] = [_plain(x) if isinstance(x, tuple) else x for x in value]
        planned = self.planned_attack
        found["attack"] = self.attack.as_json()
        found["planned_attack"] = None if planned is None else planned.as_json()
        return found

    def __str__(self) -> str:
        q = f"q = {self.sample_rate:.6g}"
        sampling = f"{self.sampler}, {q}" + ("" if self.public_size else " (derived from N)")
        if self.max_batch_size is not None:
            sampling += f", at most {self.max_batch_size} {worded(self.unit)}s per step"
        if self.max_samples_per_unit is not None:
            sampling += f", at most {self.max_samples_per_unit} samples of each"
        if self.sampler == ALLOCATED:
            sampling += "; a pass is accounted as a whole"
        elif self.sampler == CYCLIC:
            sampling += "; a turn through the groups is accounted as one step"
        elif not self.sampled_independently:
            sampling += "; accounted without amplification"
            sampling += "" if self.sampler == STREAM else ", a pass as one step"
        counts = "none" if self.noise.counts is None else f"sigma = {self.noise.counts:.4g}"
        facts = {
            "neighbors": self.neighbors,
            "privacy unit": worded(self.unit),
            "sampling": sampling,
            "batch size": f"B = {self.expected_batch_size:g}"
            + ("" if self.units is None else f", of N = {self.units}"),
            "clipping": f"{self.clipping}, sensitivity {self.sensitivity:.4g}",
            "noise": f"sigma = {self.noise.total:.4g} (gradients {self.noise.gradients:.4g}), "
            f"{self.schedule}",
            "count queries": counts,
            "steps recorded": _steps(self.taken),
            "planned in all": _steps(self.planned) if self.planned else "not known",
            "accountant": self.accountant,
            "epsilon": _epsilon(self.epsilon, self.planned_epsilon, self.delta),
        }
        width = max(map(len, facts))
        lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
        lists = self._attacks() | {
            title: getattr(self, title) for title in ("secure", "insecure", "trusted")
        }
        for title, entries in lists.items():
            lines.append(f"{title}:" if entries else f"{title}: nothing")
            lines += [f"  - {entry}" for entry in entries]
        return "\n".join(lines)

    def _attacks(self) -> dict[str, tuple[str, ...]]:
        """The bounds on any attack, in words, for the steps recorded and planned."""
        unit, added = worded(self.unit), _GUARANTEE["added"].format(unit=worded(self.unit))
        secret = "is in the data" if self.neighbors == added else "contributes to the training"
        found = {}
        if self.taken or not self.planned:
            found["bounds on any attack, for the steps recorded"] = self.attack
        if self.planned_attack is not None and self.planned != self.taken:
            found["bounds on any attack, for the steps planned"] = self.planned_attack
        return {title: attack.sentences(unit, secret) for title, attack in found.items()}


def _plain(entry: Entry) -> list[Any]:
    sigma, rate, steps = entry
    return [sigma, encoded(rate), steps]


def neighbors(design: SamplingDesign, size_is_secret: bool) -> str:
    """The neighboring relation, in words."""
    return _GUARANTEE["added" if size_is_secret else "zeroed"].format(unit=worded(design.unit))


def trusted(design: SamplingDesign, size_is_secret: bool) -> tuple[str, ...]:
    """The assumptions of the guarantee, in words."""
    found = [
        "the training loop takes one step per batch of the returned loader, including empty batches, "
        "and uses a batch only for its backward pass. It does not release losses or metrics "
        "(engine.count pays for metrics that are released)",
        "hyperparameters were not chosen on private data (fastclip.accounting.hpo_epsilon accounts for "
        "a search)",
    ]
    if not size_is_secret:
        why = "from which q and B are derived"
        if design.public:
            why = "on which other steps in epsilon depend"
        if design.public and design.max_batch_size is not None:
            why = "on which the cost of truncated batches depends"
        number = f"N = {design.units}" if design.units else "N, the length of the stream"
        known = f"{number}, {why}, is public knowledge"
        if (
            design.unit == "unit" and not design.public
        ):  # q is that of the loader, which counts samples
            known = f"{number} units and the number of samples, {why}, are public knowledge"
        found.insert(0, known)
    if design.unit == "unit":
        found.append(
            "unit_ids names the privacy unit of every sample, and a unit alone determines its samples"
        )
    if design.sampler == CYCLIC:
        found.append("the order of the data set, which decides the groups, is public")
    if design.rates is not None:
        why = "depends on no other sample" if design.public else "is public, as the weights are"
        found.append(f"the sampling rate of a sample {why}")
    if design.sampler == GIVEN_ORDER:
        found.append("the order of samples is the loader's own and does not depend on their values")
    if design.sampler == STREAM:
        found.append(
            "a sample is in a step at most once, and which samples come does not depend on their values"
        )
    return tuple(found)


def _steps(entries: Sequence[Entry]) -> str:
    total = sum(steps for *_, steps in entries)
    stages = ", ".join(f"{steps} at sigma = {sigma:.4g}" for sigma, _, steps in entries[:4])
    more = ", ..." if len(entries) > 4 else ""
    return f"{total} ({stages}{more})" if entries else "0"


def _epsilon(spent: float | None, planned: float | None, delta: float | None) -> str:
    if spent is None or delta is None:
        return "unknown without delta"
    found = f"{spent:.4f} at delta = {delta:g}, for the steps recorded"
    return found if planned is None else f"{found}; {planned:.4f} for the steps planned"
