"""Opacus' own names, which every module of this package gives for names that fastclip lacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import opacus
from opacus import grad_sample, optimizers
from opacus.utils import batch_memory_manager

from fastclip.core.opacus_names import GradSampleHooks as OpacusHooks
from fastclip.engine.batch_memory import BatchMemoryManager
from fastclip.engine.by_hand import (
    DistributedDPOptimizer,
    DPOptimizer,
    GradSampleHooks,
    GradSampleModule,
)
from fastclip.opacus.engine import PrivacyEngine

OURS: dict[type, type] = {
    opacus.PrivacyEngine: PrivacyEngine,
    OpacusHooks: GradSampleHooks,
    grad_sample.GradSampleModule: GradSampleModule,  # before 1.6 the same
    optimizers.DPOptimizer: DPOptimizer,
    optimizers.DistributedDPOptimizer: DistributedDPOptimizer,
    batch_memory_manager.BatchMemoryManager: BatchMemoryManager,
}
"""Opacus' classes and their replacements."""


def rest_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that replaces some names of one of Opacus' modules.

    Args:
        module: the path of Opacus' module.
    """

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(import_module(module), name)
        return OURS.get(value, value) if isinstance(value, type) else value

    return get
