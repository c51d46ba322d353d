"""opacus.tests.accounting_noise_multiplier_test: what adaptive clipping records as spent."""

from fastclip import FastPrivacyEngine
from fastclip.engine.opacus_modes.optimizers import MaterializedAdaptiveOptimizer
from fastclip.engine.optimizer import FastDPOptimizer
from tests.conformance.engines import FastEngine
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

_module = opacus_tests("accounting_noise_multiplier_test")

globals().update(
    cases(
        _module, OWN,
        names={
            "PrivacyEngine": FastPrivacyEngine, "AdaClipDPOptimizer": MaterializedAdaptiveOptimizer,
        },
    )
)  # fmt: skip
globals().update(  # the others build the optimizer of Opacus' own modes by hand
    cases(
        _module, FAST, only=["test_privacy_accounting_with_adaclip_e2e"],
        names={"PrivacyEngine": FastEngine, "AdaClipDPOptimizer": FastDPOptimizer},
    )
)  # fmt: skip
