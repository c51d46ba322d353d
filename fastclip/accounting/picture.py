"""A picture of the best attack on a run; matplotlib draws it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastclip.accounting.attack import Attack
from fastclip.errors import ArgumentError


def draw_attack(attack: Attack, title: str, path: str | Path) -> None:
    """Save the trade-off of false and true positives, on logarithmic axes.

    Args:
        attack: what `strongest_attack` returned.
        title: above the picture.
        path: of the file, with the ending of a format that matplotlib knows.

    Raises:
        ArgumentError: if matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "--picture needs the library matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    axes = figure.subplots()
    rates = np.geomspace(1e-5, 1, 600)
    axes.fill_between(rates, attack.trade_off(rates), 1, color="0.93")
    axes.plot(
        rates, attack.trade_off(rates), color="C0", label=f"best attack ({attack.accountant})"
    )
    axes.plot(rates, rates, color="0.5", linestyle="--", label="guessing")
    for number, (rate, power) in enumerate(attack.true_positive_rates.items()):
        axes.plot(rate, power, "o", color="C1", label=None if number else "rates in the table")
        axes.annotate(
            f"{100 * power:.3g} % at {100 * rate:g} %", (rate, power), (-7, 5),
            textcoords="offset points", ha="right", fontsize="small",
        )  # fmt: skip
    axes.text(0.03, 0.97, "out of reach", transform=axes.transAxes, va="top", color="0.4")
    axes.set(
        xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-5, 1), title=title,
        xlabel="false-positive rate: other samples called members",
        ylabel="true-positive rate: members recognised",
    )  # fmt: skip
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--picture expects a file that can be written, such as attack.png, got {str(path)!r} "
            f"({str(error).splitlines()[0].rstrip('.')})"
        ) from error
