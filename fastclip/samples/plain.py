"""What is plain, a row a sample along one axis: shapes of 2 and 3 rows say so, until gradients do."""

from __future__ import annotations

from fastclip.errors import BatchSizeError, where
from fastclip.samples.independence import followed
from fastclip.samples.layout import BatchLayout
from fastclip.samples.place import Place, called
from fastclip.samples.probing import Probe


def note_plain(layout: BatchLayout, probes: list[Probe]) -> None:
    """Note where layers and uses have their samples, one entry each, in runs on 2 and on 3 rows.

    Raises:
        BatchSizeError: it contradicts what was known.
    """
    for name, axis in followed(probes[0].shapes, probes[1].shapes).items():
        if axis < 0 or probes[0].shapes[name][0][axis] != probes[0].rows:
            continue
        known = layout.places.get(name)
        if layout.known and known is not None and known.axis != axis:
            raise BatchSizeError(
                f"{where(called(name))}: its samples lay along axis {known.axis} before, and now "
                f"along {axis}; keep them along one axis"
            )
        layout.places.setdefault(name, Place(axis))
