"""A fork's ledger has a lock of its own."""

from __future__ import annotations

import os
from threading import Event, Thread

import pytest

from fastclip import FastPrivacyEngine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_fork_while_another_thread_records() -> None:
    """The thread that held the parent's lock is not in the child."""
    engine = FastPrivacyEngine(accountant="rdp")
    held, done = Event(), Event()

    def hold() -> None:
        with engine.accountant._lock.now():
            held.set()
            done.wait()

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(not engine.accountant._lock.now().acquire(timeout=5))
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
