"""What an audit of a user's own run says, as Markdown or HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fastclip.errors import ArgumentError

TITLE = "What this run tells of its canaries"
NOT_SHOWN = (
    "That the claim is true. An audit can refute epsilon, never prove it: an attack that is not tried "
    "here may learn more.",
    "Anything of rows that are not like the canaries.",
    "More than the canaries allow: all guesses right prove no more than the bound that is named as the "
    "most.",
    "That the trainer did not look: whoever trains must not know the coins before the scores are there.",
)
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td{border-bottom:1px solid #ddd;padding:.4rem .6rem}"
    "td+td{text-align:right;white-space:nowrap}.verdict{padding:.6rem 1rem;border-left:4px solid}"
    ".held{background:#eef5ee;border-color:#2e7d32}.refuted{background:#fdecea;border-color:#c62828}"
    ".open{background:#f3f3f3;border-color:#777}"
)


@dataclass(frozen=True)
class Report:
    """Of one run; a function of what it released and of the canaries' coins, of no other sample.

    Attributes:
        claimed: epsilon that the engine states, at delta.
        bound: lower bound on the true one, at 1 - significance (Steinke et al. 2023).
        most: what so many canaries prove if all guesses about them are right.
        auroc, tpr: of the scores; tpr at a false positive rate of 1%. Estimates, without intervals.
        canaries, inside: how many there are, and how many were in.
        neighbors: of the claim.
        reports: how many were announced of these coins; the bound is at 1 - significance / reports.
    """

    claimed: float
    delta: float
    significance: float
    bound: float
    most: float
    auroc: float
    tpr: float
    canaries: int
    inside: int
    neighbors: str
    reports: int = 1

    @property
    def refuted(self) -> bool:
        """The bound is above the claim."""
        return self.bound > self.claimed

    @property
    def told(self) -> bool:
        """All guesses were right."""
        return 0 < self.most <= self.bound

    @property
    def kind(self) -> str:
        """What the verdict is: refuted, none (is claimed), open (no guesses could refute it), held."""
        if self.refuted:
            return "refuted"
        if math.isinf(self.claimed):
            return "none"
        return "open" if self.most <= self.claimed else "held"

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        found, claimed, most = f"{self.bound:.3g}", f"{self.claimed:.3g}", f"{self.most:.3g}"
        said = {
            "refuted": f"The claim is refuted: epsilon is at least {found}, not {claimed}. Do not "
            "release this model; `python -m fastclip.audit` tells if the engine is at fault.",
            "none": "Nothing is claimed: a step had no noise, so that no epsilon holds; it is at least "
            f"{found}.",
            "open": f"These canaries could not refute this claim: {claimed} is claimed, all guesses "
            f"right prove {most}, and these prove {found}. Audit the same training at an epsilon "
            f"below {most}.",
            "held": f"The claim stands: epsilon is at least {found}, and {claimed} is claimed.",
        }[self.kind]
        return f"{said} Every coin that was guessed was told." if self.told else said

    @property
    def figures(self) -> list[tuple[str, str]]:
        """What was found, line by line."""
        return [
            (f"claimed epsilon at delta {self.delta:g}", f"{self.claimed:.4g}"),
            (f"{1 - self.significance:.0%} lower bound", f"{self.bound:.4g}"),
            ("most that these canaries could prove", f"{self.most:.4g}"),
            ("canaries, of which in", f"{self.canaries}, {self.inside}"),
            ("area under the attack's curve (0.5: guesses)", f"{self.auroc:.3f}"),
            ("found at 1% false alarms", f"{self.tpr:.1%}"),
        ]

    @property
    def notes(self) -> list[str]:
        """What it does not show."""
        found = [
            *NOT_SHOWN,
            f"The claim is for neighbors as the engine names them: {self.neighbors}.",
        ]
        if self.reports > 1:
            found.append(
                f"One of {self.reports} reports of these coins, whose bounds hold together at "
                f"{1 - self.significance:.0%}."
            )
        if self.auroc < 0.5 - 3 * self._spread:
            found.append(
                "What scores tell the other way round: they are lower where canaries were in, and the "
                "bound takes higher ones for in; turn their sign in the next run."
            )
        return found

    @property
    def _spread(self) -> float:
        """Standard deviation of the area of scores that tell nothing, at the most."""
        outside = self.canaries - self.inside
        return math.sqrt((self.canaries + 1) / (12 * max(1, self.inside * outside)))

    def markdown(self) -> str:
        """As Markdown."""
        samples = "\n".join(f"| {name} | {value} |" for name, value in self.figures)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return (
            f"# {TITLE}\n\n**{self.verdict}**\n\n| | |\n|---|---:|\n{samples}\n\n"
            f"## What it does not show\n\n{notes}\n"
        )

    def html(self) -> str:
        """As a page of its own."""
        samples = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
            for name, value in self.figures
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        kind = "refuted" if self.kind == "none" else self.kind
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{TITLE}</title><style>{STYLE}</style></head><body>'
            f'<h1>{TITLE}</h1><p class="verdict '
            f'{kind}">{escape(self.verdict)}</p><table>{samples}</table>'
            f"<h2>What it does not show</h2><ul>{notes}</ul></body></html>\n"
        )

    def save(self, path: Any) -> None:
        """Write it, as the name ends: .md or .html.

        Raises:
            ArgumentError: for another ending.
        """
        made = {".md": self.markdown, ".html": self.html}.get(Path(path).suffix)
        if made is None:
            raise ArgumentError(f"save expects a name that ends in .md or .html, got {str(path)!r}")
        Path(path).write_text(made(), encoding="utf-8")
