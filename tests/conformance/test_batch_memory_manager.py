"""opacus.tests.batch_memory_manager_test: logical batches split into physical ones."""

from fastclip import BatchMemoryManager, FastPrivacyEngine
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

_module = opacus_tests("batch_memory_manager_test")
_names = {"PrivacyEngine": FastPrivacyEngine, "BatchMemoryManager": BatchMemoryManager}

globals().update(cases(_module, OWN, names=_names))
globals().update(  # Opacus skips the empty batches, which it can no longer tell from full ones
    cases(
        _module, FAST, names=_names, attributes={"GSM_MODE": "fast"},
        classes=["BatchMemoryManagerTest"], unskipped=["test_empty_batch"],
    )
)  # fmt: skip
