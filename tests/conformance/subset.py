"""The most telling of the quick cases: `make test` runs them, too, in half a minute."""

from __future__ import annotations

from fnmatch import fnmatchcase

_MODELS = ("ConvNet", "TiedWeights")
_LAYERS = ("Conv1d",)

PATTERNS = (
    *(f"privacy_engine::PrivacyEngine{model}Test_fast::*" for model in _MODELS),
    "privacy_engine::PrivacyEngineConvNetHooksTest_fast::test_basic",
    "privacy_engine::PrivacyEngineConvNetTest*::test_flat_clipping",
    *(f"grad_samples::{layer}_test_fast::*" for layer in _LAYERS),
    "batch_memory_manager::*::test_equivalent_to_one_batch",
    "accountants::*::test_register*",
    "accounting_noise_multiplier::*",
    "dpdataloader::*",
    "gradient_accumulation::*",
    "poisson::*",
    "privacy_engine_validation::*",
    "randomness::*",
    "schedulers::*",
    "validators::*",
    "grad_sample_module::*",
)


LONG = ("privacy_engine::*::test_noise_level",)


def chosen(case: str) -> bool:
    """Whether `<module>::<class>::<test>` is one of them."""
    if any(fnmatchcase(case, pattern) for pattern in LONG):
        return False
    return any(fnmatchcase(case, pattern) for pattern in PATTERNS)
