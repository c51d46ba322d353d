"""opacus.tests.poisson_test: the sampler as the fast mode leaves it, and in secure mode."""

from tests.conformance import parts
from tests.conformance.substitution import FAST, cases, opacus_tests

_module = opacus_tests("poisson_test")

globals().update(
    cases(_module, FAST, names={"UniformWithReplacementSampler": parts.watched_sampler})
)
globals().update(  # not test_batch_sizes: without a seed it fails in one run of thirty, as it must
    cases(
        _module, FAST, names={"UniformWithReplacementSampler": parts.secure_sampler},
        only=["test_length", "test_same_seed", "test_different_seed"], suffix="_secure",
    )
)  # fmt: skip
