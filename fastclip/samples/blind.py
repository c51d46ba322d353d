"""Methods that are called without tensors: where the samples are in them nobody can tell."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from fastclip.errors import GraphError
from fastclip.samples.place import called as called_by


def check_rows(running: Iterable[Any], layouts: Mapping[str, Any], path: Hashable | None) -> None:
    """Refuse a private layer that such a method reaches itself; what it calls with rows is looked at.

    Args:
        running: the calls, the outermost first. layouts: what is known of them, by their names; some
            are known to train. path: of the layer; None: it is no layer.

    Raises:
        GraphError: naming both, and the way out.
    """
    blind = [call.name for call in running if call.drives and not layouts[call.name].drives]
    if blind and path is not None:
        raise GraphError(
            f"{called_by(path)} is reached inside {blind[-1]}, which was called without tensors, so it "
            "cannot be told which rows are whose there; give the method the batch as an argument, or "
            "compute the loss from what the model's forward returns"
        )
