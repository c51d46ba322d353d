"""opacus.tests.randomness_test: what follows from a seed and what must not."""

from fastclip import FastPrivacyEngine
from tests.conformance import parts
from tests.conformance.engines import HooksEngine
from tests.conformance.substitution import AS_IS, FAST, OWN, cases, opacus_tests

_module = opacus_tests("randomness_test")
_ENGINE = ["PrivacyEngineSecureModeTest"]
_PARTS = ["DataLoaderRandomnessTest", "OptimizerRandomnessTest"]

globals().update(cases(_module, OWN, names={"PrivacyEngine": HooksEngine}, classes=_ENGINE))
globals().update(cases(_module, FAST, names={"PrivacyEngine": FastPrivacyEngine}, classes=_ENGINE))
globals().update(
    cases(
        _module, FAST, classes=_PARTS,
        names={
            "DPDataLoader": parts.Loader, "DPOptimizer": parts.optimizer,
            "GradSampleModule": parts.Module,
        },
    )
)  # fmt: skip
globals().update(cases(_module, AS_IS, classes=["DataLoaderSwitchRandomnessTest"]))

_SECURE = ["test_raise_secure_mode", "test_secure_mode_global_seed", "test_secure_mode_no_poisson"]
globals().update(  # skipped by Opacus, whose secure mode needs torchcsprng
    cases(
        _module, FAST, names={"PrivacyEngine": FastPrivacyEngine}, classes=_ENGINE,
        only=_SECURE, unskipped=_SECURE, suffix="_secure",
    )
)  # fmt: skip
