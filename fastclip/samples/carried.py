"""What one batch leaves on the modules of a model, and whether it reaches the outputs of the next."""

from __future__ import annotations

from typing import Any

from fastclip.errors import UnsupportedLayerError
from fastclip.memory import no_memory
from fastclip.samples.inputs import tensors_of
from fastclip.samples.probing import Misjudged, Probe, Runs
from fastclip.samples.taint import Kept


def note_kept(run: Runs, probe: Probe, kept: list[Kept], out: Any) -> None:
    """To be called while the probe still runs."""
    assert probe.taint is not None
    kept.append(Kept(run.model, probe.taint))


def after(run: Runs, probe: Probe, kept: Kept) -> Any:
    """The output of another batch, to which nothing comes from the one before.

    Raises:
        UnsupportedLayerError: something does.
    """
    rows = [0] * probe.rows
    if not kept.names:
        return run.once(probe, rows)
    try:
        out = run.once(probe, rows, left=kept)
        carried = kept.reaches(tensors_of(out))
    except Misjudged:
        raise
    except Exception as error:
        if no_memory(error):
            raise
        carried = True  # such as a state of as many rows as the batch before had
    if carried:
        raise UnsupportedLayerError(
            f"attributes {kept.names} keep numbers of one batch, from which outputs of the next one "
            "follow: what they carry over is not private; compute them in every forward pass"
        )
    return out
