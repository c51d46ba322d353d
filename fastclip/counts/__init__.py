"""Noisy counts of subgroups. `engine.count` releases them, and the ledger records their cost."""

from fastclip.counts.lines import Line, PrivacyByDataSet
from fastclip.counts.query import (
    TRAINING_SET,
    CountQuery,
    PrivateData,
    PublicData,
    accuracy_query,
)
from fastclip.counts.release import NoisyCounts, PaidCounts, Rate
from fastclip.counts.stopping import EarlyStopping, Evaluation, overall_rate, worst_rate

__all__ = [
    "TRAINING_SET",
    "CountQuery",
    "EarlyStopping",
    "Evaluation",
    "Line",
    "NoisyCounts",
    "PaidCounts",
    "PrivacyByDataSet",
    "PrivateData",
    "PublicData",
    "Rate",
    "accuracy_query",
    "overall_rate",
    "worst_rate",
]
