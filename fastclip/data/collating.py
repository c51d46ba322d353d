"""The user's collate function, watched: no sample is in a batch twice, and none is mixed with others.

Where items hold tensors, every call is traced. What cannot be traced (arrays, text, numbers, values that
leave torch) is compared by its values in the first batch of each kind, the second, fourth, and so on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from fastclip._opacus import without_empty
from fastclip._torch import fetch_calls
from fastclip.data.batch_law import Fault, Law, Leaf, Node, leaves, opened
from fastclip.data.collate_probe import Probe, repeated_rows
from fastclip.data.collate_trace import CollateTrace
from fastclip.data.item_changes import alike_items
from fastclip.data.item_tensors import copied, rebuilt, tensors_of
from fastclip.data.loader import asks_at_once
from fastclip.data.repeatable import Repeatable
from fastclip.errors import BatchSizeError
from fastclip.noise.aside import set_aside
from fastclip.trace.findings import Cause

_SPARE = 4
"""Items that are kept for a batch of one, which has no other content to compare with."""
_SUSPECTED = 8
"""So many batches of rows that are alike, of items that are not, are compared before they are normal."""
_UNDECIDED = 16
"""So many batches that show nothing are compared before they are normal."""


class Checks:
    """A collate function of ours, which has its batches checked where they need to be."""


class CheckedCollate(Checks):
    """Calls a collate function, and raises an error for a batch in which samples are repeated or mixed.

    Formal guarantee: of tensors that the trace follows, every entry of the batch follows from one sample
    at most, every position of the batch axis holds one at most, and every sample has one position, the
    same in all tensors of the batch. Of other values that was so in the batches that were compared.

    Args:
        collate: the user's function. batch_first: samples lie along axis 0; else along axis 0 or 1.
        ordered: sample i must be at position i.
        views: so many adjacent positions may hold each sample.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        *,
        batch_first: bool = True,
        ordered: bool = False,
        views: int = 1,
    ) -> None:
        self.collate, self.batch_first, self.ordered = collate, batch_first, ordered
        self.views = views
        self._start()

    def _start(self) -> None:
        fetch_calls.watch(self)
        self._seen: Counter[Any] = Counter()
        self._spare: list[Any] = []
        self._trace: CollateTrace | None = None
        self._untraced = False
        self._undecided = 0
        self._busy = threading.Lock()

    @property
    def _asked(self) -> dict[str, Any]:
        names = ("batch_first", "ordered", "views")
        return {name: getattr(self, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {"collate": self.collate, **self._asked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "collate" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, items: Any) -> Any:
        """The batch.

        Raises:
            BatchSizeError: it repeats or mixes samples.
        """
        if not isinstance(items, list) or not items:
            return self.collate(items)
        if not self._busy.acquire(blocking=False):  # another thread's call, or one inside this one
            return CheckedCollate(self.collate, **self._asked)._checked(items)
        try:
            return self._checked(items)
        finally:
            self._busy.release()

    def _checked(self, items: list[Any]) -> Any:
        law = Law(len(items), **self._asked)
        kept = [rebuilt(item, lambda leaf: leaf, fresh=True) for item in items]
        random = Repeatable(self.collate)
        if not self._untraced and any(True for item in items for _ in tensors_of(item)):
            before = None
            batch, root, followed = self._traced(items, law)
        else:
            before = random.state()
            batch = self.collate(items)
            root, followed = opened(batch), False
        if not followed and self._is_due(root, kept, law):
            self._compare(kept, law, random, before)
        return batch

    # The trace

    def _traced(self, items: list[Any], law: Law) -> tuple[Any, Node, bool]:
        """The batch, its leaves, and whether all of them were followed."""
        trace = self._trace = self._trace or CollateTrace()
        try:
            batch = trace.call(self.collate, items)
        except Exception as error:
            if not _of_the_trace(error):
                raise
            try:
                batch = self.collate(items)
            except Exception:
                raise error from None
            self._untraced = True  # a function that does not run under a trace
            return batch, opened(batch), False
        root = trace.root
        assert root is not None
        fault = law.fault(root)
        if fault is not None and not _of_several():
            cause = trace.cause(fault.leaf.value)
            if not (fault.kind == "mixes" and trace.is_guessed(cause)):
                raise self._error(fault, cause)
        return batch, root, fault is None and not trace.read and law.is_followed(root)

    # By values

    def _is_due(self, root: Node, items: list[Any], law: Law) -> bool:
        """Whether a batch is compared: the first, second, fourth ... of its kind."""
        kind = tuple((leaf.path, *_kind(leaf, len(items))) for leaf in leaves(root))
        alike = repeated_rows(root, law)
        suspected = alike > 0 and alike > alike_items(items)
        self._seen[kind, suspected] += 1
        count = self._seen[kind, suspected]
        return (count & (count - 1)) == 0 or (suspected and count <= _SUSPECTED)

    def _compare(
        self, items: list[Any], law: Law, random: Repeatable, before: Callable[[], None] | None
    ) -> None:
        with set_aside():
            after = random.state()
            probe = Probe(self.collate, items, self._spare, law, random, before or after)
            try:
                fault = probe.fault()
            except Exception:  # of items that do not exist
                fault = None
            finally:
                after()
        if fault is not None and not _of_several():
            raise self._error(fault, None)
        if not probe.decided and self._undecided < _UNDECIDED:  # the next one may say more
            self._undecided += 1
            self._seen.clear()
        if len(self._spare) < _SPARE:
            self._spare += [rebuilt(item, copied, fresh=True) for item in items[:_SPARE]]

    # Words

    def _error(self, fault: Fault, cause: Cause | None) -> BatchSizeError:
        name = f"collate_fn {_named(self.collate)}"
        where = f" ({cause.operation} at {cause.line})" if cause is not None else ""
        which = " and ".join(map(str, fault.samples[:2])) if len(fault.samples) > 1 else ""
        one = f"sample {fault.samples[0]}" if fault.samples else "a sample"
        at = f" in {fault.leaf.path}" if fault.leaf.path != "batch" else ""
        if fault.kind == "repeats":
            return BatchSizeError(
                f"{name} repeats {one} of its batch{at}{where}, so it contributes more often than "
                "epsilon states. Return each sample at one position of the batch axis"
            )
        if fault.kind == "views":
            return BatchSizeError(
                f"{name} lays out views of several samples{at}{where} where views={self.views} expects "
                "those of one, so they would be clipped as one. Put the views of each sample next to "
                "each other, as torch.stack(views, 1).flatten(0, 1) does"
            )
        if fault.kind == "mixes":
            return BatchSizeError(
                f"{name} mixes samples{f' {which}' if which else ''} of its batch{at}{where}, so "
                "clipping does not bound what each contributes. Let each position of the batch axis "
                "hold one sample"
            )
        if fault.kind == "axis":
            return BatchSizeError(
                f"{name} mixes samples along axis 0{at}, and they lie along axis 1. Put them along "
                "axis 0 (batch_first=True), or pass batch_first=False to make_private"
            )
        if fault.kind == "order":
            return BatchSizeError(
                f"{name} changes the order of samples{at}{where}, which says with unit_ids whose each "
                "is. Keep the order of rows"
            )
        return BatchSizeError(
            f"{name} draws random numbers that cannot be repeated, so whether it repeats samples or "
            "mixes samples is not known. Draw them in the data set, or from torch's global generator"
        )


def checked_collate(
    collate: Any, *, batch_first: bool = True, ordered: bool = False, views: int = 1
) -> Any:
    """A collate function that checks its batches; one that is known, or that does, is unchanged."""
    own = without_empty(collate)
    if own is None or own is default_collate or isinstance(own, Checks):
        return collate
    return CheckedCollate(collate, batch_first=batch_first, ordered=ordered, views=views)


def plain_collate(collate: Any) -> Any:
    """The user's own function."""
    return collate.collate if isinstance(collate, CheckedCollate) else collate


def check_collate(loader: DataLoader, *, batch_first: bool = True) -> None:
    """Let the collate function of a loader whose own sampler draws check its batches."""
    if getattr(loader, "batch_sampler", None) is None or asks_at_once(loader):
        return  # an item is not one sample
    object.__setattr__(
        loader, "collate_fn", checked_collate(loader.collate_fn, batch_first=batch_first)
    )


def _of_several() -> bool:
    """Whether the data set was asked for several samples by one key, so that an item is not one."""
    _, keys = fetch_calls.innermost() or (None, None)
    several = (list, slice, range, set, frozenset, np.ndarray, Tensor)
    return isinstance(keys, (list, tuple)) and any(
        isinstance(key, several) and getattr(key, "shape", None) != () for key in keys
    )


def _kind(leaf: Leaf, items: int) -> tuple[Any, ...]:
    """What makes a batch another kind."""
    kind = leaf.value.dtype if isinstance(leaf.value, Tensor) else type(leaf.value)
    rows = leaf.shape[0] if leaf.shape else None
    return kind, len(leaf.shape), None if rows is None else (rows > items) - (rows < items)


def _named(collate: Any) -> str:
    """The function as messages name it, with the line where it begins."""
    name = getattr(collate, "__name__", None) or type(collate).__name__
    of = collate if hasattr(collate, "__code__") else getattr(collate, "__func__", None)
    code = getattr(of if of is not None else type(collate).__call__, "__code__", None)
    if code is None:
        return f"'{name}'"
    return f"'{name}' ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _of_the_trace(error: BaseException) -> bool:
    """Whether an error passed through the tracer, which may have raised it."""
    trace = error.__traceback__
    while trace is not None:
        if f"{Path('fastclip') / 'trace'}" in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False
