"""The batch axes of all layers and uses in one kind of call; later calls must agree.

A recurrent layer may see [t, b, d], a window layer [b * windows, t, d], and t may equal b by
coincidence. The batch axis is never assumed: fastclip.samples.learning runs the model to find it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip.core.torch_names import memory_of, version_of
from fastclip.errors import BatchSizeError, say, where
from fastclip.samples import inputs
from fastclip.samples.batch_axis import BatchAxis, called
from fastclip.samples.inputs import (
    INPUT,
    Cuts,
    Drawn,
    Reading,
    Way,
    batch_sizes_of,
    check_drawn,
    is_array,
    is_batched,
    is_list,
    parts_of,
    readings,
    rows_of,
    way_of,
)
from fastclip.samples.runs import Paths
from fastclip.samples.settings import Watch
from fastclip.samples.state import tables_of
from fastclip.trace.operation import tensors_in

# -------------------------------------------------------------------------------------------------
# Shared inputs, which have no batch axis: an input that is the same in every call depends on no batch.
#
# A graph, a grid or a mask of positions has no samples, and is not cut for a dry run. Neither is the
# list of the boxes of all images, and a model may take their mean, which every dry run would find
# constant. So an input that was not cut must be unchanged, or it may hold numbers of the samples.


_COMPARED = 4
"""First calls in which tensors on a device are read, which waits; later, calls 8, 16, 32 and so on."""
_MOST_KEPT = 32
"""Number of kinds and lengths of inputs for which they are kept."""
_LARGEST = 2**22
"""Maximum size of a tensor that is copied and compared; a larger one is compared by identity."""
Lengths = tuple[tuple[int, ...], ...]
"""Sizes of a model's inputs along all axes but the samples'."""


class _Kept:
    """The state of an input in one call."""

    def __init__(self, value: Any) -> None:
        self.value, self.version = value, _version(value)
        small = not isinstance(value, Tensor) or value.numel() <= _LARGEST
        self.copy = inputs.own(value) if small else None

    def is_there(self, now: Any) -> bool:
        """Whether it is the same object, and was not written to."""
        return isinstance(now, Tensor) and now is self.value and _version(now) == self.version

    def differs(self, now: Any, read: bool) -> bool:
        """Whether `now` has other values; `read`: tensors on a device may be read."""
        if self.is_there(now):
            return False
        if not isinstance(now, Tensor) or not isinstance(self.value, Tensor):
            return not inputs.same(self.copy, now)
        if now.shape != self.value.shape or now.dtype != self.value.dtype:
            return True
        if self.copy is None or now.device != self.copy.device or now.layout != torch.strided:
            return False
        return (read or now.device.type == "cpu") and not torch.equal(self.copy, now)


class SharedInputs:
    """The shared inputs of one kind of call, by the lengths of the other inputs.

    This uses no Snapshot: in every call they may be other tensors, if the values are the same.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Way, Lengths, list[_Kept]]] = []
        self._calls = 0

    def check(self, leaves: list[Any], way: Way, cuts: Cuts) -> None:
        """Compare the inputs that are not cut with those of earlier calls; to be asked once per call.

        Inputs for other lengths (masks and positions of longer samples) are kept separately.

        Raises:
            BatchSizeError: one has changed.
        """
        own = [
            n for n, (x, a) in enumerate(zip(leaves, cuts, strict=True)) if a is None and _holds(x)
        ]
        if not own or not torch.is_grad_enabled():
            return
        self._calls += 1
        read = self._calls <= _COMPARED or not self._calls & (self._calls - 1)
        if read and torch.cuda.is_available():
            read = not torch.cuda.is_current_stream_capturing()
        lengths = tuple(
            (*x.shape[:a], *x.shape[a + 1 :])
            for x, a in zip(leaves, cuts, strict=True) if a is not None and isinstance(x, Tensor)
        )  # fmt: skip
        for known, long, kept in self._kept:
            if long == lengths and known == way:
                for number, before in zip(own, kept, strict=False):
                    if before.differs(leaves[number], read):
                        raise _changed(number, leaves[number])
                return
        self._kept = [
            *self._kept[1 - _MOST_KEPT :],
            (way, lengths, [_Kept(leaves[n]) for n in own]),
        ]


def _holds(value: Any) -> bool:
    """Whether it may hold numbers of samples: several numbers that no optimizer changes."""
    if isinstance(value, PackedSequence) or is_batched(value):
        return not is_array(value) or value.size > 1
    if type(value) is not Tensor or isinstance(value, nn.Parameter):
        return False
    return value.numel() > 1 and not value.requires_grad


def _version(value: Any) -> int | None:
    return version_of(value) if isinstance(value, Tensor) and not value.is_inference() else None


def _changed(number: int, value: Any) -> BatchSizeError:
    shape = f", of shape {list(value.shape)}," if hasattr(value, "shape") else ""
    return BatchSizeError(
        f"{INPUT.capitalize()}{number}{shape} has no row per sample, and its values changed since an "
        "earlier call, so they may depend on other samples. Pass one row per sample, or make it a "
        "buffer of the model if it holds no data.",
        doc="coupled-samples",
    )


# -------------------------------------------------------------------------------------------------
# Batch dimensions flattened with other dimensions, by the lengths of the model's inputs.
#
# In [b * n, d] sample i has n neighboring entries, in [n * b, d] every b-th entry. No shape shows which.
# Nor does one dry run show it for other lengths: a dimension of size one may have grown on the samples'
# other side. But dimensions do not shrink if lengths grow. A dimension of size one in longer samples has
# size one in shorter ones. It is not two if there are less than twice as many entries per sample as in
# shorter ones, because the inner dimensions have not become smaller.


_Seen = dict[Lengths, dict[int, BatchAxis]]


class Folds:
    """The batch axes that are flattened with others, by layer or use.

    They are kept by name, for any state of the model and any kind of call.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}
        """By the inputs' lengths, and the number of entries per sample."""

    def __bool__(self) -> bool:
        return bool(self._seen)

    def copy(self) -> Folds:
        """A copy of what is known now."""
        twin = Folds()
        twin.put_back(self)
        return twin

    def put_back(self, earlier: Folds) -> None:
        """Add what was known then."""
        for name, seen in earlier._seen.items():
            own = self._seen.setdefault(name, {})
            for lengths, folds in seen.items():
                own[lengths] = own.get(lengths, {}) | folds

    def facts(self) -> set[tuple[Hashable, Hashable]]:
        """What was seen in every layer and use."""
        return {
            (name, (lengths, fact))
            for name, seen in self._seen.items()
            for lengths, folds in seen.items()
            for fact in folds.items()
        }

    def note(
        self, name: Hashable, batch_axis: BatchAxis, known: Iterable[int], lengths: Lengths
    ) -> None:
        """Note that a sample had so many entries there, with inputs of these lengths.

        Raises:
            BatchSizeError: an earlier call had them, or was assumed to have them, in another order.
        """
        seen = self._seen.setdefault(name, {})
        for each in known:
            folded = batch_axis.fold(2 * each, 2)
            if folded is None:
                continue
            found = BatchAxis(batch_axis.axis, *folded)
            known_axis = self.find(name, each, lengths)
            if known_axis not in (None, found) or not all(map(found.like, _axes_in(seen))):
                raise BatchSizeError(
                    f"{where(called(name))}: the samples are flattened with other dimensions in another "
                    "order than in an earlier call (sample by sample, or time by time). Use one order, "
                    "or a separate module for each."
                )
            seen.setdefault(lengths, {})[each] = found

    def has(self, name: Hashable, lengths: Lengths) -> bool:
        """Whether it was seen with inputs of these lengths."""
        return lengths in self._seen.get(name, {})

    def find(self, name: Hashable, each: int, lengths: Lengths) -> BatchAxis | None:
        """The batch axis, if each sample has so many entries; None if it is not known."""
        seen = self._seen.get(name, {})
        return seen.get(lengths, {}).get(each) or _between(seen, each, lengths)


def _between(seen: _Seen, each: int, lengths: Lengths) -> BatchAxis | None:
    """The batch axis that follows from other lengths, if samples were always outermost, or innermost."""
    folded = [batch_axis for batch_axis in _axes_in(seen) if not batch_axis.plain]
    orders = {batch_axis.order for batch_axis in folded}
    if orders not in ({1}, {-1}):
        return None
    for others, known in seen.items():
        longer = max(known) >= each and _reach(others, lengths)
        # one layer may run several times: which of these was this one?
        fewer = [number for number in known if number <= each]
        if longer or (fewer and each < 2 * min(fewer) and _reach(lengths, others)):
            return BatchAxis(folded[0].axis, *((1, each) if orders == {1} else (each, 1)))
    return None


def _axes_in(seen: _Seen) -> Iterator[BatchAxis]:
    return (batch_axis for folds in seen.values() for batch_axis in folds.values())


def _reach(longer: Lengths, shorter: Lengths) -> bool:
    """Whether no input is longer along any axis in `shorter`."""
    return [*map(len, longer)] == [*map(len, shorter)] and all(
        size >= other
        for a, b in zip(longer, shorter, strict=True)
        for size, other in zip(a, b, strict=True)
    )


# -------------------------------------------------------------------------------------------------
# Rows of constants that trained weights are applied to, and that samples choose by number.
#
# Graph networks are called with numbers of nodes, and the nodes' features lie in a buffer. These
# features depend on no sample of the batch, and may be the private data. A table of frozen weights is
# no such case, if samples choose rows before trained weights are applied. Nor are weights that are
# multiplied entry by entry.


class Rows(NamedTuple):
    """Constants with rows that are multiplied by trained weights: memory, shape and number of rows."""

    memory: int
    shape: tuple[int, ...]
    number: int

    @staticmethod
    def of(x: Tensor, axis: int) -> Rows:
        return Rows(memory_of(parts_of(x)[-1]), tuple(x.shape), x.shape[axis])


def say_chosen(model: nn.Module, chosen: Mapping[Rows, str], warned: set[str]) -> None:
    """Warn once of rows that the model holds, or computes from tensors of the same shape.

    Args:
        chosen: the rows, and the use in which samples choose among them. warned: names in earlier
        warnings.
    """
    held = [(name, Rows.of(x, 0)) for name, x in (_held(model) if chosen else ())]
    names: dict[str, None] = {}
    for rows in chosen:
        same = [name for name, own in held if own.memory == rows.memory]
        names |= dict.fromkeys(same or [name for name, own in held if own.shape == rows.shape])
    if not names.keys() <= warned:
        warned.update(names)
        say(
            f"{' and '.join(names)}: trained weights use all rows, and samples choose among them by "
            f"number ({next(iter(chosen.values()))}), so private data in them would not be protected. "
            "Pass each sample its own rows, or make public data a frozen parameter.",
            doc="coupled-samples",
        )


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, table in tables_of(model):
        for kind, tensors in (("buffer", table.get("_buffers", {})), ("attribute", table)):
            for name, x in tensors.items():
                if type(x) is Tensor and x.dim():
                    yield f"{kind} {f'{path}.{name}'.lstrip('.')!r}", x


# -------------------------------------------------------------------------------------------------


MANY = 512
"""Number of samples up to which a dry run has the whole batch."""


@dataclass
class Guards:
    """What later calls with inputs of one kind must fulfill: outputs, by their number."""

    mixed: dict[int, int] = field(default_factory=dict)
    """Dimensions of outputs that couple samples, and must not be part of a loss."""
    spreading: dict[int, int] = field(default_factory=dict)
    """Batch axes of outputs behind which NaN in one sample's gradient would reach others."""
    outlets: set[Any] = field(default_factory=set)
    """Positions of returned tensors that dry runs have seen (`fastclip.samples.outputs.outlets`)."""
    rare: set[Any] = field(default_factory=set)
    """The same for tensors that calls have returned, but no dry run has seen."""


class BatchLayout:
    """The batch axis of every intercepted layer and use, for one kind of call.

    Args:
        axis: of the samples in the model's inputs (0 if batch_first). drawn: gives the numbers of
        samples
            of the sampled batches.
    """

    def __init__(self, axis: int, drawn: Drawn = tuple) -> None:
        self.axis, self.drawn = axis, drawn
        self.known = False
        self.proven = False
        """Traced runs prove all of it (fastclip.samples.rehearsal); no values were compared."""
        self.entries: set[Hashable] = set()
        """As of `entries_of`, in traced runs."""
        self.by_values = False
        """The computation depends on values, or on chance that Python sees, so every step is traced."""
        self.by_chance = False
        """Python has drawn random numbers, or has read some."""
        self.lenient = False
        """Python may compute other constants from its numbers alongside each sample."""
        self.whole = False
        """Dry runs are on the whole batch."""
        self.asked = False
        """Python has asked yes-or-no questions about the batch in that run, without an effect."""
        self.drives = False
        """The method trains by itself, so there is no dry run of it."""
        self.compared = 0
        """Number of distinct samples that were compared with each other."""
        self.tried = 0
        """Samples of the largest batch from which distinct samples were taken."""
        self.watch: Watch | None = None
        """The state of the model in the last dry run."""
        self.shown_by: list[tuple[int, Way]] = []
        """The input that shows the batch size along `axis`: its number, among these inputs."""
        self._cuts: list[tuple[Way, Cuts]] = []
        """The axes of the inputs that hold the samples."""
        self._last: Reading | None = None
        """The inputs of the running call, when they were first read."""
        self._shared = SharedInputs()
        self.paths = Paths()
        """The paths through torch's operators that its calls have taken."""
        self.flat = False
        """A probe has met a layer over flat ids, which counts its samples itself."""
        self.chosen: dict[Rows, str] = {}
        """Rows of constants that trained weights meet, and the use where samples choose among them."""
        self.warned_of: set[str] = set()
        """Names of such rows."""
        self.version = 0
        """Increases when a dry run may have changed what is known."""
        self.forget()

    def forget_all(self) -> None:
        """Forget everything, including the state of the last dry run."""
        self.watch, self.compared, self.tried = None, 0, 0
        self.forget()

    def forget(self) -> None:
        """Forget what is known about layers and uses."""
        self.met: set[Hashable] = set()
        """Layers and uses that a probe has seen."""
        self.counting: set[str] = set()
        """Layers among them that count their samples themselves."""
        self.batch_axes: dict[Hashable, BatchAxis] = {}
        """Batch axes, by a layer's path or the key of a use."""
        self.folds = Folds()
        """The same if they are flattened with other dimensions."""
        self.open: set[str] = set()
        """Layers without rules: their input has no samples, or samples that the model has moved."""
        self.moved: dict[Hashable, None] = {}
        """Layers and uses without one batch axis, because data move the samples or calls differ."""
        self.turns: set[Hashable] = set()
        """Uses that take one sample after the other; `folds` has their order, by lengths."""
        self.uses: dict[Hashable, bool] = {}
        """Calls of functions with parameters: True: with a batch; False: with constants alone."""
        self.routers: dict[Hashable, set[str]] = {}
        """For uses with moved samples: the modules that return them in their order."""
        self.returns: dict[str, dict[int, BatchAxis]] = {}
        """For these modules: the batch axes of their outputs."""
        self.astray: set[str] = set()
        """Modules that have returned samples in other orders: they route nothing."""
        self.users: set[str] = set()
        """Modules inside which parameters are used by themselves."""
        self.proxied: set[nn.Parameter] = set()
        """Parameters that are used outside a layer with a rule."""
        self._guards: list[tuple[Way, Guards]] = []
        self.guards = Guards()
        """Guards for the inputs that were cut last."""

    def batch_size(self, args: tuple, kwargs: dict, *, begins: bool = False) -> int | None:
        """Number of samples in the inputs. If a call `begins`, check that shared inputs are unchanged.

        Raises:
            BatchSizeError: they have changed.
        """
        given = self.read(args, kwargs)
        if begins and not self.flat and (cuts := self.cuts(given.way)) is not None:
            self._shared.check(given.leaves, given.way, cuts)
        for number, known in self.shown_by:
            if given.way == known:
                samples = rows_of(given.leaves[number], self.axis)
                return check_drawn(args, kwargs, samples, self.drawn) if begins else samples
        return next(iter(batch_sizes_of(args, kwargs, self.axis)), None)

    def read(self, args: tuple, kwargs: dict) -> Reading:
        """The inputs flattened, as in a call with a dry run, if one had such inputs; once per call."""
        last = self._last
        if last is not None and last.args is args and last.kwargs is kwargs:
            return last
        first: Reading | None = None
        for leaves, structure, _ in readings(args, kwargs, self.axis, self.drawn):
            found = Reading(args, kwargs, leaves, structure, way_of(leaves, structure))
            first = first or found
            if self.cuts(found.way) is not None:
                break
        else:
            assert first is not None
            found = first
        self._last = found
        return found

    def ended(self) -> None:
        """Release the inputs, because the call is over."""
        self._last = None

    def cuts(self, way: Way) -> Cuts | None:
        """The batch axes of the inputs, for inputs of this kind."""
        return next((cuts for known, cuts in self._cuts if known == way), None)

    def cut_by(self, way: Way, cuts: Cuts) -> None:
        """Cut inputs of this kind along these axes from now on."""
        others, self._last = [known for known in self._cuts if known[0] != way], None
        self._cuts = [(way, cuts), *others]
        self.guards = self._guards_of(way)

    def size_shown_by(self, way: Way, cuts: Cuts) -> None:
        """Note the first input that is cut along the batch axis, which shows the number of samples."""
        number = next(i for i, axis in enumerate(cuts) if axis == self.axis)
        self.shown_by = [(number, way), *(x for x in self.shown_by if x[1] != way)]

    def guards_of(self, args: tuple, kwargs: dict) -> Guards:
        """Guards of calls with such inputs."""
        return self._guards_of(self.read(args, kwargs).way)

    def _guards_of(self, way: Way) -> Guards:
        found = next((guards for known, guards in self._guards if known == way), None)
        if found is None:
            found = Guards()
            self._guards.append((way, found))
        return found

    def settle(self) -> None:
        """Forget layers that were met only in runs that could not identify their samples."""
        known = self.batch_axes.keys() | self.open | self.counting | self.turns
        self.met = {name for name in self.met if name in known or not isinstance(name, str)}

    def facts(self) -> set[tuple[Hashable, Hashable]]:
        """What calls rely on: layers and uses, each with what is known about it for any lengths."""
        batch_axes = {(n, p.axis) for n, p in self.batch_axes.items() if n not in self.open}
        return {*batch_axes, *self.folds.facts(), *self.uses.items()}

    def lost(self, paths: Iterable[str]) -> None:
        """Note modules that have returned samples in other orders."""
        self.version += 1
        self.astray.update(paths)
        self.returns = {p: found for p, found in self.returns.items() if p not in self.astray}
        self.routers = {name: found - self.astray for name, found in self.routers.items()}

    def knows(self, name: Hashable) -> bool:
        """Whether a probe has seen this layer or use, or inputs cannot be cut for a probe."""
        return name in self.met or (self.known and self.flat)

    def due(self, model: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether a dry run must come before this call; to be asked once per call.

        It must before the first call, and if the model's state or the kind of call has changed.
        """
        if not self.known or self.watch is None or self.watch.changed(args, kwargs):
            return True
        if self.flat:
            return False
        if not self.entries_of(args, kwargs) <= self.entries:
            return True
        if self.turns:  # how many each sample has follows from lengths
            lengths = self.lengths(args, kwargs)
            return not all(self.folds.has(name, lengths) for name in self.turns)
        return False

    def has_grown(self, samples: int) -> bool:
        """Whether there are more than twice as many samples as in any batch with a dry run."""
        return self.known and not self.flat and samples > 2 * self.tried and self.tried < MANY

    @property
    def holds_for_any(self) -> bool:
        """Whether traced runs on several numbers of samples were the same, which proves it for any."""
        return self.proven and self.tried > 1 and not (self.by_values or self.lenient)

    def entries_of(self, args: tuple, kwargs: dict) -> set[Hashable]:
        """The sizes of the entries of each list that holds samples: in a traced run all had the same."""
        leaves = self.read(args, kwargs).leaves
        return {
            (n, frozenset(tuple(x.shape for x in tensors_in(entry)) for entry in leaf))
            for n, leaf in enumerate(leaves) if is_list(leaf) and leaf
        }  # fmt: skip

    def lengths(self, args: tuple, kwargs: dict) -> Lengths:
        """The sizes of the inputs along all axes but the samples'."""
        given = self.read(args, kwargs)
        cuts = self.cuts(given.way) or (None,) * len(given.leaves)
        return tuple(
            (*leaf.shape[:axis], *leaf.shape[axis + 1 :]) if axis is not None else tuple(leaf.shape)
            for leaf, axis in zip(given.leaves, cuts, strict=True)
            if isinstance(leaf, Tensor)
        )

    def place_of(
        self, name: Hashable, x: Tensor, batch: int, lengths: Lengths | None
    ) -> BatchAxis | None:
        """The batch axis of `x`, of a layer or use that was met; None if it is not known."""
        batch_axis = self.batch_axes.get(name)
        if batch_axis is None or x.dim() <= batch_axis.axis:
            return None
        size = x.shape[batch_axis.axis]
        if batch_axis.plain:
            if size == batch:
                return batch_axis
        elif not batch:
            return batch_axis if not size else None
        if lengths is None or not batch or size % batch:
            return None
        return self.folds.find(name, size // batch, lengths)

    def locate(
        self, path: str, x: Tensor, batch: int | None, fixed: int | None,
        lengths: Lengths | None = None,
    ) -> BatchAxis:  # fmt: skip
        """The batch axis of a layer's input.

        Args:
            path: the layer's path. x: its input. batch: samples in the model's input, if known.
            fixed: the axis that the layer itself prescribes, if any. lengths: of the model's inputs.

        Raises:
            BatchSizeError: `x` cannot hold the samples.
        """
        batch_axis = None
        if batch is None or fixed is not None or path not in self.batch_axes:
            batch_axis = self.batch_axes.get(path) or BatchAxis(
                self.axis if fixed is None else fixed
            )
        if batch is not None:
            found = self.place_of(path, x, batch, lengths)
            batch_axis = found if path in self.batch_axes else batch_axis
            if batch_axis is None or not batch_axis.fits(x, batch):
                axis = self.batch_axes[path].axis if path in self.batch_axes else self.axis
                raise BatchSizeError(
                    f"{where(path)}: expected {batch} samples along axis {axis}, as in the model's "
                    f"input, got shape {list(x.shape)}. Pass each layer all samples of the batch."
                )
        assert batch_axis is not None
        if fixed is not None and batch_axis.axis != fixed:
            raise BatchSizeError(
                f"{where(path)}: expected samples along axis {fixed}, got an input of shape "
                f"{list(x.shape)} with samples along axis {batch_axis.axis}. Move the samples to axis "
                f"{fixed}."
            )
        if x.dim() <= batch_axis.axis:
            raise BatchSizeError(
                f"{where(path)}: expected an input with samples along axis {batch_axis.axis}, got shape "
                f"{list(x.shape)}."
            )
        return batch_axis
