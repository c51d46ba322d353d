"""What stands for `opacus.PrivacyEngine` in Opacus' tests."""

from __future__ import annotations

from typing import Any

from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import nn

from fastclip import FastPrivacyEngine


class FastEngine(FastPrivacyEngine):
    """Runs the fast mode, whichever mode a test asks for."""

    def make_private(self, **arguments: Any) -> tuple:
        return super().make_private(**{**arguments, "grad_sample_mode": "fast"})


class HooksEngine(FastPrivacyEngine):
    """Runs "hooks", Opacus' default, where a test asks for no mode."""

    def make_private(self, **arguments: Any) -> tuple:
        return super().make_private(**{"grad_sample_mode": "hooks", **arguments})


class Validator(ModuleValidator):
    """Opacus' ModuleValidator with the verdicts of `FastPrivacyEngine`."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        try:
            FastPrivacyEngine().validate(module=module)
        except UnsupportedModuleError as error:
            if strict:
                raise
            return [error]
        return []

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return FastPrivacyEngine().is_compatible(module=module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        if options:  # which the engine's method does not take
            return super().fix(module, **options)
        return FastPrivacyEngine.get_compatible_module(module)
