"""One seed and the same examples for every test, one thread a worker, one expected warning silenced."""

from __future__ import annotations

import gc
import os
import random
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing import active_children
from zlib import crc32

import hypothesis
import numpy as np
import pytest
import torch

# No test may depend on what someone has measured or compiled and kept on this machine, nor
# compile more; set before fastclip's import.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fastclip-tests-")
os.environ.pop("FASTCLIP_CACHE", None)
os.environ["FASTCLIP_BUILD"] = "0"

from fastclip.backward.traced_step import leave_late
from fastclip.core.torch_names import dispatch_modes

pytest.register_assert_rewrite("tests.oracle")

# The same examples in every run, and no clock: a busy machine fails no test.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("steady")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


if not torch.cuda.is_available():  # kernels run in Triton's interpreter; set before its import
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Opacus warns about its random numbers whenever an engine is built; nothing else is hidden."""
    config.addinivalue_line("filterwarnings", "ignore:Secure RNG turned off:UserWarning")


def pytest_addoption(parser: pytest.Parser) -> None:
    """A part of all files: `--part 2/4`."""
    parser.addoption("--part", default="1/1", help="K/N: the K-th of N parts of the files")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is slow, before that is left out; and of all files those of a part."""
    part, parts = map(int, config.getoption("part").split("/"))
    files = sorted({item.nodeid.partition("::")[0] for item in items})
    chosen = {file for i, file in enumerate(files) if i % parts == part - 1}
    left_out = [item for item in items if item.nodeid.partition("::")[0] not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid.partition("::")[0] in chosen]
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for test, several in cases.items():
        marker = several[0].get_closest_marker("one_in")
        if marker is None:
            several = [item for item in several if item.get_closest_marker("slow") is None]
        every = marker.args[0] if marker else _one_in(len(several))
        if every == 1 or not several:
            continue
        for item in set(several).difference(_quick(test, several, every)):
            item.add_marker(pytest.mark.slow)


def _one_in(cases: int) -> int:
    """Of a test that does not say itself how many of its cases are quick."""
    return 1 if cases < 4 else 2 if cases < 16 else 3


def _quick(test: str, cases: list[pytest.Item], every: int) -> list[pytest.Item]:
    """One of each so many cases, the one whose parameters' values are the rarest so far."""
    chosen: Counter[tuple[str, str]] = Counter()
    found = []
    for first in range(0, len(cases), every):
        some = cases[first : first + every]
        start = crc32(f"{test} {first}".encode()) % len(some)
        values = list(map(_values, some))
        order = [*range(start, len(some)), *range(start)]
        rarest = min(order, key=lambda i: sum(map(chosen.__getitem__, values[i])))
        chosen.update(values[rarest])
        found.append(some[rarest])
    return found


def _values(case: pytest.Item) -> list[tuple[str, str]]:
    """Of the test's parameters, with their names."""
    assert isinstance(case, pytest.Function)
    return [(name, str(value)) for name, value in case.callspec.params.items()]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Of each generator that is everybody's: what came before a test changes none of its numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _process() -> dict[str, object]:
    """What a test may find changed by another one: all that belongs to the process."""
    return {
        **{f"${name}": os.environ.get(name) for name in _ENVIRONMENT},
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "modes": dispatch_modes(),
    }


_ENVIRONMENT = tuple({*os.environ, "FASTCLIP_BACKEND", "PYTHONPATH"} - {"PYTEST_CURRENT_TEST"})
"""Libraries add variables of their own; those that are here stay as they are."""


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """The tests of a worker share one process: one that changes it breaks others, far away."""
    before = _process()
    yield
    if active_children():
        _end_workers()
    if dispatch_modes() > before["modes"]:  # type: ignore[operator]
        gc.collect()  # a model in a cycle takes the mode of its traced step along
        leave_late()
    assert _process() == before


def _end_workers() -> None:
    """Let loaders that a test has left go here, and not in a test that comes later.

    A DataLoader whose sampler raises at once is kept by the traceback, with workers that were given
    nothing. The garbage collector then closes the queues' ends beside the threads that its
    finalizer starts; one of them fails, and in Python 3.11 its traceback breaks an `ast.parse` that
    the collector has interrupted.
    """
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=1.0)
