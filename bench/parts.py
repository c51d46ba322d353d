"""Measures the time of a training step part by part, private and not.

The functions of a step are wrapped from outside while it is measured. The time of a part is the time
of its wrapped functions, without that of wrapped functions inside them. On a CPU a call returns when
its work is done, so the parts of a step add up to it.

PyTorch computes the gradients of inputs and of weights in one call. Non-private training is therefore
run a second time with all parameters frozen, from the output of the first layer on. Its backward pass
is that of the input gradients alone, and the difference is that of the weight gradients.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bench.measure import CpuWait
from bench.training import Training
from bench.workloads import WARM_UP

FORWARD, INPUTS, WEIGHTS = "forward", "input gradients", "weight gradients"
NORMS, SUMS, NOISE = "norms", "clipped sums", "noise"
OPTIMIZER, OTHER = "optimizer", "other"
PARTS = (FORWARD, INPUTS, WEIGHTS, NORMS, SUMS, NOISE, OPTIMIZER, OTHER)


class Stopwatch:
    """Divides time among parts: each moment belongs to the innermost part that runs.

    Args:
        clock: the present in seconds.

    Attributes:
        seconds: by part, so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._running: list[str] = []
        self._since = 0.0

    def _charge(self) -> None:
        now = self._clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to `name`, unless to a part within it."""
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `function`, so its time counts for `name`."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed


def _private() -> list[tuple[Any, str, str]]:
    """Functions of the engine: their module or class, name and part."""
    from fastclip import ops
    from fastclip.backward.backward_pass import BackwardPass
    from fastclip.backward.clipping_state import ClippingState
    from fastclip.engine.optimizer import FastDPOptimizer
    from fastclip.ops import norms as norm_backward
    from fastclip.rules.contribution import Contribution
    from fastclip.rules.records import LookupRecord
    from fastclip.rules.use import UseBackward

    norms = [
        *((ops, name) for name in ("wide_sum", "row_norm_sq", "per_sample_gradients", "kept_gradients")),
        (ops, "conv_per_sample_gradients"), (ops, "kept_conv_gradients"), (ops.LastInput, "norm_sq"),
        *((norm_backward, f"{kind}_norm_grads") for kind in ("layer", "rms", "group")),
        *((Contribution, name) for name in ("plan_linear", "plan_conv", "record")),
        (LookupRecord, "from_dense"), (UseBackward, "run"),
        *((BackwardPass, name) for name in ("pull_back", "norms")), (ClippingState, "clip"),
    ]  # fmt: skip
    sums, noise = (BackwardPass, "sum_into"), (FastDPOptimizer, "add_noise")
    return [*((*where, NORMS) for where in norms), (*sums, SUMS), (*noise, NOISE)]


@contextmanager
def watched(training: Training, watch: Stopwatch, *, private: bool) -> Iterator[None]:
    """Steps of `training` are divided among the parts inside.

    Args:
        training: takes the steps. watch: measures. private: whether training is private.
    """
    inner = getattr(training.optimizer, "original_optimizer", training.optimizer)
    places = [
        (training.model, "forward", FORWARD), (training.criterion, "forward", FORWARD),
        (Tensor, "backward", INPUTS), (inner, "step", OPTIMIZER),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, part in places + (_private() if private else []):
            function = watch.of(part, getattr(owner, name))
            if isinstance(owner, type) and isinstance(
                owner.__dict__[name], (classmethod, staticmethod)
            ):
                function = staticmethod(function)  # bound to its class already
            stack.enter_context(patch.object(owner, name, function))
        yield


def frozen(training: Training) -> Training:
    """The same, with no parameter trained: its backward pass is that of the input gradients.

    The output of the layer that is called first asks for a gradient.
    """
    begun = [False]

    def begin(*_: Any) -> None:
        begun[0] = False

    def open_first(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if begun[0]:
            return None
        begun[0] = True
        return out.detach().requires_grad_()

    training.model.requires_grad_(False)
    training.model.register_forward_pre_hook(begin)
    for module in training.model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(open_first)
    return training


def one_step(training: Training, *, private: bool) -> dict[str, float]:
    """Seconds of one step by part."""
    watch = Stopwatch()
    with watched(training, watch, private=private), watch.part(OTHER):
        training.step()
    return dict(watch.seconds)


def typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By part, the mean over the faster half of the steps: these parts add up."""
    faster = sorted(steps, key=lambda step: sum(step.values()))[: (len(steps) + 1) // 2]
    return {
        name: sum(step.get(name, 0.0) for step in faster) / len(faster)
        for name in PARTS
        if any(name in step for step in faster)
    }


def split_backward(plain: Mapping[str, float], frozen: Mapping[str, float]) -> dict[str, float]:
    """`plain`, its backward pass divided into that of the inputs, as in `frozen`, and the rest."""
    found = {**plain, INPUTS: frozen[INPUTS], WEIGHTS: plain[INPUTS] - frozen[INPUTS]}
    return {name: found[name] for name in PARTS if name in found}


def measure_parts(
    workload: str,
    steps: int,
    threads: int | None = None,
    seconds: float = float("inf"),
) -> dict:
    """Seconds by part of a step without privacy and of fastclip's, taken in turn.

    Three models are held at once: private, non-private and frozen.

    Args:
        workload: its name. steps: of each. threads: of torch. seconds: no turn is begun after these.

    Returns:
        non_private, fastclip: part -> seconds. steps: how many. cpu_wait: as in `measure`.
    """
    warnings.filterwarnings("ignore")
    if threads is not None:
        torch.set_num_threads(threads)
    kinds = {
        "non_private": Training(workload, "non_private"),
        "frozen": frozen(Training(workload, "non_private")),
        "fastclip": Training(workload, "fastclip"),
    }
    for training in kinds.values():
        for _ in range(WARM_UP if training.parts == 1 else 1):
            training.step()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    wait, begin, turn = CpuWait(), time.perf_counter(), 0
    while not turn or (turn < steps and time.perf_counter() - begin < seconds):
        for name, training in kinds.items():
            taken[name].append(one_step(training, private=name == "fastclip"))
        turn += 1
    found = {name: typical(own) for name, own in taken.items()}
    return {
        "workload": workload,
        "non_private": split_backward(found["non_private"], found["frozen"]),
        "fastclip": found["fastclip"],
        "steps": turn,
        "cpu_wait": wait.share(),
    }


def parts_table(found: Mapping[str, Any]) -> str:
    """A line a part: milliseconds and multiples of the whole step without privacy."""
    plain, private = found["non_private"], found["fastclip"]
    whole = sum(plain.values())
    lines = [f"  {'part':<18}{'non-private':>18}{'fastclip':>18}"]
    for name in (*PARTS, "the step"):
        cells = []
        for parts in (plain, private):
            value = sum(parts.values()) if name == "the step" else parts.get(name)
            cells.append("-" if value is None else f"{value * 1e3:,.1f} ms {value / whole:>5.2f}x")
        lines.append(f"  {name:<18}{cells[0]:>18}{cells[1]:>18}")
    return "\n".join(lines)
