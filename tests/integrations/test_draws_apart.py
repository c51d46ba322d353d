"""No two steps that one ledger counts have the same draw, whatever began, ended or killed their runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastclip import FastPrivacyEngine
from tests.integrations.test_trainer import STEPS
from tests.integrations.tiny import ROWS, hf, integration, rows, trainer

SAVING = {"save_strategy": "steps", "save_steps": 2}
EPOCH = STEPS // 2


class Noted(integration.PrivateTrainer):
    """Keeps the numbers of the rows that were drawn for each step, in `drawn`."""

    def _make_private(self, loader: Any) -> Any:
        private = super()._make_private(loader)
        collate, self.drawn = private.collate_fn, []

        def note(drawn: list) -> Any:
            self.drawn.append(tuple(row["number"] for row in drawn))
            return collate(drawn)

        private.collate_fn = note
        return private


class EndEpochs(hf.TrainerCallback):
    """After every `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_epoch_stop = state.global_step % self.steps == 0


def process(
    folder: Path, resume: int | None = None, ledger: Path | None = None, *callbacks: Any,
    engine: FastPrivacyEngine | None = None, steps: int = STEPS, **arguments: Any,
) -> Any:  # fmt: skip
    """A run with data_seed in a process of its own, as far as fastclip can know: a new engine.

    Args:
        resume: the step of a checkpoint in the folder.
        ledger: the engine's file.
        steps: after which it is killed.
    """
    engine = engine or FastPrivacyEngine(accountant="rdp")
    if ledger is not None:
        engine.write_ahead(ledger)
    numbered = [{**row, "number": i} for i, row in enumerate(rows())]
    run = trainer(
        folder, arguments=SAVING | arguments, kind=Noted, engine=engine, train_dataset=numbered,
        noise_generator=None, callbacks=[*callbacks, Kill(steps)],
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        run.train(resume_from_checkpoint=resume and str(folder / f"checkpoint-{resume}"))
    if ledger is not None:
        engine.write_ahead(None)
    return run


class Kill(hf.TrainerCallback):
    """As a signal does, before a checkpoint of this step is written."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.steps < STEPS:
            raise KeyboardInterrupt


def taken(run: Any) -> int:
    return sum(steps for *_, steps in run.engine.accountant.history)


def apart(*drawn: list[tuple]) -> bool:
    """No draw of a step came in another: of 24 rows each with 1/3, by chance once in 10^5."""
    together = [draw for run in drawn for draw in run]
    assert all(set(draw) <= set(range(ROWS)) for draw in together)
    return len(set(together)) == len(together)


@pytest.mark.slow
def test_a_killed_run_draws_its_lost_steps_anew(tmp_path: Path) -> None:
    """The file of the ledger tells of them: resumed from a checkpoint before them, or begun again."""
    ledger = tmp_path / "ledger"
    killed = process(tmp_path, ledger=ledger, steps=5)
    assert (len(killed.drawn), taken(killed)) == (5, 5)
    resumed = process(tmp_path, 2, ledger)
    assert taken(resumed) == 5 + STEPS - 2
    anew = process(tmp_path, None, ledger)
    assert taken(anew) == 5 + STEPS - 2 + STEPS
    assert apart(killed.drawn, resumed.drawn[-4:], anew.drawn)


@pytest.mark.slow
def test_a_run_whose_ledger_is_the_checkpoint_s_goes_on(tmp_path: Path) -> None:
    """With the file of its ledger and without, in the middle of an epoch and at its end."""
    whole = process(tmp_path / "whole").drawn
    for killed, saved in ((2, 2), (4, 4)):
        folder, ledger = tmp_path / str(killed), tmp_path / f"ledger-{killed}"
        first = process(folder, None, ledger, CutAt(saved))
        second = process(folder, saved, ledger)
        assert first.drawn[:saved] + second.drawn[saved - STEPS :] == whole
        assert taken(second) == STEPS
        assert process(folder, saved).drawn[saved - STEPS :] == whole[saved:]


class CutAt(hf.TrainerCallback):
    """Training ends after a step, whose checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.mark.slow
def test_a_resumed_run_that_was_drawn_anew_can_be_resumed(tmp_path: Path) -> None:
    """Its checkpoints hold its own number: what follows is what it would have drawn."""
    ledger = tmp_path / "ledger"
    process(tmp_path, None, ledger, steps=3)
    whole = process(tmp_path, 2, ledger).drawn[-4:]
    rest = process(tmp_path, 4).drawn[-2:]
    assert rest == whole[2:]


def test_an_epoch_that_ends_early_does_not_come_again(tmp_path: Path) -> None:
    run = process(tmp_path, None, None, EndEpochs(2), save_strategy="no", num_train_epochs=3)
    assert len(run.drawn) == taken(run) == 6
    assert apart(run.drawn)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2])
def test_nor_when_its_run_is_resumed(tmp_path: Path, length: int) -> None:
    """Its place in the epochs, which the Trainer tells by its steps, is not where it was."""
    few, epochs = EndEpochs(length), {"num_train_epochs": 4}
    run = process(tmp_path, None, None, few, **epochs)
    assert len(run.drawn) == taken(run) == 4 * length
    assert apart(run.drawn)
    for saved in range(2, 4 * length, 2):
        more = process(tmp_path, saved, None, **epochs)
        assert more.state.global_step == 4 * EPOCH
        assert apart(run.drawn[:saved], more.drawn[saved - 4 * EPOCH :])


@pytest.mark.slow
def test_a_file_that_is_named_when_training_begins(tmp_path: Path) -> None:
    """As several processes must do, for it is kept by those that make_private knows."""
    ledger, engine = tmp_path / "ledger", FastPrivacyEngine(accountant="rdp")

    class Name(hf.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs) -> None:
            engine.write_ahead(ledger)

    killed = process(tmp_path, None, ledger, steps=4)
    again = process(tmp_path, None, None, Name(), engine=engine)
    engine.write_ahead(None)
    assert taken(again) == 4 + STEPS
    assert apart(killed.drawn, again.drawn)
