"""opacus.tests.dpdataloader_test: the loader and its empty batches as the fast mode leaves them."""

from tests.conformance import parts
from tests.conformance.substitution import FAST, cases, opacus_tests

globals().update(
    cases(
        opacus_tests("dpdataloader_test"), FAST,
        names={
            "DPDataLoader": parts.Loader, "CollateFnWithEmpty": parts.Collate,
            "wrap_collate_with_empty": parts.wrap_collate,
        },
    )
)  # fmt: skip
