"""Learns, before a call contributes, where its samples are and whether they are independent.

Its inputs are cut to few samples, in the likeliest way first, and run under a tracer
(fastclip.samples.rehearsal). What a trace does not prove, values must show (fastclip.samples.agreement).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from fastclip.core.system import no_memory
from fastclip.distributed.shards import Shards
from fastclip.errors import BatchSizeError, FastclipError, GraphError, UnsupportedLayerError, where
from fastclip.samples.batch_axis import called
from fastclip.samples.inputs import (
    INPUT,
    NESTED,
    Cuts,
    Way,
    has_time_first,
    in_lists,
    tells,
    time_first,
    unclear,
)
from fastclip.samples.layout import BatchLayout, say_chosen
from fastclip.samples.probing import Probe, Runs, coupled, described, is_foreign
from fastclip.samples.rehearsal import NoSamples, Rehearsal
from fastclip.samples.settings import Watch

# -------------------------------------------------------------------------------------------------
# Inputs that a way of cutting a call leaves out, although they have as many rows as there are samples.


MOST_CUTS = 64
"""Maximum number of ways to cut the inputs for each way of reading them."""
_FEW = 3
_MOST_WIDER = 4


class LeftOut:
    """Wider ways of cutting a call's inputs, for which the model fails on few samples.

    If an input with samples is not cut, the model may still return samples, and that input would pass
    for a shared input.

    Args:
        probe_of: makes a probe of so many samples, of inputs that are cut in a way.
    """

    def __init__(self, run: Runs, probe_of: Callable[[Cuts, int], Probe]) -> None:
        self._run, self._probe_of = run, probe_of
        self._own = {id(x) for x in chain(run.model.parameters(), run.model.buffers())}
        self._failed: list[tuple[Way, Cuts, str]] = []

    def cuts_the_model(self, cuts: Cuts) -> bool:
        """Whether a parameter or buffer of the model, passed to it as an input, would be cut."""
        return self._of_data(cuts) != cuts

    def fails(self, cuts: Cuts, error: str) -> None:
        """Note that the model does not run on few samples, cut this way."""
        self._failed.append((self._run.way, cuts, error))

    def check(self, cuts: Cuts) -> None:
        """Check that this way leaves out no input that a wider way cuts, if that runs on more samples.

        Raises:
            BatchSizeError: naming the first input that it leaves out.
        """
        own, way = self._of_data(cuts), self._run.way
        for known, wider, error in self._failed[:_MOST_WIDER]:
            if known != way:
                continue
            pairs = list(zip(own, self._of_data(wider), strict=True))
            if any(a not in (None, b) for a, b in pairs):
                continue
            left = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            if left is not None and (samples := self._runs_with(wider)) is not None:
                raise BatchSizeError(
                    f"{INPUT.capitalize()}{left} has one row per sample, too, but the model runs with "
                    f"{samples} samples and not with 2 and 3{error}. Let the model take any number of "
                    "samples, or make the input a buffer if all samples share it."
                )

    def _runs_with(self, cuts: Cuts) -> int | None:
        """A number of samples below the batch size with which the model runs, cut this way; or None."""
        batch = self._run.rows(cuts)
        for samples in dict.fromkeys((batch - 1, batch - 2, batch // 2)):
            if samples <= _FEW:
                continue
            places = list(range(samples))
            self._run.cut(cuts, places)
            try:
                self._run.once(self._probe_of(cuts, samples), places)
                return samples
            except Exception as error:
                if no_memory(error):
                    raise
        return None

    def _of_data(self, cuts: Cuts) -> Cuts:
        """The cuts without the model's own tensors, which hold no sample of the batch."""
        leaves = self._run.leaves
        return tuple(None if id(x) in self._own else a for x, a in zip(leaves, cuts, strict=True))

    def check_lists(self, cuts: Cuts, layout: BatchLayout) -> None:
        """Check that the model does not also run if each tensor of a list holds all samples.

        Raises:
            BatchSizeError: it does, so either may be the samples.
        """
        run, way, samples = self._run, self._run.way, self._run.rows(cuts)
        likely, sizes = run.drawn(), {0}
        try:
            for others in run.ways(layout.axis, layout.cuts, MOST_CUTS):
                size = run.rows(others)
                if run.way == way or size in sizes or (size in likely) != (samples in likely):
                    continue
                sizes.add(size)
                if tells(self._outputs(others)):
                    raise unclear(samples, size)
        finally:
            run.read_as(way, layout.axis)

    def _outputs(self, cuts: Cuts) -> list[Any]:
        """The model's outputs for 2 and for 3 samples, cut this way; empty if it does not run."""
        self._run.cut(cuts)
        try:
            return [self._run.once(self._probe_of(cuts, n), [0] * n) for n in (_FEW - 1, _FEW)]
        except Exception as error:
            if no_memory(error):
                raise
            return []


# -------------------------------------------------------------------------------------------------


def learn(
    layout: BatchLayout, run: Runs, path: Hashable | None = None, *, whole: bool = False,
    compare: bool = False,
) -> None:  # fmt: skip
    """Locate the samples of this call, and check that they are independent.

    Generators, buffers, attributes and parameters are unchanged afterwards. Inputs that cannot be cut
    are accepted only if a layer counts its samples itself (EmbeddingBag over the flat ids of all bags).

    Args:
        layout: what is known so far. run: the call.
        path: a layer or use that has just been reached and must be among those seen.
        whole: run the call on as many samples as it has. compare: compare values, too.

    Raises:
        BatchSizeError: the samples cannot be located, or the model couples them.
    """
    if run.has_none(layout.axis):  # the next call is traced
        layout.known = False
        return
    if not layout.known:  # forget what led to an earlier error
        layout.forget_all()
    foreign: Exception | None = None
    try:
        with saved_tensors_hooks(Tensor.detach, lambda x: x):  # not those of a checkpoint
            found = _found(layout, run, whole=whole or path is not None)
            try:
                if found is not None and (found.unproven or compare):
                    found.compare()
            except Exception as error:
                if not is_foreign(error):
                    raise
                foreign = error
        if foreign is not None:
            run.as_called()  # a model that fails on its own input says why itself
            raise BatchSizeError(
                "The model runs on this batch, but not in a traced run on a few of its samples "
                f"({described(foreign)}). Let it take any number of samples, and use torch's dense "
                "operations there."
            ) from foreign
    except BaseException:
        layout.known = False
        raise
    if found is not None:
        layout.known = False
        if not found.meets(path):
            raise BatchSizeError(
                f"{where(called(path))}: this layer runs with this batch, but not with a few of its "
                "samples, so its batch axis is unknown. Use the same layers for any number of samples."
            )
        found.update_layout()
    given = run.args, run.kwargs
    layout.known = True
    layout.watch = layout.watch or Watch(run.model, *given, layout.read, layout.axis)
    layout.tried = max(layout.tried, layout.batch_size(*given) or 0)
    say_chosen(run.model, layout.chosen, layout.warned_of)
    layout.chosen.clear()


def _found(layout: BatchLayout, run: Runs, *, whole: bool) -> Rehearsal | None:
    """The result of the first way of cutting the inputs that gives samples; None for flat ids.

    Raises:
        BatchSizeError: samples are not independent in any way, or cannot be located.
    """
    run.check_unnested()
    failed, flat, met = "", layout.flat, None
    wider = LeftOut(run, lambda cuts, samples: Rehearsal(layout, run, cuts).probe(samples))
    for cuts in run.ways(layout.axis, _known(layout), MOST_CUTS):
        if wider.cuts_the_model(cuts):
            continue
        found = Rehearsal(layout, run, cuts, whole=whole)
        try:
            found.hold()
            wider.check(cuts)
            if run.in_lists(cuts) and layout.cuts(run.way) is None:
                wider.check_lists(cuts, layout)
            return found
        except NoSamples as error:
            met = met or error.args[0]
            continue
        except BatchSizeError as error:
            if found.trial.flat:  # ids of all bags in one sample: not to be cut
                flat = True
                break
            raise _explained(error, layout, run, cuts, by_python=found.by_python) from None
        except FastclipError:
            raise
        except Exception as error:  # this way does not fit the model
            if no_memory(error):
                raise
            if "NestedTensor" in str(error):
                raise UnsupportedLayerError(f"{described(error)}: {NESTED}") from error
            failed = failed or f" ({described(error)})"
            wider.fails(cuts, f" ({described(error)})")
        flat |= found.trial.flat
    if flat:
        layout.flat = True
        return None
    run.as_called()  # a model that fails on its own input says why itself
    if met:
        raise coupled("The output", met)
    raise BatchSizeError(
        "The batch axis of the model's inputs is unknown: no way to cut them to 2 and 3 samples gives "
        f"as many samples of output{run.unread}{failed}. Pass tensors with samples along axis "
        f"{layout.axis}, and accept any number of samples."
    )


def _known(layout: BatchLayout) -> Any:
    # with one sample, any tensor may have as many entries
    return layout.cuts if layout.tried > 1 else lambda _: None


def _explained(
    error: BatchSizeError, layout: BatchLayout, run: Runs, cuts: Cuts, *, by_python: bool
) -> BatchSizeError:
    if by_python:
        return BatchSizeError(
            f"{error}. If numbers come in lists or arrays, pass tensors with one row per sample instead."
        )
    if run.in_lists(cuts):
        return in_lists(error)
    if layout.axis == 0 and has_time_first(run.model):
        return time_first(error)
    return error


# -------------------------------------------------------------------------------------------------
# Limits of dry runs if the model's parameters are sharded over ranks.


_FIX = "or use DistributedDataParallel."


def check_look(shards: Shards | None, name: str, layer: str) -> None:
    """Check that other ranks gather the parameters for a dry run of this call.

    Args:
        name: of the call. layer: the layer that has been reached.
    """
    if shards is not None and not shards.gathered:
        raise GraphError(
            f"{name}: {layer} is reached outside the model's forward, or for the first time, while its "
            "parameters are sharded (fully_shard). Call the model itself, let all batches use the same "
            f"layers, {_FIX}",
            doc="sharded-models",
        )


def check_moves(shards: Shards | None, model: nn.Module, paths: Iterable[str]) -> None:
    """Check that modules that move samples are not sharded by themselves, nor their parts.

    Such modules need more backward passes, as the samples require. Each would gather parameters.
    """
    if shards is None:
        return
    for path in sorted(paths):
        parts = model.get_submodule(path).modules()
        if any(isinstance(part, FSDPModule) and part is not model for part in parts):
            raise UnsupportedLayerError(
                f"{where(path)}: samples are moved there by their values, but fully_shard was applied "
                f"to parts of it. Apply fully_shard to a module that contains the whole of it, {_FIX}",
                doc="sharded-models",
            )
