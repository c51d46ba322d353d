"""opacus.tests.validators and module_validator_test: what is refused, and replaced by what."""

from tests.conformance.engines import Validator
from tests.conformance.substitution import AS_IS, FAST, cases, opacus_tests

for _layer in ("batch_norm", "gru", "instance_norm", "lstm", "multihead_attention"):
    globals().update(cases(opacus_tests(f"validators.{_layer}_test"), AS_IS))

globals().update(
    cases(opacus_tests("module_validator_test"), FAST, names={"ModuleValidator": Validator})
)
