"""opacus.tests.gradient_accumulation_test: several backward passes under one step, or refused."""

from fastclip import FastPrivacyEngine
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

_module = opacus_tests("gradient_accumulation_test")
_names = {"PrivacyEngine": FastPrivacyEngine}

globals().update(cases(_module, OWN, names=_names))
globals().update(
    cases(
        _module, FAST, names=_names, attributes={"GRAD_SAMPLE_MODE": "fast"},
        classes=["GradientAccumulationTest"],
    )
)  # fmt: skip
