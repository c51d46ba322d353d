"""The page of a user's own run: what its clipping did to each group, and what of it may be published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fastclip.accounting import TunedEpsilon
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness.gaps import gap, privacy_impact
from fastclip.fairness.given import ALL, CLASS, LAYER
from fastclip.fairness.pages import Page
from fastclip.fairness.pictures import Line, lines
from fastclip.fairness.recorder import COLUMNS, TRAINING, FairnessRecorder

OVERALL = ("accuracy", "macro_accuracy", "worst_class_accuracy", "loss_mean")
TRAINED = "train"
"""The part that `FairnessRecorder.evaluate` calls so: the rows that trained."""
RATES = (
    "rows", "accuracy", "accuracy_low", "accuracy_high", "loss_mean", "loss_sum", "selection_rate",
    "true_positive_rate", "false_positive_rate",
)  # fmt: skip


def fairness_report(
    run: FairnessRecorder | pd.DataFrame, path: str | Path, *, title: str = "Fairness of this run",
    epsilon: float | None = None, delta: float | None = None,
    baseline: FairnessRecorder | pd.DataFrame | None = None, searched: TunedEpsilon | None = None,
    part: str = "test", publish: bool = False,
) -> list[Path]:  # fmt: skip
    """Write a page about one run.

    Args:
        run: a recorder, or its table.
        path: of the HTML file; a Markdown twin and its pictures are written beside it.
        epsilon: what the run has spent, `engine.get_epsilon(delta)`.
        delta: what the run has spent, `engine.get_epsilon(delta)`.
        baseline: the same of a run without privacy, for the cost of privacy by group.
        searched: the cost of the search that chose this run, from `fastclip.accounting.hpo_epsilon`.
        part: the evaluated part that the tables show.
        publish: leave out every figure that may not be published (by the column `private`).

    Returns:
        The files written.

    Raises:
        ArgumentError: for a path that is not one of an HTML file, and a baseline of other groups.

    Guarantee: none. Every table and picture says whether it may be published: what follows from the
    private run alone is covered by its epsilon; what looks at evaluation rows without noise is not
    covered by anything; what looks at training rows has no finite epsilon.
    """
    frame = _table("run", run, publish)
    page = Page(title)
    _budget(page, frame, epsilon, delta, searched)
    evaluated = _evaluated(frame, part)
    if evaluated.empty:
        known = sorted(set(frame["part"]) - {TRAINING})
        page.text(
            f"Nothing was evaluated under the name {part!r}; there are: {', '.join(known) or 'none'}."
        )
    else:
        _evaluations(page, evaluated, part)
        if baseline is not None:
            plain = _evaluated(_table("baseline", baseline, publish), part)
            if plain.empty:
                raise ArgumentError(f"baseline expects an evaluation of {part!r}, has none")
            _impact(page, evaluated, plain, part)
    _thresholds(page, frame)
    _norms(page, frame)
    return page.write(Path(path))


def _evaluated(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """What was measured of a part; where it was measured twice at a step, the last."""
    found = frame[(frame["part"] == part) & (frame["part"] != TRAINING)]
    return found.drop_duplicates(["step", "attribute", "group", "measure"], keep="last")


def _looked_at(page: Page, frame: pd.DataFrame, part: str, what: str) -> None:
    """Says what may be published of figures about the rows of a part."""
    if frame["private"].all():
        page.note(
            f"figures of {part!r} follow from noisy counts, whose cost is in the ledger: "
            "engine.privacy_by_data_set says whom it protects and by how much.", "private",
        )  # fmt: skip
        return
    page.note(what, "not private" if part == TRAINED else "held out")


def _table(name: str, run: FairnessRecorder | pd.DataFrame, publish: bool) -> pd.DataFrame:
    frame = run.frame() if isinstance(run, FairnessRecorder) else run
    if not isinstance(frame, pd.DataFrame):
        raise ArgumentTypeError(
            f"{name} expects a FairnessRecorder or its frame(), got {type(run).__name__}"
        )
    missing = [column for column in COLUMNS if column not in frame]
    if missing:
        raise ArgumentError(
            f"{name} expects the columns of FairnessRecorder.frame(), lacks {missing}"
        )
    return frame[frame["private"].astype(bool)] if publish else frame


def _budget(
    page: Page, frame: pd.DataFrame, epsilon: float | None, delta: float | None,
    searched: TunedEpsilon | None,
) -> None:  # fmt: skip
    spent = frame["epsilon"].dropna().max() if epsilon is None else epsilon
    page.heading("What this page costs")
    at = "" if delta is None else f" at delta {delta:g}"
    known = "not recorded" if pd.isna(spent) else f"{spent:.4g}{at}"
    page.text(
        f"Epsilon spent on the training rows by this run: {known}. It covers the model, its thresholds "
        "and its noise, unless the run was chosen among others. It does not cover this page: below, "
        "each part says what it looks at."
    )
    if searched is None:
        page.note(
            "if this run was chosen among others by figures like these, the choice is a search over raw "
            "rows and epsilon is not that of one run: fastclip.accounting.hpo_epsilon prices a search "
            "whose scores are noisy or public.", "caution",
        )  # fmt: skip
    else:
        page.note(
            f"this run was chosen by a private search, so what covers the model is epsilon "
            f"{searched.epsilon:.4g}{at} in all; one run alone has {searched.base_epsilon:.4g}.",
            "private",
        )  # fmt: skip


def _evaluations(page: Page, frame: pd.DataFrame, part: str) -> None:
    last = frame[frame["step"] == frame["step"].max()]
    page.heading("Groups at the end")
    _looked_at(
        page, frame, part,
        f"rows of {part!r} were looked at without noise: publishing these numbers tells something about "
        "each of these rows, by an amount that nothing here bounds.",
    )  # fmt: skip
    everybody = last[(last["attribute"] == ALL) & last["measure"].isin(OVERALL)]
    page.table(everybody[["measure", "value"]], "Everybody")
    for attribute in _attributes(last):
        shown = (
            RATES[:6] if attribute == CLASS else RATES
        )  # of one class a rate says what accuracy does
        of = last[(last["attribute"] == attribute) & last["measure"].isin(shown)]
        wide = of.pivot(index="group", columns="measure", values="value")
        wide = wide.reindex(index=list(dict.fromkeys(of["group"])), columns=_held(wide, shown))
        page.table(wide.reset_index(), f"By {attribute}")
        gaps = [
            {"measure": name, "largest difference between groups": gap(wide[name].tolist())}
            for name in wide.columns if name not in ("rows", "accuracy_low", "accuracy_high")
        ]  # fmt: skip
        page.table(pd.DataFrame(gaps), f"Differences by {attribute}")
    if frame["step"].nunique() > 1:
        page.heading("Groups over the steps")
        _looked_at(page, frame, part, f"rows of {part!r} without noise, as above.")
        for attribute in _attributes(frame):
            accuracies = _over_steps(frame, attribute, "accuracy")
            if accuracies:
                page.figure(
                    lines({f"By {attribute}": accuracies}, "step", f"accuracy on {part} rows",
                          share=True),
                    f"Accuracy by {attribute}",
                    f"Lines of the accuracy of each group of {attribute} over the training steps.",
                )  # fmt: skip


def _impact(page: Page, ours: pd.DataFrame, plain: pd.DataFrame, part: str) -> None:
    page.heading("Cost of privacy by group")
    _looked_at(
        page, plain, part, f"rows of {part!r} without noise; the baseline is not private at all."
    )
    both = [of[of["step"] == of["step"].max()] for of in (ours, plain)]
    for attribute in _attributes(ours):
        accuracies = []
        for of in both:
            mine = of[(of["attribute"] == attribute) & (of["measure"] == "accuracy")]
            accuracies.append(dict(zip(mine["group"], mine["value"], strict=True)))
        found = privacy_impact(*accuracies)
        rows = [
            {"group": group, "change of accuracy": value} for group, value in found.by_group.items()
        ]
        page.table(
            pd.DataFrame(rows),
            f"By {attribute}: accuracy minus that without privacy (Xu et al. 2020, Definition 6); "
            f"largest difference {found.inequality:.3g}",
        )


def _thresholds(page: Page, frame: pd.DataFrame) -> None:
    of = frame[(frame["part"] == TRAINING) & (frame["measure"] == "threshold")]
    of = of[of["attribute"] != LAYER]
    if of.empty:
        return
    page.heading("Thresholds")
    if of["private"].all():
        page.note(
            "thresholds follow from the settings and noisy counts alone, once their steps are released.",
            "private",
        )
    else:
        page.note("thresholds follow from counts of training rows, without noise.", "not private")
    attribute = of["attribute"].iloc[0]
    panels = {"Clipping threshold": _over_steps(of, attribute, "threshold")}
    page.figure(
        lines(panels, "step", "threshold", log=True), "Thresholds over the steps",
        "Lines of the clipping thresholds over the training steps.",
    )  # fmt: skip


def _norms(page: Page, frame: pd.DataFrame) -> None:
    of = frame[frame["part"] == TRAINING]
    attributes = _attributes(of[of["measure"] == "norm_before"])
    if not attributes:
        return
    page.heading("Gradients of each group")
    page.note(
        "norms and clipped rows are those of the training rows, without noise.", "not private"
    )
    for attribute in attributes:
        norms = {
            "Mean norm before clipping": _over_steps(of, attribute, "norm_before"),
            "Mean norm after clipping": _over_steps(of, attribute, "norm_after"),
        }
        page.figure(
            lines({title: line for title, line in norms.items() if line}, "step",
                  "mean norm of a row's gradient", log=True, columns=1), f"Norms by {attribute}",
            f"Lines of mean gradient norms of each group of {attribute} over the steps.",
        )  # fmt: skip
        clipped = _over_steps(of, attribute, "clipped")
        if not clipped:  # by layers, each of which has norms of its own
            continue
        page.figure(
            lines({f"Rows clipped, by {attribute}": clipped}, "step", "rows above their threshold",
                  share=True),
            f"Share of rows clipped, by {attribute}",
            f"Lines of the share of each group of {attribute} that was clipped over the steps.",
        )  # fmt: skip


def _over_steps(frame: pd.DataFrame, attribute: str, measure: str) -> dict[str, Line]:
    of = frame[(frame["attribute"] == attribute) & (frame["measure"] == measure)].dropna(
        subset="value"
    )
    found = {}
    for group in dict.fromkeys(of["group"]):
        mine = of[of["group"] == group].sort_values("step")
        found[group] = Line(mine["step"].tolist(), mine["value"].tolist())
    return found


def _attributes(frame: pd.DataFrame) -> list[str]:
    """The user's attributes, then the classes."""
    found = [name for name in dict.fromkeys(frame["attribute"]) if name not in (ALL, CLASS, LAYER)]
    return [*found, *([CLASS] if CLASS in set(frame["attribute"]) else [])]


def _held(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in frame]
