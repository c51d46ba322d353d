"""opacus.tests.accountants_test: Opacus' accountants, which the engine uses, and our noise search."""

from functools import partial

from fastclip.accounting import find_noise_multiplier
from tests.conformance.substitution import AS_IS, FAST, cases, opacus_tests

_module = opacus_tests("accountants_test")

globals().update(cases(_module, AS_IS, classes=["AccountantRegistryTest"]))
globals().update(  # Opacus' function assumes "rdp" where no accountant is named
    cases(
        _module, FAST, classes=["AccountingTest"],
        names={"get_noise_multiplier": partial(find_noise_multiplier, accountant="rdp")},
    )
)  # fmt: skip
