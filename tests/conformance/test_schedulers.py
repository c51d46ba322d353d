"""opacus.tests.schedulers: Opacus' schedulers of the threshold and of the noise."""

from fastclip import FastPrivacyEngine
from tests.conformance.engines import HooksEngine
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

for _what in ("grad_clip", "noise"):
    _module = opacus_tests(f"schedulers.{_what}_scheduler_test")
    globals().update(cases(_module, OWN, names={"PrivacyEngine": HooksEngine}))
    globals().update(cases(_module, FAST, names={"PrivacyEngine": FastPrivacyEngine}))
