"""What a call must show before it contributes: where its samples are, and that they are independent.

Its inputs are cut to few rows, in the likeliest way first, and run under a tracer
(fastclip.samples.rehearsal); what a trace leaves open, values say (fastclip.samples.agreement).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastclip.errors import BatchSizeError, FastclipError, UnsupportedLayerError, where
from fastclip.memory import no_memory
from fastclip.samples.chosen import say_chosen
from fastclip.samples.drawn import has_time_first, in_lists, time_first
from fastclip.samples.foreign import described, is_foreign
from fastclip.samples.independence import coupled
from fastclip.samples.inputs import NESTED, Cuts
from fastclip.samples.layout import BatchLayout
from fastclip.samples.left_out import MOST_CUTS, LeftOut
from fastclip.samples.place import called
from fastclip.samples.probing import Runs
from fastclip.samples.rehearsal import NoRows, Rehearsal
from fastclip.samples.watch import Watch


def learn(
    layout: BatchLayout, run: Runs, path: Hashable | None = None, *, whole: bool = False,
    compare: bool = False,
) -> None:  # fmt: skip
    """Note where the samples of this call are, and that its rows are apart.

    Generators, buffers, attributes and parameters are as before afterwards. Inputs that cannot be cut
    are accepted only where a layer is seen to count its samples itself (EmbeddingBag over the flat ids
    of all bags).

    Args:
        layout: what is known so far. run: the call.
        path: a layer or use that has just been reached and must be among those seen.
        whole: the call is run on as many rows as it has. compare: values must say it, too.

    Raises:
        BatchSizeError: the samples are not to be found, or the model couples them.
    """
    if run.has_none(layout.axis):  # the next call is looked at
        layout.known = False
        return
    if not layout.known:  # nothing of an earlier refusal is left
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
                "the model runs on this batch, but not where every operation on a few rows of it is "
                f"followed ({described(foreign)}). Let it take any number of rows, and use torch's "
                "dense operations there"
            ) from foreign
    except BaseException:
        layout.known = False
        raise
    if found is not None:
        layout.known = False
        if not found.meets(path):
            raise BatchSizeError(
                f"{where(called(path))}: this layer runs with this batch, but not with a few rows of "
                "it, so where its samples lie is not known; let the model use the same layers for any "
                "number of rows"
            )
        found.tell()
    given = run.args, run.kwargs
    layout.known = True
    layout.watch = layout.watch or Watch(run.model, *given, layout.read, layout.axis)
    layout.tried = max(layout.tried, layout.batch_size(*given) or 0)
    say_chosen(run.model, layout.chosen, layout.told_of)
    layout.chosen.clear()


def _found(layout: BatchLayout, run: Runs, *, whole: bool) -> Rehearsal | None:
    """What the first way of cutting the inputs shows with which rows come out; None of flat ids.

    Raises:
        BatchSizeError: samples are not independent in any way, or cannot be found.
    """
    run.check_unnested()
    failed, flat, met = "", layout.flat, None
    wider = LeftOut(run, lambda cuts, rows: Rehearsal(layout, run, cuts).probe(rows))
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
        except NoRows as error:
            met = met or error.args[0]
            continue
        except BatchSizeError as error:
            if found.trial.flat:  # ids of all bags in one row: not to be cut
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
        raise coupled("the output", met)
    raise BatchSizeError(
        "cannot tell which axis of the model's inputs holds the samples: no way of cutting them "
        "to 2 and to 3 rows gives as many rows of output. Pass tensors with one row a sample "
        f"along axis {layout.axis} (a list of tensors: stack or pad them), and let the model "
        f"take any number of rows{run.unread}{failed}"
    )


def _known(layout: BatchLayout) -> Any:
    # of one row alone, what has as many entries may be anything
    return layout.cuts if layout.tried > 1 else lambda _: None


def _explained(
    error: BatchSizeError, layout: BatchLayout, run: Runs, cuts: Cuts, *, by_python: bool
) -> BatchSizeError:
    if by_python:
        return BatchSizeError(
            f"{error} (numbers of samples come to the model in lists or arrays, where nothing shows "
            "whose they are: pass tensors with one row a sample)"
        )
    if run.in_lists(cuts):
        return in_lists(error)
    if layout.axis == 0 and has_time_first(run.model):
        return time_first(error)
    return error
