"""What a run guarantees, said exactly: the mechanism of its steps, who is protected, what is trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fastclip.accounting import NoiseLevels
from fastclip.accounting.steps import Entry, encoded
from fastclip.data.design import GIVEN_ORDER, STREAM, SamplingDesign
from fastclip.errors import say

_GUARANTEE = {
    "added": "data sets that differ in one {unit}, added or removed",
    "zeroed": "data sets of the same, public number of {unit}s, in one of which a {unit} contributes "
    "nothing (zero-out)",
}


@dataclass(frozen=True)
class Mechanism:
    """The steps of one private model as a mechanism; `print` it, or keep `as_json()` for an audit.

    Formal guarantee: the steps taken are (epsilon, delta)-differentially private for `neighbors`, if
    what `trusted` names holds. Other releases of the engine's accountant are in epsilon, too.
    """

    unit: str
    """What is protected as one: "sample", or "unit" of several samples (a patient)."""
    neighbors: str
    """The neighboring relation."""
    sampler: str
    sample_rate: float
    """q, the largest probability of a unit to be in a step."""
    sampled_independently: bool
    """Poisson sampling; else no amplification is accounted: a unit is in every pass once."""
    public_size: bool
    """q and B were given, so that neither depends on the number of units."""
    units: int | None
    """N, how many may be drawn; None where nothing depends on it, so that it stays secret."""
    expected_batch_size: float
    """B, the public divisor of the noisy sums."""
    max_batch_size: int | None
    max_samples_per_unit: int | None
    clipping: str
    """The strategy."""
    sensitivity: float
    """L2 sensitivity of the sum at which the next step's noise is scaled; of the last step, where it
    follows from counts of the next one's own batch, which that step pays for."""
    noise: NoiseLevels
    """Noise multipliers of the next step: total, of the gradients, of count queries."""
    schedule: str
    """How the noise changes from step to step."""
    taken: tuple[Entry, ...]
    """(sigma, q, steps) that the accountant has recorded: without Poisson sampling a pass over the data
    is one of its steps, however many the optimizer takes in it."""
    planned: tuple[Entry, ...]
    """The same of the whole run, where its length is known."""
    accountant: str
    delta: float | None
    epsilon: float | None
    """Spent by `taken` at `delta`."""
    planned_epsilon: float | None
    secure: tuple[str, ...] = field(default=())
    """What nobody can foresee, nor attack by its rounding."""
    insecure: tuple[str, ...] = field(default=())
    trusted: tuple[str, ...] = field(default=())
    """What the guarantee takes on faith."""

    @property
    def neighbours(self) -> str:
        """The old name of `neighbors`."""
        say("Mechanism.neighbours is deprecated. Use Mechanism.neighbors.", DeprecationWarning)
        return self.neighbors

    def as_json(self) -> dict[str, Any]:
        """Plain values; an infinite epsilon is None."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["noise"] = self.noise._asdict()
        for name, value in found.items():
            if isinstance(value, float) and not math.isfinite(value):
                found[name] = None
            elif isinstance(value, tuple):
                found[name] = [_plain(x) if isinstance(x, tuple) else x for x in value]
        return found

    def __str__(self) -> str:
        q = f"q = {self.sample_rate:.6g}"
        drawn = f"{self.sampler}, {q}" + ("" if self.public_size else " (follows from N)")
        if self.max_batch_size is not None:
            drawn += f", at most {self.max_batch_size} {self.unit}s a step"
        if self.max_samples_per_unit is not None:
            drawn += f", at most {self.max_samples_per_unit} rows of each"
        if not self.sampled_independently:
            drawn += "; accounted without amplification"
            drawn += "" if self.sampler == STREAM else ", a pass as one step"
        counts = "none" if self.noise.counts is None else f"sigma = {self.noise.counts:.4g}"
        samples = {
            "neighbors": self.neighbors,
            "privacy unit": self.unit,
            "sampling": drawn,
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
        width = max(map(len, samples))
        lines = [f"{name:<{width}}  {value}" for name, value in samples.items()]
        for title in ("secure", "insecure", "trusted"):
            entries = getattr(self, title)
            lines.append(f"{title}:" if entries else f"{title}: nothing")
            lines += [f"  - {entry}" for entry in entries]
        return "\n".join(lines)


def _plain(entry: Entry) -> list[Any]:
    sigma, rate, steps = entry
    return [sigma, encoded(rate), steps]


def neighbors(design: SamplingDesign, size_is_secret: bool) -> str:
    """Who the data sets are between which nobody can tell, in words."""
    return _GUARANTEE["added" if size_is_secret else "zeroed"].format(unit=design.unit)


def trusted(design: SamplingDesign, size_is_secret: bool) -> tuple[str, ...]:
    """What the guarantee takes on faith, in words."""
    found = [
        "the training loop takes a step for every batch of the returned loader, an empty one too, uses "
        "it for nothing but its backward pass, and what it reports (losses, metrics) is not released "
        "(engine.count pays for metrics that are)",
        "hyperparameters were not chosen by looking at private data (fastclip.accounting.hpo_epsilon "
        "accounts for a search)",
    ]
    if not size_is_secret:
        why = "from which q and B follow"
        if design.public:
            why = "which other steps of epsilon tell"
        if design.public and design.max_batch_size is not None:
            why = "on which the price of cut draws depends"
        number = f"N = {design.units}" if design.units else "N, the length of the stream"
        found.insert(0, f"{number}, {why}, is public knowledge")
    if design.unit == "unit":
        found.append(
            "unit_ids says of every row whose it is, and a unit's rows follow from it alone"
        )
    if design.rates is not None:
        whose = "depends on no other row" if design.public else "is public, as the weights are"
        found.append(f"the rate at which a row is drawn {whose}")
    if design.sampler == GIVEN_ORDER:
        found.append("the order of rows, which is not drawn here, does not depend on their values")
    if design.sampler == STREAM:
        found.append(
            "a row is in a step at most once, and which rows come does not depend on their values"
        )
    return tuple(found)


def _steps(entries: Sequence[Entry]) -> str:
    total = sum(steps for *_, steps in entries)
    stages = ", ".join(f"{steps} at sigma = {sigma:.4g}" for sigma, _, steps in entries[:4])
    more = ", ..." if len(entries) > 4 else ""
    return f"{total} ({stages}{more})" if entries else "0"


def _epsilon(spent: float | None, planned: float | None, delta: float | None) -> str:
    if spent is None or delta is None:
        return "pass delta to state it"
    found = f"{spent:.4f} at delta = {delta:g}, for the steps recorded"
    return found if planned is None else f"{found}; {planned:.4f} for the steps planned"
