"""Values show what a trace does not: a sample gives the same results in any batch.

A trace proves independence for the path that a run has taken. If Python reads numbers of the batch to
choose the path, the same samples are run among other samples, among edge samples, in another order, and
among fewer. For a kept sample, the inputs of every layer and use, the outputs of the call, and their
gradients must stay the same. In each run the tracer identifies the sample of each entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastclip.core.system import no_memory
from fastclip.core.torch_names import tree_leaves, tree_map
from fastclip.errors import BatchSizeError, FastclipError, UnsupportedLayerError, where
from fastclip.samples.batch_axis import OTHER_BATCH, VALUES, called, close
from fastclip.samples.inputs import Cuts
from fastclip.samples.layout import MANY
from fastclip.samples.probing import HOW_MANY, NUMBER, OTHERS, Coupled, Probe, Runs, Shown, coupled
from fastclip.samples.state import PLAIN, TORCHS, gradients, is_object, normal, stirred, tables_of
from fastclip.samples.subsets import IN_LISTS, NOT_FINITE, SPECIAL, Change, of_others
from fastclip.trace import attribution as at
from fastclip.trace.tracer import all_aside

_SEED = 1
_LINES = 8
"""Maximum number of Python lines with questions about one sample that get another answer."""
_ROUNDINGS = 64


@dataclass
class _Part:
    """What one layer, use or output got of each sample, call after call.

    Args:
        values, gradients: of each sample, by its position in the run; no gradients if none arrived.
    """

    moved: bool
    values: dict[int, list[Tensor]]
    gradients: dict[int, list[Tensor]]


class _Given:
    """The results of a run for each sample.

    Args:
        samples: the samples that were run. mixed: outputs that must not be part of a loss.
        like: a run on the same samples. Some of them are NaN here, so only that run shows which sample
            an entry belongs to.
    """

    def __init__(
        self, samples: list[int], mixed: Container[int], like: _Given | None = None
    ) -> None:
        self.rows, self.parts, self._mixed = samples, dict[Hashable, _Part](), mixed
        self._sample_of_entry: dict[tuple[Hashable, int], Tensor] = {}
        self._like = None if like is None else like._sample_of_entry
        self._noted: list[tuple[Shown, Tensor, Tensor | None]] = []
        self.noise = 0.0
        """Gradients below this size are rounding errors of the largest one."""
        self.draws = self.elsewhere = self.opaque = False
        self.answers: list[bool | float] = []
        self.of: list[tuple[int, str] | None] = []
        """The answers that Python got, and the sample and line of each question about one sample."""
        self.moved: set[Hashable] = set()
        """Layers and uses without one batch axis in this run."""

    def scale(self, by: float) -> None:
        """Multiply all gradients."""
        for part in self.parts.values():
            part.gradients = {n: [by * g for g in gs] for n, gs in part.gradients.items()}
        self.noise *= by

    def note(self, probe: Probe, output: Any) -> None:
        """Note the output of the run."""
        probe.returns(output)
        for error in probe.coupled.values() if self._like is None else ():
            if error.of == OTHERS:
                raise error
        self.moved = set(probe.moved)
        shown = [*probe.shown, *probe.outputs]
        with all_aside():
            samples = self._all_samples(probe, shown)
            asked = [x for x in shown if x.edge is not None]
            roots = [
                x for x in probe.outputs
                if x.edge is not None
                and x.name not in self._mixed
                and (x.of_all or id(x) in samples)
            ]  # fmt: skip
            seeds = [self._seed(x, samples.get(id(x))) for x in roots]
        given = self._gradients(roots, asked, seeds) if roots else ()
        found = dict(zip(map(id, asked), given, strict=False))
        self._noted = [(x, samples[id(x)], found.get(id(x))) for x in shown if id(x) in samples]

    def take(self) -> None:
        """Split the results by sample, after the run and without tracing."""
        with all_aside():
            for x, own, gradient in self._noted:
                self._add(x, own, gradient)
            found = [
                g for part in self.parts.values() for gs in part.gradients.values() for g in gs
            ]
            self.noise = max(map(_rounding_of, found), default=0.0)
        self._noted = []

    def gives_nothing(self, sample: int) -> bool:
        """Whether its gradients are all 0 or not finite; both contribute nothing after clipping."""
        found = [g for part in self.parts.values() for g in part.gradients.get(sample, [])]
        return not all(bool(torch.isfinite(g).all()) for g in found) or not any(
            bool(g.any()) for g in found
        )

    @staticmethod
    def _gradients(roots: list[Shown], asked: list[Shown], seeds: list[Tensor]) -> tuple[Any, ...]:
        """Gradients of the roots with respect to all of `asked`.

        Raises:
            UnsupportedLayerError: they depend on random numbers of the backward pass, which no other
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
                    f"{where(called(x.name))}: the backward pass draws random numbers, so per-sample "
                    "gradients differ between passes. Draw the numbers in the forward pass.",
                    doc="random-numbers",
                )
        return given

    def _all_samples(self, probe: Probe, shown: list[Shown]) -> dict[int, Tensor]:
        """The sample of every entry, for tensors whose entries depend on one sample each."""
        assert probe.followed is not None
        numbers, found = Counter[Hashable](), dict[int, Tensor]()
        for x in shown:
            key = x.name, numbers[x.name]
            numbers[x.name] += 1
            own = None if self._like is None else self._like.get(key)
            if own is None or own.shape != x.value.shape:
                if x.shadow.mixed or not x.shadow.held:
                    continue
                own = probe.followed.sample_of_entry(x.value, x.shadow)
            found[id(x)] = own
            if not x.moved:
                self._sample_of_entry[key] = own
        return found

    def _seed(self, x: Shown, own: Tensor | None) -> Tensor:
        """The gradient of an output. It depends on each sample's own number and values, at any
        position."""
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
    """The size of a few roundings of its largest entry."""
    if not g.numel() or g.is_complex():
        return 0.0
    return _ROUNDINGS * torch.finfo(g.dtype).eps * float(g.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _by_sample(own: Tensor, like: Tensor) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """The samples in `own`, each with a function that takes its entries. They keep their shape if
    samples lie along one axis."""
    if not own.numel():
        return
    axes = [axis for axis, n in enumerate(own.shape) if n > 1 and own.stride(axis)]
    line = own[tuple(slice(None) if axis in axes else 0 for axis in range(own.dim()))]
    for sample in line[(line >= 0) & (line < at.SEVERAL)].unique().tolist():
        if len(axes) == 1:
            samples = (line == sample).nonzero().reshape(-1).to(like.device)
            yield sample, partial(torch.index_select, dim=axes[0], index=samples)
        else:
            mine = (own == sample).to(like.device)
            yield sample, partial(torch.masked_select, mask=mine)


def hold_apart(
    run: Runs, cuts: Cuts, probe_of: Callable[..., Probe], mixed: Container[int], *,
    whole: bool = False,
) -> set[Hashable]:  # fmt: skip
    """Run the same samples in several batches.

    Returns:
        The layers and uses without one batch axis in one of them.

    Args:
        probe_of: makes a probe of so many samples. mixed: outputs that must not be part of a loss.
        whole: run all samples of the batch.

    Raises:
        BatchSizeError: a sample gives other results in one of them.
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
    """Makes runs of the same samples in several batches.

    Args:
        probe_of: makes a probe of so many samples. mixed: outputs that must not be part of a loss.
    """

    def __init__(self, run: Runs, probe_of: Callable[..., Probe], mixed: Container[int]) -> None:
        self.run, self._probe_of, self._mixed = run, probe_of, mixed
        self.moved: set[Hashable] = set()

    def once(
        self, some: list[int], change: Any = None, *, draws_alike: bool = False,
        like: _Given | None = None, wanted: Mapping[int, bool | float] = MappingProxyType({}),
    ) -> _Given:  # fmt: skip
        """The results of one run.

        Args:
            wanted: answers to Python's questions, by their numbers.
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
        """The results of one run; None if the model does not accept such samples."""
        try:
            return self.once(some, change, **how)
        except FastclipError:
            raise
        except Exception as error:
            if no_memory(error):
                raise
            return None

    def changed(
        self, samples: list[int], change: Change, kept: list[int], like: _Given | None = None
    ) -> _Given | None:
        """The results of a run in which all samples except `kept` are changed."""
        return self.attempt(samples, partial(of_others, change, kept), like=like)


def _hold_among_others(runs: _Batches, base: _Given) -> None:
    """Replacing some samples changes nothing for the rest."""
    samples = base.rows
    for kept, others in _batches(samples):
        if (found := runs.attempt(others)) is not None:
            _compare(base, found, kept, VALUES)
    half, others = [*range(0, len(samples), 2)], [*range(1, len(samples), 2)]
    same = [(i, i) for i in half]
    special = IN_LISTS if runs.run.has_lists else SPECIAL
    for change in (*special, *NOT_FINITE):
        if not runs.run.is_changed_by(partial(of_others, change, [])):  # ids are never NaN
            continue
        like = base if change in NOT_FINITE else None
        if (among := runs.changed(samples, change, half, like)) is not None:
            try:
                _compare(base, among, same, VALUES)
            except FastclipError as error:
                if change not in NOT_FINITE:
                    raise
                raise _spreads() from error
        if change in special and (alone := runs.changed(samples, change, [])) is not None:
            among = runs.changed(samples, change, others)
            if among is not None:
                _compare(alone, among, same, VALUES)
                _compare(base, among, [(i, i) for i in others], VALUES)


def _hold_whatever_one_answers(runs: _Batches, base: _Given) -> None:
    """Another answer to a question about one sample changes nothing for the others, however rare the
    answer is."""
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
    """Neither the order of samples nor their number changes anything, if all draw the same random
    numbers."""
    samples, alike = base.rows, base.draws
    if alike:
        base = runs.once(samples, draws_alike=True)
    if base.opaque:  # a custom operator has drawn random numbers, which cannot be controlled
        return
    back = [(i, len(samples) - 1 - i) for i in range(len(samples))]
    if (found := runs.attempt(samples[::-1], draws_alike=alike)) is not None:
        _compare(base, found, back, OTHER_BATCH, NUMBER)
    for few in (slice(0, -1), slice(1, None), slice(0, 2), slice(0, 3)):
        found = runs.attempt(samples[few], draws_alike=alike)
        if found is None:
            continue
        same = [(i, k) for k, i in enumerate(range(len(samples))[few])]
        try:
            _compare(base, found, same, OTHER_BATCH, HOW_MANY)
        except FastclipError:  # or as a mean of all of them
            found.scale(len(same) / len(samples))
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
            f"{error}. If only random numbers differ, draw them with torch's functions.",
            doc="random-numbers",
        ) from None


def _spreads() -> BatchSizeError:
    return BatchSizeError(
        "A NaN or infinite sample changes the results of other samples, because 0 * NaN is NaN. Compute "
        "each sample independently, or begin the model's forward with "
        "x = x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3).",
        doc="non-finite-samples",
    )


def _batches(samples: list[int]) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Batches in which half of the samples are kept, and the others are copies of kept ones, or
    shifted."""
    bits = max(1, (len(samples) - 1).bit_length())
    for bit in range(bits):
        for side in (0, 1):
            kept = [i for i in range(len(samples)) if (i >> bit) & 1 == side]
            if side:  # the last kept sample before it: sorted samples stay sorted
                last = [
                    max((k for k in kept if k <= i), default=kept[0]) for i in range(len(samples))
                ]
                others = [samples[k] for k in last]
            else:
                others = [
                    samples[i if i in kept else (i + 1) % len(samples)] for i in range(len(samples))
                ]
            yield [(i, i) for i in kept], others


def _compare(
    base: _Given, other: _Given, pairs: list[tuple[int, int]], allowed: dict[torch.dtype, float],
    of: str = OTHERS,
) -> None:  # fmt: skip
    noise = max(base.noise, other.noise)
    for name, part in base.parts.items():
        found = other.parts.get(name)
        for mine, theirs in pairs:
            # another use of the same numbers may replace it
            if found is None or _is_same(part, found, mine, theirs, allowed, noise):
                continue
            nothing = base.gives_nothing(mine) and other.gives_nothing(theirs)
            if not (nothing and _is_same(part, found, mine, theirs, allowed, None)):
                raise coupled(called(name), None, of)


def _is_same(
    one: _Part, other: _Part, mine: int, theirs: int, allowed: Any, noise: float | None
) -> bool:
    """Whether one part got the same; without `noise`, gradients are ignored."""
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
    """Each of `some`, cut to the size of its counterpart in `others`."""
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
    samples = _rows_in_order(one), _rows_in_order(other)  # far faster than all numbers
    return _are_near(*samples, allowed, noise) or _are_near(
        a.sort()[0], b.sort()[0], allowed, noise
    )


def _rows_in_order(given: list[Tensor]) -> Tensor:
    """The numbers of samples of one length, in an order that depends on their values alone."""
    each = [x.reshape(len(x) if x.dim() > 1 else x.numel(), -1) for x in given if x.numel()]
    if len({x.shape[1] for x in each}) != 1:
        return torch.cat([x.reshape(-1) for x in given])
    samples = torch.cat(each)
    weights = normal(samples[:1].reshape(-1), 2)
    return samples[(samples.to(torch.float64) @ weights.to(torch.float64)).argsort()].reshape(-1)


def _are_near(a: Tensor, b: Tensor, allowed: Any, noise: float) -> bool:
    return close(a, b, allowed) or (noise > 0 and _is_below(a - b, noise))


def _is_below(x: Tensor, noise: float) -> bool:
    return bool((x.abs() <= noise).all()) if noise else not bool(x.any())


# -------------------------------------------------------------------------------------------------
# Python's questions about a batch, and whether the answers matter. A question is yes or no
# (`if mask.all():`) or reads a fraction of several samples (`if x.mean().item() > 0:`).
#
# A call is run again with the other answer to each question. Instead of a fraction it gets far larger
# and far smaller ones. If the operations and operands stay the same, the answer has no effect (a
# warning), although it depends on all samples. If the question is whether all of a mask is true, the
# call is run as if nothing were masked. Both paths, with and without the mask, must then give the same
# outputs and gradients. The same holds if the question is whether some sample is an edge sample (a text
# of several parts) and none is, because an edge sample takes the same path in every batch. That path
# must be proven, too. A fraction that has an effect couples the samples, whatever its value in this
# batch. A whole number may count positions, so it does not.


_MOST = 16
"""Maximum number of runs."""
_FAR = 100.0
"""Factor by which the fraction that Python gets is larger."""


class Asked(Protocol):
    """A run with questions of Python."""

    @property
    def answers(self) -> list[bool | float]:
        """What Python got, in the order of its questions."""

    def is_again(self, other: Any) -> bool:
        """Whether the other run has done the same."""

    def gives_the_same(self, other: Any, question: int) -> bool:
        """Whether another answer to this question than in the other run changes nothing."""


class Matters(Exception):
    """A fraction of several samples that Python has read has an effect."""


def have_no_effect(first: Asked, run: Callable[[Mapping[int, bool | float]], Asked]) -> bool:
    """Whether no question of a run has an effect.

    Args:
        run: runs again, with given answers to the questions of these numbers, and true answers to the
            others. Raises an error if independence is not proven.

    Raises:
        Matters: a fraction has an effect.
    """
    ahead, runs = _others(first, 0), 0
    while ahead:
        (before, k, other), runs = ahead.pop(), runs + 1
        if runs > _MOST:
            return False
        wanted = [*before.answers[:k], other]
        try:
            found = run(dict(enumerate(wanted)))
        except (AssertionError, ValueError):  # it only checks what it was given
            continue
        except Exception as error:  # the model does not run on that path
            if no_memory(error):
                raise
            return False
        if found.answers[: k + 1] != wanted:
            return False
        if not found.gives_the_same(before, k):
            if isinstance(other, bool):
                return False
            raise Matters
        if not run({}).is_again(first):  # an answer was kept
            return False
        ahead += _others(found, len(wanted))
    return True


def _others(run: Asked, first: int) -> list[tuple[Asked, int, bool | float]]:
    """The other answers to the questions of a run from the `first` on."""
    found: list[tuple[Asked, int, bool | float]] = []
    for k, answer in enumerate(run.answers[first:], first):
        if isinstance(answer, bool):
            found.append((run, k, not answer))
        else:
            size = _FAR * (1 + abs(answer))
            found += [(run, k, size), (run, k, -size)]
    return found


def unmasked(x: Any, axis: int) -> Any:
    """An input's samples, unchanged; instead of a mask, one that hides nothing."""
    del axis
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_floating_point() or x.is_complex():
        return x
    masks = (
        not x.numel() or 0 <= int(x.min()) <= int(x.max()) == 1
    )  # zeros alone may be numbers of a table
    return torch.ones_like(x) if masks else x


class Given:
    """The results of a run: outputs, and the gradients of layers and uses.

    Args:
        shown: by layers and uses. outputs: the tensors that it returned.
    """

    def __init__(self, shown: list[Shown], outputs: list[Tensor]) -> None:
        self.outputs = [x.detach() for x in outputs]
        roots = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
        seeds = [normal(x, k).to(x.dtype) for k, x in enumerate(roots)]
        edges = [x.edge for x in shown if x.edge is not None]
        self._names = [x.name for x in shown if x.edge is not None]
        self._gradients = gradients(roots, edges, seeds) if roots and edges else ()

    def is_like(self, other: Given) -> bool:
        """Whether the other run has given the same, except for rounding."""
        if self._names != other._names or len(self.outputs) != len(other.outputs):
            return False
        found = zip(
            (*self.outputs, *self._gradients), (*other.outputs, *other._gradients), strict=True
        )
        return all(_same(one, two) for one, two in found)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and close(one, other, VALUES)


# -------------------------------------------------------------------------------------------------
# What one batch leaves on the modules, which may affect the next batch's outputs.


class Kept:
    """The numbers of a batch that a run has left on modules, or on objects that they hold. Inside, they
    are there again.

    Args:
        model: with the modules to check. probe: of that run, while its tracer is still active.
    """

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self._left: list[tuple[dict[str, Any], str, int, Any]] = []
        self.names: list[str] = []
        """Of the attributes."""
        self.sparse: list[str] = []
        """Attributes that hold a new tensor without memory of its own, which no tracer follows."""
        for path, table in tables_of(model):
            for name, value in table.items():
                if name not in TORCHS and any(map(probe.is_new_and_sparse, _tensors(value))):
                    self.sparse.append(f"{path}.{name}".lstrip("."))
                if name not in TORCHS and any(map(probe.holds, _tensors(value))):
                    # containers as they are now: afterwards they hold what they did before
                    self._left.append((table, name, id(value), tree_map(_itself, value)))
                    self.names.append(f"{path}.{name}".lstrip("."))

    def __enter__(self) -> None:
        made: dict[int, Any] = {}  # a list that two modules share is one list again
        for table, name, one, value in self._left:
            if one not in made:
                made[one] = tree_map(_itself, value)
            table[name] = made[one]

    def __exit__(self, *error: Any) -> None:
        """The run puts back what it has found."""


def _tensors(value: Any) -> Iterable[Tensor]:
    """Those in an attribute, or in an object that it may hold since that batch."""
    if type(value) in PLAIN:
        return []
    leaves = tree_leaves(value)
    held = [leaf for leaf in leaves if is_object(leaf)]
    return [x for x in (*leaves, *tree_leaves(list(map(vars, held)))) if isinstance(x, Tensor)]


def _itself(x: Any) -> Any:
    return x
