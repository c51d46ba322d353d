"""Captures one pass over a fixed number of samples, and checks what a capture freezes.

The first graph is the forward pass, the loss, the backward pass and the squared norms. The second is
the clipped sums. Between them the engine computes scales from norms without a graph, over the real
samples only: thresholds, counts, groups and noise never see a placeholder sample. The scale of a
placeholder is 0, which removes it from every sum, whatever its gradient is, NaN included.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward.backward_pass import BackwardPass
from fastclip.backward.python_nodes import arithmetic
from fastclip.backward.state import GradientState
from fastclip.backward.sums import SumsOfOne
from fastclip.core.numerics import gpu_products
from fastclip.core.snapshot import Facts, Snapshot, fact, which
from fastclip.engine.graphs import Recorder
from fastclip.errors import FastclipError, GraphError
from fastclip.samples.settings import Settings
from fastclip.samples.subsets import MOST_SAMPLES
from fastclip.trace.law import generators

# -------------------------------------------------------------------------------------------------
# The parts of the user's functions: defaults, closures, globals, and the objects in these.
#
# A graph does not run the functions again, so their parts must not change.


_DEEPEST, _LONGEST, _MOST = 4, 256, 4096
"""Depth, entries per container and objects in all that are watched; `prove_again` covers the rest."""
_LARGE = 1 << 16
"""Bytes from which on an array is not compared."""
_LIBRARIES = {"torch", "transformers", "numpy", "fastclip", "opacus", *sys.stdlib_module_names}


class Reach:
    """All objects that some functions and attributes reached when it was made.

    Args:
        functions: the user's functions. places: attributes of objects as (vars(object), name).
        known: objects that are watched elsewhere.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        places: Iterable[tuple[dict[str, Any], str]],
        known: Iterable[Any],
    ) -> None:
        self._functions = [*functions]
        self._places: list[Any] = [*zip(*places, strict=True)] or [(), ()]
        self._known = {*map(id, known)}
        objects = [*self._there()]
        self._walked = [k for k, value in enumerate(objects) if [*_parts(value)]]
        """Indices of the attributes whose objects consist of others."""
        self._held = [*self._read()]

    def facts(self) -> Iterator[Facts]:
        """The identities of these objects; for numbers and text their values."""
        yield Facts(range(len(self._places[0])), self._there, which)
        yield Facts(range(_MOST), self._read, which)

    def _there(self) -> Iterator[Any]:
        return map(dict.get, *self._places)

    def generators(self) -> list[Any]:
        """The states of Python's and NumPy's generators among the objects."""
        states = [x.getstate() for x in self._held if isinstance(x, random.Random)]
        numpys = (x for x in self._held if type(x).__module__.startswith("numpy.random"))
        held = (getattr(x, "_bit_generator", getattr(x, "bit_generator", x)) for x in numpys)
        return [*states, *(repr(getattr(x, "state", None)) for x in held)]

    def _read(self) -> Iterator[Any]:
        return islice(self._all([*self._there()]), _MOST)

    def _all(self, objects: list[Any]) -> Iterator[Any]:
        seen: set[int] = set()
        for value in (*self._functions, *[objects[k] for k in self._walked]):
            if id(value) not in seen:
                yield from self._of(value, seen, 0)

    def _of(self, value: Any, seen: set[int], depth: int) -> Iterator[Any]:
        yield value
        if id(value) in seen or id(value) in self._known or depth > _DEEPEST:
            return
        seen.add(id(value))
        for part in _parts(value):
            yield from self._of(part, seen, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value; none for functions and classes of a library."""
    if isinstance(value, FunctionType):
        return () if _is_of_a_library(value) else _of_function(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, dict):
        return islice(chain.from_iterable(value.items()), _LONGEST)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return islice(value, _LONGEST)
    if type(value).__module__ == "numpy":
        return (value.tobytes(),) if getattr(value, "nbytes", _LARGE) < _LARGE else ()
    if isinstance(value, nn.Module):
        return vars(value).values()
    if isinstance(value, type):
        own = () if _is_of_a_library(value) else (*vars(value).values(), *value.__bases__)
        return islice(own, _LONGEST)
    if isinstance(value, Tensor) or _is_of_a_library(type(value)):
        return ()
    slots = (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    return islice(chain((type(value),), getattr(value, "__dict__", {}).values(), slots), _LONGEST)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            yield None
    known = function.__globals__
    names, attributes = _names_of(function.__code__)
    found = [known[name] for name in names if name in known]
    yield from found
    for module in found:
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] not in _LIBRARIES:
            yield from (vars(module)[name] for name in attributes if name in vars(module))


@lru_cache(maxsize=1024)
def _names_of(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of globals, and all names, in a function's code and in nested code."""
    globals_, names = [], [*code.co_names]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_.append(str(instruction.argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _names_of(inner)
            globals_ += more
            names += others
    return tuple(dict.fromkeys(globals_)), tuple(dict.fromkeys(names))


def _is_of_a_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES


# -------------------------------------------------------------------------------------------------
# What a capture freezes: everything in Python that determines the device's work of a pass.
#
# A replay first checks whether any of it has changed. Values that change from step to step
# (thresholds, counts, groups, noise, the sampled batch) stay outside of the graph.


_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_FORWARD, _KIND = attrgetter("forward"), attrgetter("shape", "dtype", "requires_grad")


class Frozen:
    """The state in which a pass was captured.

    It keeps its tensors alive, so no other tensor can get an address that was recorded.

    Args:
        model: the private model.
        grad_state: its gradient state.
        device: of its parameters. loss_function: the user's.
    """

    def __init__(
        self, model: nn.Module, grad_state: GradientState, device: torch.device, loss_function: Any
    ) -> None:
        self._grad_state, self._device = grad_state, device
        self._settings = Settings(model)
        self._modules = list(model.modules())
        items = [(vars(m), name, x) for m in self._modules for name, x in vars(m).items()]
        plain = [(table, name) for table, name, x in items if _is_plain(x)]
        self._plain: list[Any] = [*zip(*plain, strict=True)] or [(), ()]
        self._loose = [(table, name) for table, name, x in items if isinstance(x, Tensor)]
        own = (t for m in self._modules for t in (m._parameters, m._buffers))
        self._filled = [table for table in own if table]
        self._tables = [x for *_, x in items if isinstance(x, dict)]
        """Hooks of each kind, submodules, and other dictionaries."""
        self._held = self._tensors()
        kinds = dict.fromkeys(map(type, self._modules))
        deeper = [
            (table, name)
            for table, name, x in items
            if name not in _OF_MODULES and not (_is_plain(x) or isinstance(x, Tensor))
        ]
        tables = [x for _, name, x in items if isinstance(x, dict) and name.endswith("_hooks")]
        hooks = [hook for table in tables for hook in table.values()]
        known = [*self._modules, *self._held]
        self.reach = Reach([loss_function, *kinds, *hooks], deeper, known)
        self._snapshot = Snapshot(self._facts())

    def changed(self) -> bool:
        """Whether any part of the state has changed."""
        return bool(self._settings.changed() or self._snapshot.changed())

    def _facts(self) -> Iterator[Facts]:
        yield fact("settings of torch", partial(surroundings, self._device))
        yield fact("dry runs of the model", lambda: len(self._grad_state.calls.looks))
        yield Facts(range(len(self._tables)), partial(map, len, self._tables))
        yield fact("classes", self._kinds)
        yield Facts(range(len(self._plain[0])), partial(map, dict.get, *self._plain))
        yield fact("tensors", self._lie)
        yield from self.reach.facts()

    def _kinds(self) -> list[Any]:
        kinds = [*map(type, self._modules)]
        return [kinds, [*map(_FORWARD, kinds)]]

    def _tensors(self) -> list[Tensor]:
        found = [x for table in self._filled for x in table.values() if x is not None]
        loose = (table.get(name) for table, name in self._loose)
        return found + [x for x in loose if isinstance(x, Tensor)]

    def _lie(self) -> list[Any]:
        found = self._tensors()
        reads = (id, Tensor.data_ptr, Tensor.stride, _KIND)
        return [[*map(read, found)] for read in reads]


def _is_plain(value: Any) -> bool:
    return all(type(x) in _PLAIN for x in (value if type(value) is tuple else (value,)))


def surroundings(device: torch.device) -> tuple[Any, ...]:
    """Settings of torch that affect operations."""
    kind, cuda = device.type, torch.backends.cuda.matmul
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        gpu_products(),
        cuda.allow_fp16_reduced_precision_reduction,
        cuda.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.enabled,
    )


def check_decided(grad_state: GradientState) -> None:
    """Raise an error for a model whose Python code decides anew in every call.

    Raises:
        GraphError: the code depends on values of the batch, or on random numbers.
    """
    if any(layout.by_values or layout.by_chance for layout in grad_state.calls.layouts.values()):
        raise GraphError(
            "Python code of the model depends on values of the batch or on random numbers, and a graph "
            "would not run it again. Use tensor operations such as torch.where.",
            doc="compile-and-graphs",
        )


def settled(grad_state: GradientState, samples: int) -> bool:
    """Whether no later batch of up to `samples` samples needs a dry run, which a replay cannot do."""
    known = [layout for layout in grad_state.calls.layouts.values() if layout.known]
    enough = min(MOST_SAMPLES, samples)
    sure = (x.proven or x.flat or x.compared >= enough for x in known)
    return bool(known) and all(sure)


# -------------------------------------------------------------------------------------------------


_TOLERANCE = {torch.float64: 1e-9}
_COARSE = 2e-2
"""Tolerance for other dtypes: kernels may sum in another order. A wrong graph differs by more."""


class _Sums(SumsOfOne):
    """Clipped sums of one pass, per parameter."""

    def __init__(self) -> None:
        self.held: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, clipped: Tensor) -> None:
        """As in ClippedSums, but not visible on parameters."""
        before = self.held.get(parameter)
        clipped = clipped.reshape(-1)
        self.held[parameter] = clipped if before is None else before + clipped


class Rehearsed:
    """A pass that contributes nothing, with its losses and norms."""

    def __init__(self, grad_state: GradientState, run: Callable[[], Tensor]) -> None:
        self.grad_state = grad_state
        self._caught: list[tuple[BackwardPass, float]] = []
        self.norm_sq = torch.empty(0, dtype=torch.float32, device="cpu")
        grad_state.caught = self._catch
        try:
            self.losses = run().detach()
        finally:
            grad_state.caught = None
        if len(self._caught) != 1:
            raise GraphError(
                "No gradient of the losses reached the output of the private model. Return the losses "
                "of that output, one per sample.",
                doc="compile-and-graphs",
            )
        self.current, self.factor = self._caught[0]
        self.calls = len(self.current.forwards)

    def _catch(self, current: BackwardPass, factor: float) -> None:
        self._caught.append((current, factor))
        self.norm_sq = current.norms(factor, self.grad_state.names)

    def layers(self) -> Tensor | None:
        """Which parameters took part, for thresholds per layer."""
        if not self.grad_state.clipping.strategy.threshold.per_layer:
            return None
        return self.current.places(self.grad_state.names, self.norm_sq.device)

    def sums(self, factors: Tensor) -> tuple[list[tuple[nn.Parameter, ...]], list[Tensor]]:
        """Clipped sums for these factors: parameters of each dtype, and their concatenated sums."""
        sums: Any = _Sums()
        with arithmetic(self.grad_state.names), ops.looked_at(factors):
            self.current.sum_into(sums, factors)
            kinds: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in self.grad_state.names:  # in the same order, whichever layers are bare
                if (total := sums.held.get(parameter)) is not None:
                    kinds.setdefault(total.dtype, []).append(parameter)
            flat = [torch.cat([sums.held[p] for p in held]) for held in kinds.values()]
        return [tuple(held) for held in kinds.values()], flat


class Recording:
    """A captured pass.

    Args:
        recorder: captures the pass.
        grad_state: the model's gradient state.
        run: the pass over `inputs`, which hold samples already; returns one loss per sample.
        inputs: the tensors that the graph reads.
        frozen: makes the `Frozen` state of the capture.

    Raises:
        GraphError: the pass cannot be captured, or a replay differs from the pass. Nothing has been
            counted or summed.
    """

    def __init__(
        self, recorder: Recorder, grad_state: GradientState, run: Callable[[], Tensor],
        inputs: list[Tensor], frozen: Callable[[], Frozen],
    ) -> None:  # fmt: skip
        self.inputs, self._grad_state, self._without = inputs, grad_state, recorder.without
        self._recorder, self._pass, self._replays = recorder, run, 0
        state = recorder.random_state()
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a graph must cast the weights as they are then
        torch.clear_autocast_cache()
        given = [x.clone() for x in inputs]
        try:
            with grad_state.trace.untraced():
                self._record(frozen)
        except FastclipError:
            raise
        except RuntimeError as error:
            raise GraphError(
                f"The pass cannot be {recorder.what} ({str(error).splitlines()[0]}). Remove this "
                f"operation from the model and the loss, or pass {recorder.without}.",
                doc="compile-and-graphs",
            ) from error
        finally:
            torch.set_autocast_cache_enabled(cached)
            grad_state.drop_stale()
            recorder.set_random_state(state)
            for x, before in zip(inputs, given, strict=True):
                x.copy_(before)

    def _record(self, frozen: Callable[[], Frozen]) -> None:
        recorder = self._recorder
        # The first run compiles and tunes kernels and fills caches. The second shows what changes in
        # every run, the third what waits for the device.
        recorder.warm_up(self._rehearse)
        self.frozen = frozen()
        by_python = generators(), self.frozen.reach.generators()
        recorder.warm_up(self._rehearse)
        self._check_rests()
        recorder.rehearse(self._rehearse)
        self._capture()
        self._check_rests()
        if (generators(), self.frozen.reach.generators()) != by_python:
            raise GraphError(
                "Python code of the model or the loss draws random numbers, which a graph would not "
                f"draw again. Draw them with torch, or pass {self._without}.",
                doc="compile-and-graphs",
            )
        self._prove()
        self._check_rests()

    def changed(self) -> bool:
        """Whether anything that it was captured with has changed."""
        moved = self._first.has_moved() or self._second.has_moved()
        return moved or self.frozen.changed()

    def _check_rests(self) -> None:
        if self.frozen.changed():
            raise GraphError(
                "The model changes its attributes, buffers or submodules while it runs, which a replay "
                f"would not do. Keep call counters out of the model, or pass {self._without}.",
                doc="compile-and-graphs",
            )

    def _rehearse(self) -> Rehearsed:
        rehearsed = Rehearsed(self._grad_state, self._pass)
        rehearsed.sums(self._no_factors(rehearsed.norm_sq))
        return rehearsed

    def _no_factors(self, norm_sq: Tensor) -> Tensor:
        shape = (
            norm_sq.shape
            if self._grad_state.clipping.strategy.threshold.per_layer
            else norm_sq.shape[1:]
        )
        return norm_sq.new_zeros(shape)

    def _capture(self) -> None:
        def first() -> tuple[Rehearsed, list[Tensor]]:
            rehearsed = Rehearsed(self._grad_state, self._pass)
            return rehearsed, [rehearsed.losses, rehearsed.norm_sq]

        self._first, rehearsed = self._recorder.capture(first)
        self._factor, self._calls = rehearsed.factor, rehearsed.calls
        self._layers = rehearsed.layers()
        self._first_parameter = [*self._grad_state.names][:1]  # all lie on one device
        self._factors = self._no_factors(rehearsed.norm_sq)
        sums = partial(rehearsed.sums, self._factors)
        self._second, self._kinds = self._recorder.capture(sums)

    def _prove(self) -> None:
        """Compare replay and pass on other samples and other weights than the captured ones."""
        for x in self.inputs:
            x.copy_(x.roll(1, 0))
        with _stirred(self._grad_state.names):
            self._compare()

    def _compare(self) -> None:
        """Compare a replay with the pass itself, on the samples in `inputs`.

        Raises:
            GraphError: they differ.
        """
        state = self._recorder.random_state()
        expected = Rehearsed(self._grad_state, self._pass)
        dtype, norm_sq = expected.losses.dtype, expected.norm_sq.clone()
        losses = expected.losses.clone()
        sizes = norm_sq.sum(0).sqrt()
        samples = torch.arange(len(sizes), dtype=sizes.dtype, device=sizes.device)
        factors = torch.where(sizes.isfinite(), (1 + samples) / (1 + sizes), 0.0)
        self._factors.copy_(factors)
        kinds, sums = expected.sums(self._factors.clone())
        self._recorder.set_random_state(state)
        found = [*self._first.replay(), *self._second.replay()]
        self._first.let_go()
        wanted = [losses, norm_sq, *sums]
        tolerance = _TOLERANCE.get(dtype, _COARSE)
        same = kinds == self._kinds and len(found) == len(wanted)
        if not same or not all(map(_close, found, wanted, repeat(tolerance))):
            raise GraphError(
                "A replay of the pass gives other results than the pass on the same samples, because "
                f"Python code decides what is computed. Pass {self._without}.",
                doc="compile-and-graphs",
            )

    def prove_again(self) -> None:
        """Compare every 2nd, 4th, 8th, ... replay with the pass, unless this waits for the device.

        Raises:
            GraphError: they differ. Nothing has been counted or summed.
        """
        self._replays += 1
        if self._recorder.waits or self._replays & (self._replays - 1) or self._replays < 2:
            return
        state = self._recorder.random_state()
        try:
            with self._grad_state.trace.untraced():
                self._compare()
        finally:
            self._recorder.set_random_state(state)

    def contribute(self, samples: int) -> Tensor:
        """Replay over `inputs`, of which the first `samples` are real; returns their losses."""
        grad_state = self._grad_state
        grad_state.batch.begin_pass()
        with arithmetic(self._first_parameter):
            losses, norm_sq = self._first.replay()
            try:
                sampled = grad_state.batch.find(samples)
                norm_sq = norm_sq[:, :samples]
                grad_state.contribute(
                    norm_sq, self._layers, sampled, samples, self._calls, self._write
                )
            finally:
                self._first.let_go()
        return losses[:samples]

    def _write(self, scales: Tensor) -> None:
        """Add the sums of the pass, for the scales of its real samples; all others have 0."""
        self._factors.zero_()
        self._factors[..., : scales.shape[-1]] = scales * self._factor
        for parameters, flat in zip(self._kinds, self._second.replay(), strict=True):
            own = flat if self._second.fresh else flat.clone()
            parts = own.split([parameter.numel() for parameter in parameters])
            shaped = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
            # `data` has its own version counter, so no part needs another copy.
            self._grad_state.sums.add_all(parameters, [x.data for x in shaped])


@contextmanager
def _stirred(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context with other weights, which exposes values computed once from the captured weights."""
    held = [p.detach() for p in parameters if p.requires_grad]
    before = [x.clone() for x in held]
    try:
        for x in held:
            ramp = torch.linspace(-0.02, 0.02, x.numel(), dtype=x.dtype, device=x.device)
            x.add_(ramp.view(x.shape))
        yield
    finally:
        for x, own in zip(held, before, strict=True):
            x.copy_(own)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether they are equal up to rounding, with NaN and inf at the same positions."""
    finite = expected.isfinite()
    if found.shape != expected.shape or not bool((found.isfinite() == finite).all()):
        return False
    x, y = (torch.where(finite, z, 0.0).double() for z in (found, expected))
    return bool((x - y).norm() <= tolerance * y.norm())
