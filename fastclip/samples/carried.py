"""What one batch leaves on the modules, and whether the next one's outputs follow from it.

The next batch is another row in as many copies, for which a state that is guarded by its size is kept,
and more copies, for which one is that is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fastclip._torch import tree_leaves, tree_map
from fastclip.errors import UnsupportedLayerError
from fastclip.memory import no_memory
from fastclip.samples.inputs import tensors_of
from fastclip.samples.probe_state import PLAIN, TORCHS, is_object, tables_of
from fastclip.samples.probing import Misjudged, Probe, Runs
from fastclip.samples.taint import Taint


class Kept:
    """What a run has left on modules, or on what they hold, of the numbers of its batch; inside,
    it is there again.

    Args:
        model: whose modules are looked at. probe: of that run.
    """

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        assert probe.taint is not None
        self._taint, self.rows = probe.taint, probe.rows
        self._left: list[tuple[dict[str, Any], str, Any]] = []
        self.names: list[str] = []
        """Of the attributes."""
        self._following: list[Tensor] = []
        for path, table in tables_of(model):
            for name, value in table.items():
                if name not in TORCHS and self.reaches(_tensors(value)):
                    # containers as they are now: afterwards they hold what they did before
                    self._left.append((table, name, tree_map(_itself, value)))
                    self.names.append(f"{path}.{name}".lstrip("."))
                    self._following += filter(self._taint.follows, _tensors(value))

    def __enter__(self) -> None:
        for table, name, value in self._left:
            table[name] = tree_map(_itself, value)
        for x in self._following:  # a sparse one lies elsewhere, once it is put back
            self._taint.mark(x)
        self._taint.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._taint.__exit__(*error)

    def reaches(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them follows from numbers of that batch."""
        return any(map(self._taint.follows, tensors))


def note_kept(run: Runs, probe: Probe, kept: list[Kept], out: Any) -> None:
    """To be called while the probe still runs."""
    kept.append(Kept(run.model, probe))


def next_batch(run: Runs, probe: Probe, kept: Kept) -> Any:
    """The output of a batch of copies of one row, to which nothing comes from the one before.

    Raises:
        UnsupportedLayerError: something does.
    """
    if not kept.names:
        return run.once(probe, [0] * probe.rows)
    with run.another_row():
        out, carried = _after(run, _as_many(probe, kept), kept)
    if out is None:  # the model cannot take this row, or what was left
        _, carried = _after(run, _as_many(probe, kept), kept)
    if not carried:
        out, carried = _after(run, probe, kept)
    if carried:
        raise UnsupportedLayerError(
            f"attributes {kept.names} keep numbers of one batch, from which outputs of the next one "
            "follow: what they carry over is not private; compute them in every forward pass"
        )
    return out


def _as_many(probe: Probe, kept: Kept) -> Probe:
    return Probe(probe.layout, kept.rows, taint=Taint(()))


def _after(run: Runs, probe: Probe, kept: Kept) -> tuple[Any, bool]:
    """What a batch after the other gives, and whether it follows from that one; None if it fails, as on
    a state of as many rows as the batch before had."""
    try:
        out = run.once(probe, [0] * probe.rows, left=kept)
        return out, kept.reaches(tensors_of(out))
    except Misjudged:
        raise
    except Exception as error:
        if no_memory(error):
            raise
        return None, True


def _tensors(value: Any) -> list[Tensor]:
    """Those in an attribute, or in an object that it may hold since that batch."""
    if type(value) in PLAIN:
        return []
    leaves = tree_leaves(value)
    held = [leaf for leaf in leaves if is_object(leaf)]
    return [x for x in (*leaves, *tree_leaves(list(map(vars, held)))) if isinstance(x, Tensor)]


def _itself(x: Any) -> Any:
    return x
