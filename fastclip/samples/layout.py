"""Where the samples are in every layer and use: what was found, and every later call checked against it.

A recurrent layer may see [t, b, d], a window layer [b * windows, t, d]; t may equal b by accident. What
holds the samples is never assumed: fastclip.samples.learning runs the model to find out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fastclip.errors import BatchSizeError, where
from fastclip.samples.aside import Aside, Lengths
from fastclip.samples.chosen import Rows
from fastclip.samples.drawn import check_drawn
from fastclip.samples.folds import Folds
from fastclip.samples.inputs import (
    Cuts,
    Drawn,
    Reading,
    Way,
    batch_sizes_of,
    readings,
    rows_of,
    way_of,
)
from fastclip.samples.paths import Paths
from fastclip.samples.place import Place
from fastclip.samples.row_lists import is_list
from fastclip.samples.watch import Watch
from fastclip.trace.operation import tensors_in

MANY = 512
"""Rows of the largest batch that is run whole for a look."""


@dataclass
class Guards:
    """What later calls are held to, whose inputs come in one way: outputs, by their number."""

    mixed: dict[int, int] = field(default_factory=dict)
    """Those that couple rows, and must not be part of a loss: dimensions."""
    spreading: dict[int, int] = field(default_factory=dict)
    """Those behind which NaN in one row's gradient would reach others: axes."""
    outlets: set[Any] = field(default_factory=set)
    """Where looks have seen tensors that a call returns: samples.outlets."""
    rare: set[Any] = field(default_factory=set)
    """The same of those that calls have returned, and no look has seen."""


class BatchLayout:
    """The samples' place in every intercepted layer and use, for one kind of call.

    Args:
        axis: of the samples in the model's inputs (0 where batch_first). drawn: what is in hand.
    """

    def __init__(self, axis: int, drawn: Drawn = tuple) -> None:
        self.axis, self.drawn = axis, drawn
        self.known = False
        self.proven = False
        """A traced run says all of it (fastclip.samples.rehearsal); no values were compared."""
        self.entries: set[Hashable] = set()
        """As of `entries_of`, in traced runs that have."""
        self.by_values = False
        """What is computed follows from values, or chance that Python sees: every step is traced."""
        self.by_chance = False
        """Python has drawn random numbers, or has read some."""
        self.lenient = False
        """Python may make other constants of its numbers alongside each sample."""
        self.whole = False
        """Looks are at as many rows as there are."""
        self.asked = False
        """Python has asked yes-or-no questions of the batch in that run, which had no effect."""
        self.drives = False
        """The method trains by itself, so it is not run for a look."""
        self.compared = 0
        """Number of distinct rows that were held against each other."""
        self.tried = 0
        """Rows of the largest batch from which distinct rows were taken."""
        self.watch: Watch | None = None
        """The state in which the model was looked at."""
        self.told_by: list[tuple[int, Way]] = []
        """The input whose size along `axis` is that of the batch: its number, among these inputs."""
        self._cuts: list[tuple[Way, Cuts]] = []
        """The axes of the inputs that hold the samples."""
        self._last: Reading | None = None
        """The inputs of the call that runs, as they were when they were first read."""
        self._aside = Aside()
        self.paths = Paths()
        """The ways through torch's operators that its calls have taken."""
        self.flat = False
        """A probe has met a layer over flat ids, which counts its samples itself."""
        self.chosen: dict[Rows, str] = {}
        """Rows of constants that trained weights meet, and the use where samples choose among them."""
        self.told_of: set[str] = set()
        """Names of such rows."""
        self.version = 0
        """Another one once a look may have changed what is known."""
        self.forget()

    def forget_all(self) -> None:
        """Nothing is known, nor of the states in which it was."""
        self.watch, self.compared, self.tried = None, 0, 0
        self.forget()

    def forget(self) -> None:
        """Nothing is known of layers and uses."""
        self.met: set[Hashable] = set()
        """Layers and uses that a probe has seen."""
        self.counting: set[str] = set()
        """Layers among them that count their samples themselves."""
        self.places: dict[Hashable, Place] = {}
        """Where the samples are, by a layer's path or the key of a use."""
        self.folds = Folds()
        """The same for what is folded."""
        self.open: set[str] = set()
        """Layers without rules: their input has no samples, or rows that the model has moved."""
        self.moved: dict[Hashable, None] = {}
        """Layers and uses whose rows have no one place: data put them somewhere, or calls differ."""
        self.turns: set[Hashable] = set()
        """Uses that are made for one sample after the other; `folds` says in which order, by lengths."""
        self.uses: dict[Hashable, bool] = {}
        """Calls of functions with parameters: True: with a batch; False: with constants alone."""
        self.routers: dict[Hashable, set[str]] = {}
        """For uses whose rows are moved: the modules from which they come out in their places."""
        self.returns: dict[str, dict[int, Place]] = {}
        """For these modules: where the samples are in what they return."""
        self.astray: set[str] = set()
        """Modules that have returned rows in other places: they route nothing."""
        self.users: set[str] = set()
        """Modules inside which parameters are used by themselves."""
        self.proxied: set[nn.Parameter] = set()
        """Parameters that are used outside a layer with a rule."""
        self._guards: list[tuple[Way, Guards]] = []
        self.guards = Guards()
        """Those of the inputs that were cut last."""

    def batch_size(self, args: tuple, kwargs: dict, *, begins: bool = False) -> int | None:
        """Number of samples in the inputs; where a call `begins`, those without have not changed.

        Raises:
            BatchSizeError: they have.
        """
        given = self.read(args, kwargs)
        if begins and not self.flat and (cuts := self.cuts(given.way)) is not None:
            self._aside.check(given.leaves, given.way, cuts)
        for number, known in self.told_by:
            if given.way == known:
                rows = rows_of(given.leaves[number], self.axis)
                return check_drawn(args, kwargs, rows, self.drawn) if begins else rows
        return next(iter(batch_sizes_of(args, kwargs, self.axis)), None)

    def read(self, args: tuple, kwargs: dict) -> Reading:
        """The inputs flattened, as those of a call that was looked at, if any came this way; once a
        call."""
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
        """A call is over: nothing of its inputs is held."""
        self._last = None

    def cuts(self, way: Way) -> Cuts | None:
        """The axes of the inputs that hold the samples, for inputs that come this way."""
        return next((cuts for known, cuts in self._cuts if known == way), None)

    def cut_by(self, way: Way, cuts: Cuts) -> None:
        """From now on inputs that come this way are cut along these axes."""
        others, self._last = [known for known in self._cuts if known[0] != way], None
        self._cuts = [(way, cuts), *others]
        self.guards = self._guards_of(way)

    def size_told_by(self, way: Way, cuts: Cuts) -> None:
        """The first input that is cut along the samples' own axis tells how many there are."""
        number = next(i for i, axis in enumerate(cuts) if axis == self.axis)
        self.told_by = [(number, way), *(x for x in self.told_by if x[1] != way)]

    def guards_of(self, args: tuple, kwargs: dict) -> Guards:
        """Those of calls with such inputs."""
        return self._guards_of(self.read(args, kwargs).way)

    def _guards_of(self, way: Way) -> Guards:
        found = next((guards for known, guards in self._guards if known == way), None)
        if found is None:
            found = Guards()
            self._guards.append((way, found))
        return found

    def settle(self) -> None:
        """Layers that were seen only where nothing could tell their samples have not been met."""
        told = self.places.keys() | self.open | self.counting | self.turns
        self.met = {name for name in self.met if name in told or not isinstance(name, str)}

    def facts(self) -> set[tuple[Hashable, Hashable]]:
        """What calls rely on: layers and uses, each with what is known of it, whatever lengths are."""
        places = {(n, p.axis) for n, p in self.places.items() if n not in self.open}
        return {*places, *self.folds.facts(), *self.uses.items()}

    def lost(self, paths: Iterable[str]) -> None:
        """These modules have been seen to return rows in other places."""
        self.version += 1
        self.astray.update(paths)
        self.returns = {p: found for p, found in self.returns.items() if p not in self.astray}
        self.routers = {name: found - self.astray for name, found in self.routers.items()}

    def knows(self, name: Hashable) -> bool:
        """A probe has seen this layer or use (or cannot see any: inputs that cannot be cut)."""
        return name in self.met or (self.known and self.flat)

    def due(self, model: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether the model must be run on a few rows before this call; to be asked once a call.

        At the first one, and where it has changed its state or is called in another way.
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

    def has_grown(self, rows: int) -> bool:
        """So many rows are more than twice as many as any batch had that was looked at."""
        return self.known and not self.flat and rows > 2 * self.tried and self.tried < MANY

    @property
    def holds_for_any(self) -> bool:
        """Traced runs of several numbers of rows were the same, which is the proof for any number."""
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
    ) -> Place | None:
        """Where the samples are in `x`, of a layer or use that was met; None if that is not known."""
        place = self.places.get(name)
        if place is None or x.dim() <= place.axis:
            return None
        size = x.shape[place.axis]
        if place.plain:
            if size == batch:
                return place
        elif not batch:
            return place if not size else None
        if lengths is None or not batch or size % batch:
            return None
        return self.folds.find(name, size // batch, lengths)

    def locate(
        self, path: str, x: Tensor, batch: int | None, fixed: int | None,
        lengths: Lengths | None = None,
    ) -> Place:  # fmt: skip
        """The samples' place in a layer's input.

        Args:
            path: the layer's path. x: its input. batch: samples in the model's input, if known.
            fixed: the axis that the layer itself prescribes, if any. lengths: of the model's inputs.

        Raises:
            BatchSizeError: `x` cannot hold the samples.
        """
        place = None
        if batch is None or fixed is not None or path not in self.places:
            place = self.places.get(path) or Place(self.axis if fixed is None else fixed)
        if batch is not None:
            found = self.place_of(path, x, batch, lengths)
            place = found if path in self.places else place
            if place is None or not place.fits(x, batch):
                axis = self.places[path].axis if path in self.places else self.axis
                raise BatchSizeError(
                    f"{where(path)}: expected {batch} rows along axis {axis}, as in the model's input, "
                    f"got shape {list(x.shape)}; layers must see the samples that the model was given"
                )
        assert place is not None
        if fixed is not None and place.axis != fixed:
            raise BatchSizeError(
                f"{where(path)}: this layer takes its samples along axis {fixed}, but in this model "
                f"they lie along axis {place.axis} of its input of shape {list(x.shape)}; move the "
                "batch first"
            )
        if x.dim() <= place.axis:
            raise BatchSizeError(
                f"{where(path)}: expected an input with samples along axis {place.axis}, got shape "
                f"{list(x.shape)}"
            )
        return place
