"""A fork is another process, whatever number the system gives it."""

from __future__ import annotations

import os

import pytest

from fastclip.core import system

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def test_a_process_stays_itself():
    assert system.this_process() == system.this_process()


def test_a_fork_is_another_process_even_under_the_same_number(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    before = system.this_process()
    child = os.fork()
    if not child:
        os._exit(0 if system.this_process() != before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert system.this_process() == before
