"""Exact per-sample rules, one file a layer family."""

from __future__ import annotations

from fastclip.rules import (
    contraction,  # noqa: F401  (register)
    conv,  # noqa: F401  (register)
    elementwise,  # noqa: F401  (register)
    embedding,  # noqa: F401  (register)
    linear,  # noqa: F401  (register)
    norm,  # noqa: F401  (register)
    recompute,  # noqa: F401  (register)
    recurrent,  # noqa: F401  (register)
)
from fastclip.rules import embedding as lookup  # noqa: F401  (register)
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
