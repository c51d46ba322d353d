"""opacus.tests.grad_sample_module_test and grad_sample_hooks_test: the private model as a model."""

from tests.conformance import parts
from tests.conformance.substitution import FAST, cases, opacus_tests

globals().update(
    cases(
        opacus_tests("grad_sample_module_test"), FAST, classes=["GradSampleModuleTest"],
        names={"GradSampleModule": parts.Module}, attributes={"CLS": parts.Module},
    )
)  # fmt: skip
globals().update(
    cases(
        opacus_tests("grad_sample_hooks_test"), FAST,
        names={"GradSampleHooks": parts.Hooks}, attributes={"CLS": parts.Hooks},
    )
)  # fmt: skip
