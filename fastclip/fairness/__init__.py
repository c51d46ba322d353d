"""Measures the effect of clipping on subgroups in any training loop. Needs `fastclip[fairness]`.

Only thresholds, noise and noisy counts are private here. docs/fairness.md says what you may publish.
"""

from fastclip.errors import ArgumentError

try:
    import fairlearn  # noqa: F401
    import matplotlib  # noqa: F401
    import pandas  # noqa: F401
    import scipy  # noqa: F401
except ImportError as error:
    raise ArgumentError(
        f"fastclip.fairness needs {error.name}, which is not installed. Run pip install "
        "'fastclip[fairness]'.",
        doc="missing-libraries",
    ) from error

from fastclip.fairness.recorder import FairnessRecorder
from fastclip.fairness.report import Page, fairness_report
from fastclip.fairness.statistics import (
    Paired,
    PrivacyImpact,
    bonferroni,
    bootstrap_interval,
    disparity_reduction,
    gap,
    paired_wilcoxon,
    privacy_impact,
)

__all__ = [
    "FairnessRecorder",
    "Page",
    "Paired",
    "PrivacyImpact",
    "bonferroni",
    "bootstrap_interval",
    "disparity_reduction",
    "fairness_report",
    "gap",
    "paired_wilcoxon",
    "privacy_impact",
]
