"""Exact per-sample rules of layers, and of functions that take a parameter: one file a family."""

from __future__ import annotations

from fastclip.rules import (  # noqa: F401  (each registers its rules)
    contraction,
    conv,
    elementwise,
    embedding,
    linear,
    norm,
    recompute,
    recurrent,
)
from fastclip.rules.linear import linear_record
from fastclip.rules.protocol import LayerRule, find_rule, register_rule
from fastclip.rules.records import (
    BiasRecord,
    ConvRecord,
    KeptRecord,
    LinearRecord,
    LookupRecord,
    Record,
    ViewedRecord,
    join,
)
from fastclip.rules.reuse import joint_norm_sq, joint_record

__all__ = [
    "BiasRecord",
    "ConvRecord",
    "KeptRecord",
    "LayerRule",
    "LinearRecord",
    "LookupRecord",
    "Record",
    "ViewedRecord",
    "find_rule",
    "join",
    "joint_norm_sq",
    "joint_record",
    "linear_record",
    "register_rule",
]
