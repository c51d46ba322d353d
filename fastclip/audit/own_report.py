"""The report of an audit of your own run, as Markdown or HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fastclip.errors import ArgumentError, OldName

TITLE = "What this run reveals about its canaries"
NOT_SHOWN = (
    "That the claim is true. An audit can refute epsilon but never prove it. An attack that is not "
    "tried here may learn more.",
    "Anything about samples that are unlike the canaries.",
    "More than the canaries allow. If all guesses are right, they prove the bound that is listed as the "
    "most, and no more.",
    "That the trainer did not see the coins. The person who trains must not know them before the scores "
    "are computed.",
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
    """The report of one run.

    It is a function of what the run released and of the canaries' coins, and of no other sample.

    Attributes:
        claimed: epsilon that the engine states, at delta.
        bound: lower bound on the true epsilon, at 1 - significance (Steinke et al. 2023).
        most: the bound if all guesses about these canaries are right.
        auroc, tpr: area under the curve of the scores, and true positive rate at a false positive rate
            of 1%. Both are estimates without confidence intervals.
        canaries, inside: number of canaries, and of those that were in.
        neighbors: neighboring data sets of the claim.
        reports: number of reports announced for these coins; the bound is at
            1 - significance / reports.
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
        """Whether the bound is above the claim."""
        return self.bound > self.claimed

    @property
    def all_right(self) -> bool:
        """Whether all guesses were right."""
        return 0 < self.most <= self.bound

    told = OldName("all_right")

    @property
    def kind(self) -> str:
        """The verdict: refuted, none (nothing claimed), open (no guesses could refute it), or held."""
        if self.refuted:
            return "refuted"
        if math.isinf(self.claimed):
            return "none"
        return "open" if self.most <= self.claimed else "held"

    @property
    def verdict(self) -> str:
        """The verdict in a sentence or two."""
        found, claimed, most = f"{self.bound:.3g}", f"{self.claimed:.3g}", f"{self.most:.3g}"
        said = {
            "refuted": f"The claim is refuted: epsilon is at least {found}, not {claimed}. Do not "
            "release this model. Run `python -m fastclip.audit` to check the engine itself.",
            "none": "Nothing is claimed, because a step had no noise. Epsilon is at least "
            f"{found}.",
            "open": f"These canaries could not refute this claim: {claimed} is claimed, {most} is the "
            f"most that they can prove, and they prove {found}. Audit the same training at an epsilon "
            f"below {most}.",
            "held": f"The claim stands: epsilon is at least {found}, and {claimed} is claimed.",
        }[self.kind]
        return f"{said} Every guess about a coin was right." if self.all_right else said

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The figures of the report, as (name, value)."""
        return [
            (f"claimed epsilon at delta {self.delta:g}", f"{self.claimed:.4g}"),
            (f"{1 - self.significance:.0%} lower bound", f"{self.bound:.4g}"),
            ("most that these canaries could prove", f"{self.most:.4g}"),
            ("canaries, of which in the data set", f"{self.canaries}, {self.inside}"),
            ("area under the attack's ROC curve (0.5: chance)", f"{self.auroc:.3f}"),
            ("true positives at 1% false positives", f"{self.tpr:.1%}"),
        ]

    @property
    def notes(self) -> list[str]:
        """What the report does not show."""
        found = [
            *NOT_SHOWN,
            f"Anything about neighbors other than those of the claim: {self.neighbors}.",
        ]
        if self.reports > 1:
            found.append(
                f"One of {self.reports} reports of these coins. Their bounds hold together at "
                f"{1 - self.significance:.0%}."
            )
        if self.auroc < 0.5 - 3 * self._spread:
            found.append(
                "What scores of the opposite sign show. These are lower for canaries that were in, and "
                "the bound expects higher ones. Turn their sign in the next run."
            )
        return found

    @property
    def _spread(self) -> float:
        """Upper bound on the standard deviation of `auroc` for scores that carry no information."""
        outside = self.canaries - self.inside
        return math.sqrt((self.canaries + 1) / (12 * max(1, self.inside * outside)))

    def markdown(self) -> str:
        """Formats the report as Markdown."""
        lines = "\n".join(f"| {name} | {value} |" for name, value in self.figures)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return (
            f"# {TITLE}\n\n**{self.verdict}**\n\n| | |\n|---|---:|\n{lines}\n\n"
            f"## What it does not show\n\n{notes}\n"
        )

    def html(self) -> str:
        """Formats the report as an HTML page."""
        lines = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
            for name, value in self.figures
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        kind = "refuted" if self.kind == "none" else self.kind
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{TITLE}</title><style>{STYLE}</style></head><body>'
            f'<h1>{TITLE}</h1><p class="verdict '
            f'{kind}">{escape(self.verdict)}</p><table>{lines}</table>'
            f"<h2>What it does not show</h2><ul>{notes}</ul></body></html>\n"
        )

    def save(self, path: Any) -> None:
        """Writes the report to a file that ends in .md or .html.

        Raises:
            ArgumentError: if the name has another ending.
        """
        made = {".md": self.markdown, ".html": self.html}.get(Path(path).suffix)
        if made is None:
            raise ArgumentError(
                f"path expects a name that ends in .md or .html, got {str(path)!r}."
            )
        Path(path).write_text(made(), encoding="utf-8")
