"""opacus.tests.privacy_engine_validation_test: custom layers, served or refused by make_private."""

from fastclip import FastPrivacyEngine
from tests.conformance.engines import FastEngine
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

_module = opacus_tests("privacy_engine_validation_test")

globals().update(cases(_module, OWN, names={"PrivacyEngine": FastPrivacyEngine}))
globals().update(cases(_module, FAST, names={"PrivacyEngine": FastEngine}))
