"""The line that says what a first step is busy with."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fastclip import FastPrivacyEngine
from fastclip.core import system
from fastclip.core.system import Work

WIDTH = 46


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def line(self) -> str:
        """What the last line shows."""
        shown = [" "] * WIDTH
        for text in self.getvalue().split("\r"):
            shown[: len(text)] = text
        return "".join(shown).rstrip()


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error, where every bit is shown. (pytest takes back what a fixture puts there.)"""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(system, "_PATIENCE", 0.0)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    for rank in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(rank, raising=False)
    return shown


def test_a_bit_is_shown_while_it_lasts_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    work = Work("tries configurations")
    with work.bit("scaled_sum"):
        told = "fastclip tries configurations: 1 (scaled_sum), 0 s"
        assert shown.line == told[: WIDTH - 1].rstrip()
    assert not shown.line
    with pytest.raises(KeyError), work.bit():
        raise KeyError(shown.line)
    assert shown.getvalue().split("\r")[-3].rstrip() == "fastclip tries configurations: 2, 0 s"
    assert not shown.line
    assert shown.getvalue().endswith("\r")
    assert "\n" not in shown.getvalue()


@pytest.mark.parametrize("reason", ["patience", "no terminal", "another rank", "RANK alone"])
def test_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    shown = terminal(monkeypatch)
    if reason == "patience":
        monkeypatch.setattr(system, "_PATIENCE", 60.0)
    elif reason == "no terminal":
        monkeypatch.setattr(shown, "isatty", lambda: False)
    else:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("LOCAL_RANK", "1" if reason == "another rank" else "0")
        if reason == "RANK alone":
            monkeypatch.delenv("LOCAL_RANK")
    with Work("waits").bit():
        assert not shown.getvalue()
    assert not shown.getvalue()


def test_the_first_rank_of_another_machine_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with Work("waits").bit():
        assert shown.line == "fastclip waits: 1, 0 s"


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def closed() -> Terminal:
    shown = Terminal()
    shown.close()
    return shown


@pytest.mark.parametrize(
    "stderr", [None, object(), closed(), Gone()], ids=["none", "no stream", "closed", "gone"]
)
def test_no_terminal_stops_the_work(monkeypatch: pytest.MonkeyPatch, stderr: Any) -> None:
    terminal(monkeypatch)
    monkeypatch.setattr(sys, "stderr", stderr)
    done = []
    with Work("waits").bit():
        done.append(1)
    assert done


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
    assert not shown.line
    private(torch.randn(8, 3))
    assert shown.getvalue() == first
