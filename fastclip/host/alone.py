"""Whether another thread could draw from a generator while this one moves it on."""

from __future__ import annotations

import threading

_OF_LOADERS = (
    ("multiprocessing.queues", "Queue._feed"),
    ("torch.utils.data._utils.pin_memory", "_pin_memory_loop"),
)
"""Module and name of what loaders run in threads: it hands on batches, and draws nothing."""


def is_alone() -> bool:
    """No other thread that Python's `threading` knows is there, but for those that never draw.

    PyTorch holds a lock of the generator while it draws; who reads its state and writes the next one
    holds none, and what another thread draws in between would be drawn again.
    """
    here = threading.get_ident()
    return all(one.ident == here or _never_draws(one) for one in threading.enumerate())


def _never_draws(thread: threading.Thread) -> bool:
    """It belongs to a progress bar or a data loader."""
    if type(thread).__module__ == "tqdm._monitor":
        return True
    target = getattr(thread, "_target", None)
    told = (getattr(target, "__module__", None), getattr(target, "__qualname__", None))
    return told in _OF_LOADERS
