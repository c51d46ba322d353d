"""Measures how tight, fast and small the numerical accountant is, on a grid of runs.

    python -m bench.accountants               a few minutes; bench/results/accountants.json
    python -m bench.accountants --reference   tests/accounting/reference.json, which tests compare with

The reference is a closed form for one step and for full batches. Otherwise it is dp-accounting's
pessimistic estimate. Its mesh is halved until epsilon changes by less than 0.4 %, or until rounding
shows. The error is at most first order in the mesh (connect the dots), so the true epsilon is at most
the last change below the estimate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import norm

from bench.measure import heading, machine
from fastclip.accounting import epsilon

OUT = Path(__file__).resolve().parent / "results" / "accountants.json"
REFERENCE = Path(__file__).resolve().parent.parent / "tests" / "accounting" / "reference.json"
Run = tuple[float, float, int, float]
"""(noise multiplier, sampling rate, steps, delta)."""
SIGMAS = (0.2, 0.3, 0.5, 0.8, 1.0, 2.0, 5.0, 20.0, 100.0, 1000.0)
RATES = (1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.99, 1.0)
STEPS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
DELTAS = (1e-12, 1e-8, 1e-5, 1e-2)
GRID = [*itertools.product(SIGMAS, RATES, STEPS, DELTAS)]
_SECONDS, _POINTS = 60, 2**23
_ROUNDED = 1e-5
"""Probability mass that dp-accounting's rounding may add to a composition."""
_HIDDEN = 1e-15
"""Delta by which the rounding of each step may change dp-accounting's transform."""


def closed_form(sigma: float, rate: float, steps: int, delta: float) -> float | None:
    """The tight epsilon in closed form, or None if there is none."""
    if rate == 1:
        return _solved(lambda eps: _gaussian(eps, math.sqrt(steps) / sigma) - math.log(delta))
    if steps == 1:
        return _solved(lambda eps: _one_step(eps, sigma, rate) - math.log(delta))
    return None


def _solved(excess: Any) -> float:
    if excess(0.0) <= 0:
        return 0.0
    high = 1e-6
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0, high, xtol=1e-15, rtol=1e-12))


def _gaussian(eps: float, mu: float) -> float:
    """log delta of the Gaussian mechanism: Balle and Wang 2018."""
    near, far = norm.logcdf(mu / 2 - eps / mu), norm.logcdf(-mu / 2 - eps / mu)
    return float(near + np.log1p(-np.exp(min(eps + far - near, 0.0))))


def _one_step(eps: float, sigma: float, rate: float) -> float:
    """log delta of one subsampled step: of a removed sample, which is the larger for eps >= 0.

    Above x0, where the loss is eps: q (Phi((1 - x0) / sigma) - exp(u0) Phi(-x0 / sigma)), with exp(u0)
    the likelihood ratio of a sample that is in.
    """
    ratio = eps - math.log(rate) + math.log1p((rate - 1) * math.exp(-eps))
    start = (sigma**2 * ratio + 0.5) / sigma
    inside, out = norm.logsf(start - 1 / sigma), norm.logsf(start)
    return float(math.log(rate) + inside + np.log1p(-np.exp(min(ratio + out - inside, 0.0))))


def reference(run: Run) -> dict[str, Any] | None:
    """Bounds of a run's epsilon from outside fastclip; None if they cost too much."""
    sigma, rate, steps, delta = run
    row: dict[str, Any] = {"sigma": sigma, "rate": rate, "steps": steps, "delta": delta}
    exact = closed_form(*run)
    if exact is not None:
        return {**row, "epsilon": exact, "below": exact, "how": "closed form"}
    if delta < 1000 * _HIDDEN * (64 + steps):
        return None
    at = np.linspace(-12 * sigma, 1 + 12 * sigma, 100_001)
    losses = np.log1p(rate * np.expm1(np.minimum((2 * at - 1) / (2 * sigma**2), 500)))
    weights = (1 - rate) * norm.pdf(at, scale=sigma) + rate * norm.pdf(at - 1, scale=sigma)
    mesh = math.sqrt(float((weights * losses**2).sum() / weights.sum())) / 2
    began, before, best = time.monotonic(), math.inf, None
    while time.monotonic() - began < _SECONDS / 4 and np.ptp(losses) < _POINTS * mesh:
        pair = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=rate, value_discretization_interval=mesh
        )
        if abs(float(pair.get_delta_for_epsilon(-40.0)) - 1) * steps > _ROUNDED:
            break  # differences of a fine mesh have lost their digits
        found = float(pair.self_compose(steps).get_epsilon_for_delta(delta))
        change = before - found
        if 0 <= change <= 0.05 * found:
            how = f"dp-accounting, mesh {mesh:.3g}"
            best = {**row, "epsilon": found, "below": found - 1.2 * change, "how": how}
        if change <= 0.004 * found:
            break
        before, mesh = found, mesh / 2
    return best


def write_reference() -> None:
    """The reference for closed forms of the grid, and for a fixed random part of the rest."""
    closed = [run for run in GRID if run[1] == 1 or run[2] == 1][::5]
    other = [run for run in GRID if run[1] != 1 and run[2] != 1]
    drawn = np.random.default_rng(0).permutation(len(other))
    near = [(sigma, 1 - 1e-12, steps, 1e-12) for sigma, steps in ((300.0, 10**5), (1000.0, 10**6))]
    rows: list[dict[str, Any]] = []
    for run in [*closed, *(other[number] for number in drawn)]:
        row = reference(run)
        if row is not None and 1e-5 < row["epsilon"] <= 200:
            rows.append(row)
            print(len(rows), row, flush=True)
        if len(rows) == 160:
            break
    for (
        sigma,
        rate,
        steps,
        delta,
    ) in near:  # so close to 1 that the steps equal those of full batches
        row = reference((sigma, 1.0, steps, delta)) or {}
        rows.append({**row, "rate": rate, "how": "closed form of rate 1"})
    text = ",\n".join(json.dumps(row) for row in rows)
    REFERENCE.write_text(f"[\n{text}\n]\n")


def _measured(run: Run) -> tuple[float, float, float]:
    """(epsilon, seconds of one core, MiB beyond the import) of a run, in its own process."""
    sigma, rate, steps, delta = run
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    found = epsilon([(sigma, rate, steps)], delta)
    seconds = time.process_time() - began
    return found, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - usage) / 1024


def main() -> None:
    """Measures, or writes the reference."""
    parser = argparse.ArgumentParser(prog="python -m bench.accountants")
    parser.add_argument("--reference", action="store_true", help="write what tests compare with")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.reference:
        logging.disable()
        write_reference()
        return
    known = {
        (row["sigma"], row["rate"], row["steps"], row["delta"]): row
        for row in json.loads(REFERENCE.read_text())
    }
    runs = [*dict.fromkeys([*GRID[::5], *known])]
    rows = []
    for run in runs:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found, seconds, size = pool.apply(_measured, (run,))
        row = {"run": run, "epsilon": found, "seconds": round(seconds, 3), "MiB": round(size, 1)}
        if run in known:
            truth = known[run]
            row |= {"reference": truth["epsilon"], "below": truth["below"], "how": truth["how"]}
        rows.append(row)
    compared = [row for row in rows if row.get("reference")]

    def most(name: str, value: Any, among: list[dict[str, Any]]) -> dict[str, Any]:
        worst = max(among, key=value)
        print(f"{name}: {value(worst):.4g} at (sigma, q, steps, delta) = {worst['run']}")
        return {"value": value(worst), "run": worst["run"]}

    def over(row: dict[str, Any]) -> float:
        return float(row["epsilon"] / row["reference"] - 1)

    summary = {
        "runs": len(rows),
        "compared": len(compared),
        "largest excess, epsilon <= 20": most("excess up to 20", over, [
            row for row in compared if row["reference"] <= 20]),
        "largest excess, epsilon > 20": most("excess above 20", over, [
            row for row in compared if row["reference"] > 20]),
        "largest share below the truth": most(
            "below", lambda row: 1 - row["epsilon"] / row["below"], compared),
        "largest time, s of one core": most("seconds", lambda row: row["seconds"], rows),
        "largest memory, MiB": most("MiB", lambda row: row["MiB"], rows),
    }  # fmt: skip
    about = {**heading("bench.accountants", None), "machine": machine()}
    given.out.write_text(json.dumps({**about, "summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
