"""opacus.tests.privacy_engine_test: whole training runs, all model classes, wrapped or not."""

from fastclip import FastPrivacyEngine
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

_module = opacus_tests("privacy_engine_test")
_names = {"PrivacyEngine": FastPrivacyEngine}

globals().update(cases(_module, OWN, names=_names))
# Classes that differ in their mode only are one and the same in the fast mode.
globals().update(
    cases(
        _module, FAST, names=_names, attributes={"GRAD_SAMPLE_MODE": "fast"},
        classes=[
            f"PrivacyEngine{model}{kind}Test"
            for model in ("ConvNet", "ConvNetFrozen", "Text", "TiedWeights", "CustomLayer")
            for kind in ("", "Hooks")
        ],
    )
)  # fmt: skip
globals().update(  # skipped by Opacus: every row alone, so that most Poisson batches are empty
    cases(
        _module, FAST, names=_names, classes=["PrivacyEngineConvNetEmptyBatchTest"],
        attributes={"GRAD_SAMPLE_MODE": "fast", "__unittest_skip__": False},
    )
)  # fmt: skip
