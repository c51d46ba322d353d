"""What one sample gives is the same in any batch: values say so where a trace does not suffice.

A trace proves the way that a run has taken. Where Python reads numbers of the batch to choose it, the
same rows are run among other rows, among special ones, in another order, and among fewer. What every
layer and use is given of a row that was kept, what the call returns of it, and the gradients of all
that, must stay the same. Whose an entry is, the tracer says in each run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import BatchSizeError, FastclipError, UnsupportedLayerError, where
from fastclip.memory import no_memory
from fastclip.samples.changed_rows import IN_LISTS, NOT_FINITE, SPECIAL, Change, of_others
from fastclip.samples.gradients import gradients, normal
from fastclip.samples.independence import HOW_MANY, NUMBER, OTHERS, Coupled, coupled
from fastclip.samples.inputs import Cuts
from fastclip.samples.layout import MANY
from fastclip.samples.place import called
from fastclip.samples.probe_state import stirred
from fastclip.samples.probing import Probe, Runs, Shown
from fastclip.samples.rounding import OTHER_BATCH, VALUES, close
from fastclip.trace import attribution as at
from fastclip.trace.tracer import all_aside

_SEED = 1
_LINES = 8
"""Lines of Python's, at most, whose questions about one sample get another answer."""
_ROUNDINGS = 64


@dataclass
class _Part:
    """What one thing was given of each sample, call after call.

    Args:
        values, gradients: of each sample, by its place in the run; no gradients where none arrived.
    """

    moved: bool
    values: dict[int, list[Tensor]]
    gradients: dict[int, list[Tensor]]


class _Given:
    """What a run has given of each sample.

    Args:
        rows: which rows were run. mixed: outputs that may be no part of a loss. like: of the same rows,
            some of which are NaN here, so that only there values say whose an entry is.
    """

    def __init__(self, rows: list[int], mixed: Container[int], like: _Given | None = None) -> None:
        self.rows, self.parts, self._mixed = rows, dict[Hashable, _Part](), mixed
        self._owners: dict[tuple[Hashable, int], Tensor] = {}
        self._like = None if like is None else like._owners
        self._noted: list[tuple[Shown, Tensor, Tensor | None]] = []
        self.noise = 0.0
        """Below which gradients are rounding alone, beside the largest of all."""
        self.draws = self.elsewhere = self.opaque = False
        self.answers: list[bool | float] = []
        self.of: list[tuple[int, str] | None] = []
        """What Python asked, and the sample and line of each question that is about one."""
        self.moved: set[Hashable] = set()
        """What has no one place in this run."""

    def scale(self, by: float) -> None:
        """All gradients are so many times as large."""
        for part in self.parts.values():
            part.gradients = {n: [by * g for g in gs] for n, gs in part.gradients.items()}
        self.noise *= by

    def note(self, probe: Probe, output: Any) -> None:
        """The run has returned this."""
        probe.returns(output)
        for error in probe.coupled.values() if self._like is None else ():
            if error.of == OTHERS:
                raise error
        self.moved = set(probe.moved)
        shown = [*probe.shown, *probe.outputs]
        with all_aside():
            owners = self._all_owners(probe, shown)
            asked = [x for x in shown if x.edge is not None]
            roots = [
                x for x in probe.outputs
                if x.edge is not None
                and x.name not in self._mixed
                and (x.of_all or id(x) in owners)
            ]  # fmt: skip
            seeds = [self._seed(x, owners.get(id(x))) for x in roots]
        given = self._gradients(roots, asked, seeds) if roots else ()
        found = dict(zip(map(id, asked), given, strict=False))
        self._noted = [(x, owners[id(x)], found.get(id(x))) for x in shown if id(x) in owners]

    def take(self) -> None:
        """The run is over, and nothing follows what is computed: take apart what it has given."""
        with all_aside():
            for x, own, gradient in self._noted:
                self._add(x, own, gradient)
            found = [
                g for part in self.parts.values() for gs in part.gradients.values() for g in gs
            ]
            self.noise = max(map(_rounding_of, found), default=0.0)
        self._noted = []

    def gives_nothing(self, sample: int) -> bool:
        """Its gradients are all 0, or its norm is not finite: clipped, both are."""
        found = [g for part in self.parts.values() for g in part.gradients.get(sample, [])]
        return not all(bool(torch.isfinite(g).all()) for g in found) or not any(
            bool(g.any()) for g in found
        )

    @staticmethod
    def _gradients(roots: list[Shown], asked: list[Shown], seeds: list[Tensor]) -> tuple[Any, ...]:
        """Of the roots with respect to all that is asked.

        Raises:
            UnsupportedLayerError: random numbers of the backward pass are part of them, which no other
                pass draws again.
        """
        outputs, before = [x.value for x in roots], torch.get_rng_state()
        edges = [x.edge for x in asked if x.edge is not None]
        given = gradients(outputs, edges, seeds, keep_graph=True)
        if torch.equal(before, torch.get_rng_state()):
            return given
        again = gradients(outputs, edges, seeds)
        for x, one, other in zip(asked, given, again, strict=True):
            if one is not None and other is not None and not close(one, other, VALUES):
                raise UnsupportedLayerError(
                    f"{where(called(x.name))}: the backward pass draws random numbers, so that samples' "
                    "gradients differ from pass to pass. Draw them in the forward pass"
                )
        return given

    def _all_owners(self, probe: Probe, shown: list[Shown]) -> dict[int, Tensor]:
        """The sample of every entry, of what is of samples one by one."""
        assert probe.followed is not None
        numbers, found = Counter[Hashable](), dict[int, Tensor]()
        for x in shown:
            key = x.name, numbers[x.name]
            numbers[x.name] += 1
            own = None if self._like is None else self._like.get(key)
            if own is None or own.shape != x.value.shape:
                if x.shadow.mixed or not x.shadow.held:
                    continue
                own = probe.followed.owners(x.value, x.shadow)
            found[id(x)] = own
            if not x.moved:
                self._owners[key] = own
        return found

    def _seed(self, x: Shown, own: Tensor | None) -> Tensor:
        """The gradient of an output: it follows from each row's own number and values, wherever they
        are."""
        value = x.value.detach()
        if own is None:  # a sum; its mean is a sum of fewer times as much
            return torch.full_like(value, float(len(self.rows)) ** -(x.shadow.degree or 0))
        columns = normal(value.new_empty(value.shape[-1] if value.dim() > 1 else 1), 1).to(
            value.dtype
        )
        seed = columns * (1 + value / (1 + value.abs()))
        numbers = torch.tensor(self.rows, dtype=value.dtype, device="cpu")
        number = numbers[own.long().clamp(0, len(self.rows) - 1)].to(seed.device)
        return (seed * (1 + number / 8)).nan_to_num(0.0, 0.0, 0.0)

    def _add(self, x: Shown, own: Tensor, gradient: Tensor | None) -> None:
        name: Hashable = "the output" if isinstance(x.name, int) else x.name
        part = self.parts.setdefault(name, _Part(x.moved, {}, {}))
        part.moved |= x.moved
        for sample, take in _by_sample(own, x.value):
            part.values.setdefault(sample, []).append(take(x.value.detach()))
            if gradient is not None:
                part.gradients.setdefault(sample, []).append(take(gradient))


def _rounding_of(g: Tensor) -> float:
    """How large a few roundings of its largest entry are."""
    if not g.numel() or g.is_complex():
        return 0.0
    return _ROUNDINGS * torch.finfo(g.dtype).eps * float(g.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _by_sample(own: Tensor, like: Tensor) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """The samples in `own`, each with what takes its entries, which keep their shape where samples lie
    along one axis."""
    if not own.numel():
        return
    axes = [axis for axis, n in enumerate(own.shape) if n > 1 and own.stride(axis)]
    line = own[tuple(slice(None) if axis in axes else 0 for axis in range(own.dim()))]
    for sample in line[(line >= 0) & (line < at.SEVERAL)].unique().tolist():
        if len(axes) == 1:
            rows = (line == sample).nonzero().reshape(-1).to(like.device)
            yield sample, partial(torch.index_select, dim=axes[0], index=rows)
        else:
            mine = (own == sample).to(like.device)
            yield sample, partial(torch.masked_select, mask=mine)


def hold_apart(
    run: Runs, cuts: Cuts, probe_of: Callable[..., Probe], mixed: Container[int], *,
    whole: bool = False,
) -> set[Hashable]:  # fmt: skip
    """Run the same rows in several batches.

    Returns:
        The layers and uses that have no one place in one of them.

    Args:
        probe_of: makes a probe of so many rows. mixed: outputs that may be no part of a loss.
        whole: all rows of the batch are run.

    Raises:
        BatchSizeError: a row gives something else in one of them.
    """
    real = list(range(min(run.rows(cuts), MANY))) if whole else run.distinct(cuts)
    for synthetic in (True, False) if len(real) < 2 else (False,):
        choice = run.cut(cuts, real or None, synthetic)
        try:
            runs = _Batches(run, probe_of, mixed)
            with stirred(() if run.as_they_are else run.private):
                _hold(runs, choice)
            return runs.moved
        except Exception as error:
            if not synthetic or no_memory(error) or isinstance(error, FastclipError):
                raise
    return set()


class _Batches:
    """Makes runs of the same rows in several batches.

    Args:
        probe_of: makes a probe of so many rows. mixed: outputs that may be no part of a loss.
    """

    def __init__(self, run: Runs, probe_of: Callable[..., Probe], mixed: Container[int]) -> None:
        self.run, self._probe_of, self._mixed = run, probe_of, mixed
        self.moved: set[Hashable] = set()

    def once(
        self, some: list[int], change: Any = None, *, draws_alike: bool = False,
        like: _Given | None = None, wanted: Mapping[int, bool | float] = MappingProxyType({}),
    ) -> _Given:  # fmt: skip
        """What it gives.

        Args:
            wanted: answers to questions of Python's, by their numbers.
        """
        run, given = self.run, _Given(some, self._mixed, like)
        probe = self._probe_of(len(some), compares=True, draws_alike=draws_alike, change=change)
        assert probe.followed is not None
        questions = probe.followed.tracer.questions
        questions.wanted = dict(wanted)
        run.once(probe, some, _SEED, partial(given.note, probe))
        given.take()
        given.draws, given.elsewhere, given.opaque = probe.draws, probe.elsewhere, probe.opaque
        given.answers, given.of = questions.answers, questions.of
        self.moved.update(given.moved)
        return given

    def attempt(self, some: list[int], change: Any = None, **how: Any) -> _Given | None:
        """None where the model takes no such rows."""
        try:
            return self.once(some, change, **how)
        except FastclipError:
            raise
        except Exception as error:
            if no_memory(error):
                raise
            return None

    def changed(
        self, rows: list[int], change: Change, kept: list[int], like: _Given | None = None
    ) -> _Given | None:
        """Rows of which others are changed than these."""
        return self.attempt(rows, partial(of_others, change, kept), like=like)


def _hold_among_others(runs: _Batches, base: _Given) -> None:
    """Replacing some rows changes nothing for the rest."""
    rows = base.rows
    for kept, others in _batches(rows):
        if (found := runs.attempt(others)) is not None:
            _compare(base, found, kept, VALUES)
    half, others = [*range(0, len(rows), 2)], [*range(1, len(rows), 2)]
    same = [(i, i) for i in half]
    special = IN_LISTS if runs.run.has_lists else SPECIAL
    for change in (*special, *NOT_FINITE):
        if not runs.run.is_changed_by(partial(of_others, change, [])):  # ids are never NaN
            continue
        like = base if change in NOT_FINITE else None
        if (among := runs.changed(rows, change, half, like)) is not None:
            try:
                _compare(base, among, same, VALUES)
            except FastclipError as error:
                if change not in NOT_FINITE:
                    raise
                raise _spreads() from error
        if change in special and (alone := runs.changed(rows, change, [])) is not None:
            among = runs.changed(rows, change, others)
            if among is not None:
                _compare(alone, among, same, VALUES)
                _compare(base, among, [(i, i) for i in others], VALUES)


def _hold_whatever_one_answers(runs: _Batches, base: _Given) -> None:
    """What Python asks about one sample says nothing of the others: another answer changes nothing of
    theirs, however seldom it is given."""
    lines = set[str]()
    for k, asked in enumerate(base.of):
        if asked is None or asked[1] in lines or len(lines) == _LINES:
            continue
        lines.add(asked[1])
        wanted = dict(enumerate((*base.answers[:k], not base.answers[k])))
        if (found := runs.attempt(base.rows, wanted=wanted)) is not None:
            others = [(i, i) for i in range(len(base.rows)) if i != asked[0]]
            _compare(base, found, others, VALUES)


def _hold_in_any_order(runs: _Batches, base: _Given) -> None:
    """Neither the order of rows nor their number changes anything, where all draw the same numbers."""
    rows, alike = base.rows, base.draws
    if alike:
        base = runs.once(rows, draws_alike=True)
    if base.opaque:  # somebody's own operator has drawn, which draws as it does
        return
    back = [(i, len(rows) - 1 - i) for i in range(len(rows))]
    if (found := runs.attempt(rows[::-1], draws_alike=alike)) is not None:
        _compare(base, found, back, OTHER_BATCH, NUMBER)
    for few in (slice(0, -1), slice(1, None), slice(0, 2), slice(0, 3)):
        found = runs.attempt(rows[few], draws_alike=alike)
        if found is None:
            continue
        same = [(i, k) for k, i in enumerate(range(len(rows))[few])]
        try:
            _compare(base, found, same, OTHER_BATCH, HOW_MANY)
        except FastclipError:  # or as a mean of all of them
            found.scale(len(same) / len(rows))
            _compare(base, found, same, OTHER_BATCH, HOW_MANY)


def _hold(runs: _Batches, choice: int) -> None:
    base = runs.once([i % choice for i in range(max(choice, 4))])
    try:
        _hold_among_others(runs, base)
        _hold_whatever_one_answers(runs, base)
        _hold_in_any_order(runs, base)
    except Coupled as error:
        if not base.elsewhere:
            raise
        raise BatchSizeError(
            f"{error}. If only the random numbers differ, draw with torch's own functions, or switch an "
            "augmentation of the model's off"
        ) from None


def _spreads() -> BatchSizeError:
    return BatchSizeError(
        "a sample that is NaN or infinite changes what other samples give (0 * NaN is NaN). Compute "
        "every row from itself alone (selected by numbers, or with torch.where), or begin the model's "
        "forward with x = x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3), if it is exact for such numbers"
    )


def _batches(rows: list[int]) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Rows in which half of them are kept, and the others are copies of one that is, or move on."""
    bits = max(1, (len(rows) - 1).bit_length())
    for bit in range(bits):
        for side in (0, 1):
            kept = [i for i in range(len(rows)) if (i >> bit) & 1 == side]
            if side:  # the last that is kept before it: rows that are sorted stay so
                last = [max((k for k in kept if k <= i), default=kept[0]) for i in range(len(rows))]
                others = [rows[k] for k in last]
            else:
                others = [rows[i if i in kept else (i + 1) % len(rows)] for i in range(len(rows))]
            yield [(i, i) for i in kept], others


def _compare(
    base: _Given, other: _Given, pairs: list[tuple[int, int]], allowed: dict[torch.dtype, float],
    of: str = OTHERS,
) -> None:  # fmt: skip
    noise = max(base.noise, other.noise)
    for name, part in base.parts.items():
        found = other.parts.get(name)
        for mine, theirs in pairs:
            # another use of the same numbers may take its place
            if found is None or _is_same(part, found, mine, theirs, allowed, noise):
                continue
            nothing = base.gives_nothing(mine) and other.gives_nothing(theirs)
            if not (nothing and _is_same(part, found, mine, theirs, allowed, None)):
                raise coupled(called(name), None, of)


def _is_same(
    one: _Part, other: _Part, mine: int, theirs: int, allowed: Any, noise: float | None
) -> bool:
    """One thing was given the same; without `noise` whatever its gradients are."""
    moved = one.moved or other.moved
    a, b = one.values.get(mine, []), other.values.get(theirs, [])
    g = [] if noise is None else one.gradients.get(mine, [])
    h = [] if noise is None else other.gradients.get(theirs, [])
    noise = noise or 0.0
    if [x.shape for x in a] != [x.shape for x in b]:
        if moved or [x.dim() for x in a] != [x.dim() for x in b]:
            return _agree(_alive(g), _alive(h), True, allowed, noise)
        a, b = _in_common(a, b), _in_common(b, a)  # padded to the longest of the batch
        g, h = _in_common(g, h), _in_common(h, g)
    return _agree(a, b, moved, allowed) and _agree(g, h, moved, allowed, noise)


def _in_common(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Each as far as the other one reaches."""
    pairs = zip(some, others, strict=False)
    return [x[tuple(slice(0, n) for n in y.shape)] for x, y in pairs]


def _alive(gradients: list[Tensor]) -> list[Tensor]:
    return [x[x != 0] for x in gradients]


def _agree(
    one: list[Tensor], other: list[Tensor], moved: bool, allowed: Any, noise: float = 0.0
) -> bool:
    if not one or not other:
        return all(_is_below(x, noise) for x in (*one, *other))
    a, b = torch.cat([x.reshape(-1) for x in one]), torch.cat([x.reshape(-1) for x in other])
    if a.shape != b.shape:
        return False
    if _are_near(a, b, allowed, noise):
        return True
    if not moved or a.is_complex():
        return False
    rows = _rows_in_order(one), _rows_in_order(other)  # far faster than all numbers
    return _are_near(*rows, allowed, noise) or _are_near(a.sort()[0], b.sort()[0], allowed, noise)


def _rows_in_order(given: list[Tensor]) -> Tensor:
    """The numbers, of rows of one length in an order that follows from what is in them."""
    each = [x.reshape(len(x) if x.dim() > 1 else x.numel(), -1) for x in given if x.numel()]
    if len({x.shape[1] for x in each}) != 1:
        return torch.cat([x.reshape(-1) for x in given])
    rows = torch.cat(each)
    weights = normal(rows[:1].reshape(-1), 2)
    return rows[(rows.to(torch.float64) @ weights.to(torch.float64)).argsort()].reshape(-1)


def _are_near(a: Tensor, b: Tensor, allowed: Any, noise: float) -> bool:
    return close(a, b, allowed) or (noise > 0 and _is_below(a - b, noise))


def _is_below(x: Tensor, noise: float) -> bool:
    return bool((x.abs() <= noise).all()) if noise else not bool(x.any())
