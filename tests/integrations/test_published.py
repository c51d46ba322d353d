"""What a Trainer logs and saves beside the model is of public numbers, but for losses and times."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastclip.integrations.huggingface import check_still_private
from tests.integrations.tiny import ROWS, hf, rows, trainer
from tests.refusal import refused

RATE, EXPECTED = 1 / 3, 8
MEASURED = {
    "loss",
    "train_loss",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
}
"""Of rows, or of a clock: docs/huggingface.md says that they are not private."""


def longer(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "input_ids": (row["input_ids"] * 3)[:12]} for row in data]


def run(folder: Path, data: list[dict[str, Any]], physical: int = 4) -> Any:
    made = trainer(
        folder, physical=physical, accumulation=8 // physical, train_dataset=data,
        privacy={"sample_rate": RATE, "expected_batch_size": EXPECTED},
        arguments={"num_train_epochs": 1},
    )  # fmt: skip
    made.train()
    made.save_state()
    return made


def published(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "trainer_state.json").read_text())
    for entry in state["log_history"]:
        for name in MEASURED:
            entry.pop(name, None)
    return state


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run on rows()."""
    folder = tmp_path_factory.mktemp("ordinary")
    run(folder, rows())
    return published(folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("data", [longer(rows()), rows()[1:]], ids=["longer rows", "one row fewer"])
def test_a_state_tells_nothing_of_rows(tmp_path: Path, data: Any, ordinary: dict[str, Any]) -> None:
    """Neither how many there are, nor how many or how long those are that were drawn."""
    run(tmp_path, data)
    assert published(tmp_path) == ordinary


@pytest.mark.one_in(2)
@pytest.mark.parametrize("physical", [8, 2])
def test_speed_is_of_the_expected_batch(
    tmp_path: Path, physical: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where q and B were given the number of rows is nobody's to know: not by the log, either."""
    hf.utils.logging.enable_propagation()
    try:
        with caplog.at_level("INFO", logger="transformers.trainer"):
            made = run(tmp_path, rows(ROWS - 2), physical)
    finally:
        hf.utils.logging.disable_propagation()
    told = made.state.log_history[-1]
    speed = told["train_samples_per_second"] / told["train_steps_per_second"]
    assert speed == pytest.approx(EXPECTED, rel=0.01)
    assert told["train_samples_per_second"] * told["train_runtime"] == pytest.approx(
        EXPECTED / RATE, rel=0.02
    )
    assert f"Num examples = {round(EXPECTED / RATE)}" in caplog.text


def test_an_evaluation_counts_its_rows(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=rows(7))
    assert made.num_examples(made.get_eval_dataloader()) == 7
    assert made.num_examples(made.get_train_dataloader()) == ROWS  # an ordinary one, before train()


@pytest.mark.parametrize("kind", [True, "all", "non_padding"])
def test_tokens_are_not_counted(tmp_path: Path, kind: Any) -> None:
    with refused("include_num_input_tokens_seen.* is not supported"):
        trainer(tmp_path, arguments={"include_num_input_tokens_seen": kind})
    made = trainer(tmp_path, arguments={"include_num_input_tokens_seen": "no"})
    made.args.include_num_input_tokens_seen = kind
    with refused("include_num_input_tokens_seen.* is not supported"):
        check_still_private(made)
    check_still_private(
        SimpleNamespace(accelerator=made.accelerator, args=SimpleNamespace(
            gradient_accumulation_steps=1, max_grad_norm=0.0))
    )  # fmt: skip  # of a version of transformers that has no such argument
