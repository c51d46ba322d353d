"""Of every broken engine (fastclip/audit/mutants.py) one quick test that fails under it.

`python -m tests.audit.found_by` runs each under its engine, and under the one that is whole, in a
fork of its own, and prints as JSON what became of it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import pytest

from fastclip.audit.mutants import MUTANTS

RELEASED = "tests/ops/noise/test_released.py"
LAW = f"{RELEASED}::test_noise_is_what_is_stated"
LONG = f"{RELEASED}::test_no_step_of_a_long_run_is_without_noise"
RUNS = f"{RELEASED}::test_two_runs_have_nothing_in_common"
COUNTS = f"{RELEASED}::test_noise_of_counts_is_what_is_stated"
FOLLOWS = f"{RELEASED}::test_noise_follows_the_threshold"
DRAWS = "tests/data/test_drawn_law.py::test_draws_are_those_that_are_recorded"
LEVELS = "tests/clipping/test_noise_levels.py"
PAPERS = "tests/clipping/test_papers.py::test_run_is_the_papers_loop"
MOVED = "tests/test_properties.py::test_neighboring_batches"
MEAN = "tests/engine/optimizer/test_optimizers.py::test_a_step_is_the_inner_one_of_the_clipped_mean[sgd]"
PUBLIC = (
    "tests/data/test_plan.py::test_public_rate_and_batch_size_do_not_depend_on_the_number_of_rows"
)

FOUND_BY = {
    "a parameter without noise": LAW,
    "no noise": LAW,
    "noise of 0.9 sigma": LAW,
    "noise that does not follow C": FOLLOWS,
    "sigma over the root of T": LAW,
    "sigma divided by accumulation": LAW,
    "noise in the first step only": LAW,
    "noise reused in every step": LAW,
    "one seed for all parameters (ranks)": LAW,
    "noise that repeats within a tensor": LAW,
    "uniform noise of the same deviation": LAW,
    "noise rounded to 16 bits' exponent": LAW,
    "noise cut at 3 sigma": LAW,
    "noise of uniforms of 10 bits": LAW,
    "noise of a parameter is another's, transposed": LAW,
    "noise that moves by an entry a step": LAW,
    "no noise for parameters of one dimension": LAW,
    "one seed for all runs": f"{RUNS}[False]",
    "one key for all runs": f"{RUNS}[True]",
    "counts with a tenth of their noise": f"{COUNTS}[adaptive]",
    "counts that are not paid for": FOLLOWS,
    "counts of the same step that are not paid for":
        f"{LEVELS}::test_gradient_noise_of_dpsgd_f[1.5-same_step]",
    "raw counts of the same step": f"{COUNTS}[dpsgd_f]",
    "S without the weights of groups": f"{PAPERS}[naive_reweighting_previous_step-torch.float64]",
    "S of layers is the largest C": f"{PAPERS}[per_layer-torch.float32]",
    "no noise from step 41 on": LONG,
    "no noise in one step of 240": LONG,
    "no clipping": f"{MOVED}[0-linear]",
    "clipped at 2 C": f"{MOVED}[0-linear]",
    "norm of one parameter": MEAN,
    "norms of tied uses added in squares":
        "tests/rules/layers/test_reuse.py::test_tied_linears[shape0-weight-dtype0]",
    "averaged before clipping": MEAN,
    "last row of a physical batch as it is":
        "tests/backward/test_step_traps.py::test_batch_memory_manager[3]",
    "scales of the row before": MEAN,
    "no clipping below 100 C": f"{MOVED}[0-linear]",
    "NaN where a row is": MEAN,
    "rows clipped, not units": "tests/backward/test_units.py::test_per_layer[mean-scattered]",
    "sums of the last step are kept": MEAN,
    "the same draw in every step": f"{DRAWS}[one rate]",
    "rows drawn in blocks of 64": f"{DRAWS}[one rate]",
    "draws of one size": f"{DRAWS}[one rate]",
    "a shuffled pass, cut to batches": f"{DRAWS}[one rate]",
    "drawn at twice the rate": f"{DRAWS}[one rate]",
    "the same allocation in every pass": f"{DRAWS}[allocated]",
    "an allocation into equal shares": f"{DRAWS}[allocated]",
    "an allocation by the numbers of rows": f"{DRAWS}[allocated]",
    "Poisson batches recorded as an allocation": f"{DRAWS}[allocated]",
    "every second pass of an allocation recorded": f"{DRAWS}[allocated]",
    "an allocation recorded among twice the batches": f"{DRAWS}[allocated]",
    "groups that are not sampled in turn": f"{DRAWS}[in turn]",
    "groups at the rate of all rows": f"{DRAWS}[in turn]",
    "a turn through the groups at the rate of all rows": f"{DRAWS}[in turn]",
    "draws that are cut, recorded as uncut": f"{DRAWS}[cut]",
    "draws cut to their first rows": f"{DRAWS}[cut]",
    "several rates recorded as their mean": f"{DRAWS}[several rates]",
    "every second step recorded": f"{DRAWS}[one rate]",
    "q recorded as q / 2": f"{DRAWS}[one rate]",
    "sigma recorded as 1.1 sigma": LAW,
    "the stated epsilon is a tenth": "tests/engine/test_engine.py::test_epsilon_is_opacus[gdp]",
    "empty steps skipped": f"{LEVELS}::test_gradient_noise[dp_sgd]",
    "divided by the rows drawn": LAW,
    "B = int(N q)": f"{PUBLIC}[False-False]",
    "a pass of as many steps as rows": f"{PUBLIC}[False-False]",
    "thresholds from raw counts": f"{COUNTS}[adaptive]",
}  # fmt: skip


class _Reports:
    """What became of the tests: "passed", or the exception with which one ended."""

    def __init__(self) -> None:
        self.found = "not run"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        report = yield
        if call.excinfo is not None:
            self.found = f"{call.excinfo.typename} in {report.when}"
        elif report.when == "call":
            self.found = "passed"
        return report


def outcome(test: str, engine: AbstractContextManager[None]) -> str:
    """Of a test under an engine, in a fork: what one leaves behind is not the next one's."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        reports = _Reports()
        try:
            with open(os.devnull, "w") as nowhere, engine:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
                pytest.main([test, "-p", "no:cacheprovider"], plugins=[reports])
        except BaseException as error:
            reports.found = f"{error!r} outside of tests"
        os.write(write, reports.found.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as found:
        return found.read()


def main() -> None:
    pytest.main(
        [*sorted(set(FOUND_BY.values())), "--collect-only", "-p", "no:cacheprovider"]
    )  # imports
    whole = {test: outcome(test, nullcontext()) for test in sorted(set(FOUND_BY.values()))}
    broken = {mutant.name: outcome(FOUND_BY[mutant.name], mutant.broken()) for mutant in MUTANTS}
    print(json.dumps({"whole": whole, "broken": broken}))


if __name__ == "__main__":
    main()
