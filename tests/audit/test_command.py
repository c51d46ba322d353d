"""`python -m fastclip.audit`: what it prints, refuses, and ends with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastclip.audit import __main__ as command
from fastclip.audit.__main__ import main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    names = ["full batch", "units of 3 rows"]
    torch.manual_seed(0)
    assert main(["--only", *names, "--canaries", "900", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    assert "REFUTED" not in said
    told = json.loads(file.read_text())
    assert [one["name"] for one in told["findings"]] == names
    assert not any(one["refuted"] for one in told["findings"])
    assert {"noise: entries", "draws: whole"} <= told["findings"][0]["tests"].keys()


def test_only_and_the_other_options_hold_of_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    given = ["--canaries", "900", "--delta", "1e-4", "--significance", "0.1"]
    assert main(["--opacus", "--only", "hooks: full batch", *given]) == 0
    assert main(["--mutants", "--only", "no noise", *given]) == 0
    said = capsys.readouterr().out
    assert "functorch" not in said
    assert "reused" not in said
    assert said.count("REFUTED") == 1
    assert said.count("3.804") == said.count("3.815") == 1  # at delta 1e-4; Opacus' PRV adds 0.01


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--canaries", "1"], "--canaries expects at least 900, got 1"),
        (["--canaries", "16", "--opacus"], "--canaries expects at least 900, got 16"),
        (["--runs", "3"], "--runs expects at least 200, got 3"),
        (["--only", "full batches"], "--only expects names of"),
        (["--mutants", "--only", "full batch"], "--only expects names of"),
        (["--mutants", "--opacus"], "not allowed with"),
        (["--significance", "0.7"], "--significance expects a number between"),
        (["--delta", "0"], "--delta expects a number between"),
    ],
)
def test_what_could_not_tell_is_refused(
    given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a status of its own, in one sentence, before anything runs."""
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert why in said.err
    assert not said.out


def test_few_canaries_and_runs_are_no_matter_where_none_are_asked_for() -> None:
    torch.manual_seed(0)
    assert main(["--only", "full batch", "--canaries", "900", "--runs", "1"]) == 0


def test_an_attack_that_did_not_work_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores that tell nothing: whatever else, the setting must not count as passed."""
    torch.manual_seed(0)
    real = command.audit

    def blind(*args: object, **given: object) -> object:
        return replace(real(*args, **given), bound=0.0, few=1e-9)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "audit", blind)
    assert main(["--only", "full batch", "--canaries", "900"]) == 3
    assert "SAYS NOTHING" in capsys.readouterr().out
