"""The line that says what a first step is busy with."""

from __future__ import annotations

import io
import re
import sys
import threading
from weakref import WeakSet

import pytest
import torch
from torch import nn
from tqdm import tqdm

from fastclip import FastPrivacyEngine, waiting
from fastclip.waiting import Work


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error, where every bit is shown. (pytest takes back what a fixture puts there.)"""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(waiting, "_PATIENCE", 0.0)
    monkeypatch.setattr(tqdm, "_instances", WeakSet())  # no bar of another test stands above
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return shown


def test_a_bit_is_shown_while_it_lasts_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    work = Work("tries configurations of kernels")
    with work.bit("scaled_sum"):
        assert "fastclip tries configurations of kernels: 1 (scaled_sum), 0 s" in shown.getvalue()
    lines = shown.getvalue().split("\r")
    assert not lines[-1].strip()  # the cursor is at the line's beginning, and what it held is gone
    assert "\n" not in shown.getvalue()
    assert not lines[-2].strip()
    with pytest.raises(KeyError), work.bit():
        raise KeyError
    assert "kernels: 2, 0 s" in shown.getvalue()
    assert not shown.getvalue().split("\r")[-2].strip()


def test_no_thread_is_started_and_no_other_bar_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal(monkeypatch)
    threads, bars = threading.active_count(), list(tqdm._instances)
    with Work("waits").bit():
        assert threading.active_count() == threads
    assert list(tqdm._instances) == bars
    assert tqdm.monitor_interval > 0  # of other bars


@pytest.mark.parametrize(
    "reason", ["patience", "no terminal", "nowhere", "another rank", "no tqdm"]
)
def test_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    shown = terminal(monkeypatch)
    if reason == "patience":
        monkeypatch.setattr(waiting, "_PATIENCE", 60.0)
    elif reason == "no terminal":
        monkeypatch.setattr(shown, "isatty", lambda: False)
    elif reason == "nowhere":
        monkeypatch.setattr(sys, "stderr", None)
    elif reason == "another rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with Work("waits").bit():
        assert not shown.getvalue()
    assert not shown.getvalue()


def test_a_look_at_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3))
    private, *_ = FastPrivacyEngine().make_private(
        module=model, optimizer=optimizer, noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
    )  # fmt: skip
    assert not shown.getvalue()
    private(torch.randn(8, 3))
    first = shown.getvalue()
    assert re.search(r"fastclip looks at the model: \d+, \d+ s", first)
    private(torch.randn(8, 3))
    assert shown.getvalue() == first
