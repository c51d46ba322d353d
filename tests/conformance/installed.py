"""`python -m tests.conformance.installed`: Opacus' own test files after `fastclip.opacus.install()`.

`python -m tests.conformance` puts the engine in the place of names in these files; here they are not
changed, and import `opacus` as any program does. Further arguments are pytest's: `-n 2`, `-k Text`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis
import opacus
import pytest
import torch

import fastclip.opacus
from fastclip.errors import BatchSizeError, GradSampleError, StepError
from tests.conformance import not_applicable, torchvision_stub

HERE = Path(opacus.__file__).parent / "tests"
NEEDS_GPUS = ("multi", "ddp_hook", "distributed")
"""Beginnings of the names of files that ask for several GPUs."""

NOT_APPLICABLE: dict[str, tuple[type[BaseException], str]] = {
    "*::test_sample_grad_aggregation": (AttributeError, not_applicable.NEVER_THERE),
    "*::test_privacy_engine_no_poisson_accumulation": (AttributeError, not_applicable.NEVER_THERE),
    "*GradientClippingTest::test_norm_calculation_fast*": (
        GradSampleError, not_applicable.NEVER_THERE,
    ),
    "*EmbeddingLayerTest::test_norm_calculation": (GradSampleError, not_applicable.NEVER_THERE),
    "*PrivacyEngineText*::test_make_private_with_epsilon": (
        BatchSizeError, not_applicable.POSITIONS,
    ),
    "*PrivacyEngineCustomLayerTest::test_noise_level": (AssertionError, not_applicable.LUCK),
    "*PrivacyEngineCustomLayerHooksTest::test_noise_level": (AssertionError, not_applicable.LUCK),
    "*OptimizerRandomnessTest::test_generator": (StepError, not_applicable.UNSEEDED),
    "*OptimizerRandomnessTest::test_generator_with_global_seed": (
        StepError, not_applicable.UNSEEDED,
    ),
    "*::test_extra_param_ew": (AssertionError, not_applicable.MUST_FAIL),
    "*::test_unsupported_ew": (AssertionError, not_applicable.MUST_FAIL),
    "*::test_custom_linear_hooks": (AssertionError, not_applicable.HOW),
    "*::test_unsupported_hooks": (AssertionError, not_applicable.HOW),
    "*::test_extra_param_hooks_requires_grad": (AssertionError, not_applicable.HOW),
    "*::test_comparison_dpoptimizer_vs_adaclip_accounting": (
        StepError, "makes a DPOptimizer of parameters that no GradSampleModule has",
    ),
    "*::test_privacy_accounting_with_adaclip_e2e": (
        AssertionError, "asks for the class of Opacus' adaptive optimizer",
    ),
}  # fmt: skip
"""Patterns of node ids: what the case ends in, and why."""
_met: set[str] = set()
_stub = ExitStack()


def files() -> list[str]:
    """Opacus' test files that one process without a GPU can run."""
    found = [*HERE.rglob("*_test.py"), HERE / "prv_accountant.py"]
    return sorted(str(path) for path in found if not path.name.startswith(NEEDS_GPUS))


def pytest_configure(config: pytest.Config) -> None:
    """Before any of them is imported, in every process of the run."""
    hypothesis.settings.register_profile(
        "installed", derandomize=True, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    hypothesis.settings.load_profile("installed")
    torch.set_num_threads(1)
    _stub.enter_context(torchvision_stub.installed())
    fastclip.opacus.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All are imported; what cannot apply must fail as it says."""
    _stub.close()
    for item in items:
        for pattern, (error, reason) in NOT_APPLICABLE.items():
            if fnmatchcase(item.nodeid, pattern):
                _met.add(pattern)
                item.add_marker(pytest.mark.xfail(reason=reason, raises=error, strict=True))


def pytest_unconfigure() -> None:
    """Where nothing was collected (the process that hands tests on)."""
    _stub.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A pattern that meets no case fails a whole run."""
    option = session.config.option
    if not (option.keyword or option.collectonly or hasattr(session.config, "workerinput")):
        idle = set(NOT_APPLICABLE) - _met if session.items else set()
        if idle:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nno case meets {sorted(idle)}")


def main(arguments: list[str]) -> int:
    options = ["-q", "--tb=short", "-c", "/dev/null", "--rootdir", str(HERE), "-W", "ignore"]
    return int(pytest.main([*options, "-p", __spec__.name, *files(), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
