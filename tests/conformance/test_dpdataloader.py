"""opacus.tests.dpdataloader_test: the loader as the fast mode leaves it."""

from tests.conformance import parts
from tests.conformance.substitution import FAST, cases, opacus_tests

globals().update(
    cases(
        opacus_tests("dpdataloader_test"), FAST,
        names={"DPDataLoader": parts.Loader},
    )
)  # fmt: skip
