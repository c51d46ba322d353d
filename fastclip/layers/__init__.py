"""Exact per-sample rules, one file a layer family."""

from fastclip.layers import conv, embedding, linear, norm, sequence_bias  # noqa: F401  (register)
from fastclip.layers.linear import linear_record
from fastclip.layers.records import (
    BiasRecord,
    ConvRecord,
    KeptRecord,
    LinearRecord,
    LookupRecord,
    Record,
    ViewedRecord,
    join,
)
from fastclip.layers.reuse import joint_norm_sq, joint_record
from fastclip.layers.rule import LayerRule, register_rule
from fastclip.layers.sampled import find_rule

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
